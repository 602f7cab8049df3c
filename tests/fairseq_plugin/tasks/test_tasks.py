"""What tasks do of a run's data: folders and shards, streams and their memory, global tokens, fp16 as fp32."""

import logging
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from helpers import (
    assert_equal_state,
    mostly_slow,
    train_in_two_processes,
    train_words,
)
from omegaconf import OmegaConf

from lazyformer_fairseq.data.shards import data_folders, tokenizer_of
from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.fairseq_plugin.tasks.stream_language_modeling import (
    CarriedMemory,
    StreamLanguageModelingTask,
)
from lazyformer_fairseq.fairseq_plugin.trainer import SafeTrainer


def test_a_corpus_stands_for_its_shards_in_order(tmp_path):
    for name in ("corpus/shard10", "corpus/shard2", "corpus/shard0", "corpus/shards", "plain"):
        (tmp_path / name).mkdir(parents=True)
    corpus, plain = str(tmp_path / "corpus"), str(tmp_path / "plain")
    shards = [f"{corpus}/shard{number}" for number in (0, 2, 10)]
    assert data_folders(corpus) == shards
    assert data_folders(f"{corpus}:{plain}") == [*shards, plain]
    assert data_folders(shards[1]) == [shards[1]]
    with pytest.raises(UserError, match="missing is not a folder"):
        data_folders(f"{corpus}:missing")


@pytest.mark.parametrize("given", mostly_slow(["corpus", "shards"], "corpus"))
def test_pretraining_takes_a_shard_an_epoch(given, two_shards, tmp_path, fairseq_train, caplog):
    assert tokenizer_of(f"{two_shards}/shard1") == tokenizer_of(str(two_shards)) == two_shards / "tokenizer"
    data = two_shards if given == "corpus" else f"{two_shards}/shard0:{two_shards}/shard1"
    options = "--arch lazyformer_m2x6_s_tiny --sublayer-pattern M2 --criterion masked_lm_accuracy --batch-size 32"
    with caplog.at_level("INFO"):
        fairseq_train(data, f"{options} --max-epoch 3", tmp_path / "run")
    read = re.findall(r"shard(\d)/train: \d+ items packed", "\n".join(caplog.messages))
    assert read[:3] == ["0", "1", "0"]  # fairseq reads one ahead
    assert re.search(r"packing efficiency \d\d\.\d%", caplog.text)
    assert re.search(r"valid on 'valid' subset \| loss [\d.]+ \| accuracy [\d.]+ \| ppl [\d.]+", caplog.text)
    assert "optimizer: torch.optim.AdamW(fused=True)" in caplog.text
    for file in (two_shards / "tokenizer").iterdir():
        assert (tmp_path / "run" / "tokenizer" / file.name).read_bytes() == file.read_bytes()


def test_glue_goes_on_from_first_tokens_to_the_first_text(glue, data_folder, fairseq_train, tmp_path):
    """The task marks the tokens; weights are those of ``global=1``."""
    more, states = f"--tokenizer-folder {data_folder / 'tokenizer'}", []
    for folder, tokens, start in (
        (glue / "CoLA", 1, ""),
        (glue / "STS-B", "given", f"--finetune-from-model {tmp_path}/1/checkpoint_last.pt --seed 7"),
    ):
        options = f"--criterion glue --arch bert_tiny --batch-size 16 --max-update 2 {more} {start}"
        options += f" --sublayer-pattern '(s[window=2,global={tokens}]fl)x2'"
        states.append(fairseq_train(folder, options, tmp_path / str(tokens), task="glue")["model"])
    assert len({frozenset(name for name in state if "classification_heads" not in name) for state in states}) == 1
    # Few updates of a small rate: the projections of global tokens are the ones that were trained before.
    name = "encoder.sentence_encoder.sublayers.0.inner.choices.window.q_proj.weight"
    assert (states[0][name] - states[1][name]).abs().max() < 0.01


