"""A user's mistake ends a run with a message that names it, and loses nothing."""

import errno
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import traceback
from collections.abc import Iterator
from contextlib import nullcontext
from multiprocessing.connection import Listener
from pathlib import Path
from tempfile import TemporaryDirectory

import click
import pytest
import torch
from fairseq import options as options_of_fairseq
from fairseq_cli.validate import cli_main as validate
from helpers import ROOT, message_of, train_here
from hydra import compose, initialize_config_dir
from hydra.errors import ConfigCompositionException
from in_process import config_of, refusal
from torch.multiprocessing.spawn import ProcessRaisedException

from lazyformer_fairseq.arguments import CONFIGS
from lazyformer_fairseq.cli import main
from lazyformer_fairseq.data.shards import data_folders
from lazyformer_fairseq.errors import UserError, whole_number
from lazyformer_fairseq.evaluation.bench import settings as bench_settings
from lazyformer_fairseq.experiments.compare.models import read_models
from lazyformer_fairseq.experiments.compare.settings import find_task
from lazyformer_fairseq.fairseq_plugin.launcher.launch import Launch
from lazyformer_fairseq.fairseq_plugin.launcher.recipes import longformer_phases
from lazyformer_fairseq.fairseq_plugin.models import LazyFormerModel
from lazyformer_fairseq.fairseq_plugin.reliability import options as options_of_reliability
from lazyformer_fairseq.fairseq_plugin.reliability.command_line import find_user_error, printing_user_errors
from lazyformer_fairseq.fairseq_plugin.reliability.options import (
    LOGS_NEED,
    listed_updates,
    refuse_long_temporary_folder,
)
from lazyformer_fairseq.finetuning.launch import choose_epochs
from lazyformer_fairseq.finetuning.tasks.custom import columns_of
from lazyformer_fairseq.options import OUTPUTS, Command, read_gpus
from lazyformer_fairseq.patterns.grammar import plan
from lazyformer_fairseq.storage.atomic import write_text
from lazyformer_fairseq.training.warm_start.start import parse_alignment

TINY = (
    "--arch lazyformer_m2x6_s_tiny --sublayer-pattern M2 --criterion masked_lm_accuracy --batch-size 4 --max-update 1"
)


def command_line(python, data, save_dir, *more: str) -> list:
    options = f"--task full_sentences_masked_lm --cpu --optimizer fused_adam --save-dir {save_dir} {TINY}".split()
    return [python, "-m", "fairseq_cli.train", data, "--user-dir", ROOT / "lazyformer_fairseq", *options, *more]


