"""Fixtures of SQuAD's tests."""

from pathlib import Path

import pytest
from toy_squad import write_toy_squad


@pytest.fixture(scope="session")
def toy_squad(tmp_path_factory) -> Path:
    return write_toy_squad(tmp_path_factory.mktemp("toy_squad"))
