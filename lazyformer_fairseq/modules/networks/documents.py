"""Documents packed into one row without padding, where each token sees only its own document.

Packing is used for blocks with several documents that should not see each other (Krell et al., 2021, 2107.02027), and
to avoid computing outputs for padding in batches of texts. Tokenwise sublayers and projections process all tokens in
one row (1, S, C). Sublayers that mix tokens process the documents in groups of similar length, where each document is
padded to the length of the longest one in its group. No back end therefore computes attention between different
documents.
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

# Number of multiply-adds per thread above which a document gets a separate group on a CPU: an additional call then
# costs less than copying and padding the documents of a larger group.
MIN_MULTIPLY_ADDS_FOR_OWN_GROUP = 2**22
# Otherwise, a document joins a group if it has at least this fraction of the longest document's tokens, or if it is
# shorter by at most this many tokens.
MIN_LENGTH_RATIO = 0.8
MAX_LENGTH_DIFFERENCE = 24
GPU_MULTIPLE = 8  # padded lengths on GPUs are multiples of this, to suit tensor cores and kernels


class Group(NamedTuple):
    """A group of documents of similar length, padded to a common length.

    A group with one document is a slice of the row; larger groups use indices.

    Attributes:
        documents: D, the number of documents.
        width: W, the padded length of each document.
        start: the row index of the first token, if the group is a single document, which needs no padding; None for
            larger groups.
        from_P: the row index of the token at each of the P = D * W positions; at padding, it is the index of some token
            of the same document. None for a single document.
        text: the indices of the positions that are not padding.
        to: the row indices of the tokens at these positions.
        is_padding_DW: True at padding; None if there is no padding.
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
        """Build a group from its documents' lengths and start indices in the row; the longest must come first."""
        if len(starts) == 1:
            return cls(documents=1, width=int(lengths[0]), start=int(starts[0]))
        width = int(lengths[0])
        if device.type != "cpu":
            width += -width % GPU_MULTIPLE
        steps = np.arange(width)
        last_D1 = lengths[:, None] - 1
        from_DW = starts[:, None] + np.minimum(steps, last_D1)
        is_text_DW = steps <= last_D1
        is_padding_DW = None
        if not is_text_DW.all():
            is_padding_DW = torch.from_numpy(~is_text_DW).to(device)
        return cls(
            documents=len(starts),
            width=width,
            from_P=torch.from_numpy(from_DW.ravel()).to(device),
            text=torch.from_numpy(np.flatnonzero(is_text_DW)).to(device),
            to=torch.from_numpy(from_DW[is_text_DW]).to(device),
            is_padding_DW=is_padding_DW,
        )

    @property
    def pairs(self) -> int:
        """The number of query-key pairs that are computed."""
        return self.documents * self.width**2

    def take(self, row_SE: Tensor) -> Tensor:
        """Select the group's vectors (P, E); padding gets the vector of some token of the same document."""
        if self.start is not None:
            return row_SE.narrow(0, self.start, self.width)
        assert self.from_P is not None, "a group that is not a slice has indices"
        return row_SE.index_select(0, self.from_P)

    def put(self, part_PE: Tensor, row_SE: Tensor) -> None:
        """Write the group's vectors into the row, except those at padding."""
        if self.start is not None:
            row_SE.narrow(0, self.start, self.width).copy_(part_PE)
            return
        assert self.text is not None and self.to is not None, "a group that is not a slice has indices"
        text = part_PE
        if self.is_padding_DW is not None:
            text = part_PE.index_select(0, self.text)
        row_SE.index_copy_(0, self.to, text)


class Documents:
    """The documents in a row of S tokens, divided into groups, and conversions between the row and the groups.

    Args:
        lengths: the number of tokens in each document; all must be positive.
        width: C, the embedding dimension.
        device: the device of the tokens.

    Attributes:
        lengths: the number of tokens in each document.
        groups: the groups, ordered by decreasing document length.
        scores: one Scores object per group, set by the network; it determines the group's attention distributions.
    """

    scores: Sequence[Scores] = ()

    def __init__(self, lengths: np.ndarray, width: int, device: torch.device):
        alone = math.inf
        if device.type == "cpu":
            alone = math.sqrt(MIN_MULTIPLY_ADDS_FOR_OWN_GROUP * torch.get_num_threads() / width)
        starts = np.cumsum(lengths) - lengths
        order = np.argsort(-lengths, kind="stable")
        self.lengths = lengths
        self.groups: list[Group] = []
        while len(order):
            longest = lengths[order[0]]
            is_like = lengths[order] >= min(longest * MIN_LENGTH_RATIO, longest - MAX_LENGTH_DIFFERENCE)
            count = 1 if longest >= alone else int(is_like.sum())
            chosen = order[:count]
            order = order[count:]
            self.groups.append(Group.of(starts[chosen], lengths[chosen], device))

    def split(self, x: Optional[Tensor]) -> list[Optional[Tensor]]:
        """Split a row (1, S, ...) into one tensor (D, W, ...) per group. If `x` is None, return a list of None."""
        if x is None:
            return [None] * len(self.groups)
        parts = _Split.apply(x[0], self.groups)
        found: list[Optional[Tensor]] = []
        for part, group in zip(parts, self.groups, strict=True):
            found.append(part.unflatten(0, (group.documents, group.width)))
        return found

    def join(self, parts: Iterable[Tensor]) -> Tensor:
        """Join the tensors (D, W, ...) of all groups into a row (1, S, ...)."""
        parts_PE = [part.flatten(0, 1) for part in parts]
        return _Join.apply(self.groups, *parts_PE)[None]


