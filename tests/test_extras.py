"""A command names the extra that it lacks, in one line and before it starts."""

from importlib import metadata
from unittest import mock

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


@pytest.mark.parametrize(
    ("command", "missing"),
    [
        ("corpus . out", "lazyformer corpus needs not-there, not_there.too, not installed here"),
        ("demo", "lazyformer demo needs not-there, not_there.too"),
        ("export . out --to huggingface", r"needs not-there-either.*lazyformer_fairseq\[huggingface\]"),
        ("an executor", "--slurm needs nor-this"),
    ],
)
def test_a_command_says_what_it_lacks_and_help_needs_nothing(command, missing, tmp_path, monkeypatch):
    monkeypatch.setattr(metadata, "requires", lambda package: REQUIRED)
    with pytest.raises(UserError, match=missing):
        if command == "an executor":
            Cluster("slurm", tmp_path, {}, None)
        CliRunner().invoke(main, command.split(), catch_exceptions=False)
    assert CliRunner().invoke(main, ["corpus", "build", "--help"]).exit_code == 0
    assert extras.missing_packages("bench") == [], "what is unknown is not missing"
    with mock.patch.object(metadata, "requires", side_effect=metadata.PackageNotFoundError):
        assert extras.missing_packages("corpus") == []
