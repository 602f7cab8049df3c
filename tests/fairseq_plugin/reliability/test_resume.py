"""A run that is stopped and goes on, to the last bit: weights, optimizer, loss scaler, data, masks, logged numbers."""

import random
import signal
from contextlib import ExitStack
from unittest import mock

import pytest
import torch
from fairseq.logging import metrics
from fairseq.logging.progress_bar import SimpleProgressBar
from helpers import assert_equal_state, build_toy_corpus

from lazyformer_fairseq.fairseq_plugin.reliability.command_line import EXIT_CODE
from lazyformer_fairseq.fairseq_plugin.trainer import SafeTrainer

TINY = (
    "--arch lazyformer_m2x6_s_tiny --sublayer-pattern M2 --criterion masked_lm_accuracy --batch-size 4 --update-freq 2 "
    "--dropout 0.2 --attention-dropout 0.1 --clip-norm 1.0 --log-interval 3"
)
TIMES = {"wps", "ups", "wall", "train_wall"}


class Watch:
    """Records the ids and the logged numbers of a run, and sends it a SIGTERM within its update number `stop`."""

    def __init__(self, stop: int = -1):
        self.ids: dict[int, list[int]] = {}
        self.logged: dict[tuple, dict] = {}
        train_step = SafeTrainer.train_step

        def watched(trainer, samples, *args, **kwargs):
            if trainer.get_num_updates() == stop - 1:
                signal.raise_signal(signal.SIGTERM)
            output = train_step(trainer, samples, *args, **kwargs)
            self.ids.setdefault(trainer.get_num_updates(), []).extend(
                number for sample in samples for number in sample["id"].tolist()
            )
            return output

        def log(bar, stats, tag=None, step=None):
            self.logged[tag, step] = {name: value for name, value in stats.items() if name not in TIMES}

        self.patches = [
            mock.patch.object(SafeTrainer, "train_step", watched),
            mock.patch.object(SimpleProgressBar, "log", log),
            mock.patch.object(SimpleProgressBar, "print", log),
        ]

    def __enter__(self):
        self.stack = ExitStack()
        for patch in self.patches:
            self.stack.enter_context(patch)
        return self

    def __exit__(self, *_):
        self.stack.close()


@pytest.fixture(scope="module")
def two_shards(tmp_path_factory):
    folder = tmp_path_factory.mktemp("corpus") / "data"
    build_toy_corpus(folder, vocab_size=160, shards=2)
    return folder


def assert_goes_on_bit_for_bit(fairseq_train, data, folder, options: str, choose_stops) -> list[int]:
    """Makes a run in one go, and one that is stopped again and again. Returns after which updates.

    `choose_stops` is asked, with the numbers of updates after each epoch.
    """
    with Watch() as alone:
        whole = fairseq_train(data, options, folder / "whole")
    stops = choose_stops([step for tag, step in alone.logged if tag == "train"])
    ids, logged = {}, {}
    for stop in stops:
        with Watch(stop) as watch, pytest.raises(SystemExit) as ended:
            fairseq_train(data, options, folder / "stopped")
        assert ended.value.code == EXIT_CODE
        saved = torch.load(folder / "stopped" / "checkpoint_last.pt")
        assert saved["optimizer_history"][-1]["num_updates"] == stop
        ids |= watch.ids
        logged |= watch.logged
    with Watch() as watch:
        resumed = fairseq_train(data, options, folder / "stopped")
    assert metrics.get_meter("default", "wall").elapsed_time > 0
    assert ids | watch.ids == alone.ids
    logged |= watch.logged
    assert logged == alone.logged
    assert_equal_state(resumed["optimizer_history"][-1], whole["optimizer_history"][-1], "optimizer_history")
    for part in ("model", "last_optimizer_state"):
        assert_equal_state(resumed[part], whole[part], part)
    return stops


def test_a_stopped_run_goes_on_bit_for_bit(two_shards, tmp_path, fairseq_train):
    def first_update_within_and_at_the_end_of_an_epoch(ends):
        return [1, ends[0] - 5, ends[0], ends[0] + 7]

    options = f"{TINY} --max-epoch 2"
    assert_goes_on_bit_for_bit(
        fairseq_train, two_shards, tmp_path, options, first_update_within_and_at_the_end_of_an_epoch
    )


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["--fp16", "--bf16"])
def test_half_precision_goes_on_bit_for_bit(two_shards, tmp_path, fairseq_train, precision):
    # The scale doubles after 7 updates without an overflow, counted from the start of the run.
    options = f"{TINY} {precision} --fp16-scale-window 7 --max-epoch 1 --disable-validation"
    assert_goes_on_bit_for_bit(fairseq_train, two_shards, tmp_path, options, lambda ends: [ends[0] - 9])


@pytest.mark.slow
@pytest.mark.reliability
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("precision", ["", "--fp16", "--bf16"])
def test_stopped_anywhere_it_goes_on_bit_for_bit(two_shards, tmp_path, fairseq_train, precision, record_counts):
    options = f"{TINY} {precision} --fp16-scale-window 7 --max-epoch 3"

    def anywhere(ends):
        return sorted(random.Random(1).sample(range(1, ends[-1]), 10))

    stops = assert_goes_on_bit_for_bit(fairseq_train, two_shards, tmp_path, options, anywhere)
    record_counts("stopped anywhere, resumed bit for bit", precision=precision or "fp32", stops=stops)
