"""Causal language modelling: perplexity over every token, and latency at batch 1."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from lazyformer_fairseq.data.datasets.token_streams import StreamOptions, cut_tokens, item_length, open_tokens
from lazyformer_fairseq.data.frequencies import cost_in_bits, count_pieces, log_frequencies
from lazyformer_fairseq.data.text.dictionary_file import load_dictionary
from lazyformer_fairseq.evaluation.costs.flops import count_flops
from lazyformer_fairseq.evaluation.costs.latency import measure, next_segment
from lazyformer_fairseq.experiments.compare.models import ModelSpec
from lazyformer_fairseq.experiments.compare.task import ComparedTask, CompareJob
from lazyformer_fairseq.experiments.trainings import Training
from lazyformer_fairseq.language_modeling.evaluate import Evaluation, evaluate, load_model
from lazyformer_fairseq.language_modeling.prepare import read_manifest
from lazyformer_fairseq.modules.networks.options import CausalLMOptions
from lazyformer_fairseq.patterns.kinds import CausalSizes
from lazyformer_fairseq.report.numbers import spread
from lazyformer_fairseq.training.loop import CHECKPOINT, TrainingLoop
from lazyformer_fairseq.training.objectives.network import Network
from lazyformer_fairseq.training.objectives.stream_lm import StreamLMObjective

SPLITS = ("valid", "test")
ROUNDS = 50
ROWS = 64  # of an evaluation


class LanguageModel(ComparedTask):
    """Trains on streams of text, with memory."""

    OPTIONS = (CausalLMOptions, StreamOptions)

    def objective(self, spec: ModelSpec, seed: int, updates: int) -> StreamLMObjective:
        """Pre-norm by default, as in the PAR paper's equations 1 and 2: post-norm needs far more updates of Adam than a
        miniature gets to learn more than word frequencies.
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
        network = Network(replace(options, **self.given(CausalLMOptions, spec)))
        text = {"tgt_len": sizes["tgt_len"], **self.given(StreamOptions, spec)}
        return StreamLMObjective(network, self.settings.data, sizes["batch_size"], seed, text)

    def sizes(self, spec: ModelSpec, vocab_size: int = 0) -> CausalSizes:
        of_all = (vocab_size, spec.embed_dim, spec.ffn_embed_dim, spec.heads)
        cutoffs = tuple(self.settings.sizes["adaptive_softmax_cutoff"])
        return CausalSizes(*of_all, cutoffs=cutoffs, normalize_before=self.settings.normalize_before)

    def flops_of_update(self, spec: ModelSpec, vocab_size: int, length: int) -> int:
        """Of segments with a full memory; of the softmax the first band alone."""
        sizes = self.settings.sizes
        how = {"time": sizes["tgt_len"], "memory": sizes["mem_len"], "batch": sizes["batch_size"]}
        return 3 * count_flops(spec.pattern, self.sizes(spec, vocab_size), **how)

    def measure(self, training: TrainingLoop) -> dict[str, float]:
        """`perplexity` and `loss`, bits a token, over the start of the validation split."""
        found = self._evaluate(training, "valid", self.settings.validation_tokens)
        return {"perplexity": found.perplexity, "loss": found.bits}

    def final(self, training: Training) -> dict[str, float]:
        """The same over every token of the validation and test splits."""
        of_splits = {split: self._evaluate(training, split) for split in SPLITS}
        return {
            f"{'' if split == 'valid' else f'{split}_'}{name}": value
            for split, found in of_splits.items()
            for name, value in (("perplexity", found.perplexity), ("loss", found.bits), ("tokens", found.tokens))
        }

    def describe_data(self) -> dict[str, Any]:
        """The data's manifest, and what frequencies cost, as bits and as perplexity."""
        folder = Path(self.settings.data)
        texts = {split: open_tokens(folder / split) for split in ("train", *SPLITS)}
        dictionary = load_dictionary(folder / "dict.txt")
        counts = {split: count_pieces([tokens], len(dictionary)) for split, tokens in texts.items()}
        logarithms = log_frequencies(counts["train"], (dictionary.bos(), dictionary.pad()))
        bits = {split: cost_in_bits(logarithms, counts[split]) for split in SPLITS}
        return {
            "manifest": read_manifest(folder),
            "frequencies_bits": bits,
            "frequencies_perplexity": {split: 2**found for split, found in bits.items()},
            "validation": {"tokens": min(len(texts["valid"]), self.settings.validation_tokens)},
        }

    def unit(self) -> dict[str, str]:
        return {"unit": f"per {read_manifest(Path(self.settings.data))['unit']}"}

    def costs_of_use(self, jobs: Mapping[str, CompareJob]) -> dict[str, dict[str, Any]]:
        """By name: `flops` of a segment, and `latency_milliseconds` at batch 1, taken in turn.

        Times the scoring of a segment of the test split with a full memory, including its words beyond the first band,
        which FLOPs leave out.
        """
        sizes = self.settings.sizes
        costs = {}
        things = {}
        device = self.settings.device
        tgt_len = sizes["tgt_len"]
        mem_len = sizes["mem_len"]
        for name, job in jobs.items():
            checkpoint = job.folder / CHECKPOINT
            data = Path(self.settings.data)
            model, symbols, _ = load_model(checkpoint, data, device, self.settings.precision)
            costs[name] = {"flops": count_flops(job.spec.pattern, model.decoder.sizes, tgt_len, mem_len)}
            tokens = open_tokens(data / "test")
            ends = symbols.eos(), symbols.pad(), item_length(data)
            streams = cut_tokens(tokens, 1, tgt_len, *ends, keeps_rest=True)
            middle = streams[len(streams) // 2]
            segment = middle["net_input"]["src_tokens"].to(device), middle["target"].to(device)
            things[name] = next_segment(model, *segment, mem_len)
        for name, timing in measure(things, ROUNDS, device=device).items():
            costs[name]["latency_milliseconds"] = spread([1000 * seconds for seconds in timing.samples])
        return costs

    def _evaluate(self, training: TrainingLoop, split: str, most: int | None = None) -> Evaluation:
        """With the lengths of training."""
        sizes = self.settings.sizes
        tokens = open_tokens(Path(self.settings.data) / split)[:most]
        lengths = {"tgt_len": sizes["tgt_len"], "mem_len": sizes["mem_len"], "batch_size": ROWS}
        lengths["item"] = item_length(self.settings.data)
        return evaluate(training.model, tokens, training.objective.dictionary.eos(), **lengths)
