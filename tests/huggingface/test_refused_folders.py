"""Malicious, damaged and other models: refused in words; nothing of them is run, nothing is written."""

import json
import os
import pickle
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")
pytest.importorskip("tokenizers")

import torch
from click.testing import CliRunner
from safetensors.torch import load_file, save_file
from tiny_berts import save_tiny

from lazyformer_fairseq.cli import main
from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.huggingface.importing import import_to

SAFE, PICKLED = "model.safetensors", "pytorch_model.bin"


@pytest.fixture
def folder(tmp_path) -> Path:
    save_tiny(tmp_path / "in")
    return tmp_path / "in"


def assert_refused(folder: Path, match: str) -> None:
    before = sorted(folder.parent.iterdir())
    with pytest.raises(UserError, match=match):
        import_to(folder, folder.parent / "out" / "model")
    assert sorted(folder.parent.iterdir()) == before


def change_config(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    config = {**json.loads(path.read_text()), **changes}
    path.write_text(json.dumps({name: value for name, value in config.items() if value != "DELETE"}))


def change_weights(folder: Path, change: Callable[[dict[str, torch.Tensor]], Any]) -> None:
    weights = load_file(folder / SAFE)
    change(weights)
    save_file(weights, folder / SAFE)


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"model_type": "deberta-v2"}, "'deberta-v2' is another architecture .its attention adds scores of relative"),
        ({"model_type": "gpt2"}, "'gpt2' is another architecture; can be imported: bert, roberta"),
        ({"model_type": "electra"}, "discriminator"),
        ({"model_type": "roberta-prelayernorm"}, "normalises the embeddings"),
        ({"model_type": "brt"}, "did you mean bert"),
        ({"model_type": ["bert"]}, "another architecture"),
        ({"model_type": "DELETE"}, 'has no model_type; if it is a BERT, add "model_type": "bert"'),
        ({"is_decoder": True}, "is_decoder is True: it is a causal model"),
        ({"add_cross_attention": True}, "attends to another model's output"),
        ({"position_embedding_type": "relative_key"}, "position_embedding_type is 'relative_key'"),
        ({"quantization_config": {"bits": 4}}, "its weights are quantised"),
        ({"pruned_heads": {"0": [1]}}, "some of its heads are gone"),
        ({"hidden_act": "silu"}, "hidden_act is 'silu', must be one of gelu, "),
        ({"hidden_act": ["gelu"]}, "must be one of gelu"),
        ({"hidden_size": "32"}, "hidden_size is '32', must be a whole number from 1 on"),
        ({"hidden_size": True}, "must be a whole number"),
        ({"hidden_size": "DELETE"}, "has no hidden_size"),
        ({"num_hidden_layers": 10**15}, "has the weights of 2 layers, config.json says 1000000000000000"),
        (
            {"vocab_size": 10**15},
            r"is \(80, 32\), by config.json vocab_size and the width are \(10{15}, 32\)",
        ),
        ({"max_position_embeddings": 10**15}, "by config.json the positions and the width are"),
        ({"intermediate_size": 10**15}, r"is \(48, 32\), by config.json it must give \(10{15}, 32\)"),
        ({"hidden_size": 10**15}, "the width are"),
        ({"num_attention_heads": 5}, "5 attention heads do not divide"),
        ({"layer_norm_eps": 0}, "layer_norm_eps is 0, must be above 0 and below 1"),
        ({"hidden_dropout_prob": 1.5}, "hidden_dropout_prob is 1.5, must be from 0 to below 1"),
        ({"hidden_dropout_prob": float("nan")}, "hidden_dropout_prob is nan"),
        ({"pad_token_id": -3}, "pad_token_id is -3"),
        ({"vocab_size": 3}, "vocab_size and the width"),
    ],
)
def test_a_config_of_another_model_or_of_wrong_values(folder, changes, match):
    change_config(folder, **changes)
    assert_refused(folder, match)


@pytest.mark.parametrize("content", ["", "[1, 2]", "{", "\xff" * 9, "[" * 100_000])
def test_a_config_that_is_none(folder, content):
    (folder / "config.json").write_text(content, encoding="latin-1")
    assert_refused(folder, "config.json: (cannot be read as JSON|holds list, not an object)")


def test_a_config_too_large_to_be_one(folder):
    with (folder / "config.json").open("wb") as file:
        file.truncate(2**40)  # of holes
    assert_refused(folder, "too many for what describes a model")


