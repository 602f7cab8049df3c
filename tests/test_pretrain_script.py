"""scripts/pretrain.sh: the command that it would run, and what it says of what it cannot run."""

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from fairseq import options
from fairseq.dataclass.utils import convert_namespace_to_omegaconf
from helpers import ROOT
from omegaconf import DictConfig

from lazyformer_fairseq.patterns.architectures import ARCHITECTURES
from lazyformer_fairseq.reliability.options import listed_updates

SCRIPT = ROOT / "scripts" / "pretrain.sh"


@pytest.fixture
def pretrain(tmp_path, monkeypatch):
    """``pretrain("bert_base", "data", ...)``: runs the script, in a folder of its own and with no GPU to be seen."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    path = [str(tmp_path / "bin"), str(Path(sys.executable).parent), os.environ["PATH"]]
    monkeypatch.setenv("PATH", os.pathsep.join(path))
    with_gpus(tmp_path, "exit 9")

    def run(*arguments: object) -> subprocess.CompletedProcess:
        command = ["bash", str(SCRIPT), *map(str, arguments)]
        return subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)

    return run


def with_gpus(folder: Path, script: str) -> None:
    """Puts an nvidia-smi of ours first on the PATH."""
    fake = folder / "bin" / "nvidia-smi"
    fake.parent.mkdir(exist_ok=True)
    fake.write_text(f"#!/usr/bin/env bash\n{script}\n")
    fake.chmod(0o755)


def eight_gpus(capabilities: str = "echo 9.0") -> str:
    """Its script; `capabilities` is what it does when asked for them."""
    lists = "for n in {0..7}; do echo GPU $n: NVIDIA; echo '  MIG 1g.5gb'; done"
    return f"if [[ $1 == -L ]]; then {lists}; else {capabilities}; fi"


def dry_run(pretrain, *arguments: object) -> tuple[list[str], list[str], str]:
    """The launcher with its options, fairseq-train's arguments, and what the script said beside."""
    run = pretrain(*arguments, "--dry-run")
    assert run.returncode == 0, run.stderr
    command = shlex.split(run.stdout)
    at = command.index("fairseq_cli.train")
    return command[:at], command[at + 1 :], run.stderr


def parsed(arguments: list[str]) -> DictConfig:
    """What fairseq-train makes of its arguments."""
    return convert_namespace_to_omegaconf(options.parse_args_and_arch(options.get_training_parser(), arguments))


def test_it_is_table_5(pretrain):
    _, arguments, _ = dry_run(pretrain, "lazyformer_m2x6_s", "some data")
    cfg = parsed(arguments)
    row = ARCHITECTURES["lazyformer_m2x6_s"].options()
    assert {key: cfg.model[key] for key in row} == row
    assert (cfg.model.dropout, cfg.task.data, cfg.task.tokens_per_sample) == (0.1, "some data", 512)
    assert (cfg.task._name, cfg.criterion._name) == ("full_sentences_masked_lm", "masked_lm_accuracy")
    assert (cfg.optimizer._name, cfg.optimizer.adam_betas, cfg.optimizer.adam_eps) == (
        "fused_adam",
        "(0.9, 0.999)",
        1e-6,
    )
    assert (cfg.optimizer.weight_decay, cfg.optimization.clip_norm) == (0.01, 1.0)
    assert (cfg.lr_scheduler._name, cfg.lr_scheduler.warmup_ratio) == ("linear_warmup", 0.01)
    assert (cfg.optimization.lr, cfg.optimization.max_update) == ([1e-4], 1_000_000)
    assert cfg.dataset.batch_size * cfg.optimization.update_freq[0] == 256
    assert (cfg.checkpoint.save_interval_updates, cfg.checkpoint.keep_interval_updates) == (5_000, 3)
    assert listed_updates(cfg.task.keep_updates_list) == set(range(100_000, 1_000_000, 100_000))  # 500,000: Table 2
    assert cfg.checkpoint.save_dir == "checkpoints/lazyformer_m2x6_s"
    assert (cfg.common.cpu, cfg.common.fp16, cfg.common.bf16) == (True, False, False)


@pytest.mark.parametrize(
    ("arguments", "world", "batch", "update_freq"),
    [
        ("--gpus 1", 1, 16, 16),
        ("--gpus 2", 2, 16, 8),
        ("", 8, 16, 2),
        ("--nodes 2 --node-rank 1 --master other:1234", 16, 16, 1),
        ("--sequences-per-gpu 32", 8, 32, 1),
        ("--sequences-per-gpu 64", 8, 32, 1),  # as many as there are
        ("--gpus 4 --sequences-per-gpu 24", 4, 16, 4),  # the largest that divides 64
        ("--gpus 3 --sequences-per-update 258", 3, 2, 43),
    ],
)
def test_an_update_has_256_sequences(pretrain, tmp_path, arguments, world, batch, update_freq):
    with_gpus(tmp_path, eight_gpus())
    launcher, train, said = dry_run(pretrain, "bert_base", "data", *arguments.split())
    cfg = parsed(train)
    assert cfg.distributed_training.distributed_world_size == world
    assert (cfg.dataset.batch_size, cfg.optimization.update_freq) == (batch, [update_freq])
    assert f"{world} processes x {batch} sequences x update-freq {update_freq}" in said
    assert ("lazyformer_fairseq.reliability.signals.torchrun" in launcher) == (world > 1)
    if world == 16:
        assert "--nnodes 2 --nproc-per-node 8 " in " ".join(launcher)
        assert "--rdzv-endpoint other:1234 --rdzv-id lazyformer --rdzv-conf is_host=0 " in " ".join(launcher)


