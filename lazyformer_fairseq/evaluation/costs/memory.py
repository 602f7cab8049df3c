"""Memory of a training update, measured: torch's MemTracker follows an update of fake tensors, which hold no numbers.

A fake tensor has a shape, a precision and a storage of known size, so a model of any size is measured in seconds on any
machine. For GPUs, :class:`_GpuKernels` replaces the two functions that they compute by other kernels than a processor.
Operators of our own count by what they return. What they need for a moment inside, what libraries hold (CUDA's context,
cuBLAS, MKL) and what an allocator cannot use of what it holds are left out.
"""

from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
    UnsupportedOperatorException,
)
from torch.distributed._tools.mem_tracker import MemTracker
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.modules.networks.causal_lm import CausalLM
from lazyformer_fairseq.modules.networks.masked_lm import MaskedLM
from lazyformer_fairseq.modules.networks.options import CausalLMOptions, MaskedLMOptions
from lazyformer_fairseq.modules.networks.stack import StreamMemory

SINGLE = 4  # bytes of a number in single precision, in which optimizers work
DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


@dataclass(frozen=True)
class Batch:
    """What one process computes at once.

    Attributes:
        sequences: B, or streams of a causal model.
        tokens: T, of a sequence.
        predicted: tokens of the batch that the head of a masked language model predicts.
        memory: M, tokens of each stream that a causal model remembers.
        is_permuted: whether the tokens of a sequence come in any order, with their positions and turns.
    """

    sequences: int
    tokens: int
    predicted: int = 0
    memory: int = 0
    is_permuted: bool = False


@dataclass(frozen=True)
class UpdateMemory:
    """Bytes of an update of one process.

    Attributes:
        weights: in the precision of the model.
        gradients: of all weights, in the same precision, and the copy that processes send each other.
        optimizer: two moments, Adam's or LAMB's, or one of a matrix that Muon updates; in half precision also the
            weights and their gradients in single precision.
        carried: what streams remember from one update to the next.
        activations: all else that is there at the peak of the update.
        peak: the most that is there at once.
    """

    weights: int
    gradients: int
    optimizer: int
    carried: int
    activations: int
    peak: int


def measure_update_memory(
    options: MaskedLMOptions | CausalLMOptions,
    vocab_size: int,
    batch: Batch,
    precision: str = "fp32",
    device: str = "cpu",
    accumulates: bool = False,
    processes: int = 1,
    single_moments: int = 0,
    elsewhere: int = 0,
) -> UpdateMemory:
    """Return the memory of an update: forward pass, loss, backward pass and a step of a fused optimizer.

    Args:
        options: of the model, among them its back end of attention.
        vocab_size: V.
        batch: of one process.
        precision: a key of :data:`DTYPES`.
        device: type of the device, ``cuda`` or ``cpu``, which need not be there.
        accumulates: whether gradients of an earlier batch of the same update are there.
        processes: of the training; several hold a copy of their gradients, which they send each other.
        single_moments: parameters of which the optimizer keeps one moment, not two.
        elsewhere: parameters of experts that other processes hold.

    Raises:
        UserError: the model cannot be built, or its computation depends on the numbers in its tensors.
    """
    tracked = _track(options, vocab_size, batch, DTYPES[precision], device, accumulates)
    here = 1 - elsewhere / tracked.parameters  # of weights, gradients and moments
    weights = round(here * tracked.weights)
    gradients = round(here * tracked.gradients)
    if processes > 1:
        sent = weights
    else:
        sent = 0
    if precision == "fp32":
        in_single_precision = 2
    else:
        in_single_precision = 4
    optimizer = round(here * SINGLE * in_single_precision * tracked.parameters) - SINGLE * single_moments
    constant = weights + sent + optimizer + tracked.carried
    return UpdateMemory(
        weights=weights,
        gradients=weights + sent,
        optimizer=optimizer,
        carried=tracked.carried,
        activations=tracked.activations,
        peak=constant + max(weights, gradients + tracked.activations),
    )


@dataclass(frozen=True)
class _Tracked:
    """What was tracked of forward and backward pass.

    Attributes:
        parameters: their number.
        weights, carried: bytes.
        gradients: bytes of those that are there at the peak.
        activations: bytes of all else at the peak.
    """

    parameters: int
    weights: int
    carried: int
    gradients: int
    activations: int


class _PeakTracker(MemTracker):
    """torch's tracker without its statistics of each module, which take most of its time."""

    def _pre_fw_hook(self, *of_module: Any) -> None:
        """Ignore a module that begins or ends."""

    _post_fw_hook = _pre_bw_hook = _post_bw_hook = _pre_fw_hook


