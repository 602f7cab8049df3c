"""Gradients of a lazy block: each ``l`` computes the gradient of its values, and the ``s`` computes the rest once.

The gradient of the distribution P is dP = sum of dO_i V_i^T over the layers that share P, and the gradient of the
scores is dS = P * (dP - sum of rowsum(dO_i * O_i)). An ``l`` does not need to compute its contribution to dS. Instead
it passes dO_i, V_i and the row sums to its ``s``, where the backward pass arrives last. autograd transports these three
tensors. In the forward pass, the ``s`` passes three *handles* to each consumer: zero tensors that take no memory and
are never read. In the backward pass, the consumer returns the three tensors as the gradients of its handles. No state
is kept outside the graph, so graphs can be retained, run twice or compiled.

The :class:`Scores` object of a block is flattened once, and passes through autograd and torch's operators in this form.
Each operator (:class:`BlockKernels`) rebuilds the object.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple, Optional

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from lazyformer_fairseq.modules.attention.interface import AttentionInputs
from lazyformer_fairseq.modules.attention.scores import LEARNED, FlatScores, Scores


class Implementation:
    """The base class of lazy-block implementations.

    In all methods, q is (B, N, T, E), k is (B, N, K, E) and values are (B, N, K, D). E may differ from D, and is 0 if
    the distribution P depends only on learned scores. `saved` is the tensor that an implementation keeps to reproduce
    P. A subclass may override :meth:`row_sums` with a faster version.
    """

    def saved_like(self, q: Tensor, k: Tensor, scores: Scores) -> Tensor:
        """Return an uninitialized tensor with the shape and data type of `saved`."""
        raise NotImplementedError

    def attend_forward(self, q: Tensor, k: Tensor, v: Tensor, scores: Scores) -> tuple[Tensor, Tensor]:
        """Compute P V and `saved`."""
        raise NotImplementedError

    def reuse_forward(self, q: Tensor, k: Tensor, v: Tensor, saved: Tensor, scores: Scores) -> Tensor:
        """Compute P V."""
        raise NotImplementedError

    def value_gradient(self, q: Tensor, k: Tensor, d_output: Tensor, saved: Tensor, scores: Scores) -> Tensor:
        """Compute P^T dO."""
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
        """Compute dQ, dK, the dV of the first layer, and the gradients of ``scores.learned``.

        Args:
            q: The queries.
            k: The keys.
            values: The values of all layers in the block, starting with the ``s``.
            d_outputs: The gradients dO_i of the layers' outputs.
            delta: The sum of rowsum(dO_i * O_i) over the layers, (B, N, T).
            saved: The tensor `saved` returned by :meth:`attend_forward`.
            scores: The block's scores. The gradient of a part that is None is an empty tensor.
        """
        raise NotImplementedError

    def row_sums(self, d_output: Tensor, output: Tensor) -> Tensor:
        """Compute rowsum(dO * O), (B, N, T), in float32 or higher precision, because half precision might overflow."""
        exact = torch.promote_types(output.dtype, torch.float32)
        zero = output.new_zeros((1,) * output.dim(), dtype=exact)
        return torch.addcmul(zero, d_output, output).sum(-1)  # converts elements without copying the tensors


class BlockKernels:
    """An implementation's functions as torch operators, such as ``lazyformer::NAME_attend_forward``.

    They are opaque to torch.compile. They take flattened scores and compute in the precision of their inputs.
    """

    def __init__(self, name: str, implementation: Implementation):
        self.implementation = implementation
        self.row_sums = implementation.row_sums

        def like_attend_forward(q: Tensor, k: Tensor, v: Tensor, *flat: Any) -> tuple[Tensor, Tensor]:
            scores = FlatScores(*flat).scores()
            return empty_rows(q, v), implementation.saved_like(q, k, scores)

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
    """Register a function of tensors and flattened scores as an operator.

    Args:
        name: The operator's name.
        compute: The function, which takes a :class:`Scores` object as its last argument.
        schema: The operator's schema, without the flattened scores.
        fake: A function that takes the operator's arguments and returns empty tensors like the operator's results.
    """

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
    """The attention that the ``s`` of a block shares with its consumers.

    Attributes:
        kernels: The kernels that compute the block.
        q_BNTD, k_BNKD: The queries and keys, detached.
        saved: The tensor that the implementation keeps to reproduce P.
        scores: The scores, flattened and detached.
        handles: Three handles per consumer.
    """

    kernels: BlockKernels
    q_BNTD: Tensor
    k_BNKD: Tensor
    saved: Tensor
    scores: FlatScores
    handles: Iterator[tuple[Tensor, ...]]

    def attend(self, v_BNKD: Tensor, dropout: float) -> Tensor:
        """Compute P V (B, N, T, D). This may be called once per declared consumer."""
        assert not dropout, "lazy blocks have no dropout"
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
    """Compute attention with a set of kernels; see :func:`lazyformer_fairseq.modules.attention.attend`."""
    q_BNTD = given.q_BNTD
    k_BNKD = given.k_BNKD
    v_BNKD = given.v_BNKD
    scores = given.scores
    if torch.is_autocast_enabled(given.device):  # adding float32 weights promotes inputs; matmuls use half precision
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
    handles_by_consumer = (tuple(handles[first : first + 3]) for first in range(0, len(handles), 3))
    shared = SharedAttention(
        kernels=kernels,
        q_BNTD=q_BNTD.detach(),
        k_BNKD=k_BNKD.detach(),
        saved=saved,
        scores=FlatScores(constants, numbers),
        handles=handles_by_consumer,
    )
    return output, shared


class _Attend(torch.autograd.Function):
    """An autograd function for the ``s`` of a block, which returns P V, `saved` and the handles."""

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
        # In the argument list, kernels, consumers, numbers, q, k and v come first, then the learned tensors, and then
        # the others.
        needed = ctx.needs_input_grad[6 : 6 + len(d_learned)]
        d_tensors = [d if is_needed else None for d, is_needed in zip(d_learned, needed, strict=True)]
        d_tensors += [None] * (len(tensors) - len(d_learned))
        return None, None, None, d_q, d_k, d_v, *d_tensors


class _Reuse(torch.autograd.Function):
    """An autograd function for an ``l`` of a block, which returns P V."""

    @staticmethod
    def forward(ctx: Any, kernels: BlockKernels, numbers: list[int], *given: Optional[Tensor]) -> Tensor:
        q, k, saved, v, _, _, _, *tensors = given  # the ignored arguments are the handles
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
    """Return zero tensors with the shapes of dO, V and the row sums, each of which stores only a single number."""
    exact = torch.promote_types(v.dtype, torch.float32)
    return (
        v.new_zeros(()).expand(output.shape),
        v.new_zeros(()).expand(v.shape),
        v.new_zeros((), dtype=exact).expand(output.shape[:-1]),
    )


def empty_heads(like: Tensor) -> Tensor:
    """Return an uninitialized tensor (B, N, T, D), laid out as (B, T, N, D) so that merging the heads is a view."""
    batch, heads, time, size = like.shape
    return like.new_empty(batch, time, heads, size).transpose(1, 2)


def empty_rows(rows: Tensor, like: Tensor) -> Tensor:
    """Return a tensor like :func:`empty_heads` with as many rows as `rows` and the width of `like`."""
    shape = (*rows.shape[:-1], like.size(-1))
    return empty_heads(like.new_empty(()).expand(shape))


def learned_gradients(found: Mapping[str, Tensor], like: Tensor) -> list[Tensor]:
    """Return the gradients of all parts in LEARNED, with empty tensors for missing parts.

    Args:
        found: The gradients, keyed by part name.
        like: A tensor with the device and data type of the empty tensors.
    """
    return [found.get(name, like.new_empty(0)) for name in LEARNED]
