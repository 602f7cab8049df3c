"""The interface between tasks and the code that runs and reports them: grid, queue, training and report.

A benchmark is one task, or several tasks that share a table, as in GLUE. Its file in `finetuning/tasks` defines how the
data is prepared and read, what a run learns, what a model predicts, and what the report prints next to its scores.
Everything else (start models, learning rates and seeds, processes or a cluster, resuming, medians and bounds, plots) is
shared.
"""

import re
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar, Optional

import numpy as np

from lazyformer_fairseq.data.labelled_files import TaskDescription
from lazyformer_fairseq.data.prepared_folder import PreparedFolder, PreparedTask, drawn_rows
from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.evaluation.metrics import METRICS, Metric
from lazyformer_fairseq.finetuning.grid import Run
from lazyformer_fairseq.finetuning.results import Results, ScoredTask
from lazyformer_fairseq.finetuning.settings import GridSettings, PredictSettings
from lazyformer_fairseq.training.objectives.head import HeadObjective
from lazyformer_fairseq.training.objectives.labelled_texts import LabelledTextsObjective
from lazyformer_fairseq.training.objectives.network import Network


@dataclass(frozen=True)
class TuningProtocol:
    """Default settings of fine-tuning.

    Attributes:
        tasks: names of tasks.
        lrs: learning rates.
        seeds: random seeds.
        epochs: number of epochs for every task.
        batch_size: rows per update.
        warmup_ratio: share of the updates during which the learning rate rises.
    """

    tasks: tuple[str, ...]
    lrs: tuple[float, ...]
    seeds: tuple[int, ...]
    epochs: int
    batch_size: int
    warmup_ratio: float


@dataclass(frozen=True)
class Score:
    """A score in the table of a report: a metric on a development split of a task.

    Attributes:
        name: the name that the paper prints.
        task: the name of the task.
        metric: the name of the metric.
        split: fairseq's name of the development split, a key of the task's `splits`.
    """

    name: str
    task: str
    metric: str
    split: str = "valid"


@dataclass(frozen=True)
class TableRow:
    """A row of the first table in a report.

    Attributes:
        name: the name of the model.
        updates: number of pre-training updates; None if unknown.
        scores: the known scores by name, in percent.
        marks: by name of a score, the mark printed after it.
    """

    name: str
    updates: Optional[int]
    scores: Mapping[str, float]
    marks: Mapping[str, str] = field(default_factory=dict)


