"""Which checkpoints are kept, for how long, and whose a folder is."""

import os
import signal
import subprocess
import sys

import pytest
import torch
from fairseq import checkpoint_utils
from fairseq_plugin.reliability.damage import TINY
from helpers import ROOT, assert_equal_state, message_of, train_words, updates_of

from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.fairseq_plugin.reliability.checkpoints import checkpoints_in, look_into, save, suffix_of
from lazyformer_fairseq.fairseq_plugin.reliability.options import listed_updates

TINY = f"{TINY} --encoder-embed-dim 16 --dropout 0"


def names(folder) -> set[str]:
    return {path.name for path in folder.glob("checkpoint*.pt")}


def test_listed_updates_are_saved_and_kept(data_folder, tmp_path, fairseq_train):
    """At updates where nothing else is saved, where fairseq saves too, and at the end of an epoch."""
    options = f"{TINY} --max-update 8 --save-interval-updates 2 --keep-interval-updates 1"
    fairseq_train(data_folder, f"{options} --keep-updates-list 3,4,100", tmp_path / "run")
    kept = {"checkpoint_update_3.pt", "checkpoint_update_4.pt"}
    assert names(tmp_path / "run") == kept | {"checkpoint_1_8.pt", "checkpoint_best.pt", "checkpoint_last.pt"}
    assert [look_into(tmp_path / "run" / name).updates for name in sorted(kept)] == [3, 4]

    whole = fairseq_train(data_folder, f"{TINY} --max-update 8 --disable-validation", tmp_path / "other")
    restored = f"--restore-file {tmp_path / 'run' / 'checkpoint_update_3.pt'} --max-update 8 --disable-validation"
    resumed = fairseq_train(data_folder, f"{TINY} {restored}", tmp_path / "resumed")
    for part in ("model", "last_optimizer_state"):
        assert_equal_state(resumed[part], whole[part], part)


@pytest.mark.slow
def test_a_listed_update_that_ends_an_epoch(data_folder, tmp_path, fairseq_train):
    options = f"{TINY} --batch-size 400 --max-epoch 2 --disable-validation"
    last = fairseq_train(data_folder, options, tmp_path / "first")
    updates = updates_of(last)
    assert updates % 2 == 0
    fairseq_train(data_folder, f"{options} --keep-updates-list {updates // 2}", tmp_path / "run")
    kept = torch.load(tmp_path / "run" / f"checkpoint_update_{updates // 2}.pt")
    assert kept["extra_state"]["train_iterator"]["epoch"] == 2, "a run that goes on from it begins with epoch 2"


