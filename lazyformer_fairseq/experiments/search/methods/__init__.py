"""The table of methods: how a search spends its evaluations once the supernet is trained. One row and one file each.

A file has ``judge_patterns(task)``, which evaluates patterns until the evaluations of the
`Task` are spent. It is imported when it is used: commands list methods
without torch.
"""

import importlib
from dataclasses import dataclass
from typing import Any

PATHS, MIXTURES = "paths", "mixtures"


@dataclass(frozen=True)
class Method:
    """A row.

    Attributes:
        help: one line.
        supernet: what an update of the weights trains: one random path (PATHS), or mixtures of all candidates
            (MIXTURES), whose architecture is then trained too.
        file: in this folder.
        source: where it comes from.
    """

    help: str
    supernet: str
    file: str
    source: str

    def judge_patterns(self, task: Any) -> None:
        """Evaluates patterns until the task's evaluations are spent."""
        importlib.import_module(f"{__name__}.{self.file}").judge_patterns(task)


METHODS: dict[str, Method] = {
    "gradient": Method(
        "architecture's parameters for each budget, learned by gradient descent; then patterns drawn from them",
        MIXTURES,
        "gradient",
        "PAR Transformer, section 2; FBNet",
    ),
    "random": Method(
        "patterns drawn uniformly between each budget and the one below",
        PATHS,
        "random_search",
        "Li and Talwalkar, 2019, arXiv 1902.07638",
    ),
    "evolution": Method(
        "children of the best of a few of the youngest patterns",
        PATHS,
        "evolution",
        "Real et al., 2019, arXiv 1802.01548; Guo et al., 2020, arXiv 1904.00420",
    ),
    "greedy": Method(
        "from the baseline on, the best of a few single changes at a time",
        PATHS,
        "greedy",
        "ours",
    ),
}
CONTROL = "random"


def describe_methods() -> str:
    """``gradient: ...; random: ...`` for help texts."""
    return "; ".join(f"{name}: {method.help}" for name, method in METHODS.items())
