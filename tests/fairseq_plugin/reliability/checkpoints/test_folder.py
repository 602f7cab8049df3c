"""Which checkpoint of a folder a run starts from, and which are kept: its processes choose the same, or all stop."""

import logging
import os
import pickle
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from fairseq import checkpoint_utils
from fairseq.distributed import utils as distributed_utils
from fairseq_plugin.reliability.damage import TINY, flip_a_bit, options, truncate
from helpers import (
    assert_equal_state,
    message_of,
    mostly_slow,
    train_in_two_processes,
    train_words,
    updates_of,
)

from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.fairseq_plugin.reliability import checkpoints, run_log
from lazyformer_fairseq.fairseq_plugin.reliability.checkpoints import choose
from lazyformer_fairseq.fairseq_plugin.reliability.options import listed_updates
from lazyformer_fairseq.storage.atomic import UNFINISHED
from lazyformer_fairseq.storage.checkpoint_file import look_into, save

SAVING = f"{TINY} --encoder-embed-dim 16 --save-interval-updates 3"
SMALL = f"{TINY} --encoder-embed-dim 16 --dropout 0"
NINTH = ("checkpoint_last.pt", "checkpoint_best.pt", "checkpoint_1_9.pt")


def parts_of(state: dict) -> list[int]:
    """After how many updates each part of a run ended."""
    return [part["num_updates"] for part in state["optimizer_history"]]


@pytest.fixture(scope="module")
def run_of_nine(tmp_path_factory, data_folder, fairseq_train):
    folder = tmp_path_factory.mktemp("run") / "run"
    fairseq_train(data_folder, f"{SAVING} --max-update 9", folder)
    return folder


@pytest.fixture
def trained(run_of_nine, tmp_path):
    """A copy of a run of nine updates: checkpoints of the updates 3, 6, 9, the best and the last."""
    return shutil.copytree(run_of_nine, tmp_path / "run")


@pytest.mark.parametrize("damage", mostly_slow([flip_a_bit, truncate], flip_a_bit))
def test_the_newest_intact_checkpoint_takes_the_place_of_a_damaged_one(
    data_folder, trained, fairseq_train, caplog, damage
):
    for name in NINTH:
        damage(trained / name)
    (trained / f".checkpoint_last.pt.0011aabb{UNFINISHED}").touch()
    os.utime(trained / "checkpoint_1_3.pt")  # the youngest file, but not the newest checkpoint
    resumed = fairseq_train(data_folder, f"{SAVING} --max-update 10", trained)
    for name in ("checkpoint_last.pt", "checkpoint_1_9.pt"):
        assert f"{trained / name}: truncated, damaged or not a checkpoint" in caplog.text
    assert f"newest intact checkpoint: {trained / 'checkpoint_1_6.pt'}, update 6" in caplog.text
    assert parts_of(resumed) == [6, 10]
    assert {path.name for path in trained.glob(".*")} == {".training.lock"}, "what a kill left"


def test_without_any_intact_checkpoint_the_run_stops_and_names_them(data_folder, trained, fairseq_train):
    damaged = sorted(trained.glob("checkpoint*.pt"))
    for path in damaged:
        flip_a_bit(path)
    before = {path: path.read_bytes() for path in damaged}
    message = message_of(fairseq_train, data_folder, f"{SAVING} --max-update 10", trained)
    assert "no intact checkpoint; move these files away to start from scratch" in message
    assert len(damaged) == 5 and all(f"{path}: truncated, damaged" in message for path in damaged)
    assert {path: path.read_bytes() for path in trained.glob("checkpoint*.pt")} == before


def test_a_missing_last_checkpoint_a_link_to_nowhere_or_a_folder_is_no_start_from_scratch(trained, tmp_path, caplog):
    for name in NINTH:
        (trained / name).unlink()
    assert choose(options(trained)) == trained / "checkpoint_1_6.pt"
    assert "checkpoint_last.pt is missing" in caplog.text
    assert choose(options(trained, finetune_from_model=str(trained / "checkpoint_1_3.pt"))).name == "checkpoint_1_6.pt"
    (trained / "checkpoint_last.pt").symlink_to("removed.pt")
    (trained / "checkpoint_1_9.pt").mkdir()
    assert choose(options(trained)) == trained / "checkpoint_1_6.pt"
    assert choose(options(trained, checkpoint_suffix="_b")) is None
    assert choose(options(tmp_path)) is None and choose(options(tmp_path / "missing")) is None


