"""Two trainings and one --save-dir: the second is refused by name; a run that was killed keeps nobody out."""

import os
import subprocess
import sys

import pytest
from helpers import ROOT


@pytest.fixture
def train(data_folder, tmp_path):
    """``train(...)``: a training in one folder, started; killed when the test ends."""
    started = []

    def start(*options: str) -> subprocess.Popen:
        command = [
            *(sys.executable, "-m", "fairseq_cli.train", str(data_folder), "--user-dir"),
            *(str(ROOT / "lazyformer_fairseq"), "--save-dir", str(tmp_path), *options),
            *"--task full_sentences_masked_lm --arch lazyformer_m2x6_s_tiny --sublayer-pattern M2".split(),
            *"--batch-size 4 --criterion masked_lm_accuracy --optimizer fused_adam".split(),
            *"--lr-scheduler linear_warmup --lr 1e-3 --tokens-per-sample 32 --cpu --disable-validation".split(),
            *"--log-format simple --no-epoch-checkpoints".split(),
        ]
        run = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        started.append(run)
        return run

    yield start
    for run in started:
        run.kill()
        run.wait()
        run.stdout.close()


def test_a_folder_belongs_to_one_training(train, tmp_path):
    first = train("--max-update", "1000000", "--save-interval-updates", "1000", "--log-interval", "1000")
    assert any("begin training epoch 1" in line for line in first.stdout)
    refused, _ = train("--max-update", "2").communicate()
    assert refused.strip().endswith(
        f"error: --save-dir {tmp_path}: another run is at work there (process {first.pid} on {os.uname().nodename}); "
        "wait for it, or choose another folder"
    )
    beside = train("--max-update", "2", "--checkpoint-suffix", "_other")
    output, _ = beside.communicate()
    assert beside.returncode == 0, output[-3000:]
    assert first.poll() is None
    first.kill()
    third = train("--max-update", "2")
    output, _ = third.communicate()
    assert third.returncode == 0, output[-3000:]
