"""Tasks run in this process or in workers, fail in words, and are resumed."""

import fcntl
import os
import signal
import sys
import time
from contextlib import suppress
from functools import partial
from pathlib import Path

import pytest
from corpus_tasks import write_rank
from helpers import ROOT

from lazyformer_fairseq.corpus.stages import WORKERS_LOCK, run_tasks, wait_for_workers
from lazyformer_fairseq.errors import UserError

SIZES = [1] * 4
ALL = {f"rank{rank}": f"{rank}\n" for rank in range(len(SIZES))}


def written(folder: Path) -> dict[str, str]:
    return {path.name: path.read_text() for path in folder.glob("rank*")}


@pytest.mark.parametrize(
    ("fault", "workers", "message"),
    [
        ("user error", 1, r"book\.txt, line 3: is not text"),
        *(("disk full", n, r"store\.npy: cannot be written \(No space left on device\).*make room") for n in (1, 2)),
        ("killed", 2, r"a worker died.*run the same command again"),
    ],
)
def test_a_failed_task_is_named_and_the_rest_stays(tmp_path, fault, workers, message, capsys):
    (tmp_path / "broken").touch()
    task, folder = partial(write_rank, tmp_path, fault), tmp_path / "tasks" / "words"
    with pytest.raises(UserError, match=message):
        run_tasks(task, SIZES, folder, workers)
    assert "rank2" not in written(tmp_path)
    completed = {path.stem for path in folder.glob("*.json")}
    (tmp_path / "broken").unlink()
    for _ in range(2):  # the second time there is nothing left to do
        run_tasks(task, SIZES, folder, workers)
    after = written(tmp_path)
    assert set(after) == set(ALL) and not capsys.readouterr().out
    assert all(after[f"rank{int(rank)}"] == ALL[f"rank{int(rank)}"] for rank in completed)  # not run again


@pytest.mark.slow
def test_workers_end_with_the_process_that_gave_them_work(tmp_path):
    script = tmp_path / "parent.py"
    lines = [
        f"import sys; sys.path.insert(0, {str(ROOT / 'tests')!r})",
        "from functools import partial",
        "from pathlib import Path",
        "from corpus_tasks import sleep",
        "from lazyformer_fairseq.corpus.stages import run_tasks",
        "if __name__ == '__main__':",
        f"    run_tasks(partial(sleep, Path({str(tmp_path)!r})), [1, 1], Path({str(tmp_path / 'words')!r}), 2)",
    ]
    script.write_text("\n".join(lines))
    parent = os.spawnv(os.P_NOWAIT, sys.executable, [sys.executable, str(script)])
    try:
        files = wait_for(lambda: list(tmp_path.glob("worker.*")), lambda found: len(found) == 2, parent)
        with (tmp_path / WORKERS_LOCK).open("r+") as lock, pytest.raises(BlockingIOError):
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # who goes on with their work waits for them
    finally:
        with suppress(ProcessLookupError, ChildProcessError):  # it has ended by itself
            os.kill(parent, signal.SIGKILL)
            os.waitpid(parent, 0)
    wait_for_workers(tmp_path)
    workers = [Path("/proc", file.suffix[1:]) for file in files]
    assert not wait_for(lambda: [worker for worker in workers if worker.exists()], lambda alive: not alive)


def wait_for(look, is_done, process=None):
    """What `look` finds when it is done; fails where a process that has to do it has ended."""
    while not is_done(found := look()):
        assert process is None or os.waitpid(process, os.WNOHANG) == (0, 0), "the process ended before it was done"
        time.sleep(0.1)
    return found
