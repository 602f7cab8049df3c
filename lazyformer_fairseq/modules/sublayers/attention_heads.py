"""What kinds that attend share."""

from collections.abc import Mapping
from functools import partial
from typing import Any, ClassVar, Optional

import torch
from torch import Tensor

from lazyformer_fairseq.modules.attention import BACK_ENDS, attend, fallback_backend
from lazyformer_fairseq.modules.memory_costs import AttentionSize, Memory, Pass
from lazyformer_fairseq.modules.sublayers.attention_variant import (
    Attention,
    AttentionOutput,
    VariantOptions,
    build_choices,
    build_values,
    projections,
    variant_classes,
)
from lazyformer_fairseq.modules.sublayers.interface import (
    Context,
    Settings,
    SharedState,
    Sublayer,
    SublayerOptions,
)
from lazyformer_fairseq.patterns.grammar import PlannedSublayer
from lazyformer_fairseq.patterns.kinds import CAUSAL, DISTRIBUTION, KEYS_AND_VALUES
from lazyformer_fairseq.patterns.sizes import Sizes


class AttentionSublayer(Sublayer):
    """The base of kinds with heads and a projection `out_proj`, which each kind makes itself.

    Args:
        options: of the network; heads must divide the width (ValueError).
        planned: its place in the plan.
        direction: of the network.

    Attributes:
        consumers: how many lazy sublayers above read the distribution.
        value_makers: what its kind of attention adds to values.
    """

    attends = True
    direction: ClassVar[str]
    # Where queries, keys and values are projected: a linear map, the number of the part of its outputs, of how many.
    projections: ClassVar[Mapping[str, tuple[str, int, int]]]

    def __init__(self, options: SublayerOptions, planned: PlannedSublayer):
        super().__init__()
        check_heads(options.embed_dim, options.num_heads)
        self.num_heads = options.num_heads
        self.dropout = options.attention_dropout
        self.settings = planned.settings
        self.consumers = planned.consumers.count(DISTRIBUTION)
        self.is_key_producer = KEYS_AND_VALUES in planned.consumers

    @classmethod
    def build(cls, options: SublayerOptions, planned: PlannedSublayer) -> "AttentionSublayer":
        return cls(options, planned)

    @classmethod
    def parts(cls, planned: PlannedSublayer) -> Mapping[str, tuple[str, int, int]]:
        """`projections` as they are with these settings: some kinds of attention do without queries or keys."""
        return cls.projections

    @classmethod
    def variant_options(cls, options: SublayerOptions, values: Settings) -> VariantOptions:
        return VariantOptions.of(options, values, cls.direction == CAUSAL)

    def copied(self, weights: Mapping[str, Tensor], prefix: str = "") -> dict[str, Tensor]:
        """Weights, by name, of linear maps that start as copies of projections, from those of the projections.

        Args:
            weights: of a model, by name.
            prefix: of the names of this sublayer's.
        """
        found = {}
        for path, module in self.named_modules():
            for name, projection in getattr(module, "copies", {}).items():
                source, number, parts = self.projections[projection]
                for kind in ("weight", "bias"):
                    if getattr(module, name, None) is not None and f"{prefix}{source}.{kind}" in weights:
                        part = weights[f"{prefix}{source}.{kind}"].chunk(parts)[number]
                        found[f"{prefix}{path}.{name}.{kind}"] = part
        return found

    @torch.no_grad()
    def start_copies(self) -> None:
        """Copies projections to all that start so; for initialisations, which call it after they drew those."""
        weights = self.state_dict()
        for name, weight in self.copied(weights).items():
            weights[name].copy_(weight)

    def make_values(self, x_BKC: Tensor, v_BKC: Tensor) -> Any:
        """Values in the form that its kind of attention takes, from projected ones."""
        values = split_heads(v_BKC, self.num_heads)
        for maker in self.value_makers.values():
            values = maker(values, x_BKC)
        return values

    def attend(self, attention: Attention, shared: Context) -> tuple[Tensor, SharedState]:
        """Attention, projected; hands on its distribution, from before dropout."""
        handed_on: dict[str, Any] = {}

        def innermost(attention: Attention) -> AttentionOutput:
            if self.is_key_producer:
                handed_on[KEYS_AND_VALUES] = attention
            dropout = self.dropout if self.training else 0.0
            back_end = shared.back_end(self.consumers, self.settings)
            return AttentionOutput(
                *attend(
                    attention.q_BNTD,
                    attention.k_BNKD,
                    attention.values,
                    attention.scores,
                    dropout,
                    self.consumers,
                    back_end,
                )
            )

        attend_below = innermost
        for choice in reversed(self.choices.values()):
            attend_below = partial(choice.attend, inner=attend_below)
        attended = attend_below(attention)
        if shared.observe is not None:
            shared.observe(attended.distribution)
        return self.out_proj(merge_heads(attended.output_BNTD)), {DISTRIBUTION: attended.distribution, **handed_on}


