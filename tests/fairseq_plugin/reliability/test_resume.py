"""A run that is stopped and goes on, to the last bit: weights, optimizer, loss scaler, data, masks, logged numbers."""

import random
import signal
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from fairseq.data.indexed_dataset import MMapIndexedDataset
from fairseq.logging import metrics
from fairseq.logging.progress_bar import SimpleProgressBar
from fairseq_plugin.reliability.damage import TINY
from helpers import assert_equal_state, build_toy_corpus, updates_of

from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.fairseq_plugin.reliability.command_line import EXIT_CODE
from lazyformer_fairseq.fairseq_plugin.trainer import SafeTrainer

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


@pytest.fixture(scope="module")
def two_shards(tmp_path_factory):
    folder = tmp_path_factory.mktemp("corpus") / "data"
    build_toy_corpus(folder, vocab_size=160, shards=2)
    return folder


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


def test_a_stopped_run_goes_on_bit_for_bit(two_shards, tmp_path, fairseq_train):
    """Stopped in its first update, within an epoch, in the last of one."""
    assert_goes_on_bit_for_bit(
        *(fairseq_train, two_shards, tmp_path, f"{OPTIONS} --max-epoch 2"),
        lambda ends: [1, ends[0] - 5, ends[0], ends[0] + 7],
    )


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["--fp16", "--bf16"])
def test_half_precision_goes_on_bit_for_bit(two_shards, tmp_path, fairseq_train, precision):
    # The scale doubles after 7 updates without an overflow, counted from the start of the run.
    options = f"{OPTIONS} {precision} --fp16-scale-window 7 --max-epoch 1 --disable-validation"
    assert_goes_on_bit_for_bit(fairseq_train, two_shards, tmp_path, options, lambda ends: [ends[0] - 9])


@pytest.mark.slow
@pytest.mark.reliability
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("precision", ["", "--fp16", "--bf16"])
def test_stopped_anywhere_it_goes_on_bit_for_bit(two_shards, tmp_path, fairseq_train, precision, record_counts):
    stops = assert_goes_on_bit_for_bit(
        *(fairseq_train, two_shards, tmp_path, f"{OPTIONS} {precision} --fp16-scale-window 7 --max-epoch 3"),
        lambda ends: sorted(random.Random(1).sample(range(1, ends[-1]), 10)),
    )
    record_counts("stopped anywhere, resumed bit for bit", precision=precision or "fp32", stops=stops)


def words_of(tokens) -> Counter:
    return Counter(word for word in tokens if word > LAST_SPECIAL)


@pytest.mark.slow
def test_each_of_sixteen_shards_comes_once_in_its_turn_and_a_stopped_run_goes_on_with_the_rest(tmp_path, fairseq_train):
    corpus, epochs = tmp_path / "data", 17  # the first shard comes again
    build_toy_corpus(corpus, vocab_size=160, shards=16, unit_megabytes=0.002)
    options = f"{TINY} --dropout 0.2 --max-epoch {epochs} --disable-validation --save-interval {epochs}"
    with watched() as whole:
        assert_goes_on_bit_for_bit(
            *(fairseq_train, corpus, tmp_path, options),
            # The second update of the eleventh epoch.
            lambda ends: [min(update for update, (epoch, _) in whole.updates.items() if epoch == 11) + 1],
        )
    found = {epoch: [] for epoch in range(1, epochs + 1)}
    for epoch, ((_, source, target),) in whole.updates.values():
        found[epoch] += torch.where(target == PAD, source, target).flatten().tolist()  # masks undone
    for epoch, tokens in found.items():
        items = MMapIndexedDataset(str(corpus / f"shard{(epoch - 1) % 16}" / "train"))  # as fairseq itself reads it
        assert words_of(tokens) == words_of(word for item in items for word in item.tolist()), epoch
    first, again = (next(batches for epoch, batches in whole.updates.values() if epoch == of) for of in (1, epochs))
    assert not torch.equal(first[0][1], again[0][1]), "another order, other masks"


def test_another_optimizer_than_the_checkpoints_is_refused_in_words(lm_data, tmp_path, fairseq_train):
    options = "--arch par_transformer_tiny --sublayer-pattern sf --mem-len 8 --criterion causal_lm --batch-size 16"
    task = "stream_language_modeling --tgt-len 8"
    fairseq_train(lm_data, f"{options} --disable-validation --max-update 1", tmp_path, task)
    with pytest.raises(UserError, match=r"trained with the optimizer FusedAdam, not NvLamb: .* or --reset-optimizer"):
        fairseq_train(lm_data, f"{options} --max-update 2 --optimizer nvlamb", tmp_path, task)
