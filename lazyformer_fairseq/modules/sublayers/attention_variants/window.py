"""``s[window=w]``: a window that slides along the text, with gaps on some heads (Longformer, section 3.1)."""

from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.modules.attention.masks import AttentionMask, Band, Part
from lazyformer_fairseq.modules.sublayers.attention_variants.interface import VariantModule
from lazyformer_fairseq.modules.sublayers.interface import SublayerOptions


class Window(VariantModule):
    """w keys to either side, in causal models to the left.

    With a dilation of r the last `dilated_heads` heads see every r-th key, w of them to either side (section 3.1, and
    4.1 for the two heads; neither the paper nor its code says which two).

    Raises:
        UserError: more dilated heads than there are.
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
                f"s[window={width},dilation={dilation}]: dilated_heads={dilated}, but there are {self.num_heads} heads"
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
