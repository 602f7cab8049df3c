"""Random masks, and random inputs of an attention, with or without one: what back ends are compared on."""

from collections.abc import Set
from typing import Optional

import pytest
import torch
from hypothesis import strategies as st
from torch import Tensor

from lazyformer_fairseq.modules.attention import AttentionInputs, attend, blockwise
from lazyformer_fairseq.modules.attention.masks import AttentionMask, Band, Columns
from lazyformer_fairseq.modules.attention.scores import Scores
from lazyformer_fairseq.modules.networks.encoder import relative_position_bucket

limits = st.one_of(st.none(), st.integers(0, 7))
bands = st.tuples(limits, limits, st.sampled_from([1, 1, 2, 3, 5]), st.sampled_from([0, 0, 3, 8, 40])).map(Band._make)
columns = st.tuples(st.integers(0, 3), st.integers(0, 9), st.integers(0, 4)).map(
    lambda found: Columns(found[0], found[1], min(found[1:]))
)
groups = st.tuples(st.integers(1, 2), st.lists(st.one_of(bands, bands, columns), min_size=1, max_size=3).map(tuple))
masks = st.lists(groups, min_size=1, max_size=2).map(lambda found: AttentionMask(tuple(found)))
BUCKETS, FAR = 8, 6


def use_chunks(patch: pytest.MonkeyPatch, rows: int, elements: int) -> None:
    """Compute in smaller chunks."""
    patch.setattr(blockwise, "MASKED_ROWS", rows)
    patch.setattr(blockwise, "CHUNK_ELEMENTS", elements)


class Case:
    """Random inputs of an ``s`` and its consumers, in the layout of a model.

    Args:
        mask: None for all keys, of `heads`.
        parts: of "bias", "positions" (in a causal model), "right" (padding), "given" (tokens that all see), "entmax",
            "dense" and "dense for all" (scores of each pair), "alone" (without queries), "wide" (larger than values).
        extra: keys that are no tokens.
    """

    def __init__(
        self,
        mask: Optional[AttentionMask] = None,
        batch: int = 2,
        time: int = 40,
        memory: int = 0,
        extra: int = 0,
        is_causal: bool = False,
        parts: Set[str] = frozenset(),
        consumers: int = 1,
        seed: int = 1,
        dtype: torch.dtype = torch.double,
        heads: int = 2,
        size: int = 4,
        device: str = "cpu",
    ):
        torch.manual_seed(seed)
        heads, tokens = sum(number for number, _ in mask.groups) if mask else heads, memory + time
        self.consumers = consumers
        self.scores = Scores(mask=mask, extra=extra, is_causal=is_causal)
        learned = {}
        if "right" in parts:
            padding = torch.arange(tokens) >= torch.randint(1, tokens + 1, (batch, 1))
            self.scores = self.scores.with_padding(padding.to(device))
        if "bias" in parts:
            learned["table_KN"] = torch.randn(BUCKETS, heads)
            buckets = relative_position_bucket(torch.arange(1 - tokens, time), BUCKETS, FAR).to(device)
            self.scores = self.scores.with_own(bucket_by_distance=buckets, far=FAR)
        if "positions" in parts and is_causal:
            learned["position_queries_BNTD"] = torch.randn(batch, heads, time, size) / size**0.5
            learned["distances_NKD"] = torch.randn(heads, tokens + 1, size)
        if "entmax" in parts:
            learned["exponent_N"] = 1.05 + 0.95 * torch.rand(heads)
        if "dense" in parts or "dense for all" in parts:
            learned["learned_BNTK"] = torch.randn(batch if "dense" in parts else 1, heads, time, tokens)
        if "given" in parts:
            self.scores = self.scores.with_own(seen_BK=(torch.rand(batch, tokens) < 0.1).to(device))

        def rows(length: int, size: int = size) -> Tensor:
            return torch.randn(batch, length, heads, size).to(device, dtype).transpose(1, 2).requires_grad_()

        self.learned = {name: part.to(device, dtype).requires_grad_() for name, part in learned.items()}
        self.scores = self.scores.with_own(**self.learned)
        compared = 0 if "alone" in parts else 2 * size if "wide" in parts else size
        self.q = rows(time, compared)
        self.d_outputs = [rows(time) for _ in range(1 + consumers)]
        self.k = rows(tokens + extra, compared)
        self.values = [rows(tokens + extra) for _ in range(1 + consumers)]

    @property
    def leaves(self) -> list[Tensor]:
        return [self.q, self.k, *self.values, *self.learned.values()]

    def by(
        self,
        back_end: str,
        with_gradients: bool = True,
        dropout: float = 0.0,
        dtype: Optional[torch.dtype] = None,
    ) -> list[Tensor]:
        """Outputs and gradients of all inputs, or outputs alone.

        Queries, keys and values of the ``s`` are views of one projection where they are of one length.
        """
        leaves = [leaf.detach().clone().to(dtype or leaf.dtype).requires_grad_(with_gradients) for leaf in self.leaves]
        q, k, *others = leaves
        (first, *values), learned = others[: len(self.values)], others[len(self.values) :]
        if q.shape == k.shape == first.shape:
            projection = torch.cat([part.transpose(1, 2) for part in (q, k, first)], -1)
            q, k, first = (part.transpose(1, 2) for part in projection.split(q.size(-1), -1))
        scores = self.scores.with_own(**dict(zip(self.learned, learned, strict=True)))
        scores._cache = {}  # what sublayers of one pass share
        output, reusable = attend(AttentionInputs(q, k, first, scores, dropout, self.consumers), back_end)
        outputs = [output, *(reusable.attend(v, dropout) for v in values)]
        if not with_gradients:
            return outputs
        return [*outputs, *torch.autograd.grad(outputs, leaves, [d.to(output.dtype) for d in self.d_outputs])]

    def dense(self) -> Tensor:
        """What is added to scores, written anew."""
        self.scores._cache.clear()
        return self.scores.dense(self.q.size(-2), self.k.size(-2), self.q)

    def with_gradients(self, outputs: list[Tensor]) -> list[Tensor]:
        return [*outputs, *torch.autograd.grad(outputs, self.leaves, self.d_outputs)]


def assert_errors_like(found: list[Tensor], exact: list[Tensor], allowed: list[Tensor] | float) -> None:
    """Relative errors are no larger than a number, or no more than twice those of other results in that precision."""
    for number, (ours, expected) in enumerate(zip(found, exact, strict=True)):
        error = (ours.double() - expected).norm() / expected.norm()
        most = allowed
        if not isinstance(allowed, float):
            theirs = allowed[number]
            most = 2 * (theirs.double() - expected).norm() / expected.norm() + max(torch.finfo(theirs.dtype).eps, 1e-6)
        assert error <= most, f"tensor {number}: {error:.1e}, and {most:.1e} is allowed"
