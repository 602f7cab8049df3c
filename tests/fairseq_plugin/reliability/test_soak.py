"""A long run holds no more memory, files, threads and processes at its end than when it has warmed up.

In a process of its own, this file is such a run, which measures itself: ``test_soak.py OUTPUT EVERY options ...``.
"""

import contextlib
import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from fairseq.logging import metrics
from fairseq_cli.train import cli_main
from fairseq_plugin.reliability.damage import TINY, damaged_run
from helpers import ROOT, train_words

# Growth an update that still counts as flat: of a million updates 256 MiB, and less than one file in ten epochs. What
# is measured jumps about, with the batches that happen to be under way and with what the allocator gives back.
FLAT = {"memory_mib": 0.25 / 1024, "gpu_mib": 0.25 / 1024, "open_files": 0.001, "threads": 0.0005, "children": 0.0005}


@pytest.mark.slow
@pytest.mark.reliability
@pytest.mark.timeout(7200)
@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="measures through Linux's /proc")
def test_memory_and_handles_are_flat_over_20000_updates(data_folder, tmp_path, record_counts):
    """Through epochs, validations, checkpoints, skipped updates and rollbacks."""
    options = f"{TINY} --batch-size 3 --num-workers 1 --save-interval-updates 250 --keep-interval-updates 3"
    options += " --max-skipped-updates 3 --max-rollbacks 1000 --loss-spike 10 --max-update 20000"
    command = [sys.executable, __file__, str(tmp_path / "samples.jsonl"), "100"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests'}"}
    with (tmp_path / "log").open("w") as output:
        words = train_words(data_folder, options, tmp_path / "run")
        run = subprocess.run([*command, *words], stdout=output, stderr=subprocess.STDOUT, env=environment)
    log = (tmp_path / "log").read_text()
    assert run.returncode == 0, log[-3000:]
    samples = [json.loads(line) for line in (tmp_path / "samples.jsonl").read_text().splitlines()]
    record_counts(
        "soak",
        updates=samples[-1]["update"],
        epochs=log.count("begin training epoch"),
        validations=log.count("begin validation on"),
        checkpoints=log.count("Saved checkpoint"),
        skipped=log.count("is skipped: "),
        rollbacks=log.count("updates in a row were bad: the run rolls back to"),
        held={what: [samples[index][what] for index in (0, len(samples) // 2, -1)] for what in FLAT},
        growth_an_update={what: growth(samples, what) for what in FLAT},
    )
    assert not [what for what, bound in FLAT.items() if growth(samples, what) > bound], samples


def growth(samples: list[dict[str, float]], what: str) -> float:
    """Growth an update over the second half, by the Theil-Sen estimator: the median slope of all pairs of samples."""
    from scipy.stats import theilslopes  # above, every data worker would import it

    half = samples[len(samples) // 2 :]
    return float(theilslopes([sample[what] for sample in half], [sample["update"] for sample in half]).slope)


def test_meters_keep_nothing_of_an_update(data_folder, tmp_path, fairseq_train):
    fairseq_train(data_folder, f"{TINY} --max-update 20 --disable-validation", tmp_path / "run")
    assert len(metrics._active_aggregators_cnt) < 5


def main(output: Path, every: int, options: list[str]) -> None:
    """Every 500th update has a NaN in its gradient, and every 4,000th is followed by two more, then a rollback."""

    def fault_of(calls: int):
        if calls and calls % every == 0:
            with output.open("a") as file:
                file.write(json.dumps({"update": calls, **held()}) + "\n")
        bad = calls % 500 == 499 or (calls % 4000 in (0, 1) and calls >= 4000)
        return "nan gradient" if bad else None

    sys.argv = ["fairseq-train", *options]
    with damaged_run(fault_of, records=False):
        cli_main()


def held() -> dict[str, float]:
    """Memory in MiB; open files, threads and child processes of this process (of any of its threads)."""
    process = Path("/proc/self")
    children = 0
    for task in (process / "task").iterdir():
        with contextlib.suppress(FileNotFoundError):  # a thread that ended since
            children += len((task / "children").read_text().split())
    return {
        "memory_mib": int((process / "statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20,
        "gpu_mib": torch.cuda.memory_allocated() / 2**20 if torch.cuda.is_available() else 0.0,
        "open_files": len(list((process / "fd").iterdir())),
        "threads": threading.active_count(),
        "children": children,
    }


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3:])
