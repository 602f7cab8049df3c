"""Heads of sublayers that will read another's distribution, matched one to one with the heads that they will read.

A head of an ``l`` multiplies its values with the distribution of the head of the same number below. Where an ``s``
becomes an ``l``, its values and its output expect the distributions that its own queries and keys made. Which head is
which is chance, so we put each head where the distribution that it will read is most like the one that it had: so like
that what the head adds to the sublayer's output moves least, on real text.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Optional

import numpy as np
import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor, nn
from torch.nn import functional as F
from tqdm import tqdm

from lazyformer_fairseq.modules.networks.encoder import Encoder
from lazyformer_fairseq.modules.sublayers.attention_variant import variant_classes
from lazyformer_fairseq.patterns.attention_kinds import GIVEN
from lazyformer_fairseq.patterns.grammar import PlannedSublayer, places_read
from lazyformer_fairseq.patterns.kinds import DISTRIBUTION
from lazyformer_fairseq.warm_start.start import MATCHED, Trained, WarmStart, start_from

Batch = Mapping[str, Any]


class Pair(NamedTuple):
    """A new sublayer whose heads may be matched.

    Attributes:
        index: of the new sublayer.
        origin: the old sublayer whose values and output it has.
        reads: the new sublayer that it reads.
        own: the old sublayer that made the distribution which its values met.
        producer: the old sublayer whose weights `reads` has.
    """

    index: int
    origin: int
    reads: int
    own: int
    producer: int


class Met(NamedTuple):
    """What the heads of a new sublayer meet, on a batch.

    Attributes:
        read_BNTK: the distribution that it will read.
        own_BNTK: the one that its values met in the old model.
        values_BNKD: these values.
        out_NCD: what each head's output is multiplied with.
    """

    read_BNTK: Tensor
    own_BNTK: Tensor
    values_BNKD: Tensor
    out_NCD: Tensor


class Match(NamedTuple):
    """Heads matched.

    Attributes:
        order: old head of each new head.
        plain, matched: how far the heads' outputs move before and after, root mean square, as a share of their lengths.
    """

    order: tuple[int, ...]
    plain: float
    matched: float


@torch.no_grad()
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
    moves = {pair: torch.zeros(heads, heads, dtype=torch.float64) for pair in pairs}
    lengths = dict.fromkeys(pairs, 0.0)
    old_model, new_model = old.build(), start.new.build()
    for batch in tqdm(batches, desc="matching heads", unit=" batches", disable=None, leave=False):
        found, is_text = _measure(pairs, old_model, new_model, batch)
        for pair, met in found.items():
            moves[pair] += squared_moves(met, is_text).cpu()
            lengths[pair] += float(_squared_lengths(met.own_BNTK @ met.values_BNKD, met.out_NCD, is_text).sum())
    return {pair.index: _assign(moves[pair], lengths[pair]) for pair in pairs}


def squared_moves(met: Met, is_text_BT: Tensor) -> Tensor:
    """How far each head's output moves if it reads each head's distribution: squares, summed over queries.

    Head n adds P_n V_n O_n to the sublayer's output; reading P_m in place of P_n moves that by (P_m - P_n) V_n O_n.

    Args:
        is_text_BT: queries that count.

    Returns:
        (N, N), double precision: rows are heads that are read, columns heads that read.
    """
    rows = [
        _squared_lengths((met.read_BNTK[:, head, None] - met.own_BNTK) @ met.values_BNKD, met.out_NCD, is_text_BT)
        for head in range(met.read_BNTK.size(1))
    ]
    return torch.stack(rows)


def _squared_lengths(heads_BNTD: Tensor, out_NCD: Tensor, is_text_BT: Tensor) -> Tensor:
    """Of each head's output (N,), summed over queries."""
    products_NDD = out_NCD.transpose(1, 2) @ out_NCD  # so that nothing is as large as (B, N, T, C)
    squares_BNT = ((heads_BNTD @ products_NDD) * heads_BNTD).sum(-1)
    return (squares_BNT * is_text_BT[:, None]).sum((0, 2), dtype=torch.float64)


def _assign(moves_NN: Tensor, length: float) -> Match:
    cost = moves_NN.numpy()
    rows, columns = linear_sum_assignment(cost)
    plain, matched = (
        float(np.sqrt(each.clip(min=0).sum() / length)) for each in (cost.diagonal(), cost[rows, columns])
    )
    return Match(tuple(map(int, columns)), plain, matched)


