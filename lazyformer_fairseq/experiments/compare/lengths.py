"""How long each model of a comparison trains, and how wide its feed-forward sublayers are: decided once, then kept."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Optional

import numpy as np
from tqdm import tqdm

from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.experiments.compare.contestants import Contestant
from lazyformer_fairseq.experiments.compare.tasks.interface import ComparedTask
from lazyformer_fairseq.measure.costs.flops import count_parameters
from lazyformer_fairseq.measure.stepwise import StepwiseTraining
from lazyformer_fairseq.storage.json_files import read_json, write_json

TRIAL_WARM_UP, TRIAL_UPDATES = 5, 20
STEP = 8  # of a feed-forward width
WIDEST = 2**20


@dataclass(frozen=True)
class Lengths:
    """What was decided.

    Attributes:
        entries: by entry, the model's name, and updates.
        milliseconds: by model, the median update of the trial; empty where none was needed.
    """

    entries: Mapping[str, tuple[str, int]]
    milliseconds: Mapping[str, float]


def kept_lengths(compared: ComparedTask, contestants: Mapping[str, Contestant], path: Path) -> Lengths:
    """As `path` has them, else by a trial, which is then kept there: a second one would give another answer."""
    if not path.exists():
        write_json(path, asdict(_decide(compared, contestants)))
    kept = read_json(path)
    entries = {entry: (name, updates) for entry, (name, updates) in kept["entries"].items()}
    return Lengths(entries, kept["milliseconds"])


def _decide(compared: ComparedTask, contestants: Mapping[str, Contestant]) -> Lengths:
    settings = compared.settings
    entries = settings.entries()
    if settings.budget is None and not settings.shares:
        return Lengths({entry: (name, settings.updates) for entry, (name, _) in entries.items()}, {})
    milliseconds = _trial(compared, contestants)
    seconds = settings.budget
    if seconds is None:
        seconds = settings.updates * milliseconds[settings.baseline] / 1000

    def updates(name: str, share: float) -> int:
        if name == settings.baseline and settings.updates is not None:
            return settings.updates
        return max(1, int(1000 * share * seconds / milliseconds[name]))

    return Lengths({entry: (name, updates(name, share)) for entry, (name, share) in entries.items()}, milliseconds)


def _trial(compared: ComparedTask, contestants: Mapping[str, Contestant]) -> dict[str, float]:
    """Median milliseconds of an update by model; all take turns, with updates of their own that count for nothing."""
    settings, trial = compared.settings, TRIAL_WARM_UP + TRIAL_UPDATES
    with TemporaryDirectory() as folder:
        trainings = {
            name: StepwiseTraining(
                compared.command(contestant, settings.seeds[0], settings.rates[0], trial), Path(folder) / name
            )
            for name, contestant in contestants.items()
        }
        for _ in tqdm(range(trial), desc="trial", unit=" updates", leave=False):
            for training in trainings.values():
                training.update()
    return {name: 1000 * float(np.median(training.seconds[TRIAL_WARM_UP:])) for name, training in trainings.items()}


def with_equal_parameters(compared: ComparedTask) -> dict[str, Contestant]:
    """The contestants; where the settings ask for it, with the width that brings each closest to the baseline's size.

    Parameters of sublayers count, which leaves embeddings and head out. A model that says its width keeps it, and so
    does an external.

    Raises:
        UserError: a pattern without a sublayer that has a width, or too large for any width.
    """
    settings = compared.settings
    contestants = settings.contestants
    if not settings.equal_parameters:
        return contestants
    wanted = parameters_of_sublayers(compared, contestants[settings.baseline])

    def fitted(contestant: Contestant) -> Contestant:
        says_so = "ffn" in settings.models[contestant.name].partition(";")[2]
        if contestant.name == settings.baseline or contestant.is_external or says_so:
            return contestant
        return replace(contestant, ffn_embed_dim=_width(compared, contestant, wanted))

    return {name: fitted(contestant) for name, contestant in contestants.items()}


def parameters_of_sublayers(compared: ComparedTask, contestant: Contestant, width: Optional[int] = None) -> int:
    """By formula; all that is not embeddings, head, or biases that sublayers share.

    Args:
        width: of the feed-forward sublayers, in place of its own.
    """
    sizes = compared.sizes(contestant if width is None else replace(contestant, ffn_embed_dim=width))
    return count_parameters(contestant.pattern, sizes) - sizes.count_other_parameters()


def _width(compared: ComparedTask, contestant: Contestant, wanted: int) -> int:
    """The multiple of STEP whose parameters come closest to those wanted."""

    def surplus(width: int) -> int:
        return parameters_of_sublayers(compared, contestant, width) - wanted

    if surplus(STEP) == surplus(2 * STEP):
        raise UserError(f"--equal-parameters: {contestant.name}, {contestant.pattern}, has no sublayer with a width")
    if surplus(STEP) > 0:
        raise UserError(
            f"--equal-parameters: {contestant.name}, {contestant.pattern}, has {surplus(STEP):,} parameters more than "
            f"the baseline even at a width of {STEP}"
        )
    low, high = 1, 2
    while surplus(high * STEP) < 0 and high * STEP < WIDEST:
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if surplus(middle * STEP) < 0 else (low, middle)
    return STEP * min(low, high, key=lambda steps: abs(surplus(steps * STEP)))


def widths_in_words(compared: ComparedTask, contestants: Mapping[str, Contestant]) -> str:
    """What --equal-parameters found, a line a model."""
    lines = []
    for name, contestant in contestants.items():
        parameters = parameters_of_sublayers(compared, contestant)
        lines.append(f"{name}: width {contestant.ffn_embed_dim}, {parameters:,} parameters in its sublayers")
    return "\n".join(lines)
