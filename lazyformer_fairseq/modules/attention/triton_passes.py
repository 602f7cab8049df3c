"""The Triton kernels: attention of an ``s``, attention of an ``l`` (which reuses log-sum-exps), and the gradients.

The online softmax follows Milakov and Gimelshein (2018), and the loop over tiles follows FlashAttention
(Dao et al., 2022).

A program keeps one tile of queries (or keys) and loops over tiles of keys (or queries). Distances are key - query.
Tiles at distances of at least `reach` from the kept tile share one bias and need no mask. They are called *far*, and
the loop over them is a plain attention loop. The other tiles are *near*: the bias of each element is looked up in a row
of 2 reach + 1 entries (:class:`~.triton_kernels.NearBias`), and padding is masked.

An ``l`` computes the gradient of its values, and an ``s`` computes the other gradients of its block in one pass. If m
layers with values V_i and output gradients dO_i share a distribution P, the gradient of the scores is dS = P o (sum_i
dO_i V_i^T - delta), where o is the elementwise product and delta = sum_i rowsum(dO_i o O_i). In passes over keys, tiles
are transposed (keys by queries), as required by the matmuls that sum over queries.
"""

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)
# Triton must not specialize on these arguments being 1 or a multiple of 16, because it would compile a kernel for each
# case.
NOT_SPECIALIZED = ["reach", "time_class"]


@triton.jit
def own_tile(time, heads, KEPT: tl.constexpr):
    """Return the first row of this program's tile, the tile's KEPT rows, the batch index, and the head."""
    tiles = (time + KEPT - 1) // KEPT
    program = tl.program_id(0)
    head_of_batch = program // tiles
    first = program % tiles * KEPT
    return first, first + tl.arange(0, KEPT), head_of_batch // heads, head_of_batch % heads


@triton.jit
def head_of(tensor, strides, b, n):
    """Return a pointer to one head (T, D) of a tensor (B, N, T, D); `strides` contains the strides of B, N and T."""
    return tensor + tl.cast(b, tl.int64) * strides[0] + tl.cast(n, tl.int64) * strides[1]


@triton.jit
def moving_head(
    tensor,
    strides,
    b,
    n,
    limit,
    HEAD: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_D: tl.constexpr,
    DESCRIPTORS: tl.constexpr,
):
    """Return a head whose tiles a loop loads, or adds to: as a pointer, or as a descriptor if DESCRIPTORS is set.

    A descriptor loads zeros from `limit` onward, and adds nothing there.
    """
    head = head_of(tensor, strides, b, n)
    if DESCRIPTORS:
        head = tl.make_tensor_descriptor(head, [limit, HEAD], [tl.cast(strides[2], tl.int64), 1], [ROWS, BLOCK_D])
    return head


@triton.jit
def rows_of(head, start, stride, ROWS: tl.constexpr, BLOCK_D: tl.constexpr):
    """Return pointers (ROWS, BLOCK_D) to a head's rows, starting at `start`."""
    first = head + start * tl.cast(stride, tl.int64)
    rows = tl.arange(0, ROWS)[:, None]
    entries = tl.arange(0, BLOCK_D)[None, :]
    return first + rows * stride + entries


@triton.jit
def inside(start, limit, HEAD: tl.constexpr, ROWS: tl.constexpr, BLOCK_D: tl.constexpr):
    """Return a mask (ROWS, BLOCK_D) that is True at the first HEAD entries of rows before `limit`."""
    rows = (start + tl.arange(0, ROWS))[:, None]
    entries = tl.arange(0, BLOCK_D)[None, :]
    return (rows < limit) & (entries < HEAD)


