"""One process of two has the bad numbers: both decide the same."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from helpers import ROOT

pytestmark = [pytest.mark.slow, pytest.mark.reliability]


@pytest.fixture
def two_processes(data_folder, tmp_path, free_port):
    """``two_processes(kinds, options)``: the finished torchrun, and what each process saw (see damaged_process.py)."""

    def run(kinds: dict, options: str) -> tuple[subprocess.CompletedProcess, list[dict]]:
        script = Path(__file__).with_name("damaged_process.py")
        command = [
            *(sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", str(free_port)),
            *(str(script), str(tmp_path), json.dumps(kinds), str(data_folder)),
            *("--user-dir", str(ROOT / "lazyformer_fairseq"), "--task", "full_sentences_masked_lm", "--cpu"),
            *"--distributed-backend gloo --ddp-backend legacy_ddp --no-epoch-checkpoints".split(),
            *"--tokens-per-sample 32 --optimizer fused_adam --lr-scheduler linear_warmup --lr 1e-3".split(),
            *"--arch lazyformer_m2x6_s_tiny --sublayer-pattern M2 --criterion masked_lm_accuracy".split(),
            *"--batch-size 4 --update-freq 2 --disable-validation --num-workers 0 --log-format simple".split(),
            *("--save-dir", str(tmp_path / "run"), *options.split()),
        ]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
        finished = subprocess.run(command, capture_output=True, text=True, env=environment)
        seen = [tmp_path / f"rank{rank}.json" for rank in range(2)]
        assert all(file.is_file() for file in seen), finished.stderr[-3000:]
        return finished, [json.loads(file.read_text()) for file in seen]

    return run


def test_both_skip_and_roll_back(two_processes, tmp_path, record_counts):
    # A spike of one process is one of both where the mean is: 20 and 1 make about 10.
    kinds = {2: "nan gradient", 22: 20.0, 24: 1.5, 27: "inf loss", 28: "inf gradient", 29: 20.0}
    options = "--max-update 32 --loss-spike 2 --max-skipped-updates 3 --save-interval-updates 13"
    finished, (first, second) = two_processes(kinds, options)
    assert finished.returncode == 0, finished.stderr[-3000:]
    assert first == second
    assert second["skipped"] == [2, 22, 27, 28]  # 29 did move them: back to those of update 26
    assert second["updates"] == [*range(1, 30), 26, *range(27, 33)]
    record_counts("bad numbers in one of two processes", skipped=5, rollbacks=1, processes_equal=True)


@pytest.mark.slow
def test_both_stop_with_one_report(two_processes, tmp_path):
    options = "--max-update 32 --max-skipped-updates 2 --max-rollbacks 1 --save-interval-updates 3"
    finished, (first, second) = two_processes({"from": 4}, options)
    assert finished.returncode == 1
    assert "error: stopped at update 5: 2 updates in a row had bad numbers" in finished.stderr
    assert "]: Traceback" not in finished.stderr  # torchrun has one of its own, without a rank before it
    assert first == second and second["updates"] == [1, 2, 3, 4, 5, 3, 4, 4]
    report = json.loads((tmp_path / "run" / "bad_updates.json").read_text())
    samples = [of_process for bad in report["bad_updates"] for of_process in bad["samples"]]
    assert len(samples) == 2 * 4 and all(len(of_process) == 2 for of_process in samples)  # --update-freq 2
