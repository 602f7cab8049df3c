"""Encoder heads: the masked-LM head, text classification heads, and token classification heads."""

from collections.abc import Callable
from typing import ClassVar, Optional

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lazyformer_fairseq.modules.layer_norm import NormOptions, layer_norm


class MaskedLMHead(nn.Module):
    """BERT's masked-LM head: a dense layer, an activation, LayerNorm, and an output projection to the vocabulary.

    The output projection shares its weight with the token embedding. The head adds C^2 + 3 C + V parameters.

    Args:
        embed_dim: C.
        embed_tokens: the token embedding, with a weight (V, C).
        activation: the activation function. RoBERTa uses GELU; BERT uses the same one as in its feed-forward sublayers.
        norm: the options of the norm.
        linear_bias: whether the dense layer has a bias.
        is_plain: whether to use only the output projection, as in NeoBERT.
        is_untied: whether the output projection has a separate weight, initialized from N(0, 0.02).
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
            own = torch.empty_like(embed_tokens.weight)
            self.weight = nn.Parameter(nn.init.normal_(own, std=0.02))
        self.bias = nn.Parameter(embed_tokens.weight.new_zeros(embed_tokens.num_embeddings))

    def forward(self, features: Tensor, masked_tokens: Optional[Tensor] = None) -> Tensor:
        """Compute logits from features.

        Args:
            features: the encoder's features (B, T, C).
            masked_tokens: the positions to compute logits for, either as int64 indices (M,) into the flattened batch or
                as a boolean mask (B, T). Only a mask requires synchronizing with the GPU. None for all positions.

        Returns:
            Logits (B, T, V), or (M, V) for M positions.
        """
        if masked_tokens is not None:
            features = features.flatten(0, 1).index_select(0, as_positions(masked_tokens))
        if self.dense is not None and self.layer_norm is not None:
            features = self.layer_norm(self.activation(self.dense(features)))
        return F.linear(features, self.weight, self.bias)


def as_positions(masked_tokens: Tensor) -> Tensor:
    """Convert a boolean mask (B, T) to int64 indices (M,) into the flattened batch; return indices unchanged."""
    if masked_tokens.dtype == torch.bool:
        return masked_tokens.flatten().nonzero().squeeze(1)
    return masked_tokens


class ClassificationHead(nn.Module):
    """RoBERTa's classification head on the first token: dropout, dense layer, tanh, dropout, output projection.

    Args:
        embed_dim: C.
        num_classes: the number of outputs; 1 for regression.
        dropout: the dropout rate before each of the two linear layers.
    """

    def __init__(self, embed_dim: int, num_classes: int, dropout: float = 0.0):
        super().__init__()
        self.dropout = nn.Dropout(dropout)
        self.dense = nn.Linear(embed_dim, embed_dim)
        self.out_proj = nn.Linear(embed_dim, num_classes)

    def forward(self, features_BTC: Tensor) -> Tensor:
        """Compute logits (B, num_classes) from the features of the first token, ``<s>``."""
        x = self.dropout(features_BTC[:, 0])
        return self.out_proj(self.dropout(self.dense(x).tanh()))


class LinearHead(nn.Module):
    """A classification head with a single linear layer on the first token.

    The first code release by LazyFormer's authors uses this head (github.com/guolinke/TUPE, commit 4442138). It takes
    the same arguments as :class:`ClassificationHead`.
    """

    def __init__(self, embed_dim: int, num_classes: int, dropout: float = 0.0):
        super().__init__()
        self.dropout = nn.Dropout(dropout)
        self.out_proj = nn.Linear(embed_dim, num_classes)

    def forward(self, features_BTC: Tensor) -> Tensor:
        """Compute logits (B, num_classes) from the features of the first token, ``<s>``."""
        return self.out_proj(self.dropout(features_BTC[:, 0]))


class TokenHead(nn.Module):
    """A token classification head with a single linear layer (Devlin et al., 2019, section 5.3).

    Args:
        embed_dim: C.
        num_classes: the number of outputs per token.
        dropout: the dropout rate before the linear layer.

    Attributes:
        MAP: the name of the linear layer, which identifies the type of a per-token head in checkpoints.
    """

    MAP: ClassVar[str] = "token_proj"

    def __init__(self, embed_dim: int, num_classes: int, dropout: float = 0.0):
        super().__init__()
        self.dropout = nn.Dropout(dropout)
        self.add_module(self.MAP, nn.Linear(embed_dim, num_classes))

    @property
    def out_proj(self) -> nn.Linear:
        """The linear layer."""
        return getattr(self, self.MAP)

    def forward(self, features_BTC: Tensor) -> Tensor:
        """Compute logits (B, T, num_classes) from the features of all tokens."""
        return self.out_proj(self.dropout(features_BTC))


class SpanHead(TokenHead):
    """A head with two logits per token for the start and end of an answer span (Devlin et al., 2019, section 4.2)."""

    MAP = "span_proj"


class Pooler(nn.Module):
    """BERT's pooler: a dense layer followed by tanh, applied to the first token.

    It can be pre-trained, and can then initialize the dense layer of a :class:`ClassificationHead`.

    Args:
        embed_dim: C.
    """

    def __init__(self, embed_dim: int):
        super().__init__()
        self.dense = nn.Linear(embed_dim, embed_dim)

    def forward(self, features_BTC: Tensor) -> Tensor:
        """Compute pooled features (B, C) from the features of the first token, ``<s>``."""
        return self.dense(features_BTC[:, 0]).tanh()


CLASSIFICATION_HEADS = {"dense": ClassificationHead, "linear": LinearHead}
SPAN = "span"
TAGS = "tags"
HEADS = {**CLASSIFICATION_HEADS, SPAN: SpanHead, TAGS: TokenHead}  # all head types that a model can register by name


def num_logits(head: nn.Module) -> int:
    """Return the number of logits of a head in :data:`HEADS`, or 0 for other modules such as a pooler."""
    last = getattr(head, "out_proj", None)
    if last is not None:
        return last.out_features
    return 0


# Reserved names of classification heads.
POOLER = "pooler"
NEXT_SENTENCE = "next_sentence"  # a dense head with two classes: BERT's pooler and its next-sentence classifier
