"""Fixtures of the tests that do damage to runs."""

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from fairseq_plugin.reliability.damage import TINY

from lazyformer_fairseq.evaluation.export import export


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


@pytest.fixture(scope="session")
def trained(tmp_path_factory, data_folder, fairseq_train) -> Path:
    """The checkpoints of a run of five updates, to be read."""
    folder = tmp_path_factory.mktemp("one run") / "run"
    fairseq_train(data_folder, f"{TINY} --max-update 5 --lr 1e-2 --disable-validation", folder)
    return folder


@pytest.fixture(scope="session")
def exported(trained) -> Path:
    """The same model as ``lazyformer export`` writes it, to be read."""
    export(trained, trained.parent / "model")
    return trained.parent / "model"
