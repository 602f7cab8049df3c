"""A run that is stopped and goes on, to the last bit; by other processes too, every sample once and none twice."""

import itertools
import random
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest
import torch
from fairseq.data import FairseqDataset, iterators
from fairseq.logging import metrics
from fairseq.logging.progress_bar import SimpleProgressBar
from fairseq_plugin.reliability.damage import TINY
from helpers import assert_equal_state, mostly_slow, updates_of
from hypothesis import example, given, settings
from hypothesis import strategies as st

from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.fairseq_plugin.tasks.encoder_task import EncoderTask
from lazyformer_fairseq.fairseq_plugin.trainer import SafeTrainer
from lazyformer_fairseq.modules import timing
from lazyformer_fairseq.modules.attention import selection
from lazyformer_fairseq.storage.checkpoint_file import save
from lazyformer_fairseq.training.stop_signals import EXIT_CODE

OPTIONS = f"{TINY} --update-freq 2 --dropout 0.2 --attention-dropout 0.1 --clip-norm 1.0 --log-interval 3"
TIMES = {"wps", "ups", "wall", "train_wall"}
PAD, LAST_SPECIAL = 1, 3


@contextmanager
def watched(stop: int = -1) -> Iterator[SimpleNamespace]:
    """Records epoch, ids, inputs and targets of each update, and the logged numbers; a SIGTERM comes within `stop`."""
    seen, train_step = SimpleNamespace(updates={}, logged={}), SafeTrainer.train_step

    def step(trainer, samples, *args, **kwargs):
        update = trainer.get_num_updates() + 1
        if update == stop:
            signal.raise_signal(signal.SIGTERM)
        batches = [(batch["id"], batch["net_input"]["src_tokens"], batch["target"]) for batch in samples]
        output = train_step(trainer, samples, *args, **kwargs)  # or the run ends here
        seen.updates[update] = (trainer.epoch_iterator.epoch, batches)
        return output

    def log(bar, stats, tag=None, step=None):
        seen.logged[tag, step] = {name: value for name, value in stats.items() if name not in TIMES}

    logs = mock.patch.multiple(SimpleProgressBar, log=log, print=log)
    with mock.patch.object(SafeTrainer, "train_step", step), logs:
        yield seen


def assert_goes_on_bit_for_bit(fairseq_train, data, folder, options: str, choose_stops) -> list[int]:
    """Makes a run in one go, and one that is stopped again and again. Returns after which updates.

    `choose_stops` is asked, with the numbers of updates after each epoch.
    """
    with watched() as alone:
        whole = fairseq_train(data, options, folder / "whole")
    stops = choose_stops([step for tag, step in alone.logged if tag == "train"])
    updates, logged = {}, {}
    for stop in stops:
        with watched(stop) as seen, pytest.raises(SystemExit) as ended:
            fairseq_train(data, options, folder / "stopped")
        assert ended.value.code == EXIT_CODE
        assert updates_of(folder / "stopped" / "checkpoint_last.pt") == stop == max(seen.updates)
        assert not updates.keys() & seen.updates.keys()
        updates |= seen.updates
        logged |= seen.logged
    with watched() as seen:
        resumed = fairseq_train(data, options, folder / "stopped")
    assert metrics.get_meter("default", "wall").elapsed_time > 0
    assert not updates.keys() & seen.updates.keys()
    assert_equal_state(updates | seen.updates, alone.updates, "batches")
    assert logged | seen.logged == alone.logged
    assert_equal_state(resumed["optimizer_history"][-1], whole["optimizer_history"][-1], "optimizer_history")
    for part in ("model", "last_optimizer_state"):
        assert_equal_state(resumed[part], whole[part], part)
    return stops


@pytest.mark.parametrize("more", mostly_slow(["", "--within-documents --document-positions"], ""))
def test_a_stopped_run_goes_on_bit_for_bit(two_shards, tmp_path, fairseq_train, more):
    """Stopped in its first update, within an epoch, in the last of one."""
    assert_goes_on_bit_for_bit(
        *(fairseq_train, two_shards, tmp_path, f"{OPTIONS} {more} --batch-size 8 --max-epoch 2"),
        lambda ends: [1, ends[0] - 5, ends[0], ends[0] + 3],
    )


