"""The encoder: embeddings, then one loop over the sublayers of the pattern."""

from collections.abc import Callable, Iterable
from functools import partial
from typing import Optional

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lazyformer_fairseq.modules.attention import ReusableAttention
from lazyformer_fairseq.modules.attention.choice import Situation, check_backend, choose
from lazyformer_fairseq.modules.attention.scores import ScoreBias
from lazyformer_fairseq.modules.compiled import compiled
from lazyformer_fairseq.modules.layer_norm import layer_norm
from lazyformer_fairseq.modules.networks.position_bias import RelativePositionBias
from lazyformer_fairseq.modules.sublayers.feed_forward import FeedForward
from lazyformer_fairseq.modules.sublayers.lazy_attention import LazyAttention
from lazyformer_fairseq.modules.sublayers.residual import ResidualSublayer
from lazyformer_fairseq.modules.sublayers.self_attention import AttentionContext, SelfAttention
from lazyformer_fairseq.patterns.grammar import PlannedSublayer, plan


class Encoder(nn.Module):
    """Token and learned absolute position embeddings, T5's relative bias, and the sublayers of a pattern.

    Post-norm encoders normalise the embeddings, pre-norm ones the output (as fairseq's roberta and roberta_prenorm).

    Args:
        pattern: see :mod:`lazyformer_fairseq.patterns.grammar`.
        vocab_size: V.
        embed_dim: C.
        ffn_embed_dim: width of the feed-forward sublayers.
        num_heads: N; must divide C (ValueError).
        max_positions: longest sequence.
        padding_idx: id of the padding symbol.
        dropout: on embeddings and on every sublayer's output.
        attention_dropout: on attention distributions.
        activation_dropout: after the activation of the feed-forward sublayers.
        activation: of the feed-forward sublayers.
        normalize_before: pre-norm.
        relative_position_buckets: of the relative bias; 0 for none.
        relative_position_max_distance: from which on all distances share a bucket.
        lazy_backend: how attention is computed, "auto" or one of :data:`attention.choice.BACKENDS`.

    Attributes:
        lazy_backend: may be set between two forward passes; weights do not depend on it.
        compiles: whether torch.compile takes the sublayers in training; may be set likewise.

    Raises:
        ValueError: sizes that do not fit together, or a back end that has no attention dropout with it (UserError).
    """

    def __init__(
        self,
        pattern: str,
        vocab_size: int,
        embed_dim: int,
        ffn_embed_dim: int,
        num_heads: int,
        max_positions: int = 512,
        padding_idx: int = 1,
        dropout: float = 0.0,
        attention_dropout: float = 0.0,
        activation_dropout: float = 0.0,
        activation: Callable[[Tensor], Tensor] = F.gelu,
        normalize_before: bool = False,
        relative_position_buckets: int = 32,
        relative_position_max_distance: int = 128,
        lazy_backend: str = "auto",
    ):
        super().__init__()
        self.padding_idx = padding_idx
        self.max_positions = max_positions
        self.embed_dim = embed_dim
        self.ffn_embed_dim = ffn_embed_dim
        self.num_heads = num_heads
        self.dropout = dropout
        self.attention_dropout = attention_dropout
        self.activation_dropout = activation_dropout
        self.activation = activation
        self.normalize_before = normalize_before
        self.lazy_backend = lazy_backend
        self.compiles = False
        self.embed_tokens = nn.Embedding(vocab_size, embed_dim, padding_idx)
        self.embed_positions = nn.Embedding(max_positions, embed_dim)
        self.relative_position_bias = (
            RelativePositionBias(num_heads, relative_position_buckets, relative_position_max_distance)
            if relative_position_buckets
            else None
        )
        self.sublayers = nn.ModuleList(self.build_sublayer(planned) for planned in plan(pattern))
        self._attentions = sum(isinstance(sublayer.inner, SelfAttention) for sublayer in self.sublayers)
        self.embedding_layer_norm = None if normalize_before else layer_norm(embed_dim)
        self.final_layer_norm = layer_norm(embed_dim) if normalize_before else None

    def build_sublayer(self, planned: PlannedSublayer) -> ResidualSublayer:
        """One sublayer of the encoder's sizes with weights of its own: what ``sublayers`` is made of, or a search's."""
        if planned.kind == "s":
            inner = SelfAttention(self.embed_dim, self.num_heads, self.attention_dropout, planned.readers)
        elif planned.kind == "l":
            inner = LazyAttention(self.embed_dim, self.num_heads, self.attention_dropout)
        else:
            inner = FeedForward(self.embed_dim, self.ffn_embed_dim, self.activation, self.activation_dropout)
        return ResidualSublayer(inner, self.embed_dim, self.dropout, self.normalize_before)

    def forward(
        self, tokens_BT: Tensor, padding_mask_BT: Optional[Tensor] = None, return_all: bool = False
    ) -> tuple[Tensor, list[Tensor]]:
        """Encodes.

        Args:
            tokens_BT: ids, padded on the right.
            padding_mask_BT: True at padding; None where there is none, which is cheaper.
            return_all: also return the embeddings and the output of each sublayer.

        Returns:
            Features (B, T, C), and the list of intermediate (B, T, C) (empty unless `return_all`).

        Raises:
            ValueError: where T exceeds `max_positions`.
        """
        time = tokens_BT.size(1)
        if time > self.max_positions:
            raise ValueError(f"a sequence of {time} tokens is longer than the model's {self.max_positions} positions")
        x = self.embed_tokens(tokens_BT) + self.embed_positions.weight[:time]
        if self.embedding_layer_norm is not None:
            x = self.embedding_layer_norm(x)
        x = F.dropout(x, self.dropout, self.training)

        shared = self.attention_context(x, padding_mask_BT)
        run = compiled(_run) if self.compiles and self.training else _run
        x, all_states = run(self.sublayers, x, shared, return_all)
        return (x if self.final_layer_norm is None else self.final_layer_norm(x)), all_states

    @property
    def lazy_backend(self) -> str:
        return self._lazy_backend

    @lazy_backend.setter
    def lazy_backend(self, name: str) -> None:
        check_backend(name, self.attention_dropout)
        self._lazy_backend = name

    def attention_context(self, x_BTC: Tensor, padding_mask_BT: Optional[Tensor] = None) -> AttentionContext:
        """What the sublayers share in a forward pass over `x_BTC`; the mask is True at padding."""
        time = x_BTC.size(1)
        lengths = None if padding_mask_BT is None else padding_mask_BT.size(1) - padding_mask_BT.sum(-1)
        relative = self.relative_position_bias
        bias = ScoreBias(lengths_B=lengths) if relative is None else relative(time, lengths)
        situation = Situation(
            device=x_BTC.device.type,
            precision=x_BTC.dtype,
            batch=x_BTC.size(0),
            heads=self.num_heads,
            time=time,
            head_size=self.embed_dim // self.num_heads,
            is_training=torch.is_grad_enabled(),
            is_biased=relative is not None,
            is_padded=lengths is not None,
            has_dropout=self.training and self.attention_dropout > 0,
            blocks=self._attentions,
        )
        # Now, not where it is used: to torch.compile what was chosen is a constant, and the choosing is no code for it.
        readers = {module.readers for module in self.sublayers.modules() if isinstance(module, SelfAttention)}
        chosen = {number: choose(self.lazy_backend, situation, number) for number in readers}
        return AttentionContext(bias, partial(_backend, chosen, self.lazy_backend, situation))