TASK = "stream_language_modeling --tgt-len 6"
TINY = (
    "--arch par_transformer_tiny --sublayer-pattern sfsf --adaptive-softmax-cutoff 20,40 --mem-len 9 "
    "--criterion causal_lm --batch-size 16"
)


@contextmanager
def recorded_steps() -> Iterator[SimpleNamespace]:
    """What the task's steps read, and the memory after each, in order: of training and of validation."""
    seen = SimpleNamespace(train=[], valid=[])

    def recorder(name: str, carried: Callable[[StreamLanguageModelingTask], CarriedMemory], records: list):
        original = getattr(StreamLanguageModelingTask, name)

        def step(task, sample, *args, **kwargs):
            loss, *rest = original(task, sample, *args, **kwargs)
            states = [state.clone() for state in carried(task).memory.states]
            source, target = sample["net_input"]["src_tokens"], sample["target"]
            found = {"source": source, "target": target, "states": states, "loss": loss.item()}
            records.append(SimpleNamespace(segment=sample["segment"], **found))
            return loss, *rest

        return step

    train = recorder("train_step", lambda task: task.objective.memory, seen.train)
    valid = recorder("valid_step", lambda task: task.validation, seen.valid)
    with mock.patch.multiple(StreamLanguageModelingTask, train_step=train, valid_step=valid):
        yield seen


def same(some, others) -> bool:
    return len(some) == len(others) and all(torch.equal(one, other) for one, other in zip(some, others, strict=True))


def losses(steps: list[SimpleNamespace]) -> list[float]:
    return [step.loss for step in steps]


def assert_equal_ends(one: dict, other: dict, segments: int) -> None:
    """Two checkpoints of a run: the weights, and the memory of 16 rows, which ends after so many segments."""
    assert_equal_state(one["model"], other["model"])
    kept, again = (state["extra_state"]["stream_memory"] for state in (one, other))
    assert kept["next_segment"] == again["next_segment"] == segments and kept["rows"] == 16
    assert same(kept["states"], again["states"]) and kept["states"][0].shape == (16, 9, 32)


def test_segments_come_in_order_and_memory_is_carried_over_updates_and_starts_anew_with_epochs(
    lm_data, tmp_path, fairseq_train
):
    with recorded_steps() as steps:
        options = f"{TINY} --max-epoch 2 --update-freq 2 --num-workers 1 --validate-interval-updates 12"
        fairseq_train(lm_data, options, tmp_path, TASK)
    assert [step.segment for step in steps.valid].count(0) > 2, "within an epoch, which leaves training's memory alone"
    length = len(steps.train) // 2
    assert length > 20 and length % 2 == 0 and [step.segment for step in steps.train] == 2 * list(range(length))
    for epoch in (steps.train[:length], steps.train[length:]):
        source, target = (torch.cat([getattr(step, of) for step in epoch], 1) for of in ("source", "target"))
        assert torch.equal(source[:, 1:], target[:, :-1])  # contiguous
    for records in (steps.train, steps.valid):
        for step in records:
            assert step.states[0].size(1) == min(9, 6 * (step.segment + 1))


@pytest.fixture
def whole_run(lm_data, tmp_path, fairseq_train):
    """A run of 8 updates of 2 batches, that kept its checkpoint of update 5: (steps, last checkpoint, options)."""
    options = f"{TINY} --max-update 8 --update-freq 2 --dropout 0.1 --save-interval-updates 5 --validate-interval 9"
    with recorded_steps() as steps:
        state = fairseq_train(lm_data, options, tmp_path / "whole", TASK)
    return steps, state, options


def resumed(folder: Path, update: int = 5) -> Path:
    """A new folder with what the whole run saved after so many updates."""
    (kept,) = (folder / "whole").glob(f"checkpoint_*_{update}.pt")
    copy = folder / f"resumed {len(list(folder.iterdir()))}"
    copy.mkdir()
    shutil.copy(kept, copy / "checkpoint_last.pt")
    return copy


