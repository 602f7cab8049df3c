"""A checkpoint's file: written whole or not at all, on full disks too; damage and junk are noticed and named."""

import errno
import fcntl
import hashlib
import io
import logging
import os
import pickle
import resource
import zipfile
from pathlib import Path
from types import FunctionType
from unittest import mock

import fairseq_cli.train
import pytest
import torch
from fairseq import checkpoint_utils
from fairseq_plugin.reliability.damage import TINY
from helpers import largest_file, updates_of
from hypothesis import example, given, settings
from hypothesis import strategies as st

from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.fairseq_plugin.reliability import checkpoints
from lazyformer_fairseq.fairseq_plugin.trainer import SafeTrainer
from lazyformer_fairseq.storage import checkpoint_file
from lazyformer_fairseq.storage.atomic import UNFINISHED, remove_leftovers
from lazyformer_fairseq.storage.checkpoint_file import DamagedCheckpointError, check, look_into, save

STATE = {
    "model": {"weight": torch.arange(500.0), "half": torch.ones(3, dtype=torch.bfloat16)},
    "optimizer_history": [{"num_updates": 7}],
    "last_optimizer_state": {"step": 7},
}


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> bytes:
    path = tmp_path_factory.mktemp("saved") / "checkpoint.pt"
    save(STATE, path)
    return path.read_bytes()


@pytest.fixture(scope="module")
def stock(tmp_path_factory) -> bytes:
    """As torch and stock fairseq write it."""
    path = tmp_path_factory.mktemp("stock") / "checkpoint.pt"
    torch.save(STATE, path)
    return path.read_bytes()


def test_what_was_saved_is_what_torch_and_zip_read_as_are_files_without_a_checksum(tmp_path, saved):
    path = tmp_path / "checkpoint.pt"
    path.write_bytes(saved)
    for mmap in (False, True):
        assert torch.equal(torch.load(path, mmap=mmap)["model"]["weight"], STATE["model"]["weight"])
    assert zipfile.ZipFile(path).testzip() is None
    assert look_into(path) == (7, True)
    for new in (True, False):
        torch.save(STATE, path, _use_new_zipfile_serialization=new)
        assert look_into(path) == (7, True)
    (tmp_path / "other").touch()
    save(STATE, path)
    assert path.stat().st_mode == (tmp_path / "other").stat().st_mode