def test_a_file_asked_for_by_name_is_taken_and_so_is_the_last_even_if_others_are_newer(trained, caplog):
    last = trained / "checkpoint_last.pt"
    for option in ("finetune_from_model", "continue_once"):  # the last may be named as the start too
        assert choose(options(trained, **{option: str(last)})) == last
    assert choose(options(trained, restore_file=str(trained / "checkpoint_1_3.pt"))).name == "checkpoint_1_3.pt"
    assert "checkpoint_last.pt: ignored in favor of --restore-file" in caplog.text
    shutil.copy(trained / "checkpoint_1_3.pt", last)  # how a user goes back
    assert choose(options(trained)) == last and look_into(last).updates == 3


def test_weights_without_the_optimizer_are_nothing_to_go_on_from(trained):
    flip_a_bit(trained / "checkpoint_last.pt")
    for name in NINTH[1:]:
        state = torch.load(trained / name)
        del state["last_optimizer_state"]
        save(state, trained / name)
    assert choose(options(trained)) == trained / "checkpoint_1_6.pt"
    assert look_into(choose(options(trained, no_save_optimizer_state=True))).updates == 9


def test_a_dangerous_checkpoint_is_refused_and_not_passed_over(trained):
    class Dangerous:
        def __reduce__(self):
            return os.mkdir, (str(trained / "made"),)

    for write in (torch.save, lambda state, path: path.write_bytes(pickle.dumps(state))):
        write({"model": Dangerous()}, trained / "checkpoint_last.pt")
        with pytest.raises(UserError, match="checkpoint_last.pt: refused without running any code in it"):
            choose(options(trained))
    assert not (trained / "made").exists()


@pytest.mark.slow
def test_a_checkpoint_asked_for_by_name_must_be_intact(data_folder, trained, tmp_path, fairseq_train):
    flip_a_bit(trained / "checkpoint_1_9.pt")
    for option in ("--restore-file", "--finetune-from-model", "--continue-once"):
        for name, words in (("checkpoint_1_9.pt", "truncated, damaged"), ("missing.pt", "no such")):
            with pytest.raises(UserError, match=f"{name}: {words}"):
                fairseq_train(data_folder, f"{SAVING} --max-update 10 {option} {trained / name}", tmp_path / "new")
    assert not list((tmp_path / "new").glob("checkpoint*"))


@pytest.mark.slow
def test_a_suffix_tells_runs_in_one_folder_apart(data_folder, tmp_path, fairseq_train, trained):
    for name in ("checkpoint_last", "checkpoint_1_3"):
        shutil.copy(trained / f"{name}.pt", trained / f"{name}_b.pt")
    truncate(trained / "checkpoint_last_b.pt")
    fairseq_train(data_folder, f"{SAVING} --max-update 4 --checkpoint-suffix _b", trained)
    assert parts_of(torch.load(trained / "checkpoint_last_b.pt")) == [3, 4]


# --- several processes ------------------------------------------------------------------------------------------------


def test_the_second_process_hears_of_the_problem():
    trainer = SimpleNamespace(
        data_parallel_rank=1, data_parallel_world_size=2, data_parallel_process_group=None, device=torch.device("cpu")
    )
    for told, seen, words in (
        ((None, "run contains no intact checkpoint"), [True, True], "run contains no intact checkpoint"),
        ((Path("checkpoint_last.pt"), None), [True, False], r"processes \[1\] cannot read it; all nodes must share"),
    ):
        doubles = {"broadcast_object": lambda *_, told=told: told, "all_gather_list": lambda *_, seen=seen: seen}
        with mock.patch.multiple(distributed_utils, **doubles), pytest.raises(UserError, match=words):
            checkpoints._same_on_all_ranks(trainer, mock.Mock(side_effect=AssertionError("the first one chooses")))


