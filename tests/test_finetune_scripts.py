"""``lazyformer finetune``, its scripts, and the old names of the same."""

import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest
from click.testing import CliRunner
from helpers import ROOT

from lazyformer_fairseq.cli import main
from lazyformer_fairseq.finetuning import commands
from lazyformer_fairseq.finetuning.settings import GridSettings


@pytest.mark.parametrize(
    ("words", "task"),
    [
        ("finetune-squad|m=model.pt|--data|my data|--output|out", "squad"),
        ("finetune|m=model.pt|--data|my data|--output|out", "glue"),
        ("glue|run|--checkpoint|m=model.pt|--data|my data|--output|out", "glue"),
        ("squad|run|--checkpoint|m=model.pt|--data|my data|--output|out", "squad"),
    ],
)
def test_old_and_new_words_ask_for_the_same_grid(words, task):
    asked = []
    with mock.patch.object(commands, "run_grid", lambda *given: asked.append(given)):
        done = CliRunner().invoke(main, [*words.split("|"), "--lrs", "3e-5", "1e-4", "--seeds", "1,2"])
    assert done.exit_code == 0, done.output
    ((found, settings),) = asked
    wanted = GridSettings(
        checkpoints=("m=model.pt",), data=Path("my data"), output=Path("out"), lrs=(3e-5, 1e-4), seeds=(1, 2)
    )
    assert (found, settings) == (task, wanted)


@pytest.mark.parametrize(
    ("script", "usage"),
    [
        ("finetune_glue.sh", "finetune [OPTIONS] CHECKPOINT..."),
        ("finetune_squad.sh", "finetune [OPTIONS] CHECKPOINT..."),
    ],
)
def test_the_script_is_the_command(script, usage):
    script = ["bash", str(ROOT / "scripts" / script)]
    path = {"PATH": f"{sys.prefix}/bin:/usr/bin:/bin"}
    done = subprocess.run([*script, "--help"], capture_output=True, text=True, env=path)
    assert done.returncode == 0 and usage in done.stdout
    done = subprocess.run(
        [*script, "model.pt", "--data", "data", "--output", "out", "--seeds", "1"],
        capture_output=True,
        text=True,
        env=path,
    )
    assert done.returncode == 1 and "no such" in done.stderr
