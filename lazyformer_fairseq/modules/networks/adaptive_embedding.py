"""Adaptive word embeddings: the rarer a band of words, the narrower its vectors (Baevski and Auli, 2019)."""

import itertools
import math
from collections.abc import Sequence
from typing import Optional

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lazyformer_fairseq.errors import UserError


def band_sizes(vocab_size: int, cutoffs: Sequence[int]) -> list[int]:
    """How many words each band has: ids run from the most frequent word on, and each cut-off starts a new band.

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
        self.projection: Optional[nn.Parameter] = (
            nn.Parameter(torch.empty(embed_dim, width)) if width != embed_dim else None
        )

    def embed(self, ranks: Tensor) -> Tensor:
        """Vectors (..., C) of ids that count from `start`."""
        vectors = F.embedding(ranks, self.table)
        return vectors if self.projection is None else F.linear(vectors, self.projection)

    def scores(self, features: Tensor, bias: Tensor) -> Tensor:
        """Scores (..., V_b) of the band's words from features (..., C), plus `bias` (V_b)."""
        narrow = features if self.projection is None else torch.matmul(features, self.projection)
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
        self.bands = nn.ModuleList(
            Band(start, size, embed_dim // div_val**number, embed_dim)
            for number, (start, size) in enumerate(zip(starts, sizes, strict=True))
        )

    def forward(self, tokens_BT: Tensor) -> Tensor:
        """(B, T, C). An id beyond the vocabulary raises IndexError."""
        embedded = 0
        for number, band in enumerate(self.bands):
            ranks = tokens_BT - band.start
            is_here = ranks >= 0
            if number + 1 < len(self.bands):
                is_here = is_here & (ranks < band.size)
            # Every band looks up every word, other bands' words as its first: picking its own would make a GPU wait.
            vectors = band.embed(ranks.where(is_here, 0))
            embedded = embedded + vectors.masked_fill(~is_here.unsqueeze(-1), 0)
        return embedded * math.sqrt(self.embed_dim)
