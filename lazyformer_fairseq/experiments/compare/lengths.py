"""How long each model of a comparison trains, and how wide its feed-forward sublayers are: decided once, then kept."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Optional

import numpy as np
from tqdm import tqdm

from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.experiments.compare.models import ModelSpec
from lazyformer_fairseq.experiments.compare.task import ComparedTask
from lazyformer_fairseq.measure.costs.flops import count_other_parameters, count_parameters
from lazyformer_fairseq.measure.stepwise import StepwiseTraining

TRIAL_WARM_UP, TRIAL_UPDATES = 5, 20
STEP = 8  # of a feed-forward width


def find_lengths(compared: ComparedTask, specs: Mapping[str, ModelSpec]) -> dict[str, Any]:
    """`entries`: by name in the results, the model's own name, and updates; `milliseconds`: by model, of an update.

    Milliseconds are those of a trial, which is made unless the settings give updates alone.
    """
    settings, trained = compared.settings, compared.settings.trained()
    if settings.budget is None and not settings.shares:
        return {
            "entries": {name: (own, settings.updates) for name, (own, _) in trained.items()},
            "milliseconds": {},
        }
    milliseconds = _trial(compared, specs)
    seconds = settings.budget
    if seconds is None:
        seconds = settings.updates * milliseconds[settings.baseline] / 1000

    def updates(name: str, share: float) -> int:
        if name == settings.baseline and settings.updates is not None:
            return settings.updates
        return max(1, int(1000 * share * seconds / milliseconds[name]))

    lengths = {name: (own, updates(own, share)) for name, (own, share) in trained.items()}
    return {"entries": lengths, "milliseconds": milliseconds}


def _trial(compared: ComparedTask, specs: Mapping[str, ModelSpec]) -> dict[str, float]:
    """Median milliseconds of an update by model; all take turns, with updates of their own that count for nothing."""
    settings, trial = compared.settings, TRIAL_WARM_UP + TRIAL_UPDATES
    with TemporaryDirectory() as folder:
        trainings = {}
        for name, spec in specs.items():
            command = compared.command(spec, settings.seeds[0], settings.rates[0], trial)
            trainings[name] = StepwiseTraining(command, Path(folder) / name)
        for _ in tqdm(range(trial), desc="trial", unit=" updates", leave=False):
            for training in trainings.values():
                training.update()
    return {name: 1000 * float(np.median(training.seconds[TRIAL_WARM_UP:])) for name, training in trainings.items()}


def with_equal_parameters(compared: ComparedTask) -> dict[str, ModelSpec]:
    """The models; where the settings ask for it, with the width that brings each closest to the baseline's size.

    Parameters of sublayers count, which leaves embeddings and head out. A model that says its width keeps it, and so
    does an external.

    Raises:
        UserError: a pattern without a sublayer that has a width, or too large for any width.
    """
    settings, specs = compared.settings, compared.settings.specs
    if not settings.equal_parameters:
        return specs
    wanted = parameters_of_sublayers(compared, specs[settings.baseline])

    def fitted(spec: ModelSpec) -> ModelSpec:
        says_so = "ffn" in settings.models[spec.name].partition(";")[2]
        if spec.name == settings.baseline or spec.is_external or says_so:
            return spec
        return replace(spec, ffn_embed_dim=_width(compared, spec, wanted))

    return {name: fitted(spec) for name, spec in specs.items()}


def parameters_of_sublayers(compared: ComparedTask, spec: ModelSpec, width: Optional[int] = None) -> int:
    """All that is not embeddings, head, or biases that sublayers share.

    Args:
        width: of the feed-forward sublayers, in place of its own.
    """
    sizes = compared.sizes(spec if width is None else replace(spec, ffn_embed_dim=width))
    return count_parameters(spec.pattern, sizes) - count_other_parameters(sizes)


def _width(compared: ComparedTask, spec: ModelSpec, wanted: int) -> int:
    """The multiple of STEP whose parameters, which grow in proportion to it, come closest to those wanted."""

    def surplus(steps: int) -> int:
        return parameters_of_sublayers(compared, spec, steps * STEP) - wanted

    least, growth = surplus(1), surplus(2) - surplus(1)
    if not growth:
        raise UserError(f"--equal-parameters: {spec.name}, {spec.pattern}, has no sublayer with a width")
    if least > 0:
        raise UserError(
            f"--equal-parameters: {spec.name}, {spec.pattern}, has {least:,} parameters more than the baseline even at "
            f"a width of {STEP}"
        )
    below = 1 + -least // growth
    return STEP * min(below, below + 1, key=lambda steps: abs(surplus(steps)))
