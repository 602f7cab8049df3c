"""Weights as safetensors: the same model after the way there and back, and nothing else is taken for one."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from fairseq_plugin.reliability.damage import TINY
from helpers import assert_equal_state, build_toy_corpus, write_toy_glue
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from lazyformer_fairseq import LazyFormerModel
from lazyformer_fairseq.cli import main
from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.fairseq_plugin.models.export import export
from lazyformer_fairseq.finetuning.grid import load_start_models

TEXTS = ("Anna sees Ben near the house.", "The garden.")


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("exported")


@pytest.fixture
def trained(folders, data_folder, fairseq_train) -> Path:
    if not (folders / "run").exists():
        fairseq_train(data_folder, f"{TINY} --max-update 5 --lr 1e-2 --disable-validation", folders / "run")
    return folders / "run"


@pytest.fixture
def exported(folders, trained) -> Path:
    if not (folders / "model").exists():
        export(trained, folders / "model")
    return folders / "model"


@pytest.fixture
def copy(exported, tmp_path) -> Path:
    """An exported model to do damage to."""
    return Path(shutil.copytree(exported, tmp_path / "copy"))


def test_the_same_outputs_to_the_last_bit_and_tied_weights_stored_once(trained, exported, tmp_path):
    before, after = LazyFormerModel.from_pretrained(trained), LazyFormerModel.from_pretrained(exported)
    assert torch.equal(before.extract_features(*TEXTS), after.extract_features(*TEXTS))
    assert before.fill_mask("Anna <mask> Ben.", topk=9) == after.fill_mask("Anna <mask> Ben.", topk=9)
    assert_equal_state(dict(after.model.state_dict()), dict(before.model.state_dict()))
    assert {**before.model.cfg, "_name": None} == dict(after.model.cfg)
    assert {path.name for path in exported.iterdir()} == {"model.safetensors", "config.json", "tokenizer"}
    embedding = after.model.encoder.sentence_encoder.embed_tokens.weight
    assert after.model.encoder.lm_head.weight is embedding
    weights = load_file(exported / "model.safetensors")
    assert sum(weight.shape == embedding.shape for weight in weights.values()) == 1
    with safe_open(exported / "model.safetensors", framework="pt") as file:
        metadata = file.metadata()
    assert (metadata["architecture"], metadata["sublayer_pattern"]) == ("lazyformer", "M2")

    outcome = CliRunner().invoke(main, ["export", str(trained / "checkpoint_last.pt"), str(tmp_path / "model")])
    assert outcome.exit_code == 0, outcome.output
    assert_equal_state(load_file(tmp_path / "model" / "model.safetensors"), weights)
    with pytest.raises(UserError, match="checkpoint_last.pt: is a file; other.pt can be chosen in a folder"):
        export(trained / "checkpoint_last.pt", tmp_path / "more", "other.pt")


@pytest.mark.slow
def test_fine_tuning_starts_from_it(trained, exported, tmp_path, fairseq_train):
    """The same weights after an update as from the checkpoint."""
    data = write_toy_glue(tmp_path / "glue", train=8, valid=4) / "CoLA"
    options = "--arch lazyformer_m2x6_s_tiny --sublayer-pattern M2 --criterion glue --batch-size 8 --max-update 1"
    runs = [
        fairseq_train(data, f"{options} --finetune-from-model {start}", tmp_path / name, task="glue")["model"]
        for name, start in (("a", trained / "checkpoint_last.pt"), ("b", exported / "model.safetensors"))
    ]
    assert all(torch.equal(weight, runs[1][name]) for name, weight in runs[0].items())
    (start,) = load_start_models({"m": exported / "model.safetensors"}, exported / "tokenizer")
    assert "M2" in start.options and start.max_positions == 512


def change_config(folder: Path, **changes) -> None:
    config = json.loads((folder / "config.json").read_text())
    options = config["model"] | changes.pop("model", {})
    (folder / "config.json").write_text(json.dumps(config | {"model": options} | changes))


def test_what_does_not_fit_is_said(copy, tmp_path):
    kept = (copy / "config.json").read_bytes()
    for changes, words in (
        ({"format_version": 2}, "config.json: format version 2, but this program reads 1"),
        ({"format": "other"}, "config.json: not the config of an exported model"),
        ({"architecture": "roberta"}, "must have the architecture lazyformer"),
        ({"model": {"layers": 3}}, "unknown option layers"),
        ({"model": {"dropout": "much"}}, "option dropout is 'much', must be float"),
        ({"model": {"encoder_embed_dim": True}}, "option encoder_embed_dim is True, must be int"),
        ({"model": {"sublayer_pattern": "M3"}}, "sublayer_pattern is 'M2', config.json speaks of 'M3'"),
        ({"model": {"encoder_ffn_embed_dim": 48}}, r"is \(64, 32\), the model's \(48, 32\)"),
        ({"model": {"encoder_embed_dim": 10**6, "encoder_attention_heads": 1}}, r"the model's \(160, 1000000\)"),
        ({"model": {"encoder_attention_heads": 5}}, "5 attention heads do not divide"),
        ({"model": {"activation_fn": "exec"}}, "model.safetensors: .*exec"),
    ):
        change_config(copy, **changes)
        with pytest.raises(UserError, match=words):
            LazyFormerModel.from_pretrained(copy)
        (copy / "config.json").write_bytes(kept)
    LazyFormerModel.from_pretrained(copy)


def test_options_of_a_later_version_have_their_defaults(copy):
    config = json.loads((copy / "config.json").read_text())
    del config["model"]["relative_position_max_distance"]
    (copy / "config.json").write_text(json.dumps(config))
    assert LazyFormerModel.from_pretrained(copy).model.cfg.relative_position_max_distance == 128


def test_damage_and_another_dictionary_are_named(copy, tmp_path):
    path = copy / "model.safetensors"
    content, weights = path.read_bytes(), load_file(path)
    with safe_open(path, framework="pt") as file:
        metadata = file.metadata()
    less = {name: weight for name, weight in weights.items() if name != "encoder.lm_head.bias"}
    damaged = "model.safetensors: truncated, damaged or no safetensors"
    for damage, words in (
        (lambda: path.write_bytes(content[:-10]), damaged),
        (lambda: path.write_bytes(content[:9] + b"!" + content[10:]), damaged),
        (lambda: path.write_bytes(b""), damaged),
        (lambda: save_file(less, path, metadata), "model.safetensors: the checkpoint has no weight encoder.lm_head.b"),
        (lambda: save_file(weights, path), "model.safetensors: its architecture is None"),
        (lambda: (copy / "config.json").rename(tmp_path / "kept"), "config.json: cannot be read as JSON"),
    ):
        damage()
        with pytest.raises(UserError, match=words):
            LazyFormerModel.from_pretrained(copy)
        path.write_bytes(content)
    (tmp_path / "kept").rename(copy / "config.json")
    build_toy_corpus(tmp_path / "corpus", 160, seed=7)
    shutil.copytree(tmp_path / "corpus" / "tokenizer", copy / "tokenizer", dirs_exist_ok=True)
    with pytest.raises(UserError, match=r"model.safetensors: .*another dictionary, of the same size"):
        LazyFormerModel.from_pretrained(copy)
