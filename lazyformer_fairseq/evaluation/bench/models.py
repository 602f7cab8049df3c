"""A common interface for the benchmarked models: ours, fairseq's RoBERTa and Hugging Face's BERT.

All of them are randomly initialized.
"""

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
from lazyformer_fairseq.evaluation.costs.flops import count_flops
from lazyformer_fairseq.evaluation.costs.machine import PRECISIONS
from lazyformer_fairseq.evaluation.default_vocab_sizes import PIECES, WORDS
from lazyformer_fairseq.extras import has_fairseq
from lazyformer_fairseq.modules.attention.selection import AUTO
from lazyformer_fairseq.modules.networks import named
from lazyformer_fairseq.modules.networks.huggingface_bert import (
    HuggingFaceBert,
    HuggingFaceBertOptions,
    has_transformers,
)
from lazyformer_fairseq.modules.networks.masked_lm import MaskedLM
from lazyformer_fairseq.modules.networks.options import MaskedLMOptions
from lazyformer_fairseq.modules.networks.stack import Stack
from lazyformer_fairseq.modules.networks.stream_memory import StreamMemory
from lazyformer_fairseq.patterns.architectures import ARCHITECTURES
from lazyformer_fairseq.patterns.grammar import plan
from lazyformer_fairseq.patterns.kinds import DISTRIBUTION, EncoderSizes, Sizes

MASKED_SHARE = 0.15
DROPOUT = 0.1  # the default in all of these models
FAIRSEQ = "fairseq roberta_base"
HUGGING_FACE = "HF BertModel, SDPA"
OURS = "our bert_base"
REGISTERED = "bert_base as registered"
TRANSFORMER_XL = "our transformer_xl_base"
BASELINES = (FAIRSEQ, HUGGING_FACE, OURS, REGISTERED, TRANSFORMER_XL)  # the last is for causal models
BIASED = (OURS, REGISTERED)  # compared with models that have the same number of buckets
WITHOUT_FAIRSEQ = f"{FAIRSEQ} is skipped, because fairseq cannot be imported"
WITHOUT_TRANSFORMERS = (
    f"{HUGGING_FACE} is skipped, because transformers cannot be imported; pip install 'lazyformer_fairseq[bench]'"
)


@dataclass(frozen=True)
class Batch:
    """A training batch without padding: the inputs and targets of an update.

    Attributes:
        tokens_BT: token ids.
        masked_BT: True at the positions to predict.
        positions_M: the same positions as flat indices into B * T, for models that need them.
        targets_M: the token ids at these positions.
    """

    tokens_BT: Tensor
    masked_BT: Tensor
    positions_M: Tensor
    targets_M: Tensor


@dataclass(eq=False)
class BenchModel:
    """A masked language model with our models' interface, or a causal language model.

    Attributes:
        model: the module.
        pattern: the model's sublayer pattern.
        sizes: the model's sizes, for counting FLOPs.
        network: the stack of sublayers; None unless the model is one of ours.
        memory: the number of tokens that the model remembers.
        compiles: True if the model is compiled by torch. The loss should then be compiled too.
    """

    model: nn.Module
    pattern: str
    sizes: Sizes
    network: Optional[Stack] = None
    memory: int = 0
    compiles: bool = False

    @property
    def parameters(self) -> int:
        """The number of parameters."""
        return sum(parameter.numel() for parameter in self.model.parameters())

    def features(self, tokens_BT: Tensor) -> Tensor:
        """Compute the encoder's output (B, T, C) for sequences without padding."""
        return self.model(tokens_BT, features_only=True, has_padding=False)[0]

    def masked_logits(self, batch: Batch) -> Tensor:
        """Compute the logits (M, V) at the masked positions."""
        return self.model(batch.tokens_BT, masked_tokens=batch.positions_M, has_padding=False)[0]

    def compile(self) -> None:
        """Compile the model with torch: our models as with ``--compile``, others in place."""
        self.compiles = True
        if self.network is None:
            self.model.compile()
        else:
            self.network.compiles = True


