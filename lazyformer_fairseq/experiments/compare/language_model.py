"""Causal language modeling as a comparison task, measured by perplexity over all tokens and latency at batch size 1."""

from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np

from lazyformer_fairseq.data.count_model import MOST_COUNTED, CountModel, ngram
from lazyformer_fairseq.data.datasets.token_streams import StreamOptions, item_length, make_streams, open_tokens
from lazyformer_fairseq.data.frequencies import count_tokens, log_frequencies, unigram_loss_bits
from lazyformer_fairseq.data.text.dictionary_file import load_dictionary
from lazyformer_fairseq.evaluation.costs.flops import count_flops
from lazyformer_fairseq.evaluation.costs.latency import measure, next_segment
from lazyformer_fairseq.experiments.compare.models import ModelSpec
from lazyformer_fairseq.experiments.compare.task import ComparedTask, CompareJob
from lazyformer_fairseq.experiments.training_runs import Training
from lazyformer_fairseq.experiments.yardsticks import BEFORE, Yardsticks
from lazyformer_fairseq.language_modeling.evaluate import Evaluation, evaluate, load_model
from lazyformer_fairseq.language_modeling.prepare import read_manifest
from lazyformer_fairseq.modules.networks.options import CausalLMOptions
from lazyformer_fairseq.patterns.kinds import CausalSizes
from lazyformer_fairseq.report.numbers import in_milliseconds
from lazyformer_fairseq.training.loop import CHECKPOINT, TrainingLoop
from lazyformer_fairseq.training.objectives.network import Network
from lazyformer_fairseq.training.objectives.stream_lm import StreamLMObjective

SPLITS = ("valid", "test")
ROUNDS = 50
ROWS = 64  # batch size for evaluation


