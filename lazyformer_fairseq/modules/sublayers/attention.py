"""Multi-head attention sublayers: ``s``, and ``l`` and ``k``, which reuse parts of a lower ``s``.

- ``s`` is self-attention. In a causal model it is Transformer-XL's attention (Dai et al., 2019, section 3.3 and
  appendix B).
- ``l`` is lazy attention: it applies an attention distribution computed below to its own values (LazyFormer, section 2,
  Figure 1).
- ``k`` computes its own queries, but reuses the keys and values of a lower ``s`` (Brandon et al., 2024). This saves two
  of the four projections and, in a causal model, the memory of the sublayer's previous inputs.
"""

import math
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar, Optional, Union, cast

import torch
from torch import Tensor, nn
from typing_extensions import override

from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.modules.attention import AttentionInputs, attend
from lazyformer_fairseq.modules.attention.scores import Scores
from lazyformer_fairseq.modules.linear import Linear
from lazyformer_fairseq.modules.sublayers.attention_variants.interface import (
    Attend,
    Attention,
    AttentionOutput,
    VariantModule,
    build_choices,
    build_values,
    build_vectors,
    make_vectors,
)
from lazyformer_fairseq.modules.sublayers.interface import (
    Context,
    Output,
    Settings,
    SharedState,
    Sublayer,
    SublayerOptions,
    by_document,
)
from lazyformer_fairseq.patterns.attention_variants import (
    KEYS,
    MASK,
    QUERIES,
    SCORES,
    chosen_variants,
    has_positions,
    projected,
    why_no_memory,
)
from lazyformer_fairseq.patterns.grammar import PlannedSublayer
from lazyformer_fairseq.patterns.kinds import DISTRIBUTION, KEYS_AND_VALUES

# The linear layer that projects each of "q", "k" and "v", and the chunk of the layer's output that contains it, as
# (name of the layer, index of the chunk, number of chunks).
Projections = Mapping[str, tuple[str, int, int]]
Projected = tuple[Tensor, Tensor, Tensor]  # queries, keys and values


