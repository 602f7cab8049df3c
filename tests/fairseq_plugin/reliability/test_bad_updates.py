"""NaN, Inf and loss spikes in real runs: the update is skipped as if it had not been made.

Too many in a row: back to the last good checkpoint, on with other data, and in the end a report. As one process of two
under torchrun, this file damages a run: ``test_bad_updates.py OUTPUT '{"2": "nan gradient", "from": 50}' options ...``.
"""

import hashlib
import json
import os
import re
import sys
import traceback
from pathlib import Path
from unittest import mock

import pytest
import torch
from fairseq.logging import progress_bar
from fairseq_cli.train import cli_main
from fairseq_plugin.reliability.damage import TINY, Update, damaged_run
from helpers import assert_equal_state, mostly_slow, train_in_two_processes, train_words, write_toy_glue
from torch.utils._python_dispatch import TorchDispatchMode

from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.fairseq_plugin.criterions.finetuning import GlueCriterion
from lazyformer_fairseq.fairseq_plugin.criterions.language_modeling import CausalLMCriterion, MaskedLMAccuracyCriterion
from lazyformer_fairseq.fairseq_plugin.reliability import bad_updates
from lazyformer_fairseq.fairseq_plugin.reliability import options as reliability_options
from lazyformer_fairseq.fairseq_plugin.reliability.bad_updates import GoodCheckpoints
from lazyformer_fairseq.fairseq_plugin.trainer import SafeTrainer

TINY = f"{TINY} --disable-validation"
SAVING = f"{TINY} --save-interval-updates 4 --max-skipped-updates 3"


def only(fault, *calls):
    return lambda call: fault if call in calls else None


def skipped(updates: list[Update]) -> list[int]:
    return [call for call, update in enumerate(updates) if not update.moved]


def numbers(updates: list[Update]) -> list[int]:
    return [update.after["updates"] for update in updates]


def counts_in(state: dict) -> tuple[int, int]:
    """Skipped updates and rollbacks that a checkpoint tells of."""
    counts = state["extra_state"]["bad_updates"]
    return counts["skipped"], counts["rollbacks"]


def assert_finite(state):
    weights = state["model"].values()
    moments = [value for moment in state["last_optimizer_state"]["state"].values() for value in moment.values()]
    assert all(tensor.isfinite().all() for tensor in [*weights, *moments])


@pytest.mark.parametrize(
    ("fault", "options"),
    [
        ("nan gradient", "--clip-norm 1 --store-ema --ema-decay 0.5"),
        pytest.param("nan gradient", "--update-freq 2", marks=pytest.mark.slow),
        pytest.param("inf gradient", "--bf16 --clip-norm 1", marks=pytest.mark.slow),
        pytest.param("inf loss", "--clip-norm 0", marks=pytest.mark.slow),
        (torch.nan, "--bf16 --update-freq 2"),
    ],
)
def test_a_bad_update_is_skipped_as_if_it_had_not_been_made(data_folder, tmp_path, fairseq_train, fault, options):
    with damaged_run(only(fault, 3)) as updates:
        state = fairseq_train(data_folder, f"{TINY} --max-update 6 {options}", tmp_path / "run")
    assert numbers(updates) == [1, 2, 3, 4, 5, 6]  # the skipped one counts too: the schedule goes on
    assert skipped(updates) == [3]
    for part in ("model", "optimizer", "ema"):
        assert_equal_state(updates[3].after[part], updates[3].before[part], part)
    if "ema" in options:
        before, after = updates[4].before["ema"], updates[4].after["ema"]
        assert any(not torch.equal(after[name], weight) for name, weight in before.items())
    assert_finite(state)
    assert counts_in(state) == (1, 0)
    assert not (tmp_path / "run" / "crash.pt").exists()  # fairseq's answer to NaN


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["--bf16", "--fp16"])
def test_the_next_update_in_half_precision_is_as_large_as_in_full(data_folder, tmp_path, fairseq_train, precision):
    """What gradients are to be multiplied by is kept apart from them there, and must go with a skipped one."""
    options = f"{TINY} --max-update 5 --dropout 0 --adam-betas '(0.9,0.999)'"
    norms = []
    for name, more in (("full", ""), ("half", precision)):
        with damaged_run(only("inf loss", 3)) as updates:
            fairseq_train(data_folder, f"{options} {more}", tmp_path / name)
        moments = [state["optimizer"][0]["exp_avg"] for state in (updates[4].before, updates[4].after)]
        norms.append((moments[1] - 0.9 * moments[0]).norm())
    assert 0.8 < norms[1] / norms[0] < 1.25


