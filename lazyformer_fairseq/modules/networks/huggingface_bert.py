"""Hugging Face's BERT and ModernBERT behind the interface of our masked language model."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Optional

from torch import Tensor, nn

from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.extras import PACKAGE
from lazyformer_fairseq.options import LENGTH, PROPORTION, option

STACKED = {"Wqkv": 3, "Wi": 2}  # ModernBERT's fused linear layers, with the number of layers that each combines
# fairseq's ids of <s> and </s>. With the published ids, transformers warns if the vocabulary is too small for them.
SPECIAL_TOKEN_IDS = {"bos_token_id": 0, "cls_token_id": 0, "eos_token_id": 2, "sep_token_id": 2}


@dataclass
class HuggingFaceBertOptions:
    """The options of :class:`HuggingFaceBert`."""

    model_type: str = option("bert", "model type in transformers: bert or modernbert", choices=("bert", "modernbert"))
    encoder_layers: int = option(12, "number of layers, each with self-attention and a feed-forward sublayer")
    encoder_embed_dim: int = option(768, "embedding dimension", bounds=LENGTH)
    encoder_ffn_embed_dim: int = option(3072, "hidden size of the feed-forward sublayers", bounds=LENGTH)
    encoder_attention_heads: int = option(12, "number of attention heads", bounds=LENGTH)
    dropout: float = option(0.1, "dropout on embeddings and sublayer outputs", bounds=PROPORTION)
    attention_dropout: float = option(
        0.0,
        "dropout on attention distributions; BERT uses 0.1, but torch's CPU attention is fused only without dropout",
        bounds=PROPORTION,
    )
    max_positions: int = option(512, "maximum number of tokens in a sequence, including <s> and </s>", bounds=LENGTH)


class HuggingFaceBert(nn.Module):
    """transformers' BertForMaskedLM or ModernBertForMaskedLM with torch's fused attention.

    transformers initializes the model. The masked-LM head is applied only to masked positions, as in our models,
    whereas transformers itself computes logits at all positions. BERT is post-norm and has absolute positions and no
    pooler; it keeps its token type embeddings, and every token has type 0. ModernBERT uses the configured sizes and is
    otherwise as published: every third layer sees all tokens, and the others see windows of 128 tokens.

    Args:
        options: the sizes and dropout rates, as in :class:`HuggingFaceBertOptions`.
        vocab_size: V.
        padding_idx: the id of the padding symbol.

    Raises:
        UserError: If transformers is not installed, or the number of heads does not divide the embedding dimension.
    """

    takes_positions = True

    def __init__(self, options: Any, vocab_size: int, padding_idx: int = 1):
        if not has_transformers():
            raise UserError(
                f"--arch huggingface_bert requires transformers; install it: pip install '{PACKAGE}[bench]'"
            )
        if options.encoder_embed_dim % options.encoder_attention_heads:
            raise UserError(
                f"--encoder-attention-heads {options.encoder_attention_heads} does not divide --encoder-embed-dim "
                f"{options.encoder_embed_dim}; choose a number of heads that does"
            )
        super().__init__()
        with without_broken_torchaudio():
            from transformers import AutoConfig, AutoModelForMaskedLM
        self.padding_idx = padding_idx
        dropouts = {"mlp_dropout": options.dropout, "attention_dropout": options.attention_dropout}
        if options.model_type == "bert":
            dropouts = {
                "hidden_dropout_prob": options.dropout,
                "attention_probs_dropout_prob": options.attention_dropout,
            }
        config = AutoConfig.for_model(
            str(options.model_type),
            vocab_size=vocab_size,
            hidden_size=options.encoder_embed_dim,
            num_hidden_layers=options.encoder_layers,
            num_attention_heads=options.encoder_attention_heads,
            intermediate_size=options.encoder_ffn_embed_dim,
            max_position_embeddings=options.max_positions,
            pad_token_id=padding_idx,
            attn_implementation="sdpa",
            **dropouts,
            **SPECIAL_TOKEN_IDS,
        )
        self.bert = AutoModelForMaskedLM.from_config(config)
        for name, module in self.bert.named_modules():
            module.blocks = STACKED.get(name.rpartition(".")[2], 1)

    def forward(
        self,
        src_tokens: Tensor,
        src_lengths: Optional[Tensor] = None,  # noqa: ARG002 - fairseq passes it
        features_only: bool = False,
        masked_tokens: Optional[Tensor] = None,
        has_padding: Optional[bool] = None,
        **_more: Any,
    ) -> tuple[Tensor, dict]:
        """Encode a batch and return logits or features, with the same interface as `MaskedLM.forward`.

        Args:
            src_tokens: ids (B, T).
            src_lengths: unused.
            features_only: whether to return the encoder's output instead of logits.
            masked_tokens: the positions to compute logits for, as int64 indices (M,) into the flattened batch; None for
                all positions.
            has_padding: whether any sequence is padded. None to detect it, which synchronizes with the GPU.

        Returns:
            A pair: the logits (B, T, V) or (M, V), or the features (B, T, C); and an empty dictionary.
        """
        seen_BT = src_tokens.ne(self.padding_idx)
        if has_padding is None:
            has_padding = not bool(seen_BT.all())
        # Without a mask, torch can use its fastest kernels.
        features = self.bert.base_model(src_tokens, attention_mask=seen_BT if has_padding else None).last_hidden_state
        if features_only:
            return features, {}
        if masked_tokens is not None:
            features = features.flatten(0, 1).index_select(0, masked_tokens)
        return self.logits(features), {}

    def logits(self, features: Tensor) -> Tensor:
        """Compute logits (..., V) from the encoder's output (..., C)."""
        if hasattr(self.bert, "cls"):
            return self.bert.cls(features)
        return self.bert.decoder(self.bert.head(features))


def has_transformers() -> bool:
    """Return whether Hugging Face's transformers can be imported."""
    try:
        with without_broken_torchaudio():
            from transformers import BertForMaskedLM  # noqa: F401
    except ImportError:
        return False
    return True


@contextmanager
def without_broken_torchaudio() -> Iterator[None]:
    """Hide torchaudio during imports of transformers if it cannot be loaded.

    transformers imports torchaudio whenever it is installed, although BERT does not need it. The torchaudio build that
    fairseq's dependencies install is for CUDA and cannot be loaded with a CPU build of torch.
    """
    try:
        import torchaudio  # noqa: F401
    except ImportError:
        pass
    except OSError:
        sys.modules["torchaudio"] = None  # type: ignore[assignment]  # importing it now fails
    try:
        yield
    finally:
        if "torchaudio" in sys.modules and sys.modules["torchaudio"] is None:
            del sys.modules["torchaudio"]