class AttentionSublayer(Sublayer):
    """Base class of attention sublayers; subclasses create the output projection `out_proj`.

    Args:
        options: the network's options.
        planned: the sublayer's entry in the plan.

    Attributes:
        consumers: the number of lazy sublayers above that reuse the attention distribution.
        choices: the attention variants' modules by name, outermost first.
        value_transforms: modules of attention variants that transform the values, by name.
        query_makers: modules of attention variants that transform the queries, by name.
        projections: the layers that project queries, keys and values if the sublayer projects all of them.

    Raises:
        UserError: the embedding dimension is not divisible by the number of heads.
    """

    attends = takes_documents = takes_permuted = True
    projections: ClassVar[Projections]
    choices: nn.ModuleDict
    value_transforms: nn.ModuleDict
    query_makers: nn.ModuleDict

    def __init__(self, options: SublayerOptions, planned: PlannedSublayer):
        super().__init__()
        check_heads(options.embed_dim, options.num_heads)
        self.num_heads = options.num_heads
        self.dropout = options.attention_dropout
        self.consumers = planned.consumers.count(DISTRIBUTION)
        self.is_key_producer = KEYS_AND_VALUES in planned.consumers

    @classmethod
    @override
    def build(cls, options: SublayerOptions, planned: PlannedSublayer) -> "AttentionSublayer":
        return cls(options, planned)

    @property
    def variants(self) -> list[VariantModule]:
        """The attention variants' modules, outermost first."""
        return [cast(VariantModule, module) for module in self.choices.values()]

    @property
    def current_dropout(self) -> float:
        """The dropout rate currently applied to attention distributions; 0 in evaluation mode."""
        if self.training:
            return self.dropout
        return 0.0

    @classmethod
    def parts(cls, planned: PlannedSublayer) -> Projections:  # noqa: ARG003 - for overrides
        """Return the projections that exist under the settings of `planned`.

        Some attention variants do not project queries or keys.
        """
        return cls.projections

    def copied(self, weights: Mapping[str, Tensor], prefix: str = "") -> dict[str, Tensor]:
        """Return initial weights for the linear layers that start as copies of this sublayer's projections.

        Args:
            weights: a model's weights by name; projections that are missing here are skipped.
            prefix: the prefix of this sublayer's weight names.

        Returns:
            The copied weights, by prefixed name.
        """
        found = {}
        for path, module in self.named_modules():
            for name, projection in getattr(module, "copies", {}).items():
                if getattr(module, name, None) is None:
                    continue
                source, number, parts = self.projections[projection]
                for parameter in ("weight", "bias"):
                    weight = weights.get(f"{prefix}{source}.{parameter}")
                    if weight is not None:
                        found[f"{prefix}{path}.{name}.{parameter}"] = weight.chunk(parts)[number]
        return found

    @torch.no_grad()
    def initialize_copies(self) -> None:
        """Initialize linear layers that start as copies of the projections.

        Initialization functions call this method after they have initialized the projections.
        """
        weights = self.state_dict()
        for name, weight in self.copied(weights).items():
            weights[name].copy_(weight)

    def make_values(self, x_BKC: Tensor, v_BKC: Tensor) -> Any:
        """Split projected values (B, K, C) into heads, and transform them as the attention variants require."""
        values = split_heads(v_BKC, self.num_heads)
        for maker in self.value_transforms.values():
            values = maker(values, x_BKC)
        return values

    def make_queries(self, q_BTC: Tensor, scores: Scores, keys: int) -> Tensor:
        """Split projected queries into heads (B, N, T, D), and transform them as the attention variants require.

        Args:
            q_BTC: projected queries for the last T of K positions.
            scores: the terms added to the attention scores.
            keys: K.
        """
        q_BNTD = split_heads(q_BTC, self.num_heads)
        return make_vectors(self.query_makers, q_BNTD, scores, keys)

    def attend(self, attention: Attention, shared: Context) -> Output:
        """Return the attention output (B, T, C) before the output projection, and the state passed to sublayers above.

        This state contains the attention distribution without dropout.
        """
        handed_on: dict[str, Any] = {}

        def innermost(attention: Attention) -> AttentionOutput:
            if self.is_key_producer:
                handed_on[KEYS_AND_VALUES] = attention
            inputs = AttentionInputs(
                q_BNTD=attention.q_BNTD,
                k_BNKD=attention.k_BNKD,
                v_BNKD=attention.values,
                scores=attention.scores,
                dropout=self.current_dropout,
                consumers=self.consumers,
            )
            back_end = attention.back_end or shared.back_end(inputs)
            output, distribution = attend(inputs, back_end)
            return AttentionOutput(output, distribution)

        attend_below: Attend = innermost
        for variant in reversed(self.variants):
            attend_below = partial(variant.attend, inner=attend_below)
        attended = attend_below(attention)
        if shared.observe is not None:
            shared.observe(attended.distribution)
        return merge_heads(attended.output_BNTD), {DISTRIBUTION: attended.distribution, **handed_on}


def _values_below(planned: PlannedSublayer) -> Settings:
    """Return the settings of the ``s`` that a sublayer reads from; empty if the plan does not name one."""
    if planned.producer is None:
        return {}
    return planned.producer.values


class ChoosingAttention(AttentionSublayer):
    """Base class of ``s`` sublayers, whose settings select attention variants.

    Attributes:
        has_queries: whether the sublayer projects queries.
        has_keys: whether the sublayer projects keys.
        key_makers: modules of attention variants that transform the keys, by name.
        why_no_memory: the reason why the sublayer cannot attend to a memory; empty if it can.
    """

    def __init__(self, options: SublayerOptions, planned: PlannedSublayer):
        super().__init__(options, planned)
        kept = projected(planned.values)
        self.has_queries = QUERIES in kept
        self.has_keys = KEYS in kept
        self.why_no_memory = why_no_memory(planned.values)
        options = replace(options, values=planned.values)
        self.choices = build_choices(options)
        self.takes_documents = all(variant.project is None for variant in self.variants)
        # Masks and learned scores depend on a token's index in its sequence.
        goes_by_index = any(row.choice in (MASK, SCORES) for row in chosen_variants(planned.values))
        self.takes_permuted = self.takes_documents and not goes_by_index
        self.value_transforms = build_values(options)
        self.query_makers = nn.ModuleDict()
        self.key_makers = nn.ModuleDict()
        if self.has_queries:
            self.query_makers = build_vectors(options, are_keys=False)
        if self.has_keys:
            self.key_makers = build_vectors(options, are_keys=True)

    def make_keys(self, k_BKC: Tensor, scores: Scores, keys: int) -> Tensor:
        """Split projected keys into heads (B, N, K, D), and transform them as the attention variants require."""
        k_BNKD = split_heads(k_BKC, self.num_heads)
        return make_vectors(self.key_makers, k_BNKD, scores, keys)