def test_a_spike_is_a_multiple_of_the_recent_median(data_folder, tmp_path, fairseq_train):
    with damaged_run({22: 1.9, 24: 4.0, 26: 4.0}.get) as updates:
        state = fairseq_train(
            data_folder, f"{TINY} --sublayer-pattern s --max-update 28 --loss-spike 2", tmp_path / "run"
        )
    assert skipped(updates) == [24, 26] and counts_in(state) == (2, 0)
    assert max(state["extra_state"]["bad_updates"]["losses"]) < 2 * min(state["extra_state"]["bad_updates"]["losses"])


def test_an_overflow_of_the_loss_scaler_is_not_counted(data_folder, tmp_path, fairseq_train):
    with damaged_run(only(None)) as updates:
        state = fairseq_train(data_folder, f"{TINY} --max-update 4 --fp16 --fp16-init-scale 1048576", tmp_path / "run")
    overflows = skipped(updates)
    assert overflows and overflows == list(range(len(overflows)))
    assert numbers(updates) == [0] * len(overflows) + [1, 2, 3, 4]
    assert state["last_optimizer_state"]["loss_scale"] == 1048576 / 2 ** len(overflows)
    assert counts_in(state) == (0, 0)


@pytest.mark.slow
def test_nan_at_the_smallest_loss_scale_is_counted(data_folder, tmp_path, fairseq_train):
    options = f"{TINY} --max-update 6 --fp16 --fp16-init-scale 2 --min-loss-scale 0.9 --fp16-scale-window 1000"
    with damaged_run(only("nan gradient", 2, 3, 4)) as updates:  # the scale goes from 2 to 1; then it can go no lower
        state = fairseq_train(data_folder, options, tmp_path / "run")
    assert numbers(updates) == [1, 2, 2, 3, 4, 5, 6]
    assert skipped(updates) == [2, 3, 4] and counts_in(state) == (2, 0)
    assert_finite(state)


def test_counts_and_history_outlive_the_process(data_folder, tmp_path, fairseq_train):
    options = f"{TINY} --sublayer-pattern s --loss-spike 2 --save-interval-updates 25"
    with damaged_run(only("nan gradient", 2)):
        fairseq_train(data_folder, f"{options} --max-update 25", tmp_path / "run")
    with damaged_run(only(4.0, 1)) as resumed:  # a spike is known for one at once
        state = fairseq_train(data_folder, f"{options} --max-update 30", tmp_path / "run")
    assert numbers(resumed) == [26, 27, 28, 29, 30]
    assert skipped(resumed) == [1] and counts_in(state) == (2, 0)


@pytest.mark.slow
def test_fine_tuning_and_language_models_skip_too(tmp_path, data_folder, lm_data, fairseq_train):
    glue = write_toy_glue(tmp_path / "glue")
    options = (
        "--arch lazyformer_m2x6_s_tiny --sublayer-pattern M2 --criterion glue --batch-size 16 --max-update 5 "
        f"--tokenizer-folder {data_folder / 'tokenizer'} --disable-validation"
    )
    with damaged_run(only("nan gradient", 2), GlueCriterion) as updates:
        assert_finite(fairseq_train(glue / "CoLA", options, tmp_path / "run", task="glue"))
    assert skipped(updates) == [2]
    options = (
        "--arch par_transformer_tiny --sublayer-pattern sfsf --adaptive-softmax-cutoff 20,40 --mem-len 9 "
        "--criterion causal_lm --batch-size 16 --disable-validation --max-update 6"
    )
    with damaged_run(only("nan activations", 2), CausalLMCriterion) as updates:
        fairseq_train(lm_data, options, tmp_path / "streams", task="stream_language_modeling --tgt-len 6")
    assert skipped(updates) == [2], "no NaN stays in the memory of streams"


def test_impossible_options_are_named(data_folder, tmp_path, fairseq_train):
    for option in ("--loss-spike 0.5", "--max-skipped-updates 0", "--max-rollbacks -1"):
        with pytest.raises(UserError, match=option):
            fairseq_train(data_folder, f"{TINY} --max-update 1 {option}", tmp_path / "run")


# --- rollbacks --------------------------------------------------------------------------------------------------------