def our_model(options: dict[str, Any], max_positions: int) -> BenchModel:
    """Build one of our encoders from its options."""
    model = MaskedLM(MaskedLMOptions(**{"dropout": DROPOUT, **options, "max_positions": max_positions}), PIECES)
    network = model.encoder.sentence_encoder
    return BenchModel(model, model.cfg.sublayer_pattern, network.sizes, network)


def hugging_face_bert(sizes: EncoderSizes, layers: int) -> BenchModel:
    """Build Hugging Face's BERT on torch's fused attention, which does not support attention dropout on CPUs.

    The masked-LM head receives only the masked positions, as in the other models. As shipped, Hugging Face's head
    computes the logits at all positions.
    """
    options = HuggingFaceBertOptions(dropout=DROPOUT, **_widths(sizes, layers))
    return BenchModel(HuggingFaceBert(options, sizes.vocab_size), f"(sf)x{layers}", sizes)


class FairseqRoberta(BenchModel):
    """fairseq's ``roberta_base`` as shipped: dropout and attention dropout 0.1, no relative bias."""

    def __init__(self, sizes: EncoderSizes, layers: int):
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
        """Compute the encoder's output (B, T, C)."""
        return self.model(tokens_BT, features_only=True)[0]

    def masked_logits(self, batch: Batch) -> Tensor:
        """Compute the logits (M, V) at the masked positions."""
        return self.model(batch.tokens_BT, masked_tokens=batch.masked_BT)[0]


def causal_model(arch: str, words: int) -> BenchModel:
    """Build a causal model by the name of its arch, in evaluation mode."""
    model = named.build(arch, words, mem_len=REMEMBERED).eval()
    return BenchModel(model, model.cfg.sublayer_pattern, model.decoder.sizes, model.decoder, memory=REMEMBERED)


def _widths(sizes: EncoderSizes, layers: int) -> dict[str, int]:
    """Return a model's sizes under fairseq's option names."""
    return {
        "encoder_layers": layers,
        "encoder_embed_dim": sizes.embed_dim,
        "encoder_ffn_embed_dim": sizes.ffn_embed_dim,
        "encoder_attention_heads": sizes.num_heads,
        "max_positions": sizes.max_positions,
    }


@dataclass(frozen=True)
class OnBackEnd:
    """A model and the back end that it runs on.

    Attributes:
        called: the model's name.
        model: the model, which may be shared between back ends.
        back_end: the attention back end for our models; "its own" for other models.
        buckets: the number of buckets in the relative bias.
        baseline: the model's name in BASELINES; None if it is not a baseline.
    """

    called: str
    model: BenchModel
    back_end: str
    buckets: int
    baseline: Optional[str]

    @property
    def name(self) -> str:
        """The unique name of this combination of model and back end."""
        return f"{self.called}, {self.back_end}, {self.buckets} buckets"

    def prepared(self, function: Callable[[], object]) -> Callable[[], object]:
        """Wrap a function to run on this back end."""
        network = self.model.network
        if network is None:
            return function

        def call() -> object:
            network.attention_backend = self.back_end
            return function()

        return call

    def back_ends_used(self, batch: int, time: int, training: bool) -> list[str]:
        """Return the back ends used for attention: the ones selected by ``auto``, or the named one."""
        network = self.model.network
        if network is None or self.back_end != AUTO:
            return [self.back_end]
        network.attention_backend = AUTO
        weight = next(self.model.model.train(training).parameters())
        x_BTC = weight.new_zeros(batch, time, network.embed_dim)
        memory = None
        if self.model.memory:
            memory = StreamMemory()
            state_BMC = weight.new_zeros(batch, self.model.memory, network.embed_dim)
            memory.states = [state_BMC] * len(network.plan)
        used = set()
        with torch.set_grad_enabled(training):
            shared = network.context(x_BTC, self.model.memory)

            def record(*given: Any) -> str:
                name = shared.back_end(*given)
                used.add(name)
                return name

            network.run(x_BTC, shared._replace(back_end=record), memory=memory)
        return sorted(used)

    def count_flops(self, batch: int, time: int, training: bool, predicted: Optional[int] = 0) -> int:
        """Return the model's FLOPs per call, excluding what a back end recomputes.

        Args:
            batch: the number of sequences.
            time: T, the number of tokens per sequence.
            training: whether to include a backward pass.
            predicted: the number of tokens per sequence to compute logits for; None for all.
        """
        model = self.model
        forward = count_flops(model.pattern, model.sizes, time, memory=model.memory, batch=batch, predicted=predicted)
        if training:
            return 3 * forward
        return forward


