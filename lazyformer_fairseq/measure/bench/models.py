"""The models of a benchmark behind one interface: ours, fairseq's RoBERTa, Hugging Face's BERT; weights are fresh."""

import argparse
import functools
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any, Optional

import torch
from fairseq.data import Dictionary
from fairseq.models import ARCH_CONFIG_REGISTRY, ARCH_MODEL_REGISTRY
from torch import Tensor, nn

from lazyformer_fairseq.fairseq_plugin.models import huggingface_bert
from lazyformer_fairseq.fairseq_plugin.models.causal_lm import CausalLanguageModel
from lazyformer_fairseq.fairseq_plugin.models.causal_lm_config import CausalLMConfig
from lazyformer_fairseq.fairseq_plugin.models.config import LazyFormerConfig
from lazyformer_fairseq.fairseq_plugin.models.huggingface_bert import HuggingFaceBertConfig, has_transformers
from lazyformer_fairseq.fairseq_plugin.models.lazyformer import LazyFormerModel
from lazyformer_fairseq.measure.bench.settings import BenchSettings
from lazyformer_fairseq.measure.costs.flops import count_encoder_flops, layers_of_block, makers_of_blocks
from lazyformer_fairseq.measure.costs.machine import PRECISIONS
from lazyformer_fairseq.patterns.architectures import ARCHITECTURES, CAUSAL_ARCHITECTURES
from lazyformer_fairseq.patterns.grammar import PlannedSublayer
from lazyformer_fairseq.patterns.kinds import EncoderSizes

VOCAB_SIZE = 32_768
MASKED_SHARE = 0.15
DROPOUT = 0.1  # of every model here, as each ships it
FAIRSEQ = "fairseq roberta_base"
HUGGING_FACE = "HF BertModel, SDPA"
OURS = "our bert_base"
BASELINES = (FAIRSEQ, HUGGING_FACE, OURS)
WITHOUT_TRANSFORMERS = (
    f"left out: {HUGGING_FACE}, because transformers cannot be imported; pip install 'lazyformer_fairseq[bench]'"
)
WORDS = 267_735  # of WikiText-103, with the special symbols


@dataclass(frozen=True)
class Batch:
    """What an update reads: ids, nothing padded; where a word is to be predicted, and which."""

    tokens_BT: Tensor
    masked_BT: Tensor
    positions_M: Tensor
    """The same as indices among the B * T positions, for models that take these."""
    targets_M: Tensor


class BenchModel:
    """A masked language model that takes what ours take.

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

    def features(self, tokens_BT: Tensor) -> Tensor:
        """The encoder's output (B, T, C) of sequences without padding."""
        return self.model(tokens_BT, features_only=True, has_padding=False)[0]

    def masked_logits(self, batch: Batch) -> Tensor:
        """Logits (M, V) at the masked positions."""
        return self.model(batch.tokens_BT, masked_tokens=batch.positions_M, has_padding=False)[0]

    def compile(self) -> None:
        """Lets torch compile the model, in place."""
        self.compiles = True
        self.model.compile()


class OurModel(BenchModel):
    """One of our archs, or any pattern."""

    def __init__(self, options: dict[str, Any], max_positions: int):
        cfg = LazyFormerConfig(**{"dropout": DROPOUT, **options, "max_positions": max_positions})
        model = LazyFormerModel(cfg, a_dictionary())
        self.encoder = model.encoder.sentence_encoder
        super().__init__(model, cfg.sublayer_pattern, self.encoder.sizes)

    def compile(self) -> None:
        """As ``--compile`` does: in training alone."""
        self.compiles = self.encoder.compiles = True


class FairseqRoberta(BenchModel):
    """fairseq's own ``roberta_base`` as it ships: dropout and attention dropout 0.1. It has no relative bias."""

    def __init__(self, sizes: EncoderSizes, layers: int):
        options = argparse.Namespace(**_widths(sizes, layers))
        ARCH_CONFIG_REGISTRY["roberta_base"](options)
        model_class = ARCH_MODEL_REGISTRY["roberta_base"]
        model = model_class.build_model(options, SimpleNamespace(source_dictionary=a_dictionary()))
        super().__init__(model, f"(sf)x{layers}", sizes)

    def features(self, tokens_BT: Tensor) -> Tensor:
        return self.model(tokens_BT, features_only=True)[0]

    def masked_logits(self, batch: Batch) -> Tensor:
        return self.model(batch.tokens_BT, masked_tokens=batch.masked_BT)[0]


class HuggingFaceBert(BenchModel):
    """Hugging Face's BERT on torch's fused attention, without attention dropout, which that lacks on some devices.

    Its masked-LM head gets only the masked positions, like the others'; as shipped it computes all logits.
    """

    def __init__(self, sizes: EncoderSizes, layers: int):
        options = HuggingFaceBertConfig(dropout=DROPOUT, **_widths(sizes, layers))
        model = huggingface_bert.HuggingFaceBert(options, a_dictionary(sizes.vocab_size))
        super().__init__(model, f"(sf)x{layers}", sizes)

    def compile(self) -> None:
        self.compiles = True
        self.model.bert.bert.compile()
        self.model.bert.cls.compile()