def test_the_command_line_prints_the_message_and_no_traceback(data_folder, tmp_path, warm_python):
    command = command_line(warm_python / "python", data_folder, tmp_path, "--sublayer-pattern", "(sf)x2 qf")
    run = subprocess.run(command, capture_output=True, text=True)
    assert run.returncode == 1
    assert "Traceback" not in run.stderr + run.stdout and "Warning" not in run.stderr
    assert "error: sublayer pattern '(sf)x2 qf', character 8: unknown letter 'q'" in run.stderr


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--batch-size 0", "--batch-size 0: must be 1 or more"),
        ("--update-freq 2,0", "--update-freq 0: must be 1 or more"),
        ("--tokens-per-sample 0", "--tokens-per-sample 0: must be 1 or more"),
        ("--num-workers -2", "--num-workers -2: must be 0 or more"),
        ("--attention-dropout 1.5", "--attention-dropout 1.5: must be at least 0 and below 1"),
        ("--dropout -1", "--dropout -1.0: must be at least 0 and below 1"),
        ("--lr nan", "argument --lr: invalid value: 'nan'"),
        ("--lr 0.1,-1", "--lr -1.0: must be 0 or more"),
        ("--max-update -5", "--max-update -5: must be 0 or more"),
        ("--max-update 99999999999999999999", "--max-update 99999999999999999999: must be below 1,000,000,000"),
        ("--warmup-ratio 1.5", "--warmup-ratio 1.5: must be from 0 to 1"),
        ("--mask-prob 2", "--mask-prob 2: must be from 0 to 1"),
        ("--adam-betas (0.9,nan)", "--adam-betas nan: must be a number, at least 0 and below 1"),
        ("--seed -1", "--seed -1: must be 0 or more"),
        ("--clip-norm inf", "--clip-norm inf: must be below inf"),
        ("--lr=", "--lr '': must be a number"),
        ("--lr ²", "--lr ²: must be a number, 0 or more"),
        ("--tokens-per-sample ①", "argument --tokens-per-sample: invalid int value: '①'"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_is_loaded(options, message, tmp_path):
    words = ["--dry-run", "--no-fit", *options.split()]
    assert re.search("must be|range x>=1", refusal("pretrain", "bert_base", "data", *words)), "a launch looks first"
    by = "--optimizer fused_adam --lr-scheduler linear_warmup"
    command = f"{tmp_path} --task full_sentences_masked_lm {by} {TINY} {options}".split()
    with pytest.raises(UserError, match=f"^{re.escape(message)}$"):
        options_of_fairseq.parse_args_and_arch(options_of_fairseq.get_training_parser(), command)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("digits", ["²", "①", "٣", "1" * 5000, "-1", "1.0", "1 1", "1_0", "0x1"])
def test_a_whole_number_is_ascii_digits_and_no_more(digits, tmp_path):
    """``str.isdigit`` takes the first two for digits, and ``int`` all but these."""
    assert whole_number(digits) is None
    assert whole_number("0123") == 123
    (tmp_path / f"shard{digits[:100]}").mkdir()
    assert data_folders(str(tmp_path)) == [str(tmp_path)] or digits.startswith("111")
    places = {
        "own columns": lambda: columns_of(Path("a.tsv"), ["a", "b"], (digits,), "2"),
        "epochs": lambda: choose_epochs(None, ["cola"], 3, [f"cola={digits}"]),
        "product": lambda: bench_settings._product(f"{digits}x64"),
        "GPUs": lambda: read_gpus(digits),
        "master": lambda: Launch(master=f"host:{digits}"),
        "listed updates": lambda: listed_updates(digits),
        "alignment": lambda: parse_alignment([digits], plan("s"), plan("s")),
        "longformer": lambda: longformer_phases("s[window=4]f", {"max_update": digits}),
        "longformer's rate": lambda: longformer_phases("s[window=4]f", {"lr": digits + "²"}),
        "size of a model": lambda: read_models({"a": f"sf; ffn={digits}"}, find_task("masked-lm"), {}),
    }
    for name, read in places.items():
        with pytest.raises(UserError):
            read()
            pytest.fail(name)


def below_a_file(folder: Path) -> Path:
    (folder / "file").touch()
    return folder / "file" / "out"


def below_a_link_to_nothing(folder: Path) -> Path:
    (folder / "link").symlink_to("nothing")
    return folder / "link" / "out"


def below_a_link_to_itself(folder: Path) -> Path:
    (folder / "loop").symlink_to("loop")
    return folder / "loop" / "out"


UNWRITABLE = {
    "below a file": below_a_file,
    "below a link to nothing": below_a_link_to_nothing,
    "below a link to itself": below_a_link_to_itself,
    "in /proc": lambda folder: Path("/proc/lazyformer/out"),
    "a name of 300 characters": lambda folder: folder / ("x" * 300),
    "a name that is too long with what is added to it": lambda folder: folder / ("x" * 250),
    "a path of 5,000 characters": lambda folder: folder.joinpath(*["x" * 200] * 25),
}
# Every command that makes something, with what must be there, by name; OUT is what cannot be written.
MAKERS = (
    "bench models --output OUT",
    "compare run . OUT --task masked-lm",
    "compare report . --output OUT",
    "corpus . OUT",
    "curves . --output OUT",
    "demo --output OUT",
    "evaluate --ngram . --data . --output OUT",
    "report . --output OUT",
    "export . OUT",
    "finetune . --data . --output OUT",
    "import . OUT",
    "lm prepare wikitext . OUT",
    "lm prepare-images . OUT",
    "lm evaluate checkpoint.pt . --json OUT",
    "lm sample checkpoint.pt . --output OUT",
    "lm probe checkpoint.pt . OUT",
    "pattern show sf --output OUT",
    "predict . --output OUT",
    "pretrain bert_base . --save-dir OUT",
    "reproduce lazyformer . OUT",
    "reproduce par . OUT",
    "search run . OUT --task masked-lm --arch bert_tiny",
    "search compress checkpoint.pt . OUT",
)


@pytest.mark.parametrize("obstacle", UNWRITABLE)
@pytest.mark.parametrize("words", MAKERS)
def test_what_cannot_be_written_is_said_at_the_door(words, obstacle, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("checkpoint.pt", "manifest.json"):
        (tmp_path / name).touch()
    out = UNWRITABLE[obstacle](tmp_path)
    if words.startswith("curves"):
        out = out.with_name(out.name + ".png")
    before = sorted(tmp_path.iterdir())
    said = refusal(*(str(out) if word == "OUT" else word for word in words.split()))
    assert "cannot be written" in said and "choose another path" in said, said
    assert sorted(tmp_path.iterdir()) == before


def test_every_command_that_makes_something_is_looked_at():
    def commands(group: click.Group, name: str = "") -> Iterator[str]:
        for word, command in group.commands.items():
            if isinstance(command, click.Group):
                yield from commands(command, f"{name}{word} ")
            elif {param.name for param in command.params} & {*OUTPUTS}:
                assert isinstance(command, Command) or word in ("plan",), f"{word}: click's own class looks at nothing"
                yield f"{name}{word}"

    made = {" ".join(words.split()[:2]) for words in MAKERS}
    assert [name for name in commands(main) if name != "plan" and not any(one.startswith(name) for one in made)] == []


def test_a_file_does_not_take_the_place_of_a_folder(tmp_path):
    with pytest.raises(UserError, match=" is a folder, but a file must be written there"):
        write_text(tmp_path, "text")


HUGE = "1" + "0" * 20


NONSENSE = {
    "bench": (f"tokens {HUGE}", f"lengths {HUGE[:12]}", f"rounds {HUGE}", "rounds 1", "budget nan"),
    "compare data out --task masked-lm": (
        "lr nan",
        "dropout -1",
        f"seeds {HUGE}",
        f"random-orders {HUGE}",
        "time-fractions nan",
    ),
    "search data out --task masked-lm --arch bert_tiny": (
        "seed -1",
        f"sublayers {HUGE[:12]}",
        "weights-lr nan",
        "budgets 0",
        f"max-updates {HUGE}",
    ),
    "finetune ck --data glue --output out": ("lr -1", "warmup-ratio nan", f"seeds {HUGE}", f"max-length {HUGE}"),
    "corpus raw out": ("seed -1", f"shards {HUGE}", "valid-share nan"),
    "plan bert_base": (f"tokens-per-sample {HUGE}", f"sequences-per-update {HUGE}", "teraflops nan"),
}


@pytest.mark.parametrize("words", [f"{command} --{each}" for command, options in NONSENSE.items() for each in options])
def test_no_command_takes_nonsense(words):
    assert re.search("Invalid value for|: must be ", refusal(*words.split()))


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere torch's data workers need no such sockets")
@pytest.mark.parametrize(("length", "fits"), [(75, True), (76, False)])
def test_a_folder_of_temporary_files_too_long_for_the_sockets_of_data_workers(length, fits, monkeypatch):
    with TemporaryDirectory(dir="/tmp") as parent:
        folder = os.path.join(parent, "x" * (length - len(parent) - 1))
        of_multiprocessing = os.path.join(folder, "pymp-12345678")  # the name that it makes there
        os.makedirs(of_multiprocessing)
        monkeypatch.setattr("tempfile.tempdir", folder)
        monkeypatch.setitem(multiprocessing.current_process()._config, "tempdir", of_multiprocessing)
        with nullcontext() if fits else pytest.raises(OSError, match="path too long"):
            Listener(family="AF_UNIX").close()  # what a worker opens, as its default there
        refuse_long_temporary_folder(0)
        refused = pytest.raises(UserError, match=f"^--num-workers 2: .* {folder} has 76 characters, but the limit is")
        with nullcontext() if fits else refused:
            refuse_long_temporary_folder(2)


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


def test_a_setting_that_hydra_does_not_know_is_said_in_a_line():
    with (
        pytest.raises(ConfigCompositionException) as caught,
        initialize_config_dir(str(CONFIGS / "pretraining"), version_base="1.1"),
    ):
        compose("bert_base", overrides=["optimization.max_updat=2"])
    said = str(find_user_error(caught.value))
    assert said == "Could not override 'optimization.max_updat'; did you mean max_update?"


def test_a_full_disk_is_said_in_a_line(capsys):
    error = RuntimeError("cannot save")
    error.__cause__ = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "out/file")
    printing_user_errors(None)(RuntimeError, error, None)
    expected = "error: out/file: cannot be written (No space left on device); free up disk space and run the same "
    expected += "command again"
    assert capsys.readouterr().err == f"{expected}\n"


def test_what_the_file_system_refuses_is_said_in_a_line_but_not_what_was_only_its_consequence(tmp_path):
    (tmp_path / "file").touch()
    (tmp_path / "folder" / "inner").mkdir(parents=True)
    with pytest.raises(NotADirectoryError) as not_a_folder:
        (tmp_path / "file" / "inner").open()
    with pytest.raises(IsADirectoryError) as renamed:
        os.replace(tmp_path / "file", tmp_path / "folder")
    for caught, path in ((not_a_folder, tmp_path / "file" / "inner"), (renamed, tmp_path / "folder")):
        said = str(find_user_error(caught.value))
        assert said.startswith(f"{path}: ") and said.endswith("run the same command again")
    ours = KeyError("a mistake of this program")
    ours.__context__ = not_a_folder.value
    assert find_user_error(ours) is None


def test_a_model_without_its_tokenizer_reads_no_text(tmp_path):
    (tmp_path / "checkpoint_last.pt").touch()
    with pytest.raises(UserError, match=r"tokenizer: no such folder; raw text requires the tokenizer that"):
        LazyFormerModel.from_pretrained(tmp_path)


def test_a_corpus_for_a_task_that_knows_no_shards(tmp_path):
    (tmp_path / "shard0").mkdir()
    with pytest.raises(UserError, match=r"is a sharded corpus; for --task masked_lm use \S+/shard0$"):
        config_of(tmp_path, "--task", "masked_lm", "--arch", "transformer_lm")


@pytest.mark.usefixtures("interruptible")
def test_ctrl_c_saves_and_names_what_is_there(data_folder, tmp_path, warm_python, capsys):
    printing_user_errors(None)(KeyboardInterrupt, KeyboardInterrupt(), None)
    said = capsys.readouterr().err
    assert said.startswith("interrupted; ") and "checkpoint" not in said, "nothing is there"
    more = "--tokens-per-sample 32 --max-update 100000 --log-interval 1 --log-format simple".split()
    command = command_line(warm_python / "python", data_folder, tmp_path, *more)
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as run:
        for line in run.stdout:
            if '"num_updates": "3"' in line or "num_updates=3" in line:
                run.send_signal(signal.SIGINT)
                break
        output, errors = run.communicate()
    assert run.returncode == 130
    assert "press again to exit immediately" in errors and "Traceback" not in errors
    updates, path = re.search(r"SIGINT: saved at (\d+) updates; .* code 130, .* resumes from (\S+)", output).groups()
    assert torch.load(path)["optimizer_history"][-1]["num_updates"] == int(updates) >= 3


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ("--sublayer-pattern lf", "character 1: this l has no s below it"),
        ("--encoder-attention-heads 5", "an embedding dimension of 32 is not divisible by 5 attention heads"),
        ("--tokens-per-sample 2", "--tokens-per-sample 2: must be at least 3"),
        ("--tokens-per-sample 64 --max-positions 32", "examples have more than 32 tokens; the longest has 64"),
        ("--max-tokens 20", "examples have more than 20 tokens"),  # else it would train on what is left
        ("--mask-prob 0", "--mask-prob 0.0 must be above 0"),
        ("--relative-position-buckets 7", "7 buckets"),
        ("--adam-betas 5", "--adam-betas"),
        ("--arch lazyformer_m2x6s", "--arch lazyformer_m2x6s: unknown name; did you mean lazyformer_m2x6_s,"),
        ("--criterion=masked_accuracy", "did you mean masked_lm_accuracy?"),
        ("--warmup-rati 0.1", "unknown option --warmup-rati; did you mean --warmup-ratio?"),
        ("--seed one", "argument --seed: invalid int value: 'one'"),
        ("--user-dir /nowhere/lazyformer_fairseq", "--user-dir /nowhere/lazyformer_fairseq: no such folder"),
        ("--num-workers 1", "--num-workers 1: "),  # which the folder of temporary files is too long for
        ("--user-dir copy/lazyformer_fairseq", f"is already loaded from a different folder; use {ROOT}/lazyformer_f"),
    ],
)
def test_impossible_options(data_folder, tmp_path, fairseq_train, monkeypatch, options, words):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(options_of_reliability, "get_temp_dir", lambda: "/" + 100 * "x")
    (tmp_path / "copy" / "lazyformer_fairseq").mkdir(parents=True)
    assert words in message_of(fairseq_train, data_folder, f"{TINY} {options}", tmp_path / "run")


