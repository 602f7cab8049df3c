import subprocess
import sys

import pytest
from click.testing import CliRunner

from lazyformer_fairseq.cli import main


def help_of(*command: str) -> str:
    return " ".join(CliRunner().invoke(main, [*command, "--help"]).output.split())


def test_help_names_commands_and_defaults():
    assert {"corpus", "demo"} <= set(help_of().split())
    assert "[default: results/demo]" in help_of("demo")
    assert "build" in help_of("corpus").split()
    assert "[default: 32768;" in help_of("corpus", "build") and "[default: 0.005;" in help_of("corpus", "build")


@pytest.mark.parametrize("group", ["", "bench", "corpus", "lm", "pattern"])
def test_a_group_lists_whole_sentences(group):
    listed = help_of(*group.split()).split("Commands: ")[1]
    assert "..." not in listed.replace(", ...", "") and listed.endswith(".")
    assert group != "lm" or "Measure perplexity per word, or bits per character, of CHECKPOINT over every" in listed


@pytest.mark.parametrize(("level", "expected"), [(None, "30 []"), ("INFO", "20 ['StreamHandler']")])
def test_importing_the_package_leaves_logging_to_who_imports_it(level, expected):
    configure = f"logging.basicConfig(level=logging.{level})" if level else "pass"
    look = "print(logging.root.level, [type(handler).__name__ for handler in logging.root.handlers])"
    code = f"import logging; {configure}; import lazyformer_fairseq; {look}"
    outcome = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (outcome.stdout.strip(), outcome.stderr) == (expected, "")
