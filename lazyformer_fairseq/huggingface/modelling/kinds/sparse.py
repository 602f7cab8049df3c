"""``s[strided=l]`` and ``s[fixed=l]``: sights of two parts (Sparse Transformer, Child et al., 2019, section 4.3)."""

from torch import Tensor
from transformers import PretrainedConfig

from ..attention import Attend, Attended, Attention, AttentionKind
from ..interface import KINDS, PlannedSublayer
from ..sights import Places, by_heads


class SparseAttention(AttentionKind):
    """A local part and one that summarises what is far away: merged, one of them, or on heads of their own."""

    def __init__(self, config: PretrainedConfig, planned: PlannedSublayer):
        super().__init__(config, planned)
        self.settings = planned.settings

    def parts(self, places: Places) -> tuple[Tensor, Tensor]:
        """Both (T, T)."""
        raise NotImplementedError

    def attend(self, attention: Attention, inner: Attend) -> Attended:
        local, summary = self.parts(Places(attention))
        if self.settings["heads"] == "split":
            half = self.num_heads // 2
            return inner(attention.seeing(by_heads(local, self.num_heads - half, summary, half)))
        return inner(attention.seeing({"both": local | summary, "local": local, "summary": summary}[self._part]))

    @property
    def _part(self) -> str:
        return self.settings["part"]


class Strided(SparseAttention):
    """The l keys to either side, and every l-th."""

    def parts(self, places: Places) -> tuple[Tensor, Tensor]:
        step = self.settings["strided"]
        return places.band(step), places.band(None, step)


class Fixed(SparseAttention):
    """The query's own block of l, and the last c of each block."""

    def parts(self, places: Places) -> tuple[Tensor, Tensor]:
        size = self.settings["fixed"]
        return places.block(size), places.ends(size, self.settings["summary"])


KINDS["strided"] = Strided
KINDS["fixed"] = Fixed
