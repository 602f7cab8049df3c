"""Models' answers on minimal pairs, and statistics of these answers.

A model's answers are computed once and stored in a file.
"""

import hashlib
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.evaluation.costs.machine import describe_machine, describe_versions, device_named
from lazyformer_fairseq.storage.checked import Amount, Count, Finite
from lazyformer_fairseq.storage.json_files import read_checked_as, write_checked_json
from lazyformer_fairseq.zero_shot.pairs import Paradigm, sentences_of
from lazyformer_fairseq.zero_shot.scoring import LanguageModel, score
from lazyformer_fairseq.zero_shot.settings import EvaluationSettings

NORMAL_95 = 1.96  # half width of a 95% interval, in standard errors


@dataclass(frozen=True)
class Answers:
    """A model's answers on all pairs.

    Attributes:
        model: the model's name in reports.
        method: the name of the scoring method.
        identity: a hash of everything that determines the margins: weights, scoring method, precision and sentences.
        margins: the score of the good sentence minus the score of the bad one for each pair, in nats, by paradigm.
        cut: number of sentences that exceed the model's maximum length.
        unknown: number of sentences with a token that is not in the vocabulary.
        sentences: number of distinct sentences.
        tokens: number of scored tokens.
        seconds: duration of the scoring in seconds.
        machine: the device and the versions of Python and packages.
    """

    model: str
    method: str
    identity: str
    margins: dict[str, list[Finite]]
    cut: Count
    unknown: Count
    sentences: Count
    tokens: Count
    seconds: Amount
    machine: dict[str, Any]

    def is_right(self, paradigm: str) -> np.ndarray:
        """Return whether the good sentence scores higher, for each of a paradigm's pairs; ties count as wrong."""
        return np.array(self.margins[paradigm]) > 0

    def accuracy(self, paradigm: str) -> float:
        """Return the fraction of a paradigm's pairs in which the good sentence scores higher; ties count as wrong."""
        return float(np.mean(self.is_right(paradigm)))

    def mean_accuracy(self, paradigms: Sequence[str]) -> float:
        """Return the unweighted mean accuracy over paradigms."""
        return float(np.mean([self.accuracy(paradigm) for paradigm in paradigms]))

    def standard_error(self, paradigms: Sequence[str]) -> float:
        """Return the standard error of :meth:`mean_accuracy`, assuming each paradigm's pairs are a random sample."""
        return _error_of_mean([self.is_right(paradigm) for paradigm in paradigms])

    def difference(self, other: "Answers", paradigms: Sequence[str]) -> tuple[float, float]:
        """Return this model's mean accuracy minus the other's, and the standard error of this paired difference."""
        differences = []
        for paradigm in paradigms:
            right = self.is_right(paradigm).astype(float)
            differences.append(right - other.is_right(paradigm))
        mean = float(np.mean([each.mean() for each in differences]))
        return mean, _error_of_mean(differences)


def _error_of_mean(samples: Sequence[np.ndarray]) -> float:
    """Return the standard error of the average of the samples' means."""
    variances = [sample.var() / len(sample) for sample in samples]
    return math.sqrt(sum(variances)) / len(samples)


def answer(
    model: LanguageModel,
    name: str,
    identity: str,
    paradigms: Sequence[Paradigm],
    settings: EvaluationSettings,
) -> Answers:
    """Score the pairs of all paradigms with a model."""
    start = time.perf_counter()
    scores = score(model, sentences_of(paradigms), name, settings.max_tokens, settings.mask_rest_of_word)
    margins = {}
    for paradigm in paradigms:
        margins[paradigm.name] = [scores.nats[pair.good] - scores.nats[pair.bad] for pair in paradigm.pairs]
    return Answers(
        model=name,
        method=method_of(model, settings),
        identity=identity,
        margins=margins,
        cut=scores.cut,
        unknown=scores.unknown,
        sentences=len(scores.nats),
        tokens=scores.tokens,
        seconds=time.perf_counter() - start,
        machine={**describe_machine(device_named(settings.device)), **describe_versions()},
    )


def method_of(model: LanguageModel, settings: EvaluationSettings) -> str:
    """Describe the scoring method in words."""
    if model.mask is not None and settings.mask_rest_of_word:
        return f"{model.name}, with the rest of the word masked"
    return model.name


def load_or_compute(path: Path, identity: str, make: Callable[[], Answers]) -> Answers:
    """Read the answers from a file, or compute and store them if the file does not exist.

    Raises:
        UserError: the file is damaged, or contains answers with a different `identity`.
    """
    if path.exists():
        found = read_checked_as(Answers, path)
        if found.identity != identity:
            raise UserError(
                f"{path} contains answers from a different model or scoring method, or to different pairs; remove this "
                "file, rename the model (NAME=MODEL), or use a different --output"
            )
        return found
    made = make()
    write_checked_json(path, asdict(made))
    return made


def identity_of(model: LanguageModel, settings: EvaluationSettings, paradigms: Sequence[Paradigm]) -> str:
    """Return a hash of everything that determines a model's margins."""
    digest = hashlib.sha256(f"{method_of(model, settings)}\n{settings.precision}\n".encode())
    for name, weight in sorted(model.weights.items()):
        digest.update(name.encode())
        digest.update(weight.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
    for paradigm in paradigms:
        for pair in paradigm.pairs:
            digest.update(f"{paradigm.name}\t{pair.good}\t{pair.bad}\n".encode())
    return digest.hexdigest()
