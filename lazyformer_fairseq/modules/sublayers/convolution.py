"""The ``c`` sublayer: a gated convolution over neighbouring tokens (Wu et al., 2019, section 3)."""

from functools import partial
from typing import Any, Optional

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from typing_extensions import override

from lazyformer_fairseq.modules.linear import Linear
from lazyformer_fairseq.modules.sublayers.attention import check_heads
from lazyformer_fairseq.modules.sublayers.interface import (
    Context,
    Output,
    SharedState,
    Sublayer,
    SublayerOptions,
    by_document,
)
from lazyformer_fairseq.patterns.grammar import PlannedSublayer
from lazyformer_fairseq.patterns.kinds import LIGHTWEIGHT

CACHED = 2**16  # sums that a filter's gradient adds up at a time: a quarter of a megabyte, which stays near the core


class Convolution(Sublayer):
    """W2 conv(GLU(W1 x)): a projection to 2 C, of which one half gates the other, a filter a channel, a projection.

    An encoder's filter is centred; one of even width has its extra place before the token. A causal model's ends at the
    token, and reaches back into the memory. Padding, and what is before or after the text, counts as zero.

    Args:
        embed_dim: C.
        width: W, places of a filter.
        num_heads: N. Above 0 the filters are those of lightweight convolution: softmax makes each a distribution over
            its places, and the C / N channels of a head share one. 0 for a filter of its own for each channel.

    Raises:
        ValueError: heads do not divide the width of the network.
    """

    attends = takes_documents = True
    has_scores = False

    def __init__(self, embed_dim: int, width: int, num_heads: int = 0):
        super().__init__()
        self.num_heads = num_heads
        self.width = width
        self.channels = embed_dim
        self.in_proj = Linear(embed_dim, 2 * embed_dim)
        self.in_proj.blocks = 2
        self.out_proj = Linear(embed_dim, embed_dim)
        if num_heads:
            check_heads(embed_dim, num_heads)
        self.weight = nn.Parameter(torch.empty(num_heads or embed_dim, width))
        if num_heads:
            nn.init.xavier_uniform_(self.weight.data[:, None])  # as fairseq's
        else:
            nn.init.normal_(self.weight, std=width**-0.5)  # keeps the variance of independent tokens

    @classmethod
    @override
    def build(cls, options: SublayerOptions, planned: PlannedSublayer) -> "Convolution":
        heads = 0
        if planned.values["form"] == LIGHTWEIGHT:
            heads = options.num_heads
        return cls(options.embed_dim, planned.values["width"], heads)

    @override
    def forward(
        self,
        x_BTC: Tensor,
        below: SharedState,
        shared: Context,
        memory_BMC: Tensor | None = None,
    ) -> Output:
        compute = partial(self._convolved, memory_BMC)
        convolved, _ = by_document(compute, [self._gated(x_BTC)], below, shared)
        return self.out_proj(convolved), {}

    def _convolved(
        self,
        memory_BMC: Optional[Tensor],
        gated: Tensor,
        _below: SharedState,
        shared: Context,
    ) -> tuple[Tensor, SharedState]:
        is_padding = shared.scores.is_padding(gated.size(1))
        if is_padding is not None:
            is_text = (~is_padding).to(gated)
            gated = gated * is_text[..., None]  # on a processor an eighth of masked_fill's time
        if shared.scores.is_causal:  # looks back alone
            before = self.width - 1
        else:
            before = self.width // 2
        after = self.width - 1 - before
        if memory_BMC is not None and before:
            # By itself: on a processor products of a multiple of 128 tokens are faster, see modules/linear.py.
            remembered = self._gated(memory_BMC[:, -before:])
            gated = torch.cat([remembered, gated], 1)
            before = before - remembered.size(1)
        return convolve(gated, self.filters(), before, after), {}

    def _gated(self, x_BTC: Tensor) -> Tensor:
        return F.glu(self.in_proj(x_BTC), -1)

    def filters(self) -> Tensor:
        """Return the filter of each channel, (C, W)."""
        if not self.num_heads:
            return self.weight
        by_head = self.weight.softmax(-1)
        channels_of_head = self.channels // self.num_heads
        return by_head.repeat_interleave(channels_of_head, 0)


