"""Task stream_language_modeling through fairseq-train: memory from batch to batch, and in checkpoints."""

import logging
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from helpers import ROOT
from omegaconf import OmegaConf

from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.fairseq_plugin.tasks.stream_language_modeling import (
    CarriedMemory,
    StreamLanguageModelingTask,
    StreamsShape,
)
from lazyformer_fairseq.fairseq_plugin.trainer import SafeTrainer

TASK = "stream_language_modeling --tgt-len 6"
TINY = (
    "--arch par_transformer_tiny --sublayer-pattern sfsf --adaptive-softmax-cutoff 20,40 --mem-len 9 "
    "--criterion causal_lm --batch-size 16"
)


class Steps:
    """Records what the task's steps read, and the memory after each, in order: of training and of validation."""

    def __init__(self):
        self.train, self.valid = [], []
        self.patches = [
            mock.patch.object(StreamLanguageModelingTask, name, self._recorder(name, carrier, records))
            for name, carrier, records in (
                ("train_step", "training", self.train),
                ("valid_step", "validation", self.valid),
            )
        ]

    @staticmethod
    def _recorder(name: str, carrier: str, records: list):
        original = getattr(StreamLanguageModelingTask, name)

        def step(task, sample, model, *args, **kwargs):
            result = original(task, sample, model, *args, **kwargs)
            states = [state.clone() for state in getattr(task, carrier).memory.states]
            source, target = sample["net_input"]["src_tokens"], sample["target"]
            records.append(SimpleNamespace(segment=sample["segment"], source=source, target=target, states=states))
            records[-1].loss = result[0].item()
            return result

        return step

    def __enter__(self):
        for patch in self.patches:
            patch.start()
        return self

    def __exit__(self, *_):
        for patch in self.patches:
            patch.stop()


def same(some, others) -> bool:
    return len(some) == len(others) and all(torch.equal(one, other) for one, other in zip(some, others, strict=True))


