"""BabyLM's fine-tuning evaluation: seven GLUE and SuperGLUE tasks, as JSON lines files in one folder."""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import ClassVar

from lazyformer_fairseq.data.glue import BABYLM_PREFIX, BABYLM_TASKS
from lazyformer_fairseq.data.prepared_folder import PreparedTask
from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.finetuning.benchmark import Score, TuningProtocol
from lazyformer_fairseq.finetuning.results import Results
from lazyformer_fairseq.finetuning.settings import GridSettings
from lazyformer_fairseq.finetuning.tasks.glue import PublishedTasks


class BabyLM(PublishedTasks):
    """The tasks of BabyLM's 2025 evaluation; a folder may contain only some of them."""

    name = "BabyLM"
    key = "babylm"
    tasks = BABYLM_TASKS
    protocols: ClassVar = {
        "babylm": TuningProtocol(
            tasks=tuple(BABYLM_TASKS),
            lrs=(5e-5,),
            seeds=(42,),
            epochs=10,
            batch_size=32,
            warmup_ratio=0.06,
        )
    }
    scores = tuple(
        Score(name.removeprefix(BABYLM_PREFIX), name, task.selecting_metric) for name, task in BABYLM_TASKS.items()
    )
    averages_available = True

    def untrainable_tasks(self, names: Sequence[str], data: Path) -> dict[str, str]:
        """Return the tasks that lack a training file, each with a sentence for the user.

        Raises:
            UserError: none of the tasks has a training file.
        """
        reasons = {}
        for name in names:
            file = self.tasks[name].splits["train"].file
            if not (data / file).is_file() and not PreparedTask.is_at(data / name):
                reasons[name] = f"{name} is skipped, because {data} contains no {file} to train on"
        if len(reasons) == len(names):
            raise UserError(
                f"{data} contains no training file for {', '.join(names)}; with --data, pass the folder that contains "
                f"{file} and the other files"
            )
        return reasons

    def prepare(self, wanted: GridSettings, positions: Collection[int] = ()) -> str:
        """Prepare the tasks that have a training file, and return an overview."""
        names = self.choose_tasks(wanted.tasks)
        left_out = self.untrainable_tasks(names, wanted.data)
        present = tuple(name for name in names if name not in left_out)
        overview = super().prepare(replace(wanted, tasks=present), positions)
        return "\n".join([*left_out.values(), overview])

    def notes(self, results: Results) -> Iterator[str]:
        """Yield short notes that help the reader compare the scores with other work."""
        yield (
            "The score is the F1 of the second class for MRPC and QQP, and the accuracy for the other tasks, times "
            "100. It is computed on the rows that the best epoch was selected on."
        )
        missing = [score.name for score in self.scores if score.task not in results.grid.tasks]
        if missing:
            yield (
                f"The average lacks {', '.join(missing)}, so it cannot be compared with published averages over all "
                f"{len(self.scores)} tasks."
            )


BENCHMARK = BabyLM()
