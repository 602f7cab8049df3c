"""Longformer's window, gaps and global tokens against masks in torch's attention; padding, precision, dropout."""

import pytest
import torch
from longformers import C, D, N, in_window, inputs, make_decoder, make_encoder
from torch import Tensor, nn
from torch.nn import functional as F

from lazyformer_fairseq.measure.costs.flops import count_parameters
from lazyformer_fairseq.modules.networks.causal_decoder import CausalDecoder, init_transformer_xl_weights
from lazyformer_fairseq.modules.networks.encoder import Encoder, init_bert_weights
from lazyformer_fairseq.patterns.architectures import ARCHITECTURES
from lazyformer_fairseq.patterns.kinds import DISTRIBUTION, EncoderSizes


def masked(
    attention: nn.Module, x_BTC: Tensor, steps: list[int], window: int, tokens: int = 0, lazy: nn.Module | None = None
) -> Tensor:
    """An encoder's attention with a mask written key by key; of a lazy sublayer above, if given, over the same input.

    Rows of global tokens come from their own projections.
    """
    time = x_BTC.size(1)
    seen = torch.tensor(
        [
            [[in_window(i, j, window, step, False) or j < tokens for j in range(time)] for i in range(time)]
            for step in steps
        ]
    )
    q, k, v = (part.unflatten(-1, (N, D)).transpose(1, 2) for part in attention.qkv_proj(x_BTC).chunk(3, -1))
    last = attention if lazy is None else lazy
    if lazy is not None:
        v = lazy.v_proj(x_BTC).unflatten(-1, (N, D)).transpose(1, 2)
    output = F.scaled_dot_product_attention(q, k, v, attn_mask=seen)
    if tokens:
        choice = attention.choices["window"]
        q, k, v = (
            part(x_BTC).unflatten(-1, (N, D)).transpose(1, 2)
            for part in (choice.q_proj, choice.k_proj, last.value_makers["window"].v_proj)
        )
        output = torch.cat([F.scaled_dot_product_attention(q[:, :, :tokens], k, v), output[:, :, tokens:]], 2)
    return last.out_proj(output.transpose(1, 2).flatten(2))


@pytest.mark.parametrize("back_end", ["eager", "recompute", "tiles"])
@pytest.mark.parametrize(
    "settings, steps",
    [
        ("dilation=2", [1, 2, 2]),
        ("dilation=3,dilated_heads=1", [1, 1, 3]),
        ("dilation=4,dilated_heads=3,global=2", [4, 4, 4]),
        ("global=1", [1, 1, 1]),
    ],
)
def test_gaps_and_a_lazy_sublayer_are_those_of_a_mask(settings, steps, back_end):
    encoder = make_encoder(f"s[window=2,{settings}]l", attention_backend=back_end)
    attention, lazy = (sublayer.inner for sublayer in encoder.sublayers)
    tokens = attention.choices["window"].first
    results = []
    for explicit in (False, True):
        x = inputs(2, 13).requires_grad_()
        if explicit:
            y = masked(attention, x, steps, 2, tokens)
            above = masked(attention, x, steps, 2, tokens, lazy)
        else:
            shared = encoder.context(x)
            y, handed_on = attention(x, {}, shared)
            above, _ = lazy(x, handed_on, shared)
        loss = (y * torch.linspace(-1, 1, y.numel()).double().view_as(y)).sum() + above.square().sum()
        weights = [*attention.parameters(), *lazy.parameters()]
        results.append((y, above, *torch.autograd.grad(loss, [x, *weights])))
    for ours, others in zip(*results, strict=True):
        torch.testing.assert_close(ours, others, atol=1e-10, rtol=1e-8)


def test_the_distribution_written_out_is_what_a_lazy_sublayer_reads():
    encoder = make_encoder("s[window=2,global=2]l")
    x = inputs(2, 9)
    _, handed_on = encoder.sublayers[0].inner(x, {}, encoder.context(x))
    dense = handed_on[DISTRIBUTION].probabilities
    values = torch.randn(2, N, 9, D, dtype=torch.double)
    torch.testing.assert_close(handed_on[DISTRIBUTION].attend((values, values), 0.0), dense @ values)
    torch.testing.assert_close(dense.sum(-1), torch.ones(2, N, 9).double())
    assert (dense[:, :, 2:, 2:] > 0).sum(-1).max() <= 5 and (dense[:, :, :2] > 0).all()


def test_t5s_bias_reaches_global_tokens():
    """With a window over the text and copied projections, a global token is like any other."""
    encoder = make_encoder("s[window=20,global=2]", relative_position_buckets=8).train()
    plain = make_encoder("s", relative_position_buckets=8)
    plain.load_state_dict({name: weight for name, weight in encoder.state_dict().items() if "window" not in name})
    encoder.apply(lambda module: module.start_copies() if hasattr(module, "start_copies") else None)
    padding = torch.zeros(2, 11, dtype=torch.bool)
    padding[0, 8:] = True
    for mask in (None, padding, padding.flip(-1)):
        results = []
        for network in (encoder, plain):
            y, _ = network(inputs(2, 11), mask)
            y = y if mask is None else y.masked_fill(mask[..., None], 0)
            table = network.relative_position_bias.table
            results.append((y, *torch.autograd.grad(y.square().sum() + y.sum(), [table])))
        torch.testing.assert_close(*results)


