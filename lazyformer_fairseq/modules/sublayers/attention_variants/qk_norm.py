"""``s[qk_norm]``: normalized queries and keys (ViT-22B: Dehghani et al., 2023)."""

from typing import Optional

from torch import Tensor, nn
from typing_extensions import override

from lazyformer_fairseq.modules.attention.scores import Scores
from lazyformer_fairseq.modules.sublayers.attention_variants.interface import VariantModule
from lazyformer_fairseq.modules.sublayers.interface import SublayerOptions


class QKNorm(VariantModule):
    """RMSNorm over the D dimensions of each head's queries and keys: x / sqrt(mean(x^2) + 1e-6), times a gain.

    This bounds attention scores by sqrt(D) times the gains (section 2). There are D gains for queries and D gains for
    keys. They are initialized to 1 and shared by all heads. The paper uses LayerNorm without biases; we use RMSNorm, as
    Qwen3 and Gemma 3 do.

    Rotary positions and Transformer-XL's u, v and distances are applied after the norm. Global tokens and persistent
    keys share the gains of the ``s``. Each ``k`` has its own gains for its queries.
    """

    @classmethod
    @override
    def build_vectors(cls, options: SublayerOptions, are_keys: bool) -> "HeadNorm":
        """Build the norm for queries or keys."""
        return HeadNorm(options.head_size, eps=1e-6)


class HeadNorm(nn.RMSNorm):
    """RMSNorm of queries or keys; the output has the dtype of the input."""

    def forward(  # type: ignore[override]  # a VectorMaker takes more arguments than a norm
        self,
        x_BNTD: Tensor,
        _scores: Scores,
        _keys: int,
        _places_AG: Optional[Tensor] = None,
    ) -> Tensor:
        """Normalize the vectors of each head."""
        if x_BNTD.is_meta:  # FLOPs are being counted, which exclude elementwise operations
            return x_BNTD
        # Under autocast the gains are in single precision, so the vectors must be too.
        normalised = super().forward(x_BNTD.to(self.weight.dtype))
        return normalised.to(x_BNTD.dtype)

    def without_position(self, x_NMD: Tensor) -> Tensor:
        """Normalize keys without a token, such as persistent keys."""
        if x_NMD.is_meta:
            return x_NMD
        return super().forward(x_NMD)