def test_a_rollback_loads_the_checkpoint_and_goes_on_with_other_data(data_folder, tmp_path, fairseq_train):
    with damaged_run(only("nan gradient", 6, 7, 8)) as updates:
        state = fairseq_train(data_folder, f"{SAVING} --max-update 10 --keep-interval-updates 5", tmp_path / "run")
    assert numbers(updates) == [1, 2, 3, 4, 5, 6, 7, 8, 4, 5, 6, 7, 8, 9, 10]
    assert_equal_state(updates[8].after, updates[3].after, "state after the rollback")
    assert updates[9].lr == updates[4].lr
    again, first = updates[9].after["model"], updates[4].after["model"]
    assert not all(torch.equal(again[name], first[name]) for name in again)  # the same weights on other data

    with damaged_run(only(None)) as undamaged:
        fairseq_train(data_folder, f"{SAVING} --max-update 15", tmp_path / "undamaged")
    assert [update.samples for update in updates] == [update.samples for update in undamaged]
    assert counts_in(state) == (3, 1)


@pytest.mark.slow
def test_a_rollback_passes_over_what_was_saved_among_bad_updates(data_folder, tmp_path, fairseq_train):
    # 8 is saved in the midst of bad updates: its weights are those that the bad numbers came from.
    with damaged_run(only("nan gradient", 7, 8, 9, 14, 15, 16)) as updates:
        fairseq_train(data_folder, f"{SAVING} --max-update 12", tmp_path / "run")
    # The next bad ones begin at 8: neither what was saved there this time nor what was left there the first time.
    assert numbers(updates)[:17] == [1, 2, 3, 4, 5, 6, 7, 8, 9, 4, 5, 6, 7, 8, 9, 10, 4]
    assert numbers(updates)[-1] == 12


def test_the_run_stops_with_a_report_and_goes_on_with_a_larger_bound(data_folder, tmp_path, fairseq_train):
    message = "stopped at update 7: 3 updates in a row were bad .*, after 1 rollbacks .*bad_updates.json"
    bad = damaged_run(lambda call: "nan gradient" if call >= 6 else None)
    with bad as updates, pytest.raises(UserError, match=message):
        fairseq_train(data_folder, f"{SAVING} --max-update 12 --max-rollbacks 1", tmp_path / "run")
    report = json.loads((tmp_path / "run" / "bad_updates.json").read_text(), parse_constant=pytest.fail)
    assert len(updates) == 12
    assert (report["skipped"], report["skipped_in_a_row"], report["rollbacks"]) == (6, 3, 1)
    assert [bad["update"] for bad in report["bad_updates"]] == [7, 8, 9, 5, 6, 7]
    assert [bad["samples"] for bad in report["bad_updates"]] == [[[update.samples]] for update in updates[6:]]
    for bad in report["bad_updates"]:
        assert bad["reason"] == "the gradient is NaN or Inf" and bad["gradient_norm"] == "nan"
        assert 6 < bad["loss"] < 9 and bad["learning_rate"] > 0
    assert report["unit_of_losses"] == "bits" and all(6 < loss < 9 for loss in report["losses_of_last_good_updates"])
    assert len(report["losses_of_last_good_updates"]) == 6 and report["what_to_try"]
    # The rollback counts on: the first thing that happens after it is that the checkpoint is saved again.
    state = fairseq_train(data_folder, f"{SAVING} --max-update 8 --max-rollbacks 2", tmp_path / "run")
    assert counts_in(state) == (3, 1)


@pytest.mark.slow
def test_without_a_checkpoint_the_run_says_so_and_stops(data_folder, tmp_path, fairseq_train):
    with damaged_run(lambda call: "inf loss"), pytest.raises(UserError, match="no checkpoint yet to roll back to"):
        fairseq_train(data_folder, f"{SAVING} --max-update 12", tmp_path / "run")
    report = json.loads((tmp_path / "run" / "bad_updates.json").read_text())
    assert [bad["loss"] for bad in report["bad_updates"]] == ["inf"] * 3


