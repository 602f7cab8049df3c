"""Recomputation of activations in the backward pass: gradient checkpointing and reversible layers.

Both operate on *runs* of sublayers that share nothing with other runs except the residual stream. For example, an ``s``
and all sublayers that reuse its attention are in one run, so no attention distribution has to outlive its run.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from copy import copy
from dataclasses import replace
from typing import Any, NamedTuple, Optional, cast

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import get_device_states, set_device_states

from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.modules.compiled import compiled
from lazyformer_fairseq.modules.sublayers.feed_forward import ResidualSublayer
from lazyformer_fairseq.modules.sublayers.interface import Context, SharedState, StackOutput
from lazyformer_fairseq.patterns.grammar import PlannedSublayer, producer_indices
from lazyformer_fairseq.patterns.kinds import ENCODER


class Unit(NamedTuple):
    """Consecutive sublayers that are recomputed together.

    Attributes:
        sublayers: the modules, from bottom to top.
        past: one memory (B, M, C) per sublayer, where None stands for a sublayer without memory. If no memory is used
            at all, `past` itself is None.
    """

    sublayers: Sequence[nn.Module]
    past: Optional[Sequence[Optional[Tensor]]]


Branch = Callable[..., tuple[Tensor, list[Tensor]]]


def units_of(
    places: Sequence[Sequence[int]],
    sublayers: Sequence[nn.Module],
    past: Optional[Sequence[Optional[Tensor]]],
) -> list[Unit]:
    """Build one unit per group of sublayers.

    Args:
        places: the indices of the sublayers in each group.
        sublayers: all sublayers of the network.
        past: the memory of each sublayer; see :class:`Unit`.
    """
    units = []
    for group in places:
        of_group = None
        if past is not None:
            of_group = [past[place] for place in group]
        units.append(Unit([sublayers[place] for place in group], of_group))
    return units


def runs_of(sublayers: Sequence[PlannedSublayer]) -> list[list[int]]:
    """Split a plan into the shortest runs that do not read from each other; return each run's sublayer indices."""
    read = producer_indices(sublayers)
    last_reader = {giver: place for place, giver in enumerate(read) if giver is not None}
    found: list[list[int]] = []
    end = -1  # the last index of the current run
    for place in range(len(read)):
        if place > end:
            found.append([])
        found[-1].append(place)
        end = max(end, last_reader.get(place, place))
    return found


def segments_of(sublayers: Sequence[PlannedSublayer], direction: str) -> list[list[int]]:
    """Split a plan into segments, most of which are Transformer layers; return each segment's sublayer indices.

    A segment consists of one run. If that run ends with a sublayer that mixes tokens, and the next run is a single
    sublayer that does not mix tokens, the segment also includes the single sublayer.
    """
    mixes = [each.kind.reads is not None or each.kind.module(direction).attends for each in sublayers]
    found: list[list[int]] = []
    for run in runs_of(sublayers):
        is_tokenwise = len(run) == 1 and not mixes[run[0]]
        if is_tokenwise and found and mixes[found[-1][-1]]:
            found[-1] += run
        else:
            found.append(run)
    return found


def check_reversible(sublayers: Sequence[PlannedSublayer], direction: str, normalize_before: bool) -> None:
    """Raise a UserError if a network with these sublayers and norms cannot be reversible."""
    if not normalize_before:
        part = "encoder" if direction == ENCODER else "decoder"
        raise UserError(f"--reversible: a post-norm cannot be inverted; also set --{part}-normalize-before")
    for planned in sublayers:
        if not planned.kind.module(direction).is_residual:
            raise UserError(
                f"--reversible: {planned.text} has no residual connection; remove this sublayer from the pattern"
            )
        if planned.values.get("experts"):
            raise UserError(
                f"--reversible: {planned.text} would not learn to balance its experts; omit this option or the experts"
            )


