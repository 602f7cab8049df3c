"""Words that a run of fairseq's reads: checkpoints at some numbers of them, and a budget."""

import shutil
import signal
from pathlib import Path
from unittest import mock

import pytest
import torch
from fairseq_plugin.reliability.damage import TINY
from helpers import train_in_two_processes, train_words, updates_of

from lazyformer_fairseq.data.shards import read_word_counts
from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.fairseq_plugin.trainer import SafeTrainer

OPTIONS = f"{TINY} --encoder-embed-dim 16 --dropout 0 --disable-validation --batch-size 4"
RUN = f"{OPTIONS} --max-update 8"


def tokens_read(path: Path) -> int:
    return torch.load(path)["extra_state"]["tokens_read"]


def kept(folder: Path) -> dict[str, int]:
    """The updates of each checkpoint that is kept for its words."""
    return {path.name: updates_of(path) for path in folder.glob("checkpoint_*_words.pt")}


@pytest.fixture(scope="module")
def run_of_eight(tmp_path_factory, data_folder, fairseq_train) -> Path:
    """A run that counts, without options of words."""
    folder = tmp_path_factory.mktemp("words") / "run"
    fairseq_train(data_folder, f"{RUN} --keep-updates-list 1,2,3,4,5,6,7", folder)
    return folder


def test_models_are_kept_when_they_have_read_so_many_words_also_by_a_run_that_resumes(
    data_folder, run_of_eight, tmp_path, fairseq_train
):
    per_token = read_word_counts(str(data_folder)).per_token
    words = [tokens_read(run_of_eight / f"checkpoint_update_{update}.pt") * per_token for update in (2, 6)]
    marks = [int(each) for each in words]  # read within these updates
    options = f"{RUN} --checkpoint-words {marks[0]},{marks[1]},1M"
    expected = {f"checkpoint_{mark / 10**6:g}M_words.pt": update for mark, update in zip(marks, (2, 6), strict=True)}

    train_step = SafeTrainer.train_step

    def stopping(trainer, samples, *args, **kwargs):
        if trainer.get_num_updates() == 3:
            signal.raise_signal(signal.SIGTERM)
        return train_step(trainer, samples, *args, **kwargs)

    with mock.patch.object(SafeTrainer, "train_step", stopping), pytest.raises(SystemExit):
        fairseq_train(data_folder, options, tmp_path)
    (first,) = kept(tmp_path).items()
    assert first == next(iter(expected.items()))
    age = (tmp_path / first[0]).stat().st_mtime_ns
    resumed = fairseq_train(data_folder, options, tmp_path)
    assert kept(tmp_path) == expected and (tmp_path / first[0]).stat().st_mtime_ns == age
    assert resumed["extra_state"]["tokens_read"] == tokens_read(run_of_eight / "checkpoint_last.pt")
    assert "last_optimizer_state" in resumed and "last_optimizer_state" not in torch.load(tmp_path / first[0])


def test_a_run_beyond_its_budget_does_not_begin(data_folder, run_of_eight, tmp_path, fairseq_train):
    counts = read_word_counts(str(data_folder))
    most = 8 * 4 * 32 * counts.per_token
    with pytest.raises(
        UserError, match=f"--word-budget {int(most) - 1}: the run would read .* words in 8 updates; use"
    ):
        fairseq_train(data_folder, f"{RUN} --word-budget {int(most) - 1}", tmp_path / "run")
    assert not list(tmp_path.glob("run/checkpoint*"))
    fairseq_train(data_folder, f"{RUN} --word-budget {int(most) + 1}", tmp_path / "run")

    # The words that the model has read already count too, and of two ends the first one.
    started = f"{RUN} --finetune-from-model {run_of_eight / 'checkpoint_last.pt'}"
    both = most + tokens_read(run_of_eight / "checkpoint_last.pt") * counts.per_token
    with pytest.raises(UserError, match="words in 8 updates"):
        fairseq_train(data_folder, f"{started} --word-budget {int(both) - 1}", tmp_path / "second")
    epochs = f"{OPTIONS} --max-update 1000000 --max-epoch 2 --word-budget {int(2 * counts.per_epoch) - 1}"
    with pytest.raises(UserError, match="words in 2 epochs"):
        fairseq_train(data_folder, epochs, tmp_path / "epochs")


def test_words_that_cannot_be_counted_are_refused(data_folder, tmp_path, fairseq_train):
    for value, said in (("x", "--word-budget x: must be a number"), ("1M,2M", "--word-budget 1M,2M: must be a single")):
        with pytest.raises(UserError, match=said):
            fairseq_train(data_folder, f"{RUN} --word-budget {value}", tmp_path / "run")
    with pytest.raises(UserError, match="--checkpoint-words 1x: must be a number"):
        fairseq_train(data_folder, f"{RUN} --checkpoint-words 1M,1x", tmp_path / "run")
    with pytest.raises(UserError, match="--word-budget 9: the run has no limit"):
        fairseq_train(data_folder, f"{OPTIONS} --lr-scheduler fixed --word-budget 9", tmp_path / "run")
    data = shutil.copytree(data_folder, tmp_path / "data")
    (data / "manifest.json").unlink()
    with pytest.raises(UserError, match=r"no manifest.json with word counts found"):
        fairseq_train(data, f"{RUN} --checkpoint-words 1M", tmp_path / "run")


def test_two_processes_count_what_both_read(data_folder, tmp_path, fairseq_train):
    options = f"{RUN} --batch-size 2 --sequences-per-update 4"
    alone = fairseq_train(data_folder, options, tmp_path / "alone")
    made = train_in_two_processes(train_words(data_folder, options, tmp_path / "both"), 29517)
    assert made.returncode == 0, made.stderr
    assert tokens_read(tmp_path / "both" / "checkpoint_last.pt") == alone["extra_state"]["tokens_read"]
