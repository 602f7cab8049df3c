"""A grid of fine-tuning runs, the settings that determine each run's result, and the models to start from.

OUT/runs/grid.json                        the requested grid
OUT/runs/MODEL/TASK/lr2e-05_seed1/        one run: train.log, and result.json if it succeeded or failed.json if not
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

DROPOUT = 0.1  # LazyFormer, Table 5; replaces the pre-training dropout
VALID_BATCH_SIZE = 32  # affects the last digits of scores


def name_checkpoints(texts: Iterable[str]) -> dict[str, Path]:
    """Parse checkpoints, written as ``NAME=PATH`` or ``PATH``, into a dictionary of paths by model name.

    A path leads to a checkpoint or its folder. Without a name, the model is named after the checkpoint's folder.

    Raises:
        UserError: two models have the same name, a name is not allowed, or a checkpoint does not exist.
    """
    models: dict[str, Path] = {}
    for text in texts:
        name, given = named_path(text)
        path = checkpoint_at(given)
        if name is None:
            name = path.absolute().parent.name
        if not MODEL_NAME.fullmatch(name):
            raise UserError(f"{text}: {name!r} cannot be used as a folder name; name the model, as in m2x6={path}")
        if name in models:
            raise UserError(f"{text}: {models[name]} is also called {name}; use different names, as in NAME={path}")
        models[name] = path
    return models


@dataclass(frozen=True)
class StartModel:
    """A pre-trained model to fine-tune.

    Attributes:
        name: the model's name in tables and folders.
        checkpoint: the checkpoint file.
        sha256: the file's SHA-256 hash.
        updates: number of pre-training updates; None if the checkpoint does not contain it.
        parameters: number of parameters.
        options: the model's options, with dropout set for fine-tuning.
    """

    name: str
    checkpoint: Path
    sha256: str
    updates: Optional[int]
    parameters: int
    options: MaskedLMOptions


def load_start_models(checkpoint_of: Mapping[str, Path], tokenizer_folder: Path) -> list[StartModel]:
    """Load the pre-trained models to fine-tune.

    Args:
        checkpoint_of: checkpoint files by model name.
        tokenizer_folder: the tokenizer that the data was prepared with.

    Raises:
        UserError: a checkpoint cannot be loaded or contains a different type of model, or its dictionary or tokenizer
            does not match the data.
    """
    symbols = dictionary_hash(load_tokenizer(tokenizer_folder).dictionary)
    return [_load_start_model(name, path, tokenizer_folder, symbols) for name, path in checkpoint_of.items()]


def _load_start_model(name: str, path: Path, tokenizer_folder: Path, symbols: torch.Tensor) -> StartModel:
    state = checkpoints.load(path)
    weights = state["model"]
    given = state["cfg"].get("model")
    if loading.is_causal(state) or not isinstance(given, dict) or "sublayer_pattern" not in given:
        raise UserError(
            f"{path} cannot be fine-tuned, because it does not contain a masked language model from this package"
        )
    if "dictionary_sha256" not in weights:
        raise UserError(f"{path}: not a checkpoint from this package, because it contains no hash of a dictionary")
    options = {each.name: given.get(each.name, each.default) for each in fields(MaskedLMOptions)}

    remedy = "prepare the data with this checkpoint's tokenizer, in a separate folder"
    if not torch.equal(weights["dictionary_sha256"], symbols):
        raise UserError(f"{path} was trained with a different dictionary than the one in {tokenizer_folder}; {remedy}")
    beside = path.parent / "tokenizer" / SETTINGS_FILE  # equal dictionaries do not imply equal text settings
    if beside.is_file() and beside.read_bytes() != (tokenizer_folder / SETTINGS_FILE).read_bytes():
        raise UserError(
            f"{path}: the tokenizer beside this checkpoint has different settings from {tokenizer_folder} (compare "
            f"{SETTINGS_FILE} in both); {remedy}"
        )

    history = state.get("optimizer_history") or [{}]
    return StartModel(
        name=name,
        checkpoint=path.absolute(),
        sha256=sha256_of(path),
        updates=history[-1].get("num_updates") or None,  # missing in exports
        parameters=sum(weight.numel() for weight in weights.values() if weight.is_floating_point()),
        options=replace(MaskedLMOptions(**options), dropout=DROPOUT),
    )


class RunBenchmark(TaskFamily, Protocol):
    """The benchmark interface that runs use; see :class:`~lazyformer_fairseq.finetuning.benchmark.Benchmark`."""

    rows_worth_resuming: int

    def num_examples(self, run: "Run") -> int:
        """Return the number of examples per epoch."""

    def objective(self, run: "Run") -> HeadObjective:
        """Return the training objective for a run."""

    def baseline(self, run: "Run", split: str) -> dict[str, float]:
        """Return the metrics of a model-free baseline."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Grid:
    """A grid of runs: all combinations of models, tasks, learning rates and seeds, with shared settings.

    Attributes:
        tasks: prepared data by task name.
        epochs: number of epochs by task name.
        precision: fp32, fp16 or bf16.
        max_train_rows: number of training rows per task; None for all.
        no_padding: whether to concatenate a batch's texts into one row instead of padding them.
        batch_size: rows per update.
        warmup_ratio: fraction of the updates used for learning rate warm-up.
        report_to: names of experiment trackers, which do not affect results.
        extra: benchmark-specific settings.
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
        """All runs, ordered by model, task, learning rate and seed."""
        combinations = itertools.product(self.models, self.tasks, self.lrs, self.seeds)
        return [Run(self, model, self.benchmark.tasks[task], lr, seed) for model, task, lr, seed in combinations]

    @property
    def one_run_per_model_and_task(self) -> list["Run"]:
        """One run per model and task."""
        run_of = {(run.model.name, run.task.name): run for run in self.runs}
        return list(run_of.values())

    def warnings(self) -> list[str]:
        """Return warnings, without duplicates, about data issues that affect how to interpret the scores."""
        return results.warnings_on(
            (run.model.name, run.task.name, facts) for run in self.one_run_per_model_and_task for facts in run.facts
        )

    def existing_grid(self) -> Optional[results.Grid]:
        """Read grid.json if it exists; raise a UserError if its tasks are from a different benchmark."""
        path = self.output / "runs" / GRID_FILE
        if not path.exists():
            return None
        before = results.read_grid(path)
        other = [name for name in before.tasks if name not in self.benchmark.tasks]
        if other:
            raise UserError(
                f"{path} is from a grid for {', '.join(other)}, not for {self.benchmark.name}; use a different --output"
            )
        return before

    def write(self) -> None:
        """Write grid.json; if the file already exists, merge the new runs with the ones that it lists."""
        before = self.existing_grid() or results.Grid({}, (), (), ())
        models = {model.name: str(model.checkpoint) for model in self.models}
        content = {
            "format_version": results.FORMAT_VERSION,
            "models": {**before.models, **models},
            "tasks": list(dict.fromkeys([*before.tasks, *self.tasks])),
            "lrs": sorted({*before.lrs, *self.lrs}),
            "seeds": sorted({*before.seeds, *self.seeds}),
            "epochs": {**before.epochs, **self.epochs},
            "description": self.extra.get("description"),
        }
        write_json(self.output / "runs" / GRID_FILE, content)


@dataclass(frozen=True, eq=False)
class Run:
    """A single fine-tuning run of a grid."""

    grid: Grid
    model: StartModel
    task: ScoredTask
    lr: float
    seed: int

    @property
    def folder(self) -> Path:
        """The folder that contains the run's files."""
        key = RunKey(self.model.name, self.task.name, self.lr, self.seed)
        return self.grid.output / "runs" / key.folder

    @property
    def name(self) -> str:
        """The run's name in messages."""
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
    def runs_of_same_model_and_task(self) -> list["Run"]:
        """All runs of the same model and task, including this one."""
        return [other for other in self.grid.runs if other.model is self.model and other.task is self.task]

    def objective_arguments(self) -> dict[str, Any]:
        """Return the arguments common to all objectives."""
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
        """All settings that determine the result, except file locations, as JSON-serializable values."""
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
        """The maximum input length in tokens."""
        return min(self.model.options.max_positions, self.data.longest)

    @property
    def facts(self) -> list[SplitFacts]:
        """Facts about the splits used for training and scoring."""
        splits = ("train", *development_splits(self.task))
        return [self.data.facts(split, self.tokens_per_sample, self.grid.max_train_rows) for split in splits]

    @property
    def updates(self) -> int:
        """The total number of updates over all epochs."""
        examples = self.grid.benchmark.num_examples(self)
        updates_per_epoch = math.ceil(examples / self.grid.batch_size)
        return self.epochs * updates_per_epoch

    @property
    def train_rows(self) -> int:
        """The number of training rows per epoch."""
        in_file, _ = self.data.size_of("train")
        return min(in_file, self.grid.max_train_rows or in_file)

    @property
    def is_worth_resuming(self) -> bool:
        """True if the run is long enough to save its optimizer state and be resumable."""
        return self.epochs * self.train_rows >= self.grid.benchmark.rows_worth_resuming

    def describe_differences(self, found: Mapping[str, Any]) -> str:
        """Describe the differences between `found` and the run's settings; return an empty string if there are none."""
        return differences({name: found.get(name) for name in self.settings}, self.settings)

    def refuse_other_settings(self) -> None:
        """Raise a UserError if a result for the same model and task differs in any setting besides lr and seed."""
        wanted = {name: value for name, value in self.settings.items() if name not in ("lr", "seed")}
        for path in sorted(self.folder.parent.glob(f"*/{RESULT}")):
            found = results.read_run(path).settings
            differing = differences({name: found.get(name) for name in wanted}, wanted)
            if differing:
                raise UserError(
                    f"{path} has different settings from the grid ({differing}), and a report would mix the two; use "
                    "a different --output"
                )

    def result(self) -> Optional[results.Run]:
        """Return the run's result, or None if it has not finished; raise a UserError if its settings differ."""
        path = self.folder / RESULT
        if not path.is_file():
            return None
        result = results.read_run(path, self.grid.benchmark)
        differing = self.describe_differences(result.settings)
        if differing:
            raise UserError(
                f"{path} is the result of a different run ({differing}); remove the file or use a different --output"
            )
        return result
