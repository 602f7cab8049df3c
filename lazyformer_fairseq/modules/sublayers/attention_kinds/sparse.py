"""``s[strided=l]`` and ``s[fixed=l]``: masks of two parts, which together lead everywhere (Child et al., 2019).

Section 4.3 has the two patterns, a causal model's; in an encoder they look both ways. Section 5.1 has three ways to
combine the parts: in turn, which is two sublayers (``s[fixed=128,part=local] f s[fixed=128,part=summary] f``); merged,
every head looks at both; on heads of their own. All heads see the same c positions of a block: those of their own for
each head, which section 4.3 prefers, are left out.
"""

from abc import abstractmethod
from collections.abc import Mapping
from typing import ClassVar

from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.modules.attention.masks import AttentionMask, Band, Columns, Part
from lazyformer_fairseq.modules.sublayers.attention_variant import Attend, Attention, AttentionOutput, AttentionVariant
from lazyformer_fairseq.modules.sublayers.interface import Settings, SublayerOptions


class Sparse(AttentionVariant):
    """A local part and one that summarises what is far away.

    Raises:
        UserError: ``heads=split`` with one head.
    """

    def __init__(self, options: SublayerOptions):
        super().__init__(options)
        self.mask = self.mask_of(options.values, options.num_heads, options.is_causal)

    @classmethod
    @abstractmethod
    def parts(cls, values: Settings, is_causal: bool) -> tuple[Part, Part]:
        """The local part and the summary: the paper's A^(1) and A^(2)."""

    @classmethod
    def features(cls, values: Settings) -> frozenset[str]:
        return frozenset({"mask"})

    @classmethod
    def mask_of(cls, values: Settings, heads: int, is_causal: bool) -> AttentionMask:
        local, summary = cls.parts(values, is_causal)
        if values["heads"] == "split":
            if heads < 2:
                raise UserError("heads=split gives each of two parts heads of its own, but this model has one head")
            return AttentionMask(((heads - heads // 2, (local,)), (heads // 2, (summary,))))
        chosen = {"both": (local, summary), "local": (local,), "summary": (summary,)}[values["part"]]
        return AttentionMask(((heads, chosen),))

    def attend(self, attention: Attention, inner: Attend) -> AttentionOutput:
        return inner(attention.with_mask(self.mask))


class Strided(Sparse):
    """The l keys before the query, and every l-th; in encoders those after it too."""

    @classmethod
    def parts(cls, values: Settings, is_causal: bool) -> tuple[Part, Part]:
        step = values["strided"]
        return Band(step, 0 if is_causal else step), Band(None, 0 if is_causal else None, dilation=step)


class Fixed(Sparse):
    """The query's own block of l, and the last c of each block; in a causal model what of it is past.

    Blocks count from the first key, which is that of the memory: with a memory and segments that blocks divide, a
    position stays in its block from segment to segment. A causal query may see no summary at all (the first blocks of
    ``part=summary``): its output is zero.
    """

    refuses: ClassVar[Mapping[str, str]] = {
        "mask": "blocks and their summaries are seen however far back they are: leave --same-length out"
    }

    @classmethod
    def parts(cls, values: Settings, is_causal: bool) -> tuple[Part, Part]:
        block = values["fixed"]  # one shorter than the default summary is all of it
        return Band(None, 0 if is_causal else None, block=block), Columns(0, block, min(block, values["summary"]))
