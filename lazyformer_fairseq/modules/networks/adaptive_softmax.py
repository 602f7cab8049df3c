"""Adaptive embeddings and adaptive softmax, which split the vocabulary into frequency bands.

The softmax computes logits over the first band for every token, and logits over any other band only for the tokens
whose targets lie in that band (Grave et al., 2017). Bands of rarer words have narrower vectors (Baevski and Auli,
2019).
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
    """Return the number of words in each band.

    Args:
        vocab_size: V. Ids are sorted by frequency, with the most frequent word first.
        cutoffs: the first id of every band except the first, in increasing order and between 0 and V. Empty for a
            single band.

    Raises:
        UserError: If the cutoffs are not increasing or not between 0 and V.
    """
    given = ",".join(map(str, cutoffs))
    advice = "set other cutoffs with --adaptive-softmax-cutoff, or '' for a single band"
    for lower, upper in itertools.pairwise([0, *cutoffs]):
        if upper <= lower:
            raise UserError(f"adaptive softmax cutoffs {given}: {upper} is not greater than {lower}; {advice}")
        if upper >= vocab_size:
            raise UserError(
                f"adaptive softmax cutoffs {given}: {upper} is not below the vocabulary size, {vocab_size}; {advice}"
            )
    return [upper - lower for lower, upper in itertools.pairwise([0, *cutoffs, vocab_size])]


class Band(nn.Module):
    """The embedding table of one frequency band, used for both input and output.

    The words of a band have consecutive ids. A band has V_b W parameters, plus C W for the projection, if any.

    Args:
        start: the id of the first word.
        size: V_b, the number of words.
        width: W, the width of the vectors.
        embed_dim: C. If it differs from `width`, a projection maps vectors to C dimensions and features back to W.
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
        """Embed words as vectors (..., C). `ranks` are their ids minus `start`."""
        vectors = F.embedding(ranks, self.table)
        if self.projection is None:
            return vectors
        return F.linear(vectors, self.projection)

    def scores(self, features: Tensor, bias: Tensor) -> Tensor:
        """Compute logits (..., V_b) over the band's words, given features (..., C) and a bias (V_b)."""
        if self.projection is None:
            narrow = features
        else:
            narrow = torch.matmul(features, self.projection)
        return F.linear(narrow, self.table, bias)


class AdaptiveEmbedding(nn.Module):
    """A token embedding split into frequency bands and scaled by sqrt(C).

    Args:
        vocab_size: V.
        embed_dim: C.
        cutoffs: the first id of every band except the first; see :func:`band_sizes`. Empty for a single band.
        div_val: the factor by which the width shrinks from band to band: band b has width C / div_val^b. With 1, all
            bands have width C and no projections.

    Raises:
        UserError: If the cutoffs do not fit the vocabulary, or C is not divisible by `div_val` once per cutoff.
    """

    def __init__(self, vocab_size: int, embed_dim: int, cutoffs: Sequence[int] = (), div_val: int = 1):
        super().__init__()
        sizes = band_sizes(vocab_size, cutoffs)
        if div_val < 1 or embed_dim % div_val ** (len(sizes) - 1):
            raise UserError(
                f"--adaptive-softmax-factor {div_val}: the embedding dimension {embed_dim} must be divisible by this "
                f"factor once per cutoff; the number of cutoffs is {len(sizes) - 1}"
            )
        self.embed_dim = embed_dim
        starts = [0, *cutoffs]
        bands = nn.ModuleList()
        for number, (start, size) in enumerate(zip(starts, sizes, strict=True)):
            bands.append(Band(start, size, embed_dim // div_val**number, embed_dim))
        self.bands = cast(Sequence[Band], bands)

    def forward(self, tokens_BT: Tensor) -> Tensor:
        """Embed ids (B, T) as vectors (B, T, C).

        Raises:
            IndexError: If an id is V or greater (CPU only).
        """
        by_band = []
        for number, band in enumerate(self.bands):
            ranks = tokens_BT - band.start
            is_here = ranks >= 0
            if number + 1 < len(self.bands):
                is_here = is_here & (ranks < band.size)
            # Every band looks up all ids, and treats ids that belong to other bands as its first word. Selecting only
            # its own ids would force a GPU synchronization.
            vectors = band.embed(ranks.where(is_here, 0))
            by_band.append(vectors.masked_fill(~is_here.unsqueeze(-1), 0))
        embedded = sum(by_band[1:], by_band[0])
        return embedded * math.sqrt(self.embed_dim)


class AdaptiveSoftmax(nn.Module):
    """An adaptive softmax that shares the embedding's tables or has its own.

    The head, a softmax over the words of the first band and the other bands, predicts either a word of the first band
    or one of the other bands. The log-probability of a word in another band is log P(band | head) + log P(word | band).
    In addition to the tables there are V + (bands - 1) (C + 1) parameters: a bias per word, and a vector and a bias for
    every band except the first.

    Args:
        embedding: the embedding with the same bands. It owns the tables, so it is also an argument of every method.
        own: separate tables of the same sizes; None to share the embedding's tables.
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
        """Return the negative log-likelihood (P,) of the targets in nats, in float32 or higher precision.

        Bands other than the first compute logits only for their own targets.

        Args:
            features: the features (P, C) at P positions.
            target: the target ids (P,).
            embedding: the embedding that owns the shared tables.
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
        # Bands without targets are included because DDP needs a gradient for every weight, even a zero gradient.
        for band, bias, rows in zip(others, biases[1:], rows_by_band, strict=True):
            within = _nats(band.scores(features[rows], bias), target[rows] - band.start)
            nll = nll.index_add(0, rows, within)
        return nll

    def log_probabilities(self, features: Tensor, embedding: AdaptiveEmbedding) -> Tensor:
        """Return all words' log-probabilities (..., V) in float32 or higher precision, given features (..., C)."""
        first, *others = (self.own or embedding).bands
        head = _log_softmax(self.first_scores(features, embedding))
        parts = [head[..., : first.size]]
        biases = self.bias.split(self.sizes)[1:]
        for number, (band, bias) in enumerate(zip(others, biases, strict=True)):
            of_band = head[..., first.size + number, None]
            parts.append(of_band + _log_softmax(band.scores(features, bias)))
        return torch.cat(parts, dim=-1)

    def first_scores(self, features: Tensor, embedding: AdaptiveEmbedding) -> Tensor:
        """Return the head's logits (..., V_0 + bands - 1) over the words of the first band and the other bands."""
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
    """Return the indices of the targets that lie in a band.

    On fake or meta tensors, which are used to count costs and have no values, the number of targets is estimated from
    Zipf's law.
    """
    if has_numbers(is_here):
        return is_here.nonzero().squeeze(-1)
    # The harmonic series up to n is about log n + 0.5772.
    sum_in_band = math.log((band.start + band.size) / band.start)
    sum_in_vocabulary = math.log(vocab_size) + 0.5772
    count = round(sum_in_band / sum_in_vocabulary * len(is_here))
    return torch.arange(count, device=is_here.device)
