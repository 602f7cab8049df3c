"""Parameters by formula against built models."""

from dataclasses import replace

import pytest
import torch
from helpers import count_parameters as count_named
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.measure.costs.flops import count_parameters, count_sublayer_parameters
from lazyformer_fairseq.modules.networks.adaptive_softmax import AdaptiveSoftmax
from lazyformer_fairseq.modules.networks.causal_decoder import CausalDecoder
from lazyformer_fairseq.modules.networks.encoder import Encoder
from lazyformer_fairseq.modules.networks.heads import MaskedLMHead
from lazyformer_fairseq.patterns.architectures import ARCHITECTURES
from lazyformer_fairseq.patterns.grammar import plan
from lazyformer_fairseq.patterns.sizes import CausalSizes, EncoderSizes

PATTERNS = ["M1x2", "M3x1", "(sff)x2 (f)x2", "sflflf sfff", "ffff"]


def counted(*modules: nn.Module) -> int:
    return sum(parameter.numel() for parameter in nn.ModuleList(modules).parameters())


@pytest.mark.parametrize(
    "arch", ["bert_base", "lazyformer_m2x6_s", "lazyformer_m2x7", "par_bert_base", "linformer_layers_base"]
)
def test_named_encoders(arch):
    row = ARCHITECTURES[arch]
    sizes = EncoderSizes(32_768, row.encoder_embed_dim, row.encoder_ffn_embed_dim, row.encoder_attention_heads)
    if not row.relative_position_buckets:
        sizes = replace(sizes, relative_position_buckets=0)
    assert count_parameters(row.sublayer_pattern, sizes) == count_named(arch)


@settings(max_examples=20)
@given(
    pattern=st.sampled_from(PATTERNS),
    heads=st.integers(1, 3),
    width=st.integers(1, 20),
    positions=st.integers(1, 9),
    buckets=st.sampled_from([0, 8]),
    normalize_before=st.booleans(),
    token_types=st.integers(0, 3),
)
def test_encoders(pattern, heads, width, positions, buckets, normalize_before, token_types):
    with torch.device("meta"):
        encoder = Encoder(
            pattern, 17, 4 * heads, width, heads, positions,
            normalize_before=normalize_before, relative_position_buckets=buckets, token_types=token_types,
        )  # fmt: skip
        head = MaskedLMHead(encoder.embed_dim, encoder.embed_tokens)
    sizes = EncoderSizes(17, 4 * heads, width, heads, positions, buckets, token_types)
    assert encoder.sizes == sizes
    assert count_parameters(pattern, sizes) == counted(encoder, head)


@settings(max_examples=20)
@given(
    pattern=st.sampled_from(PATTERNS),
    heads=st.integers(1, 3),
    width=st.integers(1, 20),
    cutoffs=st.sampled_from([(), (8,), (7, 11)]),
    div_val=st.sampled_from([1, 2]),
    normalize_before=st.booleans(),
)
def test_causal_models(pattern, heads, width, cutoffs, div_val, normalize_before):
    with torch.device("meta"):
        decoder = CausalDecoder(
            pattern, 17, 4 * heads, width, heads, 5,
            cutoffs=cutoffs, div_val=div_val, normalize_before=normalize_before,
        )  # fmt: skip
        softmax = AdaptiveSoftmax(decoder.embedding)
    sizes = CausalSizes(17, 4 * heads, width, heads, cutoffs, div_val if cutoffs else 1, normalize_before)
    assert decoder.sizes == sizes
    assert count_parameters(pattern, sizes) == counted(decoder, softmax)
    for planned in plan("slf"):
        sublayer = decoder.build_sublayer(planned)
        assert count_sublayer_parameters(planned, sizes) == counted(sublayer)


@pytest.mark.parametrize(
    ("pattern", "parameters"),
    [("(sf)x16", 191_950_298), ("(s)x6 (sf)x10 (f)x6", 191_950_298), ("(sfff)x6 (f)x8", 199_840_218)],
)
def test_table_6_of_the_par_paper(pattern, parameters):
    assert count_parameters(pattern, CausalSizes(267_735, 512, 2048, 8, (19_997, 39_997, 199_997))) == parameters


def test_a_pattern_that_cannot_be_read_is_named():
    with pytest.raises(UserError, match=r"'\(sz\)x2', character 3"):
        count_parameters("(sz)x2", CausalSizes(17, 4, 4, 1))