@pytest.mark.parametrize(
    ("task", "criterion"),
    [
        ("full_sentences_masked_lm --tokens-per-sample 32", "masked_lm_accuracy"),
        pytest.param("inputs_masked_lm --tokens-per-sample 32", "masked_lm_accuracy", marks=pytest.mark.slow),
        pytest.param("stream_language_modeling", "causal_lm", marks=pytest.mark.slow),
        pytest.param("glue", "glue", marks=pytest.mark.slow),
    ],
)
def test_what_is_missing_is_named(data_folder, tmp_path, fairseq_train, task, criterion):
    arch = "--arch transformer_xl_tiny" if criterion == "causal_lm" else "--arch bert_tiny"
    said = message_of(fairseq_train, data_folder, f"{arch} --batch-size 4", tmp_path, task=task)
    assert said.startswith(f"--criterion: use {criterion}; fairseq's default, cross_entropy, cannot train --task ")
    said = message_of(fairseq_train, data_folder, f"{arch} --criterion {criterion}", tmp_path, task=task)
    assert said == "--batch-size: set the number of sequences per batch and process, or set --max-tokens"


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("--path nowhere.pt", "--batch-size: set"),
        ("--path nowhere.pt --batch-size 2", "--path nowhere.pt: no such checkpoint"),
        ("--max-tokens 64", "--path: pass"),
        ("--lr 1", "unknown option --lr"),
    ],
)
def test_fairseq_validate_says_what_it_lacks(tmp_path, given, message):
    words = f"{tmp_path} --task full_sentences_masked_lm {given}".split()
    assert message_of(train_here, *words, command=validate).startswith(message)