@pytest.mark.slow
@pytest.mark.reliability
def test_two_processes_with_damaged_checkpoints(data_folder, tmp_path, free_port):
    folder = tmp_path / "run"

    def train(updates: int) -> tuple[int, str]:
        options = f"{SMALL} --save-interval-updates 2 --max-update {updates}"
        run = train_in_two_processes(train_words(data_folder, options, folder), free_port)
        return run.returncode, run.stdout + run.stderr

    code, output = train(4)
    assert code == 0, output[-4000:]
    for name in ("checkpoint_last.pt", "checkpoint_best.pt", "checkpoint_1_4.pt"):
        flip_a_bit(folder / name)
    code, output = train(5)
    assert code == 0, output[-4000:]
    assert f"newest intact checkpoint: {folder / 'checkpoint_1_2.pt'}, update 2" in output
    assert parts_of(torch.load(folder / "checkpoint_last.pt")) == [2, 5]
    for path in folder.glob("checkpoint*.pt"):
        flip_a_bit(path)
    code, output = train(6)
    assert code != 0 and "contains no intact checkpoint" in output and "checkpoint_1_2.pt: truncated" in output


def names(folder) -> set[str]:
    return {path.name for path in folder.glob("checkpoint*.pt")}


def test_listed_updates_are_saved_and_kept(data_folder, tmp_path, fairseq_train):
    """At updates where nothing else is saved, where fairseq saves too, and at the end of an epoch."""
    options = f"{SMALL} --max-update 8 --save-interval-updates 2 --keep-interval-updates 1"
    fairseq_train(data_folder, f"{options} --keep-updates-list 3,4,100", tmp_path / "run")
    kept = {"checkpoint_update_3.pt", "checkpoint_update_4.pt"}
    assert names(tmp_path / "run") == kept | {"checkpoint_1_8.pt", "checkpoint_best.pt", "checkpoint_last.pt"}
    assert [look_into(tmp_path / "run" / name).updates for name in sorted(kept)] == [3, 4]

    whole = fairseq_train(data_folder, f"{SMALL} --max-update 8 --disable-validation", tmp_path / "other")
    restored = f"--restore-file {tmp_path / 'run' / 'checkpoint_update_3.pt'} --max-update 8 --disable-validation"
    resumed = fairseq_train(data_folder, f"{SMALL} {restored}", tmp_path / "resumed")
    for part in ("model", "last_optimizer_state"):
        assert_equal_state(resumed[part], whole[part], part)


