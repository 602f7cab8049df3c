"""``s[strided=l]`` and ``s[fixed=l]``: the masks of the Sparse Transformer (Child et al., 2019).

Each mask has two parts, which together connect all positions. Section 4.3 defines the masks for causal models; in
encoders they are bidirectional. Section 5.1 combines the parts in three ways:

- interleaved over two sublayers: ``s[fixed=128,part=local] f s[fixed=128,part=summary] f``;
- merged, so that every head uses both parts (``heads=merged``);
- on separate heads (``heads=split``).

In the fixed mask, all heads use the same c positions of a block. Section 4.3 prefers different positions for each head,
which is not implemented.
"""

from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.modules.attention.masks import AttentionMask, Band, Columns, Part
from lazyformer_fairseq.modules.sublayers.attention_variants.interface import VariantModule
from lazyformer_fairseq.modules.sublayers.interface import SublayerOptions


class Sparse(VariantModule):
    """Attention with a mask of two parts, the paper's A^(1) and A^(2).

    Args:
        options: the network's options, with the settings of the ``s``.
        local: the part with keys near the query.
        summary: the part with keys that summarize the rest of the text.

    Raises:
        UserError: ``heads=split`` is set in a model with one head.
    """

    def __init__(self, options: SublayerOptions, local: Part, summary: Part):
        super().__init__(options)
        heads = options.num_heads
        if options.values["heads"] == "split":
            if heads < 2:
                raise UserError(
                    "heads=split uses separate heads for the two parts of the mask, but this model has only one head; "
                    "use more heads or heads=merged"
                )
            summarising = heads // 2
            local_heads = (heads - summarising, (local,))
            summarising_heads = (summarising, (summary,))
            self.mask = AttentionMask((local_heads, summarising_heads))
        else:
            parts: dict[str, tuple[Part, ...]] = {
                "both": (local, summary),
                "local": (local,),
                "summary": (summary,),
            }
            part = options.values["part"]
            self.mask = AttentionMask(((heads, parts[part]),))


class Strided(Sparse):
    """The strided mask: the previous l keys and every l-th key before the query; in encoders also those after it."""

    def __init__(self, options: SublayerOptions):
        step = options.values["strided"]
        if options.is_causal:
            local = Band(step, 0)
            summary = Band(None, 0, dilation=step)
        else:
            local = Band(step, step)
            summary = Band(None, None, dilation=step)
        super().__init__(options, local, summary)


class Fixed(Sparse):
    """The fixed mask: the query's own block of l keys and the last c keys of each block.

    In causal models, later keys are masked. Blocks are counted from the first key of the memory. If the lengths of the
    memory and of the segments are multiples of the block size, a position stays in the same block from segment to
    segment. With ``part=summary``, causal queries in the first block may have no keys; their output is then zero.
    """

    def __init__(self, options: SublayerOptions):
        block = options.values["fixed"]
        ahead = None
        if options.is_causal:
            ahead = 0
        local = Band(None, ahead, block=block)
        last = min(block, options.values["summary"])  # a block shorter than the default summary is used in full
        summary = Columns(period=block, last=last)
        super().__init__(options, local, summary)
