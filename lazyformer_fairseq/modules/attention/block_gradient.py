"""How gradients of a lazy block come together: each ``l`` differentiates its values, the ``s`` all the rest, once.

The gradient of the distribution P is dP = sum of dO_i V_i^T over the layers that share P, and what goes through
softmax is dS = P * (dP - sum of rowsum(dO_i * O_i)). An ``l`` need not compute its part of it: it hands dO_i, V_i and
the row sums to its ``s``, whose backward pass comes last. The way there is autograd's own: the ``s`` gives each reader
a triple of *handles*, zeros that take no memory and that nothing reads, and the reader calls those three tensors the
handles' gradients. So nothing is recorded on the side, and graphs may be kept, run twice or compiled.
"""

from collections.abc import Iterator
from typing import Any, Optional

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from lazyformer_fairseq.modules.attention.block_kernels import BlockKernels
from lazyformer_fairseq.modules.attention.scores import ScoreBias


class SharedAttention:
    """What the ``s`` of a block hands to its readers.

    Args:
        kernels: the implementation.
        q_BNTD: its queries, without a gradient.
        k_BNTD: its keys, likewise.
        saved: what the implementation keeps of P.
        bias: of the scores.
        handles: a triple for each reader.
    """

    def __init__(
        self,
        kernels: BlockKernels,
        q_BNTD: Tensor,
        k_BNTD: Tensor,
        saved: Tensor,
        bias: ScoreBias,
        handles: Iterator[tuple[Tensor, Tensor, Tensor]],
    ):
        self.kernels = kernels
        self.q_BNTD = q_BNTD
        self.k_BNTD = k_BNTD
        self.saved = saved
        self.bias = bias
        self.handles = handles

    def attend(self, v_BNTD: Tensor, dropout: float) -> Tensor:
        """P V (B, N, T, D). At most as many calls as readers were announced."""
        assert not dropout, "chosen for attention without dropout"
        bias = _parts(self.bias)
        return _Reuse.apply(self.kernels, v_BNTD, self.q_BNTD, self.k_BNTD, self.saved, *bias, *next(self.handles))


def attend(
    kernels: BlockKernels, q_BNTD: Tensor, k_BNTD: Tensor, v_BNTD: Tensor, bias: ScoreBias, readers: int
) -> tuple[Tensor, SharedAttention]:
    """As :func:`lazyformer_fairseq.modules.attention.attend`, without dropout, by an implementation."""
    output, saved, *handles = _Attend.apply(kernels, readers, q_BNTD, k_BNTD, v_BNTD, *_parts(bias))
    triples = iter([tuple(handles[first : first + 3]) for first in range(0, len(handles), 3)])
    return output, SharedAttention(kernels, q_BNTD.detach(), k_BNTD.detach(), saved, bias, triples)


def _parts(bias: ScoreBias) -> tuple[Optional[Tensor], Optional[Tensor], int, Optional[Tensor]]:
    return bias.table_KN, bias.bucket_by_distance, bias.far, bias.lengths_B


class _Attend(torch.autograd.Function):
    """The ``s``: (P V, saved, handles)."""

    @staticmethod
    def forward(
        ctx: Any,
        kernels: BlockKernels,
        readers: int,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        table: Optional[Tensor],
        bucket_by_distance: Optional[Tensor],
        far: int,
        lengths: Optional[Tensor],
    ) -> tuple[Tensor, ...]:
        output, saved = kernels.attend_forward(q, k, v, table, bucket_by_distance, far, lengths)
        ctx.far = far
        ctx.kernels = kernels
        ctx.save_for_backward(q, k, v, output, saved, table, bucket_by_distance, lengths)
        ctx.mark_non_differentiable(saved)
        ctx.set_materialize_grads(False)
        handles = [handle for _ in range(readers) for handle in _handles(q)]
        return output, saved, *handles

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_output: Optional[Tensor], _: None, *of_readers: Optional[Tensor]):
        q, k, v, output, saved, table, bucket_by_distance, lengths = ctx.saved_tensors
        d_output = torch.zeros_like(output) if d_output is None else d_output
        read = [d for d in of_readers if d is not None]
        values, d_outputs = [v, *read[1::3]], [d_output, *read[0::3]]
        delta = torch.stack([_row_sums(d_output, output), *read[2::3]]).sum(0)
        d_q, d_k, d_v, d_table = ctx.kernels.block_gradient(
            q, k, values, d_outputs, delta, saved, table, bucket_by_distance, ctx.far, lengths
        )
        return None, None, d_q, d_k, d_v, d_table if ctx.needs_input_grad[5] else None, None, None, None


class _Reuse(torch.autograd.Function):
    """An ``l``: P V."""

    @staticmethod
    def forward(
        ctx: Any,
        kernels: BlockKernels,
        v: Tensor,
        q: Tensor,
        k: Tensor,
        saved: Tensor,
        table: Optional[Tensor],
        bucket_by_distance: Optional[Tensor],
        far: int,
        lengths: Optional[Tensor],
        *handles: Tensor,
    ) -> Tensor:
        output = kernels.reuse_forward(q, k, v, saved, table, bucket_by_distance, far, lengths)
        ctx.far = far
        ctx.kernels = kernels
        ctx.save_for_backward(v, q, k, saved, output, table, bucket_by_distance, lengths)
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_output: Tensor):
        v, q, k, saved, output, table, bucket_by_distance, lengths = ctx.saved_tensors
        d_v = ctx.kernels.value_gradient(q, k, d_output, saved, table, bucket_by_distance, ctx.far, lengths)
        return None, d_v, *[None] * 7, d_output, v, _row_sums(d_output, output)


def _handles(q: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Zeros of the shapes of dO, V and the row sums; each is one number in memory."""
    sums_dtype = torch.promote_types(q.dtype, torch.float32)
    return (
        q.new_zeros(()).expand(q.shape),
        q.new_zeros(()).expand(q.shape),
        q.new_zeros((), dtype=sums_dtype).expand(q.shape[:-1]),
    )


def _row_sums(d_output: Tensor, output: Tensor) -> Tensor:
    """rowsum(dO * O), (B, N, T), in single precision or better from the product on: half would overflow."""
    zero = output.new_zeros((1,) * output.dim(), dtype=torch.promote_types(output.dtype, torch.float32))
    return torch.addcmul(zero, d_output, output).sum(-1)  # converts as it goes: no copies in single precision
