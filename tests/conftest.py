"""Fixtures that several test files share."""

import os
import random
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")  # tiny tensors: a second thread only waits

import pytest
import torch

import lazyformer_fairseq  # noqa: F401  registers everything with fairseq

ROOT = Path(__file__).resolve().parent.parent
torch.set_num_threads(1)


@pytest.fixture(scope="session")
def real_data() -> Path:
    """The folder of real corpora and GLUE files; tests that need it skip where it is not."""
    folder = Path(os.environ.get("LAZYFORMER_DATA", ROOT.parent / "shared" / "data"))
    if not folder.is_dir():
        pytest.skip(f"no real data at {folder}; set LAZYFORMER_DATA to run this test")
    return folder


NAMES = "anna ben cara dan eva finn gina hugo ida jan kim lea max nina otto".split()
VERBS = "sees likes calls hears helps finds meets knows thanks asks".split()
THINGS = "house garden river letter window bridge market forest island mirror".split()


def toy_documents(count: int, seed: int = 1) -> list[list[str]]:
    """Documents of short sentences that a tiny model can learn a little of."""
    rng = random.Random(seed)

    def sentence() -> str:
        first, second = rng.sample(NAMES, 2)
        return rng.choice(
            [
                f"{first.title()} {rng.choice(VERBS)} {second.title()} near the {rng.choice(THINGS)}.",
                f"The {rng.choice(THINGS)} of {first.title()} is behind the old {rng.choice(THINGS)}.",
                f"{first.title()} and {second.title()} walk to the {rng.choice(THINGS)} together.",
            ]
        )

    return [[sentence() for _ in range(rng.randint(1, 9))] for _ in range(count)]
