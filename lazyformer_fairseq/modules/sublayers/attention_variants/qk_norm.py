"""``s[qk_norm]``: normalised queries and keys (ViT-22B: Dehghani et al., 2023)."""

from typing import Optional

from torch import Tensor, nn
from typing_extensions import override

from lazyformer_fairseq.modules.attention.scores import Scores
from lazyformer_fairseq.modules.sublayers.attention_variants.interface import VariantModule
from lazyformer_fairseq.modules.sublayers.interface import SublayerOptions


class QKNorm(VariantModule):
    """RMSNorm over the D dimensions of each head's queries and keys: x / sqrt(mean(x^2) + 1e-6), times a gain.

    No score can therefore exceed sqrt(D) times the gains (section 2). There are D gains for queries and D for keys,
    initialised to 1 and shared by all heads. The paper uses LayerNorm without biases; we use RMSNorm, as Qwen3 and
    Gemma 3 do.

    The rotation of rotary positions and Transformer-XL's u, v and distances are applied after the norm. Global tokens
    and persistent keys share the gains of the ``s``. Each ``k`` has gains of its own for its queries.
    """

    @classmethod
    @override
    def build_vectors(cls, options: SublayerOptions, are_keys: bool) -> "HeadNorm":
        """Build the norm of queries or keys."""
        return HeadNorm(options.head_size, eps=1e-6)


class HeadNorm(nn.RMSNorm):
    """The RMSNorm of queries or keys, which returns them in the precision of the input."""

    def forward(  # type: ignore[override]  # a VectorMaker is called with more than a norm is
        self,
        x_BNTD: Tensor,
        _scores: Scores,
        _keys: int,
        _places_AG: Optional[Tensor] = None,
    ) -> Tensor:
        """Normalise the vectors of each head."""
        if x_BNTD.is_meta:  # FLOPs are being counted, which leaves out elementwise operations
            return x_BNTD
        # Under autocast the gains are in single precision, so the vectors must be too.
        normalised = super().forward(x_BNTD.to(self.weight.dtype))
        return normalised.to(x_BNTD.dtype)

    def without_place(self, x_NMD: Tensor) -> Tensor:
        """Normalise keys that belong to no token."""
        if x_NMD.is_meta:
            return x_NMD
        return super().forward(x_NMD)
