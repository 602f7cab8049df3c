"""The runs of a grid, the settings that determine each, and the checkpoints that they start from.

OUT/runs/grid.json                        the grid that was requested
OUT/runs/MODEL/TASK/lr2e-05_seed1/        one run: always LOG, RESULT if it succeeded, FAILED if it did not
"""

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Optional, Protocol

import torch

from lazyformer_fairseq.arguments import checkpoint_at, named_path
from lazyformer_fairseq.data.prepared_folder import PreparedFolder, SplitFacts
from lazyformer_fairseq.data.text.interface import SETTINGS_FILE
from lazyformer_fairseq.data.text.tokenizer import load_tokenizer
from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.evaluation import checkpoints, loading
from lazyformer_fairseq.evaluation.match import dictionary_hash
from lazyformer_fairseq.finetuning import results
from lazyformer_fairseq.finetuning.results import (
    GRID_FILE,
    MODEL_NAME,
    RESULT,
    RunKey,
    ScoredTask,
    TaskFamily,
    development_splits,
)
from lazyformer_fairseq.modules.networks.options import MaskedLMOptions
from lazyformer_fairseq.storage.json_files import sha256_of, write_json
from lazyformer_fairseq.storage.run_lock import differences
from lazyformer_fairseq.training.objectives.head import HeadObjective
from lazyformer_fairseq.training.objectives.network import Network

DROPOUT = 0.1  # LazyFormer, Table 5; it replaces that of pre-training
VALID_BATCH_SIZE = 32  # the last digits of scores depend on it


def name_checkpoints(texts: Iterable[str]) -> dict[str, Path]:
    """Return checkpoints by model from ``NAME=PATH`` or ``PATH``, which is named after its folder.

    A path is a checkpoint or its folder.

    Raises:
        UserError: a name is taken or not allowed, or there is no such checkpoint.
    """
    models: dict[str, Path] = {}
    for text in texts:
        name, given = named_path(text)
        path = checkpoint_at(given)
        if name is None:
            name = path.absolute().parent.name
        if not MODEL_NAME.fullmatch(name):
            raise UserError(f"{text}: {name!r} cannot name a model's folder; give one, as in m2x6={path}")
        if name in models:
            raise UserError(f"{text}: {models[name]} is also called {name}; give names, as in NAME={path}")
        models[name] = path
    return models


@dataclass(frozen=True)
class StartModel:
    """A pre-trained model to start from.

    Attributes:
        name: the name of the model in tables and folders.
        checkpoint: the file.
        sha256: the hash of the file.
        updates: number of pre-training updates; None if the checkpoint does not tell.
        parameters: number of parameters.
        options: the options of the model, with the dropout of fine-tuning.
    """

    name: str
    checkpoint: Path
    sha256: str
    updates: Optional[int]
    parameters: int
    options: MaskedLMOptions


def load_start_models(checkpoint_of: Mapping[str, Path], tokenizer_folder: Path) -> list[StartModel]:
    """Read the checkpoints of the start models.

    Args:
        checkpoint_of: the files by name of the model.
        tokenizer_folder: the tokenizer of the data.

    Raises:
        UserError: a checkpoint cannot be loaded, contains another type of model, or has another dictionary or tokenizer
            than the data.
    """
    symbols = dictionary_hash(load_tokenizer(tokenizer_folder).dictionary)
    return [_load_start_model(name, path, tokenizer_folder, symbols) for name, path in checkpoint_of.items()]