def convolve(x_BTC: Tensor, filters_CW: Tensor, before: int, after: int) -> Tensor:
    """Return the sum over w of filter (c, w) times input t - before + w, for each token t and channel c.

    Args:
        x_BTC: of T tokens.
        filters_CW: of each channel.
        before: zeros to put before; the output has T + before + after - W + 1 tokens.
        after: zeros to put behind.
    """
    if before != after:
        x_BTC = F.pad(x_BTC, (0, 0, before, after))
        before = 0
    if x_BTC.device.type != "cpu":
        x_BCT = x_BTC.transpose(1, 2)
        return F.conv1d(x_BCT, filters_CW[:, None], padding=before, groups=x_BTC.size(2)).transpose(1, 2)
    if torch.is_autocast_enabled("cpu"):
        x_BTC = x_BTC.to(torch.get_autocast_dtype("cpu"))
    filters_CW = filters_CW.to(x_BTC.dtype)
    watched = torch.compiler.is_compiling() or torch.jit.is_tracing()  # compilers and exporters know torch's operators
    if watched:
        return _as_image(x_BTC, filters_CW, before)
    return _Convolution.apply(x_BTC, filters_CW, before)


def _as_image(x_BTC: Tensor, filters_CW: Tensor, padding: int) -> Tensor:
    """Convolve by oneDNN, which takes an image of one row as it is if its channels lie next to each other."""
    image_BC1T = x_BTC.transpose(1, 2)[:, :, None]
    convolved_BC1T = F.conv2d(
        image_BC1T,
        filters_CW[:, None, None],
        padding=(0, padding),
        groups=x_BTC.size(2),
    )
    return convolved_BC1T[:, :, 0].mT


class _Convolution(torch.autograd.Function):
    """Convolution with the same forward pass and input gradient; the filters' gradient is sums of products."""

    @staticmethod
    def forward(x_BTC: Tensor, filters_CW: Tensor, padding: int) -> Tensor:
        return _as_image(x_BTC, filters_CW, padding)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor, int], _output: Tensor) -> None:
        x_BTC, filters_CW, ctx.padding = inputs
        ctx.save_for_backward(x_BTC, filters_CW)

    @staticmethod
    def backward(ctx: Any, gradient_BTC: Tensor) -> tuple[Optional[Tensor], Optional[Tensor], None]:
        x_BTC, filters_CW = ctx.saved_tensors
        width = filters_CW.size(1)
        padding = ctx.padding
        of_x = None
        of_filters = None
        if ctx.needs_input_grad[0]:
            of_x = _as_image(gradient_BTC, filters_CW.flip(1), width - 1 - padding)
        if ctx.needs_input_grad[1]:
            padded_BKC = F.pad(x_BTC, (0, 0, padding, padding))
            of_filters = _filter_gradient(padded_BKC, gradient_BTC, width)
        return of_x, of_filters, None


def _filter_gradient(x_BKC: Tensor, gradient_BTC: Tensor, width: int) -> Tensor:
    """Return (C, W): per channel and place the sum of the gradient times the input that the filter met there.

    Args:
        x_BKC: padded, K = T + W - 1.
        gradient_BTC: of the output.
        width: W.
    """
    _, time, channels = gradient_BTC.shape
    rows = min(time, max(1, CACHED // (width * channels)))
    exact = torch.promote_types(x_BKC.dtype, torch.float32)
    sums_WRC = x_BKC.new_zeros(width, rows, channels, dtype=exact)
    for x_KC, gradient_TC in zip(x_BKC, gradient_BTC, strict=True):
        for start in range(0, time, rows):
            part_RC = gradient_TC[start : start + rows].to(exact)
            count = part_RC.size(0)
            met_KC = x_KC[start : start + count + width - 1].to(exact)
            met_WRC = met_KC.unfold(0, count, 1).mT
            sums_WRC[:, :count].addcmul_(met_WRC, part_RC)
    return sums_WRC.sum(1).t().to(x_BKC.dtype)
