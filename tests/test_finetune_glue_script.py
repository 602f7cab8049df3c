"""``lazyformer finetune``, by scripts/finetune_glue.sh: the call of ``lazyformer glue run`` that it is."""

import subprocess
import sys
from unittest import mock

import click
import pytest
from click.testing import CliRunner
from helpers import ROOT

from lazyformer_fairseq.cli import glue, main


@pytest.fixture
def given(tmp_path) -> dict:
    """What ``glue run`` is given by a call of ``finetune``, which then ends with status 3."""
    (tmp_path / "my glue").mkdir()
    (tmp_path / "model.pt").touch()
    options = {}

    def run(**params) -> None:
        options.update(params)
        raise click.exceptions.Exit(3)

    words = f"m={tmp_path}/model.pt|{tmp_path}/my glue|out|--tasks|CoLA|RTE|--seeds|1,2".split("|")
    with mock.patch.object(glue.commands["run"], "callback", run):
        assert CliRunner().invoke(main, ["finetune", *words]).exit_code == 3
    return options


def test_it_is_one_call_and_ends_as_that_does(given, tmp_path):
    assert given["checkpoints"] == {"m": tmp_path / "model.pt"} and given["data"] == tmp_path / "my glue"
    assert (str(given["output"]), given["tasks"], given["seeds"]) == ("out", ("CoLA", "RTE"), (1, 2))


def test_the_script_is_the_command():
    script = ["bash", str(ROOT / "scripts" / "finetune_glue.sh")]
    path = {"PATH": f"{sys.prefix}/bin:/usr/bin:/bin"}
    done = subprocess.run([*script, "--help"], capture_output=True, text=True, env=path)
    assert done.returncode == 0 and "finetune [OPTIONS] CHECKPOINT GLUE_DATA OUT" in done.stdout
    done = subprocess.run([*script, "model.pt", "--tasks", "CoLA"], capture_output=True, text=True, env=path)
    assert done.returncode == 1 and "no such" in done.stderr
