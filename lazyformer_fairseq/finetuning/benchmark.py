"""The interface that benchmarks implement, used by the grid, the queue, training and the report.

A benchmark is one task, or several tasks that share a table, as in GLUE. Its file in `finetuning/tasks` defines how
data is prepared and loaded, the objective of a run, how predictions are written, and which baselines and notes the
report prints with the scores. All benchmarks share the code for everything else: start models, learning rates and
seeds, executors, resuming, medians and confidence bounds, and plots.
"""

import re
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar, Optional

import numpy as np

from lazyformer_fairseq.data.labelled_files import TaskDescription
from lazyformer_fairseq.data.prepared_folder import PreparedFolder, PreparedTask, sample_row_indices
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
        tasks: task names.
        lrs: learning rates.
        seeds: random seeds.
        epochs: number of epochs, the same for all tasks.
        batch_size: rows per update.
        warmup_ratio: fraction of the updates used for learning rate warm-up.
    """

    tasks: tuple[str, ...]
    lrs: tuple[float, ...]
    seeds: tuple[int, ...]
    epochs: int
    batch_size: int
    warmup_ratio: float


@dataclass(frozen=True)
class Score:
    """A score in the report's table: one metric on one development split of a task.

    Attributes:
        name: the score's name in the paper.
        task: the name of the task.
        metric: the name of the metric.
        split: fairseq's name for the development split, a key of the task's `splits`.
    """

    name: str
    task: str
    metric: str
    split: str = "valid"


@dataclass(frozen=True)
class TableRow:
    """A row of the report's main table.

    Attributes:
        name: the model's name.
        updates: number of pre-training updates; None if unknown.
        scores: the known scores by name, in percent.
        marks: the mark printed after each score, by the score's name.
    """

    name: str
    updates: Optional[int]
    scores: Mapping[str, float]
    marks: Mapping[str, str] = field(default_factory=dict)


class Benchmark(ABC):
    """Base class of benchmarks: one or more tasks that can be fine-tuned and reported together.

    Attributes:
        name: the name in messages, such as GLUE or SQuAD.
        key: the name on the command line and in the report's file names.
        tasks: the tasks by name.
        protocols: the protocols by name; the first is the default.
        options: field names of the benchmark-specific settings that this benchmark accepts.
        rows_worth_resuming: minimum number of training rows, over all epochs, for a run to be resumable. A shorter run
            takes only minutes, and starts over if it was killed. A longer run saves its state after each epoch,
            including the optimizer state, which is twice the size of the model, and resumes after the last saved epoch.
        prepared_subfolder: the grid's subfolder that contains the prepared data.
        scores: the scores in the report's table.
        average: whether the table includes the mean of the scores.
        averages_available: whether the table includes the mean of the available scores if some tasks are missing.
        baseline_name: the name of the baseline in the table.
    """

    name: ClassVar[str]
    key: ClassVar[str]
    tasks: ClassVar[Mapping[str, ScoredTask]]
    protocols: ClassVar[Mapping[str, TuningProtocol]]
    options: ClassVar[frozenset[str]] = frozenset()
    rows_worth_resuming: ClassVar[int] = 200_000
    prepared_subfolder: ClassVar[str] = "tasks"
    scores: ClassVar[tuple[Score, ...]]
    average: ClassVar[bool] = False
    averages_available: ClassVar[bool] = False
    baseline_name: ClassVar[str]

    @property
    def default_protocol(self) -> TuningProtocol:
        """The default protocol."""
        return next(iter(self.protocols.values()))

    # --- data ---------------------------------------------------------------------------------------------------------

    def choose_tasks(self, names: Sequence[str]) -> list[str]:
        """Return the named tasks, or the default tasks if no names are passed.

        Raises:
            UserError: a task is unknown or has no training data.
        """
        for name in names:
            if name not in self.tasks:
                raise UserError(f"--tasks: {name!r} is not a {self.name} task; known tasks are {', '.join(self.tasks)}")
        return list(names or self.default_protocol.tasks)

    def untrainable_tasks(self, names: Sequence[str], data: Path) -> dict[str, str]:  # noqa: ARG002  for other benchmarks
        """Return the tasks that no model can be trained on, each with a sentence that explains why.

        Args:
            names: the selected tasks.
            data: the folder with the official files or the prepared data.

        Raises:
            UserError: no model can be trained on any of the tasks.
        """
        return {}

    @abstractmethod
    def prepare(self, wanted: GridSettings, positions: Collection[int] = ()) -> str:
        """Prepare the grid's data, or reuse existing data, and return an overview for the user.

        Args:
            wanted: settings with the official files, the tokenizer folder and the tasks; if `tasks` is empty, all tasks
                whose files exist are prepared.
            positions: maximum input lengths of the models; for each, the overview counts the truncated inputs.

        Raises:
            UserError: a file is missing or invalid, or the folder contains data prepared with different settings.
        """

    @abstractmethod
    def load(self, folder: Path, names: Sequence[str]) -> Mapping[str, PreparedFolder]:
        """Load and check each task's data from `folder`; raise a UserError if it is missing or damaged."""

    def num_examples(self, run: Run) -> int:
        """Return the number of examples per epoch."""
        return run.train_rows

    def longest_input(
        self,
        wanted: GridSettings,  # noqa: ARG002  for benchmarks whose inputs are not cut
        prepared: Optional[PreparedFolder] = None,  # noqa: ARG002
    ) -> Optional[int]:
        """Return the length of the longest input in tokens; None if inputs are truncated to the model's maximum length.

        Args:
            wanted: the settings, which determine the length if the data has not been prepared yet.
            prepared: the data, if it has been prepared.
        """
        return None

    # --- runs ---------------------------------------------------------------------------------------------------------

    @abstractmethod
    def extra_settings(self, given: GridSettings, prepared: Mapping[str, PreparedFolder]) -> dict[str, Any]:
        """Return this benchmark's additional settings that affect results, as JSON-serializable values."""

    @abstractmethod
    def objective(self, run: Run) -> HeadObjective:
        """Return the training objective for a run."""

    @abstractmethod
    def baseline(self, run: Run, split: str) -> dict[str, float]:
        """Return the metrics of a model-free baseline, which may use the training labels."""

    # --- report -------------------------------------------------------------------------------------------------------

    @property
    def columns(self) -> Mapping[str, tuple[str, ...]]:
        """The columns of the report's table, each with the names of the scores in it."""
        return {score.name: (score.name,) for score in self.scores}

    def other_rows(self, results: Results) -> Iterable[TableRow]:
        """Return the table rows below our models: baselines and results from papers."""
        scores = {}
        for score in self.scores:
            value = results.baseline(score.task, score.split, score.metric)
            if value is not None:
                scores[score.name] = value
        return [TableRow(self.baseline_name, None, scores)]

    def notes(self, results: Results) -> Iterator[str]:  # noqa: ARG002  for other benchmarks
        """Yield short notes that help the reader compare the scores with other work."""
        yield "Each score is the median over seeds at the best learning rate, times 100."

    # --- predictions --------------------------------------------------------------------------------------------------

    @abstractmethod
    def predict(self, runs: Mapping[str, Path], folder: Path, wanted: PredictSettings) -> list[str]:
        """Predict unlabeled data with fine-tuned runs, and write the predictions to `folder`.

        Args:
            runs: run folders or checkpoints, by task.
            folder: an existing folder.
            wanted: the command's options.

        Returns:
            The lines that the command prints: one per file, and notes.
        """