def count_attention_memory(
    sizes: Sizes, planned: PlannedSublayer, run: Pass, projected: int, is_consumer: bool = False
) -> Memory:
    """Of a sublayer that attends.

    Args:
        planned: whose settings shape the scores.
        projected: bytes of what it projects and autograd keeps.
        is_consumer: whether it reads the distribution of `planned`.
    """
    size = AttentionSize(
        run.batch,
        sizes.num_heads,
        run.time,
        run.keys,
        sizes.embed_dim,
        run.number,
        run.mask,
        run.device,
        run.attention_dropout,
        run.features,
        planned.consumers.count(DISTRIBUTION),
    )
    for choice in variant_classes(planned.values):
        size = choice.attention_size(sizes, planned.values, size)
    row = BACK_ENDS[fallback_backend(run.back_end(planned), size.dropout, size.features)]
    inner = (row.count_reuse_memory if is_consumer else row.count_memory)(size)
    output = run.tokens(sizes.embed_dim)
    # When the distribution is gone, gradients of all projections are there twice: one by one, and side by side.
    backward = max(output + inner.backward, 2 * projected - inner.kept)
    kept = inner.kept + projected + output
    return inner._replace(kept=kept, forward=output + inner.forward, backward=backward)


class ChoosingAttention(AttentionSublayer):
    """The base of ``s``: its settings choose what it computes.

    Attributes:
        choices: by name, the outermost first.
        has_queries, has_keys: whether it projects them.
        why_no_memory: why it can attend to no memory; empty if it can.
    """

    def __init__(self, options: SublayerOptions, planned: PlannedSublayer):
        super().__init__(options, planned)
        kept = projections(planned.values)
        self.has_queries, self.has_keys = "queries" in kept, "keys" in kept
        reasons = [choice.why_no_memory(planned.values) for choice in variant_classes(planned.values)]
        self.why_no_memory = next(filter(None, reasons), "")
        of_choice = self.variant_options(options, planned.values)
        self.choices = build_choices(of_choice)
        self.value_makers = build_values(of_choice)


def count_remembered(sizes: Sizes, run: Pass) -> tuple[int, int]:
    """Bytes of a projection (B, K, C) of memory and segment, and of a copy of both, which there is with a memory."""
    of_keys = run.batch * run.keys * sizes.embed_dim * run.number
    return of_keys, of_keys if run.memory else 0


def split_heads(x_BTC: Tensor, num_heads: int) -> Tensor:
    """(B, T, C) -> (B, N, T, D)."""
    return x_BTC.unflatten(-1, (num_heads, x_BTC.size(-1) // num_heads)).transpose(1, 2)


def merge_heads(x_BNTD: Tensor) -> Tensor:
    """(B, N, T, D) -> (B, T, C)."""
    return x_BNTD.transpose(1, 2).flatten(2)


def with_memory(memory_BMC: Optional[Tensor], x_BTC: Tensor) -> Tensor:
    """All inputs to attend to, (B, M + T, C): the previous segments', if any, then this one's."""
    return x_BTC if memory_BMC is None else torch.cat([memory_BMC, x_BTC], dim=1)


def check_heads(embed_dim: int, num_heads: int) -> None:
    """Raises ValueError where heads do not divide the width."""
    if num_heads < 1 or embed_dim % num_heads:
        raise ValueError(f"{num_heads} attention heads do not divide an embedding dimension of {embed_dim}")
