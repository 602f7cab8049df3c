"""Attention written out from the papers' equations, for the sublayers' own weights: what attention variants change."""

import math
from typing import Optional

import pytest
import torch
from torch import Tensor, nn

from lazyformer_fairseq.modules.attention.scores import Scores
from lazyformer_fairseq.modules.networks.encoder import RelativePositionBias
from lazyformer_fairseq.modules.sublayers.attention import encode_distances
from lazyformer_fairseq.modules.sublayers.interface import Context, RelativePositions, SublayerOptions
from lazyformer_fairseq.patterns.grammar import plan
from lazyformer_fairseq.patterns.kinds import CAUSAL, ENCODER

BATCH, HEADS, SIZE = 2, 3, 4
WIDTH = HEADS * SIZE
BUCKETS, FAR = 8, 6
# Padding of 7 tokens.
RIGHT = torch.arange(7) >= torch.tensor([[4], [7]])
padded_and_with_memory = pytest.mark.parametrize(
    "given",
    [
        *({"time": 7, "padding": padding, "biased": True} for padding in (None, RIGHT)),
        {"time": 1},
        {"time": 6, "memory": 0},
        {"time": 4, "memory": 5},
    ],
    ids=str,
)


class Attending:
    """An ``s`` with settings and a sublayer above it, with random weights in float64, and what they share.

    Args:
        letter: such as ``s[window=2]``.
        memory: M of a causal model; None for an encoder.
        biased: an encoder has T5's bias.
        padding: (B, T), True at padding.
        longest: input of an encoder.
        above: letter of the sublayer above.
    """

    def __init__(
        self,
        letter: str,
        time: int,
        memory: Optional[int] = None,
        biased: bool = False,
        padding: Optional[Tensor] = None,
        back_end: str = "eager",
        longest: Optional[int] = None,
        above: str = "l",
        seed: int = 3,
    ):
        torch.manual_seed(seed)
        self.is_causal, self.time, self.padding = memory is not None, time, padding
        longest = 0 if self.is_causal else longest or time
        options = SublayerOptions(WIDTH, 20, HEADS, max_positions=longest, is_causal=self.is_causal)
        direction = CAUSAL if self.is_causal else ENCODER
        self.s, self.l = (p.kind.module(direction).build(options, p) for p in plan(f"{letter}{above}", direction))
        self.bias = RelativePositionBias(HEADS, BUCKETS, FAR) if biased else None
        self.modules = nn.ModuleList([self.s, self.l, *([self.bias] if biased else [])]).double()
        for weight in [*self.modules.parameters(), *self.s.buffers()]:
            nn.init.normal_(weight, std=0.5)
        self.u, self.v = (torch.randn(HEADS, SIZE, dtype=torch.double).requires_grad_() for _ in range(2))
        self.x, self.above = (torch.randn(BATCH, time, WIDTH, dtype=torch.double).requires_grad_() for _ in range(2))
        self.memory = torch.randn(2, BATCH, memory, WIDTH, dtype=torch.double) if memory else (None, None)
        self.weights = torch.randn(2, BATCH, time, WIDTH, dtype=torch.double)
        self.back_end = back_end

    @property
    def keys(self) -> int:
        return self.time + (0 if self.memory[0] is None else self.memory[0].size(1))

    def leaves(self) -> dict[str, Tensor]:
        own = {"u": self.u, "v": self.v} if self.is_causal else {}
        return {**dict(self.modules.named_parameters()), **own, "x": self.x, "above": self.above}

    def context(self) -> Context:
        scores = Scores(is_causal=self.is_causal) if self.bias is None else self.bias(self.time)
        if self.padding is not None:
            scores = scores.with_padding(self.padding)
        positions = None
        if self.is_causal:
            positions = RelativePositions(encode_distances(self.keys, WIDTH, 0, self.u), self.u, self.v)
        return Context(scores, lambda *_: self.back_end, positions)

    def outputs(self) -> list[Tensor]:
        """Of the ``s`` and of the sublayer above, whose input is another."""
        shared = self.context()
        output, handed_on = self.s(self.x, {}, shared, self.memory[0])
        return [output, self.l(self.above, handed_on, shared, self.memory[1])[0]]

    def probabilities(self) -> tuple[Tensor, Tensor]:
        """(output of the ``s``, the distribution that it hands on)."""
        output, handed_on = self.s(self.x, {}, self.context(), self.memory[0])
        return output, handed_on["distribution"].probabilities

    def assert_equations(self) -> dict[str, Tensor]:
        """Outputs and all gradients are those of the equations; returns them."""
        expected = self.with_gradients(self.expected())
        torch.testing.assert_close(self.with_gradients(self.outputs()), expected, rtol=1e-8, atol=1e-10)
        return expected

    def expected(self) -> list[Tensor]:
        """The same as :meth:`outputs` by equations."""
        x_BKC, above_BKC = self.inputs()
        q, k, v = self.projected(x_BKC)
        distances = torch.arange(self.keys - self.time, self.keys)[:, None] - torch.arange(self.keys)
        met = q + self.u[:, None] if self.is_causal and q is not None else q
        probabilities = self.weigh(met, self.scores(q, k, distances), distances)
        heads = [
            self.attend(probabilities, v, self.s, x_BKC),
            self.attend(probabilities, split(self.l.v_proj(above_BKC)), self.l, above_BKC),
        ]
        return [
            part.out_proj(head.transpose(1, 2).flatten(2)) for part, head in zip((self.s, self.l), heads, strict=True)
        ]

    def weigh(self, q: Tensor, scores: Tensor, distances: Tensor) -> Tensor:
        """q (B, N, T, D), scores (B, N, T, K), distances (T, K) from key to query -> P (B, N, T, K or more).

        At keys that a query must not see scores are -inf.
        """
        return scores.softmax(-1)

    def attend(self, probabilities: Tensor, values: Tensor, sublayer: nn.Module, x_BKC: Tensor) -> Tensor:
        """(B, N, T, D)."""
        assert not sublayer.value_transforms
        return torch.einsum("bntk,bnkd->bntd", probabilities, values)

    def with_gradients(self, outputs: list[Tensor]) -> dict[str, Tensor]:
        """Outputs, and the gradients of everything; zeros where nothing reads it."""
        loss = sum((out * weight).sum() for out, weight in zip(outputs, self.weights, strict=True))
        leaves = self.leaves()
        gradients = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True, materialize_grads=True)
        return {"s": outputs[0], "l": outputs[1], **dict(zip(leaves, gradients, strict=True))}

    def inputs(self) -> list[Tensor]:
        """(B, K, C) of both sublayers, memory first."""
        pairs = zip(self.memory, (self.x, self.above), strict=True)
        return [x if memory is None else torch.cat([memory, x], 1) for memory, x in pairs]

    def projected(self, x_BKC: Tensor) -> list[Tensor]:
        """Queries, keys and values."""
        if not self.is_causal:
            return [split(part) for part in self.s.qkv_proj(x_BKC).chunk(3, -1)]
        k, v = self.s.kv_proj(x_BKC).chunk(2, -1)
        return [split(self.s.q_proj(self.x)), split(k), split(v)]

    def scores(self, q: Tensor, k: Tensor, distances: Tensor, sublayer: Optional[nn.Module] = None) -> Tensor:
        """Of the ``s``, or of another sublayer with queries of its own."""
        if self.is_causal:
            return self.causal(self.content_and_position(q, k, distances, sublayer or self.s), distances)
        return self.biased_and_padded(torch.einsum("bntd,bnkd->bntk", q, k) / math.sqrt(SIZE), distances)

    def biased_and_padded(self, scores: Tensor, distances: Tensor) -> Tensor:
        """An encoder's scores, with what it adds to those of any kind."""
        if self.bias is not None:
            bucket = self.bias(self.time).bucket_by_distance[self.time - 1 - distances]
            scores = scores + self.bias.table[bucket].permute(2, 0, 1)
        return scores if self.padding is None else scores.masked_fill(self.padding[:, None, None], -math.inf)

    def causal(self, scores: Tensor, distances: Tensor) -> Tensor:
        return scores.masked_fill(distances < 0, -math.inf)

    def content_and_position(self, q: Tensor, k: Tensor, distances: Tensor, sublayer: nn.Module) -> Tensor:
        """Transformer-XL's."""
        of_distance = encode_distances(self.keys, WIDTH, 0, self.u).flip(0)[1:]  # rows 0, 1, 2, ...
        r = sublayer.position_proj(of_distance).unflatten(-1, (HEADS, SIZE))[distances.clamp(min=0)]
        content = torch.einsum("bntd,bnkd->bntk", q + self.u[:, None], k)
        position = torch.einsum("bntd,tknd->bntk", q + self.v[:, None], r)
        return (content + position) / math.sqrt(SIZE)


def split(x_BTC: Tensor) -> Tensor:
    return x_BTC.unflatten(-1, (HEADS, SIZE)).transpose(1, 2)
