"""``s[strided=l]`` and ``s[fixed=l]``: masks of two parts, which together lead everywhere (Child et al., 2019).

Section 4.3 has the two patterns, a causal model's; in an encoder they look both ways. Section 5.1 has three ways to
combine the parts: in turn, which is two sublayers (``s[fixed=128,part=local] f s[fixed=128,part=summary] f``); merged,
every head looks at both; on heads of their own. All heads see the same c positions of a block: those of their own for
each head, which section 4.3 prefers, are left out.
"""

from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.modules.attention.masks import AttentionMask, Band, Columns, Part
from lazyformer_fairseq.modules.sublayers.attention_variants.interface import VariantModule
from lazyformer_fairseq.modules.sublayers.interface import SublayerOptions


class Sparse(VariantModule):
    """A local part and one that summarises what is far away: the paper's A^(1) and A^(2).

    Args:
        options: of the network and the ``s``.
        local, summary: the two parts.

    Raises:
        UserError: ``heads=split`` with one head.
    """

    def __init__(self, options: SublayerOptions, local: Part, summary: Part):
        super().__init__(options)
        heads = options.num_heads
        if options.values["heads"] == "split":
            if heads < 2:
                raise UserError("heads=split gives each of two parts heads of its own, but this model has one head")
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
    """The l keys before the query, and every l-th; in encoders those after it too."""

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
    """The query's own block of l, and the last c of each block; in a causal model what of it is past.

    Blocks count from the first key, which is that of the memory: with a memory and segments that blocks divide, a
    position stays in its block from segment to segment. A causal query may see no summary at all (the first blocks of
    ``part=summary``): its output is zero.
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
