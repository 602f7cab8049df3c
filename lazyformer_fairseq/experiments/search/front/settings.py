"""What decides a front, beside the settings of the search itself."""

from dataclasses import dataclass

from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.experiments.search.methods import CONTROL, METHODS, MIXTURES

BUDGETS = (0.5, 0.6, 0.7, 0.8, 0.9, 1.0)


@dataclass(frozen=True)
class FrontSettings:
    """One option of `lazyformer search` each.

    Attributes:
        method: a name of METHODS.
        budgets: shares of the baseline's latency, for a pattern each.
        evaluations: patterns that are judged, of all budgets together.
        judged_batches: of the held-apart data, the same for each pattern.
        control: whether random search of the same cost stands beside the method.
        check_patterns: whose latency is predicted and measured; 0 for none.

    Raises:
        UserError: values out of range.
    """

    method: str = "gradient"
    budgets: tuple[float, ...] = BUDGETS
    evaluations: int = 96
    judged_batches: int = 8
    control: bool = True
    check_patterns: int = 12

    def __post_init__(self):
        if self.method not in METHODS:
            raise UserError(f"--method {self.method}: choose from {', '.join(METHODS)}")
        if not self.budgets or min(self.budgets) <= 0 or len(set(self.budgets)) < len(self.budgets):
            raise UserError(
                f"--budgets {','.join(map(str, self.budgets))}: give shares of the baseline's latency above 0, each "
                "once, such as 0.5,0.6,0.7,0.8,0.9,1.0"
            )
        if self.evaluations < len(self.budgets):
            raise UserError(
                f"--evaluations {self.evaluations}: give one for each of {len(self.budgets)} budgets at least"
            )
        if self.check_patterns in (1, 2):
            raise UserError(
                f"--check-patterns {self.check_patterns}: a rank correlation needs 3 or more, or 0 for none"
            )

    @property
    def trains_mixtures(self) -> bool:
        return METHODS[self.method].supernet == MIXTURES

    @property
    def has_control(self) -> bool:
        return self.control and self.method != CONTROL


@dataclass(frozen=True)
class TrainSettings:
    """What is trained from scratch when a front is found; may be given, or given anew, after the search.

    Attributes:
        updates: of each pattern and seed; 0 for no training.
        patterns: how many of those whose latency was checked are trained too, with the first seed, to compare their
            inherited losses with.
    """

    updates: int = 0
    patterns: int = 0
    rate: float = 1e-3
    seeds: tuple[int, ...] = (1,)

    def __post_init__(self):
        if self.patterns and not self.updates:
            raise UserError(f"--train-patterns {self.patterns}: give --train-updates too")
        if self.patterns in (1, 2):
            raise UserError(f"--train-patterns {self.patterns}: a rank correlation needs 3 or more; 0 for none")
