"""Two trainings and one --save-dir: the second is refused by name; a run that was killed keeps nobody out."""

import os
import signal
import subprocess
import sys

import pytest
from helpers import ROOT

from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.fairseq_plugin.reliability.command_line import find_user_error

OPTIONS = "--arch lazyformer_m2x6_s_tiny --sublayer-pattern M2 --batch-size 4 --criterion masked_lm_accuracy"


@pytest.fixture
def first(data_folder, tmp_path):
    """A training in a process of its own, which has begun and stands still; killed when the test ends."""
    command = [
        *(sys.executable, "-m", "fairseq_cli.train", str(data_folder), "--user-dir", str(ROOT / "lazyformer_fairseq")),
        *("--save-dir", str(tmp_path), *OPTIONS.split(), "--task", "full_sentences_masked_lm", "--cpu"),
        *"--optimizer fused_adam --lr-scheduler linear_warmup --lr 1e-3 --tokens-per-sample 32".split(),
        *"--max-update 1000000 --log-format simple --no-epoch-checkpoints --disable-validation".split(),
    ]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as run:
        assert any("begin training epoch 1" in line for line in run.stdout)
        run.send_signal(signal.SIGSTOP)
        yield run
        run.kill()


@pytest.mark.slow
def test_a_folder_belongs_to_one_training(first, data_folder, tmp_path, fairseq_train):
    options = f"{OPTIONS} --max-update 2 --disable-validation"
    with pytest.raises(Exception) as refused:
        fairseq_train(data_folder, options, tmp_path)
    error = find_user_error(refused.value)
    assert isinstance(error, UserError)
    assert str(error) == (
        f"--save-dir {tmp_path}: another run is at work there (process {first.pid} on {os.uname().nodename}); "
        "wait for it, or choose another folder"
    )
    with pytest.raises(FileNotFoundError, match="checkpoint_last.pt"):  # fairseq_train() reads it, with no suffix
        fairseq_train(data_folder, f"{options} --checkpoint-suffix _other", tmp_path)
    assert (tmp_path / "checkpoint_last_other.pt").exists()
    assert first.poll() is None
    first.kill()
    first.wait()
    assert fairseq_train(data_folder, options, tmp_path)["optimizer_history"][-1]["num_updates"] == 2
