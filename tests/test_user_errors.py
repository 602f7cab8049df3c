"""A user's mistake ends a run with a message that names it, and loses nothing."""

import os
import signal
import subprocess
import sys
import traceback

import pytest
import torch
from fairseq import options as options_of_fairseq
from helpers import ROOT, build_toy_corpus
from torch.multiprocessing.spawn import ProcessRaisedException

from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.models import LazyFormerModel
from lazyformer_fairseq.reliability.command_line import find_user_error

TINY = (
    "--arch lazyformer_m2x6_s_tiny --sublayer-pattern M2 --criterion masked_lm_accuracy --batch-size 4 --max-update 1"
)


def message_of(run, *arguments, **options) -> str:
    """The user error that a run ends with, found as the command line finds it."""
    with pytest.raises(Exception) as caught:
        run(*arguments, **options)
    error = find_user_error(caught.value)
    assert isinstance(error, UserError), repr(caught.value)
    return str(error)


def test_the_command_line_prints_the_message_and_no_traceback(data_folder, tmp_path):
    command = [
        *(sys.executable, "-m", "fairseq_cli.train", str(data_folder), "--user-dir", str(ROOT / "lazyformer_fairseq")),
        *f"--task full_sentences_masked_lm --cpu --optimizer fused_adam --save-dir {tmp_path} {TINY}".split(),
        *("--sublayer-pattern", "(sf)x2 qf"),
    ]
    run = subprocess.run(command, capture_output=True, text=True)
    assert run.returncode == 1
    assert "Traceback" not in run.stderr + run.stdout and "Warning" not in run.stderr
    assert "error: sublayer pattern '(sf)x2 qf', character 8: unknown letter 'q'" in run.stderr


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--batch-size 0", "--batch-size 0: must be 1 or more"),
        ("--batch-size-valid 0", "--batch-size-valid 0: must be 1 or more"),
        ("--update-freq 2,0", "--update-freq 0: must be 1 or more"),
        ("--tokens-per-sample 0", "--tokens-per-sample 0: must be 1 or more"),
        ("--encoder-attention-heads 0", "--encoder-attention-heads 0: must be 1 or more"),
        ("--num-workers -2", "--num-workers -2: must be 0 or more"),
        ("--save-interval 0", "--save-interval 0: must be 1 or more"),
        ("--attention-dropout 1.5", "--attention-dropout 1.5: must be from 0 to below 1"),
    ],
)
def test_a_size_that_cannot_be_is_refused_before_anything_is_loaded(options, message, tmp_path):
    command = f"{tmp_path} --task full_sentences_masked_lm {TINY} {options}".split()
    with pytest.raises(UserError, match=f"^{message}$"):
        options_of_fairseq.parse_args_and_arch(options_of_fairseq.get_training_parser(), command)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("error", [UserError("pattern 'lf'\n  lf\n  ^"), KeyError("other")])
def test_an_error_of_a_process_that_fairseq_started(error):
    try:
        try:
            raise error
        except Exception as cause:
            raise Exception("cannot load") from cause
    except Exception:
        text = traceback.format_exc()
    found = find_user_error(ProcessRaisedException(f"\n\n-- Process 1 terminated with:\n{text}", 1, 99))
    assert str(found) == (str(error) if isinstance(error, UserError) else "None")


