"""What tests of the corpus run in other processes: these import it from here."""

import errno
import os
import resource
import signal
import sys
import tempfile
import time
from functools import partial
from pathlib import Path

from lazyformer_fairseq.corpus.build import build_corpus
from lazyformer_fairseq.corpus.settings import CorpusSettings
from lazyformer_fairseq.corpus.stages import run_tasks
from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.executors.local import Local


def write_rank(folder: Path, fault: str, rank: int) -> None:
    """Appends the rank to a file of its own; misbehaves at rank 2 as long as ``fault`` asks and its file is there."""
    if rank == 2 and (folder / "broken").exists():
        if fault == "user error":
            raise UserError("book.txt, line 3: is not text")
        if fault == "disk full":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "store.npy")
        os.kill(os.getpid(), signal.SIGKILL)
    with (folder / f"rank{rank}").open("a") as file:
        file.write(f"{rank}\n")


def sleep(folder: Path, rank: int) -> None:
    """Tells its process, then does nothing for long."""
    (folder / f"worker.{os.getpid()}").touch()
    time.sleep(300)


def build_in_process(inputs, folder: Path, settings: CorpusSettings, ready, problem: Path, largest_file, workers: int):
    """Builds a corpus once it has told that it is ready; writes a UserError into ``problem``.

    A file longer than ``largest_file`` bytes cannot be written, as on a full disk.
    """
    if largest_file:
        resource.setrlimit(resource.RLIMIT_FSIZE, (largest_file, largest_file))
    ready.set()
    try:
        build_corpus(inputs, folder, settings, workers)
    except UserError as error:
        problem.write_text(str(error))
        sys.exit(1)


def build_until_killed(inputs, folder: str, settings: CorpusSettings, stage: str, temporary: str) -> None:
    """Builds a corpus by two workers, with another temporary folder, until a task of a stage has sent its counts."""
    os.environ["TMPDIR"] = tempfile.tempdir = temporary

    class Mortal(Local):
        is_here = False  # so that a task alone gets a process too

        def wait(self):
            ended = super().wait()
            assert all(each.call.folder == "/" for each in ended)  # other machines lack the folder of the command
            if any(call.function.args[1] == stage for call in (each.call for each in ended)):
                os.kill(os.getpid(), signal.SIGKILL)
            return ended

    build_corpus(inputs, folder, settings, executor=Mortal(2, keeps_processes=True))


if __name__ == "__main__":  # the process that gives two workers work in the folder of its command
    run_tasks(partial(sleep, Path(sys.argv[1])), [1, 1], Path(sys.argv[1]) / "words", Local(2))
