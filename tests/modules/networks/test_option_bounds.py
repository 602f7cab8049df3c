"""Sizes and probabilities that no model can have: a build, a load and an export refuse the same values alike."""

import json

import pytest

import lazyformer_fairseq
from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.evaluation.checkpoints import ARCHITECTURE, FORMAT, FORMAT_VERSION, read_config
from lazyformer_fairseq.modules.networks.options import CausalLMOptions, MaskedLMOptions, read_options

WRONG = [
    ("encoder_embed_dim", -1, "--encoder-embed-dim -1: must be 1 or more"),
    ("encoder_embed_dim", 10**9, "--encoder-embed-dim 1000000000: must be below 10,000,000"),
    ("encoder_ffn_embed_dim", 0, "--encoder-ffn-embed-dim 0: must be 1 or more"),
    ("encoder_attention_heads", 0, "--encoder-attention-heads 0: must be 1 or more"),
    ("max_positions", -1, "--max-positions -1: must be 1 or more"),
    ("token_types", -1, "--token-types -1: must be 0 or more"),
    ("dropout", 1e9, r"--dropout 1000000000.0: must be at least 0 and below 1"),
    ("attention_dropout", float("nan"), "--attention-dropout nan: must be a number, at least 0 and below 1"),
    ("pooler_dropout", -0.5, "--pooler-dropout -0.5: must be at least 0 and below 1"),
    ("layer_norm_eps", float("inf"), "--layer-norm-eps inf: must be below inf"),
    ("experts_loss", float("nan"), "--experts-loss nan: must be a number, 0 or more"),
]


@pytest.mark.parametrize(("name", "value", "words"), WRONG)
def test_a_build_and_a_load_refuse_the_same_values(tmp_path, name, value, words):
    with pytest.raises(UserError, match=words):
        lazyformer_fairseq.build("bert_tiny", 100, **{name: value})
    config = {"format": FORMAT, "format_version": FORMAT_VERSION, "architecture": ARCHITECTURE, "model": {name: value}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match=f"config.json: .*{words}"):
        read_config(tmp_path / "config.json")


def test_the_number_of_sublayers_is_bounded():
    with pytest.raises(UserError, match="the pattern has more than 2000 sublayers"):
        lazyformer_fairseq.build("bert_tiny", 100, sublayer_pattern="(s)x9999")


def test_a_causal_model_has_bounds_too():
    for name, value in (("adaptive_softmax_factor", 0), ("mem_len", -1), ("init_std", float("nan")), ("clamp_len", -2)):
        with pytest.raises(UserError, match=f"--{name.replace('_', '-')} {value}: must be"):
            read_options(CausalLMOptions, {name: value})


def test_usual_options_are_within_them():
    assert (
        read_options(MaskedLMOptions, {}) == MaskedLMOptions()
        and read_options(CausalLMOptions, {}) == CausalLMOptions()
    )
