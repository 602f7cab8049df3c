"""``scripts/finetune_glue.sh``: what it calls, and how it ends."""

import os
import subprocess

import pytest
from helpers import ROOT

SCRIPT = "scripts/finetune_glue.sh"


@pytest.fixture
def run(tmp_path):
    """``run(arguments, status)``: the script in a copy whose Python notes what it is given, and ends with `status`."""
    copy = tmp_path / SCRIPT
    copy.parent.mkdir()
    copy.write_bytes((ROOT / SCRIPT).read_bytes())
    copy.chmod(0o755)

    def call(*arguments: str, status: int = 0) -> tuple[subprocess.CompletedProcess, list[str]]:
        python = tmp_path / "bin" / "python3"
        python.parent.mkdir(exist_ok=True)
        python.write_text(f'#!/bin/sh\nfor word; do echo "$word"; done >>{tmp_path}/call\nexit {status}\n')
        python.chmod(0o755)
        path = f"{python.parent}:{os.environ['PATH']}"
        done = subprocess.run([copy, *arguments], capture_output=True, text=True, env={**os.environ, "PATH": path})
        call = tmp_path / "call"
        return done, call.read_text().splitlines() if call.exists() else []

    return call


@pytest.mark.parametrize("status", [0, 1, 130])
def test_it_is_one_call_and_ends_as_that_does(run, status):
    done, call = run("m=model.pt", "my glue", "out", "--tasks", "CoLA", "RTE", status=status)
    assert call[:4] == ["-m", "lazyformer_fairseq.cli", "glue", "run"]
    assert call[4:10] == ["--checkpoint", "m=model.pt", "--data", "my glue", "--output", "out"]
    assert call[10:] == ["--tasks", "CoLA", "RTE"]
    assert done.returncode == status


def test_it_explains_itself(run):
    done, call = run("--help")
    assert done.returncode == 0
    assert "usage: scripts/finetune_glue.sh CHECKPOINT GLUE_DATA OUT" in done.stdout
    done, call = run("model.pt", "--tasks", "CoLA")
    assert done.returncode == 2
    assert not call
