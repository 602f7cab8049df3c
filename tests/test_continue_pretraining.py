"""`lazyformer pretrain FOLDER DATA`: what it would run, what it refuses, and that a killed run resumes to the bit."""

import json
from pathlib import Path

import pytest
import torch
from helpers import assert_equal_state, stopped_at, train_here, train_words, updates_of
from launches import dry_run, parsed

from lazyformer_fairseq.cli import main
from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.fairseq_plugin.models.export import export, read_weights
from lazyformer_fairseq.fairseq_plugin.models.lazyformer import LazyFormerModel

TINY = "--encoder-embed-dim 16 --encoder-attention-heads 2 --encoder-ffn-embed-dim 32 --max-positions 32 --dropout 0"
pytestmark = pytest.mark.usefixtures("without_gpus")
V_PROJ = "encoder.sentence_encoder.sublayers.2.inner.v_proj.weight"


def train(words: list[str], save_dir: Path) -> dict:
    """fairseq-train in this process; returns the last checkpoint."""
    train_here(*words, "--save-dir", save_dir)
    return torch.load(save_dir / "checkpoint_last.pt", weights_only=True)


@pytest.fixture(scope="module")
def folders(data_folder, tmp_path_factory) -> Path:
    """`original`: checkpoints of a tiny BERT; `warm`: as `lazyformer import` makes another pattern of one.

    (The weights are fresh: whose they are makes no difference to a launch.)
    """
    folder = tmp_path_factory.mktemp("warm start")
    options = (
        f"--batch-size 4 --max-update 1 --disable-validation --criterion masked_lm_accuracy --arch bert_base {TINY}"
    )
    for name, pattern in (("original", "(sf)x4"), ("new", "M2x2")):
        train([*train_words(data_folder, options, folder), "--sublayer-pattern", pattern], folder / name)
    export(folder / "new", folder / "warm")
    (folder / "warm" / "warm_start.json").write_text(json.dumps({"sublayers": [{"from": 0, "head_order": None}]}))
    return folder


def words_of(folders: Path, data: object, *more: str) -> list[str]:
    """The arguments of fairseq-train."""
    return dry_run(folders / "warm", data, "--distill", folders / "original", *more)[1]


def test_it_is_a_tenth_of_pretraining_on_the_model_of_the_folder(folders):
    cfg = parsed(words_of(folders, "some data", "--lr", "5e-5"))
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
def test_what_cannot_run_is_said(folders, tmp_path, arguments, message):
    (tmp_path / "data").mkdir()
    (tmp_path / "warm").symlink_to(folders / "warm")
    with pytest.raises(UserError, match=message):
        main(["continue", *arguments.split()], standalone_mode=False)


def test_a_killed_run_ends_with_the_same_bits(folders, data_folder, tmp_path):
    small = "--sequences-per-update 4 --batch-size 4 --max-update 6 --num-workers 0 --disable-validation --lr 1e-2"
    words = words_of(folders, data_folder, *small.split(), "--dropout", "0.1", "--save-interval-updates", "2")
    at_once = train(words, tmp_path / "at once")
    with stopped_at(3):
        train(words, tmp_path / "killed")
    assert updates_of(tmp_path / "killed" / "checkpoint_last.pt") == 2
    resumed = train(words, tmp_path / "killed")
    assert updates_of(resumed) == 6
    assert_equal_state(resumed["model"], at_once["model"])
    fresh = read_weights(folders / "warm" / "model.safetensors")[0]
    assert list(at_once["model"]) == list(torch.load(folders / "new" / "checkpoint_last.pt")["model"])
    assert not torch.equal(at_once["model"][V_PROJ], fresh[V_PROJ])  # a plain model, and it has learned
    LazyFormerModel.from_pretrained(tmp_path / "killed").fill_mask("the <mask> is here")
