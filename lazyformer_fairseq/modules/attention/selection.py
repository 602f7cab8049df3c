"""Back-end selection: either the back end named by the user or, for ``auto``, the fastest one on this machine.

The first attention call of each shape times the back ends that support it, on the call's own queries, keys and values
(:mod:`lazyformer_fairseq.modules.timing`). If nothing is timed, the first back end in a fixed order is selected; it is
usually the fastest for this kind of call.
"""

import math
import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from lazyformer_fairseq.errors import UserError, nearest
from lazyformer_fairseq.modules.attention import BACK_ENDS, attend, back_ends
from lazyformer_fairseq.modules.attention.interface import NO_DROPOUT, AttentionCall, AttentionInputs
from lazyformer_fairseq.modules.attention.lazy_block import empty_rows
from lazyformer_fairseq.modules.attention.masks import visible_fraction
from lazyformer_fairseq.modules.processor import compute_capability
from lazyformer_fairseq.modules.timing import LARGEST_ERROR, SELECTOR, half_octaves

AUTO = "auto"
DEVICES = ("cpu", "cuda")
BACKENDS = tuple(BACK_ENDS)
MEMORY_FRACTION = 0.4  # the fraction of a device's memory that ``auto`` allows for the distributions of all sublayers
# With fewer multiply-adds of queries and keys, timing the back ends would take longer than running any of them.
MIN_MULTIPLY_ADDS_TO_TIME = 2**22
# The number of tokens per batch that are timed on a CPU. CPU back ends process sequences one after the other.
TOKENS = 2048
# Skipping masked pairs pays off with at least this many queries and at most this fraction of visible pairs.
FEWEST_MASKED = 256
SHARE_MASKED = 0.5


class Workload(NamedTuple):
    """A call and its context, which together determine the selected back end.

    Attributes:
        call: The computation.
        device: The device type.
        precision: The data type of the values.
        attentions: The number of sublayers in the network that compute a distribution.
    """

    call: AttentionCall
    device: str
    precision: torch.dtype
    attentions: int

    @property
    def multiply_adds(self) -> int:
        """The number of multiply-adds between all queries and all keys."""
        call = self.call
        size = max(call.query_size, call.value_size)
        return call.batch * call.heads * call.time * call.keys * size

    @property
    def share(self) -> float:
        """The fraction of query-key pairs that the mask shows; 1 without a mask."""
        call = self.call
        if call.mask is None:
            return 1.0
        return visible_fraction(call.mask, call.time, call.keys - call.num_extra, call.is_causal)

    @property
    def hides_most(self) -> bool:
        """True if the mask hides so many pairs that computing only the others pays off."""
        return self.share < SHARE_MASKED and self.call.time >= FEWEST_MASKED

    def shape(self) -> str:
        """Describe the class of calls that share a selected back end.

        Lengths, batch size and the visible fraction are rounded to half octaves, so similar calls have the same
        description.
        """
        call = self.call
        flags = {
            "bias": call.has_bias,
            "positions": call.has_positions,
            "dense": call.has_dense,
            "entmax": call.has_entmax,
            "given": call.has_given,
            "persistent": call.num_extra > 0,
            "causal": call.is_causal,
            "padding": call.is_padded,
            "dropout": call.dropout > 0,
        }
        stage = "inference"
        if call.is_training:
            stage = "training"
        parts = [stage, str(self.precision).removeprefix("torch.")]
        parts += [name for name, is_there in flags.items() if is_there]
        if call.consumers:
            parts.append(f"blocks of {call.consumers + 1}")
        else:
            parts.append("single layers")
        batch = half_octaves(call.batch)
        time = half_octaves(call.time)
        keys = half_octaves(call.keys)
        parts.append(f"about {batch:.0f} x {time:.0f} queries")
        parts.append(f"{keys:.0f} keys")
        parts.append(f"{call.heads} heads of {call.query_size}")
        if call.mask is not None:
            parts.append(f"{half_octaves(self.share):.2g} of them shown")
        return ", ".join(parts)


