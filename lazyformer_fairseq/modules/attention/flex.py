"""The back end ``flex``: torch's FlexAttention on a GPU, which skips blocks of keys that a mask hides.

torch compiles it together with the functions that mask keys and add to scores. Everything that varies between calls is
passed to these functions as tensors, because numbers would become constants, and each new value would trigger another
compilation. Each combination of features is compiled once, and a second time when sizes first change.

An ``l`` recomputes the attention, as in ``recompute``. If the bias depends on distance, torch sums its gradients in a
nondeterministic order.
"""

import functools
from collections.abc import Callable, Hashable
from types import FunctionType
from typing import Any, NamedTuple, Optional

import torch
from torch import Tensor
from torch.nn import functional as F
from typing_extensions import override

from lazyformer_fairseq.modules.attention.interface import (
    NO_DROPOUT,
    NO_ENTMAX,
    AttentionCall,
    AttentionInputs,
    BackEnd,
    first_reason,
    why_no_triton,
)
from lazyformer_fairseq.modules.attention.masks import AttentionMask, Numbers, blocks_of
from lazyformer_fairseq.modules.attention.scores import Scores
from lazyformer_fairseq.modules.compiled import compiled

BLOCK = 128  # the number of queries, and of keys, per block; this is torch's default
HEAD_SIZES = (16, 32, 64, 128)  # torch 2.6 only supports powers of two
_KEPT = 64  # the number of cached plans, one per combination of text length and mask


class FlexAttention:
    """The queries and keys of an ``s``, from which each consumer recomputes the attention with FlexAttention."""

    def __init__(self, q_BNTD: Tensor, k_BNKD: Tensor, scores: Scores):
        self.q_BNTD = q_BNTD
        self.k_BNKD = k_BNKD
        self.scores = scores
        # The compiler traces cached functions anyway, and warns about the cache.
        if torch.compiler.is_compiling():
            plan_of = _plan.__wrapped__
        else:
            plan_of = _plan
        _, heads, time, _ = q_BNTD.shape
        keys = k_BNKD.size(-2)
        self.plan = plan = plan_of(
            scores.mask,
            heads,
            time,
            keys,
            extra=scores.extra,
            is_causal=scores.is_causal,
            sees_more=scores.seen_BK is not None,
            device=q_BNTD.device,
        )
        key: tuple[Hashable, ...] = ("flex", scores.mask, scores.extra)
        if not torch.compiler.is_compiling():  # see Scores.dense
            key = (*key, time, keys)
        self.block_mask = scores.cached(key, lambda: _block_mask(plan, scores, time, keys))
        self.addition = _addition(plan, scores, q_BNTD, keys)

    def attend(self, v_BNKD: Tensor, dropout: float) -> Tensor:
        """Compute softmax(QK^T / sqrt(D) + additions) V (B, N, T, D)."""
        assert not dropout, "flex has no dropout"
        return self._kernel()(self.q_BNTD, self.k_BNKD, v_BNKD, self.addition, self.block_mask)

    def _kernel(self) -> Callable[..., Tensor]:
        """Return torch's function, compiled for a GPU. On a CPU it is used only for comparison and is not fused."""
        from torch.nn.attention.flex_attention import flex_attention

        if torch.compiler.is_compiling() or not _is_compiled(self.q_BNTD.device):
            return flex_attention
        scores = self.scores
        numbers = self.plan.numbers
        features = (
            scores.table_KN is not None,
            scores.position_queries_BNTD is not None,
            scores.lengths_B is not None,
            scores.seen_BK is not None,
            scores.is_causal,
            scores.extra > 0,
            numbers.bands_NX4.size(1),
            numbers.columns_NX3.size(1),
            self.q_BNTD.dtype,
            torch.is_grad_enabled(),
        )
        return _compiled(features)


class Flex(BackEnd):
    """The back end ``flex``, the fastest one for masks on a GPU."""

    @override
    def why_not(self, call: AttentionCall, device: str, dtype: torch.dtype) -> Optional[str]:
        has_one_size = call.query_size == call.value_size and call.query_size in HEAD_SIZES
        reason = first_reason(
            [
                (device != "cuda", "torch's FlexAttention supports gradients only on GPUs"),
                (call.dropout, NO_DROPOUT),
                (call.has_entmax, NO_ENTMAX),
                (call.has_dense, "it does not support learned scores"),
                (
                    not has_one_size,
                    f"it needs queries and values of the same size, one of {', '.join(map(str, HEAD_SIZES))}",
                ),
                (dtype == torch.float64, "it does not support double precision"),
            ]
        )
        return reason or why_no_triton()

    @override
    def attend(self, given: AttentionInputs) -> tuple[Tensor, FlexAttention]:
        attention = FlexAttention(given.q_BNTD, given.k_BNKD, given.scores)
        return attention.attend(given.v_BNKD, given.dropout), attention


