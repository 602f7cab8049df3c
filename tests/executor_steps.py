"""Steps that the tests of executors run in other processes: these import them from here."""

import errno
import os
import signal
import time
from pathlib import Path

from datatrove.data import DocumentsPipeline
from datatrove.pipeline.base import PipelineStep

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