def drop(name: str) -> Callable:
    return lambda weights: weights.pop(name)


def put(name: str, value: torch.Tensor) -> Callable:
    return lambda weights: weights.update({name: value})


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (drop("bert.encoder.layer.1.output.dense.bias"), "lacks the weight bert.encoder.layer.1.output.dense.bias"),
        (drop("bert.embeddings.LayerNorm.weight"), "lacks the weight bert.embeddings.LayerNorm.weight"),
        (
            drop("cls.predictions.transform.LayerNorm.bias"),
            "lacks the weight cls.predictions.transform.LayerNorm.bias",
        ),
        (put("bert.encoder.layer.0.adapter.weight", torch.ones(3)), "adapter.weight, which no model of ours has"),
        (put("bert.encoder.layer.0.output.dense.weight", torch.ones(48, 32)), r"is \(48, 32\), by config.json it must"),
        (put("bert.encoder.layer.0.attention.self.key.weight", torch.ones(32)), "by config.json it must give"),
        (put("bert.encoder.layer.0.output.dense.bias", torch.tensor(1.0)), "by config.json it must give"),
        (put("bert.encoder.layer.7.output.dense.bias", torch.ones(32)), "has the weights of 3 layers"),
        (put("bert.encoder.layer.0.output.dense.bias", torch.full((32,), torch.inf)), "holds NaN or Inf"),
        (put("bert.encoder.layer.0.output.dense.bias", torch.ones(32, dtype=torch.int8)), "before it was quantised"),
        (
            put("bert.encoder.layer.0.output.dense.bias", torch.ones(32).to(torch.float8_e4m3fn)),
            "holds F8_E4M3; give the model before it was quantised",
        ),
        (put("bert.embeddings.token_type_embeddings.weight", torch.tensor(1.0)), "type_vocab_size and the width are"),
        (put("bert.embeddings.word_embeddings.weight", torch.tensor(1.0)), "vocab_size and the width are"),
        (drop("cls.predictions.transform.dense.weight"), "lacks the weight cls.predictions.transform.dense.weight"),
        (put("embeddings.LayerNorm.weight", torch.ones(32)), "are the same weight; keep one"),
        (put("cls.predictions.decoder.weight", torch.ones(80, 32)), "differs from the word embeddings"),
        (put("cls.predictions.decoder.bias", torch.ones(80)), "decoder.bias differs from cls.predictions.bias"),
    ],
)
def test_weights_that_are_not_the_models(folder, change, match):
    change_weights(folder, change)
    assert_refused(folder, match)


@pytest.mark.parametrize("shape", [(), (3,), (3, 7), (0, 32)])
def test_a_classifier_of_another_shape(tmp_path, shape):
    save_tiny(tmp_path / "in", "BertForSequenceClassification")
    change_weights(tmp_path / "in", put("classifier.weight", torch.ones(shape)))
    assert_refused(tmp_path / "in", "classifier|which no model of ours has|outputs")


def test_a_head_that_is_neither_tied_nor_there(folder):
    change_config(folder, tie_word_embeddings=False)
    weights = load_file(folder / SAFE)
    save_file({name: weight for name, weight in weights.items() if "decoder" not in name}, folder / SAFE)
    assert_refused(folder, "lacks the weight .*cls.predictions.decoder.weight")


@pytest.mark.parametrize("name", [SAFE, PICKLED])
@pytest.mark.parametrize("share", [0.0, 0.3, 0.99])
def test_truncated_weights(folder, name, share):
    if name == PICKLED:
        torch.save(load_file(folder / SAFE), folder / PICKLED)
        (folder / SAFE).unlink()
    path = folder / name
    os.truncate(path, int(path.stat().st_size * share))
    assert_refused(folder, f"{name}: truncated, damaged or no ")


class _Code:
    """Unpickled, it makes a file."""

    def __init__(self, path: Path):
        self.path = path

    def __reduce__(self):
        return (Path.touch, (self.path,))