def _load_start_model(name: str, path: Path, tokenizer_folder: Path, symbols: torch.Tensor) -> StartModel:
    state = checkpoints.load(path)
    weights = state["model"]
    given = state["cfg"].get("model")
    if loading.is_causal(state) or not isinstance(given, dict) or "sublayer_pattern" not in given:
        raise UserError(
            f"{path}: not a checkpoint for fine-tuning, which needs a masked language model of this package"
        )
    if "dictionary_sha256" not in weights:
        raise UserError(f"{path}: not a checkpoint of this package's models: the hash of its dictionary is missing")
    options = {each.name: given.get(each.name, each.default) for each in fields(MaskedLMOptions)}

    remedy = "prepare the data with this checkpoint's tokenizer, in a separate folder"
    if not torch.equal(weights["dictionary_sha256"], symbols):
        raise UserError(
            f"{path}: this checkpoint was trained with another dictionary than that of {tokenizer_folder}; {remedy}"
        )
    beside = path.parent / "tokenizer" / SETTINGS_FILE  # equal dictionaries do not imply equal text settings
    if beside.is_file() and beside.read_bytes() != (tokenizer_folder / SETTINGS_FILE).read_bytes():
        raise UserError(
            f"{path}: the tokenizer beside it has other settings than {tokenizer_folder} (compare their "
            f"{SETTINGS_FILE}); {remedy}"
        )

    history = state.get("optimizer_history") or [{}]
    return StartModel(
        name=name,
        checkpoint=path.absolute(),
        sha256=sha256_of(path),
        updates=history[-1].get("num_updates") or None,  # an export does not tell
        parameters=sum(weight.numel() for weight in weights.values() if weight.is_floating_point()),
        options=replace(MaskedLMOptions(**options), dropout=DROPOUT),
    )


