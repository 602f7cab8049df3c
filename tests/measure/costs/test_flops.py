"""Counts on the meta device against what torch counts on built models, against sums by hand and the papers' numbers."""

import json
import subprocess
import sys

import pytest
import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.measure.costs.flops import (
    count_encoder_flops,
    count_flops,
    count_parameters,
    count_sublayer_flops,
    count_sublayer_parameters,
)
from lazyformer_fairseq.modules.networks.adaptive_softmax import AdaptiveSoftmax
from lazyformer_fairseq.modules.networks.causal_decoder import CausalDecoder
from lazyformer_fairseq.modules.networks.encoder import Encoder
from lazyformer_fairseq.modules.networks.heads import MaskedLMHead
from lazyformer_fairseq.modules.networks.stack import StreamMemory
from lazyformer_fairseq.patterns.architectures import CAUSAL_ARCHITECTURES
from lazyformer_fairseq.patterns.grammar import plan, read_sublayer
from lazyformer_fairseq.patterns.kinds import CausalSizes, EncoderSizes

OF_BOTH = [
    "M3x1 sff",
    "s k f l k",
    "c c[width=4,form=lightweight] - f s",
    "s[persistent=3] f l",
    "s[buckets=4,rounds=2,chunk=4] l",
    "s[window=99] k l",
    "s[entmax=learned] l",
]
SYNTHESIZERS = ["factorised_dense", "factorised_random", "factorised_random+dot,persistent=3", "random+dense+dot"]
OF_ENCODERS = [*OF_BOTH, "s[linformer=3] k f l", "s[linformer=3,share=none] l", "s[linformer=3,share=layers] l s l"]


def seen_by_torch(forward) -> int:
    """The plain kernel of attention, since torch's counter passes over the CPU's fused one."""
    with sdpa_kernel(SDPBackend.MATH), torch.no_grad(), FlopCounterMode(display=False) as counter:
        forward()
    return counter.get_total_flops()


def parameters_of(*modules: nn.Module) -> int:
    return sum(parameter.numel() for parameter in nn.ModuleList(modules).parameters())


@pytest.mark.parametrize("pattern", [*OF_ENCODERS, *(f"s[synthesizer={terms}] f l" for terms in SYNTHESIZERS)])
def test_an_encoder_with_its_head(pattern):
    given = {"token_types": 2, "normalize_before": "c" in pattern}
    encoder = Encoder(pattern, 17, 12, 20, 3, 11, relative_position_buckets=0, attention_backend="eager", **given)
    head, tokens = MaskedLMHead(12, encoder.embed_tokens), torch.randint(2, 17, (2, 9))
    assert count_parameters(pattern, encoder.sizes) == parameters_of(encoder, head)
    assert seen_by_torch(lambda: head(encoder(tokens)[0])) == count_flops(pattern, encoder.sizes, 9, batch=2)
    masked = torch.zeros(2, 9, dtype=torch.bool)
    masked[:, 0] = True
    found = seen_by_torch(lambda: head(encoder(tokens)[0], masked))
    assert found == count_flops(pattern, encoder.sizes, 9, batch=2, predicted=1)
    assert found == count_encoder_flops(pattern, encoder.sizes, 9, 2, predicted=2)


@pytest.mark.parametrize(("memory", "cutoffs", "div_val"), [(0, (), 1), (8, (7, 11), 2)])
@pytest.mark.parametrize("pattern", [each for each in OF_BOTH if "window" not in each])
def test_a_causal_model_that_predicts_frequent_words(pattern, memory, cutoffs, div_val):
    given = {"cutoffs": cutoffs, "div_val": div_val, "normalize_before": div_val == 1}
    decoder = CausalDecoder(pattern, 17, 12, 20, 3, mem_len=memory, attention_backend="eager", **given)
    softmax, tokens, stream = AdaptiveSoftmax(decoder.embedding), torch.randint(0, 7, (2, 5)), StreamMemory()
    with torch.no_grad():
        decoder(torch.randint(0, 17, (2, memory or 1)), stream)

    def forward():
        features, _ = decoder(tokens, stream)
        softmax.negative_log_likelihood(features.flatten(0, 1), tokens.flatten(), decoder.embedding)

    assert seen_by_torch(forward) == count_flops(pattern, decoder.sizes, 5, memory, 2)
    assert count_parameters(pattern, decoder.sizes) == parameters_of(decoder, softmax)


@pytest.mark.parametrize("terms", SYNTHESIZERS)
def test_a_causal_synthesizer(terms):
    decoder = CausalDecoder(f"s[synthesizer={terms},length=9] l", 17, 12, 20, 3, mem_len=0, attention_backend="eager")
    found = seen_by_torch(lambda: decoder(torch.randint(0, 17, (2, 7))))
    assert found == sum(count_sublayer_flops(planned, decoder.sizes, 7, batch=2) for planned in decoder.plan)
    for planned, sublayer in zip(decoder.plan, decoder.sublayers, strict=True):
        assert count_sublayer_parameters(planned, decoder.sizes) == parameters_of(sublayer)


