"""A disk that is full in the middle of a run: by the system's limit on a file's size, and by a small disk."""

import logging
import resource
import subprocess
from contextlib import contextmanager
from types import FunctionType
from unittest import mock

import fairseq_cli.train
import pytest
import torch

from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.fairseq_plugin.reliability.checkpoints import look_into
from lazyformer_fairseq.fairseq_plugin.trainer import SafeTrainer

TINY = (
    "--arch lazyformer_m2x6_s_tiny --sublayer-pattern M2 --encoder-embed-dim 16 --batch-size 4 "
    "--criterion masked_lm_accuracy --save-interval-updates 2 --disable-validation"
)


@contextmanager
def full_disk(from_update: int, until_update: int):
    """Files of this process may not grow beyond 20,000 bytes from one update of a run to another."""
    train_step = SafeTrainer.train_step
    before = resource.getrlimit(resource.RLIMIT_FSIZE)

    def limited(trainer, *args, **kwargs):
        output = train_step(trainer, *args, **kwargs)
        is_full = from_update <= trainer.get_num_updates() < until_update
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000 if is_full else before[0], before[1]))
        return output

    try:
        with mock.patch.object(SafeTrainer, "train_step", limited):
            yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_run_goes_on_without_saving_and_saves_when_there_is_room_again(data_folder, tmp_path, fairseq_train, caplog):
    with full_disk(3, 8):
        last = fairseq_train(data_folder, f"{TINY} --max-update 9 --keep-updates-list 5", tmp_path)
    assert last["optimizer_history"][-1]["num_updates"] == 9
    assert sorted(path.name for path in tmp_path.glob("checkpoint*")) == [
        "checkpoint_1_2.pt",
        "checkpoint_1_8.pt",
        "checkpoint_last.pt",
    ]
    warnings = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    for name in ("checkpoint_1_4.pt", "checkpoint_update_5.pt", "checkpoint_1_6.pt"):
        (warning,) = [text for text in warnings if f"{tmp_path / name}: not saved: File too large" in text]
        assert "bytes are free. What was saved before is as it was" in warning
        assert "The run trains on" in warning


@pytest.mark.slow
def test_a_run_that_cannot_save_its_end_fails(data_folder, tmp_path, fairseq_train):
    with full_disk(3, 100), pytest.raises(UserError, match="not saved: File too large.*\nThe run is at its end"):
        fairseq_train(data_folder, f"{TINY} --max-update 6", tmp_path)
    assert look_into(tmp_path / "checkpoint_last.pt").updates == 2
    resumed = fairseq_train(data_folder, f"{TINY} --max-update 6", tmp_path)
    assert [part["num_updates"] for part in resumed["optimizer_history"]] == [2, 6]


@pytest.mark.slow
def test_a_run_that_patience_ends_and_that_cannot_save_its_end_fails(data_folder, tmp_path, fairseq_train):
    """The loss gets no better with a step of nearly zero, and --patience 1 ends the run at its second validation."""
    options = f"{TINY} --max-update 30 --patience 1 --adam-eps 1e9 --weight-decay 0".replace("--disable-validation", "")
    training = fairseq_cli.train.should_stop_early
    of_its_own = FunctionType(training.__code__, training.__globals__)  # fairseq counts by attributes of the function
    with (
        mock.patch.object(fairseq_cli.train, "should_stop_early", of_its_own),
        full_disk(3, 100),
        pytest.raises(UserError, match="checkpoint_1_4.pt: not saved: File too large.*\nThe run is at its end"),
    ):
        fairseq_train(data_folder, options, tmp_path)


@pytest.fixture
def small_disk(tmp_path):
    """``small_disk(size)``: a folder that is a disk of its own."""
    folder = tmp_path / "disk"
    folder.mkdir()

    def mount(size: int):
        done = subprocess.run(
            ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)], capture_output=True, text=True
        )
        if done.returncode:
            pytest.skip(f"no right to mount a disk here: {done.stderr.strip()}")
        return folder

    yield mount
    subprocess.run(["umount", "--lazy", str(folder)], capture_output=True)


@pytest.mark.slow
def test_a_small_disk(data_folder, tmp_path, fairseq_train, small_disk, caplog):
    """Room for two files and a half: the first save fills it with two, the second has no room for its copy, the third
    for nothing."""
    fairseq_train(data_folder, f"{TINY} --max-update 2", tmp_path / "for its size")
    size = (tmp_path / "for its size" / "checkpoint_1_2.pt").stat().st_size
    disk = small_disk(int(3.6 * size))
    with pytest.raises(UserError, match=r"checkpoint_1_8.pt: not saved: No space left on device") as caught:
        fairseq_train(data_folder, f"{TINY} --max-update 8", disk)
    assert "bytes are free" in str(caught.value)
    messages = caplog.text
    assert "checkpoint_last.pt: no room for a copy (No space left on device); it is" in messages
    updates = {path.name: look_into(path).updates for path in disk.glob("checkpoint*.pt")}
    newest = max(updates.values())
    assert updates["checkpoint_last.pt"] == newest, updates
    assert updates == {"checkpoint_last.pt": newest} | {f"checkpoint_1_{n}.pt": n for n in range(2, newest + 1, 2)}
    (disk / "checkpoint_1_2.pt").unlink()
    resumed = torch.load(disk / "checkpoint_last.pt")["optimizer_history"][-1]["num_updates"]
    assert resumed == newest
