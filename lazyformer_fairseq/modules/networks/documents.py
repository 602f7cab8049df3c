"""Documents concatenated in one row without padding, where each token sees only its own document.

This serves for blocks whose documents should not see each other (Krell et al., 2021, 2107.02027), and for computing
batches of texts without their padding. Tokenwise sublayers and projections process all tokens in one row (1, S, C).
Sublayers that mix tokens process groups of documents of similar lengths, each padded to the longest of its group. No
back end therefore computes pairs of tokens from different documents.
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

# Multiply-adds per thread from which a document gets a group of its own on a CPU: a separate call then costs less than
# the copies and the padding of a group.
ALONE = 2**22
# Otherwise the shortest document of a group has at least this share of the longest one's tokens, or at most this many
# tokens less.
LEAST_SHARE = 0.8
FEW = 24
GPU_MULTIPLE = 8  # on GPUs, lengths of groups are multiples of this, which suits matrix units and kernels


class Group(NamedTuple):
    """A group of documents of similar lengths, padded to the same length.

    A group of one document is a slice of the row; larger groups use indices.

    Attributes:
        documents: D, the number of documents.
        width: W, the padded length of each document.
        start: the index in the row of the first token of a single document, which has no padding; None for larger
            groups.
        from_P: for each of the P = D * W places, the index of its token in the row; at padding, that of some token of
            the document. None for a single document.
        text: the places that are not padding.
        to: the indices in the row of the tokens at these places.
        is_padding_DW: True at padding; None if there is none.
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
        """Return the group of the documents with these starts in the row and these lengths, the longest first."""
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
        """The number of pairs of query and key that are computed."""
        return self.documents * self.width**2

    def take(self, row_SE: Tensor) -> Tensor:
        """Return the vectors (P, E) of the group; padding holds the vector of some token of its document."""
        if self.start is not None:
            return row_SE.narrow(0, self.start, self.width)
        assert self.from_P is not None, "a group that is not a slice has indices"
        return row_SE.index_select(0, self.from_P)

    def put(self, part_PE: Tensor, row_SE: Tensor) -> None:
        """Write the vectors of the group into the row, without those at padding."""
        if self.start is not None:
            row_SE.narrow(0, self.start, self.width).copy_(part_PE)
            return
        assert self.text is not None and self.to is not None, "a group that is not a slice has indices"
        text = part_PE
        if self.is_padding_DW is not None:
            text = part_PE.index_select(0, self.text)
        row_SE.index_copy_(0, self.to, text)


class Documents:
    """The grouping of the documents in a row of S tokens, with conversions between row and groups.

    Args:
        lengths: the number of tokens of each document, all above 0.
        width: C, the embedding dimension.
        device: the device of the tokens.

    Attributes:
        lengths: the number of tokens of each document.
        groups: the groups, those of the longest documents first.
        scores: for each group, what shapes its attention distributions; set by the network.
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
        """Split a row (1, S, ...) into tensors (D, W, ...), one per group; None gives one None per group."""
        if x is None:
            return [None] * len(self.groups)
        parts = _Split.apply(x[0], self.groups)
        return [part.unflatten(0, group[:2]) for part, group in zip(parts, self.groups, strict=True)]

    def join(self, parts: Iterable[Tensor]) -> Tensor:
        """Join the tensors (D, W, ...) of all groups into a row (1, S, ...)."""
        return _Join.apply(self.groups, *(part.flatten(0, 1) for part in parts))[None]


class _Split(torch.autograd.Function):
    """The split of a row into groups.

    The backward pass writes all gradients into one row. Torch's own would allocate a row for each group.
    """

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
    """The joining of groups into a row; the gradient at padding is zero."""

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
    """The tokens of a batch of sequences (B, T) as one row of S tokens, without padding.

    Attributes:
        places_S: the index of each token among the B * T.
        shape: B and T.
        lengths: the number of tokens of each document, in the order of the row.
        positions_S: the position of each token in its sequence or document.
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
        """Return the row of a batch whose sequences consist of these documents.

        This waits for a GPU only if there is a mask.

        Args:
            documents: for each sequence, the lengths of its documents in tokens.
            tokens_BT: the ids.
            padding_mask_BT: True at padding; None if all padding comes after the text.
            is_full: whether there is no padding.
            begins_anew: whether the positions of each document start at 0.

        Raises:
            UserError: the lengths of the documents do not fit the sequences.
        """
        batch, time = tokens_BT.shape[:2]
        sizes = np.array([sum(each) for each in documents], np.int64)
        lengths = np.array([length for each in documents for length in each], np.int64)
        if len(sizes) != batch or not len(lengths) or lengths.min() < 1:
            raise UserError(
                f"documents must list lengths above 0 of the documents of each of {batch} sequences, not {documents}"
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
                f"documents: those of sequence {row} have {sizes[row]} tokens in total, but the sequence has "
                f"{most[row]}; count all tokens except padding"
            )
        runs = lengths if begins_anew else sizes
        positions = np.arange(runs.sum()) - np.repeat(np.cumsum(runs) - runs, runs)
        return cls(places.to(tokens_BT.device), (batch, time), lengths, positions)

    def take(self, x: Tensor) -> Tensor:
        """Return the row (1, S, ...) of a tensor (B, T, ...)."""
        return x.flatten(0, 1).index_select(0, self.places_S)[None]

    def places_of(self, places_M: Tensor) -> Tensor:
        """Return the indices in the row of tokens, given their indices among the B * T; none may be padding."""
        return torch.searchsorted(self.places_S, places_M)

    def spread(self, x: Tensor) -> Tensor:
        """Return the sequences (B, T, C) of a row (1, S, C), with zeros at padding."""
        spread = x.new_zeros(self.shape[0] * self.shape[1], x.size(-1))
        return spread.index_copy(0, self.places_S, x[0]).unflatten(0, self.shape)


def check_takes_documents(model: nn.Module, option: str) -> None:
    """Raise a UserError for a model that cannot keep documents in a row apart, or that is compiled.

    Args:
        model: the model.
        option: what asks for documents in a row, for the message.
    """
    if not getattr(model, "takes_documents", False):
        raise UserError(f"{option}: works only with the encoders of this package; use one, or leave the option out")
    if model.compiles:
        raise UserError(f"--compile: with {option} shapes differ from batch to batch; leave one of the two out")
