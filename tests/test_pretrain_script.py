"""`lazyformer pretrain`, and scripts/pretrain.sh: what it would run, what it cannot run, and runs on this machine."""

import io
import os
import re
import shlex
import subprocess
import sys
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from unittest import mock

import pytest
from fairseq import options
from fairseq.dataclass.utils import convert_namespace_to_omegaconf
from helpers import ROOT
from omegaconf import DictConfig, OmegaConf

from lazyformer_fairseq.cli import main
from lazyformer_fairseq.devices import nvidia_smi
from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.fairseq_plugin.reliability.options import listed_updates, settle_update_size
from lazyformer_fairseq.patterns.architectures import ARCHITECTURES
from lazyformer_fairseq.pretraining.launch import CONFIGS

SCRIPT = ROOT / "scripts" / "pretrain.sh"
ASK = nvidia_smi._ask.__wrapped__  # it keeps its answers else


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """A folder of its own to be in, and no GPU to be seen."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    path = [str(tmp_path / "bin"), str(Path(sys.executable).parent), os.environ["PATH"]]
    monkeypatch.setenv("PATH", os.pathsep.join(path))
    with_gpus(tmp_path, "exit 9")
    monkeypatch.setattr(nvidia_smi, "_ask", lambda *_: [])  # none for what this process's torch trains


@pytest.fixture
def script(machine):
    """``script("bert_base", "data", ...)``: runs scripts/pretrain.sh."""

    def run(*arguments: object) -> subprocess.CompletedProcess:
        return subprocess.run(["bash", str(SCRIPT), *map(str, arguments)], capture_output=True, text=True)

    return run


@pytest.fixture
def pretrain(machine):
    """``pretrain("bert_base", "data", ...)``: the command in this process, which takes no second to start."""

    def run(*arguments: object) -> subprocess.CompletedProcess:
        output, errors = io.StringIO(), io.StringIO()
        with mock.patch.object(nvidia_smi, "_ask", ASK), redirect_stdout(output), redirect_stderr(errors):
            try:
                main(["pretrain", *map(str, arguments)], prog_name="lazyformer")
            except SystemExit as end:
                code = end.code or 0
            except UserError as error:
                print(f"error: {error}", file=errors)
                code = 1
        return subprocess.CompletedProcess(["lazyformer"], code, output.getvalue(), errors.getvalue())

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


def dry_run(pretrain, *arguments: object) -> tuple[list[str], list[str]]:
    """The launcher with its options, and the arguments of fairseq-train or fairseq-hydra-train."""
    run = pretrain(*arguments, "--dry-run", "--no-fit")
    assert run.returncode == 0, run.stderr
    command = shlex.split(run.stdout)
    at = next(
        at
        for at, word in enumerate(command)
        if word in ("fairseq_cli.train", "lazyformer_fairseq.pretraining.hydra_train")
    )
    return command[:at], command[at + 1 :]


def parsed(arguments: list[str]) -> DictConfig:
    """What fairseq-train makes of its arguments."""
    cfg = convert_namespace_to_omegaconf(options.parse_args_and_arch(options.get_training_parser(), arguments))
    settle_update_size(cfg)
    return cfg


def test_it_is_table_5(pretrain, script):
    _, arguments = dry_run(script, "lazyformer_m2x6_s", "some data")
    assert dry_run(pretrain, "lazyformer_m2x6_s", "some data")[1] == arguments, "the script is the command"
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
        ("--gpus 2 --batch-size 32", 2, 32, 4),  # fairseq-train's own name for --sequences-per-gpu
        ("--gpus 2 --max-sentences=32", 2, 32, 4),
    ],
)
def test_an_update_has_256_sequences(pretrain, tmp_path, arguments, world, batch, update_freq):
    with_gpus(tmp_path, eight_gpus())
    launcher, train = dry_run(pretrain, "bert_base", "data", *arguments.split())
    cfg = parsed(train)
    assert cfg.distributed_training.distributed_world_size == world
    assert (cfg.dataset.batch_size, cfg.optimization.update_freq) == (batch, [update_freq])
    assert ("lazyformer_fairseq.fairseq_plugin.reliability.torchrun" in launcher) == (world > 1)
    if world == 16:
        assert "--nnodes 2 --nproc-per-node 8 " in " ".join(launcher)
        assert "--rdzv-endpoint other:1234 --rdzv-id lazyformer --rdzv-conf is_host=0 " in " ".join(launcher)


@pytest.mark.parametrize(
    ("arguments", "restarts"),
    [("--gpus 2", "3"), ("--gpus 2 --max-restarts 7", "7"), ("--gpus 1 --max-restarts 2", "2"), ("--gpus 1", None)],
)
def test_how_often_it_starts_again(pretrain, arguments, restarts):
    launcher, _ = dry_run(pretrain, "bert_base", "data", *arguments.split())
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
    _, train = dry_run(pretrain, "bert_base", "data", *option.split())
    common = parsed(train).common
    assert (common.cpu, common.fp16, common.bf16) == (False, fp16, bf16)


def test_gpus_that_torch_will_not_see_do_not_count(pretrain, tmp_path, monkeypatch):
    with_gpus(tmp_path, eight_gpus())
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,5")
    assert parsed(dry_run(pretrain, "bert_base", "data")[1]).optimization.update_freq == [8]
    assert "--gpus 4: this node has 2" in pretrain("bert_base", "data", "--gpus", 4).stderr
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert parsed(dry_run(pretrain, "bert_base", "data")[1]).common.cpu


def test_options_of_fairseq_train_win(pretrain):
    own = [*"--lr 3e-4 --max-update 9 --dropout 0 --save-dir".split(), "a b", "--sublayer-pattern", "(sff)x5 (f)x9"]
    cfg = parsed(dry_run(pretrain, "bert_base", "data", *own)[1])
    assert (cfg.optimization.lr, cfg.optimization.max_update, cfg.model.dropout) == ([3e-4], 9, 0.0)
    assert (cfg.model.sublayer_pattern, cfg.checkpoint.save_dir) == ("(sff)x5 (f)x9", "a b")


def test_a_yaml_file_gets_the_sizes_of_this_machine(pretrain, tmp_path):
    launcher, settings = dry_run(pretrain, "bert_base.yaml", "my 'data'", "--gpus", 2, "optimization.max_update=9")
    assert "lazyformer_fairseq.fairseq_plugin.reliability.torchrun" in launcher
    assert settings[:4] == ["--config-dir", str(CONFIGS / "pretraining"), "--config-name", "bert_base"]
    assert r"task.data='my \'data\''" in settings and settings[-1] == "optimization.max_update=9"
    assert {"distributed_training.distributed_world_size=2", "common.cpu=true", "common.fp16=false"} <= set(settings)
    assert not any("update_freq" in word or "batch_size" in word for word in settings)
    with_gpus(tmp_path, eight_gpus())
    _, settings = dry_run(pretrain, "bert_base.yaml", "data", "--batch-size", 8)
    assert {"dataset.batch_size=8", "distributed_training.distributed_world_size=8", "common.bf16=true"} <= set(
        settings
    )


@pytest.mark.parametrize("name", ["pretrain.sh", "continue_pretraining.sh"])
def test_help(machine, name):
    run = subprocess.run(["bash", str(ROOT / "scripts" / name), "--help"], capture_output=True, text=True)
    assert (run.returncode, run.stderr) == (0, "") and "pretrain [OPTIONS] ARCH DATA" in run.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("bert_base", "Missing argument 'DATA'"),
        ("bert_base data --gpus", "'--gpus' requires an argument"),
        ("bert_base data --gpus two", "'two' is not a valid integer"),
        ("bert_base data --gpus 0", "0 is not in the range x>=1"),
        ("bert_base data --sequences-per-gpu 0", "0 is not in the range x>=1"),
        (
            "bert_base data --gpus 3",
            "error: 256 sequences an update do not divide among 3 processes; give --sequences-per",
        ),
        ("bert_base data --master node0", "error: --master node0: give HOST:PORT"),
        ("bert_base data --node-rank 1", "error: --node-rank 1: --nodes 1 are numbered from 0 to 0"),
        ("bert_bas data", "error: bert_bas: no such arch or folder; did you mean bert_base, "),
        ("bert_bse.yaml data", "did you mean bert_base.yaml"),
        ("bert_base nowhere", "error: nowhere is no folder"),
        ("bert_base data --update-freq 4", "error: --update-freq: it is worked out; give the size of an update"),
        ("bert_base data --max-tokens=4096", "error: --max-tokens: give --batch-size, in sequences"),
        ("bert_base data --user-dir other", "error: --user-dir: leave it out"),
        ("bert_base data --distributed-world-size 2", "error: --distributed-world-size: give --gpus and --nodes"),
        ("bert_base.yaml . --lr 3", "error: --lr: with a YAML file settings are written as"),
    ],
)
def test_what_cannot_run_is_said(pretrain, tmp_path, arguments, message):
    (tmp_path / "data").mkdir()
    run = pretrain(*arguments.split())
    assert (run.returncode, run.stdout) == (1 if message.startswith("error") or "mean" in message else 2, "")
    assert message in run.stderr


def cfg_of(text: str) -> DictConfig:
    cfg = OmegaConf.create({"task": {"sequences_per_update": 8}, "distributed_training": {"distributed_world_size": 2}})
    cfg.dataset, cfg.optimization = {"batch_size": 4, "max_tokens": None}, {"update_freq": [1]}
    cfg.merge_with_dotlist(text.split())
    return cfg


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ("task.sequences_per_update=9", "--sequences-per-update 9: an update does not divide among 2 processes"),
        ("task.sequences_per_update=0", "--sequences-per-update 0"),
        ("dataset.max_tokens=100", "--max-tokens 100: give --batch-size"),
        ("dataset.batch_size=null", "--batch-size None"),
        ("dataset.batch_size=0", "--batch-size 0"),
        ("optimization.update_freq=[3]", "--update-freq 3: --sequences-per-update 8 works it out"),
    ],
)
def test_sizes_that_contradict_each_other_are_refused(settings, message):
    with pytest.raises(UserError, match=message):
        settle_update_size(cfg_of(settings))


def test_settling_twice_changes_nothing():
    cfg = cfg_of("dataset.batch_size=3")
    settle_update_size(cfg)
    settled = OmegaConf.to_container(cfg)
    assert (cfg.dataset.batch_size, cfg.optimization.update_freq) == (2, [2])
    settle_update_size(cfg)
    assert OmegaConf.to_container(cfg) == settled


@pytest.mark.slow
def test_it_runs_from_another_folder_on_data_with_spaces_in_its_path(script, data_folder, tmp_path):
    data = tmp_path / "my data"
    data.symlink_to(data_folder)
    own = "--max-update 1 --tokens-per-sample 32 --num-workers 0 --disable-validation".split()
    run = script("bert_tiny", "my data", *own, "--sequences-per-update", 4, "--batch-size", 2)
    assert run.returncode == 0, run.stdout[-2000:] + run.stderr[-2000:]
    assert (tmp_path / "checkpoints" / "bert_tiny" / "checkpoint_last.pt").is_file()
    assert (tmp_path / "checkpoints" / "bert_tiny" / "tokenizer").is_dir()
    assert "an update is 4 sequences: 1 processes x 2 sequences x update-freq 2" in run.stdout
    assert re.search(r"\bbsz 4 ", run.stdout), "what was said is what was trained on"


@pytest.mark.slow
@pytest.mark.parametrize("processes", [1, 2])
def test_a_yaml_file_trains_on_any_number_of_processes(script, data_folder, tmp_path, processes):
    sizes = "model.encoder_embed_dim=32 model.encoder_attention_heads=2 model.encoder_ffn_embed_dim=64"
    settings = (
        f"optimization.max_update=1 task.tokens_per_sample=32 dataset.num_workers=0 checkpoint.save_dir=run {sizes}"
    )
    size = ("--gpus", processes, "--sequences-per-update", 8, "--batch-size", 2)
    run = script("bert_base.yaml", data_folder, *size, *settings.split())
    assert run.returncode == 0, run.stdout[-2000:] + run.stderr[-2000:]
    assert f"an update is 8 sequences: {processes} processes x 2 sequences" in run.stdout
    assert re.search(r"\bbsz 8 ", run.stdout)
    assert (tmp_path / "run" / "checkpoint_last.pt").is_file()
