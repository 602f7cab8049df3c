from argparse import Namespace
from unittest import mock

import pytest
import torch
from every_variant import ENCODERS, ON_A_CPU
from helpers import dictionary_of
from tiny_networks import loud
from torch import nn
from torch.nn import functional as F

from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.modules.networks.encoder import (
    Encoder,
    RelativePositionBias,
    init_bert_weights,
    relative_position_bucket,
)
from lazyformer_fairseq.modules.networks.heads import MaskedLMHead
from lazyformer_fairseq.modules.networks.masked_lm import MaskedLM
from lazyformer_fairseq.modules.networks.options import MaskedLMOptions
from lazyformer_fairseq.modules.sublayers.feed_forward import FeedForward
from lazyformer_fairseq.modules.sublayers.interface import Sublayer
from lazyformer_fairseq.patterns.kinds import DISTRIBUTION

PAD, VOCABULARY = 1, 50


def make_encoder(pattern: str, **options) -> Encoder:
    sizes = dict(vocab_size=VOCABULARY, embed_dim=16, ffn_embed_dim=24, num_heads=2, max_positions=32)
    return loud(Encoder(pattern, **{**sizes, **options}), 0.3).float()


def random_tokens(batch: int, time: int) -> torch.Tensor:
    return torch.randint(4, VOCABULARY, (batch, time), generator=torch.Generator().manual_seed(2))


def with_padding(tokens: torch.Tensor) -> torch.Tensor:
    padded = tokens.clone()
    padded[1, -3:] = PAD
    return padded


def roberta_with(normalize_before: bool, without_positions: bool = False) -> nn.Module:
    from fairseq.models.roberta.model import RobertaEncoder

    args = Namespace(
        encoder_layers=3, encoder_embed_dim=16, encoder_ffn_embed_dim=24, encoder_attention_heads=2, max_positions=32,
        encoder_normalize_before=normalize_before, layernorm_embedding=not normalize_before,
        no_token_positional_embeddings=without_positions,
    )  # fmt: skip
    return loud(RobertaEncoder(args, dictionary_of(VOCABULARY)), 0.3).float()


def copy_roberta(roberta: nn.Module, encoder: Encoder, head: MaskedLMHead) -> None:
    theirs = roberta.sentence_encoder
    encoder.embed_tokens.load_state_dict(theirs.embed_tokens.state_dict())
    if encoder.embed_positions is not None:
        encoder.embed_positions.weight.data.copy_(theirs.embed_positions.weight[PAD + 1 :])
    if encoder.embedding_layer_norm is not None:
        encoder.embedding_layer_norm.load_state_dict(theirs.layernorm_embedding.state_dict())
    else:
        encoder.final_layer_norm.load_state_dict(theirs.layer_norm.state_dict())
    for number, layer in enumerate(theirs.layers):
        attention, feed_forward = encoder.sublayers[2 * number], encoder.sublayers[2 * number + 1]
        projections = (layer.self_attn.q_proj, layer.self_attn.k_proj, layer.self_attn.v_proj)
        attention.inner.qkv_proj.weight.data.copy_(torch.cat([part.weight for part in projections]))
        attention.inner.qkv_proj.bias.data.copy_(torch.cat([part.bias for part in projections]))
        attention.inner.out_proj.load_state_dict(layer.self_attn.out_proj.state_dict())
        attention.layer_norm.load_state_dict(layer.self_attn_layer_norm.state_dict())
        feed_forward.inner.fc1.load_state_dict(layer.fc1.state_dict())
        feed_forward.inner.fc2.load_state_dict(layer.fc2.state_dict())
        feed_forward.layer_norm.load_state_dict(layer.final_layer_norm.state_dict())
    head.load_state_dict(roberta.lm_head.state_dict())


