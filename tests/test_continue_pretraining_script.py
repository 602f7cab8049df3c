"""`lazyformer continue` by scripts/continue_pretraining.sh: what it would run, what it refuses, runs that resume."""

import json
import os
import shlex
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from unittest import mock

import pytest
import torch
from fairseq import options
from fairseq.dataclass.utils import convert_namespace_to_omegaconf
from fairseq.trainer import Trainer
from fairseq_cli.train import cli_main
from helpers import ROOT

from lazyformer_fairseq.fairseq_plugin.models.export import export
from lazyformer_fairseq.fairseq_plugin.models.lazyformer import LazyFormerModel
from lazyformer_fairseq.fairseq_plugin.models.safetensors_files import read_weights

SCRIPT = ROOT / "scripts" / "continue_pretraining.sh"
TINY = "--encoder-embed-dim 16 --encoder-attention-heads 2 --encoder-ffn-embed-dim 32 --max-positions 32 --dropout 0"


@pytest.fixture
def script(tmp_path, monkeypatch):
    """``script("warm", "data", ...)``: runs it, in a folder of its own and with no GPU to be seen."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setenv("PATH", os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]))

    def run(*arguments: object) -> subprocess.CompletedProcess:
        command = ["bash", str(SCRIPT), *map(str, arguments)]
        return subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)

    return run


@pytest.fixture(scope="module")
def folders(data_folder, tmp_path_factory) -> Path:
    """`original`: checkpoints of a tiny BERT; `warm`: as `lazyformer import` makes another pattern of one.

    (The weights are fresh: whose they are makes no difference to a launch.)
    """
    folder = tmp_path_factory.mktemp("warm start")
    for name, pattern in (("original", "(sf)x4"), ("new", "M2x2")):
        train(data_folder, folder / name, "--criterion", "masked_lm_accuracy", "--arch", "bert_base",
              "--sublayer-pattern", pattern, *TINY.split(), "--max-update", "1")  # fmt: skip
    export(folder / "new", folder / "warm")
    sublayers = [{"from": number, "head_order": None} for number in range(8)]
    record = {"format": "lazyformer warm start", "format_version": 1, "old_pattern": "(sf)x4", "new_pattern": "M2x2"}
    (folder / "warm" / "warm_start.json").write_text(json.dumps({**record, "sublayers": sublayers}))
    return folder


def train(data: Path, save_dir: Path, *given: str) -> dict:
    """fairseq-train in this process; returns the last checkpoint."""
    command = f"""
        --user-dir {ROOT / "lazyformer_fairseq"} --task full_sentences_masked_lm --tokens-per-sample 32 --cpu --seed 1
        --optimizer fused_adam --lr-scheduler linear_warmup --lr 1e-3 --batch-size 4 --num-workers 0
        --log-format simple --no-epoch-checkpoints --disable-validation"""
    with mock.patch("sys.argv", ["fairseq-train", str(data), *command.split(), "--save-dir", str(save_dir), *given]):
        cli_main()
    return torch.load(save_dir / "checkpoint_last.pt", weights_only=True)


def arguments_of(run: subprocess.CompletedProcess) -> list[str]:
    """Those of fairseq-train, of a dry run."""
    assert run.returncode == 0, run.stderr
    command = shlex.split(run.stdout)
    return command[command.index("fairseq_cli.train") + 1 :]


def test_it_is_a_tenth_of_pretraining_on_the_model_of_the_folder(script, folders):
    originals = ("--distill", folders / "original")
    run = script(folders / "warm", "some data", *originals, "--lr", "5e-5", "--dry-run", "--no-fit")
    arguments = arguments_of(run)
    cfg = convert_namespace_to_omegaconf(options.parse_args_and_arch(options.get_training_parser(), arguments))
    warm = folders / "warm"
    assert (cfg.task.data, cfg.task.tokens_per_sample) == ("some data", 32)
    assert (cfg.model.sublayer_pattern, cfg.model.encoder_embed_dim, cfg.model.dropout) == ("M2x2", 16, 0.0)
    assert (cfg.criterion._name, cfg.criterion.warm_start) == ("continued_masked_lm", str(warm / "warm_start.json"))
    assert cfg.criterion.distill == str(folders / "original")
    assert cfg.checkpoint.finetune_from_model == str(warm / "model.safetensors")
    assert (cfg.optimization.max_update, cfg.optimization.lr) == (100_000, [5e-5])
    assert cfg.checkpoint.save_dir == "checkpoints/warm"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("", "Missing argument 'WARM'"),
        ("warm", "Missing argument 'DATA'"),
        ("nowhere data", "error: nowhere/model.safetensors: no such file or folder"),
        ("warm nowhere", "error: nowhere is no folder"),
        ("warm data --distill nowhere", "error: nowhere: no such file or folder"),
        ("warm data --update-freq 4", "error: --update-freq: it is worked out"),
        ("warm data --gpus 3", "error: 256 sequences an update do not divide among 3 processes"),
    ],
)
def test_what_cannot_run_is_said(script, folders, tmp_path, arguments, message):
    (tmp_path / "data").mkdir()
    (tmp_path / "warm").symlink_to(folders / "warm")
    run = script(*arguments.split())
    assert run.returncode in (1, 2) and run.stdout == "" and message in run.stderr
    assert "Traceback" not in run.stderr


def test_help(script):
    run = script("--help")
    assert (run.returncode, run.stderr) == (0, "") and "continue [OPTIONS] WARM DATA" in run.stdout


@pytest.mark.slow
def test_a_run_that_stopped_ends_with_the_same_bits(script, folders, data_folder, tmp_path):
    """The script's own words, in this process: its runs must be alike to the bit, stopped in the middle or not."""
    originals = ("--distill", folders / "original")
    small = "--sequences-per-update 4 --batch-size 4 --max-update 6 --num-workers 0 --disable-validation --lr 1e-2"
    run = script(folders / "warm", data_folder, *originals, *small.split(), "--dropout", "0.1", "--dry-run", "--no-fit")
    words = arguments_of(run)[1:]
    at_once = train_as(data_folder, words, tmp_path / "at once")
    train_as(data_folder, [*words, "--save-interval-updates", "2", "--stop-min-lr", "-1"], tmp_path / "stopped", stop=2)
    resumed = train_as(data_folder, words, tmp_path / "stopped")
    assert resumed["optimizer_history"][-1]["num_updates"] == 6
    for name, weight in at_once["model"].items():
        assert torch.equal(weight, resumed["model"][name]), name
    fresh = read_weights(folders / "warm" / "model.safetensors")[0]
    assert list(at_once["model"]) == list(torch.load(folders / "new" / "checkpoint_last.pt")["model"])
    assert not torch.equal(at_once["model"][V_PROJ], fresh[V_PROJ])  # a plain model, and it has learned
    LazyFormerModel.from_pretrained(tmp_path / "stopped").fill_mask("the <mask> is here")


V_PROJ = "encoder.sentence_encoder.sublayers.2.inner.v_proj.weight"


def train_as(data: Path, words: list[str], save_dir: Path, stop: int = 0) -> dict:
    """fairseq-train by a launch's words; with `stop`, it ends as SIGTERM ends it, after so many updates."""
    words = [*words, "--save-dir", str(save_dir)]
    ending = mock.patch.object(Trainer, "train_step", stopping(stop)) if stop else nullcontext()
    with mock.patch("sys.argv", ["fairseq-train", str(data), *words]), ending:
        if stop:
            with pytest.raises(KeyboardInterrupt):
                cli_main()
        else:
            cli_main()
    return torch.load(save_dir / "checkpoint_last.pt", weights_only=True)


def stopping(updates: int):
    train_step = Trainer.train_step

    def step(self, *args, **kwargs):
        if self.get_num_updates() == updates:
            raise KeyboardInterrupt
        return train_step(self, *args, **kwargs)

    return step
