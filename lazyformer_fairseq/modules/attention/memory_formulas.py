"""Formulas of the memory that back ends take, until memory is measured in their place."""

from lazyformer_fairseq.modules.attention.back_ends import CHUNK_NUMBERS
from lazyformer_fairseq.modules.attention.blockwise import CHUNK_ELEMENTS, WORTH_A_CHUNK
from lazyformer_fairseq.modules.memory_costs import SINGLE, AttentionSize, Memory

LACKS = {
    "eager": frozenset(),
    "materialize": frozenset({"entmax"}),
    "recompute": frozenset({"entmax", "synthetic"}),
    "fused": frozenset({"entmax"}),
    "flex": frozenset({"entmax", "learned", "synthetic", "unturned"}),
}
NOT_IN_TRITON = frozenset({"causal", "positions", "learned", "synthetic", "unturned", "oblong", "mask", "extra"})


def fallback_backend(name: str, has_dropout: bool, features: frozenset[str]) -> str:
    """Return the back end whose memory counts where `name` is selected."""
    lacks_dropout = has_dropout and name not in ("eager", "recompute")
    return "eager" if lacks_dropout or LACKS[name] & features else name


def count_memory(name: str, size: AttentionSize) -> Memory:
    """Count the memory of an ``s``, besides queries, keys, values and output."""
    return {
        "eager": _count_eager,
        "materialize": lambda size: _count_chunks(size, store=True),
        "recompute": _count_recompute,
        "fused": _count_fused,
        "flex": _count_flex,
    }[name](size)


def count_reuse_memory(name: str, size: AttentionSize) -> Memory:
    """Count the memory of an ``l``, besides values and output."""
    return {
        "eager": _count_eager_reuse,
        "materialize": lambda size: _count_chunks_reuse(size, store=True),
        "recompute": _count_recompute_reuse,
        "fused": _count_fused_reuse,
        "flex": _count_flex_reuse,
    }[name](size)


def _count_eager(size: AttentionSize) -> Memory:
    stored, single = size.pairs * size.number, size.pairs * size.single
    is_half = size.number < size.single
    has_positions = "positions" in size.features
    kept = single + _dropped(size) + (stored if is_half and not size.dropout else 0)
    if has_positions:  # torch multiplies with a copy of the distances for each sequence
        kept += size.batch * (size.keys + 1) * size.width * size.number
    forward = stored * (1 + has_positions) + (single if is_half else 0)
    forward += stored if is_half and size.dropout else 0
    # softmax's gradient needs P, dP and dS at once; the product's and dropout's own are gone by then.
    backward = single if size.dropout else 2 * single - (stored if is_half else 0)
    if "mask" in size.features and not is_half:  # rows that see nothing are looked for
        backward += single
    if "entmax" in size.features:
        forward, backward = forward + 3 * single, backward + 3 * single
    if size.features & {"bias", "learned"}:  # written once for all sequences
        added = size.heads * size.time * size.keys * size.number
        forward, backward = forward + added, backward + added
    pending = stored if size.consumers else 0
    return Memory(kept, forward, backward - pending, pending)  # its own dP adds to that of its consumers


