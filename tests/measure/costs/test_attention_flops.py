"""FLOPs of each back end, forward and backward, against torch's own counter."""

import pytest
import torch
from attention_with_bias import as_plain_functions
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count

from lazyformer_fairseq.fairseq_plugin.models.huggingface_bert import has_transformers
from lazyformer_fairseq.measure.bench.models import (
    FAIRSEQ,
    HUGGING_FACE,
    PIECES,
    FairseqRoberta,
    HuggingFaceBert,
    OnBackEnd,
)
from lazyformer_fairseq.measure.bench.run import encoder_training, inference
from lazyformer_fairseq.measure.costs.flops import (
    Flops,
    block_flops,
    count_encoder_flops,
    layers_of_block,
    makers_of_blocks,
)
from lazyformer_fairseq.modules.attention.back_ends import KERNELS
from lazyformer_fairseq.modules.attention.choice import back_ends_of
from lazyformer_fairseq.modules.networks.encoder import Encoder
from lazyformer_fairseq.modules.networks.heads import MaskedLMHead
from lazyformer_fairseq.patterns.kinds import EncoderSizes

aten = torch.ops.aten
# torch's counter knows the fused attention of a GPU, but not the processor's.
OF_A_PROCESSOR = {
    aten._scaled_dot_product_flash_attention_for_cpu: lambda q, k, v, *_, **__: sdpa_flop_count(q, k, v),
    aten._scaled_dot_product_flash_attention_for_cpu_backward: lambda gradient, q, k, v, *_, **__: (
        sdpa_backward_flop_count(gradient, q, k, v)
    ),
}


def counted(call) -> int:
    with FlopCounterMode(display=False, custom_mapping=OF_A_PROCESSOR) as counter:
        call()
    return counter.get_total_flops()


def as_steps(patch: pytest.MonkeyPatch) -> None:
    """Kernels as plain functions, of which the counter sees each product."""
    for name, kernels in KERNELS.items():
        patch.setitem(KERNELS, name, as_plain_functions(kernels.implementation))


@pytest.mark.parametrize("back_end", back_ends_of("cpu"))
@pytest.mark.parametrize("buckets", [0, 8])
@pytest.mark.parametrize("pattern", ["M1x2", "M2x2", "M3 M1 ff"])
def test_a_back_end(back_end, buckets, pattern, monkeypatch):
    as_steps(monkeypatch)
    sizes = EncoderSizes(17, 12, 20, 3, 16, buckets)
    encoder = Encoder(
        pattern, 17, 12, 20, 3, max_positions=16, relative_position_buckets=buckets, attention_backend=back_end
    )
    head = MaskedLMHead(12, encoder.embed_tokens)
    tokens = torch.randint(2, 17, (2, 16))
    positions = torch.tensor([1, 5, 30])

    def forward():
        return head(encoder(tokens)[0], positions)

    arguments = (pattern, sizes, 16, 2, len(positions), lambda layers: back_end)
    assert counted(lambda: forward().sum().backward()) == count_encoder_flops(*arguments, training=True)
    with torch.no_grad():
        assert counted(forward) == count_encoder_flops(*arguments)


@pytest.mark.parametrize(("name", "build"), [(FAIRSEQ, FairseqRoberta), (HUGGING_FACE, HuggingFaceBert)])
def test_a_baseline_of_others(name, build):
    if name == HUGGING_FACE and not has_transformers():
        pytest.skip("transformers cannot be imported")
    model = OnBackEnd(name, build(EncoderSizes(PIECES, 8, 12, 2, 32, 0), layers=2), "its own", 0, name)
    assert counted(encoder_training(model.model, 2, 16)) == model.count_flops(2, 16, training=True)
    assert counted(inference(model.model, 2, 16)) == model.count_flops(2, 16, training=False)


def test_products_of_fused_blocks():
    """m = 2 costs 4 + 8 against 4 + 10 of two fused layers, m = 3 costs 6 + 11 against 6 + 15."""
    one = Flops(0, 1, 1)
    counts = [[block_flops("fused", one, m, training) for training in (False, True)] for m in (1, 2, 3)]
    assert counts == [[2, 2 + 5], [4, 4 + 8], [6, 6 + 11]]


def test_blocks_of_a_pattern():
    assert list(map(layers_of_block, makers_of_blocks("M1 M3 (sflflf)x2 ss"))) == [1, 3, 3, 3, 1, 1]


@pytest.mark.parametrize(("time", "limit"), [(512, 1.02), (4096, 1.08), (8192, 1.11)])
def test_what_flops_allow_lazyformer_against_bert(time, limit):
    """Of M2x6-S in training beside BERT, both fused: what the speed-ups of docs/performance.md are to be read with."""
    bert, lazy = (EncoderSizes(32_768, 768, width, 12, time) for width in (3072, 3456))
    fused_flops = [
        count_encoder_flops(pattern, sizes, time, back_end=lambda maker: "fused", training=True)
        for pattern, sizes in (("M1x12", bert), ("M2x6", lazy))
    ]
    assert fused_flops[0] / fused_flops[1] == pytest.approx(limit, abs=0.006)
