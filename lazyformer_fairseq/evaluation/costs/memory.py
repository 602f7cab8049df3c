"""The memory use of a training update, measured by running an update on fake tensors, which contain no data.

A fake tensor has a shape, a dtype and a storage of known size, so a model of any size can be measured in seconds on any
machine. torch's MemTracker does the same, but it overcounts if one backward pass runs another, as in reversible layers,
and importing it takes seconds.

For GPUs, :class:`_GpuKernels` replaces the two functions that use different kernels on GPUs than on CPUs. For our own
operators, only the returned tensors are counted. Temporary buffers, library memory (CUDA's context, cuBLAS, MKL) and
allocator fragmentation are not counted.
"""

import weakref
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
    UnsupportedOperatorException,
)
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.evaluation.costs.machine import PRECISIONS
from lazyformer_fairseq.modules.networks.causal_decoder import CausalDecoder
from lazyformer_fairseq.modules.networks.causal_lm import CausalLM
from lazyformer_fairseq.modules.networks.masked_lm import MaskedLM
from lazyformer_fairseq.modules.networks.named import network
from lazyformer_fairseq.modules.networks.options import Options
from lazyformer_fairseq.modules.networks.stream_memory import StreamMemory

SINGLE = 4  # bytes per fp32 number; optimizers run in fp32


@dataclass(frozen=True)
class Batch:
    """A batch for one forward pass of one process.

    Attributes:
        sequences: B, the number of sequences, or streams for a causal model.
        tokens: T, the number of tokens per sequence.
        predicted: the number of tokens in the batch that a masked language model's head predicts.
        memory: M, the number of tokens per stream that a causal model remembers.
        is_permuted: whether the tokens of a sequence are permuted and come with their positions and order.
    """

    sequences: int
    tokens: int
    predicted: int = 0
    memory: int = 0
    is_permuted: bool = False


@dataclass(frozen=True)
class UpdateMemory:
    """The memory of one process during an update, in bytes.

    Attributes:
        weights: the weights, in the model's precision.
        gradients: the gradients of all weights, in the model's precision, and the copies of them that the processes
            exchange.
        optimizer: the moments, of which Adam and LAMB keep two per weight, and Muon keeps one per weight of a matrix;
            in half precision, also fp32 copies of the weights and gradients.
        carried: the stream states carried from one update to the next.
        activations: everything else that exists when the update's memory use peaks.
        peak: the update's peak memory.
    """

    weights: int
    gradients: int
    optimizer: int
    carried: int
    activations: int
    peak: int


def measure_update_memory(
    options: Options,
    vocab_size: int,
    batch: Batch,
    *,
    precision: str = "fp32",
    device: str = "cpu",
    accumulates: bool = False,
    processes: int = 1,
    single_moment_parameters: int = 0,
    elsewhere: int = 0,
) -> UpdateMemory:
    """Measure the memory of an update: forward pass, loss, backward pass and a step of a fused optimizer.

    Args:
        options: the model's options, including its attention back end.
        vocab_size: V.
        batch: one process's batch.
        precision: a key of :data:`PRECISIONS`.
        device: the device type, ``cuda`` or ``cpu``; the machine need not have such a device.
        accumulates: whether gradients from an earlier batch of the same update already exist.
        processes: the run's number of processes; with more than one, each stores a copy of its gradients for exchange.
        single_moment_parameters: the number of parameters with one optimizer moment instead of two.
        elsewhere: the number of expert parameters that are stored in other processes.

    Raises:
        UserError: the model cannot be built, or its computation depends on tensor values.
    """
    usual = torch.get_default_dtype()
    with FakeTensorMode(), _GpuKernels() if device == "cuda" else nullcontext():
        torch.set_default_dtype(PRECISIONS[precision])
        try:
            model = network(options, vocab_size).train()
        finally:
            torch.set_default_dtype(usual)
        tracker = _Tracker()
        parameters = sum(weight.numel() for weight in model.parameters())
        all_weights = sum(tracker.hold(weight) for weight in model.parameters())

        memory = StreamMemory()
        if batch.memory:
            decoder = cast(CausalDecoder, model.decoder)
            attending = sum(bool(sublayer.attends) for sublayer in decoder.sublayers)
            shape = (batch.sequences, batch.memory, decoder.embed_dim)
            memory.states = [torch.empty(shape, dtype=PRECISIONS[precision]) for _ in range(attending)]
        carried = sum(map(tracker.hold, memory.states))

        for weight in (each for each in model.parameters() if each.requires_grad):
            if accumulates:
                weight.grad = torch.zeros_like(weight)
                tracker.gradients += tracker.hold(weight.grad)
            else:
                weight.register_post_accumulate_grad_hook(tracker.count_gradient)
        try:
            with tracker:
                _run_backward(_loss(model, batch, vocab_size, memory))
        except (DataDependentOutputException, DynamicOutputShapeException, UnsupportedOperatorException) as error:
            raise UserError(
                f"the memory use of {options.sublayer_pattern} cannot be determined without running the model: {error}"
            ) from error

    here = 1 - elsewhere / parameters  # fraction of weights, gradients and moments in this process
    weights = round(here * all_weights)
    sent = weights if processes > 1 else 0
    numbers_per_parameter = 2 if precision == "fp32" else 4
    optimizer = round(here * SINGLE * numbers_per_parameter * parameters) - SINGLE * single_moment_parameters
    activations = tracker.peak - tracker.gradients_at_peak - all_weights - carried
    gradients_at_peak = round(here * tracker.gradients_at_peak)
    constant = weights + sent + optimizer + carried
    return UpdateMemory(
        weights=weights,
        gradients=weights + sent,
        optimizer=optimizer,
        carried=carried,
        activations=activations,
        peak=constant + max(weights, gradients_at_peak + activations),
    )


