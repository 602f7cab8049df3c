"""What windows and global tokens cost, by formula; the published parameters; projections that start as copies."""

import pytest
import torch
from longformers import C, D, N, in_window, make_decoder, make_encoder

from lazyformer_fairseq.measure.costs.flops import count_flops, count_parameters
from lazyformer_fairseq.modules.networks.causal_decoder import CausalDecoder, init_transformer_xl_weights
from lazyformer_fairseq.modules.networks.encoder import Encoder, init_bert_weights
from lazyformer_fairseq.patterns.architectures import ARCHITECTURES
from lazyformer_fairseq.patterns.grammar import plan
from lazyformer_fairseq.patterns.kinds import EncoderSizes

PATTERNS = ["s[window=3]f", "s[window=3,global=2]lfl", "s[window=1,dilation=3,dilated_heads=1]l"]


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("pattern", PATTERNS)
def test_flops_by_formula_are_those_of_pairs_shown(pattern, causal):
    """Beside those of a window that shows all, 4 D FLOPs a pair and head in an s, 2 D in an l; causal positions 2 D."""
    network = make_decoder(pattern) if causal else make_encoder(pattern)
    time, attention = 11, network.sublayers[0].inner.choices["window"]
    settings = dict(plan(pattern)[0].values)
    steps = [1] * N
    if settings["dilation"] > 1:
        steps[-settings["dilated_heads"] :] = [settings["dilation"]] * settings["dilated_heads"]

    def pairs(window: int, steps: list[int]) -> int:
        return sum(
            (in_window(i, j, window, step, causal) or j < attention.first) and (j <= i or not causal)
            for step in steps
            for i in range(time)
            for j in range(time)
        )

    wide = pattern.replace(f"window={settings['window']}", "window=99").replace(
        "dilation=3,dilated_heads=1", "dilation=1"
    )
    fewer = pairs(99, [1] * N) - pairs(settings["window"], steps)
    lazy = pattern.count("l]") + len([letter for letter in pattern.split("]")[1] if letter == "l"])
    each = (4 + 2 * causal) * D + 2 * D * lazy
    assert fewer > 0
    assert count_flops(wide, network.sizes, time) - count_flops(pattern, network.sizes, time) == fewer * each


@pytest.mark.parametrize("causal", [False, True])
def test_projections_of_global_tokens_start_as_copies(causal):
    pattern = "s[window=2,global=1]lf"
    for draw in (None, init_transformer_xl_weights if causal else init_bert_weights):
        network = CausalDecoder(pattern, 17, C, 20, N, mem_len=0) if causal else Encoder(pattern, 17, C, 20, N)
        if draw is not None:
            network.apply(draw)
        attention, lazy = network.sublayers[0].inner, network.sublayers[1].inner
        plain = torch.cat([attention.q_proj.weight, attention.kv_proj.weight]) if causal else attention.qkv_proj.weight
        choice, makers = attention.choices["window"], attention.value_makers["window"]
        own = torch.cat([choice.q_proj.weight, choice.k_proj.weight, makers.v_proj.weight])
        assert torch.equal(own, plain) and own.data_ptr() != plain.data_ptr()
        assert torch.equal(lazy.value_makers["window"].v_proj.weight, lazy.v_proj.weight)
        assert not torch.equal(lazy.v_proj.weight, makers.v_proj.weight)


def test_parameters_of_the_base_model_are_the_published_ones():
    """Hugging Face's has two positions more, and a token type."""
    from transformers import LongformerConfig, LongformerForMaskedLM

    config = LongformerConfig(
        vocab_size=50_265, attention_window=[512] * 12, max_position_embeddings=4098, type_vocab_size=1
    )
    with torch.device("meta"):
        theirs = sum(map(torch.numel, LongformerForMaskedLM(config).parameters()))
    row = ARCHITECTURES["longformer_base"]
    sizes = EncoderSizes(50_265, row.encoder_embed_dim, row.encoder_ffn_embed_dim, 12, row.max_positions, 0)
    assert count_parameters(row.sublayer_pattern, sizes) == theirs - 3 * 768
