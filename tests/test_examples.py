"""The examples in scripts/examples run: the cells of the notebook in order, the scripts at tiny size."""

import json
import os
import re
import runpy
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from comparison_results import a_model, a_run, results_of
from helpers import ROOT, toy_texts, write_lines

from lazyformer_fairseq import load
from lazyformer_fairseq.experiments.folder import RESULTS
from lazyformer_fairseq.modules.networks.encoder import Encoder
from lazyformer_fairseq.patterns import kinds
from lazyformer_fairseq.storage.json_files import write_json

EXAMPLES = ROOT / "scripts" / "examples"
PRETRAINED = ROOT / "tests" / "fixtures" / "checkpoints" / "m2x2"
TINY = "--embed-dim 8 --ffn-embed-dim 16 --heads 2 --tokens-per-sample 16 --batch-size 4 --validation-tokens 100"


def run_cell(source: str, names: dict[str, Any], environment: dict[str, str]) -> str:
    """Run a code cell as Jupyter does: lines behind ``!`` by a shell, their ``{names}`` replaced. Return its output."""
    printed = []
    python: list[str] = []
    for line in [*source.replace("\\\n", " ").splitlines(), "!true"]:
        if not line.startswith("!"):
            python.append(line)
            continue
        exec("\n".join(python), names)
        python.clear()
        done = subprocess.run(line[1:].format_map(names), shell=True, capture_output=True, text=True, env=environment)
        assert done.returncode == 0, f"{line}\n{done.stderr[-3000:]}"
        printed.append(done.stdout)
    return "".join(printed)


