"""Tokens of several documents, one behind the other and without padding, of which each sees its own document alone.

So are blocks computed whose documents should not meet (Krell et al., 2021, 2107.02027, section 3.2.3), and batches of
texts without their padding. Sublayers of one token at a time, and projections, see all tokens in a row, (1, S, C); what
mixes tokens sees groups of documents of like lengths, each filled up to the longest. So no pair of two documents is
computed, on whatever back end.
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple, Optional

import numpy as np
import torch
from torch import Tensor

from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.modules.attention.scores import Scores

# The shortest document of a group has such a share of the longest one's tokens, or so few less: a group costs some
# calls, and what is filled up costs pairs.
LEAST_SHARE = 0.8
FEW = 24
GPU_MULTIPLE = 8  # of places: so matrix units and kernels of a GPU like it


class Group(NamedTuple):
    """Of so many documents, D, in so many places each, W.

    Attributes:
        is_padding_DW: True at what is filled up; None where nothing is.
    """

    documents: int
    width: int
    is_padding_DW: Optional[Tensor]

    @property
    def pairs(self) -> int:
        """Of query and key, that are computed."""
        return self.documents * self.width**2


class Documents:
    """How S tokens of documents in a row are grouped, and back.

    Args:
        lengths: of each document, its tokens, all above 0.

    Attributes:
        groups: the longest documents first.
        scores: of each group, what shapes its distributions; the network sets it.
    """

    scores: Sequence[Scores] = ()

    def __init__(self, lengths: np.ndarray, device: torch.device):
        multiple = 1 if device.type == "cpu" else GPU_MULTIPLE
        starts, order = np.cumsum(lengths) - lengths, np.argsort(-lengths, kind="stable")
        back, places = np.empty(lengths.sum(), np.int64), []
        self.groups: list[Group] = []
        while len(order):
            longest = lengths[order[0]]
            is_like = lengths[order] >= min(longest * LEAST_SHARE, longest - FEW)
            (chosen, order), width = (order[is_like], order[~is_like]), int(longest + -longest % multiple)
            steps, last_D1 = np.arange(width), lengths[chosen, None] - 1
            places_DW, is_padding_DW = starts[chosen, None] + np.minimum(steps, last_D1), steps > last_D1
            back[places_DW[~is_padding_DW]] = sum(map(len, places)) + np.flatnonzero(~is_padding_DW)
            places.append(places_DW.ravel())
            padding = torch.from_numpy(is_padding_DW).to(device) if is_padding_DW.any() else None
            self.groups.append(Group(len(chosen), width, padding))
        # Where in the row each token of the groups is, some token of the document at padding; and the other way round.
        self._places, self._back = (torch.from_numpy(each).to(device) for each in (np.concatenate(places), back))

    def split(self, x: Optional[Tensor]) -> list[Optional[Tensor]]:
        """(1, S, ...) -> of each group (D, W, ...); of None, None."""
        if x is None:
            return [None] * len(self.groups)
        parts = x[0].index_select(0, self._places).split([group.documents * group.width for group in self.groups])
        return [
            part.unflatten(0, (group.documents, group.width)) for part, group in zip(parts, self.groups, strict=True)
        ]

    def join(self, parts: Iterable[Tensor]) -> Tensor:
        """Of each group (D, W, ...) -> (1, S, ...)."""
        return torch.cat([part.flatten(0, 1) for part in parts]).index_select(0, self._back)[None]


class TextInARow(NamedTuple):
    """The text of a batch of sequences (B, T) as one row of S tokens, without padding.

    Attributes:
        places_S: where each token is among the B * T.
        shape: B, T.
        lengths: of all documents, their tokens, in the row's order.
        positions_S: of each token.
    """

    places_S: Tensor
    shape: tuple[int, int]
    lengths: np.ndarray
    positions_S: np.ndarray

    @classmethod
    def of(
        cls,
        documents: Sequence[Sequence[int]],
        tokens_BT: Tensor,
        padding_mask_BT: Optional[Tensor],
        is_full: bool,
        begins_anew: bool,
    ) -> "TextInARow":
        """The text of sequences that have these documents; waits for a GPU only for a mask.

        Args:
            documents: of each sequence the tokens of each of its documents.
            padding_mask_BT: None where all padding is behind the text.
            is_full: whether there is no padding.
            begins_anew: whether the positions of each document begin anew.

        Raises:
            UserError: they do not fit the text.
        """
        batch, time = tokens_BT.shape[:2]
        sizes = np.array([sum(each) for each in documents], np.int64)
        lengths = np.array([length for each in documents for length in each], np.int64)
        if len(sizes) != batch or not len(lengths) or lengths.min() < 1:
            raise UserError(
                f"documents: lengths above 0 of the documents of {batch} sequences are needed, not {documents}"
            )
        if padding_mask_BT is None:
            places, most = torch.from_numpy(np.flatnonzero(np.arange(time) < sizes[:, None])), np.full(batch, time)
        else:
            places, most = (
                padding_mask_BT.logical_not().flatten().nonzero()[:, 0],
                time - padding_mask_BT.sum(-1).numpy(force=True),
            )
        is_wrong = sizes > time if padding_mask_BT is None and not is_full else sizes != most
        if is_wrong.any():
            row = int(is_wrong.argmax())
            raise UserError(
                f"documents: those of sequence {row} have {sizes[row]} tokens together, but it has {most[row]}; count "
                "all but padding"
            )
        runs = lengths if begins_anew else sizes
        positions = np.arange(runs.sum()) - np.repeat(np.cumsum(runs) - runs, runs)
        return cls(places.to(tokens_BT.device), (batch, time), lengths, positions)

    def take(self, x: Tensor) -> Tensor:
        """(B, T, ...) -> (1, S, ...)."""
        return x.flatten(0, 1).index_select(0, self.places_S)[None]

    def spread(self, x: Tensor) -> Tensor:
        """(1, S, C) -> (B, T, C), with zeros at padding."""
        spread = x.new_zeros(self.shape[0] * self.shape[1], x.size(-1))
        return spread.index_copy(0, self.places_S, x[0]).unflatten(0, self.shape)
