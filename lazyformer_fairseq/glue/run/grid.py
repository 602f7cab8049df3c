"""The runs of a grid, and the settings of each: LazyFormer's protocol (appendix A and Table 5).

OUT/runs/grid.json                        the grid that was asked for
OUT/runs/MODEL/TASK/lr2e-05_seed1/        one run: LOG always, RESULT where it ended well, FAILED where it did not
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Optional

from lazyformer_fairseq import USER_DIR
from lazyformer_fairseq.data.glue.prepared_data import PreparedTask
from lazyformer_fairseq.data.glue.task_table import TaskDescription
from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.files.claims import differences
from lazyformer_fairseq.files.json_files import read_json, write_json
from lazyformer_fairseq.glue.run.start_models import StartModel

FROM_MNLI = ("RTE", "MRPC", "STS-B")
BATCH_SIZE = 32
RESULT, FAILED, SETTINGS = "result.json", "failed.json", "settings.json"
LOG, BEST, LAST = "train.log", "checkpoint_best.pt", "checkpoint_last.pt"
ATTEMPT = "=== fairseq-train "  # each attempt begins with such a line in the log
# A run with fewer rows than these, all epochs counted, is over in minutes: after a kill it starts anew. A longer one
# saves its optimizer, three times the size of its model, after each epoch, and resumes from there.
ROWS_WORTH_RESUMING = 200_000


@dataclass(frozen=True, eq=False)
class Run:
    """One fine-tuning run: everything that decides its result, and the folder it goes to.

    Attributes:
        data: folder of the prepared task; `data_sha256` tells its contents.
        tokens_per_sample: longest input in ids.
        precision: fp32, fp16 or bf16.
        head, head_dropout: --glue-head and --pooler-dropout; None for the defaults.
        started_from: MNLI where the model was fine-tuned on it first, else None.
        rows_in_file: of the training split as it was prepared.
        train_rows, train_tokens: of an epoch.
    """

    folder: Path
    model: StartModel
    task: TaskDescription
    data: Path
    data_sha256: str
    lr: float
    seed: int
    epochs: int
    tokens_per_sample: int
    precision: str
    max_train_rows: Optional[int]
    started_from: Optional[str]
    rows_in_file: int
    train_rows: int
    train_tokens: int
    head: Optional[str] = None
    head_dropout: Optional[float] = None

    @property
    def name(self) -> str:
        return f"{self.model.name} {self.task.name} {self.folder.name}"

    @cached_property
    def settings(self) -> dict[str, Any]:
        """What decides the result, wherever the files lie; as JSON."""
        names = ("data_sha256", "lr", "seed", "epochs", "tokens_per_sample", "precision", "max_train_rows", "head")
        names += ("head_dropout",)
        return {
            "model": self.model.name,
            "checkpoint_sha256": self.model.sha256,
            "task": self.task.name,
            **{name: getattr(self, name) for name in names},
            "started_from": self.started_from,
        }

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
            *(str(self.data), "--user-dir", str(USER_DIR)),
            *("--task", "glue", "--glue-task", self.task.name, "--tokens-per-sample", str(self.tokens_per_sample)),
            *(("--max-train-rows", str(self.max_train_rows)) if self.max_train_rows else ()),
            *("--criterion", "glue", *self.model.options, "--finetune-from-model", str(start)),
            *(("--glue-head", self.head) if self.head else ()),
            *(("--pooler-dropout", repr(self.head_dropout)) if self.head_dropout is not None else ()),
            *("--optimizer", "fused_adam", "--adam-betas", "(0.9, 0.999)", "--adam-eps", "1e-6"),
            *("--weight-decay", "0.01", "--clip-norm", "1.0"),
            *("--lr-scheduler", "linear_warmup", "--warmup-ratio", "0.06", "--lr", repr(self.lr)),
            *("--max-epoch", str(self.epochs), "--batch-size", str(BATCH_SIZE), "--seed", str(self.seed)),
            *("--valid-subset", ",".join(valid), "--best-checkpoint-metric", self.task.selecting_metric),
            *("--maximize-best-checkpoint-metric", "--no-epoch-checkpoints", *kept, "--save-dir", str(self.folder)),
            *("--distributed-world-size", "1", "--num-workers", "0", "--log-format", "simple", "--log-interval", "100"),
            *(("--cpu",) if cpu else ()),
            *((f"--{self.precision}",) if self.precision != "fp32" else ()),
        ]


@dataclass(frozen=True)
class Grid:
    """The requested grid: every combination of models, tasks, rates and seeds.

    Attributes:
        epochs: task -> number.
        from_mnli: RTE, MRPC and STS-B start from the model's best MNLI run.
        head, head_dropout: as in :class:`Run`.
    """

    output: Path
    models: Sequence[StartModel]
    tasks: Mapping[str, PreparedTask]
    lrs: Sequence[float]
    seeds: Sequence[int]
    epochs: Mapping[str, int]
    precision: str = "fp32"
    max_train_rows: Optional[int] = None
    from_mnli: bool = False
    head: Optional[str] = None
    head_dropout: Optional[float] = None

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
        prepared = self.tasks[name]
        counts = prepared.manifest["splits"]["train"]
        rows = min(counts["rows"], self.max_train_rows or counts["rows"])
        return Run(
            self.output / "runs" / model.name / name / f"lr{lr:g}_seed{seed}",
            model,
            prepared.task,
            prepared.folder,
            prepared.sha256,
            lr,
            seed,
            self.epochs[name],
            min(model.max_positions, prepared.manifest["max_length"]),
            self.precision,
            self.max_train_rows,
            "MNLI" if self.from_mnli and name in FROM_MNLI else None,
            counts["rows"],
            rows,
            round(counts["kept_tokens"] * rows / counts["rows"]),
            self.head,
            self.head_dropout,
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
            "from_mnli": self.from_mnli,
            "head": self.head,
            "head_dropout": self.head_dropout,
        }
        if content != before:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_json(path, content)
