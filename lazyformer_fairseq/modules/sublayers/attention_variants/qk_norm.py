"""``s[qk_norm]``: queries and keys of one length before they meet (Dehghani et al., 2023: ViT-22B)."""

from typing import Optional

from torch import Tensor, nn
from typing_extensions import override

from lazyformer_fairseq.modules.attention.scores import Scores
from lazyformer_fairseq.modules.sublayers.attention_variants.interface import VariantModule
from lazyformer_fairseq.modules.sublayers.interface import SublayerOptions


class QKNorm(VariantModule):
    """RMSNorm over the D numbers of each head's queries and of its keys: x / sqrt(mean(x^2) + 1e-6), times a gain.

    So no score outgrows sqrt(D) times the gains (section 2). Gains are 1 at first, D for queries and D for keys, alike
    for all heads. The paper has LayerNorm without biases; RMSNorm is what Qwen3 and Gemma 3 have.

    Turns of rotary positions, and Transformer-XL's u, v and distances, come after it. Global tokens and persistent keys
    share the gains; a ``k`` has one of its own for its queries.
    """

    @classmethod
    @override
    def build_vectors(cls, options: SublayerOptions, are_keys: bool) -> "HeadNorm":
        """Build the norm of queries, or of keys."""
        return HeadNorm(options.head_size, eps=1e-6)


class HeadNorm(nn.RMSNorm):
    """The norm of queries or keys, in their precision."""

    def forward(  # type: ignore[override]  # a VectorMaker is called with more than a norm is
        self,
        x_BNTD: Tensor,
        _scores: Scores,
        _keys: int,
        _places_AG: Optional[Tensor] = None,
    ) -> Tensor:
        """Return the norm of each head."""
        if x_BNTD.is_meta:  # where shapes alone count, and elementwise work does not
            return x_BNTD
        # Under autocast gains are in single precision, and so is what they multiply.
        normalised = super().forward(x_BNTD.to(self.weight.dtype))
        return normalised.to(x_BNTD.dtype)

    def without_place(self, x_NMD: Tensor) -> Tensor:
        """Return the norm of keys that belong to no token."""
        if x_NMD.is_meta:
            return x_NMD
        return super().forward(x_NMD)
