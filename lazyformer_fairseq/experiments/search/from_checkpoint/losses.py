"""Losses of patterns, each measured once and kept in a file, so that a search that was stopped goes on."""

import math
from collections.abc import Iterable
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

import numpy as np
from tqdm import tqdm

from lazyformer_fairseq.experiments.search.from_checkpoint.choices import ByPlace, Choices
from lazyformer_fairseq.storage.json_files import read_json, write_json
from lazyformer_fairseq.warm_start.losses import Batches, BlockLosses, Scorer

BETWEEN = " "  # of a pattern's places, in the file


class Measured(NamedTuple):
    """A pattern's loss, in bits a masked token.

    Attributes:
        above: the trained model's own.
        error: standard error of `above`, over blocks of text.
    """

    above: float
    error: float


class Losses:
    """Measures what it does not know yet.

    Args:
        path: of the file, which another run may have begun.
    """

    def __init__(self, path: Path, scorer: Scorer, choices: Choices):
        self.path, self.scorer, self.choices = path, scorer, choices
        content = read_json(path) if path.exists() else {"patterns": {}}
        self.known = {tuple(key.split(BETWEEN)): Measured(**each) for key, each in content["patterns"].items()}
        self.known[choices.own] = Measured(0.0, 0.0)

    @cached_property
    def original(self) -> BlockLosses:
        """The trained model's own, measured when first needed."""
        return self._by_block(self.choices.own)

    def __getitem__(self, by_place: ByPlace) -> Measured:
        return self.known[by_place]

    def measure(self, patterns: Iterable[ByPlace], description: str) -> list[ByPlace]:
        """Returns those that were not known before, each once."""
        missing = [each for each in dict.fromkeys(patterns) if each not in self.known]
        for by_place in tqdm(missing, desc=description, unit=" patterns", disable=None):
            self.known[by_place] = compare(self._by_block(by_place), self.original)
            self._write()
        return missing

    def _by_block(self, by_place: ByPlace) -> BlockLosses:
        return self.scorer.by_block(self.choices.pattern(by_place), self.choices.origins(by_place))

    def _write(self) -> None:
        write_json(
            self.path,
            {
                "unit": "bits a masked token",
                "original": self.original.bits,
                "masked_tokens": int(self.original.words.sum()),
                "blocks": len(self.original.words),
                "patterns": {BETWEEN.join(key): each._asdict() for key, each in self.known.items()},
            },
        )


def measure_on_other_text(
    patterns: Iterable[ByPlace], choices: Choices, scorer: Scorer, used: Batches
) -> dict[ByPlace, Measured]:
    """Losses of patterns that were chosen for theirs, on text that had no part in it; of none where there is no more.

    Args:
        scorer: of more text; what of it is `used` is left out.
    """
    before = {int(block) for batch in used for block in batch["id"]}
    blocks = [int(block) for batch in scorer.text for block in batch["id"]]
    is_other = np.array([block not in before for block in blocks])
    if not is_other.any():
        return {}

    def losses_of(by_place: ByPlace) -> BlockLosses:
        found = scorer.by_block(choices.pattern(by_place), choices.origins(by_place))
        return BlockLosses(found.nats[is_other], found.words[is_other])

    original = losses_of(choices.own)
    missing = tqdm(list(dict.fromkeys(patterns)), desc="measuring on other text", unit=" patterns", disable=None)
    return {by_place: compare(losses_of(by_place), original) for by_place in missing}


def compare(one: BlockLosses, original: BlockLosses) -> Measured:
    """How far a loss is above another on the same tokens; the error is that of a ratio over blocks drawn at random."""
    gains, words = (one.nats - original.nats) / math.log(2), original.words
    mean, count = gains.sum() / words.sum(), len(words)
    spread = np.square(gains - mean * words).sum() * count / max(count - 1, 1)
    return Measured(float(mean), float(np.sqrt(spread) / words.sum()))