class BackEndSelector:
    """A selector of back ends for one forward pass. The same call always gets the same back end.

    Args:
        name: AUTO or the name of a back end in :data:`BACKENDS`.
        attentions: The number of sublayers in the network that compute a distribution.
    """

    def __init__(self, name: str, attentions: int):
        self.name = name
        self.attentions = attentions
        self._selected: dict[Workload, str] = {}

    def __call__(self, given: AttentionInputs) -> str:
        """Return the name of the back end for an attention call."""
        if self.name != AUTO:
            return self.name
        if given.q_BNTD.is_meta:
            return "eager"
        workload = Workload(AttentionCall.of(given), given.device, given.dtype, self.attentions)
        if torch.compiler.is_compiling() or torch.jit.is_tracing():  # sizes would become constants in the graph
            return fixed_order(workload, knows_sizes=False)[0]
        if workload not in self._selected:
            self._selected[workload] = _select(workload, given)
        return self._selected[workload]


def check_back_end(name: str, attention_dropout: float) -> None:
    """Check the name of a back end.

    Raises:
        UserError: If the name is unknown, or the model has attention dropout and the back end does not support it on
            one of the devices.
    """
    if name == AUTO:
        return
    if name not in BACKENDS:
        known = (AUTO, *BACKENDS)
        raise UserError(f"--attention-backend {name}: choose from {', '.join(known)}{nearest(name, known)}")
    if not attention_dropout:
        return
    call = AttentionCall(dropout=attention_dropout)
    reasons = [BACK_ENDS[name].why_not(call, device, torch.float32) for device in DEVICES]
    if NO_DROPOUT in reasons:
        raise UserError(f"--attention-backend {name}: {NO_DROPOUT}, or a different back end")


def _select(workload: Workload, given: AttentionInputs) -> str:
    """Return the fastest back end that fits into memory, or the first one in the fixed order if nothing is timed."""
    names = [name for name in fixed_order(workload) if _fits(name, workload)]
    if not names:
        return "eager"
    is_real = type(given.q_BNTD) is Tensor
    if len(names) < 2 or not is_real or workload.multiply_adds < MIN_MULTIPLY_ADDS_TO_TIME:
        return names[0]
    call = workload.call
    shape = f"attention, {workload.shape()}: {' or '.join(sorted(names))}"
    found = SELECTOR.known_fastest(workload.device, shape)
    if found in names:
        return found
    if not SELECTOR.is_worth_timing(shape, call.is_training, len(names), workload.attentions):
        return names[0]
    if call.dropout:
        largest_error = math.inf
    else:
        largest_error = LARGEST_ERROR[workload.precision]
    prepare = _prepare(workload, given)
    return SELECTOR.select(workload.device, shape, names, prepare, largest_error)


def fixed_order(workload: Workload, knows_sizes: bool = True) -> list[str]:
    """Return the candidate back ends for a workload, starting with the one that is usually the fastest.

    On a CPU without dropout, ``recompute`` is not a candidate if additions to the scores are learned, because it would
    write the distribution to memory or fall back to ``fused``. With dropout, ``eager`` is faster for a lazy block,
    because it keeps the distribution for the consumers.

    Args:
        workload: The workload.
        knows_sizes: Whether the order may depend on sizes.
    """
    call = workload.call
    if workload.device == "cpu":
        order = _order_on_processor(workload, knows_sizes)
    else:
        order = _order_on_gpu(workload)
    found = []
    for name in order:
        reason = BACK_ENDS[name].why_not(call, workload.device, workload.precision)
        if reason is None:
            found.append(name)
    return found


def _order_on_gpu(workload: Workload) -> list[str]:
    if workload.call.learns_additions:
        order = ["fused", "recompute", "eager"]
        if workload.device == "cuda" and not _torch_fuses(workload):
            order.remove("recompute")  # torch would write the distribution to memory
    else:
        order = ["recompute", "fused", "eager"]
    if workload.call.mask is not None:
        return ["flex", *order]
    return order


def _order_on_processor(workload: Workload, knows_sizes: bool) -> list[str]:
    call = workload.call
    learns = call.learns_additions
    hides_most = knows_sizes and workload.hides_most
    is_tiny = knows_sizes and workload.multiply_adds < MIN_MULTIPLY_ADDS_TO_TIME
    if call.dropout and (call.consumers or learns):
        order = ["eager", "recompute"]
    elif call.dropout:
        order = ["recompute", "eager"]
    elif hides_most and call.consumers:
        order = ["materialize", "fused", "eager"]
    elif hides_most:
        order = ["fused", "materialize", "eager"]
    elif learns and is_tiny:
        order = ["eager"]
    elif learns:
        order = ["materialize", "fused", "eager"]
    elif call.is_training and call.consumers and not is_tiny:
        order = ["materialize", "fused", "recompute", "eager"]
    else:
        order = ["recompute", "materialize", "fused", "eager"]
    return order


