"""Malicious, damaged and other models: refused in words; nothing of them is run, nothing is written."""

import json
import os
from pathlib import Path
from typing import Any, Optional

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file, save_file
from tiny_berts import save_tiny, write_word_pieces

from lazyformer_fairseq.cli import main
from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.evaluation.checkpoints import FORMAT
from lazyformer_fairseq.huggingface.importing import import_to

SAFE = "model.safetensors"
WORDS = "bert.embeddings.word_embeddings.weight"


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


def change_weights(folder: Path, changes: dict[str, Optional[torch.Tensor]]) -> None:
    """A weight that is None goes."""
    weights = {**load_file(folder / SAFE), **changes}
    save_file({name: weight for name, weight in weights.items() if weight is not None}, folder / SAFE)


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"model_type": "gpt2"}, "'gpt2' is not supported; these types can be imported: bert, roberta"),
        ({"model_type": "brt"}, "did you mean bert"),
        ({"model_type": "DELETE"}, 'has no model_type; if the model is a BERT, add "model_type": "bert"'),
        ({"is_decoder": True}, "is_decoder is True, which means that the model is causal"),
        ({"add_cross_attention": True}, "attends to another model's output"),
        ({"position_embedding_type": "relative_key"}, "position_embedding_type is 'relative_key'"),
        ({"quantization_config": {"bits": 4}}, "the weights are quantized"),
        ({"pruned_heads": {"0": [1]}}, "some of the model's heads were pruned"),
        ({"hidden_act": "silu"}, "hidden_act is 'silu', but must be one of gelu, "),
        ({"hidden_size": "3" * 10**5}, r"hidden_size is '3+\.\.\.3+', but must be a whole number"),
        ({"hidden_size": "32"}, "hidden_size is '32', but must be a whole number of at least 1"),
        ({"hidden_size": "DELETE"}, "has no hidden_size"),
        ({"num_hidden_layers": 10**15}, "has weights for 2 layers, but config.json specifies 1000000000000000"),
        (
            {"vocab_size": 10**15},
            r"has the shape \(80, 32\), but in config.json vocab_size and the width are \(10{15}, 32\)",
        ),
        ({"max_position_embeddings": 10**15}, "in config.json the positions and the width are"),
        ({"intermediate_size": 10**6}, r"has the shape \(48, 32\), which does not match \(10{6}, 32\)"),
        ({"intermediate_size": 10**15}, "--encoder-ffn-embed-dim 10{15}: must be below 10,000,000"),
        ({"num_attention_heads": 5}, "is not divisible by 5 attention heads"),
        ({"layer_norm_eps": 0}, "layer_norm_eps is 0, but must be above 0 and below 1"),
        ({"hidden_dropout_prob": 1.5}, "hidden_dropout_prob is 1.5, but must be at least 0 and below 1"),
        ({"pad_token_id": -3}, "pad_token_id is -3"),
        ({"vocab_size": 3}, "vocab_size and the width"),
    ],
)
def test_a_config_of_another_model_or_of_wrong_values(folder, changes, match):
    change_config(folder, **changes)
    assert_refused(folder, match)


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"hidden_activation": "gelu_new"}, "hidden_activation is 'gelu_new', but must be one of gelu, silu, relu"),
        ({"attention_bias": True}, "must be the same, and decoder_bias must be true"),
        (
            {"rope_parameters": {"full_attention": {"rope_type": "yarn", "rope_theta": 10000.0}}},
            "of full_attention layers are not supported",
        ),
        (
            {"rope_parameters": {"sliding_attention": {"rope_theta": 0.5}}},
            "of sliding_attention layers are not supported",
        ),
        ({"rope_parameters": ["yarn"]}, "must be unscaled, with an integer base"),
        ({"layer_types": ["full_attention"] * 3}, "layer_types must list 4 layers, each of type full_attention or"),
        ({"layer_types": None, "global_attn_every_n_layers": "3"}, "layer_types must list 4 layers"),
        ({"local_attention": 1}, "local_attention is 1, but must be a whole number of at least 2"),
        ({"num_hidden_layers": 10**15}, "has weights for 4 layers, but config.json specifies 1000000000000000"),
        ({"intermediate_size": 99}, "which does not match"),
        ({"tie_word_embeddings": False}, "lacks the weight decoder.weight"),
    ],
)
def test_a_modernbert_that_none_of_ours_is(changes, match, tmp_path):
    save_tiny(tmp_path / "in", "ModernBertForMaskedLM")
    change_config(tmp_path / "in", **changes)
    assert_refused(tmp_path / "in", match)


