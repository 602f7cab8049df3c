import subprocess

import pytest
import torch
from fairseq import checkpoint_utils
from helpers import ROOT
from test_pretraining import assert_equal_state

from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.fairseq_plugin.reliability.checkpoints import checkpoints_in, look_into, save, suffix_of
from lazyformer_fairseq.fairseq_plugin.reliability.options import listed_updates

TINY = (
    "--arch lazyformer_m2x6_s_tiny --sublayer-pattern M2 --encoder-embed-dim 16 --batch-size 4 --dropout 0 "
    "--criterion masked_lm_accuracy"
)


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
    updates = last["optimizer_history"][-1]["num_updates"]
    assert updates % 2 == 0
    fairseq_train(data_folder, f"{options} --keep-updates-list {updates // 2}", tmp_path / "run")
    kept = torch.load(tmp_path / "run" / f"checkpoint_update_{updates // 2}.pt")
    assert kept["extra_state"]["train_iterator"]["epoch"] == 2, "a run that goes on from it begins with epoch 2"


@pytest.mark.parametrize("text", ["", "1000,", "0", "-5", "1e5", "100 000", "x", "1;2", "²"])
def test_a_list_that_is_none(data_folder, tmp_path, fairseq_train, text):
    with pytest.raises(UserError, match="--keep-updates-list .*give whole numbers as 100000,200000"):
        listed_updates(text)
    if text == "x":
        with pytest.raises(UserError, match="--keep-updates-list x: 'x' is no update"):
            fairseq_train(data_folder, f"{TINY} --keep-updates-list {text}", tmp_path / "run")
        assert not (tmp_path / "run").exists()


def test_a_list_is_read():
    assert listed_updates("100000, 200000") == {100_000, 200_000}
    assert listed_updates(None) == frozenset()


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


@pytest.mark.parametrize("folder", ["file", "file/inside"])
def test_a_folder_that_cannot_be_written_is_named(data_folder, tmp_path, fairseq_train, folder):
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=f"--save-dir {tmp_path / folder}: cannot be written .Not a directory.; choose"):
        fairseq_train(data_folder, f"{TINY} --max-update 2", tmp_path / folder)


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


def test_weights_alone_do_not_stand_in_for_a_checkpoint(folder):
    for updates in (2, 3, 4):
        save({"optimizer_history": [{"num_updates": 9}]}, folder / f"checkpoint_1_{updates}.pt")
    remove_as_fairseq_does(folder / "checkpoint_1_1.pt")
    assert (folder / "checkpoint_1_1.pt").exists()


def test_a_run_that_saves_no_optimizer_removes_as_ever(tmp_path):
    for updates in (1, 2):
        save({"optimizer_history": [{"num_updates": updates}]}, tmp_path / f"checkpoint_1_{updates}.pt")
    remove_as_fairseq_does(tmp_path / "checkpoint_1_1.pt")
    assert names(tmp_path) == {"checkpoint_1_2.pt"}


def test_the_checkpoints_of_another_run_in_the_folder_do_not_count(folder):
    for path in folder.glob("*.pt"):
        path.rename(path.with_name(f"{path.stem}_b.pt"))
    save({"optimizer_history": [{"num_updates": 9}], "last_optimizer_state": {}}, folder / "checkpoint_1_9.pt")
    remove_as_fairseq_does(folder / "checkpoint_1_9.pt")
    assert (folder / "checkpoint_1_9.pt").exists()
    remove_as_fairseq_does(folder / "checkpoint_1_1_b.pt")
    assert not (folder / "checkpoint_1_1_b.pt").exists()


@pytest.mark.parametrize(
    ("name", "suffix"),
    [
        *(("checkpoint3.pt", ""), ("checkpoint3_b.pt", "_b"), ("checkpoint_1_20-x.pt", "-x")),
        *(("checkpoint_update_5_b.pt", "_b"), ("checkpoint_last.pt", ""), ("checkpoint_best-shard0.pt", "-shard0")),
        *(("checkpoint.best_loss_7.5181.pt", ""), ("checkpoint.best_my_loss_7.5181_b.pt", "_b")),
        *(("checkpoint.best_matthews_-0.1230.pt", ""), ("checkpoint.best_loss_nan1.pt", "")),
        *(("checkpoint.pt", None), ("checkpoint_x.pt", None), ("dummy", None), ("checkpoint_last.pt.tmp", None)),
    ],
)
def test_the_suffix_in_a_name(tmp_path, name, suffix):
    assert suffix_of(tmp_path / name) == suffix
    (tmp_path / name).touch()
    assert checkpoints_in(tmp_path, "_b") == ([tmp_path / name] if suffix == "_b" else [])
