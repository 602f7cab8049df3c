"""Fixtures of SQuAD's tests."""

from pathlib import Path

import pytest
from squad_grids import write_articles


@pytest.fixture(scope="session")
def toy_squad(tmp_path_factory) -> Path:
    return write_articles(tmp_path_factory.mktemp("toy_squad"))
