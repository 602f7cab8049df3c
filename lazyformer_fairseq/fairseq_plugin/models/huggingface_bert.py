"""fairseq's arch ``huggingface_bert``: Hugging Face's BERT, as others ship it, to train beside our models."""

import sys
from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Optional

from fairseq.dataclass import FairseqDataclass
from fairseq.models import BaseFairseqModel, register_model
from torch import Tensor

from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.extras import PACKAGE
from lazyformer_fairseq.fairseq_plugin.reliability.options import option


@dataclass
class HuggingFaceBertConfig(FairseqDataclass):
    encoder_layers: int = option(12, "layers, each of self-attention and feed-forward")
    encoder_embed_dim: int = option(768, "embedding dimension")
    encoder_ffn_embed_dim: int = option(3072, "width of the feed-forward sublayers")
    encoder_attention_heads: int = option(12, "number of attention heads")
    dropout: float = option(0.1, "dropout on embeddings and sublayer outputs")
    attention_dropout: float = option(
        0.0, "dropout on attention distributions; BERT's is 0.1, for which torch's attention is not fused on a CPU"
    )
    max_positions: int = option(512, "longest sequence, <s> and </s> included")


@register_model("huggingface_bert", dataclass=HuggingFaceBertConfig)
class HuggingFaceBert(BaseFairseqModel):
    """transformers' BertForMaskedLM on torch's fused attention, initialised by its own code.

    Its masked-LM head gets the masked positions alone, as that of our models; by itself it computes all logits. Its
    table of token types, a row of which every token gets, stays as it is. Post-norm, absolute positions, no pooler.
    """

    takes_positions = True

    def __init__(self, cfg: HuggingFaceBertConfig, dictionary):
        super().__init__()
        with without_broken_torchaudio():
            from transformers import BertConfig, BertForMaskedLM
        self.padding_idx = dictionary.pad()
        self.bert = BertForMaskedLM(
            BertConfig(
                vocab_size=len(dictionary),
                hidden_size=cfg.encoder_embed_dim,
                num_hidden_layers=cfg.encoder_layers,
                num_attention_heads=cfg.encoder_attention_heads,
                intermediate_size=cfg.encoder_ffn_embed_dim,
                max_position_embeddings=cfg.max_positions,
                hidden_dropout_prob=cfg.dropout,
                attention_probs_dropout_prob=cfg.attention_dropout,
                pad_token_id=self.padding_idx,
                attn_implementation="sdpa",
            )
        )

    @classmethod
    def build_model(cls, cfg, task) -> "HuggingFaceBert":
        """Raises a UserError where transformers is missing, or the sizes do not fit together."""
        if isinstance(cfg, Namespace):
            cfg = HuggingFaceBertConfig.from_namespace(cfg)
        if not has_transformers():
            raise UserError(f"--arch huggingface_bert: needs transformers; pip install '{PACKAGE}[bench]'")
        if cfg.encoder_embed_dim % cfg.encoder_attention_heads:
            raise UserError(
                f"--encoder-attention-heads {cfg.encoder_attention_heads}: does not divide --encoder-embed-dim "
                f"{cfg.encoder_embed_dim}"
            )
        return cls(cfg, task.source_dictionary)

    def forward(
        self,
        src_tokens: Tensor,
        src_lengths: Optional[Tensor] = None,
        features_only: bool = False,
        masked_tokens: Optional[Tensor] = None,
        has_padding: Optional[bool] = None,
        **unused,
    ) -> tuple[Tensor, dict]:
        """As `LazyFormerModel.forward`.

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
        features = self.bert.bert(src_tokens, attention_mask=seen_BT if has_padding else None).last_hidden_state
        if features_only:
            return features, {}
        if masked_tokens is not None:
            features = features.flatten(0, 1).index_select(0, masked_tokens)
        return self.bert.cls(features), {}


def has_transformers() -> bool:
    """Whether Hugging Face's package can be imported."""
    try:
        with without_broken_torchaudio():
            from transformers import BertForMaskedLM  # noqa: F401
    except ImportError:
        return False
    return True


@contextmanager
def without_broken_torchaudio() -> Iterator[None]:
    """Hides a broken torchaudio: transformers imports it wherever it is installed, though BERT does not need it.

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
