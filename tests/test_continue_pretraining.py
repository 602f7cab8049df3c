"""`lazyformer pretrain FOLDER DATA`: what it would run, what it refuses, and that a killed run resumes to the bit."""

import json
import shlex
from pathlib import Path
from unittest import mock

import pytest
import torch
from click.testing import CliRunner
from fairseq import options
from fairseq.dataclass.utils import convert_namespace_to_omegaconf
from fairseq.trainer import Trainer
from fairseq_cli.train import cli_main
from helpers import ROOT

from lazyformer_fairseq.cli import main
from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.fairseq_plugin.models.export import export, read_weights
from lazyformer_fairseq.fairseq_plugin.models.lazyformer import LazyFormerModel

TINY = "--encoder-embed-dim 16 --encoder-attention-heads 2 --encoder-ffn-embed-dim 32 --max-positions 32 --dropout 0"
V_PROJ = "encoder.sentence_encoder.sublayers.2.inner.v_proj.weight"


def train(words: list[str], save_dir: Path, kill_at: int = -1) -> dict:
    """fairseq-train in this process, killed before an update if asked for; returns the last checkpoint."""
    train_step = Trainer.train_step

    def step(trainer, *args, **kwargs):
        if trainer.get_num_updates() == kill_at:
            raise KeyboardInterrupt
        return train_step(trainer, *args, **kwargs)

    with (
        mock.patch("sys.argv", ["fairseq-train", *words, "--save-dir", str(save_dir)]),
        mock.patch.object(Trainer, "train_step", step),
    ):
        try:
            cli_main()
        except KeyboardInterrupt:
            assert kill_at >= 0
    return torch.load(save_dir / "checkpoint_last.pt", weights_only=True)


@pytest.fixture(scope="module")
def folders(data_folder, tmp_path_factory) -> Path:
    """`original`: checkpoints of a tiny BERT; `warm`: as `lazyformer import` makes another pattern of one.

    (The weights are fresh: whose they are makes no difference to a launch.)
    """
    folder = tmp_path_factory.mktemp("warm start")
    command = f"""
        --user-dir {ROOT / "lazyformer_fairseq"} --task full_sentences_masked_lm --tokens-per-sample 32 --cpu --seed 1
        --optimizer fused_adam --lr-scheduler linear_warmup --lr 1e-3 --batch-size 4 --num-workers 0 --max-update 1
        --no-epoch-checkpoints --disable-validation --criterion masked_lm_accuracy --arch bert_base {TINY}"""
    for name, pattern in (("original", "(sf)x4"), ("new", "M2x2")):
        train([str(data_folder), *command.split(), "--sublayer-pattern", pattern], folder / name)
    export(folder / "new", folder / "warm")
    (folder / "warm" / "warm_start.json").write_text(json.dumps({"sublayers": [{"from": 0, "head_order": None}]}))
    return folder


@pytest.fixture
def words_of(monkeypatch, folders):
    """``words_of("data", "--lr", "1")``: the arguments of fairseq-train, without a GPU to be seen."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")

    def dry_run(data: object, *more: str) -> list[str]:
        given = ["pretrain", str(folders / "warm"), str(data), "--distill", str(folders / "original"), *more]
        run = CliRunner().invoke(main, [*given, "--dry-run", "--no-fit"], catch_exceptions=False)
        command = shlex.split(run.stdout)
        return command[command.index("fairseq_cli.train") + 1 :]

    return dry_run


def test_it_is_a_tenth_of_pretraining_on_the_model_of_the_folder(words_of, folders):
    arguments = words_of("some data", "--lr", "5e-5")
    cfg = convert_namespace_to_omegaconf(options.parse_args_and_arch(options.get_training_parser(), arguments))
    assert (cfg.task.data, cfg.task.tokens_per_sample) == ("some data", 32)
    assert (cfg.model.sublayer_pattern, cfg.model.encoder_embed_dim, cfg.model.dropout) == ("M2x2", 16, 0.0)
    assert (cfg.criterion._name, cfg.criterion.distill) == ("continued_masked_lm", str(folders / "original"))
    assert cfg.checkpoint.finetune_from_model == str(folders / "warm" / "model.safetensors")
    assert (cfg.optimization.max_update, cfg.optimization.lr) == (100_000, [5e-5])
    assert (cfg.task.sequences_per_update, cfg.checkpoint.save_dir) == (256, "checkpoints/warm")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("nowhere data", "nowhere: no such arch or folder"),
        ("data data", "data/model.safetensors: no such file or folder"),
        ("warm nowhere", "nowhere is no folder"),
        ("warm data --distill nowhere", "nowhere: no such file or folder"),
        ("bert_base data --distill warm", "--distill: bert_base is no folder of a model"),
        ("warm data --recipe phase1", "--recipe phase1: warm is the folder of a trained model"),
        ("warm data --update-freq 4", "--update-freq: it is worked out"),
        ("warm data --gpus 3", "256 sequences an update do not divide among 3 processes"),
    ],
)
def test_what_cannot_run_is_said(folders, tmp_path, monkeypatch, arguments, message):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data").mkdir()
    (tmp_path / "warm").symlink_to(folders / "warm")
    with pytest.raises(UserError, match=message):
        main(["continue", *arguments.split()], standalone_mode=False)


def test_a_killed_run_ends_with_the_same_bits(words_of, folders, data_folder, tmp_path):
    small = "--sequences-per-update 4 --batch-size 4 --max-update 6 --num-workers 0 --disable-validation --lr 1e-2"
    words = words_of(data_folder, *small.split(), "--dropout", "0.1", "--save-interval-updates", "2")
    at_once = train(words, tmp_path / "at once")
    assert train(words, tmp_path / "killed", kill_at=3)["optimizer_history"][-1]["num_updates"] == 2
    resumed = train(words, tmp_path / "killed")
    assert resumed["optimizer_history"][-1]["num_updates"] == 6
    for name, weight in at_once["model"].items():
        assert torch.equal(weight, resumed["model"][name]), name
    fresh = read_weights(folders / "warm" / "model.safetensors")[0]
    assert list(at_once["model"]) == list(torch.load(folders / "new" / "checkpoint_last.pt")["model"])
    assert not torch.equal(at_once["model"][V_PROJ], fresh[V_PROJ])  # a plain model, and it has learned
    LazyFormerModel.from_pretrained(tmp_path / "killed").fill_mask("the <mask> is here")
