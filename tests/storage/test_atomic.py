"""A file or folder is there whole or not at all, and nothing stays of one that was never finished; the user's cache."""

import errno
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import platformdirs
import pytest
import torch
from helpers import ROOT, largest_file
from safetensors.torch import save_file

from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.storage import atomic
from lazyformer_fairseq.storage.atomic import UNFINISHED, atomic_file, atomic_folder, remove_leftovers, unfinished_name
from lazyformer_fairseq.storage.json_files import cache_file, cache_get, cache_set, read_json, write_json


def test_a_failure_leaves_the_old_file_and_two_may_write_at_once(tmp_path):
    (tmp_path / "file").write_text("old")
    with pytest.raises(KeyboardInterrupt), atomic_file(tmp_path / "file") as file:
        file.write(b"half of the new")
        file.flush()
        assert (tmp_path / "file").read_text() == "old"
        raise KeyboardInterrupt
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("file", "old")]
    with atomic_file(tmp_path / "file") as first, atomic_file(tmp_path / "file") as second:
        first.write(b"first")
        second.write(b"second")
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("file", "first")]


def test_what_is_to_last_is_synced_and_its_folder_after_it(tmp_path, monkeypatch):
    synced, fsync = [], os.fsync

    def sync(descriptor):
        synced.append(Path(os.readlink(f"/proc/self/fd/{descriptor}")).name)
        fsync(descriptor)

    monkeypatch.setattr(atomic.os, "fsync", sync)
    with atomic_file(tmp_path / "file", durable=False):
        pass
    assert synced == []
    with atomic_file(tmp_path / "made" / "file"):
        pass
    assert len(synced) == 2 and synced[0].endswith(UNFINISHED) and synced[1] == "made"
    synced.clear()
    with atomic_folder(tmp_path / "folder") as folder:
        (folder / "inner").mkdir()
        (folder / "inner" / "file").write_text("content")
        (folder / "inner" / "file").chmod(0o600)  # as safetensors writes
    assert synced[:2] == ["inner", "file"] and synced[2].endswith(UNFINISHED) and synced[3] == tmp_path.name
    written = tmp_path / "folder" / "inner" / "file"
    assert written.read_text() == "content"
    assert written.stat().st_mode & 0o777 == (tmp_path / "folder").stat().st_mode & 0o666, "as umask says"


@pytest.mark.parametrize("content", ["a folder", "a file"])
def test_a_new_folder_takes_no_place_that_is_taken(tmp_path, content):
    taken = tmp_path / "taken"
    if content == "a folder":
        taken.mkdir()
        taken /= "file"
    taken.touch()
    with pytest.raises(UserError, match="taken already exists"), atomic_folder(tmp_path / "taken"):
        pytest.fail("begins")
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    with pytest.raises(UserError, match="link is a broken symbolic link"), atomic_folder(tmp_path / "link"):
        pytest.fail("begins")
    with pytest.raises(UserError, match="later already exists"), atomic_folder(tmp_path / "later"):
        (tmp_path / "later").touch()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["later", "link", "taken"]


def test_a_link_to_an_empty_folder_stays_and_a_mounted_folder_is_refused(tmp_path, monkeypatch):
    (tmp_path / "empty").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "empty")
    with atomic_folder(tmp_path / "link") as folder:
        (folder / "file").touch()
    assert (tmp_path / "link").is_symlink() and (tmp_path / "empty" / "file").exists()
    (tmp_path / "mounted").mkdir()
    monkeypatch.setattr(Path, "is_mount", lambda path: path.name == "mounted")
    with pytest.raises(UserError, match="mounted already exists"), atomic_folder(tmp_path / "mounted"):
        pytest.fail("begins")


