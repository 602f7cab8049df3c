"""All that decides a comparison's result; kept in its folder, so that results of other settings never mix in."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any, Optional

from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.experiments.compare.contestants import Contestant, read_models
from lazyformer_fairseq.experiments.compare.recipes import RECIPES
from lazyformer_fairseq.experiments.compare.tasks.table import Task, find_task


@dataclass(frozen=True)
class CompareSettings:
    """One option of `lazyformer compare` each, whose help describes them.

    Attributes:
        task: a name of the table of tasks.
        models: SPEC by NAME.
        baseline: one of these names.
        sizes: of the task's row, each with its value.
        updates: of each model; or
        budget: seconds of training for each model.
        shares: of the baseline's seconds; the others train once for each. Empty: once, as `updates` or `budget` say.
        rates: highest learning rates that every model tries with the first seed; one is tried by nobody.
        rate_updates: of a try; None for the full length.
        equal_parameters: whether the others' feed-forward width follows the baseline's number of parameters.
        recipe: a name of RECIPES.
        warmup_ratio: share of the updates.
        normalize_before: whether LayerNorms stand before sublayers.
        in_turn: whether models train update by update in turn, in one process; else each alone.
        points: of a curve, beside the one before the first update.
        validation_tokens: of a point of the curve.
        threads: of torch; None for its default.
        fairseq_options: further ones, of every model.

    Raises:
        UserError: values that do not fit together, or a model that cannot be read.
    """

    task: str
    data: str
    models: Mapping[str, str]
    baseline: str
    sizes: Mapping[str, Any]
    seeds: Sequence[int] = (1, 2, 3)
    updates: Optional[int] = None
    budget: Optional[float] = None
    shares: Sequence[float] = ()
    rates: Sequence[float] = ()
    rate_updates: Optional[int] = None
    equal_parameters: bool = False
    recipe: str = "adam"
    warmup_ratio: float = RECIPES["adam"].warmup_ratio
    normalize_before: bool = True
    in_turn: bool = True
    points: int = 10
    validation_tokens: int = 16_384
    device: str = "cpu"
    precision: str = "fp32"
    threads: Optional[int] = None
    fairseq_options: Sequence[str] = ()

    def __post_init__(self):
        assert (self.updates is None) != (self.budget is None)
        if self.baseline not in self.models:
            raise UserError(f"--baseline {self.baseline}: the models are {', '.join(self.models)}")
        for name in self.models:
            if not name or "/" in name or "@" in name:
                raise UserError(f"--model {name}=...: a name holds neither / nor @, which names a share")
        if not self.rates:
            raise UserError("--rates: give at least one")
        self.contestants  # noqa: B018  raises a UserError

    @property
    def row(self) -> Task:
        return find_task(self.task)

    @cached_property
    def contestants(self) -> dict[str, Contestant]:
        """The models as their SPECs say, before widths are made equal."""
        return read_models(self.models, self.row.direction, self.sizes, self.row.takes_externals)

    def entries(self) -> dict[str, tuple[str, float]]:
        """By entry of the results, which is NAME or NAME@SHARE, its model and its share of the baseline's seconds."""
        found = {}
        for name in self.models:
            shares = (1.0,) if name == self.baseline or not self.shares else self.shares
            found |= {name if share == 1 else f"{name}@{share:g}": (name, float(share)) for share in shares}
        return found

    def as_kept(self) -> dict[str, Any]:
        """For the folder's file."""
        return asdict(self)
