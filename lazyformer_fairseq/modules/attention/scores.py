"""What is added to the scores of self-attention, before it is written out: T5's relative bias, and -inf at padding."""

from typing import Optional

import torch
from torch import Tensor


class ScoreBias:
    """The bias of one forward pass, shared by all ``s`` sublayers.

    Kernels read its parts, of which none grows with n x n. :meth:`dense` writes it out for those that cannot.

    Args:
        table_KN: learned bias by bucket and head; None where there is none.
        bucket_by_distance: (2T - 1,) integers: entry T - 1 + (key - query) is the bucket; None without a table.
        far: all distances from here on share a bucket, on either side.
        lengths_B: keys from there on are padding, which stands on the right; None where nothing is padded.
    """

    def __init__(
        self,
        table_KN: Optional[Tensor] = None,
        bucket_by_distance: Optional[Tensor] = None,
        far: int = 0,
        lengths_B: Optional[Tensor] = None,
    ):
        self.table_KN = table_KN
        self.bucket_by_distance = bucket_by_distance
        self.far = far
        self.lengths_B = lengths_B
        self._dense: Optional[Tensor] = None

    @property
    def is_learning(self) -> bool:
        """Whether the table will get a gradient in this pass."""
        return self.table_KN is not None and self.table_KN.requires_grad and torch.is_grad_enabled()

    def dense(self, time: int, dtype: torch.dtype) -> Optional[Tensor]:
        """(1 or B, 1 or N, T, T), written once a forward pass; None where nothing is added.

        Args:
            time: T.
            dtype: of the scores.
        """
        if self._dense is None:
            bias = None if self.table_KN is None else self._relative(time).to(dtype)
            if self.lengths_B is not None:
                is_padding = torch.arange(time, device=self.lengths_B.device) >= self.lengths_B[:, None]
                at_padding = torch.zeros_like(is_padding, dtype=dtype).masked_fill(is_padding, float("-inf"))
                at_padding = at_padding[:, None, None, :]
                bias = at_padding if bias is None else bias + at_padding
            self._dense = bias
        return self._dense

    def _relative(self, time: int) -> Tensor:
        """(1, N, T, T): row the query, column the key.

        Row i is the window of T distances that starts at -i: sliding windows, the last one first. This looks each
        distance up once, where indexing by a (T, T) matrix of buckets would look each pair up.
        """
        by_distance = self.table_KN[self.bucket_by_distance].t()
        if torch.compiler.is_compiling():  # to which the size of windows is a constant: a graph for each T
            tokens = torch.arange(time, device=by_distance.device)
            return by_distance[:, time - 1 + tokens - tokens[:, None]].unsqueeze(0)
        return by_distance.unfold(-1, time, 1).flip(-2).unsqueeze(0)
