"""The runs of a grid, what decides each, and the checkpoints that runs start from and leave.

OUT/runs/grid.json                        the grid that was asked for
OUT/runs/MODEL/TASK/lr2e-05_seed1/        one run: LOG always, RESULT where it ended well, FAILED where it did not
"""

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Optional

import torch
from fairseq import checkpoint_utils
from omegaconf import open_dict

from lazyformer_fairseq import USER_DIR
from lazyformer_fairseq.arguments import as_words, checkpoint_at, named_path
from lazyformer_fairseq.data.prepared_folder import PreparedFolder, SplitFacts
from lazyformer_fairseq.data.text.interface import SETTINGS_FILE, TextTokenizer
from lazyformer_fairseq.data.text.tokenizer import load_tokenizer
from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.evaluation.match import SavedHead, dictionary_hash, heads_in_checkpoint
from lazyformer_fairseq.fairseq_plugin.reliability.checkpoints import load_safely
from lazyformer_fairseq.finetuning import results
from lazyformer_fairseq.finetuning.benchmark import Benchmark
from lazyformer_fairseq.finetuning.results import (
    GRID_FILE,
    MODEL_NAME,
    RESULT,
    RunKey,
    ScoredTask,
    development_splits,
)
from lazyformer_fairseq.modules.networks.options import MaskedLMOptions
from lazyformer_fairseq.storage.json_files import sha256_of, write_json
from lazyformer_fairseq.storage.run_lock import differences

DROPOUT = 0.1  # LazyFormer, Table 5; whatever pre-training had


def name_checkpoints(texts: Iterable[str]) -> dict[str, Path]:
    """Model -> checkpoint, from ``NAME=PATH`` or ``PATH`` (named after its folder): a file, or its folder.

    Raises a UserError for a name that is taken or impossible, and where there is no such checkpoint.
    """
    models: dict[str, Path] = {}
    for text in texts:
        name, given = named_path(text)
        path = checkpoint_at(given)
        name = path.absolute().parent.name if name is None else name
        if not MODEL_NAME.fullmatch(name):
            raise UserError(f"--checkpoint {text}: {name!r} cannot name a model's folder; give one, as in m2x6={path}")
        if name in models:
            raise UserError(f"--checkpoint {text}: {models[name]} is called {name} too; give names, as in NAME={path}")
        models[name] = path
    return models


@dataclass(frozen=True)
class StartModel:
    """A pre-trained model.

    Attributes:
        sha256: of the checkpoint's file.
        updates: of its pre-training, where the checkpoint has them.
        options: of the model, as fairseq-train takes them.
        max_positions: ids of its longest input.
    """

    name: str
    checkpoint: Path
    sha256: str
    updates: Optional[int]
    parameters: int
    options: tuple[str, ...]
    max_positions: int


def load_start_models(checkpoints: Mapping[str, Path], tokenizer_folder: Path) -> list[StartModel]:
    """Reads the checkpoints (name -> file).

    Args:
        tokenizer_folder: of the data.

    Raises:
        UserError: a checkpoint cannot be loaded, is of another kind of model, or has another dictionary or tokenizer
            than the data.
    """
    tokenizer = load_tokenizer(tokenizer_folder)
    return [_load(name, path, tokenizer_folder, tokenizer) for name, path in checkpoints.items()]


