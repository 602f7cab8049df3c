"""Evaluation: what the number is, and that it does not depend on the batch size."""

import math

import numpy as np
import pytest
import torch
from fairseq.data import Dictionary
from hypothesis import given, settings
from hypothesis import strategies as st

from lazyformer_fairseq.data.datasets.token_streams import TokenStreams
from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.fairseq_plugin.models.config import CausalLMConfig
from lazyformer_fairseq.fairseq_plugin.models.lazyformer import CausalLanguageModel
from lazyformer_fairseq.language_modeling.evaluate import Parts, attending_sublayers, evaluate, token_losses
from lazyformer_fairseq.modules.networks.stack import StreamMemory

WORDS = 24


def tiny_model(pattern: str, seed: int = 0) -> CausalLanguageModel:
    """With weights large enough that what is far back matters to the loss."""
    dictionary = Dictionary()
    for word in range(WORDS):
        dictionary.add_symbol(f"word{word}")
    torch.manual_seed(seed)
    cfg = CausalLMConfig(
        sublayer_pattern=pattern,
        decoder_embed_dim=8,
        decoder_ffn_embed_dim=8,
        decoder_attention_heads=2,
        adaptive_softmax_cutoff="",
        mem_len=5,
        dropout=0.3,
    )
    model = CausalLanguageModel(cfg, dictionary)
    for name, parameter in model.named_parameters():
        if "layer_norm" not in name:
            torch.nn.init.normal_(parameter, std=0.7)
    return model


