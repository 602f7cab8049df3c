"""The costs of running a comparison's models: parameters, FLOPs, and latency at batch 1, measured in turn."""

from pathlib import Path
from typing import Any

from fairseq.data import Dictionary
from torch import Tensor

from lazyformer_fairseq.costs.flops import count_flops, count_parameters
from lazyformer_fairseq.costs.latency import measure
from lazyformer_fairseq.costs.model_latency import next_segment
from lazyformer_fairseq.data.datasets.token_streams import TokenStreams, open_tokens
from lazyformer_fairseq.language_modeling.comparison.settings import ComparisonSettings
from lazyformer_fairseq.language_modeling.evaluate import load_model

ROUNDS = 50


def run_folder(runs: Path, name: str, seed: int) -> Path:
    """The folder of one model and seed."""
    return runs / f"{name}-seed{seed}"


def measure_costs(settings: ComparisonSettings, runs: Path) -> dict[str, dict[str, Any]]:
    """By model: `parameters`, `flops` of a segment, and `latency_seconds`, the samples.

    Times the scoring of a segment of the test split with a full memory, including its words beyond the first band,
    which FLOPs leave out.

    Args:
        settings: the lengths of evaluation count.
        runs: folder of the trained models; the last seed of each counts.
    """
    tgt_len, mem_len = settings.evaluation_tgt_len, settings.evaluation_mem_len
    costs, things = {}, {}
    for name in settings.patterns:
        checkpoint = run_folder(runs, name, settings.seeds[-1]) / "checkpoint_last.pt"
        model, task = load_model(checkpoint, Path(settings.data), settings.device, settings.precision)
        model.decoder.mem_len, model.decoder.clamp_len = mem_len, settings.clamp_len
        model.decoder.same_length = settings.same_length
        sizes, pattern = model.decoder.sizes, settings.patterns[name]
        costs[name] = {
            "parameters": count_parameters(pattern, sizes),
            "flops": count_flops(pattern, sizes, tgt_len, mem_len),
        }
        things[name] = next_segment(model, *_a_segment(settings, task.dictionary), mem_len)
    for name, timing in measure(things, ROUNDS, device=settings.device).items():
        costs[name]["latency_seconds"] = list(timing.samples)
    return costs


def _a_segment(settings: ComparisonSettings, dictionary: Dictionary) -> tuple[Tensor, Tensor]:
    """Tokens and targets (1, T) in the middle of the test split."""
    tokens = open_tokens(Path(settings.data) / "test")
    streams = TokenStreams(tokens, 1, settings.evaluation_tgt_len, dictionary.eos(), dictionary.pad(), keeps_rest=True)
    segment = streams[len(streams) // 2]
    return segment["net_input"]["src_tokens"].to(settings.device), segment["target"].to(settings.device)
