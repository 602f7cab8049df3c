"""What the backward pass computes anew in place of keeping it: gradient checkpointing, and reversible layers.

Both work on *runs* of sublayers that hand nothing on to other runs: a lazy block, an ``s`` with all that read from it,
is one. So no distribution outlives its run.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from copy import copy
from dataclasses import replace
from typing import Any, Optional

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import get_device_states, set_device_states

from lazyformer_fairseq.modules.sublayers.interface import Context, SharedState
from lazyformer_fairseq.patterns.grammar import PlannedSublayer, places_read

Branch = Callable[..., tuple[Tensor, list[Tensor]]]
Unit = tuple[Sequence[nn.Module], Any]  # a run of sublayers, and their memory or None


def runs_of(sublayers: Sequence[PlannedSublayer]) -> list[list[int]]:
    """Places of a plan, in the shortest runs of which none reads from another."""
    read = places_read(sublayers)
    last_reader = {giver: place for place, giver in enumerate(read) if giver is not None}
    found: list[list[int]] = []
    end = -1  # of the run so far
    for place in range(len(read)):
        if place > end:
            found.append([])
        found[-1].append(place)
        end = max(end, last_reader.get(place, place))
    return found


def segments_of(sublayers: Sequence[PlannedSublayer], direction: str) -> list[list[int]]:
    """The same, each with the sublayer of one token at a time that follows what mixes tokens: layers, mostly."""
    mixes = [each.kind.reads is not None or each.kind.module(direction).attends for each in sublayers]
    found: list[list[int]] = []
    for run in runs_of(sublayers):
        if found and len(run) == 1 and mixes[found[-1][-1]] and not mixes[run[0]]:
            found[-1] += run
        else:
            found.append(run)
    return found


def keeping(shared: Context) -> Context:
    """The same for checkpoints: what sublayers write for all others they write once, and autograd keeps it."""
    shared = unwritten(shared)
    parts = [shared.scores, *(() if shared.documents is None else shared.documents.scores)]
    for scores in parts:
        scores.outlasts_checkpoints = True
    return shared


def unwritten(shared: Context) -> Context:
    """The same without what sublayers have written for this pass."""
    documents = shared.documents
    if documents is not None:
        documents = copy(documents)
        documents.scores = [replace(scores) for scores in documents.scores]
    return shared._replace(scores=replace(shared.scores), documents=documents)


def add_up(
    sublayers: Sequence[nn.Module],
    x_BTC: Tensor,
    shared: Context,
    memory: Any = None,
) -> tuple[Tensor, list[Tensor]]:
    """What a run adds to its input: the sum of what its sublayers add, each to what is below it.

    Args:
        memory: a :class:`~lazyformer_fairseq.modules.networks.stack.StreamMemory` of the run's attending sublayers.

    Returns:
        The sum (B, T, C), and the input of each sublayer.
    """
    added: Optional[Tensor] = None
    below: SharedState = {}
    inputs = []
    attended = 0
    for sublayer in sublayers:
        if added is None:
            x = x_BTC
        else:
            x = x_BTC + added
        inputs.append(x)
        if memory is not None and sublayer.attends:
            remembered = memory.before(attended, x)
        else:
            remembered = None
        attended += sublayer.attends
        y, handed_on = sublayer.branch(x, below, shared, remembered)
        added = y if added is None else added + y
        below = {**below, **handed_on}
    return added, inputs


def run_reversible(
    units: Sequence[Unit],
    x_BTC: Tensor,
    shared: Context,
    branch: Branch,
    keeps: bool,
) -> tuple[Tensor, list[Tensor]]:
    """Two streams, both of which begin as x: each unit adds to one what it makes of the other (Reformer, section 3).

    x1, x2 = x2, x1 + F(x2): of attention and feed-forward in turn, that is the paper's y1 = x1 + attention(x2) and
    y2 = x2 + feed-forward(y1). The output is the mean of both, of the same width. Streams are in single precision or
    better: what half precision rounds away could not be subtracted.

    Args:
        units: each with the memory of its attending sublayers, or None.
        branch: :func:`add_up`, or the same compiled.
        keeps: whether autograd keeps what units make; else the backward pass undoes them.

    Returns:
        The output (B, T, C), and the input of each sublayer, without a gradient unless autograd keeps it.
    """
    start = x_BTC.to(torch.promote_types(x_BTC.dtype, torch.float32))
    streams = (start, start)
    inputs = []
    if keeps or not torch.is_grad_enabled():
        for sublayers, past in units:
            added, found = branch(sublayers, streams[1].to(x_BTC.dtype), shared, past)
            streams = streams[1], streams[0] + added
            inputs += found
    else:
        weights = [each for sublayers, _ in units for layer in sublayers for each in layer.parameters()]
        leaves = {id(each): each for each in (*weights, *_shared_weights(shared)) if each.requires_grad}
        streams = _Reversible.apply(units, shared, branch, x_BTC.dtype, inputs, *streams, *leaves.values())
    return ((streams[0] + streams[1]) / 2).to(x_BTC.dtype), inputs


def _shared_weights(shared: Context) -> list[Tensor]:
    """What a pass shares and learns: T5's table, Transformer-XL's u and v."""
    if shared.documents is None:
        documents = ()
    else:
        documents = shared.documents.scores
    parts = [part for scores in (shared.scores, *documents) for part in scores.learned]
    return [part for part in (*parts, *(shared.positions or ())) if part is not None]


class _Reversible(torch.autograd.Function):
    """Keeps the last two streams, and the state of random numbers before each unit; undoes the units one by one."""

    @staticmethod
    def forward(
        ctx: Any,
        units,
        shared,
        branch,
        dtype,
        inputs: list[Tensor],
        *tensors: Tensor,
    ) -> tuple[Tensor, Tensor]:
        first, second, *leaves = tensors
        ctx.units = units
        ctx.shared = shared
        ctx.branch = branch
        ctx.dtype = dtype
        ctx.chances = []
        kind = first.device.type
        ctx.autocast = kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind)
        for unit in units:
            ctx.chances.append((torch.get_rng_state(), *get_device_states(first)))
            added, _, found = _with_graph(branch, unit, second, dtype, shared)
            inputs += [each.detach() for each in found]
            first, second = second, first + added.detach()
            del added, found
        ctx.save_for_backward(first, second, *leaves)
        return first, second

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_first: Tensor, d_second: Tensor) -> tuple[Optional[Tensor], ...]:
        first, second, *leaves = ctx.saved_tensors
        gradients: list[Optional[Tensor]] = [None] * len(leaves)
        for unit, chance in zip(reversed(ctx.units), reversed(ctx.chances), strict=True):
            with _same_chance(*chance), torch.autocast(*ctx.autocast):
                added, x, _ = _with_graph(ctx.branch, unit, first, ctx.dtype, ctx.shared)
            d_x, *found = torch.autograd.grad(added, [x, *leaves], d_second.to(added.dtype), allow_unused=True)
            first, second = second - added.detach(), first
            d_first, d_second = d_second, d_first + d_x
            del added, x, d_x
            gradients = [_sum(*both) for both in zip(gradients, found, strict=True)]
        return *[None] * 5, d_first, d_second, *gradients


def _with_graph(
    branch: Branch,
    unit: Unit,
    stream: Tensor,
    dtype: torch.dtype,
    shared: Context,
) -> tuple[Tensor, Tensor, list[Tensor]]:
    """What a unit adds, and the input and the inputs that it is a graph of.

    In the forward pass too, where nothing of it stays: without a graph back ends may compute, and drop out, otherwise.
    """
    with torch.enable_grad():
        x = stream.detach().to(dtype).requires_grad_()
        sublayers, past = unit
        added, inputs = branch(sublayers, x, unwritten(shared), past)
    return added, x, inputs


def _sum(one: Optional[Tensor], other: Optional[Tensor]) -> Optional[Tensor]:
    if other is None:
        return one
    if one is None:
        return other
    return one + other


@contextmanager
def _same_chance(of_processor: Tensor, devices: list[int], of_devices: list[Tensor]) -> Iterator[None]:
    """Random numbers as they were; after the block they are what they were before it."""
    with torch.random.fork_rng(devices):
        torch.set_rng_state(of_processor)
        set_device_states(devices, of_devices)
        yield
