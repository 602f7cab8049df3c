"""A command names the extra that it lacks, in one line and before it starts."""

from importlib import metadata

import pytest
from click.testing import CliRunner

from lazyformer_fairseq import extras
from lazyformer_fairseq.cli import main
from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.finetuning.queue import Cluster

REQUIRED = [
    "torch>=2.6",
    'not-there<2,>=1; extra == "corpus"',
    'not_there.too; extra == "corpus"',
    'click; extra == "corpus"',
    "not-there-either; platform_system == 'Linux' and extra == 'huggingface'",
    "nor-this; extra == 'cluster'",
]


@pytest.fixture(autouse=True)
def metadata_of_a_package(monkeypatch):
    monkeypatch.setattr(metadata, "requires", lambda package: REQUIRED)


@pytest.mark.parametrize(
    ("command", "missing"),
    [
        ("corpus . out", "lazyformer corpus needs not-there, not_there.too, not installed here"),
        ("demo", "lazyformer demo needs not-there, not_there.too"),
        ("export . out --to huggingface", r"needs not-there-either.*lazyformer_fairseq\[huggingface\]"),
    ],
)
def test_a_command_says_what_it_lacks(command, missing):
    with pytest.raises(UserError, match=missing):
        CliRunner().invoke(main, command.split(), catch_exceptions=False)


def test_so_does_an_executor(tmp_path):
    with pytest.raises(UserError, match="--slurm needs nor-this"):
        Cluster("slurm", tmp_path, {}, None)


def test_help_needs_nothing():
    assert CliRunner().invoke(main, ["corpus", "build", "--help"]).exit_code == 0


def test_what_is_there_or_unknown_is_not_missing(monkeypatch):
    assert extras.missing_packages("bench") == []

    def not_installed(package):
        raise metadata.PackageNotFoundError

    monkeypatch.setattr(metadata, "requires", not_installed)
    assert extras.missing_packages("corpus") == []