@pytest.mark.slow
def test_the_notebook(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    notebook = json.loads((EXAMPLES / "first_model.ipynb").read_text())
    names: dict[str, Any] = {}
    printed = []
    for cell in notebook["cells"]:
        text = "".join(cell["source"])
        if cell["cell_type"] == "code":
            printed.append(run_cell(text, names, environment))
            names["seconds"] = 4
        for picture in re.findall(r"!\[.*\]\((.*)\)", text):
            assert Path(picture).is_file()
    assert "origin: 2 classes (language, library)" in "".join(printed)
    said = capsys.readouterr().out
    assert len(re.findall(r"^\d+%  \S+", said, re.MULTILINE)) == 5 + 2, "fillings of a mask, and labels"


def test_of_models_that_tried_several_rates_the_best_training_of_each_goes_on(tmp_path, capsys):
    """scripts/examples/babylm.sh evaluates these: each under a name of its own."""
    runs = {"1": a_run([9.0, 8.0]), "2": a_run([9.0, 7.0])}
    models = {"bert": a_model(runs, "bert", rate=2e-3), "lazy": a_model({"1": runs["1"]}, "lazy", rate=0.01)}
    write_json(tmp_path / "models" / RESULTS, results_of(models, "bert"))
    runpy.run_path(str(EXAMPLES / "babylm_table.py"))["print_trained"](tmp_path)
    folder = tmp_path / "models" / "runs"
    assert capsys.readouterr().out.splitlines() == [
        f"bert-seed1={folder}/bert-seed1-rate0.002/checkpoint_last.pt",
        f"bert-seed2={folder}/bert-seed2-rate0.002/checkpoint_last.pt",
        f"lazy-seed1={folder}/lazy-seed1-rate0.01/checkpoint_last.pt",
    ]


@pytest.fixture
def run(tmp_path, warm_python):
    """``run("python scripts/examples/...")``: in a checkout without a .venv; return what the command prints."""
    for name in ("lazyformer_fairseq", "configs", "scripts", "tests"):
        (tmp_path / name).symlink_to(ROOT / name)
    environment = {**os.environ, "PATH": f"{warm_python}:{os.environ['PATH']}", "PYTHONPATH": str(tmp_path)}

    def run(command: str, **variables: str) -> str:
        words = shlex.split(command)
        done = subprocess.run(words, cwd=tmp_path, env=environment | variables, capture_output=True, text=True)
        assert done.returncode == 0, f"{command}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
        return done.stdout

    return run


def predictions_in(file: Path) -> list[str]:
    """The column `prediction` of a file that ``lazyformer predict`` wrote."""
    lines = file.read_text().splitlines()
    assert lines[0].split("\t") == ["text", "prediction", "probability"]
    return [line.split("\t")[1] for line in lines[1:]]


def test_labels_of_your_own(tmp_path, run):
    for name, count in (("train", 8), ("dev", 4)):
        labels = ["happy", "sad"] * (count // 2)
        rows = [f"{text.splitlines()[0]}\t{label}" for text, label in zip(toy_texts(count), labels, strict=True)]
        write_lines(tmp_path / "moods" / f"{name}.tsv", ["text\tlabel", *rows])
    write_lines(tmp_path / "texts.txt", ["Anna sees Ben.", "Ben sees Anna.", "Cara walks."])
    tiny = "--lrs 1e-3 --seeds 1 --epochs 1 --gpus none"
    run(f"scripts/examples/finetune_labels.sh out {PRETRAINED} moods texts.txt {tiny}")
    predictions = predictions_in(tmp_path / "out" / "predictions.tsv")
    assert len(predictions) == 3
    assert set(predictions) <= {"happy", "sad"}
    assert load(tmp_path / "out" / "model").predict(["Anna sees Ben."])[0].label == predictions[0]


@pytest.mark.slow
def test_the_labels_that_the_script_makes_are_learned(tmp_path, run):
    run("scripts/examples/finetune_labels.sh out")
    assert predictions_in(tmp_path / "out" / "predictions.tsv") == ["outdoors", "indoors"]


def test_a_sublayer_of_your_own(tmp_path, run):
    example = "scripts/examples/custom_sublayer.py"
    shown = run(f"python {example} {PRETRAINED / 'data'} out {TINY} --budget 0.1s")
    assert "| global mean |" in shown
    commands_know_it = {"PYTHONPATH": f"{tmp_path}:{EXAMPLES}", "LAZYFORMER_KINDS": "custom_sublayer"}
    assert "global mean" in run("lazyformer pattern show '(gf)x3 sf' --heads 2", **commands_know_it)


def test_padding_does_not_count_in_its_mean(monkeypatch):
    monkeypatch.setattr(kinds, "_TABLE", dict(kinds._TABLE))
    runpy.run_path(str(EXAMPLES / "custom_sublayer.py"))
    encoder = Encoder("g", 17, 8, 12, 2, 16, padding_idx=1).eval()
    tokens = torch.randint(2, 17, (1, 6))
    padded = torch.cat([tokens, torch.ones(1, 3, dtype=torch.long)], 1)
    alone, _ = encoder(tokens)
    beside_padding, _ = encoder(padded, padded.eq(1))
    torch.testing.assert_close(beside_padding[:, :6], alone)
    changed = tokens.clone()
    changed[:, 5] = (tokens[:, 5] + 1) % 15 + 2
    assert not torch.allclose(encoder(changed)[0][:, 0], alone[:, 0]), "every token reads the others"


def test_the_trainer_of_transformers(tmp_path, run):
    data = PRETRAINED / "data"
    shown = run(f"python scripts/examples/train_with_transformers.py {data} out --pattern M2 --updates 2")
    assert re.search(r"^\d\.\d\d nats or \d\.\d\d bits per masked token$", shown, re.MULTILINE)
    assert json.loads((tmp_path / "out" / "config.json").read_text())["sublayer_pattern"] == "M2"


COMPARED = r"^\| one .*\n\| other "


def test_two_patterns(tmp_path, run):
    write_lines(tmp_path / "texts" / "toy.txt", ["\n\n".join(toy_texts(150))])
    compare = f"scripts/examples/compare_patterns.sh out texts sf '(f)x2' {TINY}"
    shown = run(f"{compare} --updates 3", VOCAB_SIZE="160")
    assert re.search(COMPARED, shown, re.MULTILINE)
    assert (tmp_path / "out" / "models" / "curves.png").is_file()


@pytest.mark.slow
def test_two_patterns_on_the_prose_of_python(run):
    assert re.search(
        COMPARED, run(f"scripts/examples/compare_patterns.sh out '' '(sf)x2' M2 {TINY} --budget 1s"), re.MULTILINE
    )
