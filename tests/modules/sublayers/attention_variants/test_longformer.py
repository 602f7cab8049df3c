"""Longformer's global tokens: where they are like plain attention, and who marks them."""

from types import SimpleNamespace

import pytest
import torch
from helpers import head_logits
from tiny_networks import HEADS, WIDTH, make_decoder, make_encoder, random_tokens, vectors
from torch import nn

from lazyformer_fairseq.data.text.interface import SpecialIds
from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.evaluation.costs.flops import count_parameters
from lazyformer_fairseq.evaluation.inference import TrainedModel
from lazyformer_fairseq.modules.networks.causal_decoder import CausalDecoder, init_transformer_xl_weights
from lazyformer_fairseq.modules.networks.encoder import Encoder, TokenInfo, init_bert_weights
from lazyformer_fairseq.modules.networks.named import build
from lazyformer_fairseq.patterns.architectures import ARCHITECTURES
from lazyformer_fairseq.patterns.kinds import DISTRIBUTION, EncoderSizes


def with_copies(wide: nn.Module, plain: nn.Module) -> tuple[nn.Module, nn.Module]:
    """With copied projections; and the same weights without global tokens."""
    wide.train().apply(lambda module: module.initialize_copies() if hasattr(module, "initialize_copies") else None)
    plain.load_state_dict({name: weight for name, weight in wide.state_dict().items() if "window" not in name})
    return wide, plain


@pytest.mark.parametrize("more", ["", "entmax=1.5"])
def test_with_a_window_over_the_text_a_global_token_is_like_any_other(more):
    """T5's bias reaches it, and entmax acts on it; padding on either side."""
    buckets = 0 if more else 8
    encoder = make_encoder(f"s[window=20,global=2{',' * bool(more)}{more}]l", relative_position_buckets=buckets)
    pair = with_copies(encoder, make_encoder(f"s[{more}]l" if more else "sl", relative_position_buckets=buckets))
    padding = torch.zeros(2, 11, dtype=torch.bool)
    padding[0, 8:] = True
    for mask in (None, padding, padding.flip(-1)):
        results = []
        for network in pair:
            y, _ = network(vectors(2, 11), mask)
            y = y if mask is None else y.masked_fill(mask[..., None], 0)
            learns = [network.relative_position_bias.table if buckets else network.sublayers[1].layer_norm.weight]
            results.append((y, *torch.autograd.grad(y.square().sum() + y.sum(), learns)))
        torch.testing.assert_close(*results)


def test_causal_global_tokens_are_seen_by_all_and_see_the_past():
    """With copied projections and a window over everything, they are like any other; with a window of 1, seen."""
    wide, plain, narrow = (
        make_decoder(f"{text}l", mem_len=0) for text in ("s[window=9,global=2]", "s", "s[window=1,global=2]")
    )
    with_copies(wide, plain)
    narrow.load_state_dict(wide.state_dict())
    tokens = random_tokens(2, 8)
    torch.testing.assert_close(wide(tokens)[0], plain(tokens)[0])
    x = vectors(2, 8)
    _, handed_on = narrow.sublayers[0].inner(x, {}, narrow.context(x))
    dense = handed_on[DISTRIBUTION].probabilities[0, 0]
    assert [[j for j in range(8) if dense[i, j] > 0] for i in range(8)] == [
        [0], [0, 1], [0, 1, 2], [0, 1, 2, 3], [0, 1, 3, 4], [0, 1, 4, 5], [0, 1, 5, 6], [0, 1, 6, 7]
    ]  # fmt: skip


def test_text_shorter_than_its_global_tokens():
    encoder = make_encoder("s[window=1,global=4]l")
    padding = torch.tensor([[True, True, True, False, False], [False] * 5])
    for mask in (padding, padding.flip(-1), None):
        assert encoder(vectors(2, 5), mask)[0].isfinite().all()
    alone, _ = encoder(vectors(2, 5)[:1, 3:])
    torch.testing.assert_close(encoder(vectors(2, 5), padding)[0][:1, 3:], alone)