@pytest.mark.parametrize("option", ["--tensorboard-logdir logs", "--wandb-project mine"])
def test_a_log_that_nobody_would_write(data_folder, tmp_path, fairseq_train, monkeypatch, option):
    name = option.split()[0].removeprefix("--").replace("-", "_")
    (package, *_), what = LOGS_NEED[name]
    requirements = (ROOT / "setup.py").read_text().partition('"trackers": [')[2].partition("]")[0]
    assert f'"{package}>=' in requirements and "[trackers]" in what, "an extra has it"
    monkeypatch.setitem(LOGS_NEED, name, (("not_there", "nor_this"), "this"))
    said = message_of(fairseq_train, data_folder, f"{TINY} {option}", tmp_path)
    lacks = "not_there or nor_this is not installed"
    assert said == f"{option}: nothing would be written, because {lacks}; run pip install this"


def test_what_would_fail_after_the_start_is_refused_before(data_folder, tmp_path, fairseq_train):
    (tmp_path / "file").touch()
    for option, words in (
        (f"--log-file {tmp_path}/file/run.log", f"--log-file {tmp_path}/file/run.log: cannot be written"),
        (f"--tensorboard-logdir {tmp_path}/file/logs", f"--tensorboard-logdir {tmp_path}/file/logs: cannot be written"),
        ("--lr-scheduler inverse_sqrt --warmup-updates 0", "--warmup-updates 0: --lr-scheduler inverse_sqrt requires"),
    ):
        assert message_of(fairseq_train, data_folder, f"{TINY} {option}", tmp_path / "run").startswith(words)