def _backend(chosen: dict[int, str], name: str, situation: Situation, readers: int) -> str:
    """What is chosen already for so many readers; else (a sublayer outside of the encoder) what is chosen now."""
    return chosen[readers] if readers in chosen else choose(name, situation, readers)


def _run(
    sublayers: Iterable[nn.Module], x_BTC: Tensor, shared: AttentionContext, return_all: bool
) -> tuple[Tensor, list[Tensor]]:
    """The last sublayer's output (B, T, C), and, if asked for, the input and all outputs."""
    all_states = [x_BTC] if return_all else []
    distribution: Optional[ReusableAttention] = None
    for sublayer in sublayers:
        x_BTC, distribution = sublayer(x_BTC, distribution, shared)
        if return_all:
            all_states.append(x_BTC)
    return x_BTC, all_states


def init_bert_weights(module: nn.Module) -> None:
    """BERT's initialisation, for ``module.apply``.

    | parameter | value |
    |---|---|
    | weights of linear maps and embeddings | N(0, 0.02) |
    | their biases, the padding symbol's embedding, the relative bias table | 0 |
    | LayerNorm | weight 1, bias 0 (torch's own) |
    """
    if isinstance(module, (nn.Linear, nn.Embedding)):
        nn.init.normal_(module.weight, std=0.02)
    if isinstance(module, nn.Linear) and module.bias is not None:
        nn.init.zeros_(module.bias)
    if isinstance(module, nn.Embedding) and module.padding_idx is not None:
        nn.init.zeros_(module.weight[module.padding_idx])
    if isinstance(module, RelativePositionBias):
        nn.init.zeros_(module.table)