def test_a_resumed_run_takes_the_back_ends_that_were_chosen(data_folder, tmp_path, fairseq_train, monkeypatch):
    """From the checkpoint, though the cache folder has forgotten them."""
    monkeypatch.setenv("LAZYFORMER_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(selection, "MIN_MULTIPLY_ADDS_TO_TIME", 1)
    monkeypatch.setattr(timing.SELECTOR, "known", {})
    clear = timing.Measurement("fused", is_clear=True, granted=1.0)
    monkeypatch.setattr(timing.Autotuner, "_measure_in_thread", lambda *_: clear)
    options = f"{TINY} --attention-dropout 0 --disable-validation"
    state = fairseq_train(data_folder, f"{options} --max-update 3", tmp_path / "run")
    ((here, chosen),) = state["extra_state"]["attention_back_ends"].items()
    assert here == timing.machine("cpu") and set(chosen.values()) == {"fused"}
    (tmp_path / "cache" / timing.FILE).unlink()
    monkeypatch.setattr(timing.SELECTOR, "known", {})
    monkeypatch.setattr(timing.Autotuner, "_measure_in_thread", lambda *_: pytest.fail("timed again"))
    assert updates_of(tmp_path / "run" / "checkpoint_last.pt") == 3
    fairseq_train(data_folder, f"{options} --max-update 5", tmp_path / "run")
    assert timing.SELECTOR.known[here] == chosen


@pytest.mark.slow
@pytest.mark.reliability
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("precision", ["", "--fp16", "--bf16"])
def test_stopped_anywhere_it_goes_on_bit_for_bit(two_shards, tmp_path, fairseq_train, precision, record_counts):
    # The scale doubles after 7 updates without an overflow, counted from the start of the run.
    stops = assert_goes_on_bit_for_bit(
        *(fairseq_train, two_shards, tmp_path, f"{OPTIONS} {precision} --fp16-scale-window 7 --max-epoch 3"),
        lambda ends: sorted(random.Random(1).sample(range(1, ends[-1]), 10)),
    )
    record_counts("stopped anywhere, resumed bit for bit", precision=precision or "fp32", stops=stops)


def test_another_optimizer_than_the_checkpoints_is_refused_in_words(lm_data, tmp_path, fairseq_train):
    options = "--arch par_transformer_tiny --sublayer-pattern sf --mem-len 8 --criterion causal_lm --batch-size 16"
    task = "stream_language_modeling --tgt-len 8"
    fairseq_train(lm_data, f"{options} --disable-validation --max-update 1", tmp_path, task)
    with pytest.raises(UserError, match=r"trained with the optimizer FusedAdam, not NvLamb; .* or --reset-optimizer"):
        fairseq_train(lm_data, f"{options} --max-update 2 --optimizer nvlamb", tmp_path, task)


class Numbers(FairseqDataset):
    """Samples that are their own numbers; of sizes 1, 2, 3, 1, 2, ... where batches are made of tokens."""

    def __init__(self, count: int):
        self.sizes = np.arange(count) % 3 + 1
        self.epoch = 1

    def __len__(self):
        return len(self.sizes)

    def __getitem__(self, index):
        return int(index)

    def collater(self, samples):
        return samples

    def size(self, index):
        return int(self.sizes[index])

    num_tokens = size

    def set_epoch(self, epoch):
        self.epoch = epoch

    def ordered_indices(self):
        return np.random.default_rng(self.epoch).permutation(len(self))


class Run:
    """The data of a run of so many processes in an epoch, as fairseq's trainer and training loop go through it."""

    def __init__(self, samples: int, world: int, update_freq: int, batch_size: dict, state=None, grouped=False):
        self.ranks = []
        for rank in range(world):
            iterator = EncoderTask(None, None).get_batch_iterator(
                Numbers(samples), **batch_size, num_shards=world, shard_id=rank, grouped_shuffling=grouped
            )
            if state:
                iterator.load_state_dict(state)
            self.ranks.append(iterator)
        self.groups = [iterators.GroupedIterator(rank.next_epoch_itr(), update_freq) for rank in self.ranks]

    def update(self) -> list[int]:
        return [sample for group in self.groups for batch in next(group) for sample in batch]

    def is_over(self) -> bool:
        over = {not group.has_next() for group in self.groups}
        assert len(over) == 1, "all processes have equally many updates, else some would wait for others for ever"
        assert over == {rank.end_of_epoch() for rank in self.ranks}
        return over.pop()

    def rest(self) -> list[int]:
        """What is left of the epoch."""
        seen = []
        while not self.is_over():
            seen += self.update()
        return seen

    def state_dict(self) -> dict:
        states = [rank.state_dict() for rank in self.ranks]
        assert all(state == states[0] for state in states)  # the first one's is saved
        return states[0]


def samples_of_epoch(samples: int, stretches: list[tuple], grouped: bool = False) -> list[int]:
    """Of an epoch made by runs in turn, each (processes, update-freq, batch size, updates); the last one ends it."""
    seen, state = [], None
    for number, (world, update_freq, batch_size, updates) in enumerate(stretches):
        run = Run(samples, world, update_freq, batch_size, state, grouped)
        is_last = number == len(stretches) - 1
        while not run.is_over() and (is_last or updates > 0):
            seen += run.update()
            updates -= 1
        if run.is_over():
            assert run.state_dict() == {"version": 2, "epoch": 2, "iterations_in_epoch": 0, "shuffle": True}
            break
        state = run.state_dict()
    return seen


batch_sizes = st.one_of(
    st.integers(1, 5).map(lambda size: {"max_tokens": None, "max_sentences": size}),
    st.integers(3, 9).map(lambda tokens: {"max_tokens": tokens, "max_sentences": None}),
)
one_stretch = st.tuples(st.integers(1, 5), st.integers(1, 4), batch_sizes, st.integers(1, 6))
ONE, TWO = ({"max_tokens": None, "max_sentences": size} for size in (1, 2))


@settings(max_examples=60)
@given(st.integers(1, 90), st.lists(one_stretch, min_size=2, max_size=5))
@example(10, [(1, 1, ONE, 3), (2, 2, ONE, 1)])  # fairseq's offset is 3 of each process
@example(10, [(1, 1, ONE, 3), (1, 2, ONE, 1)])  # fairseq leaves out the last batch
@example(20, [(2, 1, TWO, 1), (3, 1, ONE, 1), (1, 2, TWO, 1), (2, 1, ONE, 1)])
def test_every_sample_of_the_epoch_comes_once(samples, stretches):
    assert sorted(samples_of_epoch(samples, stretches)) == list(range(samples))


@settings(max_examples=30)
@given(st.integers(20, 90), st.integers(1, 4), one_stretch, one_stretch)
def test_batches_shuffled_in_groups_come_once_too(samples, world, second, third):
    # Of what does not fill a group fairseq leaves out a part, so the measure is what one run would have seen.
    (size, updates) = ({"max_tokens": None, "max_sentences": 2}, 2)
    alone = samples_of_epoch(samples, [(world, 1, size, updates)], grouped=True)
    together = samples_of_epoch(samples, [(world, 1, size, updates), second, third], grouped=True)
    assert sorted(together) == sorted(alone)


@settings(max_examples=40)
@given(st.integers(1, 90), st.integers(1, 4), st.integers(1, 3), batch_sizes, st.integers(1, 9))
def test_the_same_processes_go_on_with_the_same_batches(samples, world, update_freq, batch_size, updates):
    alone = samples_of_epoch(samples, [(world, update_freq, batch_size, 0)])
    resumed = samples_of_epoch(samples, [(world, update_freq, batch_size, updates)] * 3)
    assert resumed == alone


def test_a_checkpoint_of_fairseq_goes_on_and_other_data_starts_the_epoch_anew_and_says_so(caplog):
    run = Run(20, 2, 1, TWO)
    seen = run.update()
    state = {key: run.state_dict()[key] for key in ("version", "epoch", "iterations_in_epoch", "shuffle")}
    assert sorted(seen + Run(20, 2, 1, TWO, state).rest()) == list(range(20))
    assert sorted(Run(30, 1, 1, TWO, run.state_dict()).rest()) == list(range(30))
    assert "an epoch of 20 samples, but now there are 30" in caplog.text


def test_a_changed_batch_size_is_told_in_options(caplog):
    caplog.set_level("INFO")
    run = Run(20, 2, 1, TWO)
    seen = run.update()
    size = {"max_tokens": 6, "max_sentences": None}
    assert sorted(seen + Run(20, 2, 1, size, run.state_dict()).rest()) == list(range(20))
    assert "the batch size changed from --batch-size 2 to --max-tokens 6:" in caplog.text


def test_a_run_that_leaves_out_the_remainder_ends_its_epoch():
    run = Run(10, 1, 1, ONE)
    run.update()
    (rank,) = Run(10, 1, 1, ONE, run.state_dict()).ranks
    groups = iterators.GroupedIterator(rank._cur_epoch_itr, 4, skip_remainder_batch=True)
    assert [len(group) for group in groups] == [4, 4]
    assert rank.end_of_epoch()


# --- A run that has ended


def files_of(folder) -> dict[str, tuple[int, bytes]]:
    """Return time and content of each checkpoint in a folder."""
    return {path.name: (path.stat().st_mtime_ns, path.read_bytes()) for path in folder.glob("checkpoint*.pt")}


@pytest.mark.parametrize(
    ("first", "again", "limit"),
    [
        ("--max-update 4", "--max-update 3 --log-seconds 60", "--max-update 3"),
        ("--max-update 4", "--max-update 9 --stop-time-hours 1e-9", "--stop-time-hours 1e-09"),
        ("--max-epoch 1 --batch-size 32", "--max-epoch 1 --batch-size 32", "--max-epoch 1"),
    ],
)
def test_a_run_that_has_ended_is_left_as_it_is(data_folder, tmp_path, fairseq_train, caplog, first, again, limit):
    """Within an epoch and at the end of one; started with a lower limit than before, too."""
    options = f"{TINY} --encoder-embed-dim 16"
    folder = tmp_path / "run"
    made = updates_of(fairseq_train(data_folder, f"{options} {first}", folder))
    before = files_of(folder)
    with mock.patch.object(SafeTrainer, "train_step", side_effect=AssertionError("one more update")):
        fairseq_train(data_folder, f"{options} {again}", folder)
    assert files_of(folder) == before
    said = f"{folder / 'checkpoint_last.pt'} has completed {made} updates, and {limit} ends the run"
    assert f"nothing is left to do: {said}" in caplog.text


def test_a_run_that_patience_ended_is_left_as_it_is(data_folder, tmp_path, fairseq_train, caplog):
    """The count of validations without progress goes on where a run was stopped, and so does its best score."""
    without_progress = "--adam-eps 1e9 --weight-decay 0 --validate-interval-updates 1 --save-interval-updates 1"
    options = f"{TINY} --encoder-embed-dim 16 {without_progress} --patience 3".replace("--disable-validation", "")
    folder = tmp_path / "run"
    for updates in (2, 9):
        made = updates_of(fairseq_train(data_folder, f"{options} --max-update {updates}", folder))
    assert made == 4, "the first validation, and three that are no better"
    before = files_of(folder)
    fairseq_train(data_folder, f"{options} --max-update 9", folder)
    assert files_of(folder) == before
    assert "nothing is left to do" in caplog.text and "--patience 3 ends the run" in caplog.text


# --- A checkpoint that says what cannot be


@pytest.fixture(scope="module")
def run_of_three(tmp_path_factory, data_folder, fairseq_train):
    folder = tmp_path_factory.mktemp("run of three") / "run"
    fairseq_train(data_folder, f"{TINY} --encoder-embed-dim 16 --disable-validation --max-update 3", folder)
    return folder / "checkpoint_last.pt"


def first_moments(state: dict) -> dict:
    return state["last_optimizer_state"]["state"][0]


SPOILT = {
    "epoch": lambda state: state["extra_state"]["train_iterator"].update(epoch=-5),
    "epoch of text": lambda state: state["extra_state"]["train_iterator"].update(epoch="1"),
    "no epoch": lambda state: state["extra_state"]["train_iterator"].pop("epoch"),
    "place": lambda state: state["extra_state"]["train_iterator"].update(iterations_in_epoch=-1),
    "place beyond the end": lambda state: state["extra_state"]["train_iterator"].update(
        iterations_in_epoch=10**6, pieces=[]
    ),
    "piece beyond the end": lambda state: state["extra_state"]["train_iterator"]["pieces"][0].update(consumed=10**6),
    "no shards": lambda state: state["extra_state"]["train_iterator"]["pieces"][0].update(shards=0),
    "iterator of text": lambda state: state["extra_state"].update(train_iterator="here"),
    "updates": lambda state: state["optimizer_history"][-1].update(num_updates=-3),
    "updates of text": lambda state: state["optimizer_history"][-1].update(num_updates="three"),
    "history": lambda state: state.update(optimizer_history=[]),
    "extra state of text": lambda state: state.update(extra_state="extra"),
    "schedule of text": lambda state: state["optimizer_history"][-1].update(lr_scheduler_state="linear"),
    "optimizer of text": lambda state: state.update(last_optimizer_state="adam"),
    "optimizer without groups": lambda state: state["last_optimizer_state"].update(param_groups=[]),
    "group of text": lambda state: state["last_optimizer_state"].update(param_groups=["all"]),
    "rate of text": lambda state: state["last_optimizer_state"]["param_groups"][0].update(lr="fast"),
    "betas of text": lambda state: state["last_optimizer_state"]["param_groups"][0].update(betas=("a", "b")),
    "moment of text": lambda state: first_moments(state).update(exp_avg="mean"),
    "moments of integers": lambda state: first_moments(state).update(exp_avg=first_moments(state)["exp_avg"].long()),
    "moment turned": lambda state: first_moments(state).update(exp_avg=first_moments(state)["exp_avg"].T),
    "moment of another size": lambda state: first_moments(state).update(exp_avg=torch.zeros(7)),
    "no second moment": lambda state: first_moments(state).pop("exp_avg_sq"),
    "step of text": lambda state: first_moments(state).update(step="many"),
    "numbers of weights": lambda state: state["last_optimizer_state"]["param_groups"][0].update(params=[0, 1]),
    "weights of another model": lambda state: state["model"].popitem(),
}


@pytest.mark.parametrize("name", mostly_slow(SPOILT, "epoch", "place beyond the end", "moment turned"))
def test_what_a_checkpoint_cannot_say_ends_in_words(run_of_three, data_folder, tmp_path, fairseq_train, name):
    state = torch.load(run_of_three)
    SPOILT[name](state)
    save(state, tmp_path / "checkpoint_last.pt")
    options = f"{TINY} --encoder-embed-dim 16 --disable-validation --max-update 4"
    with pytest.raises(UserError, match=r"checkpoint"):
        fairseq_train(data_folder, options, tmp_path)


def test_a_run_that_could_only_take_over_anothers_end_is_refused(data_folder, tmp_path, fairseq_train):
    options = f"{TINY} --encoder-embed-dim 16 --max-update 4"
    fairseq_train(data_folder, options, tmp_path / "first")
    first = tmp_path / "first" / "checkpoint_last.pt"
    for option in ("--continue-once", "--restore-file"):
        with pytest.raises(UserError, match=f"--max-update 4: {first} has completed 4 updates already, so nothing"):
            fairseq_train(data_folder, f"{options} {option} {first}", tmp_path / "second")
    assert not list((tmp_path / "second").glob("checkpoint*"))


def test_a_wall_clock_that_leaps_ends_no_run(data_folder, fairseq_train, tmp_path, monkeypatch):
    """Not even by --stop-time-hours, and no checkpoint says that years were spent."""
    year, leaps = 365 * 24 * 3600, itertools.count(1)
    monkeypatch.setattr(time, "time", lambda: (-1) ** next(leaps) * year)
    state = fairseq_train(data_folder, f"{OPTIONS} --max-update 3 --stop-time-hours 1", tmp_path)
    assert state["optimizer_history"][-1]["num_updates"] == 3
    assert 0 <= state["extra_state"]["previous_training_time"] < 3600
