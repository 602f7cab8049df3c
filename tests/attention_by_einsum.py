"""Attention written out from the papers' equations, for the sublayers' own weights: what kinds of attention change."""

import math
from collections.abc import Callable
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
LEFT = RIGHT.flip(1)
HOLES = torch.tensor([[False, True, False, True, True, False, False], [True, False, False, False, True, False, True]])
padded_and_with_memory = pytest.mark.parametrize(
    "given",
    [
        *({"time": 7, "padding": padding, "biased": True} for padding in (None, RIGHT, LEFT, HOLES)),
        {"time": 1},
        {"time": 6, "memory": 0},
        {"time": 4, "memory": 5},
    ],
    ids=str,
)


class Attending:
    """An ``s`` with settings and an ``l`` above it, with random weights in float64, and what they share.

    Args:
        letter: such as ``s[window=2]``.
        memory: M of a causal model; None for an encoder.
        biased: an encoder has T5's bias.
        padding: (B, T), True at padding.
    """

    def __init__(
        self,
        letter: str,
        time: int,
        memory: Optional[int] = None,
        biased: bool = False,
        padding: Optional[Tensor] = None,
        back_end: str = "eager",
    ):
        torch.manual_seed(3)
        self.is_causal, self.time, self.padding = memory is not None, time, padding
        longest = 0 if self.is_causal else time
        options = SublayerOptions(WIDTH, 20, HEADS, max_positions=longest, is_causal=self.is_causal)
        direction = CAUSAL if self.is_causal else ENCODER
        self.s, self.l = (p.kind.module(direction).build(options, p) for p in plan(f"{letter}l", direction))
        self.bias = RelativePositionBias(HEADS, BUCKETS, FAR) if biased else None
        self.modules = nn.ModuleList([self.s, self.l, *([self.bias] if biased else [])]).double()
        for parameter in self.modules.parameters():
            nn.init.normal_(parameter, std=0.5)
        self.u, self.v = (torch.randn(HEADS, SIZE, dtype=torch.double).requires_grad_() for _ in range(2))
        self.x, self.above = (torch.randn(BATCH, time, WIDTH, dtype=torch.double).requires_grad_() for _ in range(2))
        self.memory = torch.randn(2, BATCH, memory, WIDTH, dtype=torch.double) if memory else (None, None)
        self.weights = torch.randn(2, BATCH, time, WIDTH, dtype=torch.double)
        self.back_end = back_end

    @property
    def keys(self) -> int:
        return self.time + (0 if self.memory[0] is None else self.memory[0].size(1))

    def leaves(self) -> dict[str, Tensor]:
        named = dict(self.modules.named_parameters())
        own = {"u": self.u, "v": self.v} if self.is_causal else {}
        return {**named, **own, "x": self.x, "above": self.above}

    def context(self) -> Context:
        scores = Scores(is_causal=self.is_causal) if self.bias is None else self.bias(self.time)
        if self.padding is not None:
            is_on_right = bool((self.padding[:, 1:] >= self.padding[:, :-1]).all())
            scores = scores.with_padding(self.padding, is_on_right)
        positions = None
        if self.is_causal:
            positions = RelativePositions(encode_distances(self.keys, WIDTH, 0, self.u), self.u, self.v)
        return Context(scores, lambda consumers, settings: self.back_end, positions)

    def outputs(self) -> list[Tensor]:
        """Of the ``s`` and of the ``l``, whose input is another."""
        shared = self.context()
        output, handed_on = self.s(self.x, {}, shared, self.memory[0])
        return [output, self.l(self.above, handed_on, shared, self.memory[1])[0]]

    def expected(self, weigh: Callable[[Tensor, Tensor, Tensor], Tensor]) -> list[Tensor]:
        """The same by equations.

        Args:
            weigh: (q (B, N, T, D), scores (B, N, T, K), distances (T, K) from key to query) -> P (B, N, T, K or more).
                At keys that a query must not see scores are -inf.
        """
        x_BKC, above_BKC = (self._with_memory(*pair) for pair in zip(self.memory, (self.x, self.above), strict=True))
        q, k, v = self._projected(x_BKC)
        distances = torch.arange(self.keys - self.time, self.keys)[:, None] - torch.arange(self.keys)
        scores = self._scores(q, k, distances)
        met = q + self.u[:, None] if self.is_causal else q
        probabilities = weigh(met, scores, distances)
        outputs = []
        for sublayer, values in ((self.s, v), (self.l, split(self.l.v_proj(above_BKC)))):
            for maker in sublayer.value_makers.values():  # all that a maker knows is its weights
                values = self.make_values(maker, values)
            heads = torch.einsum("bntk,bnkd->btnd", probabilities, values)
            outputs.append(sublayer.out_proj(heads.flatten(2)))
        return outputs

    def make_values(self, maker: nn.Module, values: Tensor) -> Tensor:
        raise NotImplementedError

    def with_gradients(self, outputs: list[Tensor]) -> dict[str, Tensor]:
        """Outputs, and the gradients of everything that has one."""
        loss = sum((out * weight).sum() for out, weight in zip(outputs, self.weights, strict=True))
        leaves = self.leaves()
        gradients = torch.autograd.grad(loss, list(leaves.values()))
        return {"s": outputs[0], "l": outputs[1], **dict(zip(leaves, gradients, strict=True))}

    def _with_memory(self, memory: Optional[Tensor], x: Tensor) -> Tensor:
        return x if memory is None else torch.cat([memory, x], 1)

    def _projected(self, x_BKC: Tensor) -> list[Tensor]:
        if not self.is_causal:
            return [split(part) for part in self.s.qkv_proj(x_BKC).chunk(3, -1)]
        k, v = self.s.kv_proj(x_BKC).chunk(2, -1)
        return [split(self.s.q_proj(self.x)), split(k), split(v)]

    def _scores(self, q: Tensor, k: Tensor, distances: Tensor) -> Tensor:
        if not self.is_causal:
            scores = torch.einsum("bntd,bnkd->bntk", q, k) / math.sqrt(SIZE)
            if self.bias is not None:
                bucket = self.bias(self.time).bucket_by_distance[self.time - 1 - distances]
                scores = scores + self.bias.table[bucket].permute(2, 0, 1)
            return scores if self.padding is None else scores.masked_fill(self.padding[:, None, None], -math.inf)
        of_distance = encode_distances(self.keys, WIDTH, 0, self.u).flip(0)[1:]  # rows 0, 1, 2, ...
        r = self.s.position_proj(of_distance).unflatten(-1, (HEADS, SIZE))[distances.clamp(min=0)]
        content = torch.einsum("bntd,bnkd->bntk", q + self.u[:, None], k)
        position = torch.einsum("bntd,tknd->bntk", q + self.v[:, None], r)
        return ((content + position) / math.sqrt(SIZE)).masked_fill(distances < 0, -math.inf)


def split(x_BTC: Tensor) -> Tensor:
    return x_BTC.unflatten(-1, (HEADS, SIZE)).transpose(1, 2)


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, value in found.items():
        torch.testing.assert_close(
            value, expected[name], rtol=1e-9, atol=1e-11, msg=lambda text, n=name: f"{n}: {text}"
        )