def _count_eager_reuse(size: AttentionSize) -> Memory:
    """Dropout of its own, and dP."""
    stored = size.pairs * size.number
    return Memory(_dropped(size), stored if size.dropout else 0, stored * (1 + size.dropout) - _dropped(size) // 2)


def _dropped(size: AttentionSize) -> int:
    """A dropout mask, and the distribution behind it."""
    return size.pairs * (size.mask + size.number) if size.dropout else 0


def _count_fused(size: AttentionSize) -> Memory:
    if not _is_for_triton(size):
        return _count_chunks(size, store=False)
    sums = size.rows * SINGLE  # a number of each row: log-sum-exp; in the backward pass delta
    backward = size.queries + 2 * size.values + 2 * sums
    return Memory(sums, 0, backward, size.consumers * (size.queries + size.values + sums))


def _count_fused_reuse(size: AttentionSize) -> Memory:
    if not _is_for_triton(size):
        return _count_chunks_reuse(size, store=False)
    return Memory(0, 0, size.queries + size.values)


def _is_for_triton(size: AttentionSize) -> bool:
    return size.device == "cuda" and size.time == size.keys and size.features.isdisjoint(NOT_IN_TRITON)


def _count_recompute(size: AttentionSize) -> Memory:
    own = _count_attention(size)
    # Each consumer differentiates queries and keys too.
    return own._replace(pending=size.consumers and size.queries + size.values)


def _count_recompute_reuse(size: AttentionSize) -> Memory:
    """An attention of its own."""
    own = _count_attention(size._replace(consumers=0))
    by_steps = own.kept > size.pairs * size.number
    return own._replace(kept=own.kept + (size.queries + size.values if by_steps else 0))


def _count_attention(size: AttentionSize) -> Memory:
    has_positions = "positions" in size.features
    learns = bool(size.features & {"bias", "learned", "positions"})
    is_on_gpu = size.device == "cuda"
    if learns and not (size.dropout or is_on_gpu) and size.features.isdisjoint({"entmax"}):
        return _count_fused(size)
    if not is_on_gpu and (size.dropout or has_positions or learns):
        return _count_by_steps(size)
    # One kernel: a number of each row, and what is added to scores, where that is a sublayer's own.
    added = size.pairs * size.number if has_positions else 0
    at_once = min(size.pairs, max(CHUNK_NUMBERS, size.pairs // size.batch))
    gradient = at_once * size.number if has_positions or learns else 0
    return Memory(added + size.rows * SINGLE, added, size.queries + 2 * size.values + added + gradient)


def _count_by_steps(size: AttentionSize) -> Memory:
    """torch's attention where it is not fused; in single precision inside."""
    single, has_positions = size.pairs * size.single, "positions" in size.features
    copies = (size.queries + 2 * size.values) * (size.single // size.number - 1)  # in place of those given
    kept = single * (1 + 2 * size.dropout) + copies
    if has_positions:
        kept += size.batch * (size.keys + 1) * size.width * size.number
    forward = single * (2 if has_positions and size.number == size.single else 1)
    return Memory(kept, forward, single * (1 + (not size.dropout)))


def _count_chunks(size: AttentionSize, store: bool) -> Memory:
    """Of an ``s``, besides queries, keys, values and output."""
    piece, rows = _count_piece(size)
    of_piece = int(4 * size.queries * piece / size.pairs)
    # dS behind a bias leaves as many zeros as rows, see Bias.room; positions compute scores by distance besides.
    d_scores = piece * (size.keys + rows) // size.keys if "bias" in size.features else piece
    by_distance = piece if "positions" in size.features else 0
    scratch, more_scratch = (by_distance + (0 if store else piece)) * size.number, d_scores * size.number
    if size.number < SINGLE and size.device == "cpu":  # what torch subtracts there from half precision, it converts
        of_piece = max(of_piece, 2 * piece * SINGLE)
    backward = size.queries + 2 * size.values + size.batch * size.time * size.width * SINGLE + size.rows * SINGLE
    pending = size.consumers * (size.queries + size.values)
    kept = size.shown * size.number if store else 0
    if size.device == "cpu":
        return Memory(kept, of_piece, backward + of_piece, pending, scratch, more_scratch)
    return Memory(kept, scratch + of_piece, backward + of_piece + scratch + more_scratch, pending)


def _count_chunks_reuse(size: AttentionSize, store: bool) -> Memory:
    """Of an ``l``, besides values and output."""
    piece, _ = _count_piece(size)
    of_piece = int(2 * size.queries * piece / size.pairs)
    computed = 0 if store or size.device == "cpu" else piece * size.number
    return Memory(0, of_piece + computed, size.queries + size.values + of_piece + computed)


def _count_piece(size: AttentionSize) -> tuple[int, int]:
    """Numbers and rows of a piece."""
    if size.device != "cpu":
        return size.pairs, size.time
    at_once, several, rows = _piece_size(size.heads, size.time, size.keys)
    return min(size.batch, at_once) * several * rows * size.keys, rows


def _piece_size(heads: int, time: int, keys: int) -> tuple[int, int, int]:
    """Sequences, heads and rows of a processor's piece, at most."""
    rows = min(time, max(1, CHUNK_ELEMENTS // keys))
    if rows < time:
        return 1, 1, rows
    size = rows * keys  # of a head's part of a piece
    return max(1, WORTH_A_CHUNK // (heads * size)), min(heads, max(1, CHUNK_ELEMENTS // size)), rows


def _count_flex(size: AttentionSize) -> Memory:
    return _count_flex_reuse(size)._replace(pending=size.consumers and size.queries + size.values)


def _count_flex_reuse(size: AttentionSize) -> Memory:
    return Memory(size.rows * SINGLE, backward=size.queries + 2 * size.values)