def text(count: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(4, WORDS + 4, count)


def reference_losses(model, tokens, tgt_len, mem_len, clamp_len=0, same_length=False) -> list[float]:
    """A plain loop at batch size 1, by log-probabilities of all words."""
    model.eval()
    model.decoder.mem_len, model.decoder.clamp_len, model.decoder.same_length = mem_len, clamp_len, same_length
    memory, losses = StreamMemory(), []
    source = torch.tensor([2, *tokens[:-1]])
    for start in range(0, len(tokens), tgt_len):
        with torch.no_grad():
            log_probabilities, _ = model(source[None, start : start + tgt_len], memory=memory)
        targets = tokens[start : start + tgt_len]
        losses += [-log_probabilities[0, place, target].item() for place, target in enumerate(targets)]
    return losses


sizes = st.fixed_dictionaries(
    {
        "count": st.integers(1, 90),
        "tgt_len": st.integers(1, 9),
        "mem_len": st.integers(0, 14),
        "clamp_len": st.sampled_from([0, 3]),
        "same_length": st.booleans(),
    }
).map(lambda drawn: drawn | {"same_length": drawn["same_length"] and drawn["mem_len"] > 0})
patterns = st.sampled_from(["sfsf", "sflfsf", "sff", "fsf", "sslf"])


@settings(max_examples=8)
@given(sizes, patterns, st.integers(2, 12))
def test_every_batch_size_gives_the_number_of_batch_size_1(drawn, pattern, batch_size):
    model, tokens = tiny_model(pattern), text(drawn.pop("count"))
    alone = token_losses(model, tokens, 2, **drawn)
    together = token_losses(model, tokens, 2, **drawn, batch_size=batch_size)
    np.testing.assert_allclose(together, alone, atol=1e-4)
    np.testing.assert_allclose(alone, reference_losses(model, tokens, **drawn), atol=1e-4)


def test_streams_that_are_not_warmed_would_give_another(monkeypatch):
    model, tokens = tiny_model("sflfsf"), text(200)
    alone = token_losses(model, tokens, 2, tgt_len=4, mem_len=6)
    monkeypatch.setattr("lazyformer_fairseq.language_modeling.evaluate.attending_sublayers", lambda model: 0)
    cold = token_losses(model, tokens, 2, tgt_len=4, mem_len=6, batch_size=5)
    assert np.abs(cold - alone).max() > 1e-2 and abs(cold.mean() - alone.mean()) > 1e-4


def test_less_warming_than_attending_sublayers_times_the_memory_is_too_little(monkeypatch):
    """The bound is not a generous guess: one attending sublayer fewer shows in some token."""
    model, tokens = tiny_model("sfsfsf"), text(300)
    alone = token_losses(model, tokens, 2, tgt_len=4, mem_len=8)
    module = "lazyformer_fairseq.language_modeling.evaluate.attending_sublayers"
    monkeypatch.setattr(module, lambda model: attending_sublayers(model) - 1)
    short = token_losses(model, tokens, 2, tgt_len=4, mem_len=8, batch_size=6)
    assert np.abs(short - alone).max() > 1e-4


@given(st.integers(1, 400), st.integers(1, 40), st.integers(0, 60))
def test_every_segment_counts_once_after_as_many_as_it_needs(segments, streams, lead):
    parts = Parts.of(segments, streams, lead)
    counted = [parts.segments(step)[stream] for step in range(parts.steps) for stream in parts.counted(step)]
    assert sorted(counted) == list(range(segments))
    for step in range(parts.steps):
        for stream in parts.counted(step):
            first = parts.segments(step - min(step, lead))[stream]
            assert first <= max(parts.segments(step)[stream] - lead, 0)


def test_no_loss_depends_on_what_comes_later():
    model, tokens = tiny_model("sflfsf"), text(60)
    before = token_losses(model, tokens, 2, tgt_len=7, mem_len=10, batch_size=3)
    changed = tokens.copy()
    changed[33] = 4 + (changed[33] - 4 + 1) % WORDS
    after = token_losses(model, changed, 2, tgt_len=7, mem_len=10, batch_size=3)
    assert np.array_equal(after[:33], before[:33])
    assert after[33] != before[33] and (after[34:] != before[34:]).any()


def test_the_number_is_the_mean_over_every_token_the_first_among_them():
    model, tokens = tiny_model("sf"), text(50)
    result = evaluate(model, tokens, 2, tgt_len=8, mem_len=8)
    losses = reference_losses(model, tokens, 8, 8)
    assert result.tokens == 50 == len(losses)
    assert result.nats == pytest.approx(sum(losses) / 50, abs=1e-5)
    assert result.perplexity == pytest.approx(math.exp(result.nats))
    assert result.bits == pytest.approx(math.log2(result.perplexity))
    assert result.seconds > 0


def test_with_the_same_length_the_number_does_not_depend_on_the_segments():
    model, tokens = tiny_model("sflfsf"), text(60)
    by_segment = [token_losses(model, tokens, 2, tgt_len, 6, same_length=True) for tgt_len in (1, 4, 13, 60)]
    for losses in by_segment[1:]:
        np.testing.assert_allclose(losses, by_segment[0], atol=1e-4)
    assert np.abs(token_losses(model, tokens, 2, 13, 6) - by_segment[0]).max() > 1e-2


def test_without_a_memory_there_is_no_same_length():
    with pytest.raises(UserError, match="--same-length with --mem-len 0"):
        token_losses(tiny_model("sf"), text(9), 2, tgt_len=4, mem_len=0, same_length=True)


def test_the_model_is_left_as_it_was():
    model = tiny_model("sf").train()
    evaluate(model, text(20), 2, tgt_len=4, mem_len=9, clamp_len=3, same_length=True)
    assert model.training and (model.decoder.mem_len, model.decoder.clamp_len) == (5, 0)
    assert not model.decoder.same_length
    assert all(parameter.requires_grad and parameter.grad is None for parameter in model.parameters())


def test_training_on_streams_and_evaluation_see_the_same_segments():
    tokens = text(23)
    streams = TokenStreams(tokens, 1, 5, eos=2, pad=1, keeps_rest=True)
    assert torch.cat([streams[segment]["target"][0] for segment in range(len(streams))]).tolist() == tokens.tolist()