@pytest.mark.parametrize(
    ("arguments", "restarts"),
    [("--gpus 2", "3"), ("--gpus 2 --max-restarts 7", "7"), ("--gpus 1 --max-restarts 2", "2"), ("--gpus 1", None)],
)
def test_how_often_it_starts_again(pretrain, arguments, restarts):
    launcher, _, _ = dry_run(pretrain, "bert_base", "data", *arguments.split())
    assert (launcher[launcher.index("--max-restarts") + 1] if restarts else None) == restarts
    assert ("--max-restarts" in launcher) == (restarts is not None)


@pytest.mark.parametrize(
    ("capabilities", "option", "fp16", "bf16"),
    [
        ("echo 9.0", "", False, True),
        ("echo 8.6", "", False, True),
        ("echo 9.0; echo 7.0; echo 12.0", "", True, False),  # the lowest decides
        ("echo 10.0; echo 12.0", "", False, True),
        ("echo 'Field \"compute_cap\" is not a valid field to query.'; exit 2", "", True, False),  # an old driver
        ("echo 9.0", "--fp16", True, False),
        ("echo 7.0", "--bf16", False, True),
        ("echo 9.0", "--fp32", False, False),
    ],
)
def test_precision_is_what_the_gpus_have_or_what_is_asked_for(pretrain, tmp_path, capabilities, option, fp16, bf16):
    with_gpus(tmp_path, eight_gpus(capabilities))
    _, train, _ = dry_run(pretrain, "bert_base", "data", *option.split())
    common = parsed(train).common
    assert (common.cpu, common.fp16, common.bf16) == (False, fp16, bf16)


def test_gpus_that_torch_will_not_see_do_not_count(pretrain, tmp_path, monkeypatch):
    with_gpus(tmp_path, eight_gpus())
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,5")
    assert "2 processes x 16 sequences x update-freq 8" in dry_run(pretrain, "bert_base", "data")[2]
    assert "--gpus 4: this node has 2" in pretrain("bert_base", "data", "--gpus", 4).stderr
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert parsed(dry_run(pretrain, "bert_base", "data")[1]).common.cpu


def test_options_of_fairseq_train_win(pretrain):
    own = [
        "--lr",
        "3e-4",
        "--max-update",
        9,
        "--sublayer-pattern",
        "(sff)x5 (f)x9",
        "--save-dir",
        "a b",
        "--dropout",
        0,
    ]
    cfg = parsed(dry_run(pretrain, "bert_base", "data", *own)[1])
    assert (cfg.optimization.lr, cfg.optimization.max_update, cfg.model.dropout) == ([3e-4], 9, 0.0)
    assert (cfg.model.sublayer_pattern, cfg.checkpoint.save_dir) == ("(sff)x5 (f)x9", "a b")


@pytest.mark.parametrize("arguments", [(), ("--help",), ("bert_base", "data", "--help")])
def test_help(pretrain, arguments):
    run = pretrain(*arguments)
    assert (run.returncode, run.stderr) == (0, "")
    assert run.stdout.startswith("usage: scripts/pretrain.sh ARCH DATA")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("bert_base", "give ARCH and DATA first; see scripts/pretrain.sh --help"),
        ("--gpus 2 bert_base data", "give ARCH and DATA first"),
        ("bert_base data --gpus", "--gpus needs a value"),
        ("bert_base data --gpus two", "--gpus two: give a whole number"),
        ("bert_base data --gpus 08", "--gpus 08: give a whole number"),
        ("bert_base data --gpus 0", "at least one process is needed"),
        ("bert_base data --gpus 3", "256 sequences an update do not divide among 3 processes; give --sequences-per"),
        ("bert_base data --max-restarts -1", "--max-restarts -1: give a whole number"),
        ("bert_base data --sequences-per-gpu 0", "--sequences-per-gpu 0: give at least 1"),
        ("bert_base data --master node0", "--master node0: give HOST:PORT"),
        ("bert_base data --node-rank 1", "--node-rank 1: --nodes 1 are numbered from 0 to 0"),
    ],
)
def test_what_cannot_run_is_said(pretrain, arguments, message):
    run = pretrain(*arguments.split())
    assert (run.returncode, run.stdout) == (2, "")
    assert run.stderr.startswith("error: ") and message in run.stderr


def test_it_runs_from_another_folder_on_data_with_spaces_in_its_path(pretrain, data_folder, tmp_path):
    data = tmp_path / "my data"
    data.symlink_to(data_folder)
    own = "--max-update 1 --sequences-per-update 4 --tokens-per-sample 32 --num-workers 0 --disable-validation".split()
    run = pretrain("bert_tiny", "my data", *own)
    assert run.returncode == 0, run.stdout[-2000:] + run.stderr[-2000:]
    assert (tmp_path / "checkpoints" / "bert_tiny" / "checkpoint_last.pt").is_file()
    assert (tmp_path / "checkpoints" / "bert_tiny" / "tokenizer").is_dir()