@triton.jit
def store_rows(
    tensor,
    strides,
    b,
    n,
    start,
    values,
    limit,
    HEAD: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Store a head's rows from `start` to `limit`, converted to the data type of the tensor."""
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
    """Load rows (ROWS, BLOCK_D) starting at `start`, zero-padded; WHOLE asserts that all rows are before `limit`.

    `head` is a pointer, or a descriptor of blocks of this size with the same `limit`.
    """
    if isinstance(head, tl.tensor):
        pointers = rows_of(head, start, stride, ROWS, BLOCK_D)
        if WHOLE and HEAD == BLOCK_D:
            loaded = tl.load(pointers)
        else:
            loaded = tl.load(pointers, mask=inside(start, limit, HEAD, ROWS, BLOCK_D), other=0.0)
    else:
        loaded = head.load([start, 0])
    return loaded


@triton.jit
def add_rows(
    head,
    start,
    stride,
    values,
    limit,
    HEAD: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_D: tl.constexpr,
    WHOLE: tl.constexpr,
):
    """Add to the rows that :func:`load_rows` would load, atomically and in any order."""
    if isinstance(head, tl.tensor):
        pointers = rows_of(head, start, stride, ROWS, BLOCK_D)
        is_whole: tl.constexpr = WHOLE and HEAD == BLOCK_D
        is_inside = None if is_whole else inside(start, limit, HEAD, ROWS, BLOCK_D)
        tl.atomic_add(pointers, values, mask=is_inside, sem="relaxed")
    else:
        head.atomic_add([start, 0], values)


@triton.jit
def far_tiles(kept, full, bias, reach, KEPT: tl.constexpr, MOVING: tl.constexpr):
    """Return `low` and `high`, the bounds of the near tiles among the `full` whole tiles of MOVING rows.

    Tiles before `low` and tiles from `high` onward are far. `kept` is the first of the KEPT rows of the kept tile.
    Without a bias, every whole tile is far.
    """
    if bias is None:
        low = full
        high = full
    else:
        low = tl.minimum(tl.maximum(kept - reach + 1, 0) // MOVING, full)
        high = tl.minimum((kept + KEPT - 1 + reach + MOVING - 1) // MOVING, full)
    return low, high


@triton.jit
def count_tiles(low, high, full, total, NEAR: tl.constexpr):
    """Count the near or far tiles among all `total` tiles; an incomplete last tile is near."""
    if NEAR:
        return high - low + total - full
    return low + full - high


@triton.jit
def nth_tile(j, low, high, full, NEAR: tl.constexpr):
    """Return the index of the j-th near or far tile."""
    if NEAR:
        return low + j + tl.where(j < high - low, 0, full - high)
    return j + tl.where(j < low, 0, high - low)


@triton.jit
def near_scores(products, distance, is_key, scale, bias, reach):
    """Compute a near tile's scores times log2(e), -inf where there is no key; `bias` points to distance 0."""
    scores = products * (scale * LOG2_E)
    if bias is not None:
        # Each element is looked up individually. The compiler would preload values at predictable addresses, but there
        # are too few registers for them.
        scores += tl.load(bias + tl.minimum(tl.maximum(distance, -reach), reach))
    return tl.where(is_key, scores, float("-inf"))


@triton.jit
def far_biases(bias, reach):
    """Load the biases for distances <= -reach and for distances >= reach; `bias` points to distance 0."""
    below = 0.0
    above = 0.0
    if bias is not None:
        below = tl.load(bias - reach)
        above = tl.load(bias + reach)
    return below, above


@triton.jit
def length_of(lengths, b, time):
    """Load the number of keys in a sequence that are not padding."""
    if lengths is None:
        length = time
    else:  # with an early return instead, Triton would still compile this
        length = tl.load(lengths + b).to(tl.int32)
    return length


@triton.jit(do_not_specialize=["time", "reach"])
def write_rows(rows, table, bucket_stride, head_stride, bucket_by_distance, time, reach, BLOCK: tl.constexpr):
    """Write the `rows` of a NearBias. Each program writes BLOCK distances for one head."""
    n = tl.program_id(1)
    entry = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    exists = entry <= 2 * reach
    bucket = tl.load(bucket_by_distance + time - 1 - reach + entry, mask=exists, other=0)
    bias = tl.load(table + bucket * bucket_stride + n * head_stride).to(tl.float32) * LOG2_E
    tl.store(rows + n * (2 * reach + 1) + entry, bias.to(rows.dtype.element_ty), mask=exists)


@triton.jit(do_not_specialize=NOT_SPECIALIZED)
def forward_kernel(
    q,
    k,
    v,
    bias,
    lengths,
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
    time_class,
    HEAD: tl.constexpr,
    BLOCK_D: tl.constexpr,
    REUSES: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_K: tl.constexpr,
    DESCRIPTORS: tl.constexpr,
):
    """Compute softmax(scale QK^T + bias) V for a tile of queries; write `lse` (B, N, T), or read it if REUSES is set.

    `time_class` is only used by autotuning.
    """
    first_query, queries, b, n = own_tile(time, heads, BLOCK_Q)
    length = length_of(lengths, b, time)
    if bias is not None:  # inlined, because functions in Triton 3.6 cannot return None
        bias += n * (2 * reach + 1) + reach
    below, above = far_biases(bias, reach)
    k_head = moving_head(k, k_strides, b, n, length, HEAD, BLOCK_K, BLOCK_D, DESCRIPTORS)
    v_head = moving_head(v, v_strides, b, n, length, HEAD, BLOCK_K, BLOCK_D, DESCRIPTORS)
    q_rows = load_rows(head_of(q, q_strides, b, n), first_query, q_strides[2], time, HEAD, BLOCK_Q, BLOCK_D, False)
    lse += tl.cast(b * heads + n, tl.int64) * time + queries

    if REUSES:
        row_max = tl.load(lse, mask=queries < time, other=0.0) * LOG2_E
    else:
        row_max = tl.full([BLOCK_Q], float("-inf"), tl.float32)
    row_sum = tl.zeros([BLOCK_Q], tl.float32)
    output = tl.zeros([BLOCK_Q, BLOCK_D], tl.float32)

    full = length // BLOCK_K
    total = (length + BLOCK_K - 1) // BLOCK_K
    low, high = far_tiles(first_query, full, bias, reach, BLOCK_Q, BLOCK_K)
    for near in tl.static_range(2):
        for j in range(count_tiles(low, high, full, total, near)):
            tile = nth_tile(j, low, high, full, near)
            first_key = tile * BLOCK_K
            k_rows = load_rows(k_head, first_key, k_strides[2], length, HEAD, BLOCK_K, BLOCK_D, near == 0)
            products = tl.dot(q_rows, tl.trans(k_rows), input_precision="ieee")
            if near:
                keys = first_key + tl.arange(0, BLOCK_K)
                distance = keys[None, :] - queries[:, None]
                is_key = keys[None, :] < length
                scores = near_scores(products, distance, is_key, scale, bias, reach)
                far_bias = 0.0
                factor = 1.0
            else:
                scores = products
                far_bias = tl.where(tile < low, below, above)
                factor = scale * LOG2_E
            if not REUSES:
                new_max = tl.maximum(row_max, tl.max(scores, 1) * factor + far_bias)
                shrink = tl.exp2(row_max - new_max)
                output *= shrink[:, None]
                row_max = new_max
            probabilities = tl.exp2(scores * factor + (far_bias - row_max)[:, None])
            if not REUSES:
                row_sum = row_sum * shrink + tl.sum(probabilities, 1)
            v_rows = load_rows(v_head, first_key, v_strides[2], length, HEAD, BLOCK_K, BLOCK_D, near == 0)
            output = tl.dot(probabilities.to(v_rows.dtype), v_rows, output, input_precision="ieee")

    if not REUSES:
        output /= row_sum[:, None]
        tl.store(lse, (row_max + tl.log2(row_sum)) * LN_2, mask=queries < time)
    store_rows(o, o_strides, b, n, first_query, output, time, HEAD, BLOCK_Q, BLOCK_D)


@triton.jit
def load_row(per_query, queries, time, beyond, NEAR: tl.constexpr):
    """Load one number per query, with `beyond` where there is no query."""
    pointers = per_query + queries
    if NEAR:
        return tl.load(pointers, mask=queries < time, other=beyond)
    return tl.load(pointers)


@triton.jit
def query_tiles(first_key, length, time, KEPT: tl.constexpr, MOVING: tl.constexpr):
    """Count the whole query tiles, and all query tiles, for a key tile; no tile is whole if any key is padding."""
    full = tl.where(first_key + KEPT <= length, time // MOVING, 0)
    total = tl.where(first_key < length, (time + MOVING - 1) // MOVING, 0)
    return full, total


@triton.jit
def transposed_probabilities(
    k_rows,
    q_rows,
    keys,
    queries,
    lse,
    length,
    time,
    scale,
    bias,
    reach,
    far_bias,
    NEAR: tl.constexpr,
):
    """Compute P^T (keys, queries) in float32, with zeros at padding and where there is no query."""
    products = tl.dot(k_rows, tl.trans(q_rows), input_precision="ieee")
    log_sums = load_row(lse, queries, time, float("inf"), NEAR) * LOG2_E
    if NEAR:
        distance = keys[:, None] - queries[None, :]
        is_key = keys[:, None] < length
        scores = near_scores(products, distance, is_key, scale, bias, reach) - log_sums[None, :]
    else:
        scores = products * (scale * LOG2_E) + (far_bias - log_sums)[None, :]
    return tl.exp2(scores)


@triton.jit
def row_sums_kernel(
    d_output,
    output,
    sums,
    d_output_strides,
    output_strides,
    time,
    heads,
    HEAD: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_Q: tl.constexpr,
):
    """Compute rowsum(dO o O) for a tile of queries."""
    first, queries, b, n = own_tile(time, heads, BLOCK_Q)
    d_head = head_of(d_output, d_output_strides, b, n)
    head = head_of(output, output_strides, b, n)
    d_rows = load_rows(d_head, first, d_output_strides[2], time, HEAD, BLOCK_Q, BLOCK_D, False).to(tl.float32)
    rows = load_rows(head, first, output_strides[2], time, HEAD, BLOCK_Q, BLOCK_D, False).to(tl.float32)
    sums += tl.cast(b * heads + n, tl.int64) * time
    tl.store(sums + queries, tl.sum(d_rows * rows, 1), mask=queries < time)


@triton.jit(do_not_specialize=NOT_SPECIALIZED)
def value_gradient_kernel(
    q,
    k,
    d_output,
    lse,
    bias,
    lengths,
    dv,
    q_strides,
    k_strides,
    d_output_strides,
    dv_strides,
    scale,
    time,
    heads,
    reach,
    time_class,
    HEAD: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_K: tl.constexpr,
    DESCRIPTORS: tl.constexpr,
):
    """Compute dV = P^T dO for a tile of keys."""
    first_key, keys, b, n = own_tile(time, heads, BLOCK_K)
    length = length_of(lengths, b, time)
    if bias is not None:
        bias += n * (2 * reach + 1) + reach
    below, above = far_biases(bias, reach)
    q_head = moving_head(q, q_strides, b, n, time, HEAD, BLOCK_Q, BLOCK_D, DESCRIPTORS)
    d_output_head = moving_head(d_output, d_output_strides, b, n, time, HEAD, BLOCK_Q, BLOCK_D, DESCRIPTORS)
    k_rows = load_rows(head_of(k, k_strides, b, n), first_key, k_strides[2], length, HEAD, BLOCK_K, BLOCK_D, False)
    lse += tl.cast(b * heads + n, tl.int64) * time
    gradient = tl.zeros([BLOCK_K, BLOCK_D], tl.float32)

    full, total = query_tiles(first_key, length, time, BLOCK_K, BLOCK_Q)
    low, high = far_tiles(first_key, full, bias, reach, BLOCK_K, BLOCK_Q)
    for near in tl.static_range(2):
        for j in range(count_tiles(low, high, full, total, near)):
            tile = nth_tile(j, low, high, full, near)
            first_query = tile * BLOCK_Q
            queries = first_query + tl.arange(0, BLOCK_Q)
            q_rows = load_rows(q_head, first_query, q_strides[2], time, HEAD, BLOCK_Q, BLOCK_D, near == 0)
            far_bias = tl.where(tile < low, above, below)
            p = transposed_probabilities(
                k_rows,
                q_rows,
                keys,
                queries,
                lse,
                length,
                time,
                scale,
                bias,
                reach,
                far_bias,
                near,
            )
            rows = load_rows(d_output_head, first_query, d_output_strides[2], time, HEAD, BLOCK_Q, BLOCK_D, near == 0)
            gradient = tl.dot(p.to(rows.dtype), rows, gradient, input_precision="ieee")

    store_rows(dv, dv_strides, b, n, first_key, gradient, time, HEAD, BLOCK_K, BLOCK_D)


@triton.jit(do_not_specialize=[*NOT_SPECIALIZED, "far_slots"])
def key_side_kernel(
    q,
    k,
    values,
    d_outputs,
    lse,
    delta,
    bias,
    lengths,
    dq,
    dk,
    dv,
    band,
    far_sums,
    far_slots,
    q_strides,
    k_strides,
    values_strides,
    d_outputs_strides,
    dq_strides,
    dk_strides,
    dv_strides,
    scale,
    time,
    heads,
    reach,
    time_class,
    HEAD: tl.constexpr,
    BLOCK_D: tl.constexpr,
    M: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_K: tl.constexpr,
    DESCRIPTORS: tl.constexpr,
):
    """Compute dK and the first layer's dV for a tile of keys, and the tile's contribution to dQ and the bias gradient.

    `dq` is in float32 and initially zero; programs add to it in a nondeterministic order. `band`
    (B, N, T, 2 reach + 1), initially zero, receives dS by query and distance for distances less than `reach`.
    `far_sums` (B, N, far_slots, 2), initially zero, receives the sums of dS over this tile at distances <= -reach and
    at distances >= reach.
    """
    first_key, keys, b, n = own_tile(time, heads, BLOCK_K)
    length = length_of(lengths, b, time)
    if bias is not None:
        bias += n * (2 * reach + 1) + reach
    below, above = far_biases(bias, reach)
    q_head = moving_head(q, q_strides, b, n, time, HEAD, BLOCK_Q, BLOCK_D, DESCRIPTORS)
    dq_head = moving_head(dq, dq_strides, b, n, time, HEAD, BLOCK_Q, BLOCK_D, DESCRIPTORS)
    k_rows = load_rows(head_of(k, k_strides, b, n), first_key, k_strides[2], length, HEAD, BLOCK_K, BLOCK_D, False)
    v_tiles = ()
    d_output_heads = ()
    for i in tl.static_range(M):
        v_head = head_of(values[i], values_strides[i], b, n)
        v_tiles += (load_rows(v_head, first_key, values_strides[i][2], length, HEAD, BLOCK_K, BLOCK_D, False),)
        d_output_heads += (
            moving_head(d_outputs[i], d_outputs_strides[i], b, n, time, HEAD, BLOCK_Q, BLOCK_D, DESCRIPTORS),
        )
    row_of_head = tl.cast(b * heads + n, tl.int64) * time
    lse += row_of_head
    delta += row_of_head
    if band is not None:
        band += row_of_head * (2 * reach + 1) + reach
    d_key = tl.zeros([BLOCK_K, BLOCK_D], tl.float32)
    d_value = tl.zeros([BLOCK_K, BLOCK_D], tl.float32)
    sum_below = tl.zeros([BLOCK_K], tl.float32)
    sum_above = tl.zeros([BLOCK_K], tl.float32)

    full, total = query_tiles(first_key, length, time, BLOCK_K, BLOCK_Q)
    low, high = far_tiles(first_key, full, bias, reach, BLOCK_K, BLOCK_Q)
    for near in tl.static_range(2):
        for j in range(count_tiles(low, high, full, total, near)):
            tile = nth_tile(j, low, high, full, near)
            first_query = tile * BLOCK_Q
            queries = first_query + tl.arange(0, BLOCK_Q)
            q_rows = load_rows(q_head, first_query, q_strides[2], time, HEAD, BLOCK_Q, BLOCK_D, near == 0)
            far_bias = tl.where(tile < low, above, below)
            p = transposed_probabilities(
                k_rows,
                q_rows,
                keys,
                queries,
                lse,
                length,
                time,
                scale,
                bias,
                reach,
                far_bias,
                near,
            )
            dp = tl.zeros([BLOCK_K, BLOCK_Q], tl.float32)
            for i in tl.static_range(M):
                rows = load_rows(
                    d_output_heads[i],
                    first_query,
                    d_outputs_strides[i][2],
                    time,
                    HEAD,
                    BLOCK_Q,
                    BLOCK_D,
                    near == 0,
                )
                dp = tl.dot(v_tiles[i], tl.trans(rows), dp, input_precision="ieee")
                if i == 0:
                    d_value = tl.dot(p.to(rows.dtype), rows, d_value, input_precision="ieee")
            ds = p * (dp - load_row(delta, queries, time, 0.0, near)[None, :])
            rounded = ds.to(q_rows.dtype)
            if band is not None:
                if near:
                    distance = keys[:, None] - queries[None, :]
                    in_band = (tl.abs(distance) < reach) & (queries[None, :] < time)
                    tl.store(band + queries[None, :] * (2 * reach + 1) + distance, rounded, mask=in_band)
                    sum_below += tl.sum(tl.where(distance <= -reach, ds, 0.0), 1)
                    sum_above += tl.sum(tl.where(distance >= reach, ds, 0.0), 1)
                else:
                    by_key = tl.sum(ds, 1)
                    sum_below += tl.where(tile < low, 0.0, by_key)
                    sum_above += tl.where(tile < low, by_key, 0.0)
            d_key = tl.dot(rounded, q_rows, d_key, input_precision="ieee")
            d_query = tl.dot(tl.trans(rounded), k_rows, input_precision="ieee") * scale
            add_rows(dq_head, first_query, dq_strides[2], d_query, time, HEAD, BLOCK_Q, BLOCK_D, near == 0)

    store_rows(dk, dk_strides, b, n, first_key, d_key * scale, time, HEAD, BLOCK_K, BLOCK_D)
    store_rows(dv, dv_strides, b, n, first_key, d_value, time, HEAD, BLOCK_K, BLOCK_D)
    if band is not None:
        far_sums += ((b * heads + n) * far_slots + first_key // BLOCK_K) * 2
        tl.store(far_sums, tl.sum(sum_below, 0))
        tl.store(far_sums + 1, tl.sum(sum_above, 0))
