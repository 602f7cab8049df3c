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
from lazyformer_fairseq.finetuning.results import GRID_FILE, RESULT, ScoredTask, development_splits
from lazyformer_fairseq.storage.json_files import read_json, write_json
from lazyformer_fairseq.storage.run_lock import differences


@dataclass(frozen=True, eq=False, kw_only=True)
class Run:
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
        own: settings that only runs of this benchmark have.
    """

    benchmark: Benchmark
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
    batch_size: int
    started_from: Optional[str]
    own: Mapping[str, Any]

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
            **self.recorded,
        }

    @property
    def recorded(self) -> dict[str, Any]:
        """Settings that results name beside those that each has; batch and warm-up are None where they are usual."""
        usual = self.benchmark.usual
        return {
            **self.own,
            "started_from": self.started_from,
            "batch_size": None if self.batch_size == usual.batch_size else self.batch_size,
            "warmup_ratio": None if self.warmup_ratio == usual.warmup else self.warmup_ratio,
        }

    @property
    def work(self) -> float:
        """Training work, in tokens times parameters."""
        return float(self.epochs * self.train_tokens * self.model.parameters)

    @property
    def is_worth_resuming(self) -> bool:
        return self.epochs * self.train_rows >= self.benchmark.rows_worth_resuming

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

    def command(self, start: Path, cpu: bool) -> list[str]:
        """Arguments of fairseq-train, which starts from the weights in `start`."""
        kept = () if self.is_worth_resuming else ("--no-last-checkpoints", "--no-save-optimizer-state")
        return [
            *(str(self.data), "--user-dir", str(USER_DIR), *self.model.options, "--finetune-from-model", str(start)),
            *self.benchmark.train_options(self.task, self.tokens_per_sample, self.max_train_rows, self.own),
            # ^ after the model's, which they may change
            *("--optimizer", "fused_adam", "--adam-betas", "(0.9, 0.999)", "--adam-eps", "1e-6"),
            *("--weight-decay", "0.01", "--clip-norm", "1.0"),
            *("--lr-scheduler", "linear_warmup", "--warmup-ratio", str(self.warmup_ratio), "--lr", repr(self.lr)),
            *("--max-epoch", str(self.epochs), "--batch-size", str(self.batch_size), "--seed", str(self.seed)),
            *("--valid-subset", ",".join(development_splits(self.task))),
            *("--best-checkpoint-metric", self.task.selecting_metric, "--maximize-best-checkpoint-metric"),
            *("--no-epoch-checkpoints", *kept, "--save-dir", str(self.folder)),
            *("--distributed-world-size", "1", "--num-workers", "0", "--log-format", "simple", "--log-interval", "100"),
            *(("--cpu",) if cpu else ()),
            *((f"--{self.precision}",) if self.precision != "fp32" else ()),
        ]


@dataclass(frozen=True, kw_only=True)
class Grid:
    """The requested grid: every combination of models, tasks, rates and seeds.

    Attributes:
        tasks: name -> its prepared data.
        epochs: task -> number; None for the usual one.
        batch_size, warmup_ratio: None for the usual ones.
        starts: task -> the task whose best run its runs start from.
        own: as of :class:`Run`.
    """

    benchmark: Benchmark
    output: Path
    models: Sequence[StartModel]
    tasks: Mapping[str, PreparedFolder]
    lrs: Sequence[float]
    seeds: Sequence[int]
    epochs: Mapping[str, int]
    precision: str = "fp32"
    max_train_rows: Optional[int] = None
    batch_size: Optional[int] = None
    warmup_ratio: Optional[float] = None
    starts: Mapping[str, str] = field(default_factory=dict)
    own: Mapping[str, Any] = field(default_factory=dict)

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

    def _run(self, model: StartModel, name: str, lr: float, seed: int) -> Run:
        """A run on the task of this name."""
        prepared, usual = self.tasks[name], self.benchmark.usual
        in_file, tokens = prepared.size_of("train")
        rows = min(in_file, self.max_train_rows or in_file)
        return Run(
            benchmark=self.benchmark,
            folder=self.output / "runs" / model.name / name / f"lr{lr:g}_seed{seed}",
            model=model,
            task=self.benchmark.tasks[name],
            data=prepared.folder,
            data_sha256=prepared.sha256,
            lr=lr,
            seed=seed,
            epochs=self.epochs[name],
            tokens_per_sample=min(model.max_positions, prepared.longest),
            precision=self.precision,
            max_train_rows=self.max_train_rows,
            rows_in_file=in_file,
            train_rows=rows,
            train_tokens=round(tokens * rows / in_file),
            warmup_ratio=usual.warmup if self.warmup_ratio is None else self.warmup_ratio,
            batch_size=self.batch_size or usual.batch_size,
            started_from=self.starts.get(name),
            own=self.own,
        )

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
        content = {
            "format_version": 1,
            "models": {**before.get("models", {}), **{model.name: str(model.checkpoint) for model in self.models}},
            "tasks": list(dict.fromkeys([*before.get("tasks", []), *self.tasks])),
            "lrs": sorted({*before.get("lrs", []), *self.lrs}),
            "seeds": sorted({*before.get("seeds", []), *self.seeds}),
            "epochs": {**before.get("epochs", {}), **self.epochs},
            "max_train_rows": self.max_train_rows,
            "precision": self.precision,
            "batch_size": self.batch_size,
            "warmup_ratio": self.warmup_ratio,
            "started_from": dict(self.starts),
            **self.own,
        }
        if content != before:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_json(path, content)
