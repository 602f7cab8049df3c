"""Fixtures of SQuAD's tests: toy files and a checkpoint to start from."""

from pathlib import Path

import pytest
from helpers import ROOT
from toy_squad import write_toy_articles

START = ROOT / "tests" / "fixtures" / "checkpoint_of_0.1.0" / "checkpoint_last.pt"  # it has 64 positions
SIZES = ("--max-length", "64", "--stride", "16", "--max-question-length", "16")


@pytest.fixture(scope="session")
def toy_squad(tmp_path_factory) -> Path:
    return write_toy_articles(tmp_path_factory.mktemp("toy_squad"))
