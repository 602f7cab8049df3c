"""Too many bad updates in a row: back to the last good checkpoint, on with other data, and in the end a report."""

import json
import logging
import os

import pytest
import torch
from fairseq_plugin.reliability.damage import DamagedRun
from test_pretraining import assert_equal_state

from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.fairseq_plugin.reliability.bad_updates import GoodCheckpoints

TINY = "--arch lazyformer_m2x6_s_tiny --sublayer-pattern M2 --criterion masked_lm_accuracy --batch-size 4"
TINY = f"{TINY} --disable-validation --save-interval-updates 4 --max-skipped-updates 3"


def test_a_rollback_loads_the_checkpoint_and_goes_on_with_other_data(data_folder, tmp_path, fairseq_train):
    bad = {6, 7, 8}
    with DamagedRun(lambda call: "nan gradient" if call in bad else None) as run:
        state = fairseq_train(data_folder, f"{TINY} --max-update 10 --keep-interval-updates 5", tmp_path / "run")
    assert [update.after["updates"] for update in run.updates] == [1, 2, 3, 4, 5, 6, 7, 8, 4, 5, 6, 7, 8, 9, 10]

    at_checkpoint, rolled_back = run.updates[3].after, run.updates[8].after
    assert_equal_state(rolled_back, at_checkpoint, "state after the rollback")
    assert run.updates[9].lr == run.updates[4].lr
    again, first = run.updates[9].after["model"], run.updates[4].after["model"]
    assert not all(torch.equal(again[name], first[name]) for name in again)  # the same weights on other data

    with DamagedRun(lambda call: None) as undamaged:
        fairseq_train(data_folder, f"{TINY} --max-update 15", tmp_path / "undamaged")
    assert [update.samples for update in run.updates] == [update.samples for update in undamaged.updates]
    counts = state["extra_state"]["bad_updates"]
    assert (counts["skipped"], counts["rollbacks"]) == (3, 1)


@pytest.mark.slow
def test_a_rollback_passes_over_what_was_saved_among_bad_updates(data_folder, tmp_path, fairseq_train):
    # 8 is saved in the midst of bad updates: its weights are those that the bad numbers came from.
    with DamagedRun(lambda call: "nan gradient" if call in (7, 8, 9, 14, 15, 16) else None) as run:
        fairseq_train(data_folder, f"{TINY} --max-update 12", tmp_path / "run")
    updates = [update.after["updates"] for update in run.updates]
    assert updates[:10] == [1, 2, 3, 4, 5, 6, 7, 8, 9, 4]
    # The next bad ones begin at 8: neither what was saved there this time nor what was left there the first time.
    assert updates[10:17] == [5, 6, 7, 8, 9, 10, 4]
    assert updates[-1] == 12


def test_the_run_stops_with_a_report(data_folder, tmp_path, fairseq_train):
    message = "stopped at update 7: 3 updates in a row had bad numbers .*, after 1 rollbacks .*bad_updates.json"
    with DamagedRun(lambda call: "nan gradient" if call >= 6 else None) as run, pytest.raises(UserError, match=message):
        fairseq_train(data_folder, f"{TINY} --max-update 12 --max-rollbacks 1", tmp_path / "run")
    report = json.loads((tmp_path / "run" / "bad_updates.json").read_text(), parse_constant=pytest.fail)
    assert len(run.updates) == 12
    assert (report["skipped"], report["skipped_in_a_row"], report["rollbacks"]) == (6, 3, 1)
    assert [bad["update"] for bad in report["bad_updates"]] == [7, 8, 9, 5, 6, 7]
    assert [bad["samples"] for bad in report["bad_updates"]] == [[[update.samples]] for update in run.updates[6:]]
    for bad in report["bad_updates"]:
        assert bad["reason"] == "the gradient is NaN or Inf" and bad["gradient_norm"] == "nan"
        assert 6 < bad["loss"] < 9 and bad["learning_rate"] > 0
    assert report["unit_of_losses"] == "bits" and all(6 < loss < 9 for loss in report["losses_of_last_good_updates"])
    assert len(report["losses_of_last_good_updates"]) == 6 and report["what_to_try"]


@pytest.mark.slow
def test_without_a_checkpoint_the_run_says_so_and_stops(data_folder, tmp_path, fairseq_train):
    with DamagedRun(lambda call: "inf loss"), pytest.raises(UserError, match="no checkpoint yet to go back to"):
        fairseq_train(data_folder, f"{TINY} --max-update 12", tmp_path / "run")
    report = json.loads((tmp_path / "run" / "bad_updates.json").read_text())
    assert [bad["loss"] for bad in report["bad_updates"]] == ["inf"] * 3


@pytest.mark.slow
def test_a_stopped_run_goes_on_with_a_larger_bound(data_folder, tmp_path, fairseq_train):
    options = f"{TINY} --max-update 8 --max-rollbacks"
    with DamagedRun(lambda call: "nan gradient" if call >= 4 else None), pytest.raises(UserError, match="after 1 roll"):
        fairseq_train(data_folder, f"{options} 1", tmp_path / "run")
    # The rollback counts on: the first thing that happens after it is that the checkpoint is saved again.
    with DamagedRun(lambda call: None):
        state = fairseq_train(data_folder, f"{options} 2", tmp_path / "run")
    counts = state["extra_state"]["bad_updates"]
    assert (counts["skipped"], counts["rollbacks"]) == (3, 1)


def write_checkpoint(folder, name, updates, age=0):
    path = folder / name
    torch.save({"optimizer_history": [{"num_updates": updates}], "last_optimizer_state": {}}, path)
    os.utime(path, (1e9 - age, 1e9 - age))
    return path


def test_the_newest_whole_checkpoint_with_a_good_update_after_it_is_chosen(tmp_path, caplog):
    four = write_checkpoint(tmp_path, "checkpoint_1_4.pt", 4, age=2)
    eight = write_checkpoint(tmp_path, "checkpoint_1_8.pt", 8, age=1)
    last = write_checkpoint(tmp_path, "checkpoint_last.pt", 9)
    checkpoints = GoodCheckpoints(tmp_path)
    assert checkpoints.choose(first_bad=10) == last
    assert checkpoints.choose(first_bad=9) == eight
    assert checkpoints.choose(first_bad=4) == last  # none is better, so at least the newest
    eight.write_bytes(eight.read_bytes()[:-100])
    with caplog.at_level(logging.WARNING):
        assert checkpoints.choose(first_bad=9) == four
    assert "checkpoint_1_8.pt" in caplog.text
    checkpoints.leave_behind(4)
    assert checkpoints.choose(first_bad=9) == four
    write_checkpoint(tmp_path, "checkpoint_last.pt", 6, age=-1)  # saved anew
    assert checkpoints.choose(first_bad=9) == last
    checkpoints.leave_behind(6)
    assert checkpoints.choose(first_bad=5) == four
    assert GoodCheckpoints(tmp_path / "nothing here").choose(first_bad=5) is None


def test_another_runs_checkpoints_in_the_folder_are_not_gone_back_to(tmp_path):
    mine = write_checkpoint(tmp_path, "checkpoint_last_b.pt", 4)
    write_checkpoint(tmp_path, "checkpoint_last.pt", 6)
    assert GoodCheckpoints(tmp_path, "_b").choose(first_bad=9) == mine
