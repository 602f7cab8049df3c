"""Which checkpoint a run starts from when files are damaged for real."""

import os
import pickle
import shutil

import pytest
import torch
from fairseq_plugin.reliability.damaged_files import flip_a_bit, options, truncate
from helpers import write_toy_glue

from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.fairseq_plugin.reliability.checkpoints import choose, look_into, save
from lazyformer_fairseq.fairseq_plugin.reliability.command_line import find_user_error
from lazyformer_fairseq.storage.atomic import UNFINISHED

SIZES = "--arch lazyformer_m2x6_s_tiny --sublayer-pattern M2 --encoder-embed-dim 16 --batch-size 4"
TINY = f"{SIZES} --criterion masked_lm_accuracy --save-interval-updates 3"


@pytest.fixture(scope="module")
def run_of_nine(tmp_path_factory):
    return tmp_path_factory.mktemp("run") / "run"


@pytest.fixture
def trained(data_folder, run_of_nine, tmp_path, fairseq_train):
    """A copy of a run of nine updates: checkpoints of the updates 3, 6, 9, the best and the last."""
    if not run_of_nine.exists():
        fairseq_train(data_folder, f"{TINY} --max-update 9", run_of_nine)
    return shutil.copytree(run_of_nine, tmp_path / "run")


@pytest.mark.parametrize("damage", [flip_a_bit, truncate])
def test_the_newest_intact_checkpoint_takes_the_place_of_a_damaged_one(
    data_folder, trained, fairseq_train, caplog, damage
):
    for name in ("checkpoint_last.pt", "checkpoint_1_9.pt", "checkpoint_best.pt"):
        damage(trained / name)
    (trained / f".checkpoint_last.pt.0011aabb{UNFINISHED}").touch()
    os.utime(trained / "checkpoint_1_3.pt")  # the youngest file, but not the newest checkpoint
    resumed = fairseq_train(data_folder, f"{TINY} --max-update 10", trained)
    assert f"{trained / 'checkpoint_last.pt'}: truncated, damaged or no checkpoint" in caplog.text
    assert f"{trained / 'checkpoint_1_9.pt'}: truncated, damaged or no checkpoint" in caplog.text
    assert f"newest intact checkpoint: {trained / 'checkpoint_1_6.pt'}, update 6" in caplog.text
    assert [part["num_updates"] for part in resumed["optimizer_history"]] == [6, 10]
    assert {path.name for path in trained.glob(".*")} == {".training.lock"}, "what a kill left"


def test_without_any_intact_checkpoint_the_run_stops_and_names_them(data_folder, trained, fairseq_train):
    damaged = sorted(trained.glob("checkpoint*.pt"))
    for path in damaged:
        flip_a_bit(path)
    before = {path: path.read_bytes() for path in damaged}
    with pytest.raises(UserError, match="no intact checkpoint; move these away to start anew") as caught:
        fairseq_train(data_folder, f"{TINY} --max-update 10", trained)
    assert len(damaged) == 5 and all(f"{path}: truncated, damaged" in str(caught.value) for path in damaged)
    assert {path: path.read_bytes() for path in trained.glob("checkpoint*.pt")} == before


def test_a_missing_last_checkpoint_is_no_start_from_scratch(trained, caplog):
    for name in ("checkpoint_last.pt", "checkpoint_best.pt", "checkpoint_1_9.pt"):
        (trained / name).unlink()
    assert choose(options(trained)) == trained / "checkpoint_1_6.pt"
    assert "checkpoint_last.pt: is missing" in caplog.text
    assert choose(options(trained, finetune_from_model=str(trained / "checkpoint_1_3.pt"))).name == "checkpoint_1_6.pt"


@pytest.mark.parametrize("option", ["finetune_from_model", "continue_once"])
def test_the_last_checkpoint_may_be_named_as_the_start_too(trained, option):
    assert choose(options(trained, **{option: str(trained / "checkpoint_last.pt")})) == trained / "checkpoint_last.pt"


def test_links_to_nowhere_and_folders_are_no_checkpoints(trained):
    for name in ("checkpoint_last.pt", "checkpoint_best.pt", "checkpoint_1_9.pt"):
        (trained / name).unlink()
    (trained / "checkpoint_last.pt").symlink_to("removed.pt")
    (trained / "checkpoint_1_9.pt").mkdir()
    assert choose(options(trained)) == trained / "checkpoint_1_6.pt"


def test_a_file_asked_for_by_name_is_taken_at_every_start_and_that_is_said(trained, caplog):
    assert choose(options(trained, restore_file=str(trained / "checkpoint_1_3.pt"))).name == "checkpoint_1_3.pt"
    assert "checkpoint_last.pt: passed over for --restore-file" in caplog.text


def test_an_empty_folder_is_a_start_from_scratch(tmp_path):
    assert choose(options(tmp_path)) is None
    assert choose(options(tmp_path / "missing")) is None


def test_an_intact_last_checkpoint_is_taken_even_if_others_are_newer(trained):
    shutil.copy(trained / "checkpoint_1_3.pt", trained / "checkpoint_last.pt")  # how a user goes back
    assert choose(options(trained)) == trained / "checkpoint_last.pt"
    assert look_into(choose(options(trained))).updates == 3


def test_weights_without_the_optimizer_are_nothing_to_go_on_from(trained):
    flip_a_bit(trained / "checkpoint_last.pt")
    for name in ("checkpoint_best.pt", "checkpoint_1_9.pt"):
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
        with pytest.raises(UserError, match="checkpoint_last.pt: refused, nothing of it was run"):
            choose(options(trained))
    assert not (trained / "made").exists()


@pytest.mark.slow
def test_a_checkpoint_asked_for_by_name_must_be_intact(data_folder, trained, tmp_path, fairseq_train):
    flip_a_bit(trained / "checkpoint_1_9.pt")
    glue = write_toy_glue(tmp_path / "glue", train=8, valid=4)
    for option in ("--restore-file", "--finetune-from-model", "--continue-once"):
        for name, words in (("checkpoint_1_9.pt", "truncated, damaged"), ("missing.pt", "no such")):
            with pytest.raises(UserError, match=f"{name}: {words}"):
                fairseq_train(data_folder, f"{TINY} --max-update 10 {option} {trained / name}", tmp_path / "new")
    with pytest.raises(Exception) as caught:
        fairseq_train(
            glue / "CoLA",
            f"{SIZES} --criterion glue --finetune-from-model {trained / 'checkpoint_1_9.pt'} --max-epoch 1"
            " --best-checkpoint-metric matthews --maximize-best-checkpoint-metric",
            tmp_path / "new",
            task=f"glue --tokenizer-folder {trained / 'tokenizer'}",
        )
    assert "checkpoint_1_9.pt: truncated, damaged" in str(find_user_error(caught.value))
    assert not list((tmp_path / "new").glob("checkpoint*"))


@pytest.mark.slow
def test_a_suffix_tells_runs_in_one_folder_apart(data_folder, tmp_path, fairseq_train, trained):
    assert choose(options(trained, checkpoint_suffix="_b")) is None
    for name in ("checkpoint_last", "checkpoint_1_3"):
        shutil.copy(trained / f"{name}.pt", trained / f"{name}_b.pt")
    truncate(trained / "checkpoint_last_b.pt")
    fairseq_train(data_folder, f"{TINY} --max-update 4 --checkpoint-suffix _b", trained)
    resumed = torch.load(trained / "checkpoint_last_b.pt")
    assert [part["num_updates"] for part in resumed["optimizer_history"]] == [3, 4]
