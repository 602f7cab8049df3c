"""Heads on the encoder: BERT's masked-LM head, classification heads, and heads on every token."""

from collections.abc import Callable
from typing import ClassVar, Optional

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lazyformer_fairseq.modules.layer_norm import NormOptions, layer_norm


class MaskedLMHead(nn.Module):
    """Dense, activation, LayerNorm, then a decoder tied to the token embedding, with bias: C^2 + 3 C + V parameters.

    Args:
        embed_dim: C.
        embed_tokens: the embedding whose weight (V, C) is the decoder.
        activation: RoBERTa's is GELU; BERT's that of its feed-forward sublayers.
        norm: of its norm.
        linear_bias: whether its dense map has a bias.
        is_plain: the decoder alone (NeoBERT).
        is_untied: the decoder has a weight of its own, N(0, 0.02) at first.
    """

    def __init__(
        self,
        embed_dim: int,
        embed_tokens: nn.Embedding,
        activation: Callable[[Tensor], Tensor] = F.gelu,
        norm: NormOptions = NormOptions(),  # noqa: B008 (a named tuple)
        linear_bias: bool = True,
        is_plain: bool = False,
        is_untied: bool = False,
    ):
        super().__init__()
        self.dense: Optional[nn.Module] = None
        self.layer_norm: Optional[nn.Module] = None
        if not is_plain:
            self.dense = nn.Linear(embed_dim, embed_dim, linear_bias)
            self.layer_norm = layer_norm(embed_dim, *norm)
        self.activation = activation
        self.weight = embed_tokens.weight
        if is_untied:
            self.weight = nn.Parameter(nn.init.normal_(torch.empty_like(embed_tokens.weight), std=0.02))
        self.bias = nn.Parameter(embed_tokens.weight.new_zeros(embed_tokens.num_embeddings))

    def forward(self, features: Tensor, masked_tokens: Optional[Tensor] = None) -> Tensor:
        """Return logits from features (B, T, C).

        Args:
            features: of the encoder.
            masked_tokens: positions to give logits at: their indices among the B * T, int64 (M,), or a boolean (B, T),
                whose count makes the caller wait for a GPU.

        Returns:
            (B, T, V), or (M, V) at the M positions asked for.
        """
        if masked_tokens is not None:
            features = features.flatten(0, 1).index_select(0, as_positions(masked_tokens))
        if self.dense is not None and self.layer_norm is not None:
            features = self.layer_norm(self.activation(self.dense(features)))
        return F.linear(features, self.weight, self.bias)


def as_positions(masked_tokens: Tensor) -> Tensor:
    """Return indices among the B * T positions, int64 (M,), from such indices or a boolean (B, T)."""
    if masked_tokens.dtype == torch.bool:
        return masked_tokens.flatten().nonzero().squeeze(1)
    return masked_tokens


class ClassificationHead(nn.Module):
    """RoBERTa's head on the first token: dropout, dense, tanh, dropout, projection.

    Args:
        embed_dim: C.
        num_classes: outputs; 1 for regression.
        dropout: before both linear maps.
    """

    def __init__(self, embed_dim: int, num_classes: int, dropout: float = 0.0):
        super().__init__()
        self.dropout = nn.Dropout(dropout)
        self.dense = nn.Linear(embed_dim, embed_dim)
        self.out_proj = nn.Linear(embed_dim, num_classes)

    def forward(self, features_BTC: Tensor) -> Tensor:
        """Return logits (B, num_classes) from the features of the first token, ``<s>``."""
        x = self.dropout(features_BTC[:, 0])
        return self.out_proj(self.dropout(self.dense(x).tanh()))


class LinearHead(nn.Module):
    """One linear map of the first token: what LazyFormer's authors published first (github.com/guolinke/TUPE, 4442138).

    Arguments as for :class:`ClassificationHead`.
    """

    def __init__(self, embed_dim: int, num_classes: int, dropout: float = 0.0):
        super().__init__()
        self.dropout = nn.Dropout(dropout)
        self.out_proj = nn.Linear(embed_dim, num_classes)

    def forward(self, features_BTC: Tensor) -> Tensor:
        """Return logits (B, num_classes) from the features of the first token, ``<s>``."""
        return self.out_proj(self.dropout(features_BTC[:, 0]))


class TokenHead(nn.Module):
    """A linear map of every token: logits of its classes (Devlin et al., 2019, 5.3).

    Args:
        embed_dim: C.
        num_classes: outputs.
        dropout: before the map.

    Attributes:
        MAP: the map's name, by which checkpoints tell such heads apart.
    """

    MAP: ClassVar[str] = "token_proj"

    def __init__(self, embed_dim: int, num_classes: int, dropout: float = 0.0):
        super().__init__()
        self.dropout = nn.Dropout(dropout)
        self.add_module(self.MAP, nn.Linear(embed_dim, num_classes))

    @property
    def out_proj(self) -> nn.Linear:
        """The map."""
        return getattr(self, self.MAP)

    def forward(self, features_BTC: Tensor) -> Tensor:
        """Return logits (B, T, num_classes) from the features of all tokens."""
        return self.out_proj(self.dropout(features_BTC))


class SpanHead(TokenHead):
    """A token's logits of being the start and the end of an answer (Devlin et al., 2019, 4.2)."""

    MAP = "span_proj"


class Pooler(nn.Module):
    """BERT's pooler: dense and tanh on the first token. It is the pre-trained part of a :class:`ClassificationHead`.

    Args:
        embed_dim: C.
    """

    def __init__(self, embed_dim: int):
        super().__init__()
        self.dense = nn.Linear(embed_dim, embed_dim)

    def forward(self, features_BTC: Tensor) -> Tensor:
        """Return (B, C) from the features of the first token, ``<s>``."""
        return self.dense(features_BTC[:, 0]).tanh()


CLASSIFICATION_HEADS = {"dense": ClassificationHead, "linear": LinearHead}
SPAN = "span"
TAGS = "tags"
HEADS = {**CLASSIFICATION_HEADS, SPAN: SpanHead, TAGS: TokenHead}  # that models keep by name


def outputs_of(head: nn.Module) -> int:
    """Return how many logits a head of :data:`HEADS` gives; 0 for others, as a pooler."""
    last = getattr(head, "out_proj", None)
    if last is not None:
        return last.out_features
    return 0


# Names among a model's classification heads.
POOLER = "pooler"
NEXT_SENTENCE = "next_sentence"  # a dense head of two classes: BERT's pooler and what stands on it in pre-training