def _is_compiled(device: torch.device) -> bool:
    return device.type == "cuda"


@functools.cache
def _compiled(_features: Hashable) -> Callable[..., Tensor]:
    """Return torch's function, compiled for one combination of features.

    torch limits the number of recompilations per code object. Beyond the limit, the function would run uncompiled and
    write all scores to memory. Each combination therefore gets its own copy of the code, and an error is raised if
    torch cannot compile this copy.

    Args:
        _features: Everything that determines how the function is compiled; the cache key.
    """
    from torch.nn.attention.flex_attention import flex_attention

    def attend(q: Tensor, k: Tensor, v: Tensor, addition: Optional[Callable[..., Tensor]], block_mask: Any) -> Tensor:
        return flex_attention(q, k, v, addition, block_mask)

    own = FunctionType(
        attend.__code__.replace(),
        attend.__globals__,
        attend.__name__,
        None,
        attend.__closure__,
    )
    return compiled(own, True, "--attention-backend flex")


class _Plan(NamedTuple):
    """The parts of a FlexAttention call that depend only on the mask and the sizes.

    `offset`, `latest` and `tokens` are zero-dimensional tensors.

    Attributes:
        numbers: The parts of the mask as numbers.
        shown, whole: The visibility of each block; see :class:`.masks.Blocks`.
        offset: The position of the first query.
        latest: The maximum number of positions that a key may be ahead of the query.
        tokens: The number of keys that are tokens.
        reach: The maximum number of positions that a key may be behind the query.
    """

    numbers: Numbers
    shown: Tensor
    whole: Tensor
    offset: Tensor
    latest: Tensor
    tokens: Tensor
    reach: int


@functools.lru_cache(maxsize=_KEPT)
@torch.inference_mode(False)  # training may reuse plans created during validation
def _plan(
    mask: Optional[AttentionMask],
    heads: int,
    time: int,
    keys: int,
    *,
    extra: int,
    is_causal: bool,
    sees_more: bool,
    device: torch.device,
) -> _Plan:
    tokens = keys - extra
    reach = tokens - 1
    if mask is not None and mask.reach is not None and not sees_more:
        reach = min(mask.reach, reach)
    latest = keys + time
    if is_causal:
        latest = 0

    def number(value: int) -> Tensor:
        return torch.tensor(value, dtype=torch.int32, device=device)

    blocks = blocks_of(mask, time, keys, extra, is_causal, BLOCK, device)
    return _Plan(
        numbers=Numbers.of(mask, heads, device),
        shown=blocks.shown,
        whole=blocks.whole,
        offset=number(tokens - time),
        latest=number(latest),
        tokens=number(tokens),
        reach=reach,
    )


def _block_mask(plan: _Plan, scores: Scores, time: int, keys: int) -> Any:
    """Build torch's BlockMask without synchronizing with the GPU; the number of visible blocks stays on the GPU."""
    from torch.nn.attention.flex_attention import BlockMask

    shown = plan.shown[None]
    whole = plan.whole[None]
    if scores.seen_BK is not None:
        device = scores.seen_BK.device
        own = blocks_of(None, time, keys, scores.extra, scores.is_causal, BLOCK, device).shown
        is_seen = _by_block(scores.seen_BK, keys, at_end=False).any(-1)
        shown = shown | own & is_seen[:, None, None]
    is_padding = scores.is_padding(keys - scores.extra)
    if is_padding is not None:
        all_padding = _by_block(is_padding, keys, at_end=True).all(-1)
        some_padding = _by_block(is_padding, keys, at_end=False).any(-1)
        shown = shown & ~all_padding[:, None, None]
        whole = whole & ~some_padding[:, None, None]
    return BlockMask.from_kv_blocks(
        *_listed(shown & ~whole),
        *_listed(shown & whole),
        BLOCK_SIZE=BLOCK,
        mask_mod=_mask(plan, scores.seen_BK, is_padding),
        seq_lengths=(time, keys),
    )