def _load(name: str, path: Path, tokenizer_folder: Path, tokenizer: TextTokenizer) -> StartModel:
    state = load_safely(path)
    try:
        given = state["cfg"]["model"]
        given["sublayer_pattern"]  # no other kind of model has one
        options = {field.name: given.get(field.name, field.default) for field in fields(MaskedLMOptions)}
        symbols = (weights := state["model"])["dictionary_sha256"]
    except (KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{path}: not a checkpoint of this package's models ({error!r})") from error
    if not torch.equal(symbols, dictionary_hash(tokenizer.dictionary)):
        raise UserError(
            f"{path}: was trained with another dictionary than {tokenizer_folder}'s; prepare the data with this "
            "checkpoint's tokenizer, in a folder of their own"
        )
    beside = path.parent / "tokenizer" / SETTINGS_FILE  # equal dictionaries do not imply equal text settings
    if beside.is_file() and beside.read_bytes() != (tokenizer_folder / SETTINGS_FILE).read_bytes():
        raise UserError(
            f"{path}: the tokenizer beside it has other settings than {tokenizer_folder} (compare their "
            f"{SETTINGS_FILE}); prepare the data with this checkpoint's tokenizer, in a folder of their own"
        )
    history = state.get("optimizer_history") or [{}]
    return StartModel(
        name,
        path.absolute(),
        sha256_of(path),
        history[-1].get("num_updates") or None,  # an export does not say
        sum(weight.numel() for weight in weights.values() if weight.is_floating_point()),
        tuple(as_words({"arch": "lazyformer", **options, "dropout": DROPOUT})),
        int(options["max_positions"]),
    )


def load_finetuned(
    checkpoint: Path,
    data: Path,
    head: tuple[str, str],
    fits: Callable[[SavedHead], bool],
    wanted: str,
    settings_of: Callable[[], Mapping[str, Any]],
) -> tuple[torch.nn.Module, Any]:
    """A fine-tuned model, in evaluation mode and on the GPU if there is one, and its task of fairseq.

    Args:
        data: what the model is loaded for.
        head: the setting that names the head, and the name where it is not set.
        fits: whether a head will do.
        wanted: for messages, the head that is needed; %r in it is the name.
        settings_of: settings of the task that are to be changed, beside `data`.

    Raises:
        UserError: no such checkpoint, no head in it that fits, or it does not fit the settings.
    """
    if not checkpoint.is_file():
        result = checkpoint.with_name(RESULT)
        raise UserError(
            f"{checkpoint}: no such checkpoint; remove {result}, and run it again with --keep-checkpoints best"
        )
    state = load_safely(checkpoint)
    settings = state["cfg"]["task"]
    name = settings.get(head[0]) or head[1]
    found = heads_in_checkpoint(state["model"]).get(name)
    if found is None or not fits(found):
        raise UserError(f"{checkpoint}: has {wanted % name}")
    with open_dict(settings):
        settings.update({"data": str(data), **settings_of()})
    try:
        (model,), _, task = checkpoint_utils.load_model_ensemble_and_task([str(checkpoint)], state=state)
    except UserError as error:
        raise UserError(f"{checkpoint}, on {data}: {error}") from error
    return model.eval().to("cuda" if torch.cuda.is_available() else "cpu"), task


@dataclass(frozen=True, kw_only=True, eq=False)
class Grid:
    """The requested grid: every combination of models, tasks, rates and seeds, and what all its runs share.

    Attributes:
        tasks: name -> its prepared data.
        epochs: task -> number.
        precision: fp32, fp16 or bf16.
        max_train_rows: None for all.
        no_padding: whether a batch is a row of texts.
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
    no_padding: bool = False
    own: Mapping[str, Any] = field(default_factory=dict)

    @cached_property
    def runs(self) -> list["Run"]:
        """In the order of models, tasks, rates and seeds."""
        every = itertools.product(self.models, map(self.benchmark.tasks.get, self.tasks), self.lrs, self.seeds)
        return list(itertools.starmap(partial(Run, self), every))

    def warnings(self) -> list[str]:
        """Return sentences on the data that the reader of its scores must know, one of each."""
        of_pair = {(run.model.name, run.task.name): run for run in self.runs}
        return list(
            dict.fromkeys(
                f"{run.task.name}: {sentence}"
                for run in of_pair.values()
                for facts in run.facts
                for sentence in facts.warnings(run.model.name)
            )
        )

    def asked_before(self) -> Optional[results.Grid]:
        """What an existing grid.json asks for, None without one; UserError where that is a grid of other tasks."""
        path = self.output / "runs" / GRID_FILE
        if not path.exists():
            return None
        before = results.read_grid(path)
        if other := [name for name in before.tasks if name not in self.benchmark.tasks]:
            raise UserError(
                f"{path}: is a grid of {', '.join(other)}, not of {self.benchmark.name}; give another --output"
            )
        return before

    def write(self) -> None:
        """Writes grid.json. Keeps what an existing one asked for."""
        before = self.asked_before() or results.Grid({}, (), (), ())
        shared = ("max_train_rows", "precision", "batch_size", "warmup_ratio")
        content = {
            "format_version": results.FORMAT_VERSION,
            "models": {**before.models, **{model.name: str(model.checkpoint) for model in self.models}},
            "tasks": list(dict.fromkeys([*before.tasks, *self.tasks])),
            "lrs": sorted({*before.lrs, *self.lrs}),
            "seeds": sorted({*before.seeds, *self.seeds}),
            "epochs": {**before.epochs, **self.epochs},
            **{name: getattr(self, name) for name in shared},
            "started_from": {},
            **self.own,
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
        model, data = {"model": self.model.name, "checkpoint_sha256": self.model.sha256}, self.data.sha256
        own = {name: getattr(self, name) for name in ("lr", "seed", "epochs", "tokens_per_sample")}
        shared = {name: getattr(self.grid, name) for name in ("precision", "max_train_rows")}
        shared["no_padding"] = self.grid.no_padding or None
        return {**model, "task": self.task.name, "data_sha256": data, **own, **shared, **self.recorded}

    @property
    def recorded(self) -> dict[str, Any]:
        """Settings that results name beside those that each has; batch and warm-up are None where they are usual."""
        grid, usual = self.grid, self.grid.benchmark.usual
        return {
            **grid.own,
            "started_from": None,  # results of before may have a task here
            "batch_size": None if grid.batch_size == usual.batch_size else grid.batch_size,
            "warmup_ratio": None if grid.warmup_ratio == usual.warmup_ratio else grid.warmup_ratio,
        }

    @property
    def tokens_per_sample(self) -> int:
        """The longest input in ids."""
        return min(self.model.max_positions, self.data.longest)

    @property
    def facts(self) -> list[SplitFacts]:
        """Facts on the splits that it trains on and is marked on."""
        splits = ("train", *development_splits(self.task))
        return [self.data.facts(split, self.tokens_per_sample, self.grid.max_train_rows) for split in splits]

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

    def refuse_other_settings(self) -> None:
        """Raises a UserError where the model and the task have a result of others, whatever its rate and its seed."""
        wanted = {name: value for name, value in self.settings.items() if name not in ("lr", "seed")}
        for path in sorted(self.folder.parent.glob(f"*/{RESULT}")):
            found = results.read_run(path).settings
            if differing := differences({name: found.get(name) for name in wanted}, wanted):
                raise UserError(
                    f"{path}: a report would mix this result with those of now ({differing}); give another --output"
                )

    def result(self) -> Optional[results.Run]:
        """The result of a finished run; UserError where the folder holds one of other settings."""
        path = self.folder / RESULT
        if not path.is_file():
            return None
        result = results.read_run(path, self.grid.benchmark)
        if differing := self.differs_from(result.settings):
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
            *(("--no-padding",) if grid.no_padding else ()),
            *(("--cpu",) if cpu else ()),
            *((f"--{grid.precision}",) if grid.precision != "fp32" else ()),
        ]
