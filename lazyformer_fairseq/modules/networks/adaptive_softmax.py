"""Adaptive word embeddings and softmax: bands of words by frequency, the first computed at once, others where needed.

The rarer a band, the narrower its vectors (Baevski and Auli, 2019; the softmax: Grave et al., 2017).
"""

import itertools
import math
from collections.abc import Sequence
from typing import Optional, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.modules.processor import has_numbers


def band_sizes(vocab_size: int, cutoffs: Sequence[int]) -> list[int]:
    """Return how many words each band has: ids begin with the most frequent word, and each cut-off starts a new band.

    Args:
        vocab_size: V.
        cutoffs: increasing, between 0 and V; empty for one band.

    Raises:
        UserError: cut-offs do not increase, or do not lie between 0 and V.
    """
    given = ",".join(map(str, cutoffs))
    advice = "give others by --adaptive-softmax-cutoff, or '' for one band"
    for lower, upper in itertools.pairwise([0, *cutoffs]):
        if upper <= lower:
            raise UserError(f"adaptive softmax cut-offs {given}: {upper} is not above {lower}; {advice}")
        if upper >= vocab_size:
            raise UserError(
                f"adaptive softmax cut-offs {given}: {upper} is not below the vocabulary's {vocab_size} words; {advice}"
            )
    return [upper - lower for lower, upper in itertools.pairwise([0, *cutoffs, vocab_size])]


class Band(nn.Module):
    """The vectors of words that follow each other in rank, for input and output alike; V_b W (+ C W) parameters.

    Args:
        start: id of its first word.
        size: V_b, number of its words.
        width: W, of its vectors.
        embed_dim: C; where it differs from `width`, a projection maps one to the other and back.
    """

    def __init__(self, start: int, size: int, width: int, embed_dim: int):
        super().__init__()
        self.start = start
        self.size = size
        self.table = nn.Parameter(torch.empty(size, width))
        self.projection: Optional[nn.Parameter] = None
        if width != embed_dim:
            self.projection = nn.Parameter(torch.empty(embed_dim, width))

    def embed(self, ranks: Tensor) -> Tensor:
        """Return vectors (..., C) of ids that count from `start`."""
        vectors = F.embedding(ranks, self.table)
        if self.projection is None:
            return vectors
        return F.linear(vectors, self.projection)

    def scores(self, features: Tensor, bias: Tensor) -> Tensor:
        """Return scores (..., V_b) of the band's words from features (..., C), plus `bias` (V_b)."""
        if self.projection is None:
            narrow = features
        else:
            narrow = torch.matmul(features, self.projection)
        return F.linear(narrow, self.table, bias)


