"""``train.log``: what a run logs stands beside its checkpoints, once."""

import logging
import sys

import pytest

from lazyformer_fairseq.fairseq_plugin.reliability import options


@pytest.fixture(autouse=True)
def logging_as_before(monkeypatch):
    root = logging.getLogger()
    level = root.level
    root.setLevel(logging.INFO)
    monkeypatch.setattr(options, "_handler", None)
    yield
    if options._handler is not None:
        root.removeHandler(options._handler)
        options._handler.close()
    root.setLevel(level)


def messages(folder) -> list[str]:
    return [line.split(" | ")[-1] for line in (folder / "train.log").read_text().splitlines()]


def test_a_run_appends_to_the_log_of_its_folder_alone_even_after_a_full_disk(tmp_path, capsys):
    one, other = tmp_path / "one", tmp_path / "other"
    one.mkdir()
    other.mkdir()
    (one / "train.log").write_text("before\n")
    for folder in (one, one, other, one):  # a process asks more than once, and may train several times
        options.log_to(folder)
        logging.getLogger("train").info(f"in {folder.name}")
    options._handler.stream.close()
    with open("/dev/full", "w") as full:
        options._handler.stream = full
        logging.getLogger("train").info("a line")
        options.log_to(other)
        logging.getLogger("train").info("room again")
        assert "Traceback" not in capsys.readouterr().err
    assert messages(one) == ["before", "in one", "in one", "in one"]
    assert messages(other) == ["in other", "room again"]


def test_what_goes_to_that_file_already_is_not_written_twice(tmp_path, monkeypatch):
    with (tmp_path / "train.log").open("a") as file:  # as the queue of GLUE's runs has it
        monkeypatch.setattr(sys, "stdout", file)
        options.log_to(tmp_path)
        logging.getLogger("train").info("a line")
    assert messages(tmp_path) == []