def _by_block(flags_BK: Tensor, keys: int, at_end: bool) -> Tensor:
    """Group the keys' flags by block, (B, blocks, BLOCK).

    Args:
        flags_BK: The flags of keys that are tokens. The flag of all other keys is False.
        keys: The number of keys, including those that are not tokens.
        at_end: The flag that pads the last block.
    """
    of_keys = F.pad(flags_BK, (0, keys - flags_BK.size(1)), value=False)
    filled = F.pad(of_keys, (0, -keys % BLOCK), value=at_end)
    return filled.unflatten(1, (-1, BLOCK))


def _listed(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Return the number of True blocks in each row of (B, N, R, C), and the row's block indices, True ones first."""
    order = blocks.to(torch.int8).argsort(dim=-1, descending=True, stable=True)
    return blocks.sum(-1, dtype=torch.int32), order.to(torch.int32)


def _mask(plan: _Plan, seen_BK: Optional[Tensor], is_padding_BK: Optional[Tensor]) -> Callable[..., Tensor]:
    """Return torch's `mask_mod`, a function of indices that returns whether a query sees a key."""
    bands = _by_part(plan.numbers.bands_NX4)
    columns = _by_part(plan.numbers.columns_NX3)
    offset = plan.offset
    latest = plan.latest
    tokens = plan.tokens

    def mask(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        query = q + offset
        place = torch.clamp(query, min=0)  # with fewer keys than queries, the first queries precede all keys
        ahead = k - query
        seen = k < 0  # False, in the right shape
        for least, most, dilation, block in bands:
            is_near = (ahead >= least[h]) & (ahead <= most[h])
            is_dilated = ahead % dilation[h] == 0
            is_in_block = k // block[h] == place // block[h]
            seen = seen | is_near & is_dilated & is_in_block
        for first, period, last in columns:
            is_first = k < first[h]
            ends_period = k % period[h] >= period[h] - last[h]
            seen = seen | is_first | ends_period
        is_token = k < tokens
        token = torch.where(is_token, k, 0)
        if seen_BK is not None:
            seen = seen | seen_BK[b, token]
        seen = seen & (ahead <= latest)
        if is_padding_BK is not None:
            seen = seen & ~is_padding_BK[b, token]
        return seen | ~is_token

    return mask


def _by_part(numbers_NXF: Tensor) -> list[list[Tensor]]:
    """Return the numbers of each part of a mask as separate tensors (N,).

    They are separate because torch 2.10 cannot mix tensor indices with other indices. They are copies because the CPU
    compiler does not accept views.
    """
    found = []
    for part_NF in numbers_NXF.unbind(1):
        found.append([number_N.clone() for number_N in part_NF.unbind(-1)])
    return found


def _addition(plan: _Plan, scores: Scores, q: Tensor, keys: int) -> Optional[Callable[..., Tensor]]:
    """Return torch's `score_mod`, a function that adds to a score; None if nothing is added."""
    exact = torch.promote_types(q.dtype, torch.float32)  # the precision for summing the gradients of many scores
    found = []
    if scores.table_KN is not None:
        by_distance = scores.table_KN.to(exact)[scores.bucket_by_distance].t()
        by_distance = F.pad(by_distance, (0, scores.extra))
        found.append(_bias(by_distance, plan, time=q.size(-2)))
    if scores.position_queries_BNTD is not None and scores.distances_NKD is not None:
        tokens = keys - scores.extra
        # These are the distances reach, ..., 0.
        distances = scores.distances_NKD[:, tokens - 1 - plan.reach : tokens]
        by_distance = torch.matmul(scores.position_queries_BNTD, distances.mT).to(exact)
        found.append(_positions(by_distance, plan))
    if not found:
        return None
    if len(found) == 1:
        return found[0]
    first, second = found

    def add_both(score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return second(first(score, b, h, q, k), b, h, q, k)

    return add_both


def _bias(by_distance_ND: Tensor, plan: _Plan, time: int) -> Callable[..., Tensor]:
    zero = plan.offset.new_full((), time - 1)
    tokens = plan.tokens

    def add(score: Tensor, _b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return score + torch.where(k < tokens, by_distance_ND[h, k - q + zero], 0)

    return add


def _positions(by_distance_BNTR: Tensor, plan: _Plan) -> Callable[..., Tensor]:
    last = plan.offset.new_full((), plan.reach)
    offset = plan.offset
    tokens = plan.tokens

    def add(score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        place = last + k - q - offset
        inside = torch.minimum(torch.clamp(place, min=0), last)  # keys at other distances are hidden
        return score + torch.where(k < tokens, by_distance_BNTR[b, h, q, inside], 0)

    return add
