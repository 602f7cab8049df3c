"""Parameters of a model from its pattern and sizes, by formula: what a search or a table asks without building it."""

from lazyformer_fairseq.costs.sizes import CausalSizes, EncoderSizes, Sizes
from lazyformer_fairseq.patterns.grammar import expand


def count_parameters(pattern: str, sizes: Sizes) -> int:
    """Parameters of the whole model; what is tied counts once.

    Raises:
        UserError: the pattern cannot be read.
    """
    outside = _outside_of_encoder(sizes) if isinstance(sizes, EncoderSizes) else _outside_of_causal_model(sizes)
    return outside + sum(count_sublayer_parameters(kind, sizes) for kind in expand(pattern))


def count_sublayer_parameters(kind: str, sizes: Sizes) -> int:
    """Parameters of one sublayer, its LayerNorm included.

    In causal models the projections of attention have no biases, and an ``s`` has one more of them, of the relative
    positions (Transformer-XL, section 3.3).
    """
    c, w = sizes.embed_dim, sizes.ffn_embed_dim
    norm = 2 * c
    if kind == "f":
        return 2 * c * w + w + c + norm
    if isinstance(sizes, CausalSizes):
        return {"s": 5, "l": 2}[kind] * c * c + norm
    return {"s": 4, "l": 2}[kind] * (c * c + c) + norm


def _outside_of_encoder(sizes: EncoderSizes) -> int:
    """Embeddings, their LayerNorm (pre-norm: the output's), T5's bias, and the tied head."""
    c, v = sizes.embed_dim, sizes.vocab_size
    embeddings = v * c + sizes.max_positions * c + 2 * c
    head = c * c + 3 * c + v
    return embeddings + sizes.relative_position_buckets * sizes.num_heads + head


def _outside_of_causal_model(sizes: CausalSizes) -> int:
    """Embeddings (tied); a bias a word; a vector and a bias a further band; the two biases of all ``s``."""
    c, further = sizes.embed_dim, len(sizes.cutoffs)
    tables = sum(words * width for words, width in sizes.bands)
    projections = sum(width * c for _, width in sizes.bands if width != c)
    final_norm = 2 * c if sizes.normalize_before else 0
    return tables + projections + sizes.vocab_size + further * (c + 1) + 2 * c + final_norm
