"""``scripts/finetune_glue.sh``: what it calls, and how it ends."""

import os
import subprocess
from pathlib import Path

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
        python.write_text(
            f'#!/bin/sh\necho "$@" >>{tmp_path}/calls\ncase "$*" in *" run "*) mkdir -p {tmp_path}/out/runs; '
            f"touch {tmp_path}/out/runs/grid.json; exit {status};; esac\n"
        )
        python.chmod(0o755)
        path = f"{python.parent}:{os.environ['PATH']}"
        done = subprocess.run([copy, *arguments], capture_output=True, text=True, env={**os.environ, "PATH": path})
        calls = tmp_path / "calls"
        return done, calls.read_text().splitlines() if calls.exists() else []

    return call


def given(tmp_path: Path) -> list[str]:
    return ["m=model.pt", "glue_data", str(tmp_path / "out"), "--tasks", "CoLA"]


@pytest.mark.parametrize("status", [0, 1])
def test_a_report_follows_even_where_runs_have_failed(run, tmp_path, status):
    done, calls = run(*given(tmp_path), status=status)
    shared = "-m lazyformer_fairseq.cli glue"
    out = tmp_path / "out"
    assert calls == [
        f"{shared} run --checkpoint m=model.pt --data glue_data --output {out} --tasks CoLA",
        f"{shared} report {out}",
    ]
    assert done.returncode == status


def test_stopped_it_reports_nothing(run, tmp_path):
    done, calls = run(*given(tmp_path), status=130)
    assert (done.returncode, len(calls)) == (130, 1)


def test_it_explains_itself(run):
    done, calls = run("--help")
    assert done.returncode == 0
    assert "usage: scripts/finetune_glue.sh CHECKPOINT GLUE_DATA OUT" in done.stdout
    done, calls = run("model.pt", "--tasks", "CoLA")
    assert done.returncode == 2
    assert not calls