class AdaptiveEmbedding(nn.Module):
    """Embeddings by band, times sqrt(C).

    Args:
        vocab_size: V.
        embed_dim: C.
        cutoffs: ids that start a new band, see :func:`band_sizes`; empty for one band.
        div_val: band b is C / div_val^b wide; 1 for the same width everywhere, and no projections.

    Raises:
        UserError: the cut-offs do not fit the vocabulary, or `div_val` the width.
    """

    def __init__(self, vocab_size: int, embed_dim: int, cutoffs: Sequence[int] = (), div_val: int = 1):
        super().__init__()
        sizes = band_sizes(vocab_size, cutoffs)
        if div_val < 1 or embed_dim % div_val ** (len(sizes) - 1):
            raise UserError(
                f"--adaptive-softmax-factor {div_val}: {embed_dim} embedding dimensions cannot be divided by it "
                f"{len(sizes) - 1} times, once for each cut-off"
            )
        self.embed_dim = embed_dim
        starts = [0, *cutoffs]
        bands = nn.ModuleList()
        for number, (start, size) in enumerate(zip(starts, sizes, strict=True)):
            bands.append(Band(start, size, embed_dim // div_val**number, embed_dim))
        self.bands = cast(Sequence[Band], bands)

    def forward(self, tokens_BT: Tensor) -> Tensor:
        """Return vectors (B, T, C). An id beyond the vocabulary raises IndexError."""
        by_band = []
        for number, band in enumerate(self.bands):
            ranks = tokens_BT - band.start
            is_here = ranks >= 0
            if number + 1 < len(self.bands):
                is_here = is_here & (ranks < band.size)
            # Every band looks up every word, other bands' words as its first: picking its own would make a GPU wait.
            vectors = band.embed(ranks.where(is_here, 0))
            by_band.append(vectors.masked_fill(~is_here.unsqueeze(-1), 0))
        embedded = sum(by_band[1:], by_band[0])
        return embedded * math.sqrt(self.embed_dim)


class AdaptiveSoftmax(nn.Module):
    """log P(word) = log P(word or its band | head) + log P(word | band), tied to the embedding's tables.

    The head chooses between the first band's words and the other bands. V + (bands - 1) (C + 1) parameters: a bias
    for each word; a vector and a bias for each band but the first.

    Args:
        embedding: whose bands this serves. It owns the tables, so each call passes it again.
        own: tables of its own in place of those, of equal sizes; None to share them.
    """

    def __init__(self, embedding: AdaptiveEmbedding, own: Optional[AdaptiveEmbedding] = None):
        super().__init__()
        self.own = own
        self.sizes = [band.size for band in embedding.bands]
        others = len(self.sizes) - 1
        self.bias = nn.Parameter(torch.zeros(sum(self.sizes)))
        self.band_weight: Optional[nn.Parameter] = None
        self.band_bias: Optional[nn.Parameter] = None
        if others:
            self.band_weight = nn.Parameter(torch.empty(others, embedding.embed_dim))
            self.band_bias = nn.Parameter(torch.zeros(others))

    def negative_log_likelihood(self, features: Tensor, target: Tensor, embedding: AdaptiveEmbedding) -> Tensor:
        """Return -log P of the targets, in nats. A band beyond the first computes scores only for targets of its own.

        Args:
            features: (P, C) of P positions.
            target: ids (P,).
            embedding: the tables.

        Returns:
            (P,) in float32.
        """
        first, *others = (self.own or embedding).bands
        biases = self.bias.split(self.sizes)
        in_head = target
        rows_by_band = []
        for number, band in enumerate(others):
            is_here = target >= band.start
            if number + 1 < len(others):
                is_here = is_here & (target < band.start + band.size)
            in_head = in_head.masked_fill(is_here, first.size + number)
            rows_by_band.append(_rows(is_here, band, sum(self.sizes)))
        nll = _nats(self.first_scores(features, embedding), in_head)
        # Empty bands too: in training on several GPUs every weight needs a gradient, even one of zeros.
        for band, bias, rows in zip(others, biases[1:], rows_by_band, strict=True):
            within = _nats(band.scores(features[rows], bias), target[rows] - band.start)
            nll = nll.index_add(0, rows, within)
        return nll

    def log_probabilities(self, features: Tensor, embedding: AdaptiveEmbedding) -> Tensor:
        """Return log P of all words, (..., V) in float32, from features (..., C)."""
        first, *others = (self.own or embedding).bands
        head = _log_softmax(self.first_scores(features, embedding))
        parts = [head[..., : first.size]]
        for number, (band, bias) in enumerate(zip(others, self.bias.split(self.sizes)[1:], strict=True)):
            of_band = head[..., first.size + number, None]
            parts.append(of_band + _log_softmax(band.scores(features, bias)))
        return torch.cat(parts, dim=-1)

    def first_scores(self, features: Tensor, embedding: AdaptiveEmbedding) -> Tensor:
        """Return scores (..., V_0 + bands - 1) of the first band's words and of the other bands."""
        first = (self.own or embedding).bands[0]
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


def _rows(is_here: Tensor, band: Band, vocab_size: int) -> Tensor:
    """Return the places of a band's targets; of targets without numbers as many as Zipf's law expects."""
    if has_numbers(is_here):
        return is_here.nonzero().squeeze(-1)
    share = math.log((band.start + band.size) / band.start) / (math.log(vocab_size) + 0.5772)
    return torch.arange(round(share * len(is_here)), device=is_here.device)