@pytest.fixture
def interruptible():
    """A shell's background job ignores Ctrl-C, and so would the processes that a test starts there."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interruptible")
def test_ctrl_c_is_no_traceback_and_loses_nothing(data_folder, tmp_path):
    command = [
        *(sys.executable, "-m", "fairseq_cli.train", str(data_folder), "--user-dir", str(ROOT / "lazyformer_fairseq")),
        *f"--task full_sentences_masked_lm --cpu --optimizer fused_adam --save-dir {tmp_path} {TINY}".split(),
        *"--tokens-per-sample 32 --max-update 100000 --save-interval-updates 5 --log-format simple".split(),
    ]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as run:
        for line in run.stdout:
            if "Saved checkpoint" in line:
                run.send_signal(signal.SIGINT)
                break
        _, errors = run.communicate()
    assert run.returncode != 0
    assert "interrupted; rerun to resume" in errors and "Traceback" not in errors
    assert torch.load(tmp_path / "checkpoint_last.pt")["optimizer_history"][-1]["num_updates"] >= 5


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ("--sublayer-pattern lf", "character 1: this l has no s below it"),
        ("--encoder-attention-heads 5", "5 attention heads do not divide an embedding dimension of 32"),
        ("--tokens-per-sample 2", "tokens_per_sample is 2"),
        ("--tokens-per-sample 64 --max-positions 32", "examples have more than 32 tokens, the longest 64"),
        ("--max-tokens 20", "examples have more than 20 tokens"),  # else it would train on what is left
        ("--mask-prob 1.5", "mask_prob 1.5"),
        ("--warmup-ratio 3", "--warmup-ratio 3.0"),
        ("--relative-position-buckets 7", "7 buckets"),
        ("--adam-betas 5", "--adam-betas"),
    ],
)
def test_impossible_options(data_folder, tmp_path, fairseq_train, options, words):
    assert words in message_of(fairseq_train, data_folder, f"{TINY} {options}", tmp_path)


def test_missing_and_empty_data(data_folder, tmp_path, fairseq_train):
    missing = tmp_path / "missing"
    assert f"{missing} is no folder" in message_of(fairseq_train, missing, TINY, tmp_path / "run")
    assert f"{missing} is no folder" in message_of(fairseq_train, f"{data_folder}:{missing}", TINY, tmp_path / "run")

    missing.mkdir()
    assert "dict.txt: no such file" in message_of(fairseq_train, missing, TINY, tmp_path / "run")
    (missing / "dict.txt").write_text("a 1\nb\n")
    assert "not a dictionary" in message_of(fairseq_train, missing, TINY, tmp_path / "run")
    (missing / "dict.txt").write_bytes((data_folder / "dict.txt").read_bytes())
    assert "valid.bin" in message_of(fairseq_train, missing, TINY, tmp_path / "run")


@pytest.fixture
def trained(data_folder, tmp_path, fairseq_train):
    fairseq_train(data_folder, TINY, tmp_path / "run")
    return tmp_path / "run"


def test_a_checkpoint_of_another_dictionary(data_folder, tmp_path, fairseq_train, trained):
    for vocab_size, words in ((150, "160 symbols, this run's has 150"), (160, "another dictionary, of the same size")):
        other = tmp_path / f"other {vocab_size}"
        build_toy_corpus(other, vocab_size, seed=7)
        assert words in message_of(fairseq_train, other, f"{TINY} --max-update 2", trained)


def test_a_checkpoint_of_another_arch(data_folder, fairseq_train, trained):
    kept = (trained / "checkpoint_last.pt").read_bytes()
    for options, words in (
        ("--sublayer-pattern M3", "the checkpoint has no weight encoder.sentence_encoder.sublayers.4"),
        ("--sublayer-pattern sf", "sublayers.2.inner.v_proj.weight that this model lacks"),
        ("--encoder-ffn-embed-dim 48", "(64, 32), the model's (48, 32)"),
    ):
        message = message_of(fairseq_train, data_folder, f"{TINY} {options} --max-update 2", trained)
        assert words in message and "--arch" in message
    assert (trained / "checkpoint_last.pt").read_bytes() == kept


@pytest.mark.parametrize("share", [0, 0.01, 0.5, 0.99])
def test_a_truncated_checkpoint(data_folder, fairseq_train, trained, share):
    for name in ("checkpoint_last.pt", "checkpoint_best.pt"):
        content = (trained / name).read_bytes()
        (trained / name).write_bytes(content[: int(len(content) * share)])
    message = message_of(fairseq_train, data_folder, f"{TINY} --max-update 2", trained)
    assert "checkpoint_last.pt: truncated, damaged or no checkpoint" in message
    assert "checkpoint_best.pt: truncated" in message_of(LazyFormerModel.from_pretrained, trained)


class Malicious:
    """Unpickled without protection it makes a file."""

    def __init__(self, victim):
        self.victim = victim

    def __reduce__(self):
        return os.mkdir, (str(self.victim),)


@pytest.mark.parametrize("where", ["whole", "model", "cfg", "extra_state"])
def test_a_malicious_checkpoint_is_refused_and_runs_nothing(data_folder, tmp_path, fairseq_train, trained, where):
    victim = tmp_path / "made by the checkpoint"
    state = torch.load(trained / "checkpoint_last.pt")
    state = Malicious(victim) if where == "whole" else {**state, where: Malicious(victim)}
    for name in ("checkpoint_last.pt", "checkpoint_best.pt"):
        torch.save(state, trained / name)
    for run in (
        lambda: fairseq_train(data_folder, f"{TINY} --max-update 2", trained),
        lambda: LazyFormerModel.from_pretrained(trained),
        lambda: fairseq_train(
            data_folder, f"{TINY} --finetune-from-model {trained / 'checkpoint_best.pt'}", tmp_path / "fine-tuned"
        ),
    ):
        message = message_of(run)
        assert "refused, nothing of it was run" in message and "mkdir" in message
        assert "weights_only" not in message, "do not teach to switch the protection off"
    assert not victim.exists()
    torch.load(trained / "checkpoint_last.pt", weights_only=False)
    assert victim.exists(), "the trap of this test does not work"
