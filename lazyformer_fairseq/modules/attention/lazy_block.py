"""Gradients of a lazy block: each ``l`` differentiates its values, the ``s`` all the rest, once.

The gradient of the distribution P is dP = sum of dO_i V_i^T over the layers that share P, and the gradient before
softmax is dS = P * (dP - sum of rowsum(dO_i * O_i)). An ``l`` need not compute its part of it: it hands dO_i, V_i and
the row sums to its ``s``, whose backward pass comes last. autograd carries them there: the ``s`` gives each consumer a
triple of *handles*, zeros that take no memory and that nothing reads, and the consumer calls those three tensors the
handles' gradients. So we record nothing on the side, and graphs may be kept, run twice or compiled.

Scores are flattened here, once for a block, and travel so through autograd and torch's operators; an operator
(:class:`BlockKernels`) makes one object of them again.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple, Optional

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from lazyformer_fairseq.modules.attention.interface import AttentionInputs
from lazyformer_fairseq.modules.attention.scores import LEARNED, FlatScores, Scores


class Implementation:
    """The base of those that compute lazy blocks.

    A subclass has row sums of its own where it has faster ones. In all functions q is (B, N, T, E), k (B, N, K, E) and
    values (B, N, K, D); E may differ from D, and is 0 where learned scores alone make the distribution P. `saved` is
    what it keeps of P.
    """

    def saved_like(self, q: Tensor, k: Tensor, scores: Scores) -> Tensor:
        """Return an empty tensor like `saved`."""
        raise NotImplementedError

    def attend_forward(self, q: Tensor, k: Tensor, v: Tensor, scores: Scores) -> tuple[Tensor, Tensor]:
        """Return (P V, saved)."""
        raise NotImplementedError

    def reuse_forward(self, q: Tensor, k: Tensor, v: Tensor, saved: Tensor, scores: Scores) -> Tensor:
        """Return P V."""
        raise NotImplementedError

    def value_gradient(self, q: Tensor, k: Tensor, d_output: Tensor, saved: Tensor, scores: Scores) -> Tensor:
        """Return P^T dO."""
        raise NotImplementedError

    def block_gradient(
        self,
        q: Tensor,
        k: Tensor,
        values: list[Tensor],
        d_outputs: list[Tensor],
        delta: Tensor,
        saved: Tensor,
        scores: Scores,
    ) -> list[Tensor]:
        """Return [dQ, dK, dV of the first values, and the gradients of ``scores.learned``].

        `delta` (B, N, T) is the sum of rowsum(dO_i * O_i). Where a part of the scores is missing, its gradient is (0,).
        """
        raise NotImplementedError

    def row_sums(self, d_output: Tensor, output: Tensor) -> Tensor:
        """Return rowsum(dO * O), (B, N, T), in single precision or better from the product on: half would overflow."""
        exact = torch.promote_types(output.dtype, torch.float32)
        zero = output.new_zeros((1,) * output.dim(), dtype=exact)
        return torch.addcmul(zero, d_output, output).sum(-1)  # converts as it goes: no copies in single precision


class BlockKernels:
    """An implementation's functions as operators ``lazyformer::NAME_attend_forward`` and so on.

    torch.compile takes them as they are. They take flat scores, and compute in the precision of what they get.
    """

    def __init__(self, name: str, implementation: Implementation):
        self.implementation = implementation
        self.row_sums = implementation.row_sums

        def like_attend_forward(q: Tensor, k: Tensor, v: Tensor, *flat: Any) -> tuple[Tensor, Tensor]:
            return empty_rows(q, v), implementation.saved_like(q, k, FlatScores(*flat).scores())

        self.attend_forward = _operator(
            f"{name}_attend_forward",
            implementation.attend_forward,
            "Tensor q, Tensor k, Tensor v -> (Tensor, Tensor)",
            like_attend_forward,
        )
        self.reuse_forward = _operator(
            f"{name}_reuse_forward",
            implementation.reuse_forward,
            "Tensor q, Tensor k, Tensor v, Tensor saved -> Tensor",
            lambda q, _, v, *__: empty_rows(q, v),
        )
        self.value_gradient = _operator(
            f"{name}_value_gradient",
            implementation.value_gradient,
            "Tensor q, Tensor k, Tensor d_output, Tensor saved -> Tensor",
            lambda _, k, d_output, *__: empty_rows(k, d_output),
        )
        self.block_gradient = _operator(
            f"{name}_block_gradient",
            implementation.block_gradient,
            "Tensor q, Tensor k, Tensor[] values, Tensor[] d_outputs, Tensor delta, Tensor saved -> Tensor[]",
            _like_block_gradient,
        )


def _operator(name: str, compute: Callable, schema: str, fake: Callable) -> Callable:
    """Register a function of tensors and flat scores as an operator."""

    def in_given_precision(*args: Any) -> Any:
        *others, tensors, numbers = args
        with torch.autocast(args[0].device.type, enabled=False):
            return compute(*others, FlatScores(tensors, numbers).scores())

    arguments, result = schema.split(" -> ")
    made = torch.library.custom_op(
        f"lazyformer::{name}",
        in_given_precision,
        mutates_args=(),
        schema=f"({arguments}, Tensor?[] tensors, int[] numbers) -> {result}",
    )
    made.register_fake(fake)
    return lambda *args: made(*args[:-1], *args[-1])


def _like_block_gradient(q: Tensor, k: Tensor, values: list[Tensor], *others: Any) -> list[Tensor]:
    *_, tensors, numbers = others
    scores = FlatScores(tensors, numbers).scores()
    learned = {}
    for name, part in zip(LEARNED, scores.learned, strict=True):
        if part is None:
            continue
        if name == "learned_BNTK":
            learned[name] = part.new_empty(part.shape)
        else:
            learned[name] = torch.empty_like(part)
    return [
        empty_heads(q),
        empty_heads(k),
        empty_heads(values[0]),
        *learned_gradients(learned, q),
    ]


class SharedAttention(NamedTuple):
    """Attention that the ``s`` of a block shares with its consumers; `q_BNTD`, `k_BNKD` and `scores` need no gradient.

    Attributes:
        saved: what the implementation keeps of P.
        handles: a triple for each consumer.
    """

    kernels: BlockKernels
    q_BNTD: Tensor
    k_BNKD: Tensor
    saved: Tensor
    scores: FlatScores
    handles: Iterator[tuple[Tensor, ...]]

    def attend(self, v_BNKD: Tensor, dropout: float) -> Tensor:
        """Return P V (B, N, T, D). Call it at most once per announced consumer."""
        assert not dropout, "blocks have none"
        tensors, numbers = self.scores
        v_BNKD = v_BNKD.to(self.q_BNTD.dtype)
        return _Reuse.apply(
            self.kernels,
            numbers,
            self.q_BNTD,
            self.k_BNKD,
            self.saved,
            v_BNKD,
            *next(self.handles),
            *tensors,
        )


def attend(kernels: BlockKernels, given: AttentionInputs) -> tuple[Tensor, SharedAttention]:
    """Compute as :func:`lazyformer_fairseq.modules.attention.attend` does, by the given kernels."""
    q_BNTD = given.q_BNTD
    k_BNKD = given.k_BNKD
    v_BNKD = given.v_BNKD
    scores = given.scores
    if torch.is_autocast_enabled(given.device):  # sums with weights are in single precision, products are not
        lower = torch.get_autocast_dtype(given.device)
        q_BNTD = q_BNTD.to(lower)
        k_BNKD = k_BNKD.to(lower)
        v_BNKD = v_BNKD.to(lower)
        if scores.position_queries_BNTD is not None and scores.distances_NKD is not None:
            scores = scores.with_own(
                position_queries_BNTD=scores.position_queries_BNTD.to(lower),
                distances_NKD=scores.distances_NKD.to(lower),
            )
    tensors, numbers = scores.flat()
    output, saved, *handles = _Attend.apply(kernels, given.consumers, numbers, q_BNTD, k_BNKD, v_BNKD, *tensors)
    constants = [None if part is None else part.detach() for part in tensors]
    shared = SharedAttention(
        kernels=kernels,
        q_BNTD=q_BNTD.detach(),
        k_BNKD=k_BNKD.detach(),
        saved=saved,
        scores=FlatScores(constants, numbers),
        handles=(tuple(handles[first : first + 3]) for first in range(0, len(handles), 3)),
    )
    return output, shared


class _Attend(torch.autograd.Function):
    """The ``s``: (P V, saved, handles)."""

    @staticmethod
    def forward(
        ctx: Any,
        kernels: BlockKernels,
        consumers: int,
        numbers: list[int],
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *tensors: Optional[Tensor],
    ) -> tuple[Tensor, ...]:
        output, saved = kernels.attend_forward(q, k, v, FlatScores(tensors, numbers))
        ctx.kernels = kernels
        ctx.numbers = numbers
        ctx.save_for_backward(q, k, v, output, saved, *tensors)
        ctx.mark_non_differentiable(saved)
        ctx.set_materialize_grads(False)
        handles: list[Tensor] = []
        for _ in range(consumers):
            handles += _handles(output, v)
        return output, saved, *handles

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any,
        d_output: Optional[Tensor],
        _d_saved: None,
        *of_consumers: Optional[Tensor],
    ) -> tuple[Optional[Tensor], ...]:
        q, k, v, output, saved, *tensors = ctx.saved_tensors
        if d_output is None:
            d_output = torch.zeros_like(output)
        read = [d for d in of_consumers if d is not None]
        d_outputs = [d_output, *read[0::3]]
        values = [v, *read[1::3]]
        row_sums = [ctx.kernels.row_sums(d_output, output), *read[2::3]]
        delta = torch.stack(row_sums).sum(0)
        scores = FlatScores(tensors, ctx.numbers)
        d_q, d_k, d_v, *d_learned = ctx.kernels.block_gradient(q, k, values, d_outputs, delta, saved, scores)
        # After kernels, consumers, numbers, q, k and v come the tensors, first those that learn.
        needed = ctx.needs_input_grad[6 : 6 + len(d_learned)]
        d_tensors = [d if is_needed else None for d, is_needed in zip(d_learned, needed, strict=True)]
        d_tensors += [None] * (len(tensors) - len(d_learned))
        return None, None, None, d_q, d_k, d_v, *d_tensors


class _Reuse(torch.autograd.Function):
    """An ``l``: P V."""

    @staticmethod
    def forward(ctx: Any, kernels: BlockKernels, numbers: list[int], *given: Optional[Tensor]) -> Tensor:
        q, k, saved, v, _, _, _, *tensors = given  # between them the handles
        output = kernels.reuse_forward(q, k, v, saved, FlatScores(tensors, numbers))
        ctx.kernels = kernels
        ctx.numbers = numbers
        ctx.save_for_backward(q, k, saved, v, output, *tensors)
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_output: Tensor) -> tuple[Optional[Tensor], ...]:
        q, k, saved, v, output, *tensors = ctx.saved_tensors
        d_v = ctx.kernels.value_gradient(q, k, d_output, saved, FlatScores(tensors, ctx.numbers))
        row_sums = ctx.kernels.row_sums(d_output, output)
        handles = (d_output, v, row_sums)
        return None, None, None, None, None, d_v, *handles, *[None] * len(tensors)


def _handles(output: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return zeros of the shapes of dO, V and the row sums; each takes one number of memory."""
    exact = torch.promote_types(v.dtype, torch.float32)
    return (
        v.new_zeros(()).expand(output.shape),
        v.new_zeros(()).expand(v.shape),
        v.new_zeros((), dtype=exact).expand(output.shape[:-1]),
    )


def empty_heads(like: Tensor) -> Tensor:
    """Return an empty (B, N, T, D) whose heads lie side by side in memory, so that merging them is a view."""
    batch, heads, time, size = like.shape
    return like.new_empty(batch, time, heads, size).transpose(1, 2)


def empty_rows(rows: Tensor, like: Tensor) -> Tensor:
    """Return memory as :func:`empty_heads` does, as many rows as `rows` has, and as wide as `like`."""
    shape = (*rows.shape[:-1], like.size(-1))
    return empty_heads(like.new_empty(()).expand(shape))


def learned_gradients(found: Mapping[str, Tensor], like: Tensor) -> list[Tensor]:
    """Return the gradients of all parts of scores that may have some, (0,) where a part is missing."""
    return [found.get(name, like.new_empty(0)) for name in LEARNED]
