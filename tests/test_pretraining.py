"""Pre-training through fairseq-train, as a user runs it: what is promised of whole runs."""

import re
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

import pytest
import torch
from fairseq.trainer import Trainer
from helpers import assert_equal_state, train_words, updates_of

from lazyformer_fairseq.experiments.curves.report import read_history

TINY = "--arch lazyformer_m2x6_s_tiny --sublayer-pattern M2x2 --criterion masked_lm_accuracy --batch-size 4"


@contextmanager
def recorded_batches() -> Iterator[dict[int, list[torch.Tensor]]]:
    """The input ids of every update of a run."""
    of_update, original = {}, Trainer.train_step

    def train_step(trainer, samples, *args, **kwargs):
        of_update[trainer.get_num_updates()] = [sample["net_input"]["src_tokens"] for sample in samples]
        return original(trainer, samples, *args, **kwargs)

    with mock.patch.object(Trainer, "train_step", train_step):
        yield of_update


@pytest.mark.slow
def test_a_killed_run_goes_on_bit_for_bit(data_folder, tmp_path, fairseq_train, warm_python):
    # Dropout on, gradients of two batches an update, masks anew in each epoch, killed within the second epoch.
    options = f"{TINY} --max-epoch 3 --save-interval-updates 51 --update-freq 2 --dropout 0.2 --attention-dropout 0.1"
    with recorded_batches() as uninterrupted:
        whole = fairseq_train(data_folder, options, tmp_path / "whole")
    updates = len(uninterrupted)
    per_epoch = updates // 3
    assert per_epoch < 51 < 2 * per_epoch, "the test's data should put update 51 into the second epoch"

    command = [
        warm_python / "python",
        "-m",
        "fairseq_cli.train",
        *train_words(data_folder, options, tmp_path / "killed"),
    ]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as run:
        for line in run.stdout:
            if re.search(r"Saved checkpoint .* @ 51 updates", line):
                run.send_signal(signal.SIGKILL)
                break
        run.stdout.read()
    assert run.returncode == -signal.SIGKILL

    saved = torch.load(tmp_path / "killed" / "checkpoint_last.pt")
    assert updates_of(saved) == 51
    with recorded_batches() as resumed_batches:
        resumed = fairseq_train(data_folder, f"{options} --num-workers 2", tmp_path / "killed")  # which changes nothing
    assert sorted(resumed_batches) == list(range(51, updates))
    for update, batches in resumed_batches.items():
        assert_equal_state(batches, uninterrupted[update], f"batches of update {update}")
    for part in ("model", "last_optimizer_state"):
        assert_equal_state(resumed[part], whole[part], part)
    once, twice = (read_history([tmp_path / name / "train.log"]) for name in ("whole", "killed"))
    assert list(once.losses) == [per_epoch, 51, 2 * per_epoch, 102, updates]
    assert twice.losses == once.losses

    # It is no equality of things that stand still: weights moved, and the epochs' masks differ.
    moved = [name for name, weight in whole["model"].items() if not torch.equal(weight, saved["model"][name])]
    assert len(moved) == len(whole["model"]) - 1  # all but the dictionary's hash

    def masked_blocks(epoch: int) -> set[tuple[int, ...]]:
        updates_of_epoch = range((epoch - 1) * per_epoch, epoch * per_epoch)
        return {tuple(row.tolist()) for update in updates_of_epoch for batch in uninterrupted[update] for row in batch}

    assert len(masked_blocks(1) & masked_blocks(2)) < len(masked_blocks(1)) / 20


def test_two_processes_train_as_one_with_twice_the_update_freq(
    data_folder, tmp_path, fairseq_train, free_port, warm_python
):
    options = f"{TINY} --max-update 6 --dropout 0 --attention-dropout 0"
    alone = fairseq_train(data_folder, f"{options} --update-freq 2", tmp_path / "alone")
    command = [
        *(warm_python / "lazyformer", "pretrain", "lazyformer_m2x6_s_tiny", data_folder),
        *("--gpus", "2", "--sequences-per-update", "8", "--master", f"127.0.0.1:{free_port}"),
        *f"{options} --tokens-per-sample 32 --lr 1e-3 --num-workers 0 --clip-norm 0".split(),
        *("--save-dir", str(tmp_path / "two")),
    ]
    run = subprocess.run(command, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout[-2000:] + run.stderr[-2000:]
    assert "2 processes x 4 sequences x update-freq 1" in run.stdout
    assert (tmp_path / "two" / "train.log").read_text().count("| begin training epoch 1") == 1
    two = torch.load(tmp_path / "two" / "checkpoint_last.pt")
    assert updates_of(two) == 6
    for name, weight in alone["model"].items():
        torch.testing.assert_close(two["model"][name], weight, rtol=1e-4, atol=1e-5, msg=name)


def test_the_log_reports_packing_accuracy_and_the_kernels_and_the_tokenizer_is_kept(
    data_folder, tmp_path, fairseq_train, caplog
):
    with caplog.at_level("INFO"):
        fairseq_train(data_folder, f"{TINY} --max-update 2", tmp_path / "run")
    assert re.search(r"packing efficiency \d\d\.\d%", caplog.text)
    assert re.search(r"valid on 'valid' subset \| loss [\d.]+ \| accuracy [\d.]+ \| ppl [\d.]+", caplog.text)
    assert "optimizer: torch.optim.AdamW(fused=True)" in caplog.text
    assert re.search(r"LayerNorm: (torch|apex)", caplog.text)
    for file in (data_folder / "tokenizer").iterdir():
        assert (tmp_path / "run" / "tokenizer" / file.name).read_bytes() == file.read_bytes()
