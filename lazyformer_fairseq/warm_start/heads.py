"""Heads of sublayers that will read another's distribution, matched one to one with the heads that they will read.

A head of an ``l`` multiplies its values with the distribution of the head of the same number below. Where an ``s``
becomes an ``l``, its values and its output expect the distributions that its own queries and keys made. Which head is
which is chance, so we put each head where the distribution that it will read is most like the one that it had.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Optional

import numpy as np
import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor, nn
from tqdm import tqdm

from lazyformer_fairseq.modules.networks.encoder import Encoder
from lazyformer_fairseq.modules.sublayers.attention_choice import choice_classes
from lazyformer_fairseq.patterns.attention_kinds import GIVEN
from lazyformer_fairseq.patterns.grammar import PlannedSublayer, places_read
from lazyformer_fairseq.patterns.kinds import DISTRIBUTION
from lazyformer_fairseq.warm_start.start import MATCHED, Trained, WarmStart, start_from

Batch = Mapping[str, Any]


class Pair(NamedTuple):
    """A new sublayer whose heads may be matched.

    Attributes:
        index: of the new sublayer.
        reads: the new sublayer that it reads.
        own: the old sublayer that made the distribution which its values met.
        giver: the old sublayer whose weights `reads` has.
    """

    index: int
    reads: int
    own: int
    giver: int


class Match(NamedTuple):
    """Heads matched.

    Attributes:
        order: old head of each new head.
        plain, matched: mean distance of the distributions before and after, see :func:`distances`.
    """

    order: tuple[int, ...]
    plain: float
    matched: float


def match_heads(old: Trained, start: WarmStart, batches: Sequence[Batch]) -> dict[int, Match]:
    """Head orders for the new sublayers that read another distribution than the one that their values met.

    Both distributions are measured in the old model, on what its sublayers get there: the one that is read by the new
    sublayer that makes it, with its settings (a window, say). Heads stay as they are where the distribution stays the
    same, where one of the two is none over tokens, and where the sublayer that is read starts from none.

    Args:
        start: of plain order.
        batches: of a masked-LM dataset.

    Returns:
        By new sublayer.
    """
    pairs = _pairs(old.plan, start)
    if not pairs:
        return {}
    heads = old.cfg.encoder_attention_heads
    sums = {pair: torch.zeros(heads, heads, dtype=torch.float64) for pair in pairs}
    queries = 0
    old_model, new_model = old.build(), start.new.build()
    for batch in tqdm(batches, desc="matching heads", unit=" batches", disable=None, leave=False):
        found, is_text = _measure(pairs, old_model, new_model, batch)
        queries += int(is_text.sum())
        for pair, (read, own) in found.items():
            sums[pair] += distances(read, own, is_text).cpu()
    return {pair.index: _assign(total / queries) for pair, total in sums.items()}


def distances(read_BNTK: Tensor, own_BNTK: Tensor, is_text_BT: Tensor) -> Tensor:
    """Total variation distances of each head of one distribution and each of another, summed over queries.

    The total variation distance, half the sum of absolute differences, bounds how far a head's output moves: by at most
    twice itself times the longest value.

    Args:
        is_text_BT: queries that count.

    Returns:
        (N, N), double precision: rows are heads of `read_BNTK`, columns heads of `own_BNTK`.
    """
    rows = [
        ((own_BNTK - read_BNTK[:, head, None]).abs().sum(-1) * is_text_BT[:, None] / 2).sum((0, 2), dtype=torch.float64)
        for head in range(read_BNTK.size(1))
    ]
    return torch.stack(rows)


def _assign(distance_NN: Tensor) -> Match:
    cost = distance_NN.numpy()
    rows, columns = linear_sum_assignment(cost)
    return Match(tuple(map(int, columns)), float(np.trace(cost) / len(cost)), float(cost[rows, columns].mean()))


def _pairs(old_plan: Sequence[PlannedSublayer], start: WarmStart) -> list[Pair]:
    new_plan, sublayers = start.new.plan, start.record["sublayers"]
    old_reads = places_read(old_plan)
    pairs = []
    for index, (planned, reads) in enumerate(zip(new_plan, places_read(new_plan), strict=True)):
        origin = sublayers[index]["from"]
        giver = None if reads is None else sublayers[reads]["from"]
        if origin is None or giver is None:
            continue
        own = _maker(old_plan, old_reads, origin)
        is_same = own == giver and new_plan[reads].settings == old_plan[giver].settings
        if (
            own is not None
            and not is_same
            and planned.kind.reads
            and _has_probabilities(new_plan[reads], old_plan[own])
        ):
            pairs.append(Pair(index, reads, own, giver))
    return pairs


def _maker(plan: Sequence[PlannedSublayer], reads: Sequence[Optional[int]], index: int) -> Optional[int]:
    """The sublayer that makes the distribution which this one's values meet; None if nobody hands it on."""
    if DISTRIBUTION in plan[index].kind.hands_on:
        return index
    return reads[index] if plan[index].kind.reads == DISTRIBUTION else None