def test_the_newest_whole_checkpoint_with_a_good_update_after_it_is_chosen(tmp_path, caplog):
    def write(name: str, updates: int, time: float) -> Path:
        torch.save({"optimizer_history": [{"num_updates": updates}], "last_optimizer_state": {}}, tmp_path / name)
        os.utime(tmp_path / name, (time, time))
        return tmp_path / name

    four, eight = write("checkpoint_1_4.pt", 4, time=1e9), write("checkpoint_1_8.pt", 8, time=1e9 + 1)
    last, of_another_run = (
        write(f"checkpoint_last{run}.pt", updates, 1e9 + 2) for run, updates in (("", 9), ("_b", 10))
    )
    checkpoints = GoodCheckpoints(tmp_path)
    assert checkpoints.choose(first_bad=11) == last and GoodCheckpoints(tmp_path, "_b").choose(11) == of_another_run
    assert checkpoints.choose(first_bad=9) == eight
    assert checkpoints.choose(first_bad=4) == last  # none is better, so at least the newest
    eight.write_bytes(eight.read_bytes()[:-100])
    assert checkpoints.choose(first_bad=9) == four
    assert "checkpoint_1_8.pt" in caplog.text
    checkpoints.leave_behind(4)
    assert checkpoints.choose(first_bad=9) == four
    write("checkpoint_last.pt", 6, 1e9 + 3)  # saved anew
    assert checkpoints.choose(first_bad=9) == last
    checkpoints.leave_behind(6)
    assert checkpoints.choose(first_bad=5) == four
    assert GoodCheckpoints(tmp_path / "nothing here").choose(first_bad=5) is None


# --- an update waits for a GPU once, where it is judged ---------------------------------------------------------------

# Without a GPU the operations that would wait are counted; to read what the guard has copied to the host is free.
# Their result, or its size, is read by the host.
WAITING = {"_local_scalar_dense", "nonzero", "masked_select", "equal", "bincount", "_unique2", "unique_dim"}
INDEXING = {"index", "index_put", "index_put_", "_index_put_impl_"}


class OnHost(torch.Tensor):
    """Of the CPU even where the rest of the update is on a GPU; what is computed from it is, too."""