def _pairs(old_plan: Sequence[PlannedSublayer], start: WarmStart) -> list[Pair]:
    new_plan, sublayers = start.new.plan, start.record["sublayers"]
    old_reads = places_read(old_plan)
    pairs = []
    for index, (planned, reads) in enumerate(zip(new_plan, places_read(new_plan), strict=True)):
        origin = sublayers[index]["from"]
        producer = None if reads is None else sublayers[reads]["from"]
        if origin is None or producer is None:
            continue
        own = _maker(old_plan, old_reads, origin)
        is_same = own == producer and new_plan[reads].settings == old_plan[producer].settings
        if (
            own is not None
            and not is_same
            and planned.kind.reads
            and _has_probabilities(new_plan[reads], old_plan[own])
        ):
            pairs.append(Pair(index, origin, reads, own, producer))
    return pairs


def _maker(plan: Sequence[PlannedSublayer], reads: Sequence[Optional[int]], index: int) -> Optional[int]:
    """The sublayer that makes the distribution which this one's values meet; None if nobody hands it on."""
    if DISTRIBUTION in plan[index].kind.hands_on:
        return index
    return reads[index] if plan[index].kind.reads == DISTRIBUTION else None


def _has_probabilities(*sublayers: PlannedSublayer) -> bool:
    return all(choice.has_probabilities for each in sublayers for choice in variant_classes(each.values))


def _measure(
    pairs: Sequence[Pair], old_model: nn.Module, new_model: nn.Module, batch: Batch
) -> tuple[dict[Pair, Met], Tensor]:
    """By pair what its heads meet; and where text is (B, T)."""
    old, new = old_model.encoder.sentence_encoder, new_model.encoder.sentence_encoder
    old.lazy_backend = new.lazy_backend = "eager"  # which stores distributions
    tokens_BT = batch["net_input"]["src_tokens"].to(old.embed_tokens.weight.device)
    is_padding = tokens_BT.eq(old.padding_idx)
    padding = (is_padding if bool(is_padding.any()) else None, True)
    inputs: dict[int, Tensor] = {}  # of residual sublayers
    normed: dict[int, Tensor] = {}  # of what is in them: behind LayerNorm, where that comes first
    made: dict[int, Tensor] = {}

    def keep(index: int, args: tuple, output: tuple) -> None:
        inputs[index] = args[0]
        if DISTRIBUTION in output[1]:
            made[index] = output[1][DISTRIBUTION].probabilities

    hooks = []
    for index in {number for pair in pairs for number in (pair.origin, pair.own, pair.producer)}:
        sublayer = old.sublayers[index]
        hooks.append(sublayer.register_forward_hook(lambda _, args, output, index=index: keep(index, args, output)))
        hooks.append(
            sublayer.inner.register_forward_pre_hook(lambda _, args, index=index: normed.update({index: args[0]}))
        )
    try:
        x = old.embed(tokens_BT)
        old.run(x, old.context(x, 0, *padding, global_positions(old, tokens_BT)))
    finally:
        for hook in hooks:
            hook.remove()
    shared = new.context(x, 0, *padding, global_positions(new, tokens_BT))
    read = {
        reads: new.sublayers[reads](inputs[producer], {}, shared)[1][DISTRIBUTION].probabilities
        for reads, producer in {(pair.reads, pair.producer) for pair in pairs}
    }
    return {
        pair: Met(read[pair.reads], made[pair.own], *_values_and_output(old, pair.origin, normed[pair.origin]))
        for pair in pairs
    }, ~is_padding


def _values_and_output(encoder: Encoder, index: int, x_BTC: Tensor) -> tuple[Tensor, Tensor]:
    """The values (B, N, T, D) that a sublayer projects from its input, and its output projection by head (N, C, D)."""
    inner = encoder.sublayers[index].inner
    name, number, parts = inner.parts(encoder.plan[index])["v"]
    projection = inner.get_submodule(name)
    weight, bias = (each.chunk(parts)[number] for each in (projection.weight, projection.bias))
    values_BNTD = F.linear(x_BTC, weight, bias).unflatten(-1, (encoder.num_heads, -1)).transpose(1, 2)
    return values_BNTD, inner.out_proj.weight.unflatten(1, (encoder.num_heads, -1)).transpose(0, 1)


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

    The record says of each sublayer whose heads were matched how far their outputs move, plain and matched.
    """
    matches = match_heads(old, start_from(old, changes, from_sublayers, seed=seed), batches)
    orders = {index: match.order for index, match in matches.items()}
    start = start_from(old, changes, from_sublayers, orders, seed)
    start.record["heads"] = MATCHED
    for index, match in matches.items():
        start.record["sublayers"][index]["distance"] = {"plain": match.plain, "matched": match.matched}
    return start