def run_checkpointed(
    units: Sequence[Unit],
    x_BTC: Tensor,
    shared: Context,
    *,
    run: Callable[..., StackOutput],
    return_all: bool,
    checkpoint: Callable[..., StackOutput],
    keeps_cache: bool,
) -> StackOutput:
    """Run units under gradient checkpointing: autograd keeps only their inputs.

    Args:
        units: the units, from bottom to top.
        x_BTC: the input of the first unit.
        shared: the context of the forward pass.
        run: :func:`~lazyformer_fairseq.modules.networks.stack.run_sublayers` or a compiled version of it.
        return_all: whether to also return the input and the outputs of all sublayers.
        checkpoint: a function that calls another function under checkpointing: (function, *arguments) -> its result.
        keeps_cache: whether the values that sublayers cache in the context are kept until the backward pass. If False,
            each unit computes these values again, as compiled graphs require.
    """
    if keeps_cache:
        shared = with_empty_cache(shared)
        of_documents = () if shared.documents is None else shared.documents.scores
        for scores in (shared.scores, *of_documents):
            scores.outlasts_checkpoints = True

    def run_unit(unit: Unit, x_BTC: Tensor) -> StackOutput:
        context = shared if keeps_cache else with_empty_cache(shared)
        return run(unit.sublayers, unit.past, x_BTC, context, return_all)

    states = [x_BTC] if return_all else []
    attended = []
    for unit in units:
        output = checkpoint(run_unit, unit, x_BTC)
        x_BTC = output.x_BTC
        states += output.states[1:]
        attended += output.attended
    return StackOutput(x_BTC, states, attended)


def with_empty_cache(shared: Context) -> Context:
    """Return a copy of the context without the values that sublayers have cached in it during this forward pass."""
    documents = shared.documents
    if documents is not None:
        documents = copy(documents)
        documents.scores = [replace(scores) for scores in documents.scores]
    return shared._replace(scores=replace(shared.scores), documents=documents)


def residual_update(unit: Unit, x_BTC: Tensor, shared: Context) -> tuple[Tensor, list[Tensor]]:
    """Return a unit's residual update (B, T, C), summed over its sublayers, and the input of each sublayer."""
    added: Optional[Tensor] = None
    below: SharedState = {}
    inputs = []
    for place, sublayer in enumerate(unit.sublayers):
        x = x_BTC
        if added is not None:
            x = x_BTC + added
        inputs.append(x)
        past = None
        if unit.past is not None:
            past = unit.past[place]
        if past is not None:
            past = past.to(x)
        y, handed_on = cast(ResidualSublayer, sublayer).branch(x, below, shared, past)
        if added is None:
            added = y
        else:
            added = added + y
        below = {**below, **handed_on}
    assert added is not None, "a unit has sublayers"
    return added, inputs


def run_reversible(
    units: Sequence[Unit],
    x_BTC: Tensor,
    shared: Context,
    is_compiled: bool,
    return_all: bool,
) -> StackOutput:
    """Run units as reversible layers on two streams, both initialized to x (Reformer, section 3).

    Each unit F computes x1, x2 = x2, x1 + F(x2). If attention and feed-forward alternate, this is the paper's y1 = x1 +
    attention(x2) and y2 = x2 + feed-forward(y1). The output is the mean of the two streams, so the width does not
    change. The streams are in float32 or higher precision, because subtraction cannot undo rounding errors in half
    precision.

    Args:
        units: the units, from bottom to top.
        x_BTC: the input of the first unit.
        shared: the context of the forward pass.
        is_compiled: whether to compile the units' residual branches.
        return_all: whether to also return the input of each sublayer and the output. Autograd then keeps all
            activations.
    """
    branch = residual_update
    if is_compiled:
        branch = compiled(residual_update)
    start = x_BTC.to(torch.promote_types(x_BTC.dtype, torch.float32))
    streams = (start, start)
    inputs: list[Tensor] = []
    if return_all or not torch.is_grad_enabled():
        for unit in units:
            added, found = branch(unit, streams[1].to(x_BTC.dtype), shared)
            streams = streams[1], streams[0] + added
            inputs += found
    else:
        weights: list[Tensor] = []
        for unit in units:
            for sublayer in unit.sublayers:
                weights += sublayer.parameters()
        weights += _shared_weights(shared)
        leaves = {id(weight): weight for weight in weights if weight.requires_grad}  # each shared weight only once
        streams = _Reversible.apply(units, shared, branch, x_BTC.dtype, inputs, *streams, *leaves.values())
    output = ((streams[0] + streams[1]) / 2).to(x_BTC.dtype)

    sublayers = [sublayer for unit in units for sublayer in unit.sublayers]
    attended = []
    if any(unit.past is not None for unit in units):
        attended = [x for x, sublayer in zip(inputs, sublayers, strict=True) if sublayer.attends]
    return StackOutput(output, [*inputs, output] if return_all else [], attended)