class Waits(TorchDispatchMode):
    """Notes from where operations were called for which a GPU would be waited."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function.overloadpacket.__name__
        by_mask = name in INDEXING and any(index is not None and index.dtype == torch.bool for index in args[1])
        if (name in WAITING or by_mask) and not isinstance(args[0], OnHost):
            self.found.append("".join(traceback.format_stack(limit=20)))
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("precision", mostly_slow(["--bf16", ""], "--bf16"))
def test_an_update_waits_only_where_it_is_judged(precision, fairseq_train, data_folder, tmp_path, monkeypatch):
    waits, found, train_step, on_host = Waits(), [], SafeTrainer.train_step, bad_updates._on_host

    def watched(self, *args, **kwargs):
        waits.found = []
        with waits:
            output = train_step(self, *args, **kwargs)
        found.append(waits.found)
        return output

    monkeypatch.setattr(SafeTrainer, "train_step", watched)
    monkeypatch.setattr(bad_updates, "_on_host", lambda *numbers: on_host(*numbers).as_subclass(OnHost))
    options = "--arch lazyformer_m2x6_s_tiny --criterion masked_lm_accuracy --batch-size 2 --update-freq 2"
    options += f" --max-update 3 --clip-norm 0.5 --disable-validation {precision}"
    with torch.serialization.safe_globals([OnHost]):  # meters are saved with a checkpoint
        fairseq_train(data_folder, options, tmp_path)
    assert found == [[], [], []]


# --- one process of two has the bad numbers: both decide the same -----------------------------------------------------


@pytest.fixture
def two_processes(data_folder, tmp_path, free_port):
    """``two_processes(faults, options)``: the finished torchrun, and what each process saw."""

    def run(faults: dict, options: str):
        words = train_words(data_folder, f"{TINY} --update-freq 2 --max-update 32 {options}", tmp_path / "run")
        finished = train_in_two_processes(words, free_port, (__file__, str(tmp_path), json.dumps(faults)))
        seen = [tmp_path / f"rank{rank}.json" for rank in range(2)]
        assert all(file.is_file() for file in seen), finished.stderr[-3000:]
        return finished, [json.loads(file.read_text()) for file in seen]

    return run


@pytest.mark.slow
@pytest.mark.reliability
def test_both_processes_skip_and_roll_back(two_processes, record_counts):
    # A spike of one process is one of both where the mean is: 20 and 1 make about 10.
    faults = {2: "nan gradient", 22: 20.0, 24: 1.5, 27: "inf loss", 28: "inf gradient", 29: 20.0}
    options = "--loss-spike 2 --max-skipped-updates 3 --save-interval-updates 13"
    finished, (first, second) = two_processes(faults, options)
    assert finished.returncode == 0, finished.stderr[-3000:]
    assert first == second
    assert second["skipped"] == [2, 22, 27, 28]  # 29 did move them: back to those of update 26
    assert second["updates"] == [*range(1, 30), 26, *range(27, 33)]
    record_counts("bad numbers in one of two processes", skipped=5, rollbacks=1, processes_equal=True)


@pytest.mark.slow
@pytest.mark.reliability
def test_both_processes_stop_with_one_report(two_processes, tmp_path):
    options = "--max-skipped-updates 2 --max-rollbacks 1 --save-interval-updates 3"
    finished, (first, second) = two_processes({"from": 4}, options)
    assert finished.returncode == 1
    assert "error: stopped at update 5: 2 updates in a row were bad" in finished.stderr
    assert "]: Traceback" not in finished.stderr  # torchrun has one of its own, without a rank before it
    assert first == second and second["updates"] == [1, 2, 3, 4, 5, 3, 4, 4]
    report = json.loads((tmp_path / "run" / "bad_updates.json").read_text())
    samples = [of_process for bad in report["bad_updates"] for of_process in bad["samples"]]
    assert len(samples) == 2 * 4 and all(len(of_process) == 2 for of_process in samples)  # --update-freq 2


def main(output: Path, faults: dict, options: list[str]) -> None:
    """Writes OUTPUT/rank<R>.json: updates after each call, calls that moved no weight, a hash of the last weights."""
    rank = int(os.environ["RANK"])
    since = faults.pop("from", sys.maxsize)

    def fault_of(call: int):
        return None if rank == 0 else "nan gradient" if call >= since else faults.get(str(call))

    sys.argv = ["fairseq-train", *options]
    with damaged_run(fault_of) as updates:
        try:
            cli_main()
        finally:
            weights = updates[-1].after["model"]
            digest = hashlib.sha256(b"".join(weights[name].numpy().tobytes() for name in sorted(weights)))
            seen = {"updates": numbers(updates), "skipped": skipped(updates), "weights": digest.hexdigest()}
            (output / f"rank{rank}.json").write_text(json.dumps(seen))


if __name__ == "__main__":
    main(Path(sys.argv[1]), json.loads(sys.argv[2]), sys.argv[3:])


@pytest.mark.slow
def test_counts_reach_the_progress_output_tensorboard_and_wandb(
    data_folder, tmp_path, fairseq_train, caplog, monkeypatch
):
    tensorboard, wandb = mock.MagicMock(), mock.MagicMock()
    monkeypatch.setattr(reliability_options, "LOGS_NEED", {})  # as if both were installed
    monkeypatch.setattr(progress_bar, "SummaryWriter", tensorboard)
    monkeypatch.setattr(progress_bar, "wandb", wandb)
    monkeypatch.setattr(progress_bar, "_tensorboard_writers", {})
    options = f"{TINY} --max-update 8 --log-interval 2 --tensorboard-logdir {tmp_path / 'tb'} --wandb-project any"
    with caplog.at_level("INFO"), damaged_run(only("nan gradient", 2, 4)):
        fairseq_train(data_folder, options, tmp_path / "run")
    assert re.search(r"num_updates 8 .*\| skipped 2 \| rollbacks 0", caplog.text)
    scalars = [call.args for call in tensorboard.return_value.add_scalar.call_args_list]
    assert [(value, step) for name, value, step in scalars if name == "skipped"][:3] == [(0, 2), (1, 4), (2, 6)]
    logged = [call.args[0] for call in wandb.log.call_args_list]
    assert {"train_inner/skipped": 2} in logged and {"train_inner/rollbacks": 0} in logged


@pytest.mark.slow
def test_a_criterion_that_logs_no_loss_is_guarded_by_its_gradient(data_folder, tmp_path, fairseq_train, monkeypatch):
    forward = MaskedLMAccuracyCriterion.forward

    def silent_forward(*args, **kwargs):
        loss, sample_size, log = forward(*args, **kwargs)
        return loss, sample_size, {name: value for name, value in log.items() if name != "loss"}

    monkeypatch.setattr(MaskedLMAccuracyCriterion, "forward", silent_forward)
    with damaged_run(only("nan gradient", 2), damages_loss=False) as updates:
        fairseq_train(data_folder, f"{TINY} --max-update 4", tmp_path / "run")
    assert skipped(updates) == [2]
    with pytest.raises(UserError, match="--loss-spike: this --criterion logs no loss"):
        fairseq_train(data_folder, f"{TINY} --max-update 1 --loss-spike 2", tmp_path / "spike")
