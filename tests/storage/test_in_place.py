"""Locks and logs are opened in place: what else has their name stays as it is, and is named."""

import logging
import os
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import pytest

from lazyformer_fairseq.child_process import output_to
from lazyformer_fairseq.corpus import stages
from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.storage.in_place import refuse_foreign, tail
from lazyformer_fairseq.storage.run_lock import file_lock, lock_for_process, run_lock

PRECIOUS = b"of the user\n"


def link(path: Path) -> None:
    path.symlink_to(path.with_name("precious"))


def link_to_nothing(path: Path) -> None:
    path.symlink_to(path.with_name("nothing"))


def link_to_itself(path: Path) -> None:
    path.symlink_to(path)


def hard_link(path: Path) -> None:
    path.hardlink_to(path.with_name("precious"))


def unix_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(os.path.relpath(path))  # the name of a socket is short


# How each comes to have the name, and what is said of it.
OBSTACLES = {
    link: "is a link",
    link_to_nothing: "is a link",
    link_to_itself: "is a link",
    hard_link: r"has another hard link",
    os.mkfifo: "is not a regular file",
    Path.mkdir: "is not a regular file",
    unix_socket: "is not a regular file",
}


@contextmanager
def logging_to(folder: Path) -> Iterator[None]:
    run_log = pytest.importorskip("lazyformer_fairseq.fairseq_plugin.reliability.run_log", reason="no fairseq")
    handlers = list(logging.getLogger().handlers)
    with mock.patch.object(logging.getLogger(), "handlers", handlers):
        run_log.log_to(folder)
        yield
        logging.getLogger().handlers[-1].close()


@contextmanager
def tasks_in(folder: Path) -> Iterator[None]:
    stages.run_tasks(lambda rank: None, [1], folder)
    yield


@contextmanager
def locked_for_process(folder: Path) -> Iterator[None]:
    lock_for_process(folder, ".training.lock")
    yield


# Every place in the package that writes in place, with the name of its file.
PLACES: list[tuple[str, Callable]] = [
    (".lock", run_lock),
    (".training.lock", locked_for_process),
    ("workers.lock", lambda folder: file_lock(folder / "workers.lock")),
    ("train.log", lambda folder: output_to(folder / "train.log")),
    ("train.log", logging_to),
    ("seconds", tasks_in),
]


@pytest.mark.parametrize("make", OBSTACLES, ids=lambda make: make.__name__)
@pytest.mark.parametrize(
    ("name", "opened_in"), PLACES, ids=[f"{number} {name}" for number, (name, _) in enumerate(PLACES)]
)
def test_what_has_the_name_of_a_lock_or_a_log_is_refused_and_stays(tmp_path, monkeypatch, name, opened_in, make):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "precious").write_bytes(PRECIOUS)
    make(tmp_path / name)
    with pytest.raises(UserError, match=f"{name} {OBSTACLES[make]}"), opened_in(tmp_path):
        pytest.fail("it was opened")
    assert (tmp_path / "precious").read_bytes() == PRECIOUS
    assert not (tmp_path / "nothing").exists()


@pytest.mark.parametrize(
    ("name", "opened_in"), PLACES, ids=[f"{number} {name}" for number, (name, _) in enumerate(PLACES)]
)
def test_a_file_of_ours_is_opened_again_also_in_a_folder_that_is_a_link(tmp_path, name, opened_in):
    (tmp_path / "folder").mkdir()
    (tmp_path / "link").symlink_to("folder")
    for folder in ("folder", "link"):
        with opened_in(tmp_path / folder):
            assert (tmp_path / "folder" / name).is_file()


def test_what_is_refused_is_known_before_a_process_starts_and_the_end_of_a_pipe_is_not_waited_for(tmp_path):
    log = tmp_path / "train.log"
    refuse_foreign(log)
    os.mkfifo(log)
    with pytest.raises(UserError, match="train.log is not a regular file"):
        refuse_foreign(log)
    assert tail(log) == ""
