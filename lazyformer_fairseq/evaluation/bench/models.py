"""The models of a benchmark behind one interface: ours, fairseq's RoBERTa, Hugging Face's BERT; weights are fresh."""

import argparse
import itertools
import sys
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, Optional

import torch
from torch import Tensor, nn

from lazyformer_fairseq.evaluation.bench.settings import REMEMBERED, BenchSettings
from lazyformer_fairseq.evaluation.costs.flops import (
    count_encoder_flops,
    count_flops,
    layers_of_block,
    makers_of_blocks,
)
from lazyformer_fairseq.evaluation.costs.machine import PRECISIONS
from lazyformer_fairseq.evaluation.usual_sizes import PIECES, WORDS
from lazyformer_fairseq.extras import has_fairseq, needs_fairseq
from lazyformer_fairseq.modules.networks import huggingface_bert, named
from lazyformer_fairseq.modules.networks.huggingface_bert import HuggingFaceBertOptions, has_transformers
from lazyformer_fairseq.modules.networks.masked_lm import MaskedLM
from lazyformer_fairseq.modules.networks.options import MaskedLMOptions
from lazyformer_fairseq.modules.networks.stack import Stack
from lazyformer_fairseq.modules.networks.stream_memory import StreamMemory
from lazyformer_fairseq.patterns.architectures import ARCHITECTURES
from lazyformer_fairseq.patterns.grammar import PlannedSublayer
from lazyformer_fairseq.patterns.kinds import EncoderSizes, Sizes

MASKED_SHARE = 0.15
DROPOUT = 0.1  # of every model here, as each ships it
FAIRSEQ = "fairseq roberta_base"
HUGGING_FACE = "HF BertModel, SDPA"
OURS = "our bert_base"
REGISTERED = "bert_base as registered"
TRANSFORMER_XL = "our transformer_xl_base"
BASELINES = (FAIRSEQ, HUGGING_FACE, OURS, REGISTERED, TRANSFORMER_XL)  # the last of causal models
BIASED = (OURS, REGISTERED)  # compared with models of as many buckets
WITHOUT_FAIRSEQ = f"left out: {FAIRSEQ}, because fairseq cannot be imported"
WITHOUT_TRANSFORMERS = (
    f"left out: {HUGGING_FACE}, because transformers cannot be imported; pip install 'lazyformer_fairseq[bench]'"
)


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
        network: its sublayers, where they are ours.
        memory: tokens that it remembers.
        compiles: whether torch compiles the model; the loss should be, too.
    """

    memory = 0

    def __init__(self, model: nn.Module, pattern: str, sizes: Sizes, network: Optional[Stack] = None):
        self.model = model
        self.pattern = pattern
        self.sizes = sizes
        self.network = network
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
        model = MaskedLM(MaskedLMOptions(**{"dropout": DROPOUT, **options, "max_positions": max_positions}), PIECES)
        network = model.encoder.sentence_encoder
        super().__init__(model, model.cfg.sublayer_pattern, network.sizes, network)

    def compile(self) -> None:
        """As ``--compile`` does: in training alone."""
        self.compiles = self.network.compiles = True


class FairseqRoberta(BenchModel):
    """fairseq's own ``roberta_base`` as it ships: dropout and attention dropout 0.1. It has no relative bias."""

    def __init__(self, sizes: EncoderSizes, layers: int):
        needs_fairseq(FAIRSEQ)
        from fairseq.data import Dictionary
        from fairseq.models import ARCH_CONFIG_REGISTRY, ARCH_MODEL_REGISTRY

        dictionary = Dictionary(extra_special_symbols=["<mask>"])
        for number in range(PIECES - len(dictionary)):
            dictionary.add_symbol(str(number))
        options = argparse.Namespace(**_widths(sizes, layers))
        ARCH_CONFIG_REGISTRY["roberta_base"](options)
        model_class = ARCH_MODEL_REGISTRY["roberta_base"]
        model = model_class.build_model(options, SimpleNamespace(source_dictionary=dictionary))
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
        options = HuggingFaceBertOptions(dropout=DROPOUT, **_widths(sizes, layers))
        model = huggingface_bert.HuggingFaceBert(options, sizes.vocab_size)
        super().__init__(model, f"(sf)x{layers}", sizes)

    def compile(self) -> None:
        self.compiles = True
        self.model.bert.base_model.compile()
        self.model.bert.cls.compile()