@pytest.mark.parametrize("form", ["plain pickle", "archive"])
def test_code_in_a_pickle_is_not_run(folder, form, monkeypatch):
    monkeypatch.setenv("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "1")
    run = folder / "it_ran"
    content = {**load_file(folder / SAFE), "bert.pooler.dense.bias": _Code(run)}
    (folder / SAFE).unlink()
    if form == "archive":
        torch.save(content, folder / PICKLED)
    else:
        (folder / PICKLED).write_bytes(pickle.dumps(content))
    assert_refused(folder, "refused, nothing of it was run|truncated, damaged or no checkpoint")
    assert not run.exists()


def save_pickled(folder: Path, **others: Any) -> None:
    torch.save({**load_file(folder / SAFE), **others}, folder / PICKLED)
    (folder / SAFE).unlink()


def test_a_pickle_of_something_else_than_weights(folder):
    save_pickled(folder, settings={"a": 1})
    assert_refused(folder, "something else than weights by name")


def test_a_tensor_that_claims_to_be_larger_than_its_file(folder):
    change_config(folder, vocab_size=10**13)
    save_pickled(folder, **{"bert.embeddings.word_embeddings.weight": torch.ones(1, 32).expand(10**13, 32)})
    assert_refused(folder, "says it is larger than the file")


def test_a_sparse_tensor(folder):
    save_pickled(folder, **{"bert.embeddings.word_embeddings.weight": torch.eye(4).to_sparse()})
    assert_refused(folder, "quantised or sparse|refused|damaged")


def test_an_archive_that_unpacks_to_more_than_it_is(folder):
    save_pickled(folder)
    with zipfile.ZipFile(folder / PICKLED) as archive:
        members = {member.filename: archive.read(member) for member in archive.infolist()}
    with zipfile.ZipFile(folder / PICKLED, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in members.items():
            archive.writestr(name, content)
    assert_refused(folder, "its records are packed and larger than the file")


@pytest.mark.parametrize(
    "name", ["../other/x.safetensors", "/etc/passwd.safetensors", "a/b.safetensors", "x.bin", 7, "a\0.safetensors"]
)
def test_an_index_that_names_files_elsewhere(folder, name):
    (folder / SAFE).unlink()
    (folder / f"{SAFE}.index.json").write_text(json.dumps({"weight_map": {"bert.pooler.dense.bias": name}}))
    assert_refused(folder, "refused, nothing was read")


def test_an_index_without_its_files(folder):
    of_weight = dict.fromkeys(load_file(folder / SAFE), "one.safetensors")
    index = folder / f"{SAFE}.index.json"
    index.write_text(json.dumps({"weight_map": of_weight}))
    (folder / SAFE).rename(folder / "two.safetensors")
    assert_refused(folder, "one.safetensors: no such file, but the index names it")
    (folder / "two.safetensors").rename(folder / "one.safetensors")
    index.write_text(json.dumps({"weight_map": {**of_weight, "more": "one.safetensors"}}))
    assert_refused(folder, "lacks more, which the index says it holds")
    for content in ("{}", '{"weight_map": 3}', "["):
        index.write_text(content)
        assert_refused(folder, "has no weight_map|cannot be read as JSON")


def test_a_folder_without_weights_or_config(folder):
    (folder / SAFE).rename(folder / "tf_model.h5")
    assert_refused(folder, "holds no model.safetensors or pytorch_model.bin")
    (folder / "config.json").unlink()
    assert_refused(folder, "config.json: cannot be read")


def test_a_tokenizer_with_more_ids_than_rows_or_none(folder):
    (folder / "vocab.txt").write_text((folder / "vocab.txt").read_text() + "".join(f"x{n}\n" for n in range(99)))
    assert_refused(folder, "rows|ids")
    (folder / "vocab.txt").unlink()
    assert_refused(folder, "no tokenizer there")


def test_a_roberta_whose_tokenizer_pads_with_another_id(tmp_path):
    save_tiny(tmp_path / "in", "RobertaForMaskedLM")
    change_config(tmp_path / "in", pad_token_id=3)
    assert_refused(tmp_path / "in", "id 1, but config.json says 3")


def test_a_name_on_the_hub_is_no_folder(tmp_path):
    result = CliRunner().invoke(main, ["import", "google-bert/bert-base-uncased", str(tmp_path / "out")])
    assert "hf download google-bert/bert-base-uncased --local-dir bert-base-uncased" in str(result.exception)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("name", ["", "a.b", "pooler", "a/b"])
def test_a_heads_name_that_cannot_be_one(folder, name):
    with pytest.raises(UserError, match="--head-name"):
        import_to(folder, folder.parent / "out", head_name=name)


def test_a_filled_folder_is_left_alone(folder):
    (folder.parent / "out").mkdir()
    (folder.parent / "out" / "mine").write_text("stays")
    with pytest.raises(UserError, match="exists already"):
        import_to(folder, folder.parent / "out")
    assert [path.name for path in (folder.parent / "out").iterdir()] == ["mine"]
