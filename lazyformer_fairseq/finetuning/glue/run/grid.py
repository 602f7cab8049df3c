"""The runs of a GLUE grid: LazyFormer's protocol (appendix A and Table 5)."""

from dataclasses import dataclass
from typing import Any, ClassVar, Optional

from omegaconf import DictConfig

from lazyformer_fairseq.finetuning.glue.family import GLUE
from lazyformer_fairseq.finetuning.glue.protocols import LAZYFORMER, PROTOCOLS
from lazyformer_fairseq.finetuning.run import grid
from lazyformer_fairseq.finetuning.run.start_models import StartModel
from lazyformer_fairseq.finetuning.scored_task import TaskFamily

LAZYFORMERS = PROTOCOLS[LAZYFORMER]
FROM_MNLI = ("RTE", "MRPC", "STS-B")


@dataclass(frozen=True, eq=False, kw_only=True)
class Run(grid.Run):
    """One fine-tuning run on a GLUE task.

    Attributes:
        head, head_dropout: --glue-head and --pooler-dropout; None for the defaults.
    """

    head: Optional[str] = None
    head_dropout: Optional[float] = None

    def own_settings(self) -> dict[str, Any]:
        head = {"head": self.head, "head_dropout": self.head_dropout, "started_from": self.started_from}
        return {**head, **changes(self.batch_size, self.warmup_ratio)}

    def own_options(self) -> list[str]:
        return [
            *("--task", "glue", "--glue-task", self.task.name, "--criterion", "glue"),
            *("--tokens-per-sample", str(self.tokens_per_sample)),
            *(("--max-train-rows", str(self.max_train_rows)) if self.max_train_rows else ()),
            *(("--glue-head", self.head) if self.head else ()),
            *(("--pooler-dropout", repr(self.head_dropout)) if self.head_dropout is not None else ()),
        ]

    def evaluate(self, cfg: DictConfig, best: dict[str, Any]) -> dict[str, Any]:
        from lazyformer_fairseq.finetuning.glue.run.scores import scores  # imports fairseq, which a queue does without

        metrics, baseline = scores(self, cfg, best)
        return {"metrics": metrics, "baseline": baseline}


@dataclass(frozen=True)
class Grid(grid.Grid):
    """The requested grid.

    Attributes:
        from_mnli: RTE, MRPC and STS-B start from the model's best MNLI run.
        head, head_dropout, batch_size, warmup_ratio: as in :class:`Run`.
    """

    family: ClassVar[TaskFamily] = GLUE

    from_mnli: bool = False
    head: Optional[str] = None
    head_dropout: Optional[float] = None
    batch_size: int = LAZYFORMERS.batch_size
    warmup_ratio: float = LAZYFORMERS.warmup

    def _run(self, model: StartModel, name: str, lr: float, seed: int) -> Run:
        return Run(
            **self._settings_of_run(model, name, lr, seed),
            started_from="MNLI" if self.from_mnli and name in FROM_MNLI else None,
            head=self.head,
            head_dropout=self.head_dropout,
            batch_size=self.batch_size,
            warmup_ratio=self.warmup_ratio,
        )

    def own_settings(self) -> dict[str, Any]:
        head = {"from_mnli": self.from_mnli, "head": self.head, "head_dropout": self.head_dropout}
        return {**head, **changes(self.batch_size, self.warmup_ratio)}


def changes(batch_size: int, warmup_ratio: float) -> dict[str, Any]:
    """The two, None where they are LazyFormer's: as results have them that are older than these options."""
    return {
        "batch_size": None if batch_size == LAZYFORMERS.batch_size else batch_size,
        "warmup_ratio": None if warmup_ratio == LAZYFORMERS.warmup else warmup_ratio,
    }