class CausalModel(BenchModel):
    """A causal arch, in evaluation mode."""

    memory = REMEMBERED

    def __init__(self, arch: str, words: int):
        model = named.build(arch, words, mem_len=REMEMBERED)
        super().__init__(model.eval(), model.cfg.sublayer_pattern, model.decoder.sizes, model.decoder)


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
    baseline: Optional[str]

    @property
    def name(self) -> str:
        """Unique to each."""
        return f"{self.called}, {self.back_end}, {self.buckets} buckets"

    def prepared(self, thing: Callable[[], object]) -> Callable[[], object]:
        """The same thing, run on this back end."""
        network = self.model.network
        if network is None:
            return thing

        def call() -> object:
            network.attention_backend = self.back_end
            return thing()

        return call

    def back_end_used(self, batch: int, time: int, training: bool) -> Callable[[PlannedSublayer], str]:
        """Maps the maker of a block's distribution to the key of flops.PRODUCTS that computes it."""
        weight = next(self.model.model.train(training).parameters())
        network = self.model.network
        if network is None:
            return lambda maker: _torch_attention(weight.device, training and self.baseline == FAIRSEQ)
        network.attention_backend = self.back_end
        x_BTC = weight.new_zeros(batch, time, network.embed_dim)
        with torch.set_grad_enabled(training):
            shared = network.context(x_BTC, self.model.memory)
            names: list[str] = []

            def record(*given: Any) -> str:
                names.append(shared.back_end(*given))
                return names[-1]

            memory = None
            if self.model.memory:
                memory = StreamMemory()
                memory.states = [weight.new_zeros(batch, self.model.memory, network.embed_dim)] * len(network.plan)
            network.run(x_BTC, shared._replace(back_end=record), memory=memory)
        makers = [planned for planned in network.plan if planned.kind.computes_scores]
        by_maker = {
            (layers_of_block(maker), maker.shaper.settings): name for maker, name in zip(makers, names, strict=True)
        }
        has_dropout = training and network.options.attention_dropout > 0

        def used(maker: PlannedSublayer) -> str:
            name = by_maker[layers_of_block(maker), maker.shaper.settings]
            if name == "recompute" and weight.device.type == "cpu" and training and self.buckets and not has_dropout:
                return "fused"  # torch fuses no bias that learns
            if name == "recompute" and _torch_attention(weight.device, has_dropout) != name:
                return "unfused"
            return name

        return used

    def count_flops(self, batch: int, time: int, training: bool, predicted: int = 0) -> int:
        """Of a call; those that this back end performs. A causal model predicts all tokens."""
        if memory := self.model.memory:
            return count_flops(self.model.pattern, self.model.sizes, time, memory, batch)
        used = self.back_end_used(batch, time, training)
        return count_encoder_flops(self.model.pattern, self.model.sizes, time, batch, predicted, used, training)


def build_models(settings: BenchSettings, precision: str) -> list[OnBackEnd]:
    """All encoders and their baselines, on the device and in the precision; logs what it must leave out."""
    longest = max(*settings.lengths, 512)
    row = ARCHITECTURES[settings.baseline_arch]
    layers = len(list(makers_of_blocks(row.sublayer_pattern)))
    widths = (row.encoder_embed_dim, row.encoder_ffn_embed_dim, row.encoder_attention_heads)
    sizes = EncoderSizes(PIECES, *widths, longest, relative_position_buckets=0)
    models = []
    if has_fairseq():
        models.append(OnBackEnd(FAIRSEQ, FairseqRoberta(sizes, layers), "its own", 0, FAIRSEQ))
    else:
        print(WITHOUT_FAIRSEQ, file=sys.stderr)
    if has_transformers():
        models.append(OnBackEnd(HUGGING_FACE, HuggingFaceBert(sizes, layers), "its own", 0, HUGGING_FACE))
    else:
        print(WITHOUT_TRANSFORMERS, file=sys.stderr)
    archs = {OURS: {**row.options(), "attention_dropout": 0.0}, **settings.encoders}
    for buckets, (name, options) in itertools.product(settings.buckets, archs.items()):
        model = OurModel({**options, "relative_position_buckets": buckets}, longest)
        back_ends, baseline = (settings.baseline_back_ends, OURS) if name == OURS else (settings.back_ends, None)
        if name == settings.baseline_arch and len(settings.encoders) > 1:
            baseline = REGISTERED
        models += [OnBackEnd(name, model, back_end, buckets, baseline) for back_end in back_ends]
    for model in {id(each.model): each.model for each in models}.values():
        model.model.to(settings.device, PRECISIONS[precision])
        if settings.compile:
            model.compile()
    return models


def build_causal_models(settings: BenchSettings, precision: str) -> list[OnBackEnd]:
    """The causal archs behind Transformer-XL, which always takes part; tiny ones behind a tiny one."""
    is_tiny = all(name.endswith("_tiny") for name in settings.causal_archs)
    baseline, words = ("transformer_xl_tiny", 1000) if is_tiny else ("transformer_xl_base", WORDS)
    models = []
    for name in dict.fromkeys([baseline, *settings.causal_archs]):
        model = CausalModel(name, words)
        model.model.to(settings.device, PRECISIONS[precision])
        models.append(OnBackEnd(name, model, "auto", 0, TRANSFORMER_XL if name == baseline else None))
    return models


def _torch_attention(device: torch.device, has_dropout: bool) -> str:
    """How torch's scaled_dot_product_attention runs: fused, except on a CPU with dropout."""
    if has_dropout and device.type == "cpu":
        return "unfused"
    return "recompute"


def random_tokens(batch: int, time: int, device: torch.device | str) -> Tensor:
    """Ids (B, T) of words, none of them special."""
    return torch.randint(5, PIECES, (batch, time), device=device)


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
