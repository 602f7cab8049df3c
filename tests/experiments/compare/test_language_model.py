"""Comparisons of tiny causal language models: every token counts, latency in turn, the recipe reaches training."""

import json
import math
import signal
from pathlib import Path

import numpy as np
import pytest
import torch

from lazyformer_fairseq.data.datasets.token_streams import open_tokens
from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.experiments.compare.run import compare
from lazyformer_fairseq.experiments.compare.settings import CompareSettings, find_task
from lazyformer_fairseq.measure.stepwise import StepwiseTraining

MODELS = {"transformer_xl": "sfsf", "lazy": "sflf"}
TINY = {
    **{"embed_dim": 8, "ffn_embed_dim": 16, "heads": 2, "adaptive_softmax_cutoff": (20,), "batch_size": 3},
    **{"tgt_len": 6, "mem_len": 5},
}


def tiny(data: Path, sizes: dict | None = None, **changes) -> CompareSettings:
    row = find_task("language-model")
    given = {"device": "cpu", "data": str(data), "models": MODELS, "baseline": "transformer_xl", "updates": 4}
    given |= {"seeds": (1, 2)}
    given |= {"sizes": {**row.sizes, **TINY, **(sizes or {})}, "rates": (3e-3,), "validation_tokens": 200}
    return CompareSettings(**{"task": row.name, **given, **changes})


@pytest.fixture(scope="module")
def results(lm_data, tmp_path_factory) -> dict:
    folder = tmp_path_factory.mktemp("finished")
    compare(tiny(lm_data), folder, ["lazyformer", "compare", "toy"])
    return json.loads((folder / "results.json").read_text())


def command_of(settings: CompareSettings, rate: float, updates: int) -> list[str]:
    compared = settings.row.load(settings)
    return compared.command(settings.specs["lazy"], 1, rate, updates)


def test_every_token_of_both_splits_counts(results, lm_data):
    splits = json.loads((lm_data / "manifest.json").read_text())["splits"]
    for model in results["models"].values():
        for run in model["runs"].values():
            assert run["final"]["tokens"] == splits["valid"]["tokens"]
            assert run["final"]["test_tokens"] == splits["test"]["tokens"]
            assert run["final"]["perplexity"] == pytest.approx(2 ** run["final"]["loss"])
            assert run["curve"]["perplexity"][-1] < run["curve"]["perplexity"][0]
        assert model["latency_milliseconds"]["n"] == 50
    assert results["measure"] == {"name": "perplexity", "unit": "per word", "lower_is_better": True}
    assert results["models"]["lazy"]["flops"] < results["models"]["transformer_xl"]["flops"]
    assert results["machine"]["threads"] == torch.get_num_threads()
    tokens = open_tokens(lm_data / "test")
    nats = -np.mean([math.log(np.count_nonzero(tokens == token) / len(tokens)) for token in tokens])
    assert results["data"]["unigram_perplexity"]["test"] == pytest.approx(math.exp(nats))


def test_a_recipe_norms_and_the_rate_reach_training(lm_data):
    options = command_of(tiny(lm_data, recipe="nvidia", normalize_before=False), 0.02, 200)
    given = "--optimizer nvlamb --max-weight-norm 10 --lr-scheduler cosine --lr 0.02 --min-lr 0.002 --warmup-updates 5"
    words = [*given.split(), "--warmup-init-lr", "0"]
    assert all(options[options.index(name) + 1] == value for name, value in zip(words[::2], words[1::2], strict=True))
    assert "--no-bias-correction" in options and "--decoder-normalize-before" not in options
    decay = ["--weight-decay", "0.1"]
    assert options[-2:] != decay
    assert command_of(tiny(lm_data, fairseq_options=tuple(decay)), 0.02, 200)[-2:] == decay


def test_a_mistake_does_not_claim_the_folder(lm_data, tmp_path):
    with pytest.raises(UserError, match="3 attention heads"):
        compare(tiny(lm_data, {"heads": 3}), tmp_path, [])
    models = {"models": {"lazy": "sflf"}, "baseline": "lazy"}
    found = compare(tiny(lm_data, seeds=(1,), updates=1, **models), tmp_path, [])
    assert found["settings"]["sizes"]["heads"] == 2


def test_signals_are_for_who_drives_the_trainings(lm_data, tmp_path):
    before = signal.getsignal(signal.SIGTERM)
    StepwiseTraining(command_of(tiny(lm_data), 1e-3, 4), tmp_path).update()
    assert signal.getsignal(signal.SIGTERM) is before


@pytest.mark.parametrize(
    ("device", "precision", "option"),
    [("cpu", "fp32", "--cpu"), ("cuda", "bf16", "--bf16"), ("cuda", "fp16", "--fp16"), ("cuda", "fp32", None)],
)
def test_a_gpu_without_bf16_trains_in_fp16(lm_data, device, precision, option):
    words = command_of(tiny(lm_data, device=device, precision=precision), 1e-3, 4)
    assert {"--cpu", "--fp16", "--bf16"} & set(words) == ({option} if option else set())