class Benchmark(ABC):
    """The tasks that a grid may contain.

    Attributes:
        name: the name in messages, such as GLUE or SQuAD.
        key: the name on the command line and of the report's files.
        tasks: the tasks by name.
        protocols: the protocols by name; the first is the default.
        options: those fields of the settings that not all benchmarks accept, but this one does.
        rows_worth_resuming: number of rows over all epochs from which a run can resume. A shorter run takes only
            minutes and starts over after it was killed. A longer one saves its optimizer after each epoch, twice the
            size of its model, and resumes from there.
        prepared_in: the name of the subfolder of a grid that contains the prepared data.
        scores: the scores of the report's table.
        average: whether the table has their mean.
        averages_some: whether the table has the mean of the available scores if a grid lacks tasks.
        baseline_name: the name of the baseline in the table.
    """

    name: ClassVar[str]
    key: ClassVar[str]
    tasks: ClassVar[Mapping[str, ScoredTask]]
    protocols: ClassVar[Mapping[str, TuningProtocol]]
    options: ClassVar[frozenset[str]] = frozenset()
    rows_worth_resuming: ClassVar[int] = 200_000
    prepared_in: ClassVar[str] = "tasks"
    scores: ClassVar[tuple[Score, ...]]
    average: ClassVar[bool] = False
    averages_some: ClassVar[bool] = False
    baseline_name: ClassVar[str]

    @property
    def usual(self) -> TuningProtocol:
        """The protocol whose settings are not mentioned in results."""
        return next(iter(self.protocols.values()))

    # --- data ---------------------------------------------------------------------------------------------------------

    def choose_tasks(self, names: Sequence[str]) -> list[str]:
        """Return the named tasks, or the default ones if none are named.

        Raises:
            UserError: a task is unknown or cannot be trained.
        """
        for name in names:
            if name not in self.tasks:
                raise UserError(f"--tasks: {name!r} is not a {self.name} task; known tasks are {', '.join(self.tasks)}")
        return list(names or self.usual.tasks)

    def left_out(self, names: Sequence[str], data: Path) -> dict[str, str]:  # noqa: ARG002  for other benchmarks
        """Return those tasks that cannot be trained, each with a sentence that gives the reason.

        Args:
            names: the chosen tasks.
            data: the folder of official files, or of prepared data.

        Raises:
            UserError: no task can be trained.
        """
        return {}

    @abstractmethod
    def prepare(self, wanted: GridSettings, positions: Collection[int] = ()) -> str:
        """Prepare or reuse the folders of data that a grid reads, and return an overview for the user.

        Args:
            wanted: settings with official files, a tokenizer's folder and tasks; without tasks, those that have files.
            positions: numbers of positions of the models, for which the overview counts the inputs that are cut.

        Raises:
            UserError: a file is missing or wrong, or data with other settings is in the way.
        """

    @abstractmethod
    def load(self, folder: Path, names: Sequence[str]) -> Mapping[str, PreparedFolder]:
        """Return the checked data of each task from `folder`; raise a UserError if it is missing or damaged."""

    def num_examples(self, run: Run) -> int:
        """Return the number of examples per epoch."""
        return run.train_rows

    def longest_input(
        self,
        wanted: GridSettings,  # noqa: ARG002  for benchmarks whose inputs are not cut
        prepared: Optional[PreparedFolder] = None,  # noqa: ARG002
    ) -> Optional[int]:
        """Return the length of the longest input in tokens; None if inputs are cut to the model's maximum length.

        Args:
            wanted: the settings of data that is yet to be prepared.
            prepared: the data, if it has been prepared.
        """
        return None

    # --- runs ---------------------------------------------------------------------------------------------------------

    @abstractmethod
    def extra_settings(self, given: GridSettings, prepared: Mapping[str, PreparedFolder]) -> dict[str, Any]:
        """Return the settings that affect results and that only runs of this benchmark have, as JSON."""

    @abstractmethod
    def objective(self, run: Run) -> HeadObjective:
        """Return the objective of a run."""

    @abstractmethod
    def baseline(self, run: Run, split: str) -> dict[str, float]:
        """Return the metrics of predictions without a model, which may be based on the training labels."""

    # --- report -------------------------------------------------------------------------------------------------------

    @property
    def columns(self) -> Mapping[str, tuple[str, ...]]:
        """The columns of the report's table, each with the names of its scores."""
        return {score.name: (score.name,) for score in self.scores}

    def other_rows(self, results: Results) -> Iterable[TableRow]:
        """Return the rows below our models: baselines, and models of papers."""
        scores = {}
        for score in self.scores:
            value = results.baseline(score.task, score.split, score.metric)
            if value is not None:
                scores[score.name] = value
        return [TableRow(self.baseline_name, None, scores)]

    def notes(self, results: Results) -> Iterator[str]:  # noqa: ARG002  for other benchmarks
        """Yield notes of a sentence or two that a reader needs to compare the scores with others."""
        yield "A score is the best over the learning rates of the median over seeds, times 100."

    # --- predictions --------------------------------------------------------------------------------------------------

    @abstractmethod
    def predict(self, runs: Mapping[str, Path], folder: Path, wanted: PredictSettings) -> list[str]:
        """Write the predictions of runs for unlabelled data into `folder`.

        Args:
            runs: by task, the folder of a run, or a checkpoint.
            folder: an existing folder.
            wanted: the options of the command.

        Returns:
            The lines that the command prints: one per file, and remarks.
        """


