"""``s[window=w]``: a sliding window, optionally dilated on some heads (Longformer, section 3.1)."""

from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.modules.attention.masks import AttentionMask, Band, Part
from lazyformer_fairseq.modules.sublayers.attention_variants.interface import VariantModule
from lazyformer_fairseq.modules.sublayers.interface import SublayerOptions


class Window(VariantModule):
    """A sliding window: each query sees its own key and w keys on either side, in causal models only on the left.

    With a dilation of r, the last `dilated_heads` heads see every r-th key, w of them on either side (section 3.1). By
    default two heads are dilated, as in section 4.1; neither the paper nor its code says which two.

    Raises:
        UserError: there are fewer heads than `dilated_heads`.
    """

    def __init__(self, options: SublayerOptions):
        super().__init__(options)
        width = options.values["window"]
        dilation = options.values["dilation"]
        dilated = 0
        if dilation > 1:
            dilated = options.values["dilated_heads"]
        if dilated > self.num_heads:
            raise UserError(
                f"s[window={width},dilation={dilation}]: dilated_heads={dilated}, but the number of heads is "
                f"{self.num_heads}; give at most that many dilated_heads"
            )
        ahead = width
        if options.is_causal:
            ahead = 0
        plain = self.num_heads - dilated
        groups: list[tuple[int, tuple[Part, ...]]] = []
        if plain:
            groups.append((plain, (Band(width, ahead),)))
        if dilated:
            groups.append((dilated, (Band(width, ahead, dilation),)))
        self.mask: AttentionMask = AttentionMask(tuple(groups))