def _track(
    options: MaskedLMOptions | CausalLMOptions,
    vocab_size: int,
    batch: Batch,
    dtype: torch.dtype,
    device: str,
    accumulates: bool,
) -> _Tracked:
    usual = torch.get_default_dtype()
    with FakeTensorMode(), _GpuKernels() if device == "cuda" else nullcontext():
        torch.set_default_dtype(dtype)
        try:
            if isinstance(options, CausalLMOptions):
                build = CausalLM
            else:
                build = MaskedLM
            model = build(options, vocab_size).train()
        finally:
            torch.set_default_dtype(usual)

        memory = StreamMemory()
        if batch.memory:
            attending = sum(sublayer.attends for sublayer in model.decoder.sublayers)
            shape = batch.sequences, batch.memory, model.decoder.embed_dim
            memory.states = [torch.empty(shape, dtype=dtype) for _ in range(attending)]
        if accumulates:
            for weight in model.parameters():
                weight.grad = torch.zeros_like(weight)

        tracker = _PeakTracker()
        tracker.track_external(model, *memory.states)
        try:
            with tracker:
                if isinstance(model, CausalLM):
                    loss_of = _causal_loss
                else:
                    loss_of = _masked_loss
                _run_backward(loss_of(model, batch, vocab_size, memory))
        except (DataDependentOutputException, DynamicOutputShapeException, UnsupportedOperatorException) as error:
            raise UserError(f"the memory of {options.sublayer_pattern} is not known before it runs: {error}") from error
        peak = next(iter(tracker.get_tracker_snapshot("peak").values()))
        at_peak = {reference.name: held for reference, held in peak.items() if reference != "Total"}
    weights = sum(weight.nbytes for weight in model.parameters())
    carried = sum(state.nbytes for state in memory.states)
    return _Tracked(
        parameters=sum(weight.numel() for weight in model.parameters()),
        weights=weights,
        carried=carried,
        gradients=at_peak["GRAD"],
        activations=peak["Total"] - at_peak["GRAD"] - weights - carried,
    )


def _masked_loss(model: MaskedLM, batch: Batch, vocab_size: int, memory: StreamMemory) -> Tensor:
    shape = batch.sequences, batch.tokens
    tokens = torch.randint(vocab_size, shape)
    places = torch.arange(batch.predicted)
    permuted = {}
    if batch.is_permuted:
        permuted = {"positions": torch.zeros_like(tokens), "turns": torch.zeros(shape[0], 3, shape[1]).long()}
    logits, _ = model(tokens, masked_tokens=places, has_padding=False, **permuted)
    return F.cross_entropy(logits.float(), tokens.flatten()[places], reduction="sum")


def _causal_loss(model: CausalLM, batch: Batch, vocab_size: int, memory: StreamMemory) -> Tensor:
    tokens = torch.randint(vocab_size, (batch.sequences, batch.tokens))
    nll, _ = model(tokens, memory=memory if batch.memory else None, target=tokens)
    return nll.sum()


def _run_backward(loss: Tensor) -> None:
    """Compute all gradients.

    torch.autograd.backward itself would leave :class:`_GpuKernels` before what activation checkpointing computes again,
    so that it would not be what was computed at first.
    """
    torch.autograd.graph._engine_run_backward(
        (loss,),
        (torch.ones_like(loss),),
        False,  # keep_graph
        False,  # create_graph
        (),
        allow_unreachable=True,
        accumulate_grad=True,
    )


class _GpuKernels(TorchFunctionMode):
    """Dropout and attention as a GPU computes them, on a processor's tensors.

    A GPU's dropout keeps a mask of booleans where a processor's keeps what it multiplied by. Its attention is fused
    also where additions to scores learn, or the distribution goes through dropout; a processor would write it out.
    """

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call the function or the one that takes its place."""
        if function is F.dropout:
            return _dropout(*args, **kwargs)
        if function is F.scaled_dot_product_attention:
            return _fused_attention(*args, **kwargs)
        return function(*args, **(kwargs or {}))


def _dropout(x: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    if not training or p == 0:
        return x
    return torch.native_dropout(x, p, train=True)[0]


def _fused_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Any = None,
    dropout_p: float = 0.0,
    **how: Any,
) -> Tensor:
    if attn_mask is not None:
        if attn_mask.dtype == torch.bool:
            attn_mask = torch.zeros_like(attn_mask, dtype=q.dtype).masked_fill(~attn_mask, float("-inf"))
        attn_mask = attn_mask.expand(*q.shape[:-1], k.size(-2))
    fused = torch.ops.aten._scaled_dot_product_efficient_attention
    return fused(q, k, v, attn_mask, compute_log_sumexp=True, dropout_p=dropout_p, **how)[0]
