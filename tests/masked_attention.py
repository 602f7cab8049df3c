"""Random masks, and inputs of an attention with one: for back ends that compute no more than it shows."""

import torch
from hypothesis import strategies as st

from lazyformer_fairseq.modules.attention import attend
from lazyformer_fairseq.modules.attention.masks import AttentionMask, Band, Columns
from lazyformer_fairseq.modules.attention.scores import Scores

limits = st.one_of(st.none(), st.integers(0, 7))
bands = st.tuples(limits, limits, st.sampled_from([1, 1, 2, 3, 5]), st.sampled_from([0, 0, 3, 8, 40])).map(Band._make)
columns = st.tuples(st.integers(0, 3), st.integers(0, 9), st.integers(0, 4)).map(
    lambda found: Columns(found[0], found[1], min(found[1:]))
)
groups = st.tuples(st.integers(1, 2), st.lists(st.one_of(bands, bands, columns), min_size=1, max_size=3).map(tuple))
masks = st.lists(groups, min_size=1, max_size=2).map(lambda found: AttentionMask(tuple(found)))


class Case:
    """Random inputs of an ``s`` and its consumers."""

    def __init__(self, mask, batch, time, memory, extra, is_causal, parts, consumers, seed, dtype=torch.double):
        torch.manual_seed(seed)
        heads, tokens = sum(number for number, _ in mask.groups), memory + time
        keys, size = tokens + extra, 4
        self.consumers = consumers
        self.scores = Scores(mask=mask, extra=extra, is_causal=is_causal)
        if "right" in parts:
            self.scores = self.scores.with_padding(
                torch.arange(tokens) >= torch.randint(1, tokens + 1, (batch, 1)), True
            )
        elif "anywhere" in parts:
            self.scores = self.scores.with_padding(torch.rand(batch, tokens) < 0.5, False)
        learned = {}
        if "bias" in parts:
            learned["table_KN"] = torch.randn(6, heads)
            buckets = torch.randint(6, (tokens + time - 1,))
            self.scores = self.scores.with_own(bucket_by_distance=buckets)
        if "positions" in parts and is_causal:
            learned["position_queries_BNTD"] = torch.randn(batch, heads, time, size)
            learned["distances_NKD"] = torch.randn(heads, tokens + 1, size)
        if "entmax" in parts:
            learned["exponent_N"] = 1.05 + 0.95 * torch.rand(heads)
        if "given" in parts:
            self.scores = self.scores.with_own(seen_BK=torch.rand(batch, tokens) < 0.1)
        self.learned = {name: part.to(dtype).requires_grad_() for name, part in learned.items()}
        self.scores = self.scores.with_own(**self.learned)
        rows = [torch.randn(batch, time, heads, size).to(dtype).transpose(1, 2) for _ in range(2 + consumers)]
        self.q, *self.d_outputs = (part.requires_grad_() for part in rows)
        self.k, *self.values = (
            torch.randn(batch, keys, heads, size).to(dtype).transpose(1, 2).requires_grad_()
            for _ in range(2 + consumers)
        )

    def by(self, back_end: str, with_gradients: bool = True) -> list[torch.Tensor]:
        """Outputs and gradients of all inputs, or outputs alone."""
        leaves = [self.q, self.k, *self.values, *self.learned.values()]
        q, k, *others = (leaf.detach().clone().requires_grad_(with_gradients) for leaf in leaves)
        (first, *values), learned = others[: len(self.values)], others[len(self.values) :]
        scores = self.scores.with_own(**dict(zip(self.learned, learned, strict=True)))
        output, reusable = attend(q, k, first, scores, 0.0, self.consumers, back_end)
        outputs = [output, *(reusable.attend(v, 0.0) for v in values)]
        if not with_gradients:
            return outputs
        return [*outputs, *torch.autograd.grad(outputs, [q, k, first, *values, *learned], self.d_outputs)]