class LanguageModel(ComparedTask):
    """Causal language modeling on streams of text, with memory."""

    OPTIONS = (CausalLMOptions, StreamOptions)

    def network(self, spec: ModelSpec) -> Network:
        """Return a model's network builder. Models are pre-norm by default, as in equations 1 and 2 of the PAR paper.

        With post-norm and Adam, learning more than word frequencies takes far more updates than a small comparison
        allows.
        """
        sizes = self.settings.sizes
        options = CausalLMOptions(
            sublayer_pattern=spec.pattern,
            decoder_embed_dim=spec.embed_dim,
            decoder_ffn_embed_dim=spec.ffn_embed_dim,
            decoder_attention_heads=spec.heads,
            decoder_normalize_before=self.settings.normalize_before,
            mem_len=sizes["mem_len"],
            dropout=sizes["dropout"],
            attention_dropout=0.0,
            activation_dropout=0.0,
            adaptive_softmax_cutoff=",".join(map(str, sizes["adaptive_softmax_cutoff"])),
        )
        return Network(replace(options, **self.given(CausalLMOptions, spec)))

    def training_text(self, spec: ModelSpec) -> dict[str, Any]:
        """Return the options for streams of text."""
        return {"tgt_len": self.settings.sizes["tgt_len"], **self.given(StreamOptions, spec)}

    def objective_of(
        self,
        network: Network,
        text: Mapping[str, Any],
        seed: int,
        updates: int,  # noqa: ARG002
    ) -> StreamLMObjective:
        """Return the language-modeling objective for a network and training-text options."""
        return StreamLMObjective(network, self.settings.data, self.settings.sizes["batch_size"], seed, text)

    def sizes(self, spec: ModelSpec, vocab_size: int = 0) -> CausalSizes:
        """Return a model's sizes for the parameter and FLOP formulas."""
        return CausalSizes(
            vocab_size,
            spec.embed_dim,
            spec.ffn_embed_dim,
            spec.heads,
            cutoffs=tuple(self.settings.sizes["adaptive_softmax_cutoff"]),
            normalize_before=self.settings.normalize_before,
        )

    def flops_of_update(self, spec: ModelSpec, vocab_size: int, length: int) -> int:  # noqa: ARG002
        """Return the FLOPs of an update on segments with a full memory, counting only the softmax's first band."""
        sizes = self.settings.sizes
        return 3 * count_flops(
            spec.pattern,
            self.sizes(spec, vocab_size),
            time=sizes["tgt_len"],
            memory=sizes["mem_len"],
            batch=sizes["batch_size"],
        )

    def measure(self, training: TrainingLoop) -> dict[str, float]:
        """Compute `perplexity` and `loss`, in bits per token, on the first tokens of the validation split."""
        found = self._evaluate(training, "valid", self.settings.validation_tokens)
        return {"perplexity": found.perplexity, "loss": found.bits}

    def final(self, training: Training) -> dict[str, float]:
        """Compute the final metrics over every token of the validation and test splits.

        The names of test metrics begin with `test_`.
        """
        values = {}
        for split, prefix in (("valid", ""), ("test", "test_")):
            found = self._evaluate(training, split)
            values[f"{prefix}perplexity"] = found.perplexity
            values[f"{prefix}loss"] = found.bits
            values[f"{prefix}tokens"] = found.tokens
        return values

    def describe_data(self) -> dict[str, Any]:
        """Return the data's manifest, its yardsticks, and the number of validation tokens."""
        folder = Path(self.settings.data)
        train = open_tokens(folder / "train")
        valid = open_tokens(folder / "valid")[None].astype(np.int64)
        dictionary = load_dictionary(folder / "dict.txt")
        vocab_size = len(dictionary)
        never_predicted = (dictionary.bos(), dictionary.pad())
        logarithms = log_frequencies(count_tokens([train], vocab_size), never_predicted)
        before = CountModel(ngram(5), vocab_size, train[:MOST_COUNTED].astype(np.int64))
        valid_counts = np.bincount(valid[0], minlength=vocab_size)
        all_predicted = np.ones(valid.shape, dtype=bool)
        yardsticks = Yardsticks(
            unigram=unigram_loss_bits(logarithms, valid_counts),
            counts=before.bits(valid, all_predicted, valid[0]),
            context=BEFORE,
        )
        return {
            "manifest": read_manifest(folder),
            "yardsticks": asdict(yardsticks),
            "validation": {"tokens": min(valid.size, self.settings.validation_tokens)},
        }

    def unit(self) -> dict[str, str]:
        """Return the unit of perplexity, such as "per word" or "per character", which depends on the data."""
        return {"unit": f"per {read_manifest(Path(self.settings.data))['unit']}"}

    def costs_of_use(self, jobs: Mapping[str, CompareJob]) -> dict[str, dict[str, Any]]:
        """Measure each model's `flops` per segment and `latency_milliseconds` at batch size 1, by name.

        Latency is the time to score a segment of the test split with a full memory; the models' measurements are
        interleaved. Unlike the FLOPs, the latency includes words beyond the softmax's first band.
        """
        costs = {}
        scorings = {}
        data = Path(self.settings.data)
        device = self.settings.device
        tgt_len = self.settings.sizes["tgt_len"]
        mem_len = self.settings.sizes["mem_len"]
        for name, job in jobs.items():
            model, symbols, _ = load_model(job.folder / CHECKPOINT, data, device, self.settings.precision)
            flops = count_flops(job.spec.pattern, model.decoder.sizes, tgt_len, mem_len)
            costs[name] = {"flops": flops}
            streams = make_streams(
                open_tokens(data / "test"),
                tgt_len,
                item_length(data),
                rows=1,
                eos=symbols.eos(),
                pad=symbols.pad(),
                keeps_rest=True,
            )
            middle = streams[len(streams) // 2]
            tokens_BT = middle["net_input"]["src_tokens"].to(device)
            scorings[name] = next_segment(model, tokens_BT, middle["target"].to(device), mem_len)
        for name, timing in measure(scorings, ROUNDS, device=device).items():
            costs[name]["latency_milliseconds"] = in_milliseconds(timing.samples)
        return costs

    def _evaluate(self, training: TrainingLoop, split: str, most: int | None = None) -> Evaluation:
        """Evaluate a model on a split's first `most` tokens with the segment and memory lengths used in training."""
        return evaluate(
            training.model,
            open_tokens(Path(self.settings.data) / split)[:most],
            training.objective.dictionary.eos(),
            tgt_len=self.settings.sizes["tgt_len"],
            mem_len=self.settings.sizes["mem_len"],
            batch_size=ROWS,
            item=item_length(self.settings.data),
        )
