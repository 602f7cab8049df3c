"""FLOPs from pattern and sizes: twice the multiply-adds of the matrix products.

What is elementwise (softmax, LayerNorm, activations, embeddings, biases) does not count, as in PAR's Table 6 and in
:class:`torch.utils.flop_counter.FlopCounterMode`, to which a test holds these formulas.
"""

from collections.abc import Callable
from typing import Optional

from lazyformer_fairseq.costs.attention_flops import count_products
from lazyformer_fairseq.costs.sizes import EncoderSizes, Sizes
from lazyformer_fairseq.patterns.grammar import expand


def count_flops(
    pattern: str, sizes: Sizes, time: int, memory: int = 0, batch: int = 1, predicted: Optional[int] = None
) -> int:
    """FLOPs of one forward pass.

    Args:
        pattern: see :mod:`lazyformer_fairseq.patterns.grammar`.
        sizes: of an encoder with its masked-LM head, or of a causal model with its softmax.
        time: T, tokens a sequence.
        memory: M, remembered positions before them, whose keys and values are projected anew; causal models alone.
        batch: sequences.
        predicted: tokens a sequence that the head predicts; by default all. Of an adaptive softmax the first band alone
            counts: the further ones depend on the words.

    Raises:
        UserError: the pattern cannot be read.
    """
    predicted = time if predicted is None else predicted
    outside = _count_embedding_flops(sizes, batch * time) + _count_head_flops(sizes, batch * predicted)
    return outside + sum(count_sublayer_flops(kind, sizes, time, memory, batch) for kind in expand(pattern))


def count_encoder_flops(
    pattern: str,
    sizes: EncoderSizes,
    time: int,
    batch: int = 1,
    predicted: int = 0,
    back_end: Callable[[int], str] = lambda layers: "eager",
    training: bool = False,
) -> int:
    """FLOPs that an encoder really does, which depend on how its attention runs.

    With ``eager``, and without training, this is :func:`count_flops`. A back end that computes a distribution anew is
    charged for it. Of a linear map the backward pass is twice the forward one.

    Args:
        pattern: see :mod:`lazyformer_fairseq.patterns.grammar`.
        sizes: of the encoder.
        time: T, tokens a sequence.
        batch: sequences.
        predicted: tokens of the whole batch that the masked-LM head predicts; 0 for no head.
        back_end: see :func:`~lazyformer_fairseq.costs.attention_flops.count_products`.
        training: forward and backward pass.
    """
    projections = {"s": 4, "l": 2}
    c = sizes.embed_dim
    linear = _count_head_flops(sizes, predicted)
    for kind in expand(pattern):
        linear += 2 * batch * time * (projections[kind] * c if kind in projections else 2 * sizes.ffn_embed_dim) * c
    products = count_products(pattern, back_end, training)
    return (3 if training else 1) * linear + products * 2 * batch * time * time * c


def count_sublayer_flops(kind: str, sizes: Sizes, time: int, memory: int = 0, batch: int = 1) -> int:
    """FLOPs of one sublayer; arguments as :func:`count_flops`."""
    c, keys = sizes.embed_dim, memory + time
    if kind == "f":
        return 2 * batch * time * 2 * c * sizes.ffn_embed_dim
    product = 2 * batch * time * keys * c  # the scores of all heads, or the weighted sum of their values
    if kind == "l":
        return 2 * batch * (keys + time) * c * c + product
    projections = 2 * batch * (2 * keys + 2 * time) * c * c
    if isinstance(sizes, EncoderSizes):
        return projections + 2 * product
    # Distances are projected once for the whole batch. There is one more than keys: it makes the relative shift a view.
    distances = keys + 1
    return projections + 2 * distances * c * c + 2 * batch * time * distances * c + 2 * product


def _count_embedding_flops(sizes: Sizes, tokens: int) -> int:
    """Of the projections of narrower bands, to which every token is put; looking vectors up is free."""
    if isinstance(sizes, EncoderSizes):
        return 0
    return sum(2 * tokens * width * sizes.embed_dim for _, width in sizes.bands if width != sizes.embed_dim)


def _count_head_flops(sizes: Sizes, predicted: int) -> int:
    """FLOPs of `predicted` tokens' logits."""
    c = sizes.embed_dim
    if isinstance(sizes, EncoderSizes):
        return 2 * predicted * (c * c + c * sizes.vocab_size)
    first_band, _ = sizes.bands[0]
    return 2 * predicted * c * (first_band + len(sizes.cutoffs))