def test_a_list_is_read_or_refused(data_folder, tmp_path, fairseq_train):
    assert listed_updates("100000, 200000") == {100_000, 200_000} and listed_updates(None) == frozenset()
    for text in ("", "1000,", "0", "-5", "1e5", "100 000", "x", "1;2", "²"):
        with pytest.raises(UserError, match="--keep-updates-list .*use whole numbers, such as 100000,200000"):
            listed_updates(text)
    with pytest.raises(UserError, match="--keep-updates-list x: 'x' is not an update number"):
        fairseq_train(data_folder, f"{SMALL} --keep-updates-list x", tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_asynchronous_writing_and_folders_that_cannot_be_written_are_refused(data_folder, tmp_path, fairseq_train):
    for option in ("--write-checkpoints-asynchronously", "--save-async"):
        with pytest.raises(UserError, match="--write-checkpoints-asynchronously: .*omit the option"):
            fairseq_train(data_folder, f"{SMALL} {option}", tmp_path)
    (tmp_path / "file").touch()
    for folder in (tmp_path / "file", tmp_path / "file" / "inside"):
        with pytest.raises(UserError, match=f"--save-dir {folder}: cannot be written .Not a directory.; choose"):
            fairseq_train(data_folder, f"{SMALL} --max-update 2", folder)


def test_a_file_called_dummy_stays(data_folder, tmp_path, fairseq_train):
    """By which fairseq tries whether it may write to the folder."""
    (tmp_path / "dummy").write_bytes(b"of the user")
    fairseq_train(data_folder, f"{SMALL} --max-update 1 --disable-validation", tmp_path)
    assert (tmp_path / "dummy").read_bytes() == b"of the user"


@pytest.mark.slow
def test_a_folder_belongs_to_one_training(data_folder, tmp_path, fairseq_train):
    """The second one is refused by name; a run that was killed keeps nobody out."""
    words = train_words(data_folder, f"{SMALL} --max-update 1000000 --disable-validation", tmp_path)
    options = f"{SMALL} --max-update 2 --disable-validation"
    command = [sys.executable, "-m", "fairseq_cli.train", *words]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as first:
        try:
            assert any("begin training epoch 1" in line for line in first.stdout)
            first.send_signal(signal.SIGSTOP)
            assert message_of(fairseq_train, data_folder, options, tmp_path) == (
                f"--save-dir {tmp_path}: another run is using this folder "
                f"(process {first.pid} on {os.uname().nodename}); wait for that run to end, or choose another folder"
            )
            with pytest.raises(FileNotFoundError, match="checkpoint_last.pt"):  # fairseq_train() reads it, no suffix
                fairseq_train(data_folder, f"{options} --checkpoint-suffix _other", tmp_path)
            assert (tmp_path / "checkpoint_last_other.pt").exists()
            assert first.poll() is None
        finally:
            first.kill()
    assert updates_of(fairseq_train(data_folder, options, tmp_path)) == 2


@pytest.fixture
def folder(tmp_path):
    """Checkpoints of 1 to 4 updates, the youngest last."""
    for updates in range(1, 5):
        state = {"optimizer_history": [{"num_updates": updates}], "last_optimizer_state": {"step": updates}}
        save(state, tmp_path / f"checkpoint_1_{updates}.pt")
    return tmp_path


def test_the_last_intact_checkpoint_is_never_removed(folder, caplog):
    """fairseq removes them so."""
    for updates in (2, 3, 4):
        (folder / f"checkpoint_1_{updates}.pt").write_bytes(b"damaged")
    checkpoint_utils.os.remove(folder / "checkpoint_1_1.pt")
    assert (folder / "checkpoint_1_1.pt").exists()
    assert "checkpoint_1_1.pt: kept despite its age, because no other checkpoint in its folder is intact" in caplog.text
    checkpoint_utils.os.remove(folder / "checkpoint_1_2.pt")  # damaged itself
    assert names(folder) == {"checkpoint_1_1.pt", "checkpoint_1_3.pt", "checkpoint_1_4.pt"}


def test_weights_alone_do_not_stand_in_for_a_checkpoint_unless_a_run_saves_no_more(folder, tmp_path_factory):
    for updates in (2, 3, 4):
        save({"optimizer_history": [{"num_updates": 9}]}, folder / f"checkpoint_1_{updates}.pt")
    checkpoint_utils.os.remove(folder / "checkpoint_1_1.pt")
    assert (folder / "checkpoint_1_1.pt").exists()
    other = tmp_path_factory.mktemp("without optimizers")
    for updates in (1, 2):
        save({"optimizer_history": [{"num_updates": updates}]}, other / f"checkpoint_1_{updates}.pt")
    checkpoint_utils.os.remove(other / "checkpoint_1_1.pt")
    assert names(other) == {"checkpoint_1_2.pt"}


def test_the_checkpoints_of_another_run_in_the_folder_do_not_count(folder):
    for path in folder.glob("*.pt"):
        path.rename(path.with_name(f"{path.stem}_b.pt"))
    save({"optimizer_history": [{"num_updates": 9}], "last_optimizer_state": {}}, folder / "checkpoint_1_9.pt")
    checkpoint_utils.os.remove(folder / "checkpoint_1_9.pt")
    assert (folder / "checkpoint_1_9.pt").exists()
    checkpoint_utils.os.remove(folder / "checkpoint_1_1_b.pt")
    assert not (folder / "checkpoint_1_1_b.pt").exists()


def test_the_log_beside_the_checkpoints_has_each_line_once_even_after_a_full_disk(tmp_path, capsys, monkeypatch):
    def log(text: str, *folders: Path) -> None:
        for folder in folders:
            run_log.log_to(folder)
        logging.getLogger("train").info(text)

    def messages(folder: Path) -> list[str]:
        return [line.split(" | ")[-1] for line in (folder / "train.log").read_text().splitlines()]

    root, (one, other) = logging.getLogger(), (tmp_path / "one", tmp_path / "other")
    monkeypatch.setattr(root, "handlers", root.handlers.copy())
    monkeypatch.setattr(root, "level", logging.INFO)
    for folder in (one, other):
        folder.mkdir()
    (one / "train.log").write_text("before\n")
    for folder in (one, one, other, one):  # a process asks more than once, and may train several times
        log(f"in {folder.name}", folder)
    handler = root.handlers[-1]
    handler.stream.close()
    with open("/dev/full", "w") as full:
        handler.stream = full
        log("a line")
        log("room again", other)
        assert "Traceback" not in capsys.readouterr().err
    assert messages(one) == ["before", "in one", "in one", "in one"]
    assert messages(other) == ["in other", "room again"]
    with (tmp_path / "train.log").open("a") as file:  # as the queue of GLUE's runs has it
        monkeypatch.setattr(sys, "stdout", file)
        log("a line", tmp_path)
    assert messages(tmp_path) == []
