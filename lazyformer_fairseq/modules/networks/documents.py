"""Tokens of several documents, one behind the other and without padding, of which each sees its own document alone.

So are blocks computed whose documents should not meet (Krell et al., 2021, 2107.02027), and batches of
texts without their padding. Sublayers of one token at a time, and projections, see all tokens in a row, (1, S, C); what
mixes tokens sees groups of documents of like lengths, each filled up to the longest. So no pair of two documents is
computed, on whatever back end.
"""

import math
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, Optional

import numpy as np
import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.modules.attention.scores import Scores

# On a processor a document is alone that takes so many multiply-adds for each thread: there a call costs less than what
# a group copies and fills up.
ALONE = 2**22
# Else the shortest document of a group has such a share of the longest one's tokens, or so few less.
LEAST_SHARE = 0.8
FEW = 24
GPU_MULTIPLE = 8  # of a group's places: so matrix units and kernels of a GPU like it


class Group(NamedTuple):
    """Documents of like lengths, each in as many places: one whose tokens begin at `start` of the row, or by indices.

    Attributes:
        documents: D.
        width: W, places of each.
        start: of a document that is alone, which has no padding; None for groups.
        from_P: where in the row the token of each of the D * W places is; at padding some token of the document.
        text: which of these places are none of padding.
        to: where in the row their tokens are.
        is_padding_DW: True at what is filled up; None where nothing is.
    """

    documents: int
    width: int
    start: Optional[int] = None
    from_P: Optional[Tensor] = None
    text: Optional[Tensor] = None
    to: Optional[Tensor] = None
    is_padding_DW: Optional[Tensor] = None

    @classmethod
    def of(cls, starts: np.ndarray, lengths: np.ndarray, device: torch.device) -> "Group":
        """Return the group of documents that begin at these places of the row; the longest one comes first."""
        if len(starts) == 1:
            return cls(1, int(lengths[0]), int(starts[0]))
        width = int(lengths[0])
        if device.type != "cpu":
            width += -width % GPU_MULTIPLE
        steps = np.arange(width)
        last_D1 = lengths[:, None] - 1
        from_DW = starts[:, None] + np.minimum(steps, last_D1)
        is_text_DW = steps <= last_D1
        arrays = (from_DW.ravel(), np.flatnonzero(is_text_DW), from_DW[is_text_DW], ~is_text_DW)
        indices = [torch.from_numpy(each).to(device) for each in arrays]
        return cls(len(starts), width, None, *(indices if not is_text_DW.all() else indices[:-1]))

    @property
    def pairs(self) -> int:
        """Number of pairs of query and key that are computed."""
        return self.documents * self.width**2

    def take(self, row_SE: Tensor) -> Tensor:
        """Return (P, E), rows of its places; at padding that of some token of the document."""
        if self.start is not None:
            return row_SE.narrow(0, self.start, self.width)
        assert self.from_P is not None, "a group that is no run has indices"
        return row_SE.index_select(0, self.from_P)

    def put(self, part_PE: Tensor, row_SE: Tensor) -> None:
        """Write into the row, without what is at padding."""
        if self.start is not None:
            row_SE.narrow(0, self.start, self.width).copy_(part_PE)
            return
        assert self.text is not None and self.to is not None, "a group that is no run has indices"
        text = part_PE
        if self.is_padding_DW is not None:
            text = part_PE.index_select(0, self.text)
        row_SE.index_copy_(0, self.to, text)