C, W, T, K, P = 8, 20, 6, 9, 3
BY_HAND = {  # by direction and sublayer: parameters without LayerNorm, FLOPs
    ("encoder", "s"): (4 * C * C + 4 * C, 8 * T * C * C + 4 * T * T * C),
    ("encoder", "l"): (2 * C * C + 2 * C, 4 * T * C * C + 2 * T * T * C),
    ("encoder", "k"): (2 * C * C + 2 * C, 4 * T * C * C + 4 * T * T * C),
    ("encoder", "f"): (2 * C * W + W + C, 4 * T * C * W),
    ("encoder", f"s[persistent={P}]"): (4 * C * C + 4 * C + 2 * P * C, 8 * T * C * C + 4 * T * (T + P) * C),
    ("causal", "s"): (5 * C * C, (4 * (K + T) + 2 * (K + 1)) * C * C + 2 * T * (K + 1) * C + 4 * T * K * C),
    ("causal", "l"): (2 * C * C, 2 * (K + T) * C * C + 2 * T * K * C),
    # A query sees itself and two before it: what is out of sight costs nothing, and so what no query reaches.
    ("causal", "s[window=2]"): (
        5 * C * C,
        (4 * (2 + T + T) + 2 * (2 + T + 1)) * C * C + 6 * T * 3 * C,
    ),
    # Its factors are compared where the mask shows the pair: 3 T - 2 of them for each of two heads.
    ("encoder", "s[window=1,synthesizer=factorised_random,rank=5]"): (
        2 * C * C + 2 * C + 2 * 2 * 16 * 5,
        4 * T * C * C + 2 * (3 * T - 2) * (2 * 5 + C),
    ),
}


@pytest.mark.parametrize(("direction", "sublayer"), BY_HAND)
def test_sums_by_hand(direction, sublayer):
    sizes = EncoderSizes(17, C, W, 2, 16, 0) if direction == "encoder" else CausalSizes(17, C, W, 2)
    planned = read_sublayer(sublayer)
    found = (
        count_sublayer_parameters(planned, sizes) - 2 * C,
        count_sublayer_flops(planned, sizes, T, 0 if direction == "encoder" else K - T),
    )
    assert found == BY_HAND[direction, sublayer]


def test_what_a_sublayer_reads_decides():
    """An l over projected keys multiplies with those; alone it reads a plain s."""
    sizes = EncoderSizes(17, C, W, 2, 16, 0)
    flops = [count_sublayer_flops(plan(f"{s} l")[1], sizes, T) for s in ("s", "s[persistent=2]")]
    assert flops[1] - flops[0] == 2 * T * 2 * C
    assert count_sublayer_flops(read_sublayer("l"), sizes, T) == flops[0]


@pytest.mark.slow
def test_a_plain_count_does_not_import_torchs_compiler():
    """It takes two seconds, as much as all of torch."""
    code = """if True:
        import json, sys
        from lazyformer_fairseq.measure.costs.flops import count_flops, count_parameters
        from lazyformer_fairseq.patterns.kinds import CausalSizes, EncoderSizes
        for sizes in (EncoderSizes(17, 8, 20, 2), CausalSizes(17, 8, 20, 2, (5, 9), 2)):
            count_flops("sflfskf s[window=2]", sizes, 6), count_parameters("sf", sizes)
        print(json.dumps("torch._dynamo" in sys.modules))
    """
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) is False


BASE = CausalSizes(267_735, 512, 2048, 8, (19_997, 39_997, 199_997))


@pytest.mark.parametrize(
    ("pattern", "parameters", "billions"),
    [
        ("(sf)x16", 191_950_298, 27),
        ("(s)x6 (sf)x10 (f)x6", 191_950_298, 27),
        ("(sfff)x6 (f)x8", 199_840_218, 17),
    ],
)
def test_table_6_of_the_par_paper(pattern, parameters, billions):
    assert count_parameters(pattern, BASE) == parameters
    assert count_flops(pattern, BASE, time=64, memory=640) / 1e9 == pytest.approx(billions, rel=0.06)


def test_figure_1_of_the_par_paper_ranks_the_blocks():
    attention, lazy, feed_forward = (count_sublayer_flops(planned, BASE, 64, 640) for planned in plan("slf"))
    assert attention > lazy > feed_forward


@pytest.mark.parametrize(("of_third", "of_second", "rounded"), [(0, 0, (27, 16)), (2, 1, (27, 17)), (5, 1, (27, 17))])
def test_words_in_further_bands_make_pars_table_6_of_our_count(of_third, of_second, rounded):
    """Its 27 and 17 GFLOPs at tgt_len 64 and mem_len 640: words of a band meet all words of that band."""
    first, second, third = BASE.cutoffs
    further = 2 * BASE.embed_dim * (of_second * (second - first) + of_third * (third - second))
    patterns = [CAUSAL_ARCHITECTURES[f"{name}_base"].sublayer_pattern for name in ("transformer_xl", "par_transformer")]
    assert tuple(round((count_flops(each, BASE, 64, 640) + further) / 1e9) for each in patterns) == rounded


def test_a_pattern_that_cannot_be_read_is_named():
    with pytest.raises(UserError, match=r"'\(sz\)x2', character 3"):
        count_parameters("(sz)x2", CausalSizes(17, 4, 4, 1))
