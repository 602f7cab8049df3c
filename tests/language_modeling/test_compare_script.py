"""``scripts/compare_language_models.sh``: what it calls, with and without a GPU."""

import os
import subprocess
from pathlib import Path

import pytest
from helpers import ROOT

from lazyformer_fairseq.experiments.compare.commands import run as compare_run


@pytest.fixture(autouse=True)
def prepared_folders(tmp_path, monkeypatch):
    """The command looks for its data before all else."""
    for name in ("data", "my data"):
        (tmp_path / "here" / name).mkdir(parents=True)
        (tmp_path / "here" / name / "manifest.json").touch()
    monkeypatch.chdir(tmp_path / "here")


@pytest.fixture
def run(tmp_path):
    """``run(arguments, gpu)``: the script in a copy whose Python prints what it is given."""
    (tmp_path / "scripts").mkdir()
    (tmp_path / "bin").mkdir()
    name = "compare_language_models.sh"
    (tmp_path / "scripts" / name).write_bytes((ROOT / "scripts" / name).read_bytes())

    def program(name: str, script: str) -> None:
        path = tmp_path / "bin" / name
        path.write_text(f"#!/bin/sh\n{script}\n")
        path.chmod(0o755)

    def call(*arguments: str, gpu: bool = False) -> subprocess.CompletedProcess:
        count = f"if [ $2 = lazyformer_fairseq.devices.nvidia_smi ]; then echo {int(gpu)}; exit; fi"
        program("python3", f'{count}\nfor word; do echo "$word"; done')
        environment = {**os.environ, "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}"}
        script = tmp_path / "scripts" / "compare_language_models.sh"
        return subprocess.run(["bash", script, *arguments], capture_output=True, text=True, env=environment)

    return call


def options_of(done: subprocess.CompletedProcess) -> dict:
    """What `lazyformer compare` reads from the call."""
    words = done.stdout.splitlines()
    assert words[:3] == ["-m", "lazyformer_fairseq.cli", "compare"]
    options = compare_run.make_context("compare", words[3:]).params
    assert options["task"] == "language-model"
    return options


def test_on_a_cpu_it_is_the_command_itself(run):
    options = options_of(run("my data", "out", "--seeds", "1"))
    assert (options["data"], options["out"]) == ("my data", Path("out"))
    assert options["seeds"] == (1,) and options["device"] is None and options["presets"] is None


def test_on_a_gpu_it_trains_eight_minutes(run):
    options = options_of(run("data", "out", "--embed-dim", "512", gpu=True))
    assert (options["device"], options["budget"], options["updates"]) == ("cuda", 480, None)
    assert options["presets"] == 32 and options["embed_dim"] == 512, "options that follow win"


def test_updates_take_the_place_of_a_budget(run):
    options = options_of(run("data", "out", "--updates", "7", gpu=True))
    assert (options["updates"], options["budget"]) == (7, None)


def test_it_explains_itself(run):
    assert "usage: scripts/compare_language_models.sh DATA OUT" in run("--help").stdout
    done = run("data")
    assert done.returncode == 2 and done.stderr.startswith("error: give DATA and OUT first")
