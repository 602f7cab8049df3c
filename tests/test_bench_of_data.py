"""scripts/bench_loader.py and scripts/bench_start_up.py: what the data costs a run."""

import subprocess
import sys
from itertools import count
from types import SimpleNamespace

import pytest
from helpers import ROOT

TINY = "--arch lazyformer_m2x6_s_tiny --sublayer-pattern M2 --tokens-per-sample 32 --batch-size 4".split()


def run(name: str, *words: object) -> subprocess.CompletedProcess:
    command = [sys.executable, str(ROOT / "scripts" / f"{name}.py"), *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT)


def cells(table: str) -> list[list[str]]:
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in table.splitlines()]


@pytest.fixture
def scripts(monkeypatch):
    """Their modules."""
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    import bench_loader
    import bench_start_up

    return SimpleNamespace(loader=bench_loader, start_up=bench_start_up)


def test_warm_up_is_not_counted_and_all_that_comes_in_time_is(scripts, monkeypatch):
    seconds = count()  # each look at the clock is a second after the last
    monkeypatch.setattr(scripts.loader, "time", SimpleNamespace(perf_counter=lambda: next(seconds)))
    assert scripts.loader.speed(iter([1000, 1000, 7, 8, 9, 1000]), seconds=3) == (7 + 8 + 9) / 4


@pytest.mark.slow
def test_model_and_loader_each_get_a_row(data_folder):
    done = run("bench_loader", data_folder, *TINY, *"--workers 0 --seconds 0.1 --cpu".split())
    assert done.returncode == 0, done.stderr
    header, _, *rows = cells(done.stdout)
    assert header == ["", "tokens a second", "times the model"]
    (model, of_model, once), (alone, of_loader, times) = rows
    assert (model, once, alone) == ("model, an update", "1.0", "loader, 0 workers")
    assert of_model != "0" != of_loader and float(times) > 0


@pytest.mark.slow
def test_two_processes_with_a_data_worker_each(data_folder):
    done = run("bench_start_up", data_folder, *TINY, "--processes", "2", "--num-workers", "1")
    assert done.returncode == 0, done.stderr
    stages, _, memory = done.stdout.partition("\n\n")
    (_, *heads), _, *rows = cells(stages)
    assert heads == ["CPU seconds, mean of a process", "most", "seconds of the slowest"]
    names = [name.partition(",")[0] for name, *_ in rows]
    assert names == ["start Python", "set up the task", "make the batches' list", "first batch"]
    assert all(float(mean) <= float(most) for _, mean, most, _ in rows)
    _, _, ours, workers, both = cells(memory)
    assert (ours[0], workers[0], both[0]) == ("processes: 2", "their data workers: 2", "all")
    total, own, mapped = (int(cell.replace(",", "")) for cell in ours[1:])
    assert 0 < own < total and abs(own + mapped - total) <= 1


@pytest.mark.slow
def test_an_error_of_a_process_is_the_scripts(data_folder):
    done = run("bench_start_up", data_folder, *TINY, "--processes", "1", "--mask-prob", "1.5")
    assert done.returncode == 1 and "mask_prob 1.5" in done.stderr


def test_a_shared_page_counts_in_part_for_each(scripts, tmp_path, monkeypatch):
    for process in ("2", "3"):
        (tmp_path / process).mkdir()
        (tmp_path / process / "smaps_rollup").write_text("Rss: 9000 kB\nPss:  5000 kB\nPss_Anon:\t 3000 kB\n")
    monkeypatch.setattr(scripts.start_up, "PROC", tmp_path)
    assert scripts.start_up.memory_of(["2", "3"]) == (2 * 5000 * 1024, 2 * 3000 * 1024)
    assert scripts.start_up.memory_of([]) == (0, 0)
    one = {"stages": [("load", 1.0, 9.0)], "workers": [2], "memory": [(5e6, 3e6), (2e6, 1e6)]}
    stages, _, memory = scripts.start_up.tables([one, {**one, "stages": [("load", 2.0, 3.0)]}]).partition("\n\n")
    assert cells(stages)[2:] == [["load", "1.50", "2.00", "9.00"]]
    assert cells(memory)[2:] == [
        ["processes: 2", "10", "6", "4"], ["their data workers: 2", "4", "2", "2"], ["all", "14", "8", "6"],
    ]  # fmt: skip