@given(st.data())
@settings(max_examples=300)
def test_any_flipped_bit_is_noticed(saved, tmp_path_factory, data):
    bit = data.draw(st.integers(0, 8 * len(saved) - 1))
    flipped = bytearray(saved)
    flipped[bit // 8] ^= 1 << bit % 8
    assert_damaged(tmp_path_factory, bytes(flipped))


@given(st.data())
@settings(max_examples=100)
def test_any_truncation_is_noticed_and_a_flipped_bit_in_a_weight_of_a_stock_file(saved, stock, tmp_path_factory, data):
    content = data.draw(st.sampled_from([saved, stock]))
    assert_damaged(tmp_path_factory, content[: data.draw(st.integers(0, len(content) - 1))])
    weight = data.draw(st.sampled_from([0, 499]))
    place = stock.index(torch.arange(500.0).numpy().tobytes()) + 4 * weight
    assert_damaged(tmp_path_factory, stock[:place] + bytes([stock[place] ^ 1]) + stock[place + 1 :])


def assert_damaged(folders, content: bytes) -> None:
    path = folders.mktemp("damaged", numbered=True) / "checkpoint.pt"
    path.write_bytes(content)
    for read in (check, look_into, checkpoint_utils.load_checkpoint_to_cpu):
        with pytest.raises(DamagedCheckpointError, match="checkpoint.pt: truncated, damaged or not a checkpoint"):
            read(path)
    path.unlink()


@given(st.binary(max_size=300) | st.binary(max_size=200).map(lambda tail: b"\x80\x02" + tail))
@example(b"")
@example(b"%PDF-1.7")
@example(b"\x80\x021.")
@example(pickle.dumps([1, 2]))
@example(pickle.dumps({"model": 1}))
@settings(max_examples=300)
@pytest.mark.filterwarnings("ignore:Detected pickle protocol")
def test_junk_is_said_to_be_junk_in_words(tmp_path_factory, content):
    path = tmp_path_factory.mktemp("junk", numbered=True) / "junk.pt"
    path.write_bytes(content)
    with pytest.raises(UserError, match=r"junk.pt: .*\(.*[A-Za-z]{4}.*\)"):
        checkpoint_utils.load_checkpoint_to_cpu(str(path))
    path.unlink()


@pytest.mark.parametrize("how", ["packed", "packed, with a checksum of ours", "twenty times one record"])
def test_a_small_file_that_unpacks_to_a_large_one_is_refused_before_anything_is_unpacked(
    tmp_path, stock, how, monkeypatch
):
    path, method = tmp_path / "bomb.pt", zipfile.ZIP_DEFLATED if "packed" in how else zipfile.ZIP_STORED
    with zipfile.ZipFile(io.BytesIO(stock)) as original, zipfile.ZipFile(path, "w", method) as packed:
        for name in original.namelist():
            packed.writestr(name, bytes(10**5) if name.endswith("data/0") else original.read(name))
        if "one record" in how:
            packed.filelist += 19 * [info for info in packed.filelist if info.filename.endswith("data/0")]
    if "checksum" in how:
        content = path.read_bytes()
        checksum = hashlib.sha256(content).hexdigest().encode()
        path.write_bytes(content[:-2] + checkpoint_file._COMMENT_FOLLOWS + checkpoint_file._LABEL + checksum)
    monkeypatch.setattr(zipfile.ZipFile, "open", lambda *_: pytest.fail("a record is opened"))
    for read in (look_into, checkpoint_utils.load_checkpoint_to_cpu):
        with pytest.raises(UserError, match="bomb.pt: refused, because its records are compressed and larger"):
            read(path)


@pytest.mark.filterwarnings("ignore:.*torch[.]?jit|.*TorchScript")
def test_a_missing_file_a_folder_and_foreign_objects(tmp_path):
    path = tmp_path / "content.pt"
    for read in (look_into, lambda path: checkpoint_utils.load_checkpoint_to_cpu(str(path))):
        with pytest.raises(UserError, match="no such checkpoint"):
            read(tmp_path / "missing.pt")
        with pytest.raises(UserError, match="cannot be read .Is a directory"):
            read(tmp_path)
        save([1, 2], path)
        with pytest.raises(UserError, match="content.pt: .*not a checkpoint"):
            read(path)
    for content in ([1, 2], 5, {}, torch.jit.script(torch.nn.Linear(1, 1))):
        (torch.jit.save if isinstance(content, torch.nn.Module) else torch.save)(content, path)
        with pytest.raises(UserError, match="content.pt: "):
            checkpoint_utils.load_checkpoint_to_cpu(str(path))


def test_the_file_is_synced_before_it_gets_its_name_and_the_folder_after(tmp_path, monkeypatch):
    happened, rename = [], os.rename

    def sync(descriptor):
        name = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
        happened.append("sync folder" if name == tmp_path else f"sync file of {os.path.getsize(name)} bytes")

    def replace(source, target):
        happened.append(f"rename to {Path(target).name}")
        rename(source, target)

    (tmp_path / "source").write_bytes(b"12345")
    monkeypatch.setattr(os, "fsync", sync)
    monkeypatch.setattr(os, "replace", replace)
    save(STATE, tmp_path / "saved.pt")
    checkpoints.copy_atomically(None, str(tmp_path / "source"), str(tmp_path / "copy.pt"))
    assert happened == [
        *(f"sync file of {(tmp_path / 'saved.pt').stat().st_size} bytes", "rename to saved.pt", "sync folder"),
        *("sync file of 5 bytes", "rename to copy.pt", "sync folder"),
    ]


def test_file_systems_that_sync_no_folders_or_know_no_locks(tmp_path, monkeypatch):
    path, fsync = tmp_path / "checkpoint.pt", os.fsync

    def failing(error: int):
        def sync(descriptor):
            if Path(os.readlink(f"/proc/self/fd/{descriptor}")).is_dir():
                raise OSError(error, os.strerror(error))
            fsync(descriptor)

        return mock.patch.object(os, "fsync", sync)

    with failing(errno.EINVAL):
        save(STATE, path)
    check(path)
    with failing(errno.EIO), pytest.raises(OSError, match="Input/output error"):
        save(STATE, path)
    leftover = tmp_path / f".checkpoint.pt.0011aabb{UNFINISHED}"
    leftover.touch()
    path.unlink()
    with mock.patch.object(fcntl, "flock", side_effect=OSError(38, "Function not implemented")):
        save(STATE, path)
        remove_leftovers(tmp_path)
    check(path)
    assert leftover.exists(), "nobody can know whether it is in use"


# --- full disks -------------------------------------------------------------------------------------------------------


def test_where_there_is_no_room_the_old_file_stays_and_a_copy_is_another_name(tmp_path, saved):
    path, larger = tmp_path / "checkpoint.pt", {**STATE, "more": torch.zeros(5000)}
    path.write_bytes(saved)
    save(larger, tmp_path / "larger.pt")
    for limit in (0, 100, 2000, (tmp_path / "larger.pt").stat().st_size - 1):
        with largest_file(limit), pytest.raises(OSError, match="too large"):
            save(larger, path)
        assert path.read_bytes() == saved
    with largest_file(1000):
        checkpoints.copy_atomically(None, str(tmp_path / "larger.pt"), str(path))
    assert path.samefile(tmp_path / "larger.pt")
    assert sorted(file.name for file in tmp_path.iterdir()) == ["checkpoint.pt", "larger.pt"]


TINY = f"{TINY} --encoder-embed-dim 16 --save-interval-updates 2 --disable-validation"


@pytest.fixture
def full_disk(monkeypatch):
    """``full_disk(from_update, until_update)``: files may not grow beyond 20,000 bytes between these of a run."""
    train_step, before = SafeTrainer.train_step, resource.getrlimit(resource.RLIMIT_FSIZE)

    def between(from_update: int, until_update: int) -> None:
        def limited(trainer, *args, **kwargs):
            output = train_step(trainer, *args, **kwargs)
            is_full = from_update <= trainer.get_num_updates() < until_update
            resource.setrlimit(resource.RLIMIT_FSIZE, (20_000 if is_full else before[0], before[1]))
            return output

        monkeypatch.setattr(SafeTrainer, "train_step", limited)

    yield between
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_run_goes_on_without_saving_and_saves_when_there_is_room_again(
    data_folder, tmp_path, fairseq_train, full_disk, caplog
):
    full_disk(3, 8)
    assert updates_of(fairseq_train(data_folder, f"{TINY} --max-update 9 --keep-updates-list 5", tmp_path)) == 9
    kept = {path.name for path in tmp_path.glob("checkpoint*")}
    assert kept == {"checkpoint_1_2.pt", "checkpoint_1_8.pt", "checkpoint_last.pt"}
    warnings = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    for name in ("checkpoint_1_4.pt", "checkpoint_update_5.pt", "checkpoint_1_6.pt"):
        (warning,) = [text for text in warnings if f"{tmp_path / name} was not saved (File too large)" in text]
        assert "bytes are free. Free up space; earlier checkpoints are unchanged" in warning
        assert "The run continues" in warning


@pytest.mark.slow
def test_a_run_that_cannot_save_its_end_fails(data_folder, tmp_path, fairseq_train, full_disk):
    full_disk(3, 100)
    with pytest.raises(UserError, match=r"not saved \(File too large\).*\nTraining has finished"):
        fairseq_train(data_folder, f"{TINY} --max-update 6", tmp_path)
    assert look_into(tmp_path / "checkpoint_last.pt").updates == 2
    full_disk(100, 100)
    resumed = fairseq_train(data_folder, f"{TINY} --max-update 6", tmp_path)
    assert [part["num_updates"] for part in resumed["optimizer_history"]] == [2, 6]


@pytest.mark.slow
def test_a_run_that_patience_ends_and_that_cannot_save_its_end_fails(
    data_folder, tmp_path, fairseq_train, full_disk, monkeypatch
):
    """The loss gets no better with a step of nearly zero, and --patience 1 ends the run at its second validation."""
    options = f"{TINY} --max-update 30 --patience 1 --adam-eps 1e9 --weight-decay 0".replace("--disable-validation", "")
    training = fairseq_cli.train.should_stop_early
    of_its_own = FunctionType(training.__code__, training.__globals__)  # fairseq counts by attributes of the function
    monkeypatch.setattr(fairseq_cli.train, "should_stop_early", of_its_own)
    full_disk(3, 100)
    with pytest.raises(UserError, match=r"checkpoint_1_4.pt was not saved \(File too large\).*\nTraining has finished"):
        fairseq_train(data_folder, options, tmp_path)
