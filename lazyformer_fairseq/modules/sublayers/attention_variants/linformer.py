"""``s[linformer=k]``: keys and values projected along the sequence to k positions (Linformer, section 4).

Each head computes softmax(Q (E K)^T / sqrt(D)) (F V), where E and F are k x n matrices (equation 7). Three details
follow the published code (``examples/linformer`` in fairseq): inputs shorter than n use the first columns of E and F,
the biases of keys and values are added after the projection along the sequence, and E and F are initialized from
N(0, 0.02) like all of RoBERTa's weights. Unlike the published code, we set padding to zero before these projections.
"""

from typing import Any, NamedTuple, Optional

import torch
from torch import Tensor, nn
from typing_extensions import override

from lazyformer_fairseq.modules.attention.scores import Scores
from lazyformer_fairseq.modules.linear import Linear, multiply_by_part
from lazyformer_fairseq.modules.sublayers.attention import merge_heads, split_heads
from lazyformer_fairseq.modules.sublayers.attention_variants.interface import (
    Attend,
    Attention,
    AttentionOutput,
    VariantModule,
)
from lazyformer_fairseq.modules.sublayers.interface import SublayerOptions

# Values of `share`. A network with L layers and N heads has 2 N L matrices (k, n) with "none", 2 L with "heads", L
# with "kv" and one with "layers".
NONE = "none"
HEADS = "heads"
KV = "kv"
LAYERS = "layers"


