"""``s[strided=l]`` and ``s[fixed=l]``: the masks of the Sparse Transformer (Child et al., 2019).

A mask has two parts, which together connect all positions. Section 4.3 defines the two masks for causal models; in an
encoder they look both ways. Section 5.1 has three ways to combine the parts:

- in turn, which takes two sublayers: ``s[fixed=128,part=local] f s[fixed=128,part=summary] f``;
- merged, where every head sees both parts (``heads=merged``);
- on separate heads (``heads=split``).

All heads see the same c positions of a block. Section 4.3 prefers different positions for each head, which we do not
implement.
"""

from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.modules.attention.masks import AttentionMask, Band, Columns, Part
from lazyformer_fairseq.modules.sublayers.attention_variants.interface import VariantModule
from lazyformer_fairseq.modules.sublayers.interface import SublayerOptions


class Sparse(VariantModule):
    """Attention with a mask of two parts, the paper's A^(1) and A^(2).

    Args:
        options: the options of the network, with the settings of the ``s``.
        local: the part with keys near the query.
        summary: the part with keys that summarise the rest of the text.

    Raises:
        UserError: ``heads=split`` is set in a model with one head.
    """

    def __init__(self, options: SublayerOptions, local: Part, summary: Part):
        super().__init__(options)
        heads = options.num_heads
        if options.values["heads"] == "split":
            if heads < 2:
                raise UserError(
                    "heads=split gives each of two parts heads of its own, but this model has one head; use more heads "
                    "or heads=merged"
                )
            summarising = heads // 2
            self.mask = AttentionMask(((heads - summarising, (local,)), (summarising, (summary,))))
        else:
            parts: dict[str, tuple[Part, ...]] = {
                "both": (local, summary),
                "local": (local,),
                "summary": (summary,),
            }
            part = options.values["part"]
            self.mask = AttentionMask(((heads, parts[part]),))


class Strided(Sparse):
    """The strided mask: the l keys before the query and every l-th key; in encoders also those after the query."""

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

    In a causal model later keys are not seen. Blocks are counted from the first key of the memory. If the
    block size divides the lengths of memory and segments, a position stays in its block from segment to segment. With
    ``part=summary``, causal queries in the first block may see no key at all; their output is zero.
    """

    def __init__(self, options: SublayerOptions):
        block = options.values["fixed"]
        ahead = None
        if options.is_causal:
            ahead = 0
        local = Band(None, ahead, block=block)
        last = min(block, options.values["summary"])  # a block shorter than the default summary is all of it
        summary = Columns(period=block, last=last)
        super().__init__(options, local, summary)