LAYER, EMBEDDINGS, HEAD = "bert.encoder.layer.0", "bert.embeddings", "cls.predictions"
BIAS = f"{LAYER}.output.dense.bias"


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({BIAS: None}, f"lacks the weight {BIAS}"),
        ({f"{HEAD}.transform.dense.weight": None}, f"lacks the weight {HEAD}.transform.dense.weight"),
        ({f"{LAYER}.adapter.weight": torch.ones(3)}, "adapter.weight, which none of our models has"),
        ({f"{LAYER}.output.dense.weight": torch.ones(48, 32)}, r"has the shape \(48, 32\), which does not match"),
        ({f"{LAYER}.attention.self.key.weight": torch.ones(32)}, "which does not match"),
        ({BIAS: torch.tensor(1.0)}, "which does not match"),
        ({BIAS.replace("0", "7"): torch.ones(32)}, "has weights for 3 layers"),
        ({BIAS: torch.full((32,), torch.inf)}, "contains NaN or Inf"),
        ({BIAS: torch.ones(32, dtype=torch.int8)}, "as it was before quantization"),
        (
            {BIAS: torch.ones(32).to(torch.float8_e4m3fn)},
            "contains torch.float8_e4m3fn; import the model as it was before quantization",
        ),
        ({f"{EMBEDDINGS}.token_type_embeddings.weight": torch.tensor(1.0)}, "type_vocab_size and the width are"),
        ({"embeddings.LayerNorm.weight": torch.ones(32)}, "are the same weight; keep only one"),
        ({f"{HEAD}.decoder.weight": torch.ones(80, 32)}, "differs from the word embeddings"),
        ({f"{HEAD}.decoder.bias": torch.ones(80)}, "decoder.bias differs from cls.predictions.bias"),
    ],
)
def test_weights_that_are_not_the_models(folder, changes, match):
    change_weights(folder, changes)
    assert_refused(folder, match)


@pytest.mark.parametrize("shape", [(), (3,), (3, 7), (0, 32)])
def test_a_classifier_of_another_shape(tmp_path, shape):
    save_tiny(tmp_path / "in", "BertForSequenceClassification")
    change_weights(tmp_path / "in", {"classifier.weight": torch.ones(shape)})
    assert_refused(tmp_path / "in", r"in: classifier\.weight has the shape ")


@pytest.mark.parametrize("share", [0.0, 0.3, 0.99])
def test_truncated_weights(folder, share):
    os.truncate(folder / SAFE, int((folder / SAFE).stat().st_size * share))
    assert_refused(folder, f"{SAFE}: truncated, damaged or not a ")


def leave_the_head_untied(folder: Path) -> None:
    change_config(folder, tie_word_embeddings=False)
    change_weights(folder, {f"{HEAD}.decoder.weight": None, f"{HEAD}.decoder.bias": None})


@pytest.mark.parametrize("content", [b"", b"[1, 2]", b"{", b"\xff" * 9, b"[" * 100_000])
def test_a_config_that_is_none(folder, content):
    (folder / "config.json").write_bytes(content)
    assert_refused(folder, "config.json: (cannot be read as JSON|found list, not an object)")


@pytest.mark.parametrize(
    ("spoil", "match"),
    [
        (lambda folder: os.truncate(folder / "config.json", 2**40), "too large for a model config"),
        (leave_the_head_untied, "lacks the weight .*cls.predictions.decoder.weight"),
        (
            lambda folder: (folder / SAFE).rename(folder / "pytorch_model.bin"),
            "contains no model.safetensors; .* save it",
        ),
        (
            lambda folder: [(folder / each).unlink() for each in (SAFE, "config.json")],
            "contains neither config.json",
        ),
        (lambda folder: write_word_pieces(folder, {f"{number}": number for number in range(99)}), "rows|ids|no valid"),
        (
            lambda folder: (folder / "tokenizer.json").unlink(),
            "contains no tokenizer.json; create it with transformers: ",
        ),
    ],
)
def test_files_that_are_missing_or_something_else(folder, spoil, match):
    spoil(folder)
    assert_refused(folder, match)


def test_a_roberta_whose_tokenizer_pads_with_another_id(tmp_path):
    save_tiny(tmp_path / "in", "RobertaForMaskedLM")
    change_config(tmp_path / "in", pad_token_id=3)
    assert_refused(tmp_path / "in", "id 1, but config.json has 3")


def test_a_name_on_the_hub_is_no_folder(tmp_path):
    result = CliRunner().invoke(main, ["import", "google-bert/bert-base-uncased", str(tmp_path / "out")])
    assert "hf download google-bert/bert-base-uncased --local-dir bert-base-uncased" in str(result.exception)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("config", "flags"),
    [
        ({"format": FORMAT}, {"head_name": "cola", "tokenizer_folder": Path("tokenizer")}),
        ({"model_type": "bert"}, {"tokenizer_folder": Path("tokenizer")}),
    ],
)
def test_an_option_that_would_change_nothing(tmp_path, config, flags):
    (tmp_path / "config.json").write_text(json.dumps(config))
    for name, value in flags.items():
        flag = f"--{name.removesuffix('_folder').replace('_', '-')}"
        with pytest.raises(UserError, match=f"{flag} does not apply to .*; omit the option"):
            import_to(tmp_path, tmp_path / "out", **{name: value})


@pytest.mark.parametrize("name", ["", "a.b", "pooler", "a/b", "keys"])
def test_a_heads_name_that_cannot_be_one_and_a_filled_folder_is_left_alone(folder, name):
    (folder.parent / "out").mkdir()
    with pytest.raises(UserError, match="--head-name"):
        import_to(folder, folder.parent / "out", head_name=name)
    (folder.parent / "out" / "mine").write_text("stays")
    with pytest.raises(UserError, match="already exists"):
        import_to(folder, folder.parent / "out")
    assert [path.name for path in (folder.parent / "out").iterdir()] == ["mine"]