class TextsBenchmark(Benchmark):
    """A benchmark of tasks that label texts or pairs of texts.

    Attributes:
        prepared: the class of a task's prepared folder.
        TEXTS: the name of a file to label, for messages.
    """

    prepared: ClassVar[type[PreparedTask]] = PreparedTask
    TEXTS: ClassVar[str] = "texts.tsv"
    options = frozenset(("max_length", "max_train_rows", "glue_head"))
    baseline_name = "majority class or constant"

    def place(self, folder: Path, name: str) -> Path:
        """Return the path of a task in the folder of prepared data."""
        return folder / name

    def load(self, folder: Path, names: Sequence[str]) -> dict[str, PreparedTask]:
        """Return the prepared data of each task.

        Raises:
            UserError: data is missing or damaged, or was prepared with another tokenizer than that of the first task.
        """
        missing = [name for name in names if not self.prepared.is_at(self.place(folder, name))]
        if missing:
            raise UserError(
                f"{folder}: {', '.join(missing)} not prepared; give the official files with --data, or name only the "
                "tasks that you want, as in --tasks CoLA,RTE"
            )
        found = {name: self.prepared.load(self.place(folder, name)) for name in names}
        first = next(iter(found.values()))
        for name, prepared in found.items():
            if prepared.manifest["tokenizer"] != first.manifest["tokenizer"]:
                raise UserError(f"{folder}: {name} was prepared with another tokenizer than {first.task.name}")
            for split in prepared.task.splits:
                if not split.startswith("test"):
                    prepared.read(split, None, 0)
        return found

    def extra_settings(
        self,
        given: GridSettings,
        prepared: Mapping[str, PreparedTask],  # noqa: ARG002  for SQuAD
    ) -> dict[str, Any]:
        """Return the type and dropout of the head."""
        return head_settings(given.glue_head)

    def arguments_of(self, run: Run) -> dict[str, Any]:
        """Return the arguments of an objective that labels texts."""
        arguments = run.objective_arguments()
        dropout = run.grid.extra["head_dropout"]
        if dropout is not None:
            arguments["network"] = Network(replace(run.model.options, pooler_dropout=dropout))
        return {**arguments, "data": str(run.data.folder), "max_train_rows": run.grid.max_train_rows}

    def objective(self, run: Run) -> LabelledTextsObjective:
        """Return the objective of predicting classes or scores."""
        return LabelledTextsObjective(head_type=run.grid.extra["head"] or "dense", **self.arguments_of(run))

    def baseline(self, run: Run, split: str) -> dict[str, float]:
        """Return the metrics of the best constant prediction, chosen from the training labels."""
        task: TaskDescription = run.data.task
        seen = run.data.read("train", None, 0).targets
        seen = seen[drawn_rows(len(seen), run.train_rows)]
        targets = run.data.read(split, None, 0).targets
        if task.is_regression:
            constant = seen.mean()
        elif task.is_multi_label:
            constant = _best_constant_list(np.array(seen), METRICS[task.selecting_metric])
        else:
            constant = np.bincount(seen).argmax()
        guesses = np.broadcast_to(constant, targets.shape)
        return {name: METRICS[name](guesses, np.array(targets)) for name in task.metrics}

    def predict(self, runs: Mapping[str, Path], folder: Path, wanted: PredictSettings) -> list[str]:  # noqa: ARG002
        """Raise a UserError: these tasks need texts, which are labelled one by one."""
        model = next(iter(runs.values()), "MODEL")
        raise UserError(f"{self.name}: give the texts too, as in `lazyformer predict {model} {self.TEXTS}`")


def _best_constant_list(targets: np.ndarray, metric: Metric) -> np.ndarray:
    """Return the most frequent labels (L,), in the number that scores best on all rows (N, L)."""
    rank = np.argsort(np.argsort(-targets.sum(0), kind="stable"))
    candidates = [(rank < count).astype(np.int64) for count in range(len(rank) + 1)]
    return max(candidates, key=lambda labels: metric(np.broadcast_to(labels, targets.shape), targets))


def head_settings(text: Optional[str]) -> dict[str, Any]:
    """Parse the type and dropout of the head from ``TYPE[:DROPOUT]``; None stands for the default.

    The default dropout of a linear head is 0.1, as published.
    """
    head_type, _, dropout = (text or "dense").partition(":")
    if head_type not in ("dense", "linear") or not re.fullmatch(r"(0(\.\d+)?)?", dropout):
        raise UserError(f"--glue-head {text}: give dense or linear, optionally with a dropout below 1, as in dense:0.1")
    if head_type == "linear":
        return {"head": head_type, "head_dropout": float(dropout or 0.1)}
    head_dropout = None
    if dropout:
        head_dropout = float(dropout)
    return {"head": None, "head_dropout": head_dropout}
