"""The command `lazyformer compare`: what it refuses, and what its options come to."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from lazyformer_fairseq.cli import main
from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.experiments.compare import report
from lazyformer_fairseq.experiments.compare import run as comparison_run
from lazyformer_fairseq.experiments.compare.settings import CompareSettings


def call(*words: str):
    return CliRunner().invoke(main, ["compare", *words])


@pytest.fixture
def asked(monkeypatch):
    """What the command would compare."""
    found = []
    monkeypatch.setattr(report, "write_report", lambda *_: "")
    monkeypatch.setattr(comparison_run, "compare", lambda settings, *_: found.append(settings) or {})

    def ask(*words: str) -> CompareSettings:
        result = call(*words)
        assert result.exit_code == 0, result.output + str(result.exception)
        return found.pop()

    return ask


def test_defaults_of_the_tasks(asked, data_folder, lm_data, tmp_path):
    masked = asked(str(data_folder), str(tmp_path), "--task", "masked-lm", "--device", "cpu")
    assert masked.models == {"bert": "(sf)x6", "lazyformer": "M2x3"} and masked.baseline == "bert"
    assert (masked.updates, masked.budget, masked.seeds) == (None, 75, (1, 2, 3)) and masked.in_turn
    causal = asked(str(lm_data), str(tmp_path), "--task", "language-model", "--device", "cpu")
    assert next(iter(causal.models)) == "transformer_xl" and len(causal.models) == 4
    assert (causal.updates, causal.budget, causal.rates) == (2000, None, (3e-3,))
    assert causal.sizes["adaptive_softmax_cutoff"] == (2000, 10_000)


def test_options_reach_the_settings(asked, data_folder, tmp_path):
    words = "--task masked-lm --device cpu --model bert=sf --model fast=sff;ffn=48 --baseline fast --budget 2min"
    more = "--lr 1e-3,2e-3 --time-fractions 1,0.7 --alone --embed-dim 16 --post-norm --seeds 4 -- --weight-decay 0.01"
    found = asked(str(data_folder), str(tmp_path), *words.split(), *more.split())
    assert (found.baseline, found.budget, found.updates, found.seeds) == ("fast", 120, None, (4,))
    assert (found.rates, found.shares) == ((1e-3, 2e-3), (1, 0.7))
    assert not found.in_turn and not found.normalize_before and found.sizes["embed_dim"] == 16
    assert tuple(found.fairseq_options) == ("--weight-decay", "0.01")


def test_presets_stand_beside_models(asked, lm_data, tmp_path):
    words = ["--task", "language-model", "--presets", "16", "--model", "found=(sff)x4 (f)x4", "--device", "cpu"]
    found = asked(str(lm_data), str(tmp_path), *words)
    assert len(found.models) == 5 and found.models["found"] == "(sff)x4 (f)x4"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--model sfsf", "'sfsf' is no NAME=SPEC"),
        ("--model a=sf --model a=sff", "a is there twice"),
        ("--presets 12 --model bert=sf", "bert is a model already"),
        ("--presets 13", "masked-lm has 12, 24"),
        ("--updates 3 --budget 1min", "--updates or --budget, not both"),
        ("--budget soon", "'soon' is no time"),
        ("--seeds 1,1", "1 is there twice"),
        ("--time-fractions 0.5,x", "'x' is not a valid float"),
        ("--time-fractions 0.5,0.5", "there twice"),
        ("--lr 3", "3.0 is not in the range"),
        ("--mem-len 3", "--mem-len: means nothing for --task masked-lm"),
    ],
)
def test_wrong_options_are_named(options, message, data_folder, tmp_path):
    result = call(str(data_folder), str(tmp_path / "out"), "--task", "masked-lm", *options.split())
    assert result.exit_code in (1, 2) and message in f"{result.output} {result.exception}"
    assert not (tmp_path / "out").exists()


def test_a_pattern_that_cannot_be_read_claims_no_folder(data_folder, tmp_path):
    result = call(str(data_folder), str(tmp_path / "out"), "--task", "masked-lm", "--model", "mine=lf")
    assert isinstance(result.exception, UserError) and "no s below it" in str(result.exception)
    assert not (tmp_path / "out").exists()


def test_an_interrupt_leaves_a_line(monkeypatch, data_folder, tmp_path):
    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(comparison_run, "compare", interrupted)
    result = call(str(data_folder), str(tmp_path), "--task", "masked-lm", "--device", "cpu")
    assert result.exit_code == 130 and "stopped; rerun to resume" in result.output


def test_lm_compare_says_what_to_type():
    result = CliRunner().invoke(main, ["lm", "compare", "data", "out", "--pattern", "mine=sf"])
    assert result.exit_code == 1
    assert isinstance(result.exception, UserError)
    assert "lazyformer compare DATA OUT --task language-model" in str(result.exception)


def test_the_whole_command(data_folder, tmp_path):
    out: Path = tmp_path / "out"
    sizes = "--embed-dim 8 --ffn-embed-dim 8 --heads 2 --tokens-per-sample 16 --batch-size 2 --validation-tokens 32"
    words = ["--task", "masked-lm", "--updates", "1", "--seeds", "1", "--device", "cpu", "--points", "1"]
    result = call(str(data_folder), str(out), *words, "--model", "bert=sf", *sizes.split())
    assert result.exit_code == 0, result.exception
    assert json.loads((out / "results.json").read_text())["models"].keys() == {"bert"}
    assert "bert" in result.output and (out / "table.md").exists()
