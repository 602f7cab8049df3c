"""``train.log``: what a run logs stands beside its checkpoints, once."""

import logging
import sys

import pytest

from lazyformer_fairseq.fairseq_plugin.reliability import our_runs


@pytest.fixture(autouse=True)
def logging_as_before(monkeypatch):
    root = logging.getLogger()
    level = root.level
    root.setLevel(logging.INFO)
    monkeypatch.setattr(our_runs, "_handler", None)
    yield
    if our_runs._handler is not None:
        root.removeHandler(our_runs._handler)
        our_runs._handler.close()
    root.setLevel(level)


def messages(folder) -> list[str]:
    return [line.split(" | ")[-1] for line in (folder / "train.log").read_text().splitlines()]


def test_a_run_appends_to_the_log_of_its_folder_alone(tmp_path):
    one, other = tmp_path / "one", tmp_path / "other"
    one.mkdir()
    other.mkdir()
    (one / "train.log").write_text("before\n")
    for folder in (one, one, other, one):  # a process asks more than once, and may train several times
        our_runs.log_to(folder)
        logging.getLogger("train").info(f"in {folder.name}")
    assert messages(one) == ["before", "in one", "in one", "in one"]
    assert messages(other) == ["in other"]


def test_what_goes_to_that_file_already_is_not_written_twice(tmp_path, monkeypatch):
    with (tmp_path / "train.log").open("a") as file:  # as the queue of GLUE's runs has it
        monkeypatch.setattr(sys, "stdout", file)
        our_runs.log_to(tmp_path)
        logging.getLogger("train").info("a line")
    assert messages(tmp_path) == []


def test_a_full_disk_does_not_disturb_the_run(tmp_path, capsys):
    our_runs.log_to(tmp_path)
    our_runs._handler.stream.close()
    with open("/dev/full", "w") as full:
        our_runs._handler.stream = full
        logging.getLogger("train").info("a line")
        (tmp_path / "next").mkdir()
        our_runs.log_to(tmp_path / "next")
        logging.getLogger("train").info("room again")
        assert "Traceback" not in capsys.readouterr().err
        assert messages(tmp_path / "next") == ["room again"]
