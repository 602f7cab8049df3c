"""What the Triton kernels share: which tiles a program visits, how it loads them, how it makes probabilities.

A program keeps one tile of queries (or keys) and walks over tiles of keys (or queries). Distances are key - query.
All tiles that lie wholly `reach` or more away from the kept one share one bias and need no mask: they are *far*, and
the loop over them is a plain attention loop. The others are *near*: they look the bias up, element by element, in a row
of 2 reach + 1 entries, and mask padding.

With a mask a program walks over the tiles that are listed for it (:mod:`.mask`), and looks every bias up.
"""

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)
# Triton must not specialize on whether these arguments are 1 or multiples of 16: it would compile each case anew.
NOT_SPECIALIZED = ["reach", "time_class"]


@triton.jit
def own_tile(time, heads, KEPT: tl.constexpr):
    """(first row of this program's tile, its KEPT rows, row of the batch, head); a head's are neighbours."""
    tiles = (time + KEPT - 1) // KEPT
    program = tl.program_id(0)
    head_of_batch = program // tiles
    first = program % tiles * KEPT
    return first, first + tl.arange(0, KEPT), head_of_batch // heads, head_of_batch % heads


@triton.jit
def head_of(tensor, strides, b, n):
    """Where the (T, D) of one head starts in a (B, N, T, D); `strides` are of B, N and T."""
    return tensor + tl.cast(b, tl.int64) * strides[0] + tl.cast(n, tl.int64) * strides[1]


@triton.jit
def rows_of(head, start, stride, ROWS: tl.constexpr, BLOCK_D: tl.constexpr):
    """Pointers (ROWS, BLOCK_D) to the rows from `start` on."""
    first = head + start * tl.cast(stride, tl.int64)
    return first + tl.arange(0, ROWS)[:, None] * stride + tl.arange(0, BLOCK_D)[None, :]


@triton.jit
def inside(start, limit, HEAD: tl.constexpr, ROWS: tl.constexpr, BLOCK_D: tl.constexpr):
    """(ROWS, BLOCK_D): True at rows below `limit` and at the HEAD entries that a head has."""
    return ((start + tl.arange(0, ROWS))[:, None] < limit) & (tl.arange(0, BLOCK_D)[None, :] < HEAD)


@triton.jit
def store_rows(
    tensor, strides, b, n, start, values, limit, HEAD: tl.constexpr, ROWS: tl.constexpr, BLOCK_D: tl.constexpr
):
    """Writes a head's rows from `start` on, those below `limit`; in the tensor's precision."""
    pointers = rows_of(head_of(tensor, strides, b, n), start, strides[2], ROWS, BLOCK_D)
    tl.store(pointers, values.to(tensor.dtype.element_ty), mask=inside(start, limit, HEAD, ROWS, BLOCK_D))


@triton.jit
def load_rows(
    head,
    start,
    stride,
    limit,
    HEAD: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_D: tl.constexpr,
    WHOLE: tl.constexpr,
):
    """The rows from `start` on, (ROWS, BLOCK_D), zeros outside; WHOLE promises that all rows are below `limit`."""
    pointers = rows_of(head, start, stride, ROWS, BLOCK_D)
    if WHOLE and HEAD == BLOCK_D:
        loaded = tl.load(pointers)
    else:
        loaded = tl.load(pointers, mask=inside(start, limit, HEAD, ROWS, BLOCK_D), other=0.0)
    return loaded


@triton.jit
def far_tiles(kept, full, bias, reach, KEPT: tl.constexpr, MOVING: tl.constexpr):
    """(low, high): of the `full` whole tiles of MOVING rows, those before `low` and from `high` on are far.

    `kept` is the first of the KEPT rows that stay; without a bias every whole tile is far.
    """
    if bias is None:
        low = full
        high = full
    else:
        low = tl.minimum(tl.maximum(kept - reach + 1, 0) // MOVING, full)
        high = tl.minimum((kept + KEPT - 1 + reach + MOVING - 1) // MOVING, full)
    return low, high


@triton.jit
def listed_tiles(mask, seen, first, time, b, n, heads, KEPT: tl.constexpr, MOVING: tl.constexpr):
    """(where the list of the tile that begins at `first` begins, how many all see, how many there are)."""
    if mask is None:
        listed = 0
        whole = 0
        shown = 0
    else:
        row = (n if seen is None else b * heads + n) * ((time + KEPT - 1) // KEPT) + first // KEPT
        listed = mask[0] + tl.cast(row, tl.int64) * ((time + MOVING - 1) // MOVING)
        whole = tl.load(mask[1] + 2 * row)
        shown = tl.load(mask[1] + 2 * row + 1)
    return listed, whole, shown


@triton.jit
def count_tiles(low, high, full, total, mask, whole, shown, NEAR: tl.constexpr):
    """How many of all `total` tiles are near (the last one, where it is not whole, is), or how many are far.

    With a mask: how many of those listed have a mask, or how many have none.
    """
    if mask is None:
        count = high - low + total - full if NEAR else low + full - high
    else:
        count = shown - whole if NEAR else whole
    return count


@triton.jit
def nth_tile(j, low, high, full, mask, listed, whole, NEAR: tl.constexpr):
    """The index of the j-th of them."""
    if mask is None:
        tile = low + j + tl.where(j < high - low, 0, full - high) if NEAR else j + tl.where(j < low, 0, high - low)
    else:
        tile = tl.load(listed + whole + j if NEAR else listed + j)
    return tile


@triton.jit
def is_shown(queries, keys, mask, seen, b, n, time, BANDS: tl.constexpr, COLUMNS: tl.constexpr):
    """Whether a query sees a key, from places that broadcast against each other; see :class:`.mask_blocks.Numbers`."""
    ahead = keys - queries
    shown = ahead < -time  # never
    bands = mask[2] + n * BANDS * 4
    for i in tl.static_range(BANDS):
        near = (ahead >= tl.load(bands + 4 * i)) & (ahead <= tl.load(bands + 4 * i + 1))
        near &= ahead % tl.load(bands + 4 * i + 2) == 0
        block = tl.load(bands + 4 * i + 3)
        shown |= near & (keys // block == queries // block)
    columns = mask[3] + n * COLUMNS * 3
    for i in tl.static_range(COLUMNS):
        period = tl.load(columns + 3 * i + 1)
        shown |= (keys < tl.load(columns + 3 * i)) | (keys % period >= period - tl.load(columns + 3 * i + 2))
    if seen is not None:
        shown |= tl.load(seen + tl.cast(b, tl.int64) * time + keys, mask=keys < time, other=0) != 0
    return shown


@triton.jit
def near_scores(products, distance, is_key, scale, bias, reach):
    """Scores of a near tile, in powers of two, -inf where there is no key; `bias` points at distance 0."""
    scores = products * (scale * LOG2_E)
    if bias is not None:
        # One look-up each: the compiler would preload predictable addresses into registers it lacks.
        scores += tl.load(bias + tl.minimum(tl.maximum(distance, -reach), reach))
    return tl.where(is_key, scores, float("-inf"))


@triton.jit
def bias_of(bias, n, reach):
    """(distance 0 in the head's row of a NearBias, what all from -reach down share, what all from reach up share)."""
    below = 0.0
    above = 0.0
    if bias is not None:
        bias += n * (2 * reach + 1) + reach
        below = tl.load(bias - reach)
        above = tl.load(bias + reach)
    return bias, below, above


@triton.jit
def length_of(lengths, b, time):
    """How many keys of a row of the batch are not padding."""
    return time if lengths is None else tl.load(lengths + b).to(tl.int32)
