"""``s[window=w]``: a sliding window, optionally dilated on some heads (Longformer, section 3.1)."""

from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.modules.attention.masks import AttentionMask, Band, Part
from lazyformer_fairseq.modules.sublayers.attention_variants.interface import VariantModule
from lazyformer_fairseq.modules.sublayers.interface import SublayerOptions


class Window(VariantModule):
    """Sliding-window attention to the query's own key and to w keys on each side (in causal models only on the left).

    With dilation r, the last `dilated_heads` heads attend to every r-th key, and to w of these keys on each side
    (section 3.1). Two heads are dilated by default, as in section 4.1; neither the paper nor its code specifies which
    ones.

    Raises:
        UserError: `dilated_heads` exceeds the number of heads.
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
                f"s[window={width},dilation={dilation}]: dilated_heads={dilated} exceeds the number of "
                f"heads, {self.num_heads}; choose a smaller dilated_heads"
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
