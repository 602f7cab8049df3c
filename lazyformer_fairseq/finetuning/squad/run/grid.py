"""The runs of a grid on SQuAD."""

from dataclasses import dataclass
from typing import Any, ClassVar

from omegaconf import DictConfig

from lazyformer_fairseq.finetuning.run import grid
from lazyformer_fairseq.finetuning.run.start_models import StartModel
from lazyformer_fairseq.finetuning.scored_task import TaskFamily
from lazyformer_fairseq.finetuning.squad.protocol import WARMUP
from lazyformer_fairseq.finetuning.squad_family import SQUAD_FAMILY

# Its windows are ten times as long as GLUE's rows: a run of fewer questions, all epochs counted, is over in minutes.
QUESTIONS_WORTH_RESUMING = 20_000


@dataclass(frozen=True, eq=False, kw_only=True)
class Run(grid.Run):
    """One fine-tuning run on SQuAD; its rows are questions.

    Attributes:
        stride, max_question_length: of the windows.
    """

    warmup_ratio: float = WARMUP
    stride: int
    max_question_length: int

    @property
    def is_worth_resuming(self) -> bool:
        return self.epochs * self.train_rows >= QUESTIONS_WORTH_RESUMING

    def own_settings(self) -> dict[str, Any]:
        return {"stride": self.stride, "max_question_length": self.max_question_length}

    def own_options(self) -> list[str]:
        return [
            *("--task", "squad", "--criterion", "squad", "--tokens-per-sample", str(self.tokens_per_sample)),
            *("--doc-stride", str(self.stride), "--max-question-tokens", str(self.max_question_length)),
        ]

    def evaluate(self, cfg: DictConfig, best: dict[str, Any]) -> dict[str, Any]:
        from lazyformer_fairseq.finetuning.squad.run.scores import scores  # imports fairseq, which a queue does without

        return scores(self, cfg, best)


@dataclass(frozen=True)
class Grid(grid.Grid):
    """The requested grid; its one task is SQuAD."""

    family: ClassVar[TaskFamily] = SQUAD_FAMILY

    def _run(self, model: StartModel, name: str, lr: float, seed: int) -> Run:
        manifest = self.tasks[name].manifest
        sizes = {size: manifest[size] for size in ("stride", "max_question_length")}
        return Run(**self._settings_of_run(model, name, lr, seed), **sizes)
