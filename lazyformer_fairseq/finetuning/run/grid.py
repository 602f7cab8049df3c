"""The runs of a grid, and what decides each.

OUT/runs/grid.json                        the grid that was asked for
OUT/runs/MODEL/TASK/lr2e-05_seed1/        one run: LOG always, RESULT where it ended well, FAILED where it did not
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, Optional, Protocol

from omegaconf import DictConfig

from lazyformer_fairseq import USER_DIR
from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.finetuning.run.start_models import StartModel
from lazyformer_fairseq.finetuning.scored_task import ScoredTask, TaskFamily
from lazyformer_fairseq.storage.json_files import read_json, write_json
from lazyformer_fairseq.storage.run_lock import differences

BATCH_SIZE = 32
RESULT, FAILED, SETTINGS = "result.json", "failed.json", "settings.json"
LOG, BEST, LAST = "train.log", "checkpoint_best.pt", "checkpoint_last.pt"
ATTEMPT = "=== fairseq-train "  # each attempt begins with such a line in the log
# A run with fewer rows than these, all epochs counted, is over in minutes: after a kill it starts anew. A longer one
# saves its optimizer, three times the size of its model, after each epoch, and resumes from there.
ROWS_WORTH_RESUMING = 200_000


class PreparedData(Protocol):
    """A folder of data as it is trained on; `sha256` tells its contents, `manifest` holds all counts."""

    folder: Path
    manifest: Mapping[str, Any]
    sha256: str
    tokenizer_folder: Path


@dataclass(frozen=True, eq=False, kw_only=True)
class Run(ABC):
    """One fine-tuning run: everything that decides its result, and the folder it goes to.

    Attributes:
        data: folder of the prepared task; `data_sha256` tells its contents.
        tokens_per_sample: longest input in ids.
        precision: fp32, fp16 or bf16.
        warmup_ratio: share of the updates in which the rate rises.
        batch_size: rows of an update.
        rows_in_file: of the training split as it was prepared.
        train_rows, train_tokens: of an epoch.
        started_from: the task that the model was fine-tuned on first, if any.
    """

    folder: Path
    model: StartModel
    task: ScoredTask
    data: Path
    data_sha256: str
    lr: float
    seed: int
    epochs: int
    tokens_per_sample: int
    precision: str
    max_train_rows: Optional[int]
    rows_in_file: int
    train_rows: int
    train_tokens: int
    warmup_ratio: float
    batch_size: int = BATCH_SIZE
    started_from: Optional[str] = None

    @property
    def name(self) -> str:
        return f"{self.model.name} {self.task.name} {self.folder.name}"

    @cached_property
    def settings(self) -> dict[str, Any]:
        """What decides the result, wherever the files lie; as JSON."""
        names = ("data_sha256", "lr", "seed", "epochs", "tokens_per_sample", "precision", "max_train_rows")
        return {
            "model": self.model.name,
            "checkpoint_sha256": self.model.sha256,
            "task": self.task.name,
            **{name: getattr(self, name) for name in names},
            **self.own_settings(),
        }

    @abstractmethod
    def own_settings(self) -> dict[str, Any]:
        """Settings that only runs of this kind have."""

    @abstractmethod
    def own_options(self) -> list[str]:
        """Options of fairseq-train that only runs of this kind have: task, criterion, head."""

    @abstractmethod
    def evaluate(self, cfg: DictConfig, best: dict[str, Any]) -> dict[str, Any]:
        """Fields of the result: ``metrics`` of the best epoch's weights by development file, and ``baseline``.

        Args:
            best: the content of the checkpoint.
        """

    @property
    def work(self) -> float:
        """Training work, in tokens times parameters."""
        return float(self.epochs * self.train_tokens * self.model.parameters)

    @property
    def is_worth_resuming(self) -> bool:
        return self.epochs * self.train_rows >= ROWS_WORTH_RESUMING

    def result(self) -> Optional[dict[str, Any]]:
        """The result of a finished run; UserError where the folder holds one of other settings."""
        path = self.folder / RESULT
        if not path.is_file():
            return None
        result = read_json(path)
        found = {name: result.get("settings", {}).get(name) for name in self.settings}
        if differing := differences(found, self.settings):
            raise UserError(f"{path}: is the result of another run ({differing}); remove it, or give another --output")
        return result

    def command(self, start: Path, cpu: bool) -> list[str]:
        """Arguments of fairseq-train, which starts from the weights in `start`."""
        valid = [split for split in self.task.splits if split.startswith("valid")]
        kept = () if self.is_worth_resuming else ("--no-last-checkpoints", "--no-save-optimizer-state")
        return [
            *(str(self.data), "--user-dir", str(USER_DIR), *self.model.options, "--finetune-from-model", str(start)),
            *self.own_options(),  # after the model's, which they may change
            *("--optimizer", "fused_adam", "--adam-betas", "(0.9, 0.999)", "--adam-eps", "1e-6"),
            *("--weight-decay", "0.01", "--clip-norm", "1.0"),
            *("--lr-scheduler", "linear_warmup", "--warmup-ratio", str(self.warmup_ratio), "--lr", repr(self.lr)),
            *("--max-epoch", str(self.epochs), "--batch-size", str(self.batch_size), "--seed", str(self.seed)),
            *("--valid-subset", ",".join(valid), "--best-checkpoint-metric", self.task.selecting_metric),
            *("--maximize-best-checkpoint-metric", "--no-epoch-checkpoints", *kept, "--save-dir", str(self.folder)),
            *("--distributed-world-size", "1", "--num-workers", "0", "--log-format", "simple", "--log-interval", "100"),
            *(("--cpu",) if cpu else ()),
            *((f"--{self.precision}",) if self.precision != "fp32" else ()),
        ]


@dataclass(frozen=True)
class Grid(ABC):
    """The requested grid: every combination of models, tasks, rates and seeds.

    Attributes:
        epochs: task -> number.
    """

    family: ClassVar[TaskFamily]

    output: Path
    models: Sequence[StartModel]
    tasks: Mapping[str, PreparedData]
    lrs: Sequence[float]
    seeds: Sequence[int]
    epochs: Mapping[str, int]
    precision: str = "fp32"
    max_train_rows: Optional[int] = None

    @cached_property
    def runs(self) -> list[Run]:
        """In the order of models, tasks, rates and seeds."""
        return [
            self._run(model, name, lr, seed)
            for model in self.models
            for name in self.tasks
            for lr in self.lrs
            for seed in self.seeds
        ]

    def rivals(self, run: Run) -> list[Run]:
        """The runs of the same model and task, itself included."""
        return [other for other in self.runs if other.model is run.model and other.task is run.task]

    def runs_before(self, run: Run) -> list[Run]:
        """Those that must be over before `run` can start."""
        return [other for other in self.runs if other.model is run.model and other.task.name == run.started_from]

    @abstractmethod
    def _run(self, model: StartModel, name: str, lr: float, seed: int) -> Run:
        """A run on the task of this name."""

    def _settings_of_run(self, model: StartModel, name: str, lr: float, seed: int) -> dict[str, Any]:
        """Those that runs of all kinds have."""
        prepared = self.tasks[name]
        counts = prepared.manifest["splits"]["train"]
        rows = min(counts["rows"], self.max_train_rows or counts["rows"])
        return {
            "folder": self.output / "runs" / model.name / name / f"lr{lr:g}_seed{seed}",
            "model": model,
            "task": self.family.tasks[name],
            "data": prepared.folder,
            "data_sha256": prepared.sha256,
            "lr": lr,
            "seed": seed,
            "epochs": self.epochs[name],
            "tokens_per_sample": min(model.max_positions, prepared.manifest["max_length"]),
            "precision": self.precision,
            "max_train_rows": self.max_train_rows,
            "rows_in_file": counts["rows"],
            "train_rows": rows,
            "train_tokens": round(counts["kept_tokens"] * rows / counts["rows"]),
        }

    def own_settings(self) -> dict[str, Any]:
        """Settings that only grids of this kind have, as JSON."""
        return {}

    def refuse_other_family(self) -> None:
        """Raises a UserError where the folder's grid is one of other tasks."""
        path = self.output / "runs" / "grid.json"
        tasks = read_json(path).get("tasks", []) if path.exists() else []
        if other := [name for name in tasks if name not in self.family.tasks]:
            raise UserError(
                f"{path}: is a grid of {', '.join(map(str, other))}, not of {self.family.name}; give another --output"
            )

    def write(self) -> None:
        """Writes grid.json. Keeps what an existing one asked for."""
        path = self.output / "runs" / "grid.json"
        before = read_json(path) if path.exists() else {}
        content = {
            "format_version": 1,
            "models": {**before.get("models", {}), **{model.name: str(model.checkpoint) for model in self.models}},
            "tasks": list(dict.fromkeys([*before.get("tasks", []), *self.tasks])),
            "lrs": sorted({*before.get("lrs", []), *self.lrs}),
            "seeds": sorted({*before.get("seeds", []), *self.seeds}),
            "epochs": {**before.get("epochs", {}), **self.epochs},
            "max_train_rows": self.max_train_rows,
            "precision": self.precision,
            **self.own_settings(),
        }
        if content != before:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_json(path, content)
