"""Masked language modeling as a comparison task, validated on fixed blocks with fixed masks."""

import math
from collections.abc import Mapping
from dataclasses import asdict, fields, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch.nn import functional as F

from lazyformer_fairseq.data.masked_text import MaskedText, MaskedTextOptions, open_masked_text, parse_length_schedule
from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.evaluation.costs.flops import count_flops
from lazyformer_fairseq.experiments.compare.models import ModelSpec
from lazyformer_fairseq.experiments.compare.task import ComparedTask
from lazyformer_fairseq.experiments.yardsticks import yardsticks_of
from lazyformer_fairseq.extras import needs_fairseq
from lazyformer_fairseq.modules.networks.huggingface_bert import HuggingFaceBertOptions
from lazyformer_fairseq.modules.networks.options import MaskedLMOptions, read_options
from lazyformer_fairseq.options import parse_masking_rates
from lazyformer_fairseq.patterns.architectures import ARCHITECTURES, PARTS
from lazyformer_fairseq.patterns.kinds import EncoderSizes, sizes_of
from lazyformer_fairseq.training.loop import TrainingLoop, to_device
from lazyformer_fairseq.training.objectives.interface import NOTHING_PREDICTED
from lazyformer_fairseq.training.objectives.masked_lm import MaskedLMObjective
from lazyformer_fairseq.training.objectives.network import Network

SEED = 0  # seed of the validation masks, independent of the training seed
BATCH = 32  # blocks per batch during validation