@pytest.mark.parametrize("causal", [False, True])
def test_projections_of_global_tokens_start_as_copies(causal):
    pattern, sizes = "s[window=2,global=1]lf", (17, WIDTH, 20, HEADS)
    for draw in (None, init_transformer_xl_weights if causal else init_bert_weights):
        network = CausalDecoder(pattern, *sizes, mem_len=0) if causal else Encoder(pattern, *sizes)
        if draw is not None:
            network.apply(draw)
        attention, lazy = network.sublayers[0].inner, network.sublayers[1].inner
        plain = torch.cat([attention.q_proj.weight, attention.kv_proj.weight]) if causal else attention.qkv_proj.weight
        choice, makers = attention.choices["window"], attention.value_transforms["window"]
        own = torch.cat([choice.q_proj.weight, choice.k_proj.weight, makers.v_proj.weight])
        assert torch.equal(own, plain) and own.data_ptr() != plain.data_ptr()
        assert torch.equal(lazy.value_transforms["window"].v_proj.weight, lazy.v_proj.weight)
        assert not torch.equal(lazy.v_proj.weight, makers.v_proj.weight)


def test_parameters_of_the_base_model_are_the_published_ones():
    """Hugging Face's has two positions more, and a token type."""
    from transformers import LongformerConfig, LongformerForMaskedLM

    sizes = dict(vocab_size=50_265, attention_window=[512] * 12, max_position_embeddings=4098, type_vocab_size=1)
    with torch.device("meta"):
        theirs = sum(map(torch.numel, LongformerForMaskedLM(LongformerConfig(**sizes)).parameters()))
    row = ARCHITECTURES["longformer_base"]
    sizes = EncoderSizes(50_265, row.encoder_embed_dim, row.encoder_ffn_embed_dim, 12, row.max_positions, 0)
    assert count_parameters(row.sublayer_pattern, sizes) == theirs - 3 * 768


# --- global tokens that the caller marks ------------------------------------------------------------------------------


def test_positions_that_nobody_asks_for_or_that_nobody_gives():
    mask = torch.zeros(2, 9, dtype=torch.bool)
    encoder = make_encoder("s[window=2,global=given]")
    for network, given, message in (
        (make_encoder("s[window=2,global=1]"), mask, "no sublayer of the pattern has global=given"),
        (encoder, None, "pass global_positions"),
        (encoder, mask[:1], r"must be torch.bool \(2, 9\)"),
        (encoder, mask.long(), r"must be torch.bool \(2, 9\)"),
    ):
        with pytest.raises(UserError, match=message):
            network(vectors(2, 9), info=TokenInfo(global_positions_BT=given))


def model_of_letters(pattern: str) -> nn.Module:
    from fairseq.data import Dictionary

    from lazyformer_fairseq import LazyFormerModel
    from lazyformer_fairseq.fairseq_plugin.models.config import MaskedLMConfig

    dictionary = Dictionary()
    for letter in "abcdefgh":
        dictionary.add_symbol(letter)
    row = ARCHITECTURES["longformer_tiny"].options()
    return LazyFormerModel(MaskedLMConfig(**{**row, "sublayer_pattern": pattern, "max_positions": 12}), dictionary)


def test_a_model_hands_positions_down():
    sizes = {"sublayer_pattern": "(s[window=1,global=given]lf)x2", "max_positions": 12}
    model = build("longformer_tiny", 12, **sizes).double().eval()
    tokens = torch.randint(4, 12, (2, 9), generator=torch.Generator().manual_seed(3))
    none, last = (torch.zeros(2, 9, dtype=torch.bool) for _ in range(2))
    last[:, 8] = True
    other = tokens.clone()
    other[:, 8] = 4 + (tokens[:, 8] - 3) % 8
    changed = [
        (model(tokens, global_positions=mask)[0] - model(other, global_positions=mask)[0]).abs().amax((0, 2)) > 1e-13
        for mask in (none, last)
    ]
    # Each of four attending sublayers looks one token further, unless the last one is seen by all.
    assert changed[0].tolist() == [False] * 4 + [True] * 5
    assert changed[1].all()


def test_texts_come_with_positions():
    model = model_of_letters("s[window=1,global=given]f")
    dictionary = model.encoder.dictionary
    model.register_classification_head("choice", 3)
    special = SpecialIds(*(getattr(dictionary, name)() for name in ("bos", "pad", "eos", "unk")), mask=0)
    letters = SimpleNamespace(special=special, build_input=lambda text: [dictionary.index(each) for each in text])
    hub = TrainedModel(model, letters)
    ids = hub.encode("abcdefgh", "hag")
    is_a = ids.eq(dictionary.index("a"))
    expected, _ = model(ids, features_only=True, global_positions=is_a)
    assert torch.equal(hub.extract_features("abcdefgh", "hag", global_positions=is_a), expected)
    logits = head_logits(hub, "choice", "abcdefgh", "hag", global_positions=is_a)
    torch.testing.assert_close(logits, model.classification_heads["choice"](expected))
    with pytest.raises(UserError, match="pass global_positions"):
        hub.extract_features("abcdefgh")
