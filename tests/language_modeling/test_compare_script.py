"""``scripts/compare_language_models.sh``: what it calls, with and without a GPU."""

import os
import shlex
import subprocess
from pathlib import Path

from helpers import ROOT

from lazyformer_fairseq.experiments.compare.commands import run as compare_run


def test_on_a_cpu_it_is_the_command_itself_and_on_a_gpu_it_trains_eight_minutes(tmp_path, monkeypatch):
    """The script runs in a copy whose Python prints what it is given."""
    for name in ("data", "my data"):  # the command looks for its data before all else
        (tmp_path / "here" / name).mkdir(parents=True)
        (tmp_path / "here" / name / "manifest.json").touch()
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    script, python = tmp_path / "scripts" / "compare_language_models.sh", tmp_path / "bin" / "python3"
    for path in (script, python):
        path.parent.mkdir()
    for name in ("common.sh", script.name):
        script.with_name(name).write_bytes((ROOT / "scripts" / name).read_bytes())

    def run(arguments: str, gpu: bool = False) -> subprocess.CompletedProcess:
        count = f"if [ $2 = lazyformer_fairseq.executors.nvidia_smi ]; then echo {int(gpu)}; exit; fi"
        python.write_text(f'#!/bin/sh\n{count}\nfor word; do echo "$word"; done\n')
        python.chmod(0o755)
        return subprocess.run(["bash", script, *shlex.split(arguments)], capture_output=True, text=True)

    def options_of(arguments: str, gpu: bool = False) -> dict:
        """What `lazyformer compare` reads from the call."""
        words = run(arguments, gpu).stdout.splitlines()
        assert words[:3] == ["-m", "lazyformer_fairseq.cli", "compare"]
        return compare_run.make_context("compare", words[3:]).params

    options = options_of("'my data' out --seeds 1")
    assert (options["task"], options["data"], options["out"]) == ("language-model", "my data", Path("out"))
    assert options["seeds"] == (1,) and options["device"] is None and options["presets"] is None
    options = options_of("data out --embed-dim 512", gpu=True)
    assert (options["device"], options["budget"], options["updates"]) == ("cuda", 480, None)
    assert options["presets"] == 32 and options["embed_dim"] == 512, "options that follow win"
    options = options_of("data out --updates=7", gpu=True)
    assert (options["updates"], options["budget"]) == (7, None), "in the place of a budget"
    assert "usage: scripts/compare_language_models.sh DATA OUT" in run("--help").stdout
    done = run("data")
    assert done.returncode == 2 and done.stderr.startswith("error: pass DATA and OUT first")
