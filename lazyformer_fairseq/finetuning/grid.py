"""The runs of a grid, and what decides each.

OUT/runs/grid.json                        the grid that was asked for
OUT/runs/MODEL/TASK/lr2e-05_seed1/        one run: LOG always, RESULT where it ended well, FAILED where it did not
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Optional

from lazyformer_fairseq import USER_DIR
from lazyformer_fairseq.data.prepared_folder import PreparedFolder
from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.finetuning.benchmark import Benchmark
from lazyformer_fairseq.finetuning.checkpoints import StartModel
from lazyformer_fairseq.finetuning.results import GRID_FILE, RESULT, RunKey, ScoredTask, development_splits
from lazyformer_fairseq.storage.json_files import read_json, write_json
from lazyformer_fairseq.storage.run_lock import differences


@dataclass(frozen=True, kw_only=True, eq=False)
class Grid:
    """The requested grid: every combination of models, tasks, rates and seeds, and what all its runs share.

    Attributes:
        tasks: name -> its prepared data.
        epochs: task -> number.
        precision: fp32, fp16 or bf16.
        max_train_rows: None for all.
        batch_size: rows of an update.
        warmup_ratio: share of the updates in which the rate rises.
        own: settings that only runs of this benchmark have.
    """

    benchmark: Benchmark
    output: Path
    models: Sequence[StartModel]
    tasks: Mapping[str, PreparedFolder]
    lrs: Sequence[float]
    seeds: Sequence[int]
    epochs: Mapping[str, int]
    batch_size: int
    warmup_ratio: float
    precision: str = "fp32"
    max_train_rows: Optional[int] = None
    own: Mapping[str, Any] = field(default_factory=dict)

    @cached_property
    def runs(self) -> list["Run"]:
        """In the order of models, tasks, rates and seeds."""
        return [
            Run(self, model, self.benchmark.tasks[name], lr, seed)
            for model in self.models
            for name in self.tasks
            for lr in self.lrs
            for seed in self.seeds
        ]

    def refuse_other_benchmark(self) -> None:
        """Raises a UserError where the folder's grid is one of other tasks."""
        path = self.output / "runs" / GRID_FILE
        tasks = read_json(path).get("tasks", []) if path.exists() else []
        if other := [name for name in tasks if name not in self.benchmark.tasks]:
            raise UserError(
                f"{path}: is a grid of {', '.join(map(str, other))}, not of {self.benchmark.name}; give another "
                "--output"
            )

    def write(self) -> None:
        """Writes grid.json. Keeps what an existing one asked for."""
        path = self.output / "runs" / GRID_FILE
        before = read_json(path) if path.exists() else {}
        shared = ("max_train_rows", "precision", "batch_size", "warmup_ratio")
        content = {
            "format_version": 1,
            "models": {**before.get("models", {}), **{model.name: str(model.checkpoint) for model in self.models}},
            "tasks": list(dict.fromkeys([*before.get("tasks", []), *self.tasks])),
            "lrs": sorted({*before.get("lrs", []), *self.lrs}),
            "seeds": sorted({*before.get("seeds", []), *self.seeds}),
            "epochs": {**before.get("epochs", {}), **self.epochs},
            **{name: getattr(self, name) for name in shared},
            "started_from": {},
            **self.own,
        }
        if content != before:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_json(path, content)