def test_a_folder_that_is_replaced_stands_until_the_new_one_is_whole(tmp_path):
    for number in range(2):
        with atomic_folder(tmp_path / "folder", replace=True) as folder:
            (folder / str(number)).touch()
    with pytest.raises(ZeroDivisionError), atomic_folder(tmp_path / "folder", replace=True):
        _ = 1 / 0
    assert [path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*")] == ["folder", "folder/1"]


def test_who_writes_a_folder_removes_what_the_killed_left_of_it(tmp_path):
    dead, other, inner = (unfinished_name(tmp_path / name) for name in ("out", "out2", "inner/out"))
    corpus = tmp_path / f".out.v2{UNFINISHED}"  # a corpus in the making, which goes on from what it holds
    for path in (dead, other, inner, corpus):
        path.mkdir(parents=True)
    with atomic_folder(tmp_path / "out") as alive:
        assert not dead.exists() and alive.exists() and other.exists() and corpus.exists()
        remove_leftovers(tmp_path)
        assert alive.exists() and not other.exists() and corpus.exists() and inner.exists()
        remove_leftovers(tmp_path, deep=True)
        assert alive.exists() and not inner.exists() and corpus.exists()


def test_whoever_writes_a_file_removes_what_a_killed_process_left_of_it_and_nothing_else(tmp_path):
    """The killed process is a real one: its lock must go with it."""
    write = (
        "import os, signal, sys\n"
        "from lazyformer_fairseq.storage.atomic import atomic_file\n"
        "with atomic_file(sys.argv[1]) as file:\n"
        "    file.write(b'half of it')\n"
        "    file.flush()\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    answers = tmp_path / "answers.tsv"
    killed = subprocess.run([sys.executable, "-c", write, str(answers)], cwd=ROOT)
    assert killed.returncode == -signal.SIGKILL
    (dead,) = tmp_path.iterdir()
    other = unfinished_name(tmp_path / "answers.csv")
    other.touch()
    with atomic_file(answers) as alive:
        alive.write(b"first")
        assert not dead.exists() and other.exists()
        with atomic_file(answers) as second:
            second.write(b"second")
    assert answers.read_bytes() == b"first", "the file that was being written has been removed"
    assert {path.name for path in tmp_path.iterdir()} == {"answers.tsv", other.name}


@pytest.mark.parametrize("write", [atomic_file, atomic_folder])
def test_what_is_removed_before_it_could_be_locked_is_made_once_more(tmp_path, monkeypatch, write):
    """As by a process that looks for leftovers between the two calls that make a file and lock it."""
    lock, removed = atomic._lock, []

    def lock_late(descriptor: int) -> None:
        if not removed:
            remove_leftovers(tmp_path)
            removed.append(True)
            assert not list(tmp_path.iterdir())
        lock(descriptor)

    monkeypatch.setattr(atomic, "_lock", lock_late)
    with write(tmp_path / "out") as out:
        if write is atomic_folder:
            (out / "file").touch()
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_a_full_disk_is_named_where_python_does_not(tmp_path):
    with pytest.raises(OSError) as caught, atomic_file(tmp_path / "file"), open("/dev/full", "w") as full:
        full.write("text")
    assert caught.value.filename == str(tmp_path / "file")


def test_a_full_disk_is_named_where_safetensors_meets_it(tmp_path):
    weights = {"weight": torch.zeros(4096)}
    with pytest.raises(OSError) as caught, atomic_folder(tmp_path / "model") as folder, largest_file(1000):
        save_file(weights, folder / "model.safetensors")
    assert (caught.value.errno, caught.value.filename) == (errno.EFBIG, str(tmp_path / "model"))
    assert not any(tmp_path.iterdir())


def test_json_in_readable_letters_and_what_is_none(tmp_path):
    content = {"name": "\u00e9t\u00e9", "file": os.fsdecode(b"caf\xe9.txt")}
    write_json(tmp_path / "file.json", content)
    assert "\u00e9t\u00e9" in (tmp_path / "file.json").read_text(encoding="utf-8")
    assert read_json(tmp_path / "file.json") == content
    for damaged in ("[1]", "{", "\xff", "[" * 100_000):
        (tmp_path / "file.json").write_text(damaged, encoding="latin-1")
        with pytest.raises(UserError, match=r"file\.json: .*remove it and run the same command again"):
            read_json(tmp_path / "file.json")


def test_a_measurement_is_kept(tmp_path, monkeypatch):
    monkeypatch.delenv("LAZYFORMER_CACHE")
    assert cache_file("a.json") == platformdirs.user_cache_path("lazyformer_fairseq") / "a.json"
    folder = tmp_path / "cache"
    monkeypatch.setenv("LAZYFORMER_CACHE", str(folder))

    def keep(key: str, value: object) -> object:
        return cache_set("speeds.json", key, "a", value)

    assert keep("this", [1, 2]) == [1, 2] and keep("that", [3]) == [3]
    assert cache_get("speeds.json", "this", "a") == [1, 2] and cache_get("speeds.json", "this", "b") is None
    assert json.loads((folder / "speeds.json").read_text()) == {"this": {"a": [1, 2]}, "that": {"a": [3]}}
    assert keep("this", 5) == [1, 2], "the first decides"
    for damaged in ("{", "[]", '{"this": 5}', "[" * 100_000):  # no run ends for a cache
        (folder / "speeds.json").write_text(damaged)
        assert cache_get("speeds.json", "this", "a") is None
        assert keep("this", 1) == 1 and json.loads((folder / "speeds.json").read_text()) == {"this": {"a": 1}}
    assert cache_set("speeds.json", "this", "a", "x", is_valid=lambda value: value == "x") == "x"
    assert json.loads((folder / "speeds.json").read_text()) == {"this": {"a": "x"}}, (
        "a value that cannot be is replaced"
    )
    monkeypatch.setenv("LAZYFORMER_CACHE", str(folder / "speeds.json"))  # where nothing can be written each measures
    assert [keep("this", value) for value in (1, 2)] == [1, 2]
