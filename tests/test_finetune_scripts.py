"""``lazyformer finetune`` and ``finetune-squad``, by their scripts: calls of ``glue run`` and ``squad run``."""

import subprocess
import sys
from unittest import mock

import click
import pytest
from click.testing import CliRunner
from helpers import ROOT

from lazyformer_fairseq.cli import glue, main, squad


@pytest.mark.parametrize(
    ("command", "group", "option"),
    [("finetune", glue, ("tasks", "CoLA|RTE", ("CoLA", "RTE"))), ("finetune-squad", squad, ("lrs", "3e-5", (3e-5,)))],
)
def test_it_is_one_call_and_ends_as_that_does(tmp_path, command, group, option):
    (tmp_path / "my data").mkdir()
    (tmp_path / "model.pt").touch()
    given = {}

    def run(**params) -> None:
        given.update(params)
        raise click.exceptions.Exit(3)

    name, value, read = option
    words = f"m={tmp_path}/model.pt|{tmp_path}/my data|out|--{name}|{value}|--seeds|1,2".split("|")
    with mock.patch.object(group.commands["run"], "callback", run):
        assert CliRunner().invoke(main, [command, *words]).exit_code == 3
    assert given["checkpoints"] == {"m": tmp_path / "model.pt"} and given["data"] == tmp_path / "my data"
    assert (str(given["output"]), given[name], given["seeds"]) == ("out", read, (1, 2))


@pytest.mark.parametrize(
    ("script", "usage"),
    [
        ("finetune_glue.sh", "finetune [OPTIONS] CHECKPOINT GLUE_DATA OUT"),
        ("finetune_squad.sh", "finetune-squad [OPTIONS] CHECKPOINT SQUAD_DATA OUT"),
    ],
)
def test_the_script_is_the_command(script, usage):
    script = ["bash", str(ROOT / "scripts" / script)]
    path = {"PATH": f"{sys.prefix}/bin:/usr/bin:/bin"}
    done = subprocess.run([*script, "--help"], capture_output=True, text=True, env=path)
    assert done.returncode == 0 and usage in done.stdout
    done = subprocess.run([*script, "model.pt", "--seeds", "1"], capture_output=True, text=True, env=path)
    assert done.returncode == 1 and "no such" in done.stderr