class TextsBenchmark(Benchmark):
    """Base class of benchmarks whose tasks label texts or text pairs.

    Attributes:
        prepared: the class that represents a task's prepared folder.
        EXAMPLE_FILE: a file name used in messages as an example of a file to label.
    """

    prepared: ClassVar[type[PreparedTask]] = PreparedTask
    EXAMPLE_FILE: ClassVar[str] = "texts.tsv"
    options = frozenset(("max_length", "max_train_rows", "glue_head"))
    baseline_name = "majority class or constant"

    def place(self, folder: Path, name: str) -> Path:
        """Return the path of a task's prepared data in `folder`."""
        return folder / name

    def load(self, folder: Path, names: Sequence[str]) -> dict[str, PreparedTask]:
        """Load and check each task's prepared data.

        Raises:
            UserError: data is missing or damaged, or the tasks were prepared with different tokenizers.
        """
        missing = [name for name in names if not self.prepared.is_at(self.place(folder, name))]
        if missing:
            raise UserError(
                f"{folder} contains no prepared data for {', '.join(missing)}; pass the official files with --data, or "
                "select only the tasks that you want, as in --tasks CoLA,RTE"
            )
        found = {name: self.prepared.load(self.place(folder, name)) for name in names}
        first = next(iter(found.values()))
        for name, prepared in found.items():
            if prepared.manifest["tokenizer"] != first.manifest["tokenizer"]:
                raise UserError(f"{folder}: {name} and {first.task.name} were prepared with different tokenizers")
            for split in prepared.task.splits:
                if not split.startswith("test"):
                    prepared.read(split, None, 0)
        return found

    def extra_settings(
        self,
        given: GridSettings,
        prepared: Mapping[str, PreparedTask],  # noqa: ARG002  for SQuAD
    ) -> dict[str, Any]:
        """Return the head's type and dropout."""
        return head_settings(given.glue_head)

    def arguments_of(self, run: Run) -> dict[str, Any]:
        """Return the arguments for an objective that labels texts."""
        arguments = run.objective_arguments()
        dropout = run.grid.extra["head_dropout"]
        if dropout is not None:
            arguments["network"] = Network(replace(run.model.options, pooler_dropout=dropout))
        return {**arguments, "data": str(run.data.folder), "max_train_rows": run.grid.max_train_rows}

    def objective(self, run: Run) -> LabelledTextsObjective:
        """Return the classification or regression objective."""
        return LabelledTextsObjective(head_type=run.grid.extra["head"] or "dense", **self.arguments_of(run))

    def baseline(self, run: Run, split: str) -> dict[str, float]:
        """Return the metrics of a constant prediction derived from the training labels."""
        task: TaskDescription = run.data.task
        seen = run.data.read("train", None, 0).targets
        seen = seen[sample_row_indices(len(seen), run.train_rows)]
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
        """Raise a UserError, because these tasks need a file of texts to label."""
        model = next(iter(runs.values()), "MODEL")
        raise UserError(f"{self.name}: pass the texts too, as in `lazyformer predict {model} {self.EXAMPLE_FILE}`")