def test_a_resumed_run_is_the_uninterrupted_one_bit_for_bit(lm_data, tmp_path, fairseq_train, whole_run):
    whole, whole_state, options = whole_run
    with recorded_steps() as steps:
        state = fairseq_train(lm_data, options, resumed(tmp_path), TASK)
    assert len(steps.train) == 6 and len(whole.train) == 16 and steps.train[0].segment == 10
    assert losses(steps.train) == losses(whole.train[10:])
    assert_equal_ends(whole_state, state, 16)
    with recorded_steps() as steps, mock.patch.object(StreamLanguageModelingTask, "take_from_checkpoint"):
        fairseq_train(lm_data, options, resumed(tmp_path), TASK)
    assert steps.train[0].loss != whole.train[10].loss  # it is the memory that makes them equal


@pytest.mark.slow
def test_rolled_streams_resume_in_a_later_epoch_bit_for_bit(lm_data, tmp_path, fairseq_train):
    options = f"{TINY} --max-update 10 --update-freq 4 --dropout 0.1 --save-interval-updates 9 --disable-validation"
    task = f"{TASK} --roll"
    with recorded_steps() as whole:
        state = fairseq_train(lm_data, options, tmp_path / "whole", task)
    (second,) = [number for number, step in enumerate(whole.train) if step.segment == 0 and number]
    assert (second + 3) // 4 == 8, "update 9, whose checkpoint is kept, is the first of the second epoch"
    assert not torch.equal(whole.train[0].target[:, :5], whole.train[second].target[:, :5])
    with recorded_steps() as steps:
        again = fairseq_train(lm_data, options, resumed(tmp_path, 9), task)
    assert losses(steps.train) == losses(whole.train[second + 4 :])
    assert_equal_state(again["model"], state["model"])


@pytest.mark.slow
def test_a_memory_that_does_not_fit_is_left(lm_data, tmp_path, fairseq_train, whole_run, caplog):
    options = whole_run[2]
    with recorded_steps() as steps, caplog.at_level(logging.WARNING):
        fairseq_train(lm_data, f"{options} --batch-size 15 --mem-len 7", resumed(tmp_path), TASK)
    said = "the memory in the checkpoint does not match this run (rows 16, now 15; mem_len 9, now 7): the streams start"
    assert said in caplog.text
    assert "from segment 10 of 30, but the streams now have 32" in caplog.text
    assert steps.train[0].segment == 10 and steps.train[0].states[0].size(1) == 6

    with recorded_steps() as steps:
        fairseq_train(lm_data, f"{options} --reset-dataloader", resumed(tmp_path), TASK)
    assert steps.train[0].segment == 0 and steps.train[0].states[0].size(1) == 6


@pytest.mark.slow
def test_two_processes_resume_bit_for_bit_and_their_checkpoint_has_the_memory_of_both(lm_data, tmp_path, free_port):
    options = f"{TINY} --batch-size 8 --update-freq 2 --max-update 6 --save-interval-updates 3 --disable-validation"

    def two_processes(folder: Path) -> dict:
        run = train_in_two_processes(train_words(lm_data, f"{options} --dropout 0.1", folder, TASK), free_port)
        assert run.returncode == 0, run.stdout[-3000:] + run.stderr[-3000:]
        return torch.load(folder / "checkpoint_last.pt")

    whole = two_processes(tmp_path / "whole")
    assert_equal_ends(whole, two_processes(resumed(tmp_path, 3)), 12)
    rows = whole["extra_state"]["stream_memory"]["states"][0].flatten(1)
    assert not any(torch.equal(rows[one], rows[other]) for one in range(8) for other in range(8, 16))


# --- parts ------------------------------------------------------------------------------------------------------------


def states_of(carried: CarriedMemory, value: float) -> CarriedMemory:
    carried.memory.states = [torch.full((2, 3, 4), value)]
    return carried


