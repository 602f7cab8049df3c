"""The ``c`` sublayer: a gated convolution over neighboring tokens (Wu et al., 2019, section 3)."""

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

# Number of partial sums of the filter gradient to accumulate at once. In fp32 they take 256 KB, so they stay in the
# cache.
CACHED = 2**16


class Convolution(Sublayer):
    """A gated convolution W2 conv(GLU(W1 x)).

    A projection to 2 C dimensions, half of which gate the other half, is followed by a depthwise convolution and an
    output projection. In an encoder the filter is centered on the token; a filter of even width covers one more token
    before it than after it. In a causal model the filter ends at the token and extends into the memory. Padding and
    positions outside the text are treated as zeros.

    Args:
        embed_dim: C.
        width: W, the filter width in tokens.
        num_heads: N. If positive, the convolution is a lightweight convolution: each filter is normalized by a softmax
            over its W positions and shared by the C / N channels of a head. 0 for a separate filter per channel.

    Raises:
        UserError: the embedding dimension is not divisible by the number of heads.
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
            nn.init.xavier_uniform_(self.weight.data[:, None])  # as in fairseq
        else:
            nn.init.normal_(self.weight, std=width**-0.5)  # preserves the variance if tokens are independent

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
            gated = gated * is_text[..., None]  # eight times as fast as masked_fill on a CPU
        if shared.scores.is_causal:
            before = self.width - 1
        else:
            before = self.width // 2
        after = self.width - 1 - before
        if memory_BMC is not None and before:
            # The memory is projected separately, because on a CPU the segment's matmul is faster if its token count
            # is a multiple of 128; see modules/linear.py.
            remembered = self._gated(memory_BMC[:, -before:])
            gated = torch.cat([remembered, gated], 1)
            before = before - remembered.size(1)
        return convolve(gated, self.filters(), before, after), {}

    def _gated(self, x_BTC: Tensor) -> Tensor:
        return F.glu(self.in_proj(x_BTC), -1)

    def filters(self) -> Tensor:
        """Return one filter per channel (C, W)."""
        if not self.num_heads:
            return self.weight
        by_head = self.weight.softmax(-1)
        channels_of_head = self.channels // self.num_heads
        return by_head.repeat_interleave(channels_of_head, 0)


def convolve(x_BTC: Tensor, filters_CW: Tensor, before: int, after: int) -> Tensor:
    """Convolve each channel with its filter (depthwise convolution).

    The output y[t, c] is the sum over w of filters[c, w] * x[t - before + w, c].

    Args:
        x_BTC: the input.
        filters_CW: one filter per channel.
        before: the number of zeros to insert before the first token.
        after: the number of zeros to append after the last token.

    Returns:
        A tensor (B, T + before + after - W + 1, C).
    """
    if before != after:
        x_BTC = F.pad(x_BTC, (0, 0, before, after))
        before = 0
    if x_BTC.device.type != "cpu":
        x_BCT = x_BTC.transpose(1, 2)
        convolved_BCT = F.conv1d(x_BCT, filters_CW[:, None], padding=before, groups=x_BTC.size(2))
        return convolved_BCT.transpose(1, 2)
    if torch.is_autocast_enabled("cpu"):
        x_BTC = x_BTC.to(torch.get_autocast_dtype("cpu"))
    filters_CW = filters_CW.to(x_BTC.dtype)
    # Compilers and exporters support torch's own operators, but not our autograd function.
    watched = torch.compiler.is_compiling() or torch.jit.is_tracing()
    if watched:
        return _as_image(x_BTC, filters_CW, before)
    return _Convolution.apply(x_BTC, filters_CW, before)


def _as_image(x_BTC: Tensor, filters_CW: Tensor, padding: int) -> Tensor:
    """Convolve (B, T, C) as an image of height 1.

    oneDNN does not have to copy such an image, because it is already in channels-last format.
    """
    image_BC1T = x_BTC.transpose(1, 2)[:, :, None]
    convolved_BC1T = F.conv2d(
        image_BC1T,
        filters_CW[:, None, None],
        padding=(0, padding),
        groups=x_BTC.size(2),
    )
    return convolved_BC1T[:, :, 0].mT


class _Convolution(torch.autograd.Function):
    """A convolution with a custom filter gradient, :func:`_filter_gradient`.

    The forward pass and the input gradient use :func:`_as_image`.
    """

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
    """Return the gradient of the filters (C, W).

    Each entry is the sum over tokens of the output gradient times the input by which the weight was multiplied.

    Args:
        x_BKC: the padded input, with K = T + W - 1.
        gradient_BTC: the gradient of the output.
        width: W, the filter width.
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