@dataclass(frozen=True, eq=False)
class Run:
    """One fine-tuning run of a grid."""

    grid: Grid
    model: StartModel
    task: ScoredTask
    lr: float
    seed: int

    @property
    def folder(self) -> Path:
        return self.grid.output / "runs" / RunKey(self.model.name, self.task.name, self.lr, self.seed).folder

    @property
    def name(self) -> str:
        return f"{self.model.name} {self.task.name} {self.folder.name}"

    @property
    def data(self) -> PreparedFolder:
        return self.grid.tasks[self.task.name]

    @property
    def epochs(self) -> int:
        return self.grid.epochs[self.task.name]

    @property
    def rivals(self) -> list["Run"]:
        """The runs of the same model and task, this one included."""
        return [other for other in self.grid.runs if other.model is self.model and other.task is self.task]

    @cached_property
    def settings(self) -> dict[str, Any]:
        """What decides the result, wherever the files lie; as JSON."""
        return {
            "model": self.model.name,
            "checkpoint_sha256": self.model.sha256,
            "task": self.task.name,
            "data_sha256": self.data.sha256,
            "lr": self.lr,
            "seed": self.seed,
            "epochs": self.epochs,
            "tokens_per_sample": self.tokens_per_sample,
            "precision": self.grid.precision,
            "max_train_rows": self.grid.max_train_rows,
            **self.recorded,
        }

    @property
    def recorded(self) -> dict[str, Any]:
        """Settings that results name beside those that each has; batch and warm-up are None where they are usual."""
        grid, usual = self.grid, self.grid.benchmark.usual
        return {
            **grid.own,
            "started_from": None,  # results of before may have a task here
            "batch_size": None if grid.batch_size == usual.batch_size else grid.batch_size,
            "warmup_ratio": None if grid.warmup_ratio == usual.warmup else grid.warmup_ratio,
        }

    @property
    def tokens_per_sample(self) -> int:
        """The longest input in ids."""
        return min(self.model.max_positions, self.data.longest)

    @property
    def train_rows(self) -> int:
        """Of an epoch."""
        in_file, _ = self.data.size_of("train")
        return min(in_file, self.grid.max_train_rows or in_file)

    @property
    def work(self) -> float:
        """Training work, in tokens times parameters."""
        in_file, tokens = self.data.size_of("train")
        return float(self.epochs * round(tokens * self.train_rows / in_file) * self.model.parameters)

    @property
    def is_worth_resuming(self) -> bool:
        return self.epochs * self.train_rows >= self.grid.benchmark.rows_worth_resuming

    def differs_from(self, found: Mapping[str, Any]) -> str:
        """How settings that were found differ, in words; empty where they do not. None stands for a missing one."""
        return differences({name: found.get(name) for name in self.settings}, self.settings)

    def result(self) -> Optional[dict[str, Any]]:
        """The result of a finished run; UserError where the folder holds one of other settings."""
        path = self.folder / RESULT
        if not path.is_file():
            return None
        result = read_json(path)
        if differing := self.differs_from(result.get("settings", {})):
            raise UserError(f"{path}: is the result of another run ({differing}); remove it, or give another --output")
        return result

    def command(self, cpu: bool) -> list[str]:
        """Arguments of fairseq-train."""
        grid = self.grid
        kept = () if self.is_worth_resuming else ("--no-last-checkpoints", "--no-save-optimizer-state")
        return [
            *(str(self.data.folder), "--user-dir", str(USER_DIR), *self.model.options),
            *("--finetune-from-model", str(self.model.checkpoint)),
            *grid.benchmark.train_options(self.task, self.tokens_per_sample, grid.max_train_rows, grid.own),
            # ^ after the model's, which they may change
            *("--optimizer", "fused_adam", "--adam-betas", "(0.9, 0.999)", "--adam-eps", "1e-6"),
            *("--weight-decay", "0.01", "--clip-norm", "1.0"),
            *("--lr-scheduler", "linear_warmup", "--warmup-ratio", str(grid.warmup_ratio), "--lr", repr(self.lr)),
            *("--max-epoch", str(self.epochs), "--batch-size", str(grid.batch_size), "--seed", str(self.seed)),
            *("--valid-subset", ",".join(development_splits(self.task))),
            *("--best-checkpoint-metric", self.task.selecting_metric, "--maximize-best-checkpoint-metric"),
            *("--no-epoch-checkpoints", *kept, "--save-dir", str(self.folder)),
            *("--distributed-world-size", "1", "--num-workers", "0", "--log-format", "simple", "--log-interval", "100"),
            *(("--cpu",) if cpu else ()),
            *((f"--{grid.precision}",) if grid.precision != "fp32" else ()),
        ]