class _Tracker(TorchDispatchMode):
    """A tracker of the total bytes in all storages, which adds new tensors and subtracts freed ones.

    Attributes:
        held, gradients: the bytes currently allocated, and how many of them are weight gradients.
        peak, gradients_at_peak: the same at the time of the peak.
    """

    def __init__(self) -> None:
        super().__init__()
        self.held = 0
        self.gradients = 0
        self.peak = 0
        self.gradients_at_peak = 0
        self._sizes: dict[int, int] = {}

    def hold(self, tensor: Tensor) -> int:
        """Count a tensor until it is freed, and return its size in bytes; 0 if its storage is already counted."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._sizes:
            return 0
        self._sizes[key] = storage.nbytes()
        self.held += storage.nbytes()
        weakref.finalize(storage, self._release, key)
        return storage.nbytes()

    def _release(self, key: int) -> None:
        self.held -= self._sizes.pop(key)

    def count_gradient(self, weight: nn.Parameter) -> None:
        """Count a weight's new gradient."""
        assert weight.grad is not None, "the hook runs after the gradient has been accumulated"
        self.gradients += weight.grad.nbytes

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operator and count the tensors that it returns."""
        if operator is torch.ops.prim.device.default:  # by far the most frequent call
            return args[0].fake_device
        output = operator(*args, **(kwargs or {}))
        for each in tree_leaves(output):
            if isinstance(each, Tensor):
                self.hold(each)
        if self.held > self.peak:
            self.peak = self.held
            self.gradients_at_peak = self.gradients
        return output


def _loss(model: MaskedLM | CausalLM, batch: Batch, vocab_size: int, memory: StreamMemory) -> Tensor:
    tokens = torch.randint(vocab_size, (batch.sequences, batch.tokens))
    if isinstance(model, CausalLM):
        nll, _ = model(tokens, memory=memory if batch.memory else None, target=tokens)
        return nll.sum()
    places = torch.arange(batch.predicted)
    permuted = {}
    if batch.is_permuted:
        turns = torch.zeros(batch.sequences, 3, batch.tokens, dtype=torch.long)
        permuted = {"positions": torch.zeros_like(tokens), "turns": turns}
    logits, _ = model(tokens, masked_tokens=places, has_padding=False, **permuted)
    return F.cross_entropy(logits.float(), tokens.flatten()[places], reduction="sum")


def _run_backward(loss: Tensor) -> None:
    """Compute all gradients.

    torch.autograd.backward would exit :class:`_GpuKernels` before activation checkpointing recomputes the forward pass.
    The recomputation would then use different kernels than the original forward pass.
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
    """Dropout and attention on CPU tensors with the memory use of a GPU.

    On a GPU, dropout saves a boolean mask; on a CPU, it saves the factors that it multiplied by. On a GPU, attention is
    fused even if dropout is used or terms added to the scores need gradients; in these cases, a CPU would store the
    distribution.
    """

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call the function or its replacement."""
        if function is F.dropout:
            return _dropout(*args, **kwargs)
        if function is F.scaled_dot_product_attention:
            return _fused_attention(*args, **kwargs)
        return function(*args, **(kwargs or {}))


def _dropout(x: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:  # noqa: ARG001
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
