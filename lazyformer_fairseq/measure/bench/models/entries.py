"""The rows of a benchmark: which model runs on which back end, and which baseline each stands for."""

import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Optional

import torch

from lazyformer_fairseq.fairseq_plugin.models.huggingface_bert import has_transformers
from lazyformer_fairseq.measure.bench.models.contenders import (
    VOCAB_SIZE,
    Contender,
    FairseqRoberta,
    HuggingFaceBert,
    OurModel,
)
from lazyformer_fairseq.measure.bench.models.settings import BenchSettings
from lazyformer_fairseq.measure.costs.flops import count_encoder_flops, layers_of_block, makers_of_blocks
from lazyformer_fairseq.measure.costs.machine import PRECISIONS
from lazyformer_fairseq.patterns.architectures import ARCHITECTURES
from lazyformer_fairseq.patterns.grammar import PlannedSublayer
from lazyformer_fairseq.patterns.sizes import EncoderSizes

FAIRSEQ = "fairseq roberta_base"
HUGGING_FACE = "HF BertModel, SDPA"
OURS = "our bert_base"
BASELINES = (FAIRSEQ, HUGGING_FACE, OURS)
WITHOUT_TRANSFORMERS = (
    f"left out: {HUGGING_FACE}, because transformers cannot be imported; pip install 'lazyformer_fairseq[bench]'"
)


@dataclass(frozen=True)
class Entry:
    """A model on a back end.

    Attributes:
        model: its name.
        contender: the model; several entries may share one.
        back_end: of our models; "its own" for others.
        buckets: of its relative bias.
        baseline: which of BASELINES it stands for, None for a model that is compared with them.
    """

    model: str
    contender: Contender
    back_end: str
    buckets: int
    baseline: Optional[str] = None

    @property
    def name(self) -> str:
        """Unique to each entry."""
        return f"{self.model}, {self.back_end}, {self.buckets} buckets"

    def prepared(self, thing: Callable[[], object]) -> Callable[[], object]:
        """The same thing, run on this entry's back end."""
        if not isinstance(self.contender, OurModel):
            return thing
        encoder = self.contender.encoder

        def call() -> object:
            encoder.attention_backend = self.back_end
            return thing()

        return call

    def back_end_used(self, batch: int, time: int, training: bool) -> Callable[[PlannedSublayer], str]:
        """Maps the maker of a block's distribution to the key of attention_flops.PRODUCTS that computes it."""
        model = self.contender.model.train(training)
        weight = next(model.parameters())
        if not isinstance(self.contender, OurModel):
            return lambda maker: _torch_attention(weight.device, training and self.baseline == FAIRSEQ)
        encoder = self.contender.encoder
        encoder.attention_backend = self.back_end
        with torch.set_grad_enabled(training):
            back_end = encoder.context(weight.new_zeros(1, 1, 1).expand(batch, time, encoder.embed_dim)).back_end
        has_dropout = training and encoder.options.attention_dropout > 0

        def used(maker: PlannedSublayer) -> str:
            name = back_end(layers_of_block(maker) - 1, maker.shaper.settings)
            return "unfused" if name == "recompute" and _torch_attention(weight.device, has_dropout) != name else name

        return used

    def count_flops(self, batch: int, time: int, training: bool, predicted: int = 0) -> int:
        used = self.back_end_used(batch, time, training)
        return count_encoder_flops(self.contender.pattern, self.contender.sizes, time, batch, predicted, used, training)


def build_entries(settings: BenchSettings, precision: str) -> list[Entry]:
    """All encoders and their baselines, on the device and in the precision; logs what it must leave out."""
    longest = max(*settings.lengths, 512)
    row = ARCHITECTURES[settings.baseline_arch]
    layers = len(list(makers_of_blocks(row.sublayer_pattern)))
    widths = (row.encoder_embed_dim, row.encoder_ffn_embed_dim, row.encoder_attention_heads)
    sizes = EncoderSizes(VOCAB_SIZE, *widths, longest, relative_position_buckets=0)
    entries = [Entry(FAIRSEQ, FairseqRoberta(sizes, layers), "its own", 0, FAIRSEQ)]
    if has_transformers():
        entries.append(Entry(HUGGING_FACE, HuggingFaceBert(sizes, layers), "its own", 0, HUGGING_FACE))
    else:
        print(WITHOUT_TRANSFORMERS, file=sys.stderr)
    baseline = {**row.options(), "attention_dropout": 0.0}
    for buckets in settings.buckets:
        entries += _on_back_ends(OURS, baseline, buckets, settings.baseline_back_ends, longest, OURS)
        for name, options in settings.encoders.items():
            entries += _on_back_ends(name, options, buckets, settings.back_ends, longest)
    for contender in {id(entry.contender): entry.contender for entry in entries}.values():
        contender.model.to(settings.device, PRECISIONS[precision])
        if settings.compile:
            contender.compile()
    return entries


def _on_back_ends(
    name: str,
    options: dict[str, Any],
    buckets: int,
    back_ends: tuple[str, ...],
    longest: int,
    baseline: Optional[str] = None,
) -> list[Entry]:
    """An entry for each back end; all share the model."""
    contender = OurModel({**options, "relative_position_buckets": buckets}, longest)
    first = Entry(name, contender, back_ends[0], buckets, baseline)
    return [replace(first, back_end=back_end) for back_end in back_ends]


def _torch_attention(device: torch.device, has_dropout: bool) -> str:
    """How torch's scaled_dot_product_attention runs: fused, except on a CPU with dropout."""
    return "unfused" if has_dropout and device.type == "cpu" else "recompute"
