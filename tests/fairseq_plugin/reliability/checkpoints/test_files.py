import errno
import fcntl
import hashlib
import io
import os
import pickle
import resource
import zipfile
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import pytest
import torch
from fairseq import checkpoint_utils
from hypothesis import example, given, settings
from hypothesis import strategies as st

from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.fairseq_plugin.reliability import checkpoints
from lazyformer_fairseq.fairseq_plugin.reliability.checkpoints import DamagedCheckpointError, check, look_into, save
from lazyformer_fairseq.storage.atomic import UNFINISHED, remove_leftovers

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


@contextmanager
def largest_file(size: int):
    """The system's limit for this process; a write beyond it fails as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_what_was_saved_is_what_torch_and_zip_read(tmp_path, saved):
    path = tmp_path / "checkpoint.pt"
    path.write_bytes(saved)
    for mmap in (False, True):
        state = torch.load(path, mmap=mmap)
        assert torch.equal(state["model"]["weight"], STATE["model"]["weight"])
    assert zipfile.ZipFile(path).testzip() is None
    assert look_into(path) == (7, True)


@pytest.mark.parametrize("legacy", [False, True])
def test_files_without_a_checksum_still_load(tmp_path, legacy):
    path = tmp_path / "checkpoint.pt"
    torch.save(STATE, path, _use_new_zipfile_serialization=not legacy)
    assert look_into(path) == (7, True)


def test_the_mode_of_a_file_is_that_of_any_other(tmp_path):
    (tmp_path / "other").touch()
    save(STATE, tmp_path / "checkpoint.pt")
    assert (tmp_path / "checkpoint.pt").stat().st_mode == (tmp_path / "other").stat().st_mode


@given(st.data())
@settings(max_examples=300)
def test_any_flipped_bit_is_noticed(saved, tmp_path_factory, data):
    bit = data.draw(st.integers(0, 8 * len(saved) - 1))
    flipped = bytearray(saved)
    flipped[bit // 8] ^= 1 << bit % 8
    assert_damaged(tmp_path_factory, bytes(flipped))


@given(st.data())
@settings(max_examples=100)
def test_any_truncation_is_noticed(saved, stock, tmp_path_factory, data):
    content = data.draw(st.sampled_from([saved, stock]))
    assert_damaged(tmp_path_factory, content[: data.draw(st.integers(0, len(content) - 1))])


@pytest.mark.parametrize("weight", [0.0, 499.0])
def test_a_flipped_bit_in_a_weight_of_a_stock_file_is_noticed(stock, tmp_path_factory, weight):
    number = torch.tensor([weight, weight + 1] if weight == 0 else [weight - 1, weight]).numpy().tobytes()
    place = stock.index(number)
    assert_damaged(tmp_path_factory, stock[:place] + bytes([stock[place] ^ 1]) + stock[place + 1 :])


def assert_damaged(folders, content: bytes) -> None:
    path = folders.mktemp("damaged", numbered=True) / "checkpoint.pt"
    path.write_bytes(content)
    for read in (check, look_into, checkpoint_utils.load_checkpoint_to_cpu):
        with pytest.raises(DamagedCheckpointError, match="checkpoint.pt: truncated, damaged or no checkpoint"):
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


@pytest.mark.parametrize("forged", [False, True])
def test_a_small_file_that_unpacks_to_a_large_one_is_refused(tmp_path, stock, forged):
    path = tmp_path / "bomb.pt"
    with zipfile.ZipFile(io.BytesIO(stock)) as original, zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as packed:
        for name in original.namelist():
            packed.writestr(name, bytes(10**7) if name.endswith("data/0") else original.read(name))
    if forged:  # with a checksum of ours
        content = path.read_bytes()
        checksum = hashlib.sha256(content).hexdigest().encode()
        path.write_bytes(content[:-2] + checkpoints._COMMENT_FOLLOWS + checkpoints._LABEL + checksum)
    assert path.stat().st_size < 10**5
    for read in (look_into, checkpoint_utils.load_checkpoint_to_cpu):
        with pytest.raises(UserError, match="bomb.pt: refused, its records are packed and larger than the file"):
            read(path)


def test_a_missing_file_a_folder_and_a_foreign_object(tmp_path):
    for read in (look_into, lambda path: checkpoint_utils.load_checkpoint_to_cpu(str(path))):
        with pytest.raises(UserError, match="no such checkpoint"):
            read(tmp_path / "missing.pt")
        with pytest.raises(UserError, match="cannot be read .Is a directory"):
            read(tmp_path)
        save([1, 2], tmp_path / "list.pt")
        with pytest.raises(UserError, match="list.pt: .*no checkpoint"):
            read(tmp_path / "list.pt")


def test_the_file_is_synced_before_it_gets_its_name_and_the_folder_after(tmp_path):
    happened = []

    def sync(descriptor):
        name = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
        happened.append("sync folder" if name == tmp_path else f"sync file of {os.path.getsize(name)} bytes")

    def replace(source, target):
        happened.append(f"rename to {Path(target).name}")
        os.rename(source, target)

    (tmp_path / "source").write_bytes(b"12345")
    with (
        mock.patch.object(checkpoints.os, "fsync", sync),
        mock.patch.object(checkpoints.os, "replace", replace),
    ):
        save(STATE, tmp_path / "saved.pt")
        checkpoints.copying_atomically(None, str(tmp_path / "source"), str(tmp_path / "copy.pt"))
    size = (tmp_path / "saved.pt").stat().st_size
    assert happened == [
        *(f"sync file of {size} bytes", "rename to saved.pt", "sync folder"),
        *("sync file of 5 bytes", "rename to copy.pt", "sync folder"),
    ]


@pytest.mark.parametrize("limit", [0, 100, 2000, "all but one byte"])
def test_where_there_is_no_room_the_old_file_stays(tmp_path, saved, limit):
    path = tmp_path / "checkpoint.pt"
    path.write_bytes(saved)
    larger = {**STATE, "more": torch.zeros(5000)}
    save(larger, tmp_path / "larger.pt")
    size = (tmp_path / "larger.pt").stat().st_size
    with largest_file(size - 1 if limit == "all but one byte" else limit), pytest.raises(OSError, match="too large"):
        save(larger, path)
    assert path.read_bytes() == saved
    assert sorted(file.name for file in tmp_path.iterdir()) == ["checkpoint.pt", "larger.pt"]


def test_on_a_full_disk_a_copy_is_another_name(tmp_path):
    (tmp_path / "source.pt").write_bytes(b"new" * 1000)
    (tmp_path / "checkpoint_last.pt").write_bytes(b"old")
    with largest_file(1000):
        checkpoints.copying_atomically(None, str(tmp_path / "source.pt"), str(tmp_path / "checkpoint_last.pt"))
    assert (tmp_path / "checkpoint_last.pt").samefile(tmp_path / "source.pt") and len(list(tmp_path.iterdir())) == 2


def test_a_file_system_that_syncs_no_folders(tmp_path):
    fsync = os.fsync

    def sync(descriptor, error):
        if Path(os.readlink(f"/proc/self/fd/{descriptor}")).is_dir():
            raise OSError(error, os.strerror(error))
        fsync(descriptor)

    with mock.patch.object(checkpoints.os, "fsync", lambda descriptor: sync(descriptor, errno.EINVAL)):
        save(STATE, tmp_path / "checkpoint.pt")
    check(tmp_path / "checkpoint.pt")
    with (
        mock.patch.object(checkpoints.os, "fsync", lambda descriptor: sync(descriptor, errno.EIO)),
        pytest.raises(OSError, match="Input/output error"),
    ):
        save(STATE, tmp_path / "checkpoint.pt")


def test_a_file_system_without_locks(tmp_path, saved):
    leftover = tmp_path / f".checkpoint.pt.0011aabb{UNFINISHED}"
    leftover.touch()
    with mock.patch.object(fcntl, "flock", side_effect=OSError(38, "Function not implemented")):
        save(STATE, tmp_path / "checkpoint.pt")
        remove_leftovers(tmp_path)
    check(tmp_path / "checkpoint.pt")
    assert leftover.exists(), "nobody can know whether it is in use"