def _widths(sizes: EncoderSizes, layers: int) -> dict[str, int]:
    """By the names that fairseq's options have."""
    return {
        "encoder_layers": layers,
        "encoder_embed_dim": sizes.embed_dim,
        "encoder_ffn_embed_dim": sizes.ffn_embed_dim,
        "encoder_attention_heads": sizes.num_heads,
        "max_positions": sizes.max_positions,
    }


@dataclass(frozen=True)
class OnBackEnd:
    """A model on a back end.

    Attributes:
        called: the model's name.
        model: several may share one.
        back_end: of our models; "its own" for others.
        buckets: of its relative bias.
        baseline: which of BASELINES it stands for, None for a model that is compared with them.
    """

    called: str
    model: BenchModel
    back_end: str
    buckets: int
    baseline: Optional[str] = None

    @property
    def name(self) -> str:
        """Unique to each."""
        return f"{self.called}, {self.back_end}, {self.buckets} buckets"

    def prepared(self, thing: Callable[[], object]) -> Callable[[], object]:
        """The same thing, run on this back end."""
        if not isinstance(self.model, OurModel):
            return thing
        encoder = self.model.encoder

        def call() -> object:
            encoder.attention_backend = self.back_end
            return thing()

        return call

    def back_end_used(self, batch: int, time: int, training: bool) -> Callable[[PlannedSublayer], str]:
        """Maps the maker of a block's distribution to the key of attention_flops.PRODUCTS that computes it."""
        network = self.model.model.train(training)
        weight = next(network.parameters())
        if not isinstance(self.model, OurModel):
            return lambda maker: _torch_attention(weight.device, training and self.baseline == FAIRSEQ)
        encoder = self.model.encoder
        encoder.attention_backend = self.back_end
        with torch.set_grad_enabled(training):
            back_end = encoder.context(weight.new_zeros(1, 1, 1).expand(batch, time, encoder.embed_dim)).back_end
        has_dropout = training and encoder.options.attention_dropout > 0

        def used(maker: PlannedSublayer) -> str:
            name = back_end(layers_of_block(maker) - 1, maker.shaper.settings)
            return "unfused" if name == "recompute" and _torch_attention(weight.device, has_dropout) != name else name

        return used

    def count_flops(self, batch: int, time: int, training: bool, predicted: int = 0) -> int:
        """Of a call; those that this back end performs."""
        used = self.back_end_used(batch, time, training)
        return count_encoder_flops(self.model.pattern, self.model.sizes, time, batch, predicted, used, training)


def build_models(settings: BenchSettings, precision: str) -> list[OnBackEnd]:
    """All encoders and their baselines, on the device and in the precision; logs what it must leave out."""
    longest = max(*settings.lengths, 512)
    row = ARCHITECTURES[settings.baseline_arch]
    layers = len(list(makers_of_blocks(row.sublayer_pattern)))
    widths = (row.encoder_embed_dim, row.encoder_ffn_embed_dim, row.encoder_attention_heads)
    sizes = EncoderSizes(VOCAB_SIZE, *widths, longest, relative_position_buckets=0)
    models = [OnBackEnd(FAIRSEQ, FairseqRoberta(sizes, layers), "its own", 0, FAIRSEQ)]
    if has_transformers():
        models.append(OnBackEnd(HUGGING_FACE, HuggingFaceBert(sizes, layers), "its own", 0, HUGGING_FACE))
    else:
        print(WITHOUT_TRANSFORMERS, file=sys.stderr)
    baseline = {**row.options(), "attention_dropout": 0.0}
    for buckets in settings.buckets:
        models += _on_back_ends(OURS, baseline, buckets, settings.baseline_back_ends, longest, OURS)
        for name, options in settings.encoders.items():
            models += _on_back_ends(name, options, buckets, settings.back_ends, longest)
    for model in {id(each.model): each.model for each in models}.values():
        model.model.to(settings.device, PRECISIONS[precision])
        if settings.compile:
            model.compile()
    return models


def _on_back_ends(
    name: str,
    options: dict[str, Any],
    buckets: int,
    back_ends: tuple[str, ...],
    longest: int,
    baseline: Optional[str] = None,
) -> list[OnBackEnd]:
    """The model on each of them."""
    model = OurModel({**options, "relative_position_buckets": buckets}, longest)
    first = OnBackEnd(name, model, back_ends[0], buckets, baseline)
    return [replace(first, back_end=back_end) for back_end in back_ends]


def _torch_attention(device: torch.device, has_dropout: bool) -> str:
    """How torch's scaled_dot_product_attention runs: fused, except on a CPU with dropout."""
    return "unfused" if has_dropout and device.type == "cpu" else "recompute"


def build_causal(name: str, dictionary: Dictionary, settings: BenchSettings, precision: str) -> CausalLanguageModel:
    """In evaluation mode."""
    options = {**CAUSAL_ARCHITECTURES[name].options(), "mem_len": settings.mem_len}
    model = CausalLanguageModel.build_model(CausalLMConfig(**options), SimpleNamespace(source_dictionary=dictionary))
    return model.to(settings.device, PRECISIONS[precision]).eval()


@functools.cache
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
