"""Hugging Face's BERT and ModernBERT, as others ship them, behind the interface of our masked language model."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Optional

from torch import Tensor, nn

from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.extras import PACKAGE
from lazyformer_fairseq.options import LENGTH, PROPORTION, option

STACKED = {"Wqkv": 3, "Wi": 2}  # maps of ModernBERT that are several, one above the other
# fairseq's <s> and </s>: transformers warns of the published ids, which a small vocabulary does not have.
FRAME = {"bos_token_id": 0, "cls_token_id": 0, "eos_token_id": 2, "sep_token_id": 2}


@dataclass
class HuggingFaceBertOptions:
    """Options of :class:`HuggingFaceBert`."""

    model_type: str = option("bert", "transformers' name of the model", choices=("bert", "modernbert"))
    encoder_layers: int = option(12, "layers, each of self-attention and feed-forward")
    encoder_embed_dim: int = option(768, "embedding dimension", bounds=LENGTH)
    encoder_ffn_embed_dim: int = option(3072, "width of the feed-forward sublayers", bounds=LENGTH)
    encoder_attention_heads: int = option(12, "number of attention heads", bounds=LENGTH)
    dropout: float = option(0.1, "dropout on embeddings and sublayer outputs", bounds=PROPORTION)
    attention_dropout: float = option(
        0.0,
        "dropout on attention distributions; BERT's is 0.1, for which torch's attention is not fused on a CPU",
        bounds=PROPORTION,
    )
    max_positions: int = option(512, "longest sequence, <s> and </s> included", bounds=LENGTH)


class HuggingFaceBert(nn.Module):
    """transformers' BertForMaskedLM, or ModernBertForMaskedLM, on torch's fused attention, initialised by its own code.

    Its masked-LM head gets the masked positions alone, as that of our models; by itself it computes all logits. A
    BERT's table of token types, a row of which every token gets, stays as it is. Post-norm, absolute positions, no
    pooler. A ModernBERT has the sizes given, all else as published: one layer of three sees all, the others 128 tokens.

    Args:
        options: sizes and dropout.
        vocab_size: V.
        padding_idx: id of the padding symbol.

    Raises:
        UserError: transformers is missing, or the sizes do not fit together.
    """

    takes_positions = True

    def __init__(self, options: Any, vocab_size: int, padding_idx: int = 1):
        if not has_transformers():
            raise UserError(f"--arch huggingface_bert: needs transformers; pip install '{PACKAGE}[bench]'")
        if options.encoder_embed_dim % options.encoder_attention_heads:
            raise UserError(
                f"--encoder-attention-heads {options.encoder_attention_heads}: does not divide --encoder-embed-dim "
                f"{options.encoder_embed_dim}"
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
            **FRAME,
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
        """Encode, and return logits, as `MaskedLM.forward`.

        Args:
            src_tokens: ids (B, T).
            src_lengths: unused.
            features_only: return the encoder's output.
            masked_tokens: places among the B * T, int64 (M,): logits at these alone.
            has_padding: whether any sequence is padded; None to look.

        Returns:
            Logits (B, T, V) or (M, V), or features (B, T, C); and an empty dict.
        """
        seen_BT = src_tokens.ne(self.padding_idx)
        if has_padding is None:
            has_padding = not bool(seen_BT.all())
        # Without a mask torch need not look for one, and its fastest kernels serve.
        features = self.bert.base_model(src_tokens, attention_mask=seen_BT if has_padding else None).last_hidden_state
        if features_only:
            return features, {}
        if masked_tokens is not None:
            features = features.flatten(0, 1).index_select(0, masked_tokens)
        return self.logits(features), {}

    def logits(self, features: Tensor) -> Tensor:
        """Return logits (..., V) from the encoder's output (..., C)."""
        if hasattr(self.bert, "cls"):
            return self.bert.cls(features)
        return self.bert.decoder(self.bert.head(features))


def has_transformers() -> bool:
    """Return whether Hugging Face's package can be imported."""
    try:
        with without_broken_torchaudio():
            from transformers import BertForMaskedLM  # noqa: F401
    except ImportError:
        return False
    return True


@contextmanager
def without_broken_torchaudio() -> Iterator[None]:
    """Hide a broken torchaudio: transformers imports it wherever it is installed, though BERT does not need it.

    The torchaudio that fairseq requires is a CUDA build, which does not load beside a CPU build of torch.
    """
    try:
        import torchaudio  # noqa: F401
    except ImportError:
        pass
    except OSError:
        sys.modules["torchaudio"] = None  # type: ignore[assignment]  # tells importlib that there is none
    try:
        yield
    finally:
        if "torchaudio" in sys.modules and sys.modules["torchaudio"] is None:
            del sys.modules["torchaudio"]
