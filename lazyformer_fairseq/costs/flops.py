"""FLOPs from pattern and sizes: twice the multiply-adds of the matrix products.

What is elementwise (softmax, LayerNorm, activations, embeddings, biases) does not count, as in PAR's Table 6 and in
:class:`torch.utils.flop_counter.FlopCounterMode`, to which a test holds these formulas. Each kind's formula stands in
its own file.
"""

from collections.abc import Callable
from typing import Optional

from lazyformer_fairseq.costs.attention_flops import PRODUCTS
from lazyformer_fairseq.patterns.grammar import PlannedSublayer, plan
from lazyformer_fairseq.patterns.kinds import DISTRIBUTION
from lazyformer_fairseq.patterns.sizes import Sizes


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
    outside = sizes.count_embedding_flops(batch * time) + sizes.count_head_flops(batch * predicted)
    sublayers = plan(pattern, sizes.direction)
    return outside + sum(count_sublayer_flops(planned, sizes, time, memory, batch) for planned in sublayers)


def count_encoder_flops(
    pattern: str,
    sizes: Sizes,
    time: int,
    batch: int = 1,
    predicted: int = 0,
    back_end: Callable[[int], str] = lambda layers: "eager",
    training: bool = False,
) -> int:
    """FLOPs that an encoder really does, which depend on how its attention runs.

    With ``eager``, and without training, this is :func:`count_flops`. A back end that computes a distribution anew is
    charged for it. Of a linear map, and of a kind's own products, the backward pass is twice the forward one.

    Args:
        pattern: see :mod:`lazyformer_fairseq.patterns.grammar`.
        sizes: of the encoder.
        time: T, tokens a sequence.
        batch: sequences.
        predicted: tokens of the whole batch that the masked-LM head predicts; 0 for no head.
        back_end: the name of the back end that a block of m layers runs on, a key of
            :data:`~lazyformer_fairseq.costs.attention_flops.PRODUCTS`.
        training: forward and backward pass.
    """
    passes = 3 if training else 1
    total = passes * sizes.count_head_flops(predicted)
    for planned in plan(pattern, sizes.direction):
        flops = planned.kind.module(sizes.direction).count_flops(sizes, planned.values, time, time, batch)
        total += passes * flops.linear
        if DISTRIBUTION in planned.kind.hands_on:
            layers = 1 + planned.readers.count(DISTRIBUTION)
            products = PRODUCTS[back_end(layers)]
            # Half of what it would take by itself: the scores, or the weighted sum of values.
            total += flops.products // 2 * products.count(layers, training)
        elif planned.kind.reads != DISTRIBUTION:  # those are in their block's count
            total += passes * flops.products
    return total


def count_sublayer_flops(planned: PlannedSublayer, sizes: Sizes, time: int, memory: int = 0, batch: int = 1) -> int:
    """FLOPs of one sublayer; arguments as :func:`count_flops`."""
    flops = planned.kind.module(sizes.direction).count_flops(sizes, planned.values, time, memory + time, batch)
    return flops.linear + flops.products