class MaskedLM(ComparedTask):
    """Masked language modeling on FULL-SENTENCES blocks."""

    OPTIONS = (MaskedLMOptions, MaskedTextOptions)

    @property
    def longest(self) -> int:
        """The number of tokens in the longest input."""
        return self.settings.sizes["tokens_per_sample"]

    def objective_of(self, network: Network, text: Mapping[str, Any], seed: int, updates: int) -> MaskedLMObjective:
        """Return the masked-LM objective for a network and training-text options."""
        return MaskedLMObjective(network, self.settings.data, self.settings.sizes["batch_size"], seed, updates, text)

    def network(self, spec: ModelSpec) -> Network:
        """Return a model's network builder: a `FairseqNetwork` for fairseq's own models, otherwise a `Network`."""
        sizes = {
            "encoder_embed_dim": spec.embed_dim,
            "encoder_ffn_embed_dim": spec.ffn_embed_dim,
            "encoder_attention_heads": spec.heads,
            "max_positions": self._positions(spec),
            "dropout": self.settings.sizes["dropout"],
        }
        given = self.given(MaskedLMOptions, spec)
        if spec.what == "fairseq":
            needs_fairseq(f"--model {spec.name}=fairseq:{spec.arch}")
            from lazyformer_fairseq.fairseq_plugin.models.elsewhere import FairseqNetwork

            options = {**sizes, "encoder_layers": spec.layers, "attention_dropout": 0, "activation_dropout": 0}
            words = ["--arch", spec.arch]
            for name, value in [*options.items(), *given.items()]:
                words.append(f"--{name.replace('_', '-')}")
                if value is not True:  # a switch takes no value
                    words.append(str(value))
            if self._is_pre_norm(spec):
                words.append("--encoder-normalize-before")
            return FairseqNetwork(tuple(words))
        if spec.what == "huggingface":  # Hugging Face's BERT is post-norm and has no option to change that
            unknown = given.keys() - {each.name for each in fields(HuggingFaceBertOptions)}
            if unknown:
                raise UserError(f"--{min(unknown).replace('_', '-')}: hf:{spec.arch} does not support this option")
            options = {"model_type": spec.arch, **sizes, "encoder_layers": spec.layers, **given}
            return Network(HuggingFaceBertOptions(**options))
        options = self._options(MaskedLMOptions, spec, self.settings.recipe_of(spec).options)
        if not self._buckets(spec):
            options.pop("local_heads", None)
        options |= sizes
        options |= {
            "sublayer_pattern": spec.pattern,
            "encoder_normalize_before": self._is_pre_norm(spec),
            "relative_position_buckets": self._buckets(spec),
            "attention_dropout": self._own_options(spec).get("attention_dropout", 0.0),
        }
        options |= self._parts(spec)
        options |= given
        return Network(read_options(MaskedLMOptions, options))

    def sizes(self, spec: ModelSpec, vocab_size: int = 0) -> EncoderSizes:
        """Return a model's sizes for the parameter and FLOP formulas."""
        options = {
            "encoder_embed_dim": spec.embed_dim,
            "encoder_ffn_embed_dim": spec.ffn_embed_dim,
            "encoder_attention_heads": spec.heads,
            "max_positions": self._positions(spec),
            "relative_position_buckets": self._buckets(spec),
        }
        sizes = sizes_of(options | self._parts(spec) | self.given(MaskedLMOptions, spec), vocab_size)
        if spec.is_external:
            return replace(sizes, computes_all_tokens=True)
        return sizes

    def flops_of_update(self, spec: ModelSpec, vocab_size: int, length: int) -> int:
        """Return the FLOPs of an update on full blocks."""
        batch = self.settings.sizes["batch_size"] * self.longest // length
        predicted = self.predicted(spec, length)
        return 3 * count_flops(spec.pattern, self.sizes(spec, vocab_size), length, batch=batch, predicted=predicted)

    def lengths(self, spec: ModelSpec) -> tuple[tuple[int, float], ...]:
        """Return the lengths in the model's length schedule, each with the fraction of the run at which it ends."""
        schedule = MaskedTextOptions(**self.training_text(spec)).length_schedule
        return (*parse_length_schedule(schedule, self.longest), (self.longest, 1.0))

    def predicted(self, spec: ModelSpec, length: int) -> int:
        """Return the number of tokens per input that the head predicts at the start of training."""
        options = MaskedTextOptions(**self.training_text(spec))
        first_rate, _ = parse_masking_rates(options.mask_prob)
        return max(1, round(length * first_rate))

    def training_text(self, spec: ModelSpec) -> dict[str, Any]:
        """Return the masked-text options from the recipe and the user."""
        of_recipe = self._options(MaskedTextOptions, spec, self.settings.recipe_of(spec).options)
        return {"tokens_per_sample": self.longest, **of_recipe}

    def measure(self, training: TrainingLoop) -> dict[str, float]:
        """Compute `loss`, in bits per masked token, and `accuracy`, in percent."""
        model = training.model
        pad = self._text.special.pad
        was_training = model.training
        nats = 0.0
        right = 0
        predicted = 0
        model.eval()
        with torch.inference_mode():
            for batch in self._batches:
                sample = to_device(batch, training.device)
                is_masked = sample["target"].ne(pad)
                targets = sample["target"][is_masked]
                # As in training, fairseq's own models take a mask; all other models take positions.
                if getattr(model, "takes_positions", False):
                    masked = sample["masked_positions"]
                else:
                    masked = is_masked
                logits = model(**sample["net_input"], masked_tokens=masked)[0].float()
                nats += F.cross_entropy(logits, targets, reduction="sum").item()
                right += (logits.argmax(-1) == targets).sum().item()
                predicted += len(targets)
        model.train(was_training)
        if not predicted:
            raise UserError(NOTHING_PREDICTED)
        return {"loss": nats / predicted / math.log(2), "accuracy": 100 * right / predicted}

    def describe_data(self) -> dict[str, Any]:
        """Return the yardsticks for the predicted validation tokens, and the numbers of predicted and of all tokens."""
        pad = self._text.special.pad
        return {
            "yardsticks": asdict(yardsticks_of(self._text, self._batches)),
            "validation": {
                "tokens": sum(int(batch["ntokens"]) for batch in self._batches),
                "predicted": sum(int(batch["target"].ne(pad).sum()) for batch in self._batches),
                "seed": SEED,
            },
        }

    @cached_property
    def _text(self) -> MaskedText:
        """The text that all runs are validated on; its masks do not depend on the recipe."""
        text = {"tokens_per_sample": self.longest, **self.given(MaskedTextOptions)}
        return open_masked_text(self.settings.data, SEED, max_update=1, **text)

    @cached_property
    def _batches(self) -> list[dict]:
        """Batches of evenly spaced validation blocks, about `validation_tokens` tokens in total.

        Their masks never change.
        """
        blocks = self._text.split("valid").now
        mean = blocks.sizes.sum() / len(blocks)
        wanted = round(self.settings.validation_tokens / mean)
        count = min(len(blocks), max(1, wanted))
        chosen = np.linspace(0, len(blocks) - 1, count).round().astype(int)

        batches = []
        for start in range(0, count, BATCH):
            items = [blocks[int(index)] for index in chosen[start : start + BATCH]]
            batches.append(blocks.collater(items))
        return batches

    def _positions(self, spec: ModelSpec) -> int:
        return self._own_options(spec).get("max_positions") or self.longest

    def _is_pre_norm(self, spec: ModelSpec) -> bool:
        return self.settings.normalize_before and "encoder_normalize_before" not in spec.without

    def _buckets(self, spec: ModelSpec) -> int:
        """Return the number of buckets of T5's relative position bias, which external models do not have."""
        given = self.settings.sizes["relative_position_buckets"]
        if spec.is_external or "relative_position_buckets" in spec.without:
            given = 0
        return self._own_options(spec).get("relative_position_buckets", given)

    def _parts(self, spec: ModelSpec) -> dict[str, Any]:
        """Return the options for norms, biases, positions and head that come from an arch's own sizes or the user."""
        options = {**self._own_options(spec), **self.given(MaskedLMOptions, spec)}
        return {name: value for name, value in options.items() if name in PARTS}

    def _own_options(self, spec: ModelSpec) -> dict[str, Any]:
        if spec.own_sizes:
            return ARCHITECTURES[spec.arch].options()
        return {}
