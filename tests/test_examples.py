"""The examples in scripts/examples: the notebook's cells run one after the other, the script goes its whole way."""

import json
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from comparison_results import a_model, a_run, results_of
from helpers import ROOT

from lazyformer_fairseq.experiments.folder import RESULTS
from lazyformer_fairseq.storage.json_files import write_json

EXAMPLES = ROOT / "scripts" / "examples"


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
    assert "origin: 2 classes, language, library" in "".join(printed)
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
