"""PAR Transformer's steps are commands that the real parsers take; its page has the paper's numbers beside ours."""

import json
from pathlib import Path

import pytest
from in_process import parser_of, refusal, settings_of
from reproductions import record, rows_of

from lazyformer_fairseq.experiments.reproduce.engine import CLI, Step
from lazyformer_fairseq.experiments.reproduce.par import (
    CORPORA,
    PAPER,
    TINY,
    find_inputs,
    list_steps,
    reproduction,
    write_texts,
)
from lazyformer_fairseq.language_modeling.prepare import prepare
from lazyformer_fairseq.patterns.architectures import CAUSAL_ARCHITECTURES

SIZES = pytest.mark.parametrize("size", [PAPER, TINY], ids=["paper", "tiny"])


@pytest.fixture
def raw(tmp_path) -> Path:
    """Texts as they are distributed, except one that is prepared already."""
    for name in CORPORA:
        (tmp_path / "raw" / name).mkdir(parents=True)
    (tmp_path / "raw" / "text8" / "manifest.json").write_text("{}")
    return tmp_path / "raw"


def steps_of(raw: Path, size, out: Path) -> dict[str, Step]:
    return {step.name: step for step in list_steps(size, find_inputs(str(raw), size, out), out)}


@SIZES
def test_the_real_parsers_take_every_command(raw, tmp_path, size, monkeypatch):
    parsed = parser_of(monkeypatch, "lm prepare", "lm evaluate", "search run", "bench models")
    found = steps_of(raw, size, tmp_path / "out")
    assert "prepare_text8" not in found
    assert found["prepare_enwik8"].command[3] == ("wikitext" if size is TINY else "enwik8")
    for step in found.values():
        assert set(step.needs) <= found.keys() and step.command[0] == CLI
        part, words = step.name.partition("_")[0], step.command[1:]
        if part in ("test", "valid"):
            checkpoint, data = map(Path, words[2:4])
            checkpoint.parent.mkdir(parents=True, exist_ok=True)
            checkpoint.touch()
            data.mkdir(parents=True, exist_ok=True)
            (data / "manifest.json").touch()
            assert parsed(words)["split"] == part
        elif part != "train":
            parsed(words)


@pytest.mark.parametrize(
    ("name", "size", "updates", "lengths"),
    [
        ("par_transformer_base_7s_sff", PAPER, 40_000, "base"),
        ("sandwich_transformer_large", PAPER, 100_000, "large"),
        ("par_transformer_24b_text8", PAPER, 40_000, "24b"),
        ("transformer_xl_base_longer", TINY, 120, ""),
    ],
    ids=lambda each: each if isinstance(each, str) else "",
)
def test_trainings_are_the_papers(raw, tmp_path, name, size, updates, lengths):
    """Each training has the paper's pattern, updates and lengths of evaluation; a miniature has small ones."""
    found = steps_of(raw, size, tmp_path)
    step, arch = found[f"train_{name}"], name.removesuffix("_longer").removesuffix("_text8")
    cfg = settings_of(*step.command[2:], "--gpus", "1", "--max-restarts", "0")
    assert cfg.model.sublayer_pattern == CAUSAL_ARCHITECTURES[arch].sublayer_pattern
    assert cfg.optimization.max_update == updates
    assert step.output.name == f"checkpoint_update_{cfg.optimization.max_update}.pt"
    evaluation = found[f"{'valid' if 'longer' in name else 'test'}_{name}"].command
    assert evaluation[evaluation.index("--lengths") + 1] == lengths if size is PAPER else "--tgt-len" in evaluation
    assert f"test_{name}" in found or "longer" in name


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            "nowhere out",
            "nowhere lacks wikitext-103, enwik8, text8; run scripts/prepare_wikitext103.sh",
        ),
        ("demo out", "demo: this text is only about a megabyte long and works only with --tiny"),
        ("raw out --steps serch", "--steps serch: no such step; did you mean search"),
        ("raw out --report", "no step is done yet"),
    ],
)
def test_a_refusal_names_what_is_missing(raw, tmp_path, monkeypatch, words, message):
    monkeypatch.chdir(tmp_path)
    assert message in refusal("reproduce", "par", *words.split())


@pytest.mark.slow
def test_pythons_prose_becomes_three_texts(tmp_path):
    write_texts(tmp_path / "raw")
    for name in CORPORA:
        manifest = prepare("wikitext", tmp_path / "raw" / name, tmp_path / name)
        assert (
            manifest["splits"]["test"]["tokens"] in range(2_000, 4_002) and manifest["splits"]["train"]["tokens"] > 1e5
        )
    assert manifest["vocabulary"] < 60  # letters


def test_the_papers_numbers_stand_beside_ours(raw, tmp_path):
    out = tmp_path / "out"
    for name, split, numbers in (
        ("par_transformer_base", "test", {"perplexity": 22.91}),
        ("par_transformer_base", "valid", {"perplexity": 23.44}),
        ("par_transformer_base_longer", "valid", {"perplexity": 22.61}),
        ("par_transformer_24b_text8", "test", {"bits_per_token": 1.1849, "tgt_len": 80, "tokens_per_second": 8000.0}),
    ):
        file = out / "training" / name / f"{split}.json"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps({"bits_per_token": 4.5, "tgt_len": 64, **numbers}))
    rows = [
        {"model": arch, "seconds": {"median": seconds, "low": seconds, "high": seconds, "n": 3}}
        for arch, seconds in (("transformer_xl_base", 0.02), ("par_transformer_base", 0.013))
    ]
    (out / "bench").mkdir()
    (out / "bench" / "results.json").write_text(json.dumps({"cells": [{"workload": "causal", "rows": rows}]}))
    record(out, "bench")
    reproduction(PAPER, find_inputs(str(raw), PAPER, out), out).report(out)
    page = (out / "report" / "report.md").read_text()
    assert rows_of(page, "| 6   | `(sfff)x6 (f)x8`")[0][2:] == ["22.9", "22.7"]
    assert rows_of(page, "| 16  | `(sf)x16`")[0][2:] == ["-", "22.7"]
    [par] = rows_of(page, "| PAR Transformer Base      |")[:1]
    assert par[3:] == ["9.9", "0.65", "0.65", "22.9", "22.7", "200M", "200M", "16.2", "17"]
    assert rows_of(page, "| text8        | PAR")[0][3:] == ["10.0", "8.4", "1.185", "1.18"]
    assert rows_of(page, "| PAR Transformer Base      |")[-1][1:] == ["23.4", "23.3", "22.6", "22.4"]
    for step in ("search", "train_*"):
        assert f"No results yet from `{step}`." in page
    assert "0.500" in [row[-1] for row in rows_of(page, "| bench ")]
