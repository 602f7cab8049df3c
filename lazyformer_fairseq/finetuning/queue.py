"""The queue: does every run of a grid once, whatever dies in between.

A run is finished when its result.json is there. That file is written last and whole, so the queue needs no memory of
its own: restarted, it takes what is not finished.
"""

import math
import os
import re
import shutil
import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Optional

from tqdm import tqdm

from lazyformer_fairseq.finetuning.executors import Cluster, ClusterJob, Job, Workers
from lazyformer_fairseq.finetuning.grid import Grid, Run
from lazyformer_fairseq.finetuning.results import ATTEMPT, BEST, FAILED, LOG
from lazyformer_fairseq.storage.json_files import write_json
from lazyformer_fairseq.storage.run_lock import run_lock

ATTEMPTS = 2
SHOW_EVERY = 1.0  # seconds
TAIL = 16384  # bytes of a log


class RunQueue:
    """Runs a grid.

    Args:
        executor: where runs go.
        keep: checkpoints to keep: those of ``all`` runs, the ``best`` run's of a model and task, or ``none``.

    Attributes:
        results: of finished runs, by folder.
        failed: runs that failed for good, and why.
    """

    def __init__(self, grid: Grid, executor: Workers | Cluster, keep: str = "best"):
        self.grid = grid
        self.executor = executor
        self.keep = keep
        self.results: dict[Path, dict[str, Any]] = {}
        self.failed: dict[Run, str] = {}
        self._attempts: Counter[Path] = Counter()
        self._jobs: dict[Job | ClusterJob, Run] = {}
        self._waiting: list[Run] = []

    def run(self) -> None:
        """Runs everything that is not finished.

        Raises:
            UserError: a result of other settings is in the way, or another queue is at work on the folder.
            KeyboardInterrupt: after all processes were stopped.
        """
        self.grid.refuse_other_benchmark()
        with run_lock(self.grid.output / "runs"):
            self._look_at_folders()
            self.grid.write()
            total = sum(run.work for run in self.grid.runs)
            done = total - sum(run.work for run in self._waiting)
            often = 0.5 if sys.stderr.isatty() else 60.0  # seconds
            with tqdm(total=total, initial=done, bar_format=_BAR, mininterval=often, miniters=0, smoothing=0.05) as bar:
                self._show(bar, total)
                shown = 0.0
                try:
                    while self._waiting or self._jobs:
                        self._start_ready()
                        time.sleep(self.executor.look_every)
                        for job in [job for job in self._jobs if job.is_over()]:
                            self._finish(job)
                        if time.monotonic() - shown > SHOW_EVERY:
                            shown = time.monotonic()
                            self._show(bar, total)
                    self._show(bar, total)
                finally:
                    self.executor.stop()
            self._remove_checkpoints(self.grid.runs)

    def _look_at_folders(self) -> None:
        for run in sorted(self.grid.runs, key=lambda run: -run.work):  # leaves no long run for the end
            if (result := run.result()) is None:
                self._waiting.append(run)
                (run.folder / FAILED).unlink(missing_ok=True)
            else:
                self.results[run.folder] = result

    def _start_ready(self) -> None:
        ready, self._waiting = self._waiting[: self.executor.free], self._waiting[self.executor.free :]
        for run, job in zip(ready, self.executor.start([(run,) for run in ready]) if ready else (), strict=True):
            self._attempts[run.folder] += 1
            self._jobs[job] = run

    def _finish(self, job: Job | ClusterJob) -> None:
        run = self._jobs.pop(job)
        failure = job.failure()
        self.executor.release(job)
        result = run.result()
        if result is not None:
            self.results[run.folder] = result
            tqdm.write(f"[{len(self.results)}/{len(self.grid.runs)}] {run.name}: {summary(run, result)}")
            self._remove_checkpoints(run.rivals)
            return
        log = run.folder / LOG
        message = f"{failure or 'ended without a result'}: {last_line(log)}"
        if self._attempts[run.folder] < ATTEMPTS:
            tqdm.write(f"{run.name}: failed, is tried once more ({message})")
            self._waiting.append(run)
            return
        self.failed[run] = message
        run.folder.mkdir(parents=True, exist_ok=True)
        write_json(run.folder / FAILED, {"attempts": ATTEMPTS, "message": message, "log": str(log)})
        tqdm.write(f"{run.name}: FAILED ({message}); see {log}")

    def _best(self, runs: Sequence[Run]) -> Optional[Run]:
        """The first finished run with the highest selecting metric, on the first development file; nan is none."""
        scores = {}
        for run in runs:
            if result := self.results.get(run.folder):
                scores[run] = next(iter(result["metrics"].values()))[result["selected_by"]]
        return max((run for run in scores if not math.isnan(scores[run])), key=scores.__getitem__, default=None)

    def _remove_checkpoints(self, runs: Sequence[Run]) -> None:
        """Removes those of finished runs, except the ones to keep."""
        for run in runs if self.keep != "all" else ():
            is_kept = self.keep == "best" and self._best(run.rivals) is run
            if run.folder in self.results and not is_kept:
                (run.folder / BEST).unlink(missing_ok=True)
                shutil.rmtree(run.folder / "tokenizer", ignore_errors=True)

    def _show(self, bar: tqdm, total: float) -> None:
        left = sum(run.work for run in self._waiting)
        left += sum(run.work * (1 - epochs_done(run.folder / LOG) / run.epochs) for run in self._jobs.values())
        failed = f", {len(self.failed)} FAILED" if self.failed else ""
        text = f"{len(self.results)} of {len(self.grid.runs)} runs finished, {len(self._jobs)} under way{failed}"
        bar.set_description_str(text, refresh=False)
        bar.update(total - left - bar.n)


_BAR = "{desc} {percentage:3.0f}% |{bar:20}| {elapsed} since the start, {remaining} left"


def summary(run: Run, result: dict[str, Any]) -> str:
    """A finished run in words."""
    metric = result["selected_by"]
    baseline = next(iter(result["baseline"].values()))[metric]
    return (
        f"{metric} {'/'.join(f'{values[metric]:.4f}' for values in result['metrics'].values())} at epoch "
        f"{result['best_epoch']} of {run.epochs} (baseline {baseline:.4f}), {result['seconds']:.0f} s"
    )


def epochs_done(log: Path) -> float:
    """Epochs of a run's present attempt, from the end of its log."""
    text = _tail(log)
    places = _PLACE.findall(text[text.rfind(ATTEMPT) + 1 :])
    if not places:
        return 0.0
    epoch, batch, batches = places[-1]
    return int(epoch) if not batches else int(epoch) - 1 + int(batch) / int(batches)


# Within an epoch fairseq logs "epoch 003:    100 / 12272 loss=...", at its end "epoch 003 | valid on ...".
_PLACE = re.compile(r"epoch (\d+)(?::\s+(\d+) / (\d+)| \| valid on)")


def _tail(log: Path) -> str:
    try:
        with log.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - TAIL))
            return file.read().decode(errors="replace")
    except OSError:
        return ""


def last_line(log: Path) -> str:
    lines = _tail(log).strip().splitlines()
    return lines[-1][:500] if lines else "its log is empty"