def _shared_weights(shared: Context) -> list[Tensor]:
    """Return the weights in a forward pass's context, such as T5's table or Transformer-XL's biases u and v."""
    of_documents = () if shared.documents is None else shared.documents.scores
    parts = [part for scores in (shared.scores, *of_documents) for part in scores.learned]
    return [part for part in (*parts, *(shared.positions or ())) if part is not None]


class _Reversible(torch.autograd.Function):
    """An autograd function for reversible layers.

    It saves the two final streams, and the random number generators' state before each unit. The backward pass inverts
    the units one by one.
    """

    @staticmethod
    def forward(
        ctx: Any,
        units: Sequence[Unit],
        shared: Context,
        branch: Branch,
        dtype: torch.dtype,
        inputs: list[Tensor],
        *tensors: Tensor,
    ) -> tuple[Tensor, Tensor]:
        first, second, *leaves = tensors
        ctx.units = units
        ctx.shared = shared
        ctx.branch = branch
        ctx.dtype = dtype
        ctx.rng_states = []
        device_type = first.device.type
        ctx.autocast = device_type, torch.get_autocast_dtype(device_type), torch.is_autocast_enabled(device_type)
        for unit in units:
            ctx.rng_states.append((torch.get_rng_state(), *get_device_states(first)))
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
        for unit, rng_state in zip(reversed(ctx.units), reversed(ctx.rng_states), strict=True):
            with _restored_rng_state(*rng_state), torch.autocast(*ctx.autocast):
                added, x, _ = _with_graph(ctx.branch, unit, first, ctx.dtype, ctx.shared)
            d_x, *found = torch.autograd.grad(
                outputs=added,
                inputs=[x, *leaves],
                grad_outputs=d_second.to(added.dtype),
                allow_unused=True,
            )
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
    """Compute a unit's residual update and record its autograd graph.

    The forward pass also records the graph, and discards it immediately: without a graph, back ends might take another
    code path and draw different dropout masks.

    Returns:
        The residual update; the unit's input, which is the root of the graph; and the inputs of the unit's sublayers.
    """
    with torch.enable_grad():
        x = stream.detach().to(dtype).requires_grad_()
        added, inputs = branch(unit, x, with_empty_cache(shared))
    return added, x, inputs


def _sum(one: Optional[Tensor], other: Optional[Tensor]) -> Optional[Tensor]:
    if other is None:
        return one
    if one is None:
        return other
    return one + other


@contextmanager
def _restored_rng_state(of_processor: Tensor, devices: list[int], of_devices: list[Tensor]) -> Iterator[None]:
    """Restore saved random number generator states inside a ``with`` block, and the current states after it.

    Args:
        of_processor: the CPU generator's state.
        devices: the indices of the GPUs.
        of_devices: the GPU generators' states.
    """
    with torch.random.fork_rng(devices):
        torch.set_rng_state(of_processor)
        set_device_states(devices, of_devices)
        yield
