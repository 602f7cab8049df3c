"""T5's relative position bias (Raffel et al., 2019), which LazyFormer adds to absolute positions (section 3)."""

import math

import torch
from torch import Tensor, nn

from lazyformer_fairseq.modules.attention.scores import Scores


def relative_position_bucket(distance: Tensor, num_buckets: int, max_distance: int) -> Tensor:
    """T5's bidirectional buckets: one each for short distances, logarithmically wider up to `max_distance`.

    Args:
        distance: integer tensor of (key position - query position).
        num_buckets: even; the upper half serves positive distances.
        max_distance: all distances from here on share a bucket.

    Returns:
        Integer tensor of the same shape with values in [0, num_buckets).
    """
    half = num_buckets // 2
    exact = half // 2
    magnitude = distance.abs()
    # clamp from below, so that the unused branch of `where` never takes the logarithm of zero
    steps = torch.log(magnitude.clamp(min=exact).float() / exact) / math.log(max_distance / exact) * (half - exact)
    far = (exact + steps.long()).clamp(max=half - 1)
    return torch.where(magnitude < exact, magnitude, far) + half * (distance > 0)


class RelativePositionBias(nn.Module):
    """One table of biases by bucket and head, shared by all self-attention sublayers.

    Args:
        num_heads: N.
        num_buckets: rows of the table; a multiple of 4, for two directions with exact and logarithmic halves.
        max_distance: see :func:`relative_position_bucket`.
    """

    def __init__(self, num_heads: int, num_buckets: int = 32, max_distance: int = 128):
        super().__init__()
        if num_buckets % 4 or not 0 < num_buckets // 4 < max_distance:
            raise ValueError(
                f"relative position bias: {num_buckets} buckets for distances to {max_distance}; "
                "needs a positive multiple of 4 and a distance beyond a quarter of it"
            )
        self.num_buckets = num_buckets
        self.max_distance = max_distance
        self.table = nn.Parameter(torch.zeros(num_buckets, num_heads))

    def forward(self, time: int) -> Scores:
        """The bias for sequences of `time` tokens."""
        distance = torch.arange(1 - time, time, device=self.table.device)
        bucket_by_distance = relative_position_bucket(distance, self.num_buckets, self.max_distance)
        return Scores(self.table, bucket_by_distance, self.max_distance)