def build_models(settings: BenchSettings, precision: str) -> list[OnBackEnd]:
    """Build all encoders and their baselines in the given precision; print which models are skipped."""
    longest = max(*settings.lengths, 512)
    row = ARCHITECTURES[settings.baseline_arch]
    layers = sum(DISTRIBUTION in planned.kind.hands_on for planned in plan(row.sublayer_pattern))
    sizes = EncoderSizes(
        vocab_size=PIECES,
        embed_dim=row.encoder_embed_dim,
        ffn_embed_dim=row.encoder_ffn_embed_dim,
        num_heads=row.encoder_attention_heads,
        max_positions=longest,
        relative_position_buckets=0,
        computes_all_tokens=True,
    )
    models = []
    if has_fairseq():
        models.append(OnBackEnd(FAIRSEQ, FairseqRoberta(sizes, layers), "its own", 0, FAIRSEQ))
    else:
        print(WITHOUT_FAIRSEQ, file=sys.stderr)
    if has_transformers():
        models.append(OnBackEnd(HUGGING_FACE, hugging_face_bert(sizes, layers), "its own", 0, HUGGING_FACE))
    else:
        print(WITHOUT_TRANSFORMERS, file=sys.stderr)

    archs = {OURS: {**row.options(), "attention_dropout": 0.0}, **settings.encoders}
    for buckets, (name, options) in itertools.product(settings.buckets, archs.items()):
        model = our_model({**options, "relative_position_buckets": buckets}, longest)
        back_ends = settings.back_ends
        baseline = None
        if name == OURS:
            back_ends = settings.baseline_back_ends
            baseline = OURS
        elif name == settings.baseline_arch and len(settings.encoders) > 1:
            baseline = REGISTERED
        models += [OnBackEnd(name, model, back_end, buckets, baseline) for back_end in back_ends]

    for model in {id(each.model): each.model for each in models}.values():
        model.model.to(settings.device, PRECISIONS[precision])
        if settings.compile:
            model.compile()
    return models


def build_causal_models(settings: BenchSettings, precision: str) -> list[OnBackEnd]:
    """Build the baseline Transformer-XL (a tiny one if all models are tiny), followed by the causal models."""
    baseline = "transformer_xl_base"
    words = WORDS
    if all(name.endswith("_tiny") for name in settings.causal_archs):
        baseline = "transformer_xl_tiny"
        words = 1000
    models = []
    for name in dict.fromkeys([baseline, *settings.causal_archs]):
        model = causal_model(name, words)
        model.model.to(settings.device, PRECISIONS[precision])
        models.append(OnBackEnd(name, model, AUTO, 0, TRANSFORMER_XL if name == baseline else None))
    return models


def random_tokens(batch: int, time: int, device: torch.device | str) -> Tensor:
    """Draw random token ids (B, T) without special tokens."""
    return torch.randint(5, PIECES, (batch, time), device=device)


def predicted_words(time: int) -> int:
    """Return the number of masked tokens per sequence, which is 15% of the tokens, and always at least one."""
    return max(1, round(MASKED_SHARE * time))


def random_batch(batch: int, time: int, device: torch.device | str) -> Batch:
    """Draw a batch of random tokens, with the same positions masked in each sequence."""
    tokens_BT = random_tokens(batch, time, device)
    masked_BT = torch.zeros(batch, time, dtype=torch.bool, device=device)
    places = torch.randperm(time, device=device)[: predicted_words(time)]
    masked_BT[:, places] = True
    positions_M = masked_BT.flatten().nonzero().squeeze(1)
    return Batch(tokens_BT, masked_BT, positions_M, tokens_BT.flatten()[positions_M])
