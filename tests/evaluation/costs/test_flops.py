"""Counts on the meta device against what torch counts on built models, against sums by hand and the papers' numbers."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

from lazyformer_fairseq.evaluation.costs import flops as costs
from lazyformer_fairseq.modules.networks.adaptive_softmax import AdaptiveSoftmax
from lazyformer_fairseq.modules.networks.causal_decoder import CausalDecoder
from lazyformer_fairseq.modules.networks.encoder import Encoder, TokenInfo
from lazyformer_fairseq.modules.networks.heads import MaskedLMHead
from lazyformer_fairseq.modules.networks.stream_memory import StreamMemory
from lazyformer_fairseq.patterns.architectures import CAUSAL_ARCHITECTURES
from lazyformer_fairseq.patterns.grammar import plan, read_sublayer
from lazyformer_fairseq.patterns.kinds import CausalSizes, EncoderSizes, sizes_of

OF_BOTH = [
    "M3x1 sff",
    "s k f l k",
    "c c[width=4,form=lightweight] - f s",
    "s[persistent=3] f l",
    "s[window=99] k l",
    "s[entmax=learned] l",
    "s f[gate=silu] c",
    "r r[cell=brc] f s r[cell=mingru]",
    "s f[experts=3,top=1,capacity=3]",
]
MODERN = {"norm": "rms", "linear_bias": False}  # with a gate
SYNTHESIZERS = ["factorised_dense", "factorised_random", "factorised_random+dot,persistent=3", "random+dense+dot"]
OF_ENCODERS = [
    *OF_BOTH,
    "s[buckets=4,rounds=2,chunk=4] l",
    "s[linformer=3] k f l",
    "s[linformer=3,share=none] l",
    "s[linformer=3,share=layers] l s l",
]


def seen_by_torch(call) -> int:
    with FlopCounterMode(display=False) as counter:
        call()
    return counter.get_total_flops()


def parameters_of(*modules: nn.Module) -> int:
    return sum(parameter.numel() for parameter in nn.ModuleList(modules).parameters())


@pytest.mark.parametrize("pattern", [*OF_ENCODERS, *(f"s[synthesizer={terms}] f l" for terms in SYNTHESIZERS)])
def test_an_encoder_with_its_head(pattern):
    given = {"token_types": 2, "normalize_before": "c" in pattern, **(MODERN if "gate" in pattern else {})}
    encoder = Encoder(pattern, 17, 12, 20, 3, 11, relative_position_buckets=0, attention_backend="eager", **given)
    head, tokens = MaskedLMHead(12, encoder.embed_tokens), torch.randint(2, 17, (2, 9))
    if "gate" in pattern:
        head = MaskedLMHead(12, encoder.embed_tokens, F.gelu, encoder.norm, linear_bias=False)
    assert costs.count_parameters(pattern, encoder.sizes) == parameters_of(encoder, head)
    assert seen_by_torch(lambda: head(encoder(tokens)[0])) == costs.count_flops(pattern, encoder.sizes, 9, batch=2)
    wanted = TokenInfo(selected_M=torch.tensor([0, 9]))
    found = seen_by_torch(lambda: head(encoder(tokens, info=wanted)[0]))
    assert found == costs.count_flops(pattern, encoder.sizes, 9, batch=2, predicted=1)
    assert seen_by_torch(lambda: encoder(tokens)) == costs.count_flops(pattern, encoder.sizes, 9, batch=2, predicted=0)


def test_a_reversible_encoder_computes_all_tokens():
    given = {"normalize_before": True, "reversible": True, "attention_backend": "eager"}
    encoder = Encoder("s f f", 17, 12, 20, 3, 11, relative_position_buckets=0, **given)
    head, tokens = MaskedLMHead(12, encoder.embed_tokens), torch.randint(2, 17, (2, 9))
    wanted = TokenInfo(selected_M=torch.tensor([0, 9]))
    with torch.no_grad():
        found = seen_by_torch(lambda: head(encoder(tokens, info=wanted)[0]))
    assert found == costs.count_flops("s f f", encoder.sizes, 9, batch=2, predicted=1)
    options = {"encoder_embed_dim": 12, "encoder_ffn_embed_dim": 20, "encoder_attention_heads": 3, "reversible": True}
    assert sizes_of(options, 17).computes_all_tokens


@pytest.mark.parametrize(
    ("pattern", "memory", "cutoffs", "div_val"),
    [
        *((each, 0, (), 1) for each in OF_BOTH if "window" not in each),
        *((each, 8, (7, 11), 2) for each in OF_BOTH if "window" not in each),
        *((f"s[synthesizer={terms},length=9] l", 0, (), 1) for terms in SYNTHESIZERS),
    ],
)
def test_a_causal_model_that_predicts_frequent_words(pattern, memory, cutoffs, div_val):
    given = {"cutoffs": cutoffs, "div_val": div_val, "normalize_before": div_val == 1}
    given |= MODERN if "gate" in pattern else {}
    decoder = CausalDecoder(pattern, 17, 12, 20, 3, mem_len=memory, attention_backend="eager", **given)
    softmax, tokens, stream = AdaptiveSoftmax(decoder.embedding), torch.randint(0, 7, (2, 5)), StreamMemory()
    with torch.no_grad():
        decoder(torch.randint(0, 17, (2, memory or 1)), stream)

    def forward():
        features, _ = decoder(tokens, stream)
        softmax.negative_log_likelihood(features.flatten(0, 1), tokens.flatten(), decoder.embedding)

    assert seen_by_torch(forward) == costs.count_flops(pattern, decoder.sizes, 5, memory, 2)
    assert costs.count_parameters(pattern, decoder.sizes) == parameters_of(decoder, softmax)


C, W, T, K = 8, 20, 6, 9
BY_HAND = {  # by direction and sublayer: parameters without LayerNorm, FLOPs (torch's counter sees the third alone)
    # A query sees itself and two before it: what is out of sight costs nothing, and so what no query reaches.
    ("causal", "s[window=2]"): (5 * C * C, (4 * (2 + T + T) + 2 * (2 + T + 1)) * C * C + 6 * T * 3 * C),
    # Its factors are compared where the mask shows the pair: 3 T - 2 of them for each of two heads.
    ("encoder", "s[window=1,synthesizer=factorised_random,rank=5]"): (
        2 * C * C + 2 * C + 2 * 2 * 16 * 5,
        4 * T * C * C + 2 * (3 * T - 2) * (2 * 5 + C),
    ),
    # Factors stand behind the numbers of each head's queries and keys, and so behind those of the three vectors.
    ("causal", "s[synthesizer=factorised_random+dot,rank=5,length=16,persistent=3]"): (
        5 * C * C + 2 + 2 * 2 * 16 * 5 + 2 * 3 * C,
        (8 * T + 2 * (T + 1)) * C * C + 2 * T * (T + 1) * C + 2 * T * (T + 3) * (2 * 5 + C) + 2 * T * (T + 3) * C,
    ),
}


@pytest.mark.parametrize(("direction", "sublayer"), BY_HAND)
def test_sums_by_hand(direction, sublayer):
    sizes = EncoderSizes(17, C, W, 2, 16, 0) if direction == "encoder" else CausalSizes(17, C, W, 2)
    planned = read_sublayer(sublayer)
    memory = K - T if direction == "causal" and "synthesizer" not in sublayer else 0
    flops = costs.count_sublayer_flops(planned, sizes, T, memory)
    assert (costs.count_sublayer_parameters(planned, sizes) - 2 * C, flops) == BY_HAND[direction, sublayer]


BASE = CausalSizes(267_735, 512, 2048, 8, (19_997, 39_997, 199_997))


@pytest.mark.parametrize(
    ("pattern", "parameters", "billions"),
    [("(sf)x16", 191_950_298, 27), ("(s)x6 (sf)x10 (f)x6", 191_950_298, 27), ("(sfff)x6 (f)x8", 199_840_218, 17)],
)
def test_table_6_of_the_par_paper(pattern, parameters, billions):
    assert costs.count_parameters(pattern, BASE) == parameters
    assert costs.count_flops(pattern, BASE, time=64, memory=640) / 1e9 == pytest.approx(billions, rel=0.06)
    # Figure 1 ranks the blocks.
    attention, lazy, feed_forward = (costs.count_sublayer_flops(planned, BASE, 64, 640) for planned in plan("slf"))
    assert attention > lazy > feed_forward


@pytest.mark.parametrize(("of_third", "of_second", "rounded"), [(0, 0, (27, 16)), (2, 1, (27, 17)), (5, 1, (27, 17))])
def test_words_in_further_bands_make_pars_table_6_of_our_count(of_third, of_second, rounded):
    """Its 27 and 17 GFLOPs at tgt_len 64 and mem_len 640: words of a band meet all words of that band."""
    first, second, third = BASE.cutoffs
    further = 2 * BASE.embed_dim * (of_second * (second - first) + of_third * (third - second))
    patterns = [CAUSAL_ARCHITECTURES[f"{name}_base"].sublayer_pattern for name in ("transformer_xl", "par_transformer")]
    assert tuple(round((costs.count_flops(each, BASE, 64, 640) + further) / 1e9) for each in patterns) == rounded


@pytest.mark.parametrize(("time", "limit"), [(512, 1.03), (4096, 1.13), (8192, 1.19)])
def test_what_flops_allow_lazyformer_against_bert(time, limit):
    """The speed-ups of docs/measurements.md are to be read beside these limits."""
    bert, lazy = (EncoderSizes(32_768, 768, width, 12, time) for width in (3072, 3456))
    flops = [costs.count_flops(*model, time, predicted=0) for model in (("M1x12", bert), ("M2x6", lazy))]
    assert flops[0] / flops[1] == pytest.approx(limit, abs=0.006)
