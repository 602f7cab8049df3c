"""Jobs here, on Ray and by submitit: all are done once, and what goes wrong in one comes back to whoever sent it."""

import os
import signal
import time
from pathlib import Path

import pytest
from executor_jobs import die, full, linger, odd, write, wrong
from helpers import ROOT

from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.executors.interface import ATTEMPTS, Call, Executor, LostError, reason, run_calls
from lazyformer_fairseq.executors.local import Local
from lazyformer_fairseq.executors.options import ExecutorOptions, choose_executor
from lazyformer_fairseq.executors.ray_cluster import RayCluster
from lazyformer_fairseq.executors.slurm import Slurm

SLOW = pytest.mark.slow
EXECUTORS = ("local", "kept", pytest.param("slurm", marks=SLOW), pytest.param("ray", marks=SLOW))


@pytest.fixture
def executor(request, tmp_path, monkeypatch) -> Executor:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(ROOT / "tests"), prepend=os.pathsep)  # where the jobs' functions are
    if request.param == "slurm":
        pytest.importorskip("submitit")
        return Slurm("local", tmp_path / "jobs", {"timeout_min": "3"}, at_once=2)
    if request.param == "ray":
        ray = pytest.importorskip("ray")
        request.addfinalizer(ray.shutdown)
        return RayCluster(at_once=2)
    return Local(2, keeps_processes=request.param == "kept")


@pytest.mark.parametrize("executor", EXECUTORS, indirect=True)
def test_every_job_is_done_once_and_what_goes_wrong_comes_back(executor, tmp_path):
    calls = [Call(write, (Path(f"done{number}"),)) for number in range(5)]  # below the working folder
    calls += [Call(wrong, (Path("bad"),)), Call(full, (Path("big"),)), Call(odd, (Path("odd"),))]
    calls += [Call(die, (Path("revived"), ATTEMPTS - 1)), Call(die, (Path("dead"), ATTEMPTS))]
    ends: dict[Call, list] = {call: [] for call in calls}
    for ended in run_calls(calls, executor):
        if ended is not None:
            ends[ended.call].append(ended)
    last = [ends[call][-1].error for call in calls]
    assert last[:5] == [None] * 5
    assert type(last[5]) is UserError and str(last[5]) == "bad, line 3: is not text"
    assert type(last[6]) is OSError and last[6].filename == "big" and last[6].errno == 28
    assert reason(last[7]) == "StopIteration: odd"
    assert last[8] is None and isinstance(last[9], LostError)
    for call, attempts in zip(calls, [*[1] * 8, ATTEMPTS, ATTEMPTS], strict=True):
        assert [ended.is_tried_again for ended in ends[call]] == [*[True] * (attempts - 1), False]
        file = tmp_path / call.arguments[0]
        if call.function in (write, die):
            assert len(file.read_text().splitlines()) == attempts
    if isinstance(executor, Local):
        processes = {(tmp_path / f"done{number}").read_text() for number in range(5)}
        assert len(processes) == (2 if executor._keeps_processes else 5)


@pytest.mark.parametrize("executor", EXECUTORS, indirect=True)
def test_no_job_goes_on_when_nobody_waits_for_it(executor, tmp_path):
    calls = [Call(linger, (tmp_path / name,)) for name in ("one", "two")]
    run = run_calls([*calls, Call(write, (tmp_path / "never",))], executor)
    while not all((tmp_path / name).exists() and (tmp_path / name).read_text() for name in ("one", "two")):
        assert next(run) is None
    run.close()  # as at Ctrl-C
    processes = [Path("/proc", (tmp_path / name).read_text().strip()) for name in ("one", "two")]
    while any(process.exists() and "zombie" not in (process / "status").read_text() for process in processes):
        time.sleep(0.1)
    assert not (tmp_path / "never").exists()


def test_a_process_that_dies_between_two_jobs_is_replaced(tmp_path):
    executor = Local(1, keeps_processes=True)
    try:
        for name in ("one", "two"):
            executor.start([Call(write, (tmp_path / name,))])
            while not (ended := executor.wait()):
                pass
            if isinstance(ended[0].error, LostError):
                executor.start([ended[0].call])
                while not (ended := executor.wait()):
                    pass
            assert ended[0].error is None
            os.kill(int((tmp_path / name).read_text()), signal.SIGKILL)
    finally:
        executor.stop()


def test_there_are_as_many_processes_as_gpus_or_threads_leave_room_for(tmp_path, monkeypatch):
    monkeypatch.setattr("lazyformer_fairseq.executors.local.processors_here", lambda: 4)

    def free(threads: int = 1, gpus: tuple[str, ...] = (), **options) -> int:
        return choose_executor(ExecutorOptions(**options), tmp_path, "jobs", threads, gpus).free

    assert (free(gpus=("0", "1", "2")), free(), free(threads=3), free(threads=3, workers=2)) == (3, 4, 1, 2)
