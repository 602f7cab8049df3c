"""What tests of the corpus run in other processes: these import it from here."""

import errno
import os
import resource
import signal
import sys
import time
from pathlib import Path
from typing import Optional

from datatrove.data import DocumentsPipeline
from datatrove.pipeline.base import PipelineStep

from lazyformer_fairseq.corpus.build import build_corpus
from lazyformer_fairseq.corpus.settings import CorpusSettings
from lazyformer_fairseq.errors import UserError


class WriteRank(PipelineStep):
    """Appends the rank to a file of its own; misbehaves at rank 2 as long as ``fault`` asks and its file is there."""

    type, name = "test", "write"

    def __init__(self, folder: Path, fault: str = ""):
        super().__init__()
        self.folder, self.fault = folder, fault

    def run(self, data: DocumentsPipeline = None, rank: int = 0, world_size: int = 1) -> DocumentsPipeline:
        if rank == 2 and (self.folder / "broken").exists():
            self.misbehave()
        with (self.folder / f"rank{rank}").open("a") as file:
            file.write(f"{rank} of {world_size}\n")
        yield from ()

    def misbehave(self) -> None:
        if self.fault == "user error":
            raise UserError("book.txt, line 3: is not text")
        if self.fault == "disk full":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "store.npy")
        if self.fault == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        raise AssertionError(self.fault)


class Sleep(PipelineStep):
    """Tells its process, then does nothing for long."""

    type, name = "test", "sleep"

    def __init__(self, folder: Path):
        super().__init__()
        self.folder = folder

    def run(self, data: DocumentsPipeline = None, rank: int = 0, world_size: int = 1) -> DocumentsPipeline:
        (self.folder / f"worker.{os.getpid()}").touch()
        time.sleep(300)
        yield from ()


def build_in_process(
    inputs: list[str],
    folder: Path,
    settings: CorpusSettings,
    ready,
    problem: Path,
    largest_file: Optional[int] = None,
) -> None:
    """Builds a corpus once it has told that it is ready; writes a UserError into ``problem``.

    Args:
        largest_file: bytes; a longer one cannot be written, as on a full disk.
    """
    if largest_file:
        resource.setrlimit(resource.RLIMIT_FSIZE, (largest_file, largest_file))
    ready.set()
    try:
        build_corpus(inputs, folder, settings)
    except UserError as error:
        problem.write_text(str(error))
        sys.exit(1)
