"""Fixtures of the tests that do damage to runs."""

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest


@pytest.fixture
def record_counts() -> Callable[..., None]:
    """``record_counts("kills", moments=100, lost=0)``: what a test counted, for ``docs/reliability.md``.

    One JSON object a line is appended to the file that LAZYFORMER_RELIABILITY_COUNTS names, and printed; a single write
    in append mode, so that tests in several processes do not mix their lines.
    """

    def record(name: str, **counts) -> None:
        line = json.dumps({"test": name, **counts})
        print(line)
        file = os.environ.get("LAZYFORMER_RELIABILITY_COUNTS")
        if file:
            Path(file).parent.mkdir(parents=True, exist_ok=True)
            with open(file, "a") as counts_file:
                counts_file.write(f"{line}\n")

    return record
