"""A run that runs out of memory ends with numbers and advice, and resumes from what it had saved."""

import re
from types import SimpleNamespace

import pytest
import torch
from fairseq.tasks.fairseq_task import FairseqTask
from fairseq_plugin.reliability.damage import TINY
from helpers import assert_equal_state
from omegaconf import OmegaConf
from tiny_networks import make_encoder
from torch.multiprocessing.spawn import ProcessRaisedException

from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.fairseq_plugin.reliability import out_of_memory
from lazyformer_fairseq.fairseq_plugin.reliability.command_line import find_user_error
from lazyformer_fairseq.training.out_of_memory import OutOfMemoryInTrainingError, is_out_of_memory

OPTIONS = (
    f"{TINY} --batch-size 2 --sequences-per-update 4 --max-update 4 --save-interval-updates 2 --disable-validation"
)
ON_A_GPU = (
    "CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0 has a total capacity of 15.77 GiB of which 1.2 GiB is free."
)
ON_A_CPU = (
    "[enforce fail at alloc_cpu.cpp:124] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to allocate "
    "137438953472 bytes. Error code 12 (Cannot allocate memory)"
)


def failing(monkeypatch, method: str, call: int, error: Exception) -> None:
    """Lets a method of the task fail at one call, from 1, and never again."""
    original, calls = getattr(FairseqTask, method), []

    def at_last(self, *arguments, **options):
        calls.append(None)
        if len(calls) == call:
            raise error
        return original(self, *arguments, **options)

    monkeypatch.setattr(FairseqTask, method, at_last)


@pytest.mark.parametrize(
    ("method", "error"),
    [
        pytest.param("train_step", torch.OutOfMemoryError(ON_A_GPU), id="GPU"),
        pytest.param("optimizer_step", RuntimeError(ON_A_CPU), id="CPU", marks=pytest.mark.slow),
    ],
)
def test_it_ends_with_the_numbers_and_resumes(method, error, fairseq_train, data_folder, tmp_path, monkeypatch):
    expected = fairseq_train(data_folder, OPTIONS, tmp_path / "whole")
    # The third update; of its two batches, the second.
    failing(monkeypatch, method, 6 if method == "train_step" else 3, error)
    with pytest.raises(OutOfMemoryInTrainingError) as found:
        fairseq_train(data_folder, OPTIONS, tmp_path / "run")
    message = str(found.value)
    assert re.search(r"^out of memory in update 3: batches of 2 x \d\d tokens\. [\d,]+ parameters; ", message)
    assert ("2.50 GiB" if "CUDA" in str(error) else "128.00 GiB") + " were requested" in message
    assert (
        "--batch-size 1 (the update size stays the same); --attention-backend recompute" in message
        and "--bf16" in message
    )
    assert {path.name for path in (tmp_path / "run").glob("*.pt")} == {"checkpoint_1_2.pt", "checkpoint_last.pt"}
    found = fairseq_train(data_folder, OPTIONS, tmp_path / "run")
    assert_equal_state(found["model"], expected["model"])


@pytest.mark.parametrize(
    ("place", "message"),
    [
        ("lazyformer_fairseq.fairseq_plugin.screen._seconds_of_pass", r"in update 1: batches of \d+ x \d\d tokens"),
        ("fairseq.trainer.Trainer.__init__", r"before the first update: [\d,]+ parameters; .* Remedy:"),
        (
            "fairseq.trainer.Trainer.load_checkpoint",
            r"before the first update: [\d,]+ parameters; .* Remedy:",
        ),
    ],
)
def test_before_the_first_update_too(fairseq_train, data_folder, tmp_path, monkeypatch, place, message):
    """As a pass is timed, and as weights go to the device or the optimizer is made."""

    def fail(*arguments, **options):
        raise RuntimeError(ON_A_CPU)

    monkeypatch.setattr(place, fail)
    with pytest.raises(OutOfMemoryInTrainingError, match=f"out of memory {message}"):
        fairseq_train(data_folder, f"{OPTIONS} --log-seconds 60", tmp_path)


def test_a_model_that_cannot_be_built_is_named_with_its_size(fairseq_train, data_folder, tmp_path, monkeypatch):
    original = FairseqTask.build_model

    def build(task, cfg, from_checkpoint=False):
        if torch.get_default_device().type != "meta":  # where nothing is allocated
            raise RuntimeError(ON_A_CPU)
        return original(task, cfg, from_checkpoint)

    monkeypatch.setattr(FairseqTask, "build_model", build)
    message = r"the model does not fit in memory: its [\d,]{6,} parameters need 0 GiB, or 0 GiB when training with Adam"
    with pytest.raises(OutOfMemoryInTrainingError, match=message):
        fairseq_train(data_folder, OPTIONS, tmp_path)


