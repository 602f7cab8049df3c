"""The command ``lazyformer``: its help, its launchers in scripts/, words that ask for a grid of fine-tunings."""

import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest
from click.testing import CliRunner
from helpers import ROOT, run_script

from lazyformer_fairseq.cli import main
from lazyformer_fairseq.finetuning import commands
from lazyformer_fairseq.finetuning.settings import GridSettings

LAUNCHERS = sorted(path.name for path in (ROOT / "scripts").glob("*.sh") if '/lazyformer.sh"' in path.read_text())
USAGE = {
    **dict.fromkeys(("pretrain", "continue", "train"), "pretrain [OPTIONS] ARCH DATA"),
    **{"finetune": "finetune [OPTIONS] CHECKPOINT...", "reproduce": "reproduce [OPTIONS] RAW OUT"},
}


def help_of(*command: str) -> str:
    return " ".join(CliRunner().invoke(main, [*command, "--help"]).output.split())


def test_help_names_commands_and_defaults():
    assert {"corpus", "demo"} <= set(help_of().split())
    assert "[default: results/demo]" in help_of("demo")
    assert "build" in help_of("corpus").split()
    assert "[default: 32768;" in help_of("corpus", "build") and "[default: 0.005;" in help_of("corpus", "build")
    for group in ("", "bench", "corpus", "lm", "pattern"):
        listed = help_of(*group.split()).split("Commands: ")[1]
        assert "..." not in listed.replace(", ...", "") and listed.endswith("."), "whole sentences"
        assert group != "lm" or "Measure perplexity per word, or bits per character, of CHECKPOINT over every" in listed


@pytest.mark.parametrize(("level", "expected"), [(None, "30 []"), ("INFO", "20 ['StreamHandler']")])
def test_importing_the_package_leaves_logging_to_who_imports_it(level, expected):
    configure = f"logging.basicConfig(level=logging.{level})" if level else "pass"
    look = "print(logging.root.level, [type(handler).__name__ for handler in logging.root.handlers])"
    code = f"import logging; {configure}; import lazyformer_fairseq; {look}"
    outcome = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (outcome.stdout.strip(), outcome.stderr) == (expected, "")


def test_a_script_is_its_command():
    assert len(LAUNCHERS) >= 6
    path = {"PATH": f"{sys.prefix}/bin:/usr/bin:/bin"}
    for name in LAUNCHERS:
        done = run_script(name, "--help", env=path)
        assert (done.returncode, done.stderr) == (0, "") and USAGE[name.split("_")[0].split(".")[0]] in done.stdout
        if name.startswith("finetune"):
            done = run_script(name, *"model.pt --data data --output out --seeds 1".split(), env=path)
            assert done.returncode == 1 and "no such" in done.stderr


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
    with mock.patch.object(commands, "run_grid") as run_grid:
        done = CliRunner().invoke(main, [*words.split("|"), "--lrs", "3e-5", "1e-4", "--seeds", "1,2"])
    assert done.exit_code == 0, done.output
    wanted = GridSettings(
        checkpoints=("m=model.pt",), data=Path("my data"), output=Path("out"), lrs=(3e-5, 1e-4), seeds=(1, 2)
    )
    run_grid.assert_called_once_with(task, wanted)