class SelfAttention(ChoosingAttention):
    """Self-attention of encoders (``s``): softmax(QK^T / sqrt(D) + bias) V, then an output projection.

    Attention variants can change this formula.
    """

    projections: ClassVar[Projections] = {
        "q": ("qkv_proj", 0, 3),
        "k": ("qkv_proj", 1, 3),
        "v": ("qkv_proj", 2, 3),
    }

    def __init__(self, options: SublayerOptions, planned: PlannedSublayer):
        super().__init__(options, planned)
        blocks = 1 + self.has_queries + self.has_keys
        self.qkv_proj = Linear(options.embed_dim, blocks * options.embed_dim)
        self.qkv_proj.blocks = blocks
        self.out_proj = Linear(options.embed_dim, options.embed_dim)
        self.initialize_copies()

    @classmethod
    @override
    def parts(cls, planned: PlannedSublayer) -> Projections:
        """Return the chunk of `qkv_proj` that contains each existing projection."""
        kept = projected(planned.values)
        names = []
        if QUERIES in kept:
            names.append("q")
        if KEYS in kept:
            names.append("k")
        names.append("v")
        return {name: ("qkv_proj", number, len(names)) for number, name in enumerate(names)}

    @override
    def forward(
        self,
        x_BTC: Tensor,
        below: SharedState,
        shared: Context,
        memory_BMC: Tensor | None = None,
    ) -> Output:
        """Compute self-attention over the input tokens."""
        input_of_variants = None
        if self.choices or self.is_key_producer:
            input_of_variants = x_BTC
        inputs = [input_of_variants, self._project(x_BTC, shared.scores)]
        y_BTC, handed_on = by_document(self._attend, inputs, below, shared)
        return self.out_proj(y_BTC), handed_on

    def _attend(
        self,
        x_BTC: Tensor,
        projected: Union[Tensor, Projected],
        _below: SharedState,
        shared: Context,
    ) -> Output:
        """Compute attention within one sequence or one group of documents.

        `x_BTC` is None if neither an attention variant nor a ``k`` above reads it.
        """
        if isinstance(projected, Tensor):  # kept as one tensor until here to save a copy when documents are grouped
            c = self.out_proj.in_features
            sizes = (c * self.has_queries, c * self.has_keys, c)
            q_BTC, k_BKC, v_BKC = projected.split(sizes, dim=-1)
        else:
            q_BTC, k_BKC, v_BKC = projected
        time = q_BTC.size(1)
        attention = Attention(
            x_BTC=x_BTC,
            x_BKC=x_BTC,
            q_BNTD=self.make_queries(q_BTC, shared.scores, time),
            k_BNKD=self.make_keys(k_BKC, shared.scores, time),
            values=self.make_values(x_BTC, v_BKC),
            scores=shared.scores,
            makers=(self.query_makers, self.key_makers),
        )
        return self.attend(attention, shared)

    def _project(self, x_BTC: Tensor, scores: Scores) -> Union[Tensor, Projected]:
        """Project the input to queries, keys and values.

        Returns:
            The existing projections, concatenated along the last dimension into one tensor. If an attention variant
            computes them, the result may be a tuple of queries, keys and values instead.
        """
        for variant in self.variants:
            if variant.project is not None:
                return variant.project(x_BTC, self.qkv_proj, scores)
        return self.qkv_proj(x_BTC)


