"""The forward kernel: attention of an ``s``, and of an ``l`` that reads its row log-sum-exp.

The online softmax is Milakov and Gimelshein's (2018), the walk over tiles FlashAttention's (Dao et al., 2022).
"""

import triton
import triton.language as tl

from lazyformer_fairseq.modules.attention.triton.shared import (
    LN_2,
    LOG2_E,
    NOT_SPECIALIZED,
    bias_of,
    count_tiles,
    far_tiles,
    head_of,
    is_shown,
    length_of,
    listed_tiles,
    load_rows,
    near_scores,
    nth_tile,
    own_tile,
    store_rows,
)


@triton.jit(do_not_specialize=NOT_SPECIALIZED)
def forward_kernel(
    q,
    k,
    v,
    bias,
    lengths,
    mask,
    seen,
    o,
    lse,
    q_strides,
    k_strides,
    v_strides,
    o_strides,
    scale,
    time,
    heads,
    reach,
    time_class,  # for the choice of tiles alone
    HEAD: tl.constexpr,
    BLOCK_D: tl.constexpr,
    REUSES: tl.constexpr,
    BANDS: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """One tile of queries: softmax(scale QK^T + bias) V; writes `lse` (B, N, T), or reads it with REUSES.

    With a mask it walks over the tiles of keys that are listed for it: first those that all queries see, then those
    with a mask. A query that sees no key has an output of zeros and an `lse` of infinity.
    """
    first_query, queries, b, n = own_tile(time, heads, BLOCK_Q)
    length = length_of(lengths, b, time)
    bias, below, above = bias_of(bias, n, reach)
    k_head, v_head = head_of(k, k_strides, b, n), head_of(v, v_strides, b, n)
    q_rows = load_rows(head_of(q, q_strides, b, n), first_query, q_strides[2], time, HEAD, BLOCK_Q, BLOCK_D, False)
    lse += tl.cast(b * heads + n, tl.int64) * time + queries

    if REUSES:
        row_max = tl.load(lse, mask=queries < time, other=0.0) * LOG2_E
    else:
        row_max = tl.full([BLOCK_Q], float("-inf"), tl.float32)
    row_sum = tl.zeros([BLOCK_Q], tl.float32)
    output = tl.zeros([BLOCK_Q, BLOCK_D], tl.float32)

    full, total = length // BLOCK_K, (length + BLOCK_K - 1) // BLOCK_K
    low, high = far_tiles(first_query, full, bias, reach, BLOCK_Q, BLOCK_K)
    listed, whole, shown = listed_tiles(mask, seen, first_query, time, b, n, heads, BLOCK_Q, BLOCK_K)
    for near in tl.static_range(2):
        for j in range(0, count_tiles(low, high, full, total, mask, whole, shown, near)):
            tile = nth_tile(j, low, high, full, mask, listed, whole, near)
            first_key = tile * BLOCK_K
            k_rows = load_rows(k_head, first_key, k_strides[2], length, HEAD, BLOCK_K, BLOCK_D, near == 0)
            products = tl.dot(q_rows, tl.trans(k_rows), input_precision="ieee")
            if near or mask is not None:
                keys = first_key + tl.arange(0, BLOCK_K)
                distance = keys[None, :] - queries[:, None]
                is_key = keys[None, :] < length
                if near and mask is not None:
                    is_key &= is_shown(queries[:, None], keys[None, :], mask, seen, b, n, time, BANDS, COLUMNS)
                scores = near_scores(products, distance, is_key, scale, bias, reach)
                far_bias = 0.0
                factor = 1.0
            else:
                scores = products
                far_bias = tl.where(tile < low, below, above)
                factor = scale * LOG2_E
            if not REUSES:
                new_max = tl.maximum(row_max, tl.max(scores, 1) * factor + far_bias)
                if mask is not None:  # before a row has seen a key
                    shrink = tl.where(row_max == new_max, 1.0, tl.exp2(row_max - new_max))
                else:
                    shrink = tl.exp2(row_max - new_max)
                output *= shrink[:, None]
                row_max = new_max
            if mask is not None:
                base = tl.where(row_max == float("-inf"), 0.0, row_max)
                probabilities = tl.exp2(scores - base[:, None])
            else:
                probabilities = tl.exp2(scores * factor + (far_bias - row_max)[:, None])
            if not REUSES:
                row_sum = row_sum * shrink + tl.sum(probabilities, 1)
            v_rows = load_rows(v_head, first_key, v_strides[2], length, HEAD, BLOCK_K, BLOCK_D, near == 0)
            output = tl.dot(probabilities.to(v_rows.dtype), v_rows, output, input_precision="ieee")

    if not REUSES:
        if mask is not None:
            row_max = tl.where(row_sum == 0, float("inf"), row_max)
            row_sum = tl.where(row_sum == 0, 1.0, row_sum)
        output /= row_sum[:, None]
        tl.store(lse, (row_max + tl.log2(row_sum)) * LN_2, mask=queries < time)
    store_rows(o, o_strides, b, n, first_query, output, time, HEAD, BLOCK_Q, BLOCK_D)
