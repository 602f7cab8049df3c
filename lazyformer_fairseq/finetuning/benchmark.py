"""What a grid of fine-tuning runs, its queue and its report need to know of tasks: a file of `finetuning/tasks` each.

A benchmark is one task, or several that stand in one table, as GLUE's do. Its file says how the data is prepared and
read, what fairseq-train is told, how a model is marked, what it predicts, and what the report prints beside it. The
rest (start models, rates and seeds, processes or a cluster, resuming, medians and bounds, pictures) is shared.
"""

import re
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, Optional

from lazyformer_fairseq.data.labelled_files import TaskDescription
from lazyformer_fairseq.data.prepared_folder import PreparedFolder, PreparedTask
from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.finetuning.results import Results, ScoredTask
from lazyformer_fairseq.finetuning.settings import GridSettings, PredictSettings


class TuningProtocol(NamedTuple):
    """Settings of fine-tuning where the user says nothing.

    Attributes:
        epochs: of every task.
        batch_size: rows of an update.
        warmup_ratio: share of the updates in which the rate rises.
    """

    tasks: tuple[str, ...]
    lrs: tuple[float, ...]
    seeds: tuple[int, ...]
    epochs: int
    batch_size: int
    warmup_ratio: float


class Score(NamedTuple):
    """A number of a report's first table, and a panel of its pictures: a metric on a development split of a task.

    Attributes:
        name: as the paper prints it.
        task: name in the table of tasks.
        split: fairseq's name of the development split, a key of the task's `splits`.
        column: its name in CSV files.
    """

    name: str
    task: str
    split: str
    metric: str
    column: str


class TableRow(NamedTuple):
    """A row of the report's first table.

    Attributes:
        source: "ours", "baseline" or "paper".
        updates: of pre-training.
        scores: name of a score -> percent; those that are known.
        incomplete: tasks whose grid lacks runs.
        one_class: scores on development sets whose rows all have one label.
    """

    name: str
    source: str
    updates: Optional[int]
    scores: Mapping[str, float]
    incomplete: frozenset[str] = frozenset()
    one_class: frozenset[str] = frozenset()


class Benchmark(ABC):
    """The tasks that one grid may hold.

    Attributes:
        name: for messages: GLUE, SQuAD.
        key: on the command line, and of the report's files.
        tasks: by name.
        protocols: by name; the first is the default.
        options: fields of the settings that not all benchmarks take, and this one does.
        rows_worth_resuming: a run with fewer rows than these, all epochs counted, is over in minutes: after a kill it
            starts anew. A longer one saves its optimizer, three times the size of its model, after each epoch, and
            resumes from there.
        prepared_in: the folder of prepared data in that of a grid.
        cuts_inputs: whether inputs are cut to the positions that a model has.
        scores: of the report's first table.
        average: whether the table has their mean too.
        baseline_name: of the baseline, for pictures.
    """

    name: ClassVar[str]
    key: ClassVar[str]
    tasks: ClassVar[Mapping[str, ScoredTask]]
    protocols: ClassVar[Mapping[str, TuningProtocol]]
    options: ClassVar[frozenset[str]] = frozenset()
    rows_worth_resuming: ClassVar[int] = 200_000
    prepared_in: ClassVar[str] = "tasks"
    cuts_inputs: ClassVar[bool] = True
    scores: ClassVar[tuple[Score, ...]]
    average: ClassVar[bool] = False
    baseline_name: ClassVar[str]

    @property
    def usual(self) -> TuningProtocol:
        """The protocol whose settings need no mention in results."""
        return next(iter(self.protocols.values()))

    # --- data ---------------------------------------------------------------------------------------------------------

    def choose_tasks(self, names: Sequence[str]) -> list[str]:
        """The tasks that were named, else the usual ones; UserError for one that cannot be trained."""
        if unknown := [name for name in names if name not in self.tasks]:
            raise UserError(f"--tasks: {unknown[0]!r} is no {self.name} task; known are {', '.join(self.tasks)}")
        return list(names or self.usual.tasks)

    @abstractmethod
    def prepare(self, wanted: GridSettings, positions: Collection[int] = ()) -> str:
        """Makes the folders of data that a grid reads, or reuses them. Returns an overview for the user.

        Args:
            wanted: official files, a tokenizer's folder and tasks are named; no tasks: those that have files.
            positions: of the models, at which the overview counts inputs that are cut.

        Raises:
            UserError: a file is missing or wrong, or data of other settings is in the way.
        """

    @abstractmethod
    def load(self, folder: Path, names: Sequence[str]) -> Mapping[str, PreparedFolder]:
        """Task -> its prepared data in `folder`, checked; UserError where some is missing or damaged."""

    def longest_input(self, wanted: GridSettings) -> Optional[int]:
        """Tokens of the longest input that will be prepared, where they must fit the model."""
        return None

    # --- runs ---------------------------------------------------------------------------------------------------------

    def extra_settings(self, given: GridSettings, prepared: Mapping[str, PreparedFolder]) -> dict[str, Any]:
        """Settings that decide results and that only runs of this benchmark have, as JSON."""
        return {}

    @abstractmethod
    def train_options(
        self, task: ScoredTask, tokens: int, max_rows: Optional[int], own: Mapping[str, Any]
    ) -> list[str]:
        """What fairseq-train is told of task, criterion and head.

        Args:
            tokens: of the longest input.
            max_rows: to train on; None for all.
            own: as :meth:`extra_settings` returned them.
        """

    # --- report -------------------------------------------------------------------------------------------------------

    @property
    def columns(self) -> Mapping[str, tuple[str, ...]]:
        """Columns of the first table, and the scores that each holds."""
        return {score.name: (score.name,) for score in self.scores}

    def other_rows(self, results: Results) -> Iterable[TableRow]:
        """Rows under our models: baselines, and models of papers."""
        found = {score.name: results.baseline(score.task, score.split, score.metric) for score in self.scores}
        known = {name: value for name, value in found.items() if value is not None}
        return [TableRow(self.baseline_name, "baseline", None, known)]

    def notes(self, results: Results) -> Iterator[str]:
        """What a reader needs to compare the numbers with others, a sentence or two each."""
        yield "A score is the median over seeds at each learning rate, and of these medians the best; times 100."

    # --- predictions --------------------------------------------------------------------------------------------------

    def predict(self, runs: Mapping[str, Path], folder: Path, wanted: PredictSettings) -> list[str]:
        """Writes what the runs (task -> folder, or checkpoint) predict of unlabelled data into `folder`.

        Returns:
            What the command prints, a line of each file, and remarks.
        """
        raise UserError(f"{self.name} has no data without labels to predict")