class RelativeAttention(ChoosingAttention):
    """Self-attention of causal models (``s``), with Transformer-XL's relative positions.

    It computes softmax(((Q + u) K^T + shift((Q + v) R^T)) / sqrt(D)) V and an output projection.

    R contains the projected distances. Keys and values are computed from the memory and the segment; queries are
    computed only from the segment. The decoder owns the vectors u and v and shares them among all its sublayers.
    Projections have no biases. Attention variants can change this formula; those with their own positional encoding do
    not use u, v and R.
    """

    projections: ClassVar[Projections] = {
        "q": ("q_proj", 0, 1),
        "k": ("kv_proj", 0, 2),
        "v": ("kv_proj", 1, 2),
    }

    def __init__(self, options: SublayerOptions, planned: PlannedSublayer):
        super().__init__(options, planned)
        embed_dim = options.embed_dim
        self.q_proj: Optional[Linear] = None
        if self.has_queries:
            self.q_proj = Linear(embed_dim, embed_dim, bias=False)
        blocks = 1 + self.has_keys
        self.kv_proj = Linear(embed_dim, blocks * embed_dim, bias=False)
        self.kv_proj.blocks = blocks
        self.has_scores = not has_positions(planned.values)
        self.position_proj: Optional[Linear] = None
        if self.has_queries and self.has_keys and self.has_scores:
            self.position_proj = Linear(embed_dim, embed_dim, bias=False)
        self.out_proj = Linear(embed_dim, embed_dim, bias=False)
        self.initialize_copies()

    @override
    def forward(
        self,
        x_BTC: Tensor,
        below: SharedState,
        shared: Context,
        memory_BMC: Tensor | None = None,
    ) -> Output:
        """Compute attention from the segment to the memory and the segment itself."""
        if memory_BMC is not None:
            if self.why_no_memory:
                raise UserError(
                    f"this attention cannot use a memory of {memory_BMC.size(1)} tokens: {self.why_no_memory}; "
                    "set --mem-len 0"
                )
            memory_BMC, shared = self._within_reach(memory_BMC, x_BTC.size(1), shared)
        x_BKC = with_memory(memory_BMC, x_BTC)
        c = x_BTC.size(-1)
        k_BKC, v_BKC = self.kv_proj(x_BKC).split((c * self.has_keys, c), dim=-1)
        keys = x_BKC.size(1)
        q_BNTD, scores = self._queries(x_BTC, shared, keys)
        positions = None
        if self.has_scores:
            positions = shared.positions
        attention = Attention(
            x_BTC=x_BTC,
            x_BKC=x_BKC,
            q_BNTD=q_BNTD,
            k_BNKD=self.make_keys(k_BKC, shared.scores, keys),
            values=self.make_values(x_BKC, v_BKC),
            scores=scores,
            positions=positions,
            makers=(self.query_makers, self.key_makers),
        )
        y_BTC, handed_on = self.attend(attention, shared)
        return self.out_proj(y_BTC), handed_on

    def _within_reach(
        self,
        memory_BMC: Tensor,
        time: int,
        shared: Context,
    ) -> tuple[Tensor, Context]:
        """Drop the part of the memory that no query can attend to, along with its positions.

        Sublayers that reuse this sublayer's distribution or keys expect all keys, so nothing is dropped for them.
        """
        length = memory_BMC.size(1)
        kept = length
        for variant in self.variants:
            if variant.reach is not None:
                kept = min(kept, variant.reach)
        if kept == length or self.consumers or self.is_key_producer:
            return memory_BMC, shared
        memory_BMC = memory_BMC[:, length - kept :]
        if not self.has_scores or shared.positions is None:
            return memory_BMC, shared
        encoded = shared.positions.encoded[-(kept + time + 1) :]
        positions = shared.positions._replace(encoded=encoded)
        return memory_BMC, shared._replace(positions=positions)

    def _queries(self, x_BTC: Tensor, shared: Context, keys: int) -> tuple[Tensor, Scores]:
        """Return Q + u, and the scores with the distance terms added.

        Without keys there are no projected distances. Without queries, the first tensor is empty (D = 0).
        """
        if self.q_proj is None:
            return split_heads(x_BTC[..., :0], self.num_heads), shared.scores
        q_BNTD = self.make_queries(self.q_proj(x_BTC), shared.scores, keys)
        if self.position_proj is not None:
            q_BNTD, positions = with_distances(q_BNTD, self.position_proj, shared)
            return q_BNTD, shared.scores.with_own(**positions)
        if self.has_scores and shared.positions is not None:
            q_BNTD = q_BNTD + shared.positions.content_bias[:, None]
        return q_BNTD, shared.scores


