"""The package of ``docs/add_a_kind.md``, whose row is in the table while a test wants it."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from my_kinds import LOCAL_MEAN
from my_kinds.local_mean import LocalMean  # noqa: F401 (for tests)

from lazyformer_fairseq.patterns.kinds import _TABLE, Kind, register

_TABLE.pop(LOCAL_MEAN.letter)


@contextmanager
def registered(kind: Kind) -> Iterator[Kind]:
    """The row is in the table for as long as the block lasts."""
    try:
        yield register(kind)
    finally:
        _TABLE.pop(kind.letter)


@pytest.fixture(autouse=True)
def registered_local_mean():
    """For each test of a file that imports it, the kind is in the table."""
    with registered(LOCAL_MEAN):
        yield