@pytest.mark.slow
def test_in_validation_a_batch_is_tried_twice(fairseq_train, data_folder, tmp_path, monkeypatch):
    options = OPTIONS.replace("--disable-validation", "--batch-size-valid 6 --max-update 2")
    failing(monkeypatch, "valid_step", 1, torch.OutOfMemoryError(ON_A_GPU))
    fairseq_train(data_folder, options, tmp_path / "once")
    monkeypatch.undo()
    monkeypatch.setattr(FairseqTask, "valid_step", lambda *arguments: (_ for _ in ()).throw(RuntimeError(ON_A_GPU)))
    message = r"in validation after update 2: a batch of .* --batch-size-valid 3 or"
    with pytest.raises(OutOfMemoryInTrainingError, match=message):
        fairseq_train(data_folder, options, tmp_path / "twice")


def test_other_errors_pass(fairseq_train, data_folder, tmp_path, monkeypatch):
    failing(monkeypatch, "train_step", 1, RuntimeError("no kernel image is available for execution on the device"))
    with pytest.raises(RuntimeError, match="no kernel image") as found:
        fairseq_train(data_folder, OPTIONS, tmp_path)
    assert not isinstance(found.value, OutOfMemoryInTrainingError)
    with pytest.raises(RuntimeError) as found:
        torch.empty(2**60)
    assert is_out_of_memory(found.value), "what torch says on a processor"


def test_a_user_s_mistake_costs_no_checkpoint(fairseq_train, data_folder, tmp_path, monkeypatch):
    failing(monkeypatch, "train_step", 1, UserError("give less"))
    with pytest.raises(UserError, match="give less"):
        fairseq_train(data_folder, OPTIONS, tmp_path)
    assert not list(tmp_path.glob("*.pt"))  # fairseq's crash.pt


def test_the_advice_keeps_the_size_of_an_update():
    for batch_size, max_tokens, update_freq, advice, *task in (
        (8, None, [2, 4], "--batch-size 4 --update-freq 4,8 (the update size stays the same)"),
        (None, 4096, [1], "--max-tokens 2048 --update-freq 2 (the update size stays the same)"),
        (1, None, [1], "a lower --tokens-per-sample, because a batch is already a single sequence"),
        (1, None, [1], "a lower --tgt-len, because a batch is already a single sequence", "tgt_len"),
    ):
        sizes = {"dataset": {"batch_size": batch_size, "max_tokens": max_tokens}, "task": dict.fromkeys(task, 64)}
        cfg = OmegaConf.create({**sizes, "optimization": {"update_freq": update_freq}})
        assert out_of_memory.smaller_batches(cfg) == advice


def test_recompute_is_advised_where_it_computes_the_network():
    found = [
        out_of_memory.would_recompute_help(make_encoder(pattern, max_positions=8, attention_backend=back_end))
        for pattern, back_end in (
            ("sf", "auto"),
            ("sf", "recompute"),
            ("s[entmax=1.5] f", "auto"),
            ("s[synthesizer=random] f", "eager"),
        )
    ]
    assert found == [True, False, False, False] and not out_of_memory.would_recompute_help(torch.nn.Linear(1, 1))


def test_it_says_what_the_gpu_has_and_batches_of_several_sizes_once(monkeypatch):
    samples = [{"net_input": {"src_tokens": torch.zeros(*shape)}} for shape in ((2, 8), (3, 8), (2, 8))]
    assert (
        out_of_memory.describe_sizes([*samples, {}]) == "3 x 8 and 2 x 8 tokens"
        and out_of_memory.describe_sizes([{}]) == "unknown size"
    )
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(total_memory=16 * 2**30))
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: 12 * 2**30)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 15 * 2**30)
    run = SimpleNamespace(cuda=True, device="cuda:0", model=torch.nn.Linear(10, 100))
    assert out_of_memory.describe_memory(run, torch.OutOfMemoryError(ON_A_GPU)) == (
        "1,100 parameters; 2.50 GiB were requested; tensors used at most 12.00 GiB, and torch has reserved 15.00 GiB "
        "of the GPU's 16.00 GiB"
    )


def test_it_reaches_the_first_process_from_those_that_fairseq_starts():
    """Of their errors torch hands on the text of the traceback alone."""
    text = "\n\n-- Process 1 terminated with the following error:\nTraceback (most recent call last):\n  File x\n"
    name = f"{OutOfMemoryInTrainingError.__module__}.{OutOfMemoryInTrainingError.__qualname__}"
    text += f"\n\ntorch.OutOfMemoryError: CUDA\n\n...\n{name}: out of memory in update 3\n"
    assert str(find_user_error(ProcessRaisedException(text, 1, 2))) == "out of memory in update 3"
