"""Experiment trackers for the lines of a run's ``metrics.jsonl``: TensorBoard, Weights & Biases and Trackio.

A failing tracker does not stop the run: a warning is logged, and the run continues without the tracker.
"""

import atexit
import logging
import os
import secrets
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import Context
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Optional

from lazyformer_fairseq.errors import UserError, nearest
from lazyformer_fairseq.extras import needs_package
from lazyformer_fairseq.options import option
from lazyformer_fairseq.storage.atomic import atomic_file
from lazyformer_fairseq.storage.json_files import read_json, read_text

logger = logging.getLogger(__name__)

RUN = "run.json"
NAME = "tracked_run.txt"
Values = Mapping[str, float]


class TensorBoard:
    """A TensorBoard writer for the subfolder ``tensorboard`` of a run."""

    def __init__(self, folder: Path, updates: int, name: str):
        from torch.utils.tensorboard import SummaryWriter

        # purge_step hides the values that were logged after the checkpoint that the run resumes from.
        self._writer = SummaryWriter(folder / "tensorboard", purge_step=updates + 1)
        self.close = self._writer.close

    def log(self, updates: int, values: Values) -> None:
        """Write values to disk."""
        for name, value in values.items():
            self._writer.add_scalar(name, value, updates)
        self._writer.flush()


class WeightsAndBiases:
    """A Weights & Biases run with the number of updates on the x-axis."""

    def __init__(self, folder: Path, updates: int, name: str):
        import wandb

        _, _, run_id = name.rpartition("-")
        # Runs that are trained alternately are open at the same time, so each needs create_new.
        self._run = wandb.init(id=run_id, dir=folder, reinit="create_new", **settings_of(folder, name))
        self._run.define_metric("*", step_metric="updates")
        self.close = self._run.finish

    def log(self, updates: int, values: Values) -> None:
        """Send values."""
        self._run.log({**values, "updates": updates})


class Trackio:
    """A Trackio run."""

    def __init__(self, folder: Path, updates: int, name: str):
        import trackio

        # Trackio ends any run already open in the same context, so each run gets a separate context.
        self._run = Context().run(partial(trackio.init, **settings_of(folder, name)))
        self.close = self._run.finish

    def log(self, updates: int, values: Values) -> None:
        """Send values."""
        self._run.log(dict(values), step=updates)


def settings_of(folder: Path, name: str) -> dict[str, Any]:
    """Return the run settings accepted by both Weights & Biases and Trackio, which share an interface."""
    return {
        "project": os.environ.get("WANDB_PROJECT", "lazyformer"),
        "name": name,
        "config": read_json(folder / RUN),
        "resume": "allow",
    }


TRACKERS = {"tensorboard": TensorBoard, "wandb": WeightsAndBiases, "trackio": Trackio}


@dataclass(frozen=True, kw_only=True)
class ReportOptions:
    """The option that selects experiment trackers."""

    report_to: tuple[str, ...] = option(
        (),
        f"Experiment trackers to log metrics.jsonl to: {', '.join(TRACKERS)}.",
        metavar="NAME,...",
    )


def refuse_missing_trackers(names: Iterable[str]) -> None:
    """Raise a UserError if a tracker in ``--report-to`` is unknown or its package is not installed."""
    for name in names:
        if name not in TRACKERS:
            raise UserError(f"--report-to {name}: choose from {', '.join(TRACKERS)}{nearest(name, TRACKERS)}")
        needs_package(name, "trackers", f"--report-to {name}")


class Trackers:
    """A run's open trackers.

    Args:
        names: keys of :data:`TRACKERS`.
        folder: the run's folder, which contains ``run.json``.
        updates: the number of updates completed so far; if it is 0, the trackers start a new run.

    Raises:
        UserError: a name is unknown or its package is not installed.
    """

    def __init__(self, names: Sequence[str], folder: Path, updates: int):
        refuse_missing_trackers(names)
        self._open: dict[str, Any] = {}
        if not names:
            return
        name_of_run = self._name(folder, updates)
        for name in names:
            with self._dropping(name):
                self._open[name] = TRACKERS[name](folder, updates, name_of_run)
        atexit.register(self.close)

    @staticmethod
    def _name(folder: Path, updates: int) -> str:
        """Return the run's unique name, which is stored in its folder so that trackers recognize a resumed run."""
        path = folder / NAME
        if updates and path.exists():
            return read_text(path, "remove it to give the run a new name")
        name = f"{folder}-{secrets.token_hex(4)}"
        with atomic_file(path) as file:
            file.write(name.encode())
        return name

    @contextmanager
    def _dropping(self, name: str) -> Iterator[None]:
        """Drop a tracker and log a warning if it fails."""
        try:
            yield
        except Exception as error:
            logger.warning("%s failed, and the run continues without it: %s", name, error)
            self._open.pop(name, None)

    def log(self, updates: int, split: str, values: Mapping[str, Optional[float]]) -> None:
        """Send the finite values of a line, under names such as ``train/loss``."""
        finite = {f"{split}/{name}": value for name, value in values.items() if value is not None}
        for name, tracker in list(self._open.items()):
            with self._dropping(name):
                tracker.log(updates, finite)

    def close(self) -> None:
        """Flush and close all trackers."""
        for name, tracker in list(self._open.items()):
            with self._dropping(name):
                tracker.close()
        self._open = {}
