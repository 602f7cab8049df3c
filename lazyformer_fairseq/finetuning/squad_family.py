"""SQuAD v1.1 as grids of fine-tuning runs know it; reports that set it beside other tasks read it too."""

from collections.abc import Mapping
from dataclasses import dataclass

from lazyformer_fairseq.data.squad.official import SPLITS
from lazyformer_fairseq.finetuning.scored_task import TaskFamily


@dataclass(frozen=True)
class OfficialFile:
    """A split's file, by its official name."""

    file: str


@dataclass(frozen=True)
class SquadDescription:
    """As :class:`lazyformer_fairseq.finetuning.scored_task.ScoredTask` says."""

    name: str
    splits: Mapping[str, OfficialFile]
    metrics: tuple[str, ...]

    @property
    def selecting_metric(self) -> str:
        return self.metrics[0]


SQUAD = SquadDescription("SQuAD", {split: OfficialFile(file) for split, file in SPLITS.items()}, ("f1", "exact_match"))
SQUAD_FAMILY = TaskFamily("SQuAD", {SQUAD.name: SQUAD}, "lazyformer squad run")
