"""A corpus of sixteen shards, one an epoch: their order, and a run that is stopped in one of them and goes on."""

import signal
from collections import Counter
from unittest import mock

import pytest
import torch
from fairseq.data.indexed_dataset import MMapIndexedDataset
from helpers import assert_equal_state, build_toy_corpus

from lazyformer_fairseq.fairseq_plugin.trainer import SafeTrainer

SHARDS = 16
EPOCHS = SHARDS + 1  # the first shard comes again
PAD, LAST_SPECIAL = 1, 3
OPTIONS = (
    "--arch lazyformer_m2x6_s_tiny --sublayer-pattern M2 --criterion masked_lm_accuracy --batch-size 4 --dropout 0.2 "
    f"--max-epoch {EPOCHS} --disable-validation --save-interval {EPOCHS}"
)


class Seen:
    """Input and targets of every update, by epoch; sends the run a SIGTERM within update number `stop`."""

    def __init__(self, stop: int = -1):
        self.of_update: dict[int, tuple[int, torch.Tensor, torch.Tensor]] = {}
        train_step = SafeTrainer.train_step

        def watched(trainer, samples, *args, **kwargs):
            if trainer.get_num_updates() == stop - 1:
                signal.raise_signal(signal.SIGTERM)
            update, (batch,) = trainer.get_num_updates(), samples
            result = train_step(trainer, samples, *args, **kwargs)  # or the run ends here
            self.of_update[update] = (trainer.epoch_iterator.epoch, batch["net_input"]["src_tokens"], batch["target"])
            return result

        self.patch = mock.patch.object(SafeTrainer, "train_step", watched)

    def __enter__(self):
        self.patch.start()
        return self

    def __exit__(self, *_):
        self.patch.stop()

    def words(self, epoch: int) -> Counter:
        """The ids that an epoch held, masks undone."""
        found = Counter()
        for its_epoch, source, target in self.of_update.values():
            if its_epoch == epoch:
                found.update(torch.where(target == PAD, source, target).flatten().tolist())
        return Counter({word: count for word, count in found.items() if word > LAST_SPECIAL})


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    folder = tmp_path_factory.mktemp("corpus") / "data"
    build_toy_corpus(folder, vocab_size=160, shards=SHARDS, unit_megabytes=0.002)
    return folder


def words_of_shard(folder) -> Counter:
    """As fairseq's own class reads them."""
    items = MMapIndexedDataset(str(folder / "train"))
    found = Counter(word for number in range(len(items)) for word in items[number].tolist())
    return Counter({word: count for word, count in found.items() if word > LAST_SPECIAL})


@pytest.mark.slow
def test_each_comes_once_in_its_turn_and_a_stopped_run_goes_on_with_the_rest(corpus, tmp_path, fairseq_train):
    with Seen() as whole:
        finished = fairseq_train(corpus, OPTIONS, tmp_path / "whole")
    epoch_of = {update: epoch for update, (epoch, *_) in whole.of_update.items()}
    assert sorted(set(epoch_of.values())) == list(range(1, EPOCHS + 1))
    for epoch in range(1, EPOCHS + 1):
        assert whole.words(epoch) == words_of_shard(corpus / f"shard{(epoch - 1) % SHARDS}"), epoch
    first_again = min(update for update, epoch in epoch_of.items() if epoch == EPOCHS)
    assert not torch.equal(whole.of_update[first_again][1], whole.of_update[0][1]), "another order, other masks"

    stop = min(update for update, epoch in epoch_of.items() if epoch == 11) + 2  # its second update
    with Seen(stop) as stopped, pytest.raises(SystemExit):
        fairseq_train(corpus, OPTIONS, tmp_path / "stopped")
    with Seen() as resumed:
        ended = fairseq_train(corpus, OPTIONS, tmp_path / "stopped")
    assert min(resumed.of_update) == stop == len(stopped.of_update)
    assert_equal_state({**stopped.of_update, **resumed.of_update}, whole.of_update, "batches")
    assert_equal_state(ended["model"], finished["model"], "weights")