@pytest.mark.parametrize("normalize_before", [False, True])
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("without_positions", [False, True])
def test_the_plain_pattern_equals_fairseqs_roberta(normalize_before, padded, without_positions):
    roberta = roberta_with(normalize_before, without_positions)
    options = {"relative_position_buckets": 0, "no_token_positional_embeddings": without_positions}
    encoder = make_encoder("(sf)x3", normalize_before=normalize_before, **options)
    assert (encoder.embed_positions is None) == without_positions == encoder.sizes.no_token_positional_embeddings
    head = MaskedLMHead(16, encoder.embed_tokens)
    copy_roberta(roberta, encoder, head)
    tokens = random_tokens(2, 9)
    tokens = with_padding(tokens) if padded else tokens
    is_text = tokens.ne(PAD)

    theirs, _ = roberta(tokens)
    ours = head(encoder(tokens, ~is_text if padded else None)[0])
    torch.testing.assert_close(ours[is_text], theirs[is_text], rtol=1e-5, atol=1e-5)
    for logits in (ours, theirs):
        logits[is_text].sin().mean().backward()
    gradients = encoder.embed_tokens.weight.grad, roberta.sentence_encoder.embed_tokens.weight.grad
    torch.testing.assert_close(*(gradient[PAD + 1 :] for gradient in gradients), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("pattern", ["(sflf)x2", "M3", "(sfflff)x2 f", "sslf"])
@pytest.mark.parametrize("buckets", [0, 32])
@pytest.mark.parametrize(
    "options", [{"normalize_before": True}, *({"attention_backend": name} for name in ON_A_CPU)], ids=str
)
def test_padding_changes_nothing_wherever_it_stands(pattern, buckets, options):
    encoder, tokens = make_encoder(pattern, relative_position_buckets=buckets, **options).double(), random_tokens(4, 9)
    is_padding = torch.zeros(4, 9, dtype=torch.bool)
    is_padding[0, :3] = is_padding[1, 4:6] = is_padding[2, 6:] = True
    found, states = encoder(tokens, is_padding, return_all=True)
    assert encoder.normalize_before or torch.equal(states[-1], found)
    for tokens_T, found_TC, is_padding_T in zip(tokens, found, is_padding, strict=True):
        torch.testing.assert_close(found_TC[~is_padding_T], encoder(tokens_T[~is_padding_T][None])[0][0])


@pytest.mark.parametrize("backend", ON_A_CPU)
@pytest.mark.parametrize("padding", [slice(0, None), slice(0, -2)], ids=["right", "left"])
def test_a_row_of_padding_alone_harms_nobody(backend, padding):
    """In the first of two rows; the second is padded elsewhere or nowhere."""
    encoder = make_encoder("(sflf)x2", attention_backend=backend)
    tokens = random_tokens(2, 9)
    tokens[0] = PAD
    tokens[1, :-2] = PAD if padding.stop else tokens[1, :-2]
    features, _ = encoder(tokens, tokens.eq(PAD))
    gradients = torch.autograd.grad(features[tokens.ne(PAD)].sin().sum(), list(encoder.parameters()))
    assert all(part.isfinite().all() for part in (features, *gradients))


def test_without_dropout_training_is_deterministic_and_with_it_not():
    tokens, still = random_tokens(2, 9), make_encoder("M2x2").train()
    assert torch.equal(still(tokens)[0], still(tokens)[0])
    for option in ("dropout", "attention_dropout", "activation_dropout"):
        noisy = make_encoder("M2x2", **{option: 0.5}).train()
        assert not torch.equal(noisy(tokens)[0], noisy(tokens)[0]), option
        torch.testing.assert_close(noisy.eval()(tokens)[0], still.eval()(tokens)[0])


def test_each_sublayer_draws_its_own_attention_dropout_of_the_undropped_distribution():
    encoder = make_encoder("sll", attention_dropout=0.5).train()
    handed_on = []
    for sublayer in encoder.sublayers:
        sublayer.inner.register_forward_hook(lambda module, inputs, outputs: handed_on.append(outputs[1]))
    with mock.patch.object(F, "dropout", wraps=F.dropout) as dropout:
        encoder(random_tokens(2, 9))
    dropped = [call.args[0] for call in dropout.call_args_list if call.args[0].dim() == 4]
    assert len(dropped) == 3
    [stored] = [given[DISTRIBUTION] for given in handed_on if given]
    for distribution in (*dropped, stored.probabilities):
        assert distribution is dropped[0]
    torch.testing.assert_close(dropped[0].sum(-1), torch.ones(2, 2, 9))


def test_a_back_end_that_cannot_do_what_is_asked_is_refused():
    with pytest.raises(UserError, match="--attention-backend quick: choose from auto, eager"):
        make_encoder("sf", attention_backend="quick")
    with pytest.raises(
        UserError, match="--attention-backend fused: it does not support attention dropout; use --attention-dropout 0"
    ):
        make_encoder("sf", attention_backend="fused", attention_dropout=0.1)


def test_initialisation_is_berts():
    encoder = Encoder("M2x2", vocab_size=2000, embed_dim=64, ffn_embed_dim=128, num_heads=2)
    encoder.apply(init_bert_weights)
    for name, parameter in encoder.named_parameters():
        if name.endswith("bias") or "table" in name:
            assert not parameter.any(), name
        elif "layer_norm" in name:
            assert parameter.eq(1).all(), name
        else:
            assert parameter.std().item() == pytest.approx(0.02, rel=0.1), name
            assert parameter.mean().item() == pytest.approx(0, abs=1e-3), name
    assert not encoder.embed_tokens.weight[PAD].any()


def test_sizes_that_do_not_fit_are_refused():
    for pattern in ("sf", "sl"):
        with pytest.raises(ValueError, match="dimension of 16 is not divisible by 3 attention heads"):
            make_encoder(pattern, num_heads=3)
    with pytest.raises(ValueError, match="33 tokens is longer than the model's 32"):
        make_encoder("sf")(random_tokens(1, 33))


@pytest.mark.parametrize(("buckets", "max_distance"), [(32, 128), (8, 20), (4, 2)])
def test_buckets_follow_t5(buckets, max_distance):
    """transformers'."""
    t5 = pytest.importorskip("transformers.models.t5.modeling_t5", reason="transformers is not installed")
    distances, sizes = torch.arange(-300, 301), {"num_buckets": buckets, "max_distance": max_distance}
    found = relative_position_bucket(distances, buckets, max_distance)
    assert torch.equal(found, t5.T5Attention._relative_position_bucket(distances, **sizes))
    for side, last in ((1, buckets - 1), (-1, buckets // 2 - 1)):  # all far distances share one
        far = side * torch.tensor([max_distance, max_distance + 1, 10_000])
        assert relative_position_bucket(far, buckets, max_distance).tolist() == [last] * 3


@pytest.mark.parametrize(("buckets", "max_distance"), [(31, 128), (-4, 128), (32, 8)])
def test_impossible_tables_are_refused(buckets, max_distance):
    with pytest.raises(ValueError, match=str(buckets)):
        RelativePositionBias(2, buckets, max_distance)


# --- What a model starts with


def start_of(**options):
    sizes = {"encoder_embed_dim": 24, "encoder_ffn_embed_dim": 32, "encoder_attention_heads": 6, "max_positions": 16}
    torch.manual_seed(1)
    return MaskedLM(MaskedLMOptions(**{**sizes, "encoder_normalize_before": True, **options}), VOCABULARY)


def test_local_heads_begin_at_a_neighbour_each_and_the_others_free():
    bias = start_of(local_heads=True).encoder.sentence_encoder.relative_position_bias
    by_distance = relative_position_bucket(torch.arange(-8, 9), bias.num_buckets, bias.max_distance)
    table = bias.table.detach()[by_distance]  # (distances, heads)
    expected = torch.zeros(17, 6)
    for head, distance in enumerate((-1, 1, -2, 2)):
        expected[8 + distance, head] = 6.0
    assert torch.equal(table, expected)
    two = start_of(local_heads=True, encoder_attention_heads=2).encoder.sentence_encoder.relative_position_bias
    assert two.table.count_nonzero() == 2
    assert not start_of().encoder.sentence_encoder.relative_position_bias.table.any()


@pytest.mark.parametrize("buckets", [0, 8])
def test_local_heads_need_a_bucket_for_each_distance(buckets):
    with pytest.raises(UserError, match="--local-heads requires --relative-position-buckets 12 or more"):
        start_of(local_heads=True, relative_position_buckets=buckets)


@pytest.mark.parametrize("pattern", ["sflf", "c[form=lightweight]f[gate=gelu]", "sk-", *ENCODERS])
def test_last_maps_that_are_zero_leave_the_stream_as_it_is(pattern):
    tokens = random_tokens(2, 16)
    options = {"sublayer_pattern": pattern, "relative_position_buckets": 0, "attention_backend": "eager"}
    model = start_of(zero_last_maps=True, **options).eval()
    states = model(tokens, features_only=True, return_all_hiddens=True)[1]["inner_states"]
    assert len(states) > 1 and all(torch.equal(state, states[0]) for state in states)
    usual = start_of(**options).state_dict()
    changed = {name for name, weight in model.state_dict().items() if not torch.equal(weight, usual[name])}
    assert changed and all(name.split(".")[-2] in ("out_proj", "fc2") for name in changed)


def test_a_sublayer_that_names_no_last_map_is_refused_in_words(monkeypatch):
    monkeypatch.setattr(FeedForward, "last_map", Sublayer.last_map)
    with pytest.raises(
        UserError, match="--zero-last-maps: FeedForward has no out_proj; override last_map in this class"
    ):
        start_of(zero_last_maps=True)