class Documents:
    """Grouping of S tokens of documents in a row, and the way back.

    Args:
        lengths: of each document, its tokens, all above 0.
        width: C, numbers of a token.
        device: of the tokens.

    Attributes:
        lengths: of each document.
        groups: the longest documents first.
        scores: of each group, what shapes its distributions; the network sets it.
    """

    scores: Sequence[Scores] = ()

    def __init__(self, lengths: np.ndarray, width: int, device: torch.device):
        alone = math.inf
        if device.type == "cpu":
            alone = math.sqrt(ALONE * torch.get_num_threads() / width)
        starts = np.cumsum(lengths) - lengths
        order = np.argsort(-lengths, kind="stable")
        self.lengths = lengths
        self.groups: list[Group] = []
        while len(order):
            longest = lengths[order[0]]
            is_like = lengths[order] >= min(longest * LEAST_SHARE, longest - FEW)
            count = 1 if longest >= alone else int(is_like.sum())
            chosen = order[:count]
            order = order[count:]
            self.groups.append(Group.of(starts[chosen], lengths[chosen], device))

    def split(self, x: Optional[Tensor]) -> list[Optional[Tensor]]:
        """Return (D, W, ...) of each group from (1, S, ...); None for None."""
        if x is None:
            return [None] * len(self.groups)
        parts = _Split.apply(x[0], self.groups)
        return [part.unflatten(0, group[:2]) for part, group in zip(parts, self.groups, strict=True)]

    def join(self, parts: Iterable[Tensor]) -> Tensor:
        """Return (1, S, ...) from (D, W, ...) of each group."""
        return _Join.apply(self.groups, *(part.flatten(0, 1) for part in parts))[None]


class _Split(torch.autograd.Function):
    """Split of a row into groups; gradients are put into one row, where torch's own would make a row of each."""

    @staticmethod
    def forward(ctx: Any, row_SE: Tensor, groups: list[Group]) -> tuple[Tensor, ...]:
        ctx.groups = groups
        ctx.size = row_SE.shape
        return tuple(group.take(row_SE) for group in groups)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *d: Tensor) -> tuple[Tensor, None]:
        return _row(d, ctx.groups, ctx.size), None


class _Join(torch.autograd.Function):
    """Joining of groups into a row; the gradient at padding is zero."""

    @staticmethod
    def forward(ctx: Any, groups: list[Group], *parts_PE: Tensor) -> Tensor:
        ctx.groups = groups
        tokens = sum(group.width if group.to is None else len(group.to) for group in groups)
        return _row(parts_PE, groups, torch.Size((tokens, *parts_PE[0].shape[1:])))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_SE: Tensor) -> tuple[Optional[Tensor], ...]:
        parts = [group.take(d_SE) for group in ctx.groups]
        for part, group in zip(parts, ctx.groups, strict=True):
            if group.is_padding_DW is not None:
                part.masked_fill_(group.is_padding_DW.view(-1, *[1] * (part.dim() - 1)), 0)
        return None, *parts


def _row(parts_PE: Sequence[Tensor], groups: Sequence[Group], size: torch.Size) -> Tensor:
    row_SE = parts_PE[0].new_empty(size)
    for part, group in zip(parts_PE, groups, strict=True):
        group.put(part, row_SE)
    return row_SE


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
        """Return the text of sequences that have these documents; it waits for a GPU only for a mask.

        Args:
            documents: of each sequence the tokens of each of its documents.
            tokens_BT: ids.
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
            places = torch.from_numpy(np.flatnonzero(np.arange(time) < sizes[:, None]))
            most = np.full(batch, time)
        else:
            places = padding_mask_BT.logical_not().flatten().nonzero()[:, 0]
            most = time - padding_mask_BT.sum(-1).numpy(force=True)
        may_be_padded = padding_mask_BT is None and not is_full
        is_wrong = sizes > time if may_be_padded else sizes != most
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
        """Return (1, S, ...) from (B, T, ...)."""
        return x.flatten(0, 1).index_select(0, self.places_S)[None]

    def places_of(self, places_M: Tensor) -> Tensor:
        """Return the places in the row of tokens at these places among the B * T, none of which is padding."""
        return torch.searchsorted(self.places_S, places_M)

    def spread(self, x: Tensor) -> Tensor:
        """Return (B, T, C) from (1, S, C), with zeros at padding."""
        spread = x.new_zeros(self.shape[0] * self.shape[1], x.size(-1))
        return spread.index_copy(0, self.places_S, x[0]).unflatten(0, self.shape)


def check_takes_documents(model: nn.Module, option: str) -> None:
    """Raise a UserError for a model that would let documents in a row see each other, or cannot compile them."""
    if not getattr(model, "takes_documents", False):
        raise UserError(f"{option}: is for encoders of this package; leave it out")
    if model.compiles:
        raise UserError(f"--compile: with {option} each batch has shapes of its own; leave one of the two out")