def _best_constant_list(targets: np.ndarray, metric: Metric) -> np.ndarray:
    """Return a 0/1 vector (L,) with the k most frequent labels, where k maximizes the score on `targets` (N, L)."""

    def score(labels: np.ndarray) -> float:
        guesses = np.broadcast_to(labels, targets.shape)
        return metric(guesses, targets)

    by_frequency = np.argsort(-targets.sum(0), kind="stable")
    rank = np.argsort(by_frequency)
    candidates = [(rank < count).astype(np.int64) for count in range(len(rank) + 1)]
    return max(candidates, key=score)


def head_settings(text: Optional[str]) -> dict[str, Any]:
    """Parse the head's type and dropout from ``TYPE[:DROPOUT]``; None selects the default.

    The default dropout of a linear head is 0.1, as published.
    """
    head_type, _, dropout = (text or "dense").partition(":")
    if head_type not in ("dense", "linear") or not re.fullmatch(r"(0(\.\d+)?)?", dropout):
        raise UserError(
            f"--glue-head {text}: must be dense or linear, optionally with a dropout below 1, as in dense:0.1"
        )
    if head_type == "linear":
        return {"head": head_type, "head_dropout": float(dropout or 0.1)}
    head_dropout = None
    if dropout:
        head_dropout = float(dropout)
    return {"head": None, "head_dropout": head_dropout}
