"""Heads on the encoder: the masked-LM head, heads for classifying texts, and heads that classify every token."""

from collections.abc import Callable
from typing import ClassVar, Optional

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lazyformer_fairseq.modules.layer_norm import NormOptions, layer_norm


class MaskedLMHead(nn.Module):
    """BERT's masked-LM head: a dense layer, an activation, LayerNorm, and an output projection to the vocabulary.

    The weight of the output projection is that of the token embedding. The head adds C^2 + 3 C + V parameters.

    Args:
        embed_dim: C.
        embed_tokens: the token embedding, with a weight (V, C).
        activation: the activation function. RoBERTa uses GELU, BERT that of its feed-forward sublayers.
        norm: the options of the norm.
        linear_bias: whether the dense layer has a bias.
        is_plain: whether to use the output projection alone (NeoBERT).
        is_untied: whether the output projection has a weight of its own, initialised from N(0, 0.02).
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
        """Return logits from features.

        Args:
            features: the features (B, T, C) of the encoder.
            masked_tokens: the positions whose logits are wanted, either as indices among the B * T positions, int64
                (M,), or as a boolean mask (B, T), which waits for a GPU. None for all positions.

        Returns:
            Logits (B, T, V), or (M, V) for M positions.
        """
        if masked_tokens is not None:
            features = features.flatten(0, 1).index_select(0, as_positions(masked_tokens))
        if self.dense is not None and self.layer_norm is not None:
            features = self.layer_norm(self.activation(self.dense(features)))
        return F.linear(features, self.weight, self.bias)


def as_positions(masked_tokens: Tensor) -> Tensor:
    """Return indices among the B * T positions, int64 (M,), given such indices or a boolean mask (B, T)."""
    if masked_tokens.dtype == torch.bool:
        return masked_tokens.flatten().nonzero().squeeze(1)
    return masked_tokens


class ClassificationHead(nn.Module):
    """RoBERTa's classification head on the first token: dropout, dense layer, tanh, dropout, output projection.

    Args:
        embed_dim: C.
        num_classes: the number of outputs; 1 for regression.
        dropout: the dropout before each of the two linear maps.
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
    """A classification head of one linear map on the first token.

    It is the head of the code that LazyFormer's authors published first (github.com/guolinke/TUPE, 4442138). The
    arguments are those of :class:`ClassificationHead`.
    """

    def __init__(self, embed_dim: int, num_classes: int, dropout: float = 0.0):
        super().__init__()
        self.dropout = nn.Dropout(dropout)
        self.out_proj = nn.Linear(embed_dim, num_classes)

    def forward(self, features_BTC: Tensor) -> Tensor:
        """Return logits (B, num_classes) from the features of the first token, ``<s>``."""
        return self.out_proj(self.dropout(features_BTC[:, 0]))


class TokenHead(nn.Module):
    """A head that classifies every token with a linear map (Devlin et al., 2019, section 5.3).

    Args:
        embed_dim: C.
        num_classes: the number of outputs per token.
        dropout: the dropout before the linear map.

    Attributes:
        MAP: the name of the linear map, by which heads on every token are told apart in checkpoints.
    """

    MAP: ClassVar[str] = "token_proj"

    def __init__(self, embed_dim: int, num_classes: int, dropout: float = 0.0):
        super().__init__()
        self.dropout = nn.Dropout(dropout)
        self.add_module(self.MAP, nn.Linear(embed_dim, num_classes))

    @property
    def out_proj(self) -> nn.Linear:
        """The linear map."""
        return getattr(self, self.MAP)

    def forward(self, features_BTC: Tensor) -> Tensor:
        """Return logits (B, T, num_classes) from the features of all tokens."""
        return self.out_proj(self.dropout(features_BTC))


class SpanHead(TokenHead):
    """A head with two logits per token, for the start and the end of an answer (Devlin et al., 2019, section 4.2)."""

    MAP = "span_proj"


class Pooler(nn.Module):
    """BERT's pooler: a dense layer and tanh on the first token.

    It is the pre-trained part of a :class:`ClassificationHead`.

    Args:
        embed_dim: C.
    """

    def __init__(self, embed_dim: int):
        super().__init__()
        self.dense = nn.Linear(embed_dim, embed_dim)

    def forward(self, features_BTC: Tensor) -> Tensor:
        """Return the pooled features (B, C), computed from those of the first token, ``<s>``."""
        return self.dense(features_BTC[:, 0]).tanh()


CLASSIFICATION_HEADS = {"dense": ClassificationHead, "linear": LinearHead}
SPAN = "span"
TAGS = "tags"
HEADS = {**CLASSIFICATION_HEADS, SPAN: SpanHead, TAGS: TokenHead}  # all types of heads that a model registers by name


def outputs_of(head: nn.Module) -> int:
    """Return the number of logits of a head of :data:`HEADS`; 0 for other modules, such as a pooler."""
    last = getattr(head, "out_proj", None)
    if last is not None:
        return last.out_features
    return 0


# Names of special heads among a model's classification heads.
POOLER = "pooler"
NEXT_SENTENCE = "next_sentence"  # a dense head with two classes: BERT's pooler and its next-sentence classifier