class LazyAttention(AttentionSublayer):
    """Lazy attention (``l``): P V and an output projection, where P is the nearest attention distribution below.

    In a causal model the projections have no biases, as in Transformer-XL's attention.
    """

    projections: ClassVar[Projections] = {"v": ("v_proj", 0, 1)}
    has_queries = has_keys = has_scores = False

    def __init__(self, options: SublayerOptions, planned: PlannedSublayer):
        super().__init__(options, planned)
        has_bias = not options.is_causal
        self.v_proj = Linear(options.embed_dim, options.embed_dim, has_bias)
        self.out_proj = Linear(options.embed_dim, options.embed_dim, has_bias)
        self.value_transforms = build_values(replace(options, values=_values_below(planned)))
        self.initialize_copies()

    @override
    def forward(
        self,
        x_BTC: Tensor,
        below: SharedState,
        shared: Context,
        memory_BMC: Tensor | None = None,
    ) -> Output:
        """Apply the distribution computed below, which already includes biases and masks, to this sublayer's values."""
        x_BKC = with_memory(memory_BMC, x_BTC)
        distribution = below[DISTRIBUTION]
        one = distribution
        if isinstance(distribution, list):
            one = distribution[0]
        makes_values = hasattr(one, "project")
        input_of_makers = None
        if makes_values or self.value_transforms:
            input_of_makers = x_BKC
        v_BKC = None
        if not makes_values:
            v_BKC = self.v_proj(x_BKC)
        inputs = [input_of_makers, v_BKC]
        y_BTC, _ = by_document(self._attend, inputs, {DISTRIBUTION: distribution}, shared)
        return self.out_proj(y_BTC), {}

    def _attend(
        self,
        x_BKC: Tensor,
        v_BKC: Optional[Tensor],
        below: SharedState,
        _shared: Context,
    ) -> Output:
        """Compute attention within one sequence or one group of documents.

        `x_BKC` is None if no attention variant computes values from it. `v_BKC` is None if the distribution projects
        the values itself.
        """
        distribution = below[DISTRIBUTION]
        if v_BKC is None:
            v_BKC, distribution = distribution.project(x_BKC, self.v_proj, self.num_heads)
        values = self.make_values(x_BKC, v_BKC)
        output_BNTD = distribution.attend(values, self.current_dropout)
        return merge_heads(output_BNTD), {}


class SharedKeysAttention(AttentionSublayer):
    """Cross-layer attention (``k``): softmax(QK^T / sqrt(D) + bias) V, with K and V of the nearest ``s`` below.

    See Brandon et al. (2024), section 2. Everything else in that ``s`` applies here too: its bias, padding, mask,
    persistent or projected keys, the function that turns scores into weights, and the query transformations. Dropout is
    sampled independently. In a causal model the sublayer has its own distance projection, and its projections have no
    biases.
    """

    attends = False  # the shared keys already include the memory
    projections: ClassVar[Projections] = {"q": ("q_proj", 0, 1)}

    def __init__(self, options: SublayerOptions, planned: PlannedSublayer):
        super().__init__(options, planned)
        self.choices = nn.ModuleDict()  # the s has already applied its variants to keys and values
        has_bias = not options.is_causal
        self.q_proj = Linear(options.embed_dim, options.embed_dim, has_bias)
        self.out_proj = Linear(options.embed_dim, options.embed_dim, has_bias)
        self.position_proj: Optional[Linear] = None
        values = _values_below(planned)
        self.query_makers = build_vectors(replace(options, values=values), are_keys=False)
        if options.is_causal and not has_positions(values):
            self.position_proj = Linear(options.embed_dim, options.embed_dim, bias=False)

    @override
    def forward(
        self,
        x_BTC: Tensor,
        below: SharedState,
        shared: Context,
        memory_BMC: Tensor | None = None,
    ) -> Output:
        """Compute attention with the keys and values of the ``s`` below; `memory_BMC` is ignored."""
        y_BTC, _ = by_document(self._attend, [x_BTC, self.q_proj(x_BTC)], below, shared)
        return self.out_proj(y_BTC), {}

    def _attend(
        self,
        x_BTC: Tensor,
        q_BTC: Tensor,
        below: SharedState,
        shared: Context,
    ) -> Output:
        attention: Attention = replace(below[KEYS_AND_VALUES], x_BTC=x_BTC)
        q_BNTD = self.make_queries(q_BTC, shared.scores, attention.x_BKC.size(1))
        if self.position_proj is None:
            attention = replace(attention, q_BNTD=q_BNTD)
        else:
            q_BNTD, positions = with_distances(q_BNTD, self.position_proj, shared)
            attention = replace(attention, q_BNTD=q_BNTD).with_scores(**positions)
        return self.attend(attention, shared)