def test_a_list_is_read_or_refused(data_folder, tmp_path, fairseq_train):
    assert listed_updates("100000, 200000") == {100_000, 200_000} and listed_updates(None) == frozenset()
    for text in ("", "1000,", "0", "-5", "1e5", "100 000", "x", "1;2", "²"):
        with pytest.raises(UserError, match="--keep-updates-list .*give whole numbers as 100000,200000"):
            listed_updates(text)
    with pytest.raises(UserError, match="--keep-updates-list x: 'x' is no update"):
        fairseq_train(data_folder, f"{TINY} --keep-updates-list x", tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_asynchronous_writing_is_refused(data_folder, tmp_path, fairseq_train):
    for option in ("--write-checkpoints-asynchronously", "--save-async"):
        with pytest.raises(UserError, match="--write-checkpoints-asynchronously: .*leave the option out"):
            fairseq_train(data_folder, f"{TINY} {option}", tmp_path)


@pytest.mark.slow
def test_asynchronous_writing_is_refused_under_hydra_too(data_folder, tmp_path, warm_python):
    command = [warm_python / "fairseq-hydra-train", "--config-dir", ROOT / "configs" / "pretraining"]
    command += ["--config-name", "lazyformer_m2x6_s", f"task.data={data_folder}", "checkpoint.save_dir=run"]
    command += ["distributed_training.distributed_world_size=1", f"common.user_dir={ROOT / 'lazyformer_fairseq'}"]
    command += ["common.cpu=true", "checkpoint.write_checkpoints_asynchronously=true", "hydra.run.dir=."]
    run = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert run.returncode == 1 and "Traceback" not in run.stderr
    assert "error: --write-checkpoints-asynchronously: " in run.stderr


def test_a_folder_that_cannot_be_written_is_named(data_folder, tmp_path, fairseq_train):
    (tmp_path / "file").touch()
    for folder in (tmp_path / "file", tmp_path / "file" / "inside"):
        words = f"--save-dir {folder}: cannot be written .Not a directory.; choose"
        with pytest.raises(UserError, match=words):
            fairseq_train(data_folder, f"{TINY} --max-update 2", folder)


@pytest.mark.slow
def test_a_folder_belongs_to_one_training(data_folder, tmp_path, fairseq_train):
    """The second one is refused by name; a run that was killed keeps nobody out."""
    words = train_words(data_folder, f"{TINY} --max-update 1000000 --disable-validation", tmp_path)
    options = f"{TINY} --max-update 2 --disable-validation"
    command = [sys.executable, "-m", "fairseq_cli.train", *words]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as first:
        try:
            assert any("begin training epoch 1" in line for line in first.stdout)
            first.send_signal(signal.SIGSTOP)
            assert message_of(fairseq_train, data_folder, options, tmp_path) == (
                f"--save-dir {tmp_path}: another run is at work there (process {first.pid} on {os.uname().nodename}); "
                "wait for it, or choose another folder"
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


def remove_as_fairseq_does(path) -> None:
    checkpoint_utils.os.remove(str(path))


def test_the_last_intact_checkpoint_is_never_removed(folder, caplog):
    for updates in (2, 3, 4):
        (folder / f"checkpoint_1_{updates}.pt").write_bytes(b"damaged")
    remove_as_fairseq_does(folder / "checkpoint_1_1.pt")
    assert (folder / "checkpoint_1_1.pt").exists()
    assert "checkpoint_1_1.pt: kept beyond its time, no other checkpoint beside it is intact" in caplog.text
    remove_as_fairseq_does(folder / "checkpoint_1_2.pt")  # damaged itself
    assert names(folder) == {"checkpoint_1_1.pt", "checkpoint_1_3.pt", "checkpoint_1_4.pt"}


def test_weights_alone_do_not_stand_in_for_a_checkpoint_unless_a_run_saves_no_more(folder, tmp_path_factory):
    for updates in (2, 3, 4):
        save({"optimizer_history": [{"num_updates": 9}]}, folder / f"checkpoint_1_{updates}.pt")
    remove_as_fairseq_does(folder / "checkpoint_1_1.pt")
    assert (folder / "checkpoint_1_1.pt").exists()
    other = tmp_path_factory.mktemp("without optimizers")
    for updates in (1, 2):
        save({"optimizer_history": [{"num_updates": updates}]}, other / f"checkpoint_1_{updates}.pt")
    remove_as_fairseq_does(other / "checkpoint_1_1.pt")
    assert names(other) == {"checkpoint_1_2.pt"}


def test_the_checkpoints_of_another_run_in_the_folder_do_not_count(folder):
    for path in folder.glob("*.pt"):
        path.rename(path.with_name(f"{path.stem}_b.pt"))
    save({"optimizer_history": [{"num_updates": 9}], "last_optimizer_state": {}}, folder / "checkpoint_1_9.pt")
    remove_as_fairseq_does(folder / "checkpoint_1_9.pt")
    assert (folder / "checkpoint_1_9.pt").exists()
    remove_as_fairseq_does(folder / "checkpoint_1_1_b.pt")
    assert not (folder / "checkpoint_1_1_b.pt").exists()


def test_the_suffix_in_a_name(tmp_path):
    of_suffix = {
        "": "checkpoint3.pt checkpoint_last.pt checkpoint.best_loss_7.5181.pt checkpoint.best_matthews_-0.1230.pt "
        "checkpoint.best_loss_nan1.pt",
        "_b": "checkpoint3_b.pt checkpoint_update_5_b.pt checkpoint.best_my_loss_7.5181_b.pt",
        "-x": "checkpoint_1_20-x.pt",
        "-shard0": "checkpoint_best-shard0.pt",
        None: "checkpoint.pt checkpoint_x.pt dummy checkpoint_last.pt.tmp",
    }
    for suffix, found in of_suffix.items():
        for name in found.split():
            assert suffix_of(tmp_path / name) == suffix, name
            (tmp_path / name).touch()
    assert {path.name for path in checkpoints_in(tmp_path, "_b")} == set(of_suffix["_b"].split())