class Linformer(VariantModule):
    """Attention to keys and values projected along the sequence by the matrices E and F.

    Shape letters: P is the number of projected positions, n the maximum input length.

    Attributes:
        key_projection: E, (P, n); (N, P, n) if there is one matrix per head.
        value_projection: F, with the same shape; None if E is also used for values.
        common_weights: the weights of this module that are shared by the whole network, each with its key in the
            `common` options.
    """

    def __init__(self, options: SublayerOptions):
        super().__init__(options)
        share = options.values["share"]
        positions = options.values["linformer"]
        size: tuple[int, ...] = (positions, options.max_positions)
        if share == NONE:
            size = (options.num_heads, *size)
        self.key_projection: nn.Parameter
        if share == LAYERS:
            name = f"linformer={positions}"
            if name not in options.common:
                options.common[name] = _fresh(size)
            self.key_projection = options.common[name]
            self.common_weights = {"key_projection": name}
        else:
            self.key_projection = _fresh(size)
        self.value_projection: Optional[nn.Parameter]
        if share in (KV, LAYERS):
            self.register_parameter("value_projection", None)
        else:
            self.value_projection = _fresh(size)

    def project(
        self,
        x_BTC: Tensor,
        qkv_proj: Linear,
        scores: Scores,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Project the input to queries (B, T, C), keys (B, P, C) and values (B, P, C).

        E (X W) equals (E X) W. The second form is cheaper if all heads share E and P is smaller than T.

        Raises:
            ValueError: the input is longer than n tokens.
        """
        width = x_BTC.size(-1)
        time = x_BTC.size(1)
        text_BTC = text_alone(x_BTC, scores.is_padding(time))
        key_projection, value_projection = self._projections(time)
        q = multiply_by_part(qkv_proj, x_BTC, 0, width)
        if is_projected_first(key_projection, time):
            mixed_keys = torch.matmul(key_projection, text_BTC)
            mixed_values = mixed_keys
            if self.value_projection is not None:
                mixed_values = torch.matmul(value_projection, text_BTC)
            k = multiply_by_part(qkv_proj, mixed_keys, width, 2 * width)
            v = multiply_by_part(qkv_proj, mixed_values, 2 * width, 3 * width)
            return q, k, v
        k, v = multiply_by_part(qkv_proj, text_BTC, width, 3 * width, has_bias=False).chunk(2, dim=-1)
        k = project_tokens(key_projection, k, self.num_heads)
        v = project_tokens(value_projection, v, self.num_heads)
        if qkv_proj.bias is not None:
            _, key_bias, value_bias = qkv_proj.bias.chunk(3)
            k = k + key_bias
            v = v + value_bias
        return q, k, v

    @override
    def attend(self, attention: Attention, inner: Attend) -> AttentionOutput:
        """Compute attention over the projected positions."""
        time = attention.x_BTC.size(1)
        attended = inner(attention.with_scores(lengths_B=None))
        projection = self.key_projection
        if self.value_projection is not None:
            projection = self.value_projection
        is_padding_BT = attention.scores.is_padding(time)
        distribution = ProjectedDistribution(attended.distribution, projection, is_padding_BT)
        return attended._replace(distribution=distribution)

    def _projections(self, time: int) -> tuple[Tensor, Tensor]:
        """Return E and F cropped to an input of `time` tokens."""
        longest = self.key_projection.size(-1)
        if time > longest:
            raise ValueError(
                f"a sequence of {time} tokens exceeds the {longest} positions of Linformer's projections; shorten the "
                "sequence, or train a model with a larger --max-positions"
            )
        keys = first_columns(self.key_projection, time)
        if self.value_projection is None:
            return keys, keys
        return keys, first_columns(self.value_projection, time)


def text_alone(x: Tensor, is_padding_BT: Optional[Tensor]) -> Tensor:
    """Return `x` (B, T, ...) with padding set to zero."""
    if is_padding_BT is None:
        return x
    other_axes = [1] * (x.dim() - 2)
    is_padding = is_padding_BT.view(*is_padding_BT.shape, *other_axes)
    return x.masked_fill(is_padding, 0)


class ProjectedDistribution(NamedTuple):
    """The distribution P F over positions, stored as its two factors.

    Attributes:
        distribution: P, the distribution over projected positions.
        projection: F, (P, n) or (N, P, n).
        is_padding_BT: True at padding, which F ignores; None if there is no padding.
    """

    distribution: Any
    projection: Tensor
    is_padding_BT: Optional[Tensor]

    def project(self, x_BTC: Tensor, v_proj: Linear, num_heads: int) -> tuple[Tensor, Any]:
        """Project the values of an ``l`` along the sequence.

        F (X W) equals (F X) W. The second form is cheaper if all heads share F and P is smaller than T.

        Args:
            x_BTC: the input of the ``l``.
            v_proj: its value projection.
            num_heads: N.

        Returns:
            The projected values F X W + b (B, P, C), and the distribution P to apply to them.
        """
        time = x_BTC.size(1)
        projection = first_columns(self.projection, time)
        text_BTC = text_alone(x_BTC, self.is_padding_BT)
        if is_projected_first(projection, time):
            return v_proj(torch.matmul(projection, text_BTC)), self.distribution
        v_BTC = multiply_by_part(v_proj, text_BTC, 0, v_proj.out_features, has_bias=False)
        v_BPC = project_tokens(projection, v_BTC, num_heads)
        if v_proj.bias is not None:
            v_BPC = v_BPC + v_proj.bias
        return v_BPC, self.distribution

    def attend(self, v_BNTD: Tensor, dropout: float) -> Tensor:
        """Return P F V (B, N, T, D), with dropout on P."""
        text_BTC = text_alone(merge_heads(v_BNTD), self.is_padding_BT)
        v_BNTD = split_heads(text_BTC, v_BNTD.size(1))
        projection = first_columns(self.projection, v_BNTD.size(-2))
        return self.distribution.attend(project_heads(projection, v_BNTD), dropout)

    @property
    def probabilities(self) -> Tensor:
        """The weights P F (B, N, T, T); rows do not have to sum to one. Only available if P is stored."""
        probabilities = self.distribution.probabilities
        projection = first_columns(self.projection, probabilities.size(-2))
        projected_BNTT = torch.matmul(probabilities, projection)
        keys_first = text_alone(projected_BNTT.transpose(1, 3), self.is_padding_BT)
        return keys_first.transpose(1, 3)


def is_projected_first(projection: Tensor, time: int) -> bool:
    """Return whether it is cheaper to project along the sequence first, and only then to keys and values."""
    is_shared_by_heads = projection.dim() == 2
    return is_shared_by_heads and projection.size(-2) < time


def first_columns(projection: Tensor, time: int) -> Tensor:
    """Return the first `time` columns of a projection.

    Compiled graphs do not use a slice, because a graph with dynamic length would then reject the longest input.
    """
    if torch.compiler.is_compiling():
        return projection.index_select(-1, torch.arange(time, device=projection.device))
    return projection[..., :time]


def project_tokens(projection: Tensor, x_BTC: Tensor, num_heads: int) -> Tensor:
    """Multiply a projection (P, T) or (N, P, T) by (B, T, C); return (B, P, C)."""
    return merge_heads(project_heads(projection, split_heads(x_BTC, num_heads)))


def project_heads(projection: Tensor, x_BNTD: Tensor) -> Tensor:
    """Multiply a projection (P, T) or (N, P, T) by (B, N, T, D); return (B, N, P, D).

    A projection shared by all heads is applied to all heads with one matmul.
    """
    if projection.dim() == 3:
        return torch.matmul(projection, x_BNTD)
    projected_BPC = torch.matmul(projection, merge_heads(x_BNTD))
    return split_heads(projected_BPC, x_BNTD.size(1))


def _fresh(size: tuple[int, ...]) -> nn.Parameter:
    return nn.Parameter(torch.empty(size).normal_(std=0.02))