class RunBenchmark(TaskFamily, Protocol):
    """The part of a benchmark that runs need; see :class:`~lazyformer_fairseq.finetuning.benchmark.Benchmark`."""

    rows_worth_resuming: int

    def num_examples(self, run: "Run") -> int:
        """Return the number of examples per epoch."""

    def objective(self, run: "Run") -> HeadObjective:
        """Return the objective of a run."""

    def baseline(self, run: "Run", split: str) -> dict[str, float]:
        """Return the metrics of predictions without a model."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Grid:
    """The requested grid: all combinations of models, tasks, learning rates and seeds, and their common settings.

    Attributes:
        tasks: the prepared data of each task, by name.
        epochs: the number of epochs of each task.
        precision: fp32, fp16 or bf16.
        max_train_rows: rows per task to train on; None for all.
        no_padding: whether a batch is computed as one row of its texts.
        batch_size: rows per update.
        warmup_ratio: share of the updates during which the learning rate rises.
        report_to: names of experiment trackers, which do not affect results.
        extra: settings that only runs of this benchmark have.
    """

    benchmark: RunBenchmark
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
    no_padding: bool = False
    report_to: Sequence[str] = ()
    extra: Mapping[str, Any] = field(default_factory=dict)

    @cached_property
    def runs(self) -> list["Run"]:
        """All runs, in the order of models, tasks, learning rates and seeds."""
        combinations = itertools.product(self.models, self.tasks, self.lrs, self.seeds)
        return [Run(self, model, self.benchmark.tasks[task], lr, seed) for model, task, lr, seed in combinations]

    @property
    def one_of_each(self) -> list["Run"]:
        """One run per model and task."""
        return list({(run.model.name, run.task.name): run for run in self.runs}.values())

    def warnings(self) -> list[str]:
        """Return sentences about the data that the reader of the scores must know, without repetition."""
        return results.warnings_on(
            (run.model.name, run.task.name, facts) for run in self.one_of_each for facts in run.facts
        )

    def asked_before(self) -> Optional[results.Grid]:
        """Return the grid that an existing grid.json requests, or None; raise a UserError if it has other tasks."""
        path = self.output / "runs" / GRID_FILE
        if not path.exists():
            return None
        before = results.read_grid(path)
        other = [name for name in before.tasks if name not in self.benchmark.tasks]
        if other:
            raise UserError(
                f"{path}: this is a grid of {', '.join(other)}, not of {self.benchmark.name}; give another --output"
            )
        return before

    def write(self) -> None:
        """Write grid.json, keeping everything that an existing one requests."""
        before = self.asked_before() or results.Grid({}, (), (), ())
        content = {
            "format_version": results.FORMAT_VERSION,
            "models": {**before.models, **{model.name: str(model.checkpoint) for model in self.models}},
            "tasks": list(dict.fromkeys([*before.tasks, *self.tasks])),
            "lrs": sorted({*before.lrs, *self.lrs}),
            "seeds": sorted({*before.seeds, *self.seeds}),
            "epochs": {**before.epochs, **self.epochs},
            "description": self.extra.get("description"),
        }
        write_json(self.output / "runs" / GRID_FILE, content)


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
        """The folder of the run's files."""
        return self.grid.output / "runs" / RunKey(self.model.name, self.task.name, self.lr, self.seed).folder

    @property
    def name(self) -> str:
        """The name of the run in messages."""
        return f"{self.model.name} {self.task.name} {self.folder.name}"

    @property
    def data(self) -> PreparedFolder:
        """The task's prepared data."""
        return self.grid.tasks[self.task.name]

    @property
    def epochs(self) -> int:
        """The number of epochs."""
        return self.grid.epochs[self.task.name]

    @property
    def rivals(self) -> list["Run"]:
        """All runs of the same model and task, including this one."""
        return [other for other in self.grid.runs if other.model is self.model and other.task is self.task]

    def objective_arguments(self) -> dict[str, Any]:
        """Return the arguments that all objectives take."""
        return {
            "network": Network(self.model.options),
            "batch_size": self.grid.batch_size,
            "batch_size_valid": VALID_BATCH_SIZE,
            "seed": self.seed,
            "begins_with": self.model.checkpoint,
            "no_padding": self.grid.no_padding,
            "longest": self.tokens_per_sample,
        }

    @cached_property
    def settings(self) -> dict[str, Any]:
        """All settings that determine the result, independent of where the files are; as JSON."""
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
            "no_padding": self.grid.no_padding or None,
            "batch_size": self.grid.batch_size,
            "warmup_ratio": self.grid.warmup_ratio,
            **self.grid.extra,
        }

    @property
    def tokens_per_sample(self) -> int:
        """The maximum length of an input in tokens."""
        return min(self.model.options.max_positions, self.data.longest)

    @property
    def facts(self) -> list[SplitFacts]:
        """Facts about the splits that the run is trained and scored on."""
        splits = ("train", *development_splits(self.task))
        return [self.data.facts(split, self.tokens_per_sample, self.grid.max_train_rows) for split in splits]

    @property
    def updates(self) -> int:
        """The number of updates in all epochs."""
        return self.epochs * math.ceil(self.grid.benchmark.num_examples(self) / self.grid.batch_size)

    @property
    def train_rows(self) -> int:
        """The number of training rows per epoch."""
        in_file, _ = self.data.size_of("train")
        return min(in_file, self.grid.max_train_rows or in_file)

    @property
    def is_worth_resuming(self) -> bool:
        """True if the run saves its optimizer and can resume."""
        return self.epochs * self.train_rows >= self.grid.benchmark.rows_worth_resuming

    def differs_from(self, found: Mapping[str, Any]) -> str:
        """Describe how other settings differ, where None stands for a missing one; empty if they do not differ."""
        return differences({name: found.get(name) for name in self.settings}, self.settings)

    def refuse_other_settings(self) -> None:
        """Raise a UserError if the same model and task has a result with other settings than learning rate and seed."""
        wanted = {name: value for name, value in self.settings.items() if name not in ("lr", "seed")}
        for path in sorted(self.folder.parent.glob(f"*/{RESULT}")):
            found = results.read_run(path).settings
            differing = differences({name: found.get(name) for name in wanted}, wanted)
            if differing:
                raise UserError(
                    f"{path}: a report would mix this result with the grid's ({differing}); give another --output"
                )

    def result(self) -> Optional[results.Run]:
        """Return the result of a finished run, else None; raise a UserError if it belongs to other settings."""
        path = self.folder / RESULT
        if not path.is_file():
            return None
        result = results.read_run(path, self.grid.benchmark)
        differing = self.differs_from(result.settings)
        if differing:
            raise UserError(
                f"{path}: this is the result of another run ({differing}); remove it or give another --output"
            )
        return result
