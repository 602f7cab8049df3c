"""The progress of a stage's tasks: shared through files, so that it works across machines, and shown as a bar."""

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from tqdm import tqdm

REPORT_EVERY, LOOK_EVERY = 0.5, 0.25  # seconds


class TaskProgress:
    """Writes how many bytes of a task's input are done, at most twice a second."""

    def __init__(self, folder: Path):
        self.folder = folder
        self._last = 0.0

    def __call__(self, rank: int, bytes_done: int) -> None:
        if (now := time.monotonic()) - self._last < REPORT_EVERY:
            return
        self._last = now
        (self.folder / f"{rank:05d}").write_text(str(bytes_done))


@contextmanager
def progress_bar(title: str, sizes: Sequence[int], completions: Path, progress: Path, in_bytes: bool) -> Iterator[None]:
    """Shows a bar with rate and time left while the block runs.

    Args:
        sizes: of the tasks, in bytes (1 each where the tasks are counted).
        completions: folder that holds a file NNNNN for each finished task.
        progress: folder of the :class:`TaskProgress` of the others.
        in_bytes: whether the sizes are bytes.
    """
    scale = {"unit": "B", "unit_scale": True} if in_bytes else {"unit": " tasks"}
    stop = threading.Event()
    done = bytes_done(sizes, completions, progress)
    with tqdm(total=sum(sizes), initial=done, desc=title, disable=None, **scale) as bar:

        def watch() -> None:
            while not stop.wait(LOOK_EVERY):
                bar.update(max(0, bytes_done(sizes, completions, progress) - bar.n))

        watcher = threading.Thread(target=watch, daemon=True)
        watcher.start()
        try:
            yield
            bar.update(bytes_done(sizes, completions, progress) - bar.n)
        finally:
            stop.set()
            watcher.join()


def bytes_done(sizes: Sequence[int], completions: Path, progress: Path) -> int:
    """The sizes of the finished tasks plus what the others report; the folders are those of :func:`progress_bar`."""
    finished = {int(path.name) for path in completions.glob("[0-9]*")}
    under_way = {int(path.name): path for path in progress.glob("[0-9]*") if int(path.name) not in finished}
    done = sum(sizes[rank] for rank in finished)
    for rank, path in under_way.items():
        done += min(sizes[rank], int(path.read_text() or 0))
    return done
