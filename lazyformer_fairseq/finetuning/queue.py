"""A queue that completes each run of a grid exactly once, even if processes die in between.

A run is finished if its result.json exists. That file is written last and atomically, so the queue keeps no other
state: after a restart it executes the unfinished runs.
"""

import shutil
from collections.abc import Sequence
from pathlib import Path

from lazyformer_fairseq.executors.interface import Call, Executor, JobResult, LostError, reason, run_calls
from lazyformer_fairseq.finetuning import results
from lazyformer_fairseq.finetuning.grid import Grid, Run
from lazyformer_fairseq.finetuning.results import BEST, FAILED, LOG
from lazyformer_fairseq.finetuning.training import fine_tune
from lazyformer_fairseq.progress import Progress
from lazyformer_fairseq.storage.in_place import last_line, refuse_foreign
from lazyformer_fairseq.storage.json_files import write_json
from lazyformer_fairseq.storage.run_lock import run_lock

ATTEMPTS = 2  # per run


class RunQueue:
    """A queue that executes the unfinished runs of a grid.

    Args:
        grid: the grid.
        executor: the executor for the runs.
        keep: the checkpoints to keep: ``all``, ``best`` (the best run per model and task) or ``none``.
        threads: threads per run on a CPU.

    Attributes:
        results: the results of finished runs, by folder.
        failed: error messages of the runs that failed in all attempts.
    """

    def __init__(self, grid: Grid, executor: Executor, keep: str = "best", threads: int = 1):
        self.grid = grid
        self.executor = executor
        self.keep = keep
        self.threads = threads
        self.results: dict[Path, results.Run] = {}
        self.failed: dict[Run, str] = {}

    def run(self) -> None:
        """Execute all unfinished runs.

        Raises:
            UserError: the folder contains a result with different settings, or another queue is using the folder.
            KeyboardInterrupt: the user pressed Ctrl-C; all processes have been stopped.
        """
        self.grid.existing_grid()  # raises an error if the grid's tasks are from a different benchmark
        with run_lock(self.grid.output / "runs"):
            waiting = self._unfinished()
            self.grid.write()
            if waiting:
                log = waiting[0].folder / LOG
                at_once = min(self.executor.free, len(waiting))
                Progress.write(f"{len(waiting)} runs, {at_once} in parallel; the log of the first is {log}")
            with Progress(total=len(self.grid.runs), initial=len(self.results), desc="runs", unit=" runs") as bar:
                for attempt in range(1, ATTEMPTS + 1):
                    waiting = self._try_each(waiting, bar, is_last=attempt == ATTEMPTS)
            self._remove_checkpoints(self.grid.runs)

    def _unfinished(self) -> list[Run]:
        """Read the results of finished runs, and return the unfinished runs, largest first to balance the load."""
        waiting = []
        for run in sorted(self.grid.runs, key=_work, reverse=True):
            result = run.result()
            if result is not None:
                self.results[run.folder] = result
                continue
            refuse_foreign(run.folder / LOG)  # otherwise, the process could not log its error
            (run.folder / FAILED).unlink(missing_ok=True)
            waiting.append(run)
        return waiting

    def _try_each(self, runs: Sequence[Run], bar: Progress, is_last: bool) -> list[Run]:
        """Execute runs, and return the failed ones to retry; the list is empty after the last attempt."""
        run_of = {Call(fine_tune, (run, self.threads)): run for run in runs}
        failed = []
        for ended in run_calls(list(run_of), self.executor):
            if ended is not None:
                run = run_of[ended.call]
                if ended.error is None:
                    self._succeed(run)
                elif self._should_retry(run, ended, is_last):
                    failed.append(run)
            bar.update(len(self.results) + len(self.failed) - bar.n)
        return failed

    def _succeed(self, run: Run) -> None:
        result = run.result()
        assert result is not None, "a run that succeeds has written its result"
        self.results[run.folder] = result
        metric = run.task.selecting_metric
        scores = "/".join(f"{values[metric]:.4f}" for values in result.metrics.values())
        baseline = next(iter(result.baseline.values()))
        Progress.write(
            f"[{len(self.results)}/{len(self.grid.runs)}] {run.name}: {metric} {scores} at epoch "
            f"{result.best_epoch} of {run.epochs} (baseline {baseline[metric]:.4f}), {result.seconds:.0f} s"
        )
        self._remove_checkpoints(run.runs_of_same_model_and_task)

    def _should_retry(self, run: Run, ended: JobResult, is_last: bool) -> bool:
        """Report why a run failed, and return True if the queue must retry it."""
        log = run.folder / LOG
        assert ended.error is not None
        message = reason(ended.error)
        if isinstance(ended.error, LostError):
            message += f"; the run's log ends with: {last_line(log)}"
        if ended.is_tried_again or not is_last:
            Progress.write(f"{run.name}: failed, and will be retried ({message})")
            return not ended.is_tried_again
        self.failed[run] = message
        write_json(run.folder / FAILED, {"attempts": ATTEMPTS, "message": message, "log": str(log)})
        Progress.write(f"{run.name}: FAILED ({message}); see {log}")
        return False

    def _remove_checkpoints(self, runs: Sequence[Run]) -> None:
        """Remove the checkpoints of finished runs that should not be kept."""
        if self.keep == "all":
            return
        for run in runs:
            is_kept = self.keep == "best" and self._is_best(run)
            if run.folder in self.results and not is_kept:
                (run.folder / BEST).unlink(missing_ok=True)
                shutil.rmtree(run.folder / "tokenizer", ignore_errors=True)

    def _is_best(self, run: Run) -> bool:
        """Return True if a run is the best finished run of its model and task; among ties the first run wins."""
        finished = [
            self.results[each.folder] for each in run.runs_of_same_model_and_task if each.folder in self.results
        ]
        best = results.TaskResults(run.task, finished, failed=[], missing=[]).best
        return bool(best) and best[0].folder == run.folder


def _work(run: Run) -> float:
    """Estimate a run's amount of work, in tokens times parameters."""
    rows, tokens = run.data.size_of("train")
    return run.epochs * tokens * run.train_rows / rows * run.model.parameters