def test_a_jump_in_the_text_empties_the_memory_with_a_warning(caplog):
    carried = states_of(CarriedMemory(), 1.0)
    carried.has_read(4)
    assert carried.before(5).length == 3 and not caplog.text
    assert carried.before(7).length == 0
    assert "continues at segment 7, but the memory ends before segment 5" in caplog.text
    states_of(carried, 1.0).has_read(7)
    caplog.clear()
    assert carried.before(0).length == 0 and not caplog.text  # an epoch


def task_of(lm_data, **options) -> StreamLanguageModelingTask:
    cfg = {"data": str(lm_data), "tgt_len": 6, "valid_tgt_len": None, "train_subset": "train"}
    cfg |= {"roll": False}
    return StreamLanguageModelingTask.setup_task(OmegaConf.create(cfg | options))


def test_dummy_batches_and_skipped_updates_leave_no_trace(lm_data):
    task = task_of(lm_data)
    task.load_dataset("train")
    batches = task.get_batch_iterator(task.dataset("train"), max_sentences=4).dataset

    def criterion(model, sample):
        memory = sample["net_input"]["memory"]
        memory.remember([sample["net_input"]["src_tokens"][..., None].float()], 9)
        return torch.zeros(1, requires_grad=True).sum(), 1, {}

    def step(segment: int, **more) -> None:
        task.train_step(batches[segment], mock.MagicMock(), criterion, mock.MagicMock(), 0, **more)

    step(0)
    step(1)
    kept = [state.clone() for state in task.objective.memory.memory.states]
    step(0, ignore_grad=True)
    assert same(task.objective.memory.memory.states, kept) and task.objective.memory.next_segment == 2
    assert "memory" not in batches[0]["net_input"]
    task.forget_memory()
    step(2)
    assert task.objective.memory.memory.length == 6 and task.objective.memory.next_segment == 3


def test_lengths_that_cannot_be_are_said_before_training(lm_data, tmp_path, fairseq_train, monkeypatch):
    monkeypatch.setattr(SafeTrainer, "train_step", lambda *_, **__: pytest.fail("it trains"))
    for options, message in (
        ("--tgt-len 0", "--tgt-len 0: must be 1 or more"),
        ("--valid-tgt-len -1", "--valid-tgt-len -1: must be 1 or more"),
        ("--tgt-len 5000", r"are \d+ per row, but a segment has 5000 \(--tgt-len\)"),
        ("--batch-size 5000", r"in 5000 rows \(batch size x workers\) are 0 per row"),
        ("--mem-len -1", "--mem-len -1: must be 0"),
        ("--mem-len 4000", r"--mem-len 4000: .* exceed the length of a stream, which has \d+"),
    ):
        with pytest.raises(UserError, match=message):
            fairseq_train(lm_data, f"{TINY} --max-update 1 {options}", tmp_path, TASK)


def test_data_that_is_not_there_or_of_another_dictionary_is_named(lm_data, tmp_path):
    with pytest.raises(UserError, match=r"dict\.txt: cannot be read \(No such file"):
        task_of(tmp_path)
    with pytest.raises(UserError, match=r"nowhere\.(bin|idx): no such file"):
        task_of(lm_data).load_dataset("nowhere")
    task = task_of(lm_data)
    task.load_dataset("train")
    with pytest.raises(UserError, match="--max-tokens does not determine the number of streams; set --batch-size"):
        task.get_batch_iterator(task.dataset("train"), max_tokens=64)
    data = shutil.copytree(lm_data, tmp_path / "data")
    lines = (data / "dict.txt").read_text().splitlines(keepends=True)
    (data / "dict.txt").write_text("".join(lines[:-5]))
    with pytest.raises(UserError, match=r"train\.bin: item .* contains id \d+.* one of the two files is damaged"):
        task_of(data).load_dataset("train")