@pytest.mark.parametrize("settings", ["", ",dilation=2,dilated_heads=1"])
@pytest.mark.parametrize("memory_length", [0, 5])
def test_a_causal_window_with_memory_is_that_of_a_mask(memory_length, settings):
    """Against Transformer-XL's scores of our plain attention, with what is out of the window taken out."""
    windowed, plain = (make_decoder(f"{text}l") for text in (f"s[window=3{settings}]", "s"))
    plain.load_state_dict(windowed.state_dict())
    x = inputs(2, 6 + memory_length)
    x, memory = x[:, memory_length:], x[:, :memory_length] if memory_length else None
    found = []
    for decoder in (windowed, plain):
        attention, lazy = (sublayer.inner for sublayer in decoder.sublayers)
        shared = decoder.context(x, memory_length)
        y, handed_on = attention(x, {}, shared, memory)
        found.append((handed_on[DISTRIBUTION].probabilities, lazy(x, handed_on, shared, memory)[0], y))
    steps = [1, 1, 2] if settings else [1, 1, 1]
    keys = memory_length + 6
    seen = torch.tensor(
        [[[in_window(memory_length + i, j, 3, step, True) for j in range(keys)] for i in range(6)] for step in steps]
    )
    expected = found[1][0] * seen
    expected = expected / expected.sum(-1, keepdim=True)
    torch.testing.assert_close(found[0][0], expected)
    lazy = windowed.sublayers[1].inner
    both = x if memory is None else torch.cat([memory, x], 1)
    v = lazy.v_proj(both).unflatten(-1, (N, D)).transpose(1, 2)
    torch.testing.assert_close(found[0][1], lazy.out_proj((expected @ v).transpose(1, 2).flatten(2)))


def test_causal_global_tokens_are_seen_by_all_and_see_the_past():
    """With copied projections and a window over everything, they are like any other; with a window of 1, seen."""
    wide, plain, narrow = (make_decoder(f"{text}l") for text in ("s[window=9,global=2]", "s", "s[window=1,global=2]"))
    wide.apply(lambda module: module.start_copies() if hasattr(module, "start_copies") else None)
    narrow.load_state_dict(wide.state_dict())
    plain.load_state_dict({name: weight for name, weight in wide.state_dict().items() if "window" not in name})
    tokens = torch.randint(17, (2, 8), generator=torch.Generator().manual_seed(3))
    torch.testing.assert_close(wide(tokens)[0], plain(tokens)[0])

    x = inputs(2, 8).requires_grad_()
    y, handed_on = narrow.sublayers[0].inner(x, {}, narrow.context(x))
    dense = handed_on[DISTRIBUTION].probabilities[0, 0]
    assert [[j for j in range(8) if dense[i, j] > 0] for i in range(8)] == [
        [0], [0, 1], [0, 1, 2], [0, 1, 2, 3], [0, 1, 3, 4], [0, 1, 4, 5], [0, 1, 5, 6], [0, 1, 6, 7]
    ]  # fmt: skip
    gradients = torch.autograd.grad(y.sum(), list(narrow.sublayers[0].parameters()), allow_unused=True)
    unused = [
        name for (name, _), each in zip(narrow.sublayers[0].named_parameters(), gradients, strict=True) if each is None
    ]
    assert unused == ["layer_norm.weight", "layer_norm.bias"]


@pytest.mark.parametrize("settings", ["window=2", "window=2,dilation=2,global=2", "window=1,global=given"])
def test_padding_changes_nothing(settings):
    encoder = make_encoder(f"(s[{settings}]lf)x2", relative_position_buckets=8)
    x, time = inputs(1, 9), 9
    given = (torch.arange(time) == 4)[None] if "given" in settings else None
    alone, _ = encoder(x, None, global_positions_BT=given)
    for before, after in ((0, 3), (3, 0), (2, 2)):
        padded = F.pad(x, (0, 0, before, after), value=50.0)
        mask = F.pad(torch.zeros(1, time, dtype=torch.bool), (before, after), value=True)
        marks = None if given is None else F.pad(given, (before, after))
        found, _ = encoder(padded, mask, global_positions_BT=marks)
        torch.testing.assert_close(found[:, before : before + time], alone)
        assert found.isfinite().all()


def test_text_shorter_than_its_global_tokens():
    encoder = make_encoder("s[window=1,global=4]l")
    padding = torch.tensor([[True, True, True, False, False], [False] * 5])
    for mask in (padding, padding.flip(-1), None):
        found, _ = encoder(inputs(2, 5), mask)
        assert found.isfinite().all()
    alone, _ = encoder(inputs(2, 5)[:1, 3:])
    torch.testing.assert_close(encoder(inputs(2, 5), padding)[0][:1, 3:], alone)


@pytest.mark.parametrize("precision", [torch.bfloat16, torch.float16])
def test_half_precision_and_dropout(precision):
    encoder = make_encoder("s[window=2,dilation=2,global=1]lf", attention_dropout=0.1, relative_position_buckets=8)
    reference, _ = encoder(inputs(2, 16))
    found, _ = encoder.to(precision)(inputs(2, 16).to(precision))
    assert (found.double() - reference).abs().max() < 0.1
    torch.manual_seed(1)
    encoder.train()(inputs(2, 16).to(precision))[0].sum().backward()
    assert all(each.grad is not None and each.grad.isfinite().all() for each in encoder.parameters())


def test_entmax_acts_on_global_tokens_too():
    """With a window over the text and copied projections, a global token is like any other."""
    encoder, plain = make_encoder("s[window=20,global=2,entmax=1.5]l"), make_encoder("s[entmax=1.5]l")
    encoder.apply(lambda module: module.start_copies() if hasattr(module, "start_copies") else None)
    plain.load_state_dict({name: weight for name, weight in encoder.state_dict().items() if "window" not in name})
    torch.testing.assert_close(encoder(inputs(2, 9))[0], plain(inputs(2, 9))[0])


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