@pytest.mark.slow
def test_missing_and_empty_data(data_folder, tmp_path, fairseq_train):
    missing = tmp_path / "missing"
    assert f"{missing} is not a folder" in message_of(fairseq_train, missing, TINY, tmp_path / "run")
    assert f"{missing} is not a folder" in message_of(fairseq_train, f"{data_folder}:{missing}", TINY, tmp_path / "run")

    missing.mkdir()
    assert "dict.txt: cannot be read (No such file" in message_of(fairseq_train, missing, TINY, tmp_path / "run")
    (missing / "dict.txt").write_text("a 1\nb\n")
    assert "line 2: the line is malformed" in message_of(fairseq_train, missing, TINY, tmp_path / "run")
    (missing / "dict.txt").write_bytes((data_folder / "dict.txt").read_bytes())
    assert "valid.bin" in message_of(fairseq_train, missing, TINY, tmp_path / "run")


def test_a_checkpoint_of_another_arch(data_folder, tmp_path, fairseq_train):
    """Resuming with another model names what does not fit, and leaves the checkpoint as it is."""
    fairseq_train(data_folder, TINY, tmp_path)
    kept = (tmp_path / "checkpoint_last.pt").read_bytes()
    for options, words in (
        ("--sublayer-pattern M3", "the checkpoint has no weight encoder.sentence_encoder.sublayers.4"),
        ("--sublayer-pattern sf", "sublayers.2.inner.v_proj.weight that this model lacks"),
        ("--encoder-ffn-embed-dim 48", "(64, 32), but the model's has (48, 32)"),
    ):
        message = message_of(fairseq_train, data_folder, f"{TINY} {options} --max-update 2", tmp_path)
        assert words in message and "--arch" in message
    assert (tmp_path / "checkpoint_last.pt").read_bytes() == kept
