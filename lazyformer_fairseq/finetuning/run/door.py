"""A grid is run from the command line: to its end, or to a Ctrl-C, and a report."""

import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn, Optional, Union

import click

from lazyformer_fairseq.finetuning.run.cluster import Cluster
from lazyformer_fairseq.finetuning.run.grid import Grid
from lazyformer_fairseq.finetuning.run.queue import RunQueue
from lazyformer_fairseq.finetuning.run.workers import Workers


def run_to_the_end(
    prepare: Callable[[], tuple[Grid, Union[Workers, Cluster]]], keep: str, write_report: Callable[[Path, Path], str]
) -> NoReturn:
    """Prepares and runs a grid, prints its report, and ends the process: 0; 1 where runs failed; 130 when stopped.

    Args:
        keep: checkpoints to keep, as :class:`RunQueue` takes it.
        write_report: writes the report of a folder into another. Returns its Markdown.

    Raises:
        UserError: whatever `prepare` raises, or another queue is at work on the folder.
    """
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C
    queue: Optional[RunQueue] = None
    try:
        grid, executor = prepare()
        queue = RunQueue(grid, executor, keep)
        queue.run()
    except KeyboardInterrupt:
        done = f"{len(queue.results)} of {len(grid.runs)} runs are finished" if queue else "nothing has run yet"
        click.echo(f"stopped: {done}; rerun to resume", err=True)
        sys.exit(130)
    click.echo(f"{grid.output / 'runs'}: {len(queue.results)} of {len(grid.runs)} runs are finished")
    for failed, message in queue.failed.items():
        click.echo(f"failed: {failed.name}: {message}", err=True)
    if queue.failed:
        click.echo("the same command tries what failed again", err=True)
    if queue.results:
        click.echo(f"\n{write_report(grid.output, grid.output / 'report')}\nwritten to {grid.output / 'report'}")
    sys.exit(1 if queue.failed else 0)
