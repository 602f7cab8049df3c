"""Memory of a training update from pattern, sizes and batch, by formula: what :func:`.latency.peak_memory` measures.

Each kind of sublayer and each back end counts its own, as with FLOPs; here an update goes through them as torch does.
Libraries' own memory (CUDA's context, cuBLAS, MKL) and what an allocator cannot use of what it holds do not count.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple, Optional

from lazyformer_fairseq.evaluation.costs import flops
from lazyformer_fairseq.modules.memory_costs import SINGLE, Memory, Pass
from lazyformer_fairseq.modules.networks.adaptive_softmax import AdaptiveSoftmax
from lazyformer_fairseq.modules.networks.causal_decoder import CausalDecoder
from lazyformer_fairseq.modules.networks.encoder import Encoder
from lazyformer_fairseq.modules.networks.heads import MaskedLMHead
from lazyformer_fairseq.modules.networks.recomputed import runs_of, segments_of
from lazyformer_fairseq.modules.sublayers.feed_forward import ResidualSublayer
from lazyformer_fairseq.patterns.grammar import PlannedSublayer, plan
from lazyformer_fairseq.patterns.kinds import CAUSAL, DISTRIBUTION, Sizes

RANDOM_STATE = 5056  # bytes of a processor's generator of random numbers


class UpdateMemory(NamedTuple):
    """Bytes of an update.

    Attributes:
        weights: in the precision of the model.
        gradients: of all weights, in it.
        optimizer: two moments, Adam's or LAMB's, or one of a matrix that Muon takes; in half precision the weights in
            single precision and their gradients too.
        carried: what streams remember from one update to the next.
        activations: all else, at the peak of the update: what autograd keeps, and what is there for a moment. Gradients
            that are there by then are not among these.
        peak: the most there is at once.
    """

    weights: int
    gradients: int
    optimizer: int
    carried: int
    activations: int
    peak: int


def count_update_memory(
    pattern: str,
    sizes: Sizes,
    run: Pass,
    predicted: Optional[int] = None,
    accumulates: bool = False,
    processes: int = 1,
    optimizer: str = "",
) -> UpdateMemory:
    """Counts one update: forward pass, loss, backward pass, a step of fused Adam, LAMB or Muon.

    Args:
        run: its forward and backward pass.
        predicted: tokens of a batch that the head predicts; None for all.
        accumulates: whether gradients of an earlier batch of the same update are there.
        processes: several hold what they send each other, and share experts out.
        optimizer: ``muon``, or one with two moments.

    Raises:
        UserError: the pattern cannot be read, or a kind of sublayer does not count its memory.
    """
    sublayers = plan(pattern, sizes.direction)
    elsewhere = sum(flops.count_experts_elsewhere(planned, sizes, processes) for planned in sublayers)
    parameters = flops.count_parameters(pattern, sizes) - elsewhere
    weights = gradients = parameters * run.number
    held = count_optimizer_bytes(parameters, run.number, count_single_moments(pattern, sizes, optimizer))
    buckets = gradients if processes > 1 else 0
    carried = _count_carried(sublayers, sizes, run)
    before = weights + held + buckets + carried + (gradients if accumulates else 0)
    highest, activations = 0, 0
    for now, made in _moments(sublayers, sizes, run, predicted, processes):
        # Reversible layers hand over all gradients at their end, and add none up before.
        there = before + now + (0 if accumulates and not run.reversible else made)
        if there > highest:
            highest, activations = there, now
    return UpdateMemory(weights, gradients + buckets, held, carried, activations, highest)


def count_optimizer_bytes(parameters: int, number: int, single_moments: int = 0) -> int:
    """Adam's two moments; below single precision the weights and gradients that it works with, too (fairseq).

    Args:
        single_moments: parameters with one moment.
    """
    return SINGLE * (parameters * (2 if number >= SINGLE else 4) - single_moments)


def count_single_moments(pattern: str, sizes: Sizes, optimizer: str) -> int:
    """Parameters of which an optimizer keeps one moment, not two."""
    return flops.count_matrix_parameters(pattern, sizes) if optimizer == "muon" else 0


def _moments(
    sublayers: Sequence[PlannedSublayer], sizes: Sizes, run: Pass, predicted: Optional[int], processes: int
) -> Iterator[tuple[int, int]]:
    """(bytes of activations, bytes of gradients of weights made so far), at the highest points of an update."""
    is_causal = sizes.direction == CAUSAL
    network, head_kind = (CausalDecoder, AdaptiveSoftmax) if is_causal else (Encoder, MaskedLMHead)
    costs = [count_sublayer_memory(planned, sizes, run) for planned in sublayers]
    embedding = network.count_embedding_memory(sizes, run)
    predicted = run.batch * run.time if predicted is None else predicted
    head = head_kind.count_memory(sizes, run, predicted)
    groups, between, at_all_times, in_backward = _recomputed(sublayers, sizes, run)
    kept, scratch = embedding.kept + at_all_times, 0
    for group in groups:
        inside = kept
        for cost in (costs[place] for place in group):
            inside, scratch = inside + cost.kept, max(scratch, cost.scratch)
            yield inside + cost.forward + scratch, 0
        kept = inside if between is None else kept + between
    kept += head.kept
    yield kept + head.forward + scratch, 0
    yield kept + head.backward + scratch, 0
    kept += in_backward - head.kept
    made, more = flops.count_other_parameters(sizes) * run.number, 0
    pendings = _pending_at(sublayers, costs)
    for group in reversed(groups):
        if between is not None:
            kept += sum(costs[place].kept for place in group) - between
        for place in reversed(group):
            cost = costs[place]
            more = max(more, cost.more_scratch)
            yield kept + cost.backward + pendings[place] + scratch + more, made
            elsewhere = flops.count_experts_elsewhere(sublayers[place], sizes, processes)
            made += (flops.count_sublayer_parameters(sublayers[place], sizes) - elsewhere) * run.number
            kept -= cost.kept
    made += sum(flops.count_common_parameters(sublayers, sizes).values()) * run.number
    # The embedding's gradient of the table that both share, which adds to the head's.
    table = max(words * width for words, width in sizes.bands) if is_causal else sizes.vocab_size * sizes.embed_dim
    table = 0 if (sizes.untied_softmax if is_causal else sizes.untied_lm_head) else table
    yield kept + embedding.backward + scratch + more + table * run.number, made


def _recomputed(
    sublayers: Sequence[PlannedSublayer], sizes: Sizes, run: Pass
) -> tuple[list[list[int]], Optional[int], int, int]:
    """Places that are computed anew together; bytes kept between two of these, None where all is kept; bytes kept at
    all times, and more in the backward pass."""
    # What streams remembered before this pass goes into it once more.
    remembered = _count_carried(sublayers, sizes, run)
    if run.reversible:
        runs, stream = runs_of(sublayers), run.batch * run.time * sizes.embed_dim * max(SINGLE, run.number)
        states = RANDOM_STATE * len(runs)
        return runs, 0, 2 * stream + states + remembered, 2 * stream + run.tokens(sizes.embed_dim)
    if run.checkpoints:
        segments = segments_of(sublayers, sizes.direction)
        return segments, run.tokens(sizes.embed_dim), RANDOM_STATE * len(segments) + remembered, 0
    return [list(range(len(sublayers)))], None, 0, 0


def _pending_at(sublayers: Sequence[PlannedSublayer], costs: Sequence[Memory]) -> list[int]:
    """For each sublayer, the gradients that consumers above it have left for a sublayer at its place or below."""
    found, of_maker = [0] * len(sublayers), 0
    for number, planned in reversed(list(enumerate(sublayers))):
        found[number] = of_maker
        if planned.kind.reads == DISTRIBUTION:
            maker = max(below for below in range(number) if DISTRIBUTION in sublayers[below].kind.hands_on)
            of_maker = costs[maker].pending
        elif DISTRIBUTION in planned.kind.hands_on:
            of_maker = 0
    return found


def count_sublayer_memory(planned: PlannedSublayer, sizes: Sizes, run: Pass) -> Memory:
    """Of one sublayer with the residual connection around it; without its input, which the one below keeps."""
    module = planned.kind.module(sizes.direction)
    inner = module.count_memory(sizes, planned, run)
    return ResidualSublayer.count_memory(inner, sizes, run) if module.is_residual else inner


def _count_carried(sublayers: Sequence[PlannedSublayer], sizes: Sizes, run: Pass) -> int:
    """Bytes that a :class:`~lazyformer_fairseq.modules.networks.stack.StreamMemory` keeps between two segments."""
    if sizes.direction != CAUSAL:
        return 0
    attending = sum(planned.kind.module(CAUSAL).attends for planned in sublayers)
    return attending * run.batch * run.memory * sizes.embed_dim * run.number
