"""FLOPs by formula against torch's own counter on built models."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from lazyformer_fairseq.measure.costs.flops import count_flops, count_sublayer_flops
from lazyformer_fairseq.modules.networks.adaptive_softmax import AdaptiveSoftmax
from lazyformer_fairseq.modules.networks.causal_decoder import CausalDecoder
from lazyformer_fairseq.modules.networks.encoder import Encoder
from lazyformer_fairseq.modules.networks.heads import MaskedLMHead
from lazyformer_fairseq.modules.networks.stream_memory import StreamMemory
from lazyformer_fairseq.patterns.architectures import CAUSAL_ARCHITECTURES
from lazyformer_fairseq.patterns.grammar import plan
from lazyformer_fairseq.patterns.sizes import CausalSizes, EncoderSizes

PATTERNS = ["M1x2", "M3x1", "(sff)x2 (f)x2", "sflflf sfff"]


def counted(forward) -> int:
    """What torch counts; the plain kernel of attention, since its counter passes over the CPU's fused one."""
    with sdpa_kernel(SDPBackend.MATH), torch.no_grad(), FlopCounterMode(display=False) as counter:
        forward()
    return counter.get_total_flops()


@settings(max_examples=20)
@given(
    pattern=st.sampled_from(PATTERNS),
    heads=st.integers(1, 3),
    head_size=st.integers(1, 5),
    width=st.integers(1, 20),
    time=st.integers(1, 9),
    batch=st.integers(1, 3),
    buckets=st.sampled_from([0, 8]),
)
def test_an_encoder_with_its_head(pattern, heads, head_size, width, time, batch, buckets):
    sizes = EncoderSizes(17, heads * head_size, width, heads, 10, buckets)
    encoder = Encoder(
        pattern, 17, heads * head_size, width, heads,
        max_positions=10, relative_position_buckets=buckets, attention_backend="eager",
    )  # fmt: skip
    head = MaskedLMHead(sizes.embed_dim, encoder.embed_tokens)
    tokens = torch.randint(2, 17, (batch, time))
    expected = count_flops(pattern, sizes, time, batch=batch)
    assert counted(lambda: head(encoder(tokens)[0])) == expected

    masked = torch.zeros(batch, time, dtype=torch.bool)
    masked[:, 0] = True
    expected = count_flops(pattern, sizes, time, batch=batch, predicted=1)
    assert counted(lambda: head(encoder(tokens)[0], masked)) == expected


@settings(max_examples=20)
@given(
    pattern=st.sampled_from(PATTERNS),
    heads=st.integers(1, 3),
    head_size=st.sampled_from([2, 4]),
    width=st.integers(1, 20),
    time=st.integers(1, 9),
    memory=st.integers(0, 12),
    batch=st.integers(1, 3),
    cutoffs=st.sampled_from([(), (8,), (7, 11)]),
    div_val=st.sampled_from([1, 2]),
)
def test_a_causal_model_that_predicts_frequent_words(
    pattern, heads, head_size, width, time, memory, batch, cutoffs, div_val
):
    embed_dim = heads * head_size * 2
    sizes = CausalSizes(17, embed_dim, width, heads, cutoffs, div_val)
    decoder = CausalDecoder(
        pattern, 17, embed_dim, width, heads, mem_len=memory, cutoffs=cutoffs, div_val=div_val,
        attention_backend="eager",
    )  # fmt: skip
    softmax = AdaptiveSoftmax(decoder.embedding)
    tokens = torch.randint(0, 7, (batch, time))
    stream = StreamMemory()
    with torch.no_grad():
        decoder(torch.randint(0, 17, (batch, memory or 1)), stream)

    def forward():
        features, _ = decoder(tokens, stream)
        softmax.negative_log_likelihood(features.flatten(0, 1), tokens.flatten(), decoder.embedding)

    assert counted(forward) == count_flops(pattern, sizes, time, memory, batch)


@pytest.mark.parametrize(
    ("pattern", "billions"), [("(sf)x16", 27), ("(s)x6 (sf)x10 (f)x6", 27), ("(sfff)x6 (f)x8", 17)]
)
def test_table_6_of_the_par_paper(pattern, billions):
    base = CausalSizes(267_735, 512, 2048, 8, (19_997, 39_997, 199_997))
    assert count_flops(pattern, base, time=64, memory=640) / 1e9 == pytest.approx(billions, rel=0.06)


def test_figure_1_of_the_par_paper_ranks_the_blocks():
    base = CausalSizes(267_735, 512, 2048, 8)
    attention, lazy, feed_forward = (count_sublayer_flops(planned, base, 64, 640) for planned in plan("slf"))
    assert attention > lazy > feed_forward


@pytest.mark.parametrize(("of_third", "of_second", "rounded"), [(0, 0, (27, 16)), (2, 1, (27, 17)), (5, 1, (27, 17))])
def test_words_in_further_bands_make_pars_table_6_of_our_count(of_third, of_second, rounded):
    """Its 27 and 17 GFLOPs at tgt_len 64 and mem_len 640: words of a band meet all words of that band."""
    counts = []
    for name in ("transformer_xl_base", "par_transformer_base"):
        row = CAUSAL_ARCHITECTURES[name]
        cutoffs = [int(cutoff) for cutoff in row.adaptive_softmax_cutoff.split(",")]
        widths = (row.decoder_embed_dim, row.decoder_ffn_embed_dim, row.decoder_attention_heads)
        sizes = CausalSizes(267_735, *widths, tuple(cutoffs))
        further = of_second * (cutoffs[1] - cutoffs[0]) + of_third * (cutoffs[2] - cutoffs[1])
        counts.append(count_flops(row.sublayer_pattern, sizes, 64, 640) + 2 * row.decoder_embed_dim * further)
    assert tuple(round(count / 1e9) for count in counts) == rounded