def test_batches_are_the_segments_in_order_in_every_epoch(lm_data, tmp_path, fairseq_train):
    with Steps() as steps:
        fairseq_train(lm_data, f"{TINY} --max-epoch 2 --num-workers 2 --disable-validation", tmp_path, TASK)
    first, second = steps.train[: len(steps.train) // 2], steps.train[len(steps.train) // 2 :]
    assert len(first) > 20
    for epoch in (first, second):
        assert [step.segment for step in epoch] == list(range(len(first)))
        for row in range(16):
            source = torch.cat([step.source[row] for step in epoch])
            target = torch.cat([step.target[row] for step in epoch])
            assert torch.equal(source[1:], target[:-1])  # contiguous


def test_memory_is_carried_within_and_over_updates_and_starts_anew_with_epochs(lm_data, tmp_path, fairseq_train):
    with Steps() as steps:
        fairseq_train(lm_data, f"{TINY} --max-epoch 2 --update-freq 2", tmp_path, TASK)
    epoch = len(steps.train) // 2
    assert epoch % 2 == 0 and [step.segment for step in steps.train] == 2 * list(range(epoch))
    for records in (steps.train, steps.valid):
        for step in records:
            assert step.states[0].size(1) == min(9, 6 * (step.segment + 1))


@pytest.mark.slow
def test_validation_within_an_epoch_changes_nothing_of_training(lm_data, tmp_path, fairseq_train):
    options = f"{TINY} --max-update 6"
    with Steps() as without:
        fairseq_train(lm_data, f"{options} --disable-validation", tmp_path / "without", TASK)
    with Steps() as steps:
        fairseq_train(lm_data, f"{options} --validate-interval-updates 3", tmp_path / "with", TASK)
    assert [step.segment for step in steps.valid].count(0) >= 2 and not without.valid
    assert [step.loss for step in steps.train] == [step.loss for step in without.train]
    assert same(steps.train[-1].states, without.train[-1].states)


@pytest.fixture
def whole_run(lm_data, tmp_path, fairseq_train):
    """A run of 8 updates of 2 batches, that kept its checkpoint of update 5: (steps, last checkpoint, options)."""
    options = f"{TINY} --max-update 8 --update-freq 2 --dropout 0.1 --save-interval-updates 5 --validate-interval 9"
    with Steps() as steps:
        state = fairseq_train(lm_data, options, tmp_path / "whole", TASK)
    return steps, state, options


def resumed(folder: Path) -> Path:
    """A new folder with what `whole_run` saved after 5 updates."""
    (kept,) = (folder / "whole").glob("checkpoint_*_5.pt")
    copy = folder / f"resumed {len(list(folder.iterdir()))}"
    copy.mkdir()
    shutil.copy(kept, copy / "checkpoint_last.pt")
    return copy


def test_a_resumed_run_is_the_uninterrupted_one_bit_for_bit(lm_data, tmp_path, fairseq_train, whole_run):
    whole, whole_state, options = whole_run
    with Steps() as steps:
        state = fairseq_train(lm_data, options, resumed(tmp_path), TASK)
    assert len(steps.train) == 6 and len(whole.train) == 16
    assert [step.loss for step in steps.train] == [step.loss for step in whole.train[10:]]
    assert steps.train[0].segment == 10
    for name, weight in whole_state["model"].items():
        assert torch.equal(state["model"][name], weight), name
    kept, again = whole_state["extra_state"]["stream_memory"], state["extra_state"]["stream_memory"]
    assert kept["next_segment"] == again["next_segment"] == 16
    assert same(kept["states"], again["states"]) and kept["states"][0].shape == (16, 9, 32)

    with Steps() as steps, mock.patch.object(StreamLanguageModelingTask, "take_from_checkpoint"):
        fairseq_train(lm_data, options, resumed(tmp_path), TASK)
    assert steps.train[0].loss != whole.train[10].loss  # it is the memory that makes them equal


@pytest.mark.slow
def test_rolled_streams_of_random_segments_resume_in_a_later_epoch_bit_for_bit(lm_data, tmp_path, fairseq_train):
    options = f"{TINY} --max-update 9 --update-freq 4 --dropout 0.1 --save-interval-updates 8 --disable-validation"
    task = f"{TASK} --roll --varlen"
    with Steps() as whole:
        state = fairseq_train(lm_data, options, tmp_path / "whole", task)
    (second,) = [number for number, step in enumerate(whole.train) if step.segment == 0 and number]
    assert (second + 3) // 4 == 7, "update 8, whose checkpoint is kept, is the first of the second epoch"
    assert len({step.source.size(1) for step in whole.train}) > 3
    assert not torch.equal(whole.train[0].target[:, :5], whole.train[second].target[:, :5])
    (kept,) = (tmp_path / "whole").glob("checkpoint_*_8.pt")
    (tmp_path / "resumed").mkdir()
    shutil.copy(kept, tmp_path / "resumed" / "checkpoint_last.pt")
    with Steps() as steps:
        again = fairseq_train(lm_data, options, tmp_path / "resumed", task)
    assert [step.loss for step in steps.train] == [step.loss for step in whole.train[second + 4 :]]
    for name, weight in state["model"].items():
        assert torch.equal(again["model"][name], weight), name


@pytest.mark.slow
def test_a_memory_that_does_not_fit_is_left(lm_data, tmp_path, fairseq_train, whole_run, caplog):
    options = whole_run[2]
    with Steps() as steps, caplog.at_level(logging.WARNING):
        fairseq_train(lm_data, f"{options} --batch-size 15 --mem-len 7", resumed(tmp_path), TASK)
    said = "the checkpoint's memory does not fit (rows 16, now 15; mem_len 9, now 7): streams start with empty memory"
    assert said in caplog.text
    assert "from segment 10 of 30 and the streams have 32 now" in caplog.text
    assert steps.train[0].segment == 10 and steps.train[0].states[0].size(1) == 6

    with Steps() as steps:
        fairseq_train(lm_data, f"{options} --reset-dataloader", resumed(tmp_path), TASK)
    assert steps.train[0].segment == 0 and steps.train[0].states[0].size(1) == 6


def states_of(carried: CarriedMemory, value: float) -> CarriedMemory:
    carried.memory.states = [torch.full((2, 3, 4), value)]
    return carried


def test_a_jump_in_the_text_empties_the_memory_with_a_warning(caplog):
    carried = states_of(CarriedMemory(), 1.0)
    carried.has_read(4)
    assert carried.before(5).length == 3 and not caplog.text
    assert carried.before(7).length == 0
    assert "continues at segment 7, but the memory ends before 5" in caplog.text
    states_of(carried, 1.0).has_read(7)
    caplog.clear()
    assert carried.before(0).length == 0 and not caplog.text  # an epoch


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_what_is_not_finite_does_not_stay_in_the_memory(bad):
    carried = states_of(CarriedMemory(), 2.0)
    carried.memory.states[0][0, 0, 0] = bad
    carried.has_read(0)
    assert carried.memory.states[0].sum() == 2 * (2 * 3 * 4 - 1)


def task_of(lm_data, **options) -> StreamLanguageModelingTask:
    cfg = {"data": str(lm_data), "tgt_len": 6, "valid_tgt_len": None, "train_subset": "train"}
    cfg |= {"roll": False, "varlen": False}
    return StreamLanguageModelingTask.setup_task(OmegaConf.create(cfg | options))


def test_dummy_batches_and_skipped_updates_leave_no_trace(lm_data):
    task = task_of(lm_data)
    task.load_dataset("train")
    batches = task.get_batch_iterator(task.dataset("train"), max_sentences=4).dataset

    def criterion(model, sample):
        memory = sample["net_input"]["memory"]
        memory.remember([sample["net_input"]["src_tokens"][..., None].float()], 9)
        return torch.zeros(1, requires_grad=True).sum(), 1, {}

    model, optimizer = mock.MagicMock(), mock.MagicMock()

    def step(segment: int, **more) -> None:
        task.train_step(batches[segment], model, criterion, optimizer, 0, **more)

    step(0)
    step(1)
    kept = [state.clone() for state in task.training.memory.states]
    step(0, ignore_grad=True)
    assert same(task.training.memory.states, kept) and task.training.next_segment == 2
    assert "memory" not in batches[0]["net_input"]
    task.forget_memory()
    step(2)
    assert task.training.memory.length == 6 and task.training.next_segment == 3


@pytest.mark.parametrize(
    ("options", "task", "message"),
    [
        ("", "stream_language_modeling --tgt-len 0", "--tgt-len 0: must be 1 or more"),
        ("", "stream_language_modeling --tgt-len 6 --valid-tgt-len -1", "--valid-tgt-len -1: must be 1 or more"),
        ("", "stream_language_modeling --tgt-len 5000", r"are \d+ a row, but a segment is 5000 \(--tgt-len\)"),
        ("--batch-size 5000", TASK, r"in 5000 rows \(batch size x workers\) are 0 a row"),
        ("--mem-len -1", TASK, "--mem-len -1: must be 0"),
        ("--mem-len 4000", TASK, r"--mem-len 4000: .* longer than a stream, which has \d+"),
    ],
)
def test_lengths_that_cannot_be_are_said_before_training(lm_data, tmp_path, fairseq_train, options, task, message):
    with mock.patch.object(SafeTrainer, "train_step") as train_step, pytest.raises(UserError, match=message):
        fairseq_train(lm_data, f"{TINY} --max-update 1 {options}", tmp_path, task)
    train_step.assert_not_called()


def test_the_number_of_streams_must_be_given(lm_data, tmp_path, fairseq_train):
    options = TINY.replace("--batch-size 16", "--max-tokens 64")
    with pytest.raises(UserError, match="--max-tokens does not determine the number of streams; give --batch-size"):
        fairseq_train(lm_data, f"{options} --max-update 1", tmp_path, TASK)


def test_data_that_is_not_there_is_named(tmp_path, lm_data):
    with pytest.raises(UserError, match=r"dict\.txt: no such file"):
        task_of(tmp_path)
    with pytest.raises(UserError, match=r"nowhere\.(bin|idx): no such file"):
        task_of(lm_data).load_dataset("nowhere")


def test_data_of_another_dictionary_is_refused(lm_data, tmp_path):
    data = shutil.copytree(lm_data, tmp_path / "data")
    lines = (data / "dict.txt").read_text().splitlines(keepends=True)
    (data / "dict.txt").write_text("".join(lines[:-5]))
    with pytest.raises(UserError, match=r"train\.bin: id \d+ in item .* one of the two is of another corpus"):
        task_of(data).load_dataset("train")


def saved_memory(shape: StreamsShape) -> dict:
    carried = CarriedMemory()
    carried.memory.states = [torch.arange(4.0)[:, None, None].expand(4, 3, 2)]
    carried.has_read(8)
    return carried.gather(shape)


def test_a_saved_memory_is_of_all_rows_and_each_worker_takes_its_own():
    shape = StreamsShape(tokens=100, rows=4, tgt_len=6, mem_len=3)
    second = CarriedMemory()
    second.restore(saved_memory(shape), shape, slice(2, 4))
    assert second.memory.states[0][:, 0, 0].tolist() == [2.0, 3.0] and second.next_segment == 9


@pytest.mark.parametrize("name", ["tokens", "rows", "tgt_len", "mem_len"])
def test_each_length_must_be_equal(name, caplog):
    shape = StreamsShape(tokens=100, rows=4, tgt_len=6, mem_len=3)
    other = states_of(CarriedMemory(), 1.0)
    other.restore(saved_memory(shape), replace(shape, **{name: 2}), slice(0, 2))
    assert f"does not fit ({name} {getattr(shape, name)}, now 2)" in caplog.text
    assert other.memory.length == 0


@pytest.mark.slow
def test_two_processes_resume_bit_for_bit_and_their_checkpoint_has_the_memory_of_both(lm_data, tmp_path, free_port):
    options = f"{TINY} --batch-size 8 --update-freq 2 --max-update 6 --save-interval-updates 3 --disable-validation"

    def two_processes(save_dir: Path) -> dict:
        command = [
            *(sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", str(free_port)),
            *("-m", "fairseq_cli.train", str(lm_data), "--user-dir", str(ROOT / "lazyformer_fairseq")),
            *f"--task {TASK} {options} --cpu --distributed-backend gloo --ddp-backend legacy_ddp".split(),
            *"--distributed-world-size 2 --optimizer fused_adam --lr-scheduler linear_warmup --lr 1e-3".split(),
            *("--num-workers", "0", "--no-epoch-checkpoints", "--dropout", "0.1", "--save-dir", str(save_dir)),
        ]
        run = subprocess.run(command, capture_output=True, text=True)
        assert run.returncode == 0, run.stdout[-3000:] + run.stderr[-3000:]
        return torch.load(save_dir / "checkpoint_last.pt")

    whole = two_processes(tmp_path / "whole")
    (tmp_path / "resumed").mkdir()
    shutil.copy(tmp_path / "whole" / "checkpoint_1_3.pt", tmp_path / "resumed" / "checkpoint_last.pt")
    resumed = two_processes(tmp_path / "resumed")
    for name, weight in whole["model"].items():
        assert torch.equal(resumed["model"][name], weight), name
    kept, again = (state["extra_state"]["stream_memory"] for state in (whole, resumed))
    assert kept["next_segment"] == again["next_segment"] == 12 and kept["rows"] == 16
    assert same(kept["states"], again["states"]) and kept["states"][0].shape == (16, 9, 32)
    rows = kept["states"][0].flatten(1)
    assert not any(torch.equal(rows[one], rows[other]) for one in range(8) for other in range(8, 16))