def _torch_fuses(workload: Workload) -> bool:
    """Return whether torch has a fused GPU kernel for a workload with learned additions to the scores."""
    if torch.cuda.is_available():
        capability = compute_capability()
    else:
        capability = (8, 0)
    return back_ends.has_kernel(workload.precision, workload.call.query_size, capability)


def _fits(name: str, workload: Workload) -> bool:
    """Return whether the T x K matrices that a back end writes in all sublayers fit into the allowed memory."""
    call = workload.call
    matrix = call.heads * call.time * call.keys
    distributions = call.batch * matrix
    if call.is_training:
        distributions *= workload.attentions
    additions = 0
    if call.has_positions or call.has_dense:
        additions = distributions
    elif call.mask is not None or (call.has_bias and call.is_padded):
        additions = call.batch * matrix
    elif call.has_bias:
        additions = matrix
    written = {
        "eager": distributions,
        "materialize": distributions * workload.share,
        "recompute": additions,
        "fused": 0,
        "flex": 2 * distributions * call.has_positions,  # scores by distance, in float32
    }
    size = written[name] * workload.precision.itemsize
    return size <= MEMORY_FRACTION * memory_of(workload.device)


def sequences_to_time(workload: Workload) -> int:
    """Return the number of sequences per batch used to time back ends."""
    call = workload.call
    if workload.device == "cuda":
        return call.batch
    return min(call.batch, max(1, TOKENS // call.time))


def _prepare(workload: Workload, given: AttentionInputs) -> Callable[[str], Callable[[], Sequence[Tensor]]]:
    """Return a function that maps the name of a back end to the computation to time.

    The computation is a block's forward pass and, during training, its backward pass, on the first sequences of the
    batch.
    """
    call = workload.call
    count = sequences_to_time(workload)
    device = given.device
    is_autocast = torch.is_autocast_enabled(device)
    autocast_dtype = torch.get_autocast_dtype(device)
    if device == "cuda":
        devices = [given.q_BNTD.device]
    else:
        devices = []

    def first_of(part: Tensor) -> Tensor:
        return part[:count].detach().requires_grad_(call.is_training)

    def prepare(name: str) -> Callable[[], Sequence[Tensor]]:
        q_BNTD = first_of(given.q_BNTD)
        k_BNKD = first_of(given.k_BNKD)
        v_BNKD = first_of(given.v_BNKD)
        first_scores = given.scores.first_sequences(count)
        leaves = [q_BNTD, k_BNKD, v_BNKD]
        leaves += [part for part in first_scores.learned if part is not None and part.requires_grad]
        generator = torch.Generator(given.q_BNTD.device).manual_seed(1)
        gradient = empty_rows(q_BNTD.detach(), given.v_BNKD).normal_(generator=generator)

        def compute() -> Sequence[Tensor]:
            with (
                torch.set_grad_enabled(call.is_training),
                torch.autocast(device, autocast_dtype, is_autocast),
                torch.random.fork_rng(devices),
            ):
                fresh = replace(first_scores)  # a copy with an empty cache
                first = AttentionInputs(q_BNTD, k_BNKD, v_BNKD, fresh, call.dropout, call.consumers)
                output, reusable = attend(first, name)
                outputs = [output]
                for _ in range(call.consumers):
                    outputs.append(reusable.attend(v_BNKD, call.dropout))
                if not call.is_training:
                    return outputs
                d_outputs = [gradient.to(output.dtype)] * len(outputs)
                gradients = torch.autograd.grad(outputs, leaves, d_outputs, allow_unused=True)
            results = [output.detach() for output in outputs]
            results += [each for each in gradients if each is not None]
            return results

        return compute

    return prepare


def memory_of(device: str) -> int:
    """Return a device's total memory in bytes.

    Total rather than free memory is used, because the selection must not depend on other running processes.
    """
    if device == "cuda":
        return torch.cuda.get_device_properties().total_memory
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