class _Split(torch.autograd.Function):
    """An autograd function that splits a row into groups.

    The backward pass writes all gradients into one row. Torch's own backward pass would allocate one row per group.
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
    """An autograd function that joins groups into a row; the gradient at padding is zero."""

    @staticmethod
    def forward(ctx: Any, groups: list[Group], *parts_PE: Tensor) -> Tensor:
        ctx.groups = groups
        tokens = sum(group.width if group.to is None else len(group.to) for group in groups)
        size = torch.Size((tokens, *parts_PE[0].shape[1:]))
        return _row(parts_PE, groups, size)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_SE: Tensor) -> tuple[Optional[Tensor], ...]:
        parts = [group.take(d_SE) for group in ctx.groups]
        for part, group in zip(parts, ctx.groups, strict=True):
            if group.is_padding_DW is not None:
                ones = [1] * (part.dim() - 1)
                part.masked_fill_(group.is_padding_DW.view(-1, *ones), 0)
        return None, *parts


def _row(parts_PE: Sequence[Tensor], groups: Sequence[Group], size: torch.Size) -> Tensor:
    row_SE = parts_PE[0].new_empty(size)
    for part, group in zip(parts_PE, groups, strict=True):
        group.put(part, row_SE)
    return row_SE


class PackedTokens(NamedTuple):
    """The S tokens of a batch (B, T) that are not padding, packed into one row.

    Attributes:
        places_S: the index of each token in the flattened batch, from 0 to B * T - 1.
        shape: (B, T).
        lengths: the number of tokens in each document, in row order.
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
    ) -> "PackedTokens":
        """Pack a batch into a row.

        This synchronizes with the GPU only if there is a mask.

        Args:
            documents: for each sequence, the lengths of its documents in tokens.
            tokens_BT: the ids.
            padding_mask_BT: True at padding; None if all padding comes after the text.
            is_full: whether the batch has no padding.
            begins_anew: whether positions restart at 0 in each document.

        Raises:
            UserError: If the document lengths do not add up to the lengths of the sequences.
        """
        batch, time = tokens_BT.shape[:2]
        sizes = np.array([sum(each) for each in documents], np.int64)
        lengths = np.array([length for each in documents for length in each], np.int64)
        if len(sizes) != batch or not len(lengths) or lengths.min() < 1:
            raise UserError(
                f"documents must list positive document lengths for each of {batch} sequences, not {documents}"
            )

        if padding_mask_BT is None:
            is_text_BT = np.arange(time) < sizes[:, None]
            places = torch.from_numpy(np.flatnonzero(is_text_BT))
            most = np.full(batch, time)
        else:
            places = padding_mask_BT.logical_not().flatten().nonzero()[:, 0]
            most = time - padding_mask_BT.sum(-1).numpy(force=True)

        may_be_padded = padding_mask_BT is None and not is_full
        is_wrong = sizes > time if may_be_padded else sizes != most
        if is_wrong.any():
            row = int(is_wrong.argmax())
            raise UserError(
                f"documents: the documents of sequence {row} have {sizes[row]} tokens in total, but the sequence has "
                f"{most[row]}; count all tokens except padding"
            )

        runs = lengths if begins_anew else sizes
        starts = np.cumsum(runs) - runs
        positions = np.arange(runs.sum()) - np.repeat(starts, runs)
        return cls(places.to(tokens_BT.device), (batch, time), lengths, positions)

    def take(self, x: Tensor) -> Tensor:
        """Pack a tensor (B, T, ...) into a row (1, S, ...)."""
        return x.flatten(0, 1).index_select(0, self.places_S)[None]

    def places_of(self, places_M: Tensor) -> Tensor:
        """Convert indices into the flattened batch, none of which may be at padding, to indices into the row."""
        return torch.searchsorted(self.places_S, places_M)

    def spread(self, x: Tensor) -> Tensor:
        """Unpack a row (1, S, C) into sequences (B, T, C), with zeros at padding."""
        batch, time = self.shape
        spread = x.new_zeros(batch * time, x.size(-1))
        return spread.index_copy(0, self.places_S, x[0]).unflatten(0, self.shape)


def check_takes_documents(model: nn.Module, option: str) -> None:
    """Raise a UserError if a model cannot process packed documents separately, or is compiled.

    Args:
        model: the model.
        option: the option that requires packed documents, for the error message.
    """
    if not getattr(model, "takes_documents", False):
        raise UserError(f"{option} works only with this package's encoders; use one of them, or omit the option")
    if model.compiles:
        raise UserError(f"--compile cannot be used with {option}, because batch shapes vary; omit one of these options")
