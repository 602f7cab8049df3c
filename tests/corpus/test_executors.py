"""Tasks run on this machine, on Slurm (a stand-in of its commands) and on a local Ray, and are resumed.

Progress goes through files and never counts a byte twice.
"""

import fcntl
import os
import signal
import stat
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest
from executor_steps import WriteRank
from helpers import ROOT

from lazyformer_fairseq.corpus.executors import (
    WORKERS_LOCK,
    ExecutorSettings,
    TaskProgress,
    bytes_done,
    progress_bar,
    run_tasks,
    wait_for_workers,
)
from lazyformer_fairseq.errors import UserError

TASKS = 4
FEW_TASKS = 2  # where each starts an interpreter of its own


def written(folder: Path) -> dict[str, str]:
    return {path.name: path.read_text() for path in folder.glob("rank*")}


def what_is_written_by(tasks: int) -> dict[str, str]:
    return {f"rank{rank}": f"{rank} of {tasks}\n" for rank in range(tasks)}


ALL = what_is_written_by(TASKS)


@pytest.mark.parametrize("workers", [1, 2])
def test_every_task_runs_once(tmp_path, workers):
    for _ in range(2):  # the second time there is nothing left to do
        run_tasks([WriteRank(tmp_path)], TASKS, tmp_path / "tasks", ExecutorSettings(workers=workers))
    assert written(tmp_path) == ALL


@pytest.mark.parametrize(
    ("fault", "workers", "message"),
    [
        ("user error", 1, r"book\.txt, line 3: is not text"),
        ("user error", 2, r"book\.txt, line 3: is not text"),
        ("disk full", 2, r"store\.npy: cannot be written \(No space left on device\).*make room"),
        ("killed", 2, r"a worker died.*run the same command again"),
    ],
)
def test_a_failed_task_is_named_and_the_rest_stays(tmp_path, fault, workers, message):
    (tmp_path / "broken").touch()
    pipeline, settings = [WriteRank(tmp_path, fault)], ExecutorSettings(workers=workers)
    with pytest.raises(UserError, match=message):
        run_tasks(pipeline, TASKS, tmp_path / "tasks", settings)
    before = written(tmp_path)
    assert "rank2" not in before
    completed = {int(path.name) for path in (tmp_path / "tasks" / "completions").iterdir()}
    (tmp_path / "broken").unlink()
    run_tasks(pipeline, TASKS, tmp_path / "tasks", settings)
    after = written(tmp_path)
    assert set(after) == set(ALL)
    assert all(after[f"rank{rank}"] == ALL[f"rank{rank}"] for rank in completed)  # not run again


@pytest.mark.slow
def test_workers_end_with_the_process_that_gave_them_work(tmp_path):
    script = tmp_path / "parent.py"
    script.write_text(
        f"""
import sys
sys.path.insert(0, {str(ROOT / "tests")!r})
from pathlib import Path
from executor_steps import Sleep
from lazyformer_fairseq.corpus.executors import WORKERS_LOCK, ExecutorSettings, run_tasks, wait_for_workers
if __name__ == "__main__":
    run_tasks([Sleep(Path({str(tmp_path)!r}))], 2, Path({str(tmp_path)!r}) / "tasks", ExecutorSettings(workers=2))
"""
    )
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


@pytest.mark.slow
def test_ray(tmp_path, monkeypatch):
    pytest.importorskip("ray", reason="Ray is not installed")
    monkeypatch.setenv("PYTHONPATH", str(ROOT / "tests"))  # of its workers
    run_tasks([WriteRank(tmp_path)], FEW_TASKS, tmp_path / "tasks", ExecutorSettings("ray", workers=2))
    assert written(tmp_path) == what_is_written_by(FEW_TASKS)


def test_slurm(tmp_path, monkeypatch):
    """With stand-ins of sbatch and squeue: an array job runs at once, its tasks one after the other."""
    commands = tmp_path / "bin"
    commands.mkdir()
    stand_in(
        commands / "sbatch",
        'script="${@: -1}"\n'
        "range=$(sed -n 's/^#SBATCH --array=\\([0-9-]*\\).*/\\1/p' \"$script\")\n"
        f'cp "$script" {tmp_path}/script.sh\n'
        "export SLURM_JOB_ID=7 SLURM_NODELIST=node1\n"
        'for i in $(seq ${range/-/ }); do SLURM_ARRAY_TASK_ID=$i bash "$script" >/dev/null 2>&1; done\n'
        'echo "Submitted batch job 7"\n',
    )
    stand_in(commands / "squeue", "exit 0\n")
    stand_in(commands / "scontrol", "echo node1\n")
    stand_in(commands / "srun", 'while [ "$1" != launch_pickled_pipeline ]; do shift; done\nexec "$@"\n')
    monkeypatch.setenv("PATH", f"{commands}:{Path(sys.executable).parent}:{os.environ['PATH']}")
    monkeypatch.setenv("PYTHONPATH", f"{ROOT}:{ROOT / 'tests'}")
    settings = ExecutorSettings("slurm", workers=2, slurm={"time": "1:00:00", "partition": "cpu", "account": "mine"})
    run_tasks([WriteRank(tmp_path)], FEW_TASKS, tmp_path / "tasks", settings)
    assert written(tmp_path) == what_is_written_by(FEW_TASKS)
    script = (tmp_path / "script.sh").read_text()
    for option in ("time=1:00:00", "partition=cpu", "account=mine"):
        assert f"#SBATCH --{option}\n" in script


def stand_in(path: Path, body: str) -> None:
    path.write_text(f"#!/usr/bin/env bash\n{body}")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)


def test_slurm_needs_a_time_and_a_partition(tmp_path):
    with pytest.raises(UserError, match="--slurm partition=... is missing"):
        run_tasks([WriteRank(tmp_path)], 1, tmp_path / "tasks", ExecutorSettings("slurm", slurm={"time": "1:00"}))


def folders(tmp_path):
    for name in ("completions", "progress"):
        (tmp_path / name).mkdir()
    return tmp_path / "completions", tmp_path / "progress"


def test_finished_tasks_and_those_under_way(tmp_path):
    completions, progress = folders(tmp_path)
    sizes = [100, 200, 300]
    assert bytes_done(sizes, completions, progress) == 0
    TaskProgress(progress)(1, 50)
    TaskProgress(progress)(2, 999)  # what is read ahead does not count
    assert bytes_done(sizes, completions, progress) == 350
    (completions / "00001").touch()
    assert bytes_done(sizes, completions, progress) == 500


def test_reports_are_few(tmp_path):
    _, progress = folders(tmp_path)
    report = TaskProgress(progress)
    for done in range(1000):
        report(0, done)
    assert int((progress / "00000").read_text()) < 999


def test_the_bar_ends_full(tmp_path, capsys):
    completions, progress = folders(tmp_path)
    with progress_bar("words", [3, 4], completions, progress, in_bytes=True):
        for rank in range(2):
            (completions / f"{rank:05d}").touch()
    assert not capsys.readouterr().out