def encode_distances(keys: int, embed_dim: int, clamp_len: int, like: Tensor) -> Tensor:
    """Return sinusoidal encodings (K + 1, C) of the distances K - 1 down to -1: first all sines, then all cosines.

    Args:
        keys: K, the number of keys.
        embed_dim: C, which must be even.
        clamp_len: the distance to which longer distances are clamped; 0 for no limit.
        like: a tensor that determines the device and dtype of the result.
    """
    exact = torch.promote_types(like.dtype, torch.float32)  # fp16 cannot represent all integers above 2,048
    distances = torch.arange(keys - 1, -2, -1, device=like.device, dtype=exact)
    if clamp_len:
        distances = distances.clamp(max=clamp_len)
    exponents = torch.arange(0, embed_dim, 2, device=like.device, dtype=exact) / embed_dim
    angles = torch.outer(distances, 10000.0**-exponents)
    return torch.cat([angles.sin(), angles.cos()], dim=-1).to(like.dtype)


def with_distances(
    q_BNTD: Tensor,
    position_proj: Linear,
    shared: Context,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return Q + u (B, N, T, D), and the fields of :class:`Scores` for relative positions.

    Args:
        q_BNTD: the projected queries Q.
        position_proj: the projection of encoded distances.
        shared: the context of the forward pass; it must include relative positions.
    """
    positions = shared.positions
    assert positions is not None, "the context of a causal model has relative positions"
    q_BTND = q_BNTD.transpose(1, 2)
    num_heads, size = q_BTND.shape[2:]
    distances_KND = position_proj(positions.encoded).unflatten(-1, (num_heads, -1))
    about_positions = (q_BTND + positions.position_bias) / math.sqrt(size)
    about_content = q_BTND + positions.content_bias
    parts = {
        "position_queries_BNTD": about_positions.transpose(1, 2),
        "distances_NKD": distances_KND.transpose(0, 1),
    }
    return about_content.transpose(1, 2), parts


def split_heads(x_BTC: Tensor, num_heads: int) -> Tensor:
    """Split the last dimension of (B, T, C) into heads; return (B, N, T, D)."""
    head_size = x_BTC.size(-1) // num_heads
    return x_BTC.unflatten(-1, (num_heads, head_size)).transpose(1, 2)


def merge_heads(x_BNTD: Tensor) -> Tensor:
    """Join the heads of (B, N, T, D); return (B, T, C)."""
    return x_BNTD.transpose(1, 2).flatten(2)


def with_memory(memory_BMC: Optional[Tensor], x_BTC: Tensor) -> Tensor:
    """Return all inputs to attend to (B, M + T, C): the memory, if any, followed by the current segment."""
    if memory_BMC is None:
        return x_BTC
    return torch.cat([memory_BMC, x_BTC], dim=1)


def check_heads(embed_dim: int, num_heads: int) -> None:
    """Raise a UserError if the embedding dimension is not divisible by the number of heads."""
    if num_heads < 1 or embed_dim % num_heads:
        raise UserError(
            f"an embedding dimension of {embed_dim} is not divisible by {num_heads} attention heads; choose a number "
            "of heads that divides the embedding dimension"
        )