class TextsBenchmark(Benchmark):
    """Tasks that label texts or pairs, whose runs are those of task and criterion ``glue``.

    Attributes:
        names_task: whether fairseq-train is told which task it is; else the folder of data says it.
        prepared: what the folder of a task is.
    """

    names_task: ClassVar[bool] = True
    prepared: ClassVar[type[PreparedTask]] = PreparedTask
    options = frozenset(("max_train_rows", "glue_head"))
    baseline_name = "majority class or constant"

    def place(self, folder: Path, name: str) -> Path:
        """Where a task lies in the folder of prepared data."""
        return folder / name

    def load(self, folder: Path, names: Sequence[str]) -> dict[str, PreparedTask]:
        """Raises a UserError for a task prepared with another tokenizer than the first, too."""
        if missing := [name for name in names if not self.prepared.is_at(self.place(folder, name))]:
            raise UserError(
                f"{folder}: {', '.join(missing)} not prepared; give the official files by --data, or name the tasks "
                "that you want, as in --tasks CoLA RTE"
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

    def train_options(
        self, task: TaskDescription, tokens: int, max_rows: Optional[int], own: Mapping[str, Any]
    ) -> list[str]:
        return [
            *("--task", "glue", "--criterion", "glue", "--tokens-per-sample", str(tokens)),
            *(("--glue-task", task.name) if self.names_task else ()),
            *(("--max-train-rows", str(max_rows)) if max_rows else ()),
            *(("--glue-head", own["head"]) if own["head"] else ()),
            *(("--pooler-dropout", repr(own["head_dropout"])) if own["head_dropout"] is not None else ()),
        ]

    def extra_settings(self, given: GridSettings, prepared: Mapping[str, PreparedTask]) -> dict[str, Any]:
        return head_settings(given.glue_head)


def head_settings(text: Optional[str]) -> dict[str, Any]:
    """Kind and dropout of the head from ``KIND[:DROPOUT]``, None for a default; a linear one's is 0.1, as published."""
    kind, _, dropout = (text or "dense").partition(":")
    if kind not in ("dense", "linear") or not re.fullmatch(r"(0(\.\d+)?)?", dropout):
        raise UserError(f"--glue-head {text}: give dense or linear, or a dropout below 1 too, as in dense:0.1")
    usual = None if kind == "dense" else 0.1
    return {"head": None if kind == "dense" else kind, "head_dropout": float(dropout) if dropout else usual}
