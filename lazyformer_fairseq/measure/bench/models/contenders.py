"""The models of a benchmark behind one interface: ours, fairseq's RoBERTa, Hugging Face's BERT; weights are fresh."""

import argparse
from abc import ABC, abstractmethod
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from fairseq.data import Dictionary
from fairseq.models import ARCH_CONFIG_REGISTRY, ARCH_MODEL_REGISTRY
from torch import Tensor, nn

from lazyformer_fairseq.fairseq_plugin.models import huggingface_bert
from lazyformer_fairseq.fairseq_plugin.models.config import LazyFormerConfig
from lazyformer_fairseq.fairseq_plugin.models.huggingface_bert import HuggingFaceBertConfig
from lazyformer_fairseq.fairseq_plugin.models.lazyformer import LazyFormerModel
from lazyformer_fairseq.patterns.sizes import EncoderSizes

VOCAB_SIZE = 32_768
MASKED_SHARE = 0.15
DROPOUT = 0.1  # of every model here, as each ships it


@dataclass(frozen=True)
class Batch:
    """What an update reads: ids, nothing padded; where a word is to be predicted, and which."""

    tokens_BT: Tensor
    masked_BT: Tensor
    positions_M: Tensor
    """The same as indices among the B * T positions, for models that take these."""
    targets_M: Tensor


class Contender(ABC):
    """A masked language model.

    Attributes:
        model: in training mode when it is built.
        sizes: what the formulas need.
        pattern: of its sublayers.
        compiles: whether torch compiles the model; the loss should be, too.
    """

    def __init__(self, model: nn.Module, pattern: str, sizes: EncoderSizes):
        self.model = model
        self.pattern = pattern
        self.sizes = sizes
        self.compiles = False

    @property
    def parameters(self) -> int:
        return sum(parameter.numel() for parameter in self.model.parameters())

    @abstractmethod
    def features(self, tokens_BT: Tensor) -> Tensor:
        """The encoder's output (B, T, C) of sequences without padding."""

    @abstractmethod
    def masked_logits(self, batch: Batch) -> Tensor:
        """Logits (M, V) at the masked positions."""

    def compile(self) -> None:
        """Lets torch compile the model, in place."""
        self.compiles = True
        self.model.compile()


class OurModel(Contender):
    """One of our archs, or any pattern."""

    def __init__(self, options: dict[str, Any], max_positions: int):
        cfg = LazyFormerConfig(**{"dropout": DROPOUT, **options, "max_positions": max_positions})
        model = LazyFormerModel(cfg, a_dictionary())
        self.encoder = model.encoder.sentence_encoder
        super().__init__(model, cfg.sublayer_pattern, self.encoder.sizes)

    def features(self, tokens_BT: Tensor) -> Tensor:
        return self.model(tokens_BT, features_only=True, has_padding=False)[0]

    def masked_logits(self, batch: Batch) -> Tensor:
        return self.model(batch.tokens_BT, masked_tokens=batch.positions_M, has_padding=False)[0]

    def compile(self) -> None:
        """As ``--compile`` does: in training alone."""
        self.compiles = self.encoder.compiles = True


class FairseqRoberta(Contender):
    """fairseq's own ``roberta_base`` as it ships: dropout and attention dropout 0.1. It has no relative bias."""

    def __init__(self, sizes: EncoderSizes, layers: int):
        options = argparse.Namespace(
            encoder_layers=layers,
            encoder_embed_dim=sizes.embed_dim,
            encoder_ffn_embed_dim=sizes.ffn_embed_dim,
            encoder_attention_heads=sizes.num_heads,
            max_positions=sizes.max_positions,
        )
        ARCH_CONFIG_REGISTRY["roberta_base"](options)
        model_class = ARCH_MODEL_REGISTRY["roberta_base"]
        model = model_class.build_model(options, SimpleNamespace(source_dictionary=a_dictionary()))
        super().__init__(model, f"(sf)x{layers}", sizes)

    def features(self, tokens_BT: Tensor) -> Tensor:
        return self.model(tokens_BT, features_only=True)[0]

    def masked_logits(self, batch: Batch) -> Tensor:
        return self.model(batch.tokens_BT, masked_tokens=batch.masked_BT)[0]


class HuggingFaceBert(Contender):
    """Hugging Face's BERT on torch's fused attention, without attention dropout, which that lacks on some devices.

    Its masked-LM head gets only the masked positions, like the others'; as shipped it computes all logits.
    """

    def __init__(self, sizes: EncoderSizes, layers: int):
        options = HuggingFaceBertConfig(
            encoder_layers=layers,
            encoder_embed_dim=sizes.embed_dim,
            encoder_ffn_embed_dim=sizes.ffn_embed_dim,
            encoder_attention_heads=sizes.num_heads,
            dropout=DROPOUT,
            max_positions=sizes.max_positions,
        )
        model = huggingface_bert.HuggingFaceBert(options, a_dictionary(sizes.vocab_size))
        super().__init__(model, f"(sf)x{layers}", sizes)

    def features(self, tokens_BT: Tensor) -> Tensor:
        return self.model(tokens_BT, features_only=True, has_padding=False)[0]

    def masked_logits(self, batch: Batch) -> Tensor:
        return self.model(batch.tokens_BT, masked_tokens=batch.positions_M, has_padding=False)[0]

    def compile(self) -> None:
        self.compiles = True
        self.model.bert.bert.compile()
        self.model.bert.cls.compile()


def a_dictionary(size: int = VOCAB_SIZE) -> Dictionary:
    """A vocabulary of `size` symbols: fairseq's special ones and numbers."""
    dictionary = Dictionary(extra_special_symbols=["<mask>"])
    for number in range(size - len(dictionary)):
        dictionary.add_symbol(str(number))
    return dictionary


def random_tokens(batch: int, time: int, device: torch.device | str) -> Tensor:
    """Ids (B, T) of words, none of them special."""
    return torch.randint(5, VOCAB_SIZE, (batch, time), device=device)


def predicted_words(batch: int, time: int) -> int:
    """How many words of a batch are masked: 15%, but at least one per sequence."""
    return batch * max(1, round(MASKED_SHARE * time))


def random_batch(batch: int, time: int, device: torch.device | str) -> Batch:
    """Random words, the same places masked in each sequence."""
    tokens_BT = random_tokens(batch, time, device)
    masked_BT = torch.zeros(batch, time, dtype=torch.bool, device=device)
    masked_BT[:, torch.randperm(time, device=device)[: predicted_words(1, time)]] = True
    positions_M = masked_BT.flatten().nonzero().squeeze(1)
    return Batch(tokens_BT, masked_BT, positions_M, tokens_BT.flatten()[positions_M])