def _has_probabilities(*sublayers: PlannedSublayer) -> bool:
    return all(choice.has_probabilities for each in sublayers for choice in choice_classes(each.values))


@torch.no_grad()
def _measure(
    pairs: Sequence[Pair], old_model: nn.Module, new_model: nn.Module, batch: Batch
) -> tuple[dict[Pair, tuple[Tensor, Tensor]], Tensor]:
    """By pair, the distribution that will be read and the one that was met, (B, N, T, T); and where text is (B, T)."""
    old, new = old_model.encoder.sentence_encoder, new_model.encoder.sentence_encoder
    old.lazy_backend = new.lazy_backend = "eager"  # which stores distributions
    tokens_BT = batch["net_input"]["src_tokens"].to(old.embed_tokens.weight.device)
    is_padding = tokens_BT.eq(old.padding_idx)
    padding = (is_padding if bool(is_padding.any()) else None, True)
    inputs: dict[int, Tensor] = {}
    made: dict[int, Tensor] = {}

    def keep(index: int, args: tuple, output: tuple) -> None:
        inputs[index] = args[0]
        made[index] = output[1][DISTRIBUTION].probabilities

    needed = {pair.own for pair in pairs} | {pair.giver for pair in pairs}
    hooks = [
        old.sublayers[index].register_forward_hook(lambda module, args, output, index=index: keep(index, args, output))
        for index in needed
    ]
    try:
        x = old.embed(tokens_BT)
        old.run(x, old.context(x, 0, *padding, global_positions(old, tokens_BT)))
    finally:
        for hook in hooks:
            hook.remove()
    shared = new.context(x, 0, *padding, global_positions(new, tokens_BT))
    read = {
        reads: new.sublayers[reads](inputs[giver], {}, shared)[1][DISTRIBUTION].probabilities
        for reads, giver in {(pair.reads, pair.giver) for pair in pairs}
    }
    return {pair: (read[pair.reads], made[pair.own]) for pair in pairs}, ~is_padding


def global_positions(encoder: Encoder, tokens_BT: Tensor) -> Optional[Tensor]:
    """The first token of each text for patterns with ``global=given``, whose weights are those of ``global=1``."""
    if not any(planned.values.get("global") == GIVEN for planned in encoder.plan):
        return None
    first = torch.zeros_like(tokens_BT, dtype=torch.bool)
    first[:, 0] = True
    return first


def start_with_matched_heads(
    old: Trained,
    changes: Mapping[str, Any],
    batches: Sequence[Batch],
    from_sublayers: Optional[Sequence[str]] = None,
    seed: int = 1,
) -> WarmStart:
    """As :func:`~lazyformer_fairseq.warm_start.start.start_from`, with heads in the order that `batches` speak for.

    The record has both mean distances of each sublayer whose heads were matched.
    """
    matches = match_heads(old, start_from(old, changes, from_sublayers, seed=seed), batches)
    orders = {index: match.order for index, match in matches.items()}
    start = start_from(old, changes, from_sublayers, orders, seed)
    start.record["heads"] = MATCHED
    for index, match in matches.items():
        start.record["sublayers"][index]["distance"] = {"plain": match.plain, "matched": match.matched}
    return start
