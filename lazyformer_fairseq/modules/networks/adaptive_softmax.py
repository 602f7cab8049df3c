"""Adaptive softmax: frequent words at once, bands of rarer words where needed (Grave et al., 2017)."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lazyformer_fairseq.modules.networks.adaptive_embedding import AdaptiveEmbedding, Band


class AdaptiveSoftmax(nn.Module):
    """log P(word) = log P(word or its band | head) + log P(word | band), tied to the embedding's tables.

    The head chooses between the first band's words and the other bands. V + (bands - 1) (C + 1) parameters: a bias
    for each word; a vector and a bias for each band but the first.

    Args:
        embedding: whose bands this serves. It owns the tables, so each call passes it again.
    """

    def __init__(self, embedding: AdaptiveEmbedding):
        super().__init__()
        self.sizes = [band.size for band in embedding.bands]
        others = len(self.sizes) - 1
        self.bias = nn.Parameter(torch.zeros(sum(self.sizes)))
        self.band_weight = nn.Parameter(torch.empty(others, embedding.embed_dim)) if others else None
        self.band_bias = nn.Parameter(torch.zeros(others)) if others else None

    def negative_log_likelihood(self, features: Tensor, target: Tensor, embedding: AdaptiveEmbedding) -> Tensor:
        """-log P of the targets, in nats. A band beyond the first computes scores only for targets of its own.

        Args:
            features: (P, C) of P positions.
            target: ids (P,).
            embedding: the tables.

        Returns:
            (P,) in float32.
        """
        first, *others = embedding.bands
        biases = self.bias.split(self.sizes)
        in_head, rows_by_band = target, []
        for number, band in enumerate(others):
            is_here = target >= band.start
            if number + 1 < len(others):
                is_here = is_here & (target < band.start + band.size)
            in_head = in_head.masked_fill(is_here, first.size + number)
            rows_by_band.append(is_here.nonzero().squeeze(-1))
        nll = _nats(self._head(features, first), in_head)
        # Empty bands too: in training on several GPUs every weight needs a gradient, even one of zeros.
        for band, bias, rows in zip(others, biases[1:], rows_by_band, strict=True):
            within = _nats(band.scores(features[rows], bias), target[rows] - band.start)
            nll = nll.index_add(0, rows, within)
        return nll

    def log_probabilities(self, features: Tensor, embedding: AdaptiveEmbedding) -> Tensor:
        """log P of all words, (..., V) in float32, from features (..., C)."""
        first, *others = embedding.bands
        head = _log_softmax(self._head(features, first))
        parts = [head[..., : first.size]]
        for number, (band, bias) in enumerate(zip(others, self.bias.split(self.sizes)[1:], strict=True)):
            of_band = head[..., first.size + number, None]
            parts.append(of_band + _log_softmax(band.scores(features, bias)))
        return torch.cat(parts, dim=-1)

    def _head(self, features: Tensor, first: Band) -> Tensor:
        """Scores (..., V_0 + bands - 1) of the first band's words and of the other bands."""
        words = first.scores(features, self.bias[: first.size])
        if self.band_weight is None:
            return words
        return torch.cat([words, F.linear(features, self.band_weight, self.band_bias)], dim=-1)


def _nats(scores: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(_at_least_float32(scores), target, reduction="none")


def _log_softmax(scores: Tensor) -> Tensor:
    return torch.log_softmax(_at_least_float32(scores), dim=-1)


def _at_least_float32(scores: Tensor) -> Tensor:
    return scores.to(torch.promote_types(scores.dtype, torch.float32))
