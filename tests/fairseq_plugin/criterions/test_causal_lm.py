import math
from types import SimpleNamespace

import pytest
import torch
from fairseq.data import Dictionary
from fairseq.logging import metrics

from lazyformer_fairseq.fairseq_plugin.criterions.language_modeling import CausalLMCriterion
from lazyformer_fairseq.fairseq_plugin.models.config import CausalLMConfig
from lazyformer_fairseq.fairseq_plugin.models.lazyformer import CausalLanguageModel
from lazyformer_fairseq.modules.networks.stack import StreamMemory

PAD = 1


def make_model_and_batch(pattern: str = "sf"):
    dictionary = Dictionary()
    for number in range(20):
        dictionary.add_symbol(f"w{number}")
    torch.manual_seed(1)
    sizes = dict(decoder_embed_dim=8, decoder_ffn_embed_dim=8, decoder_attention_heads=2)
    cfg = CausalLMConfig(sublayer_pattern=pattern, adaptive_softmax_cutoff="7", **sizes)
    model = CausalLanguageModel(cfg, dictionary).eval()
    stream = torch.randint(4, 24, (3, 7))
    target = stream[:, 1:].clone()
    target[2, 4:] = PAD
    batch = {"net_input": {"src_tokens": stream[:, :-1]}, "target": target, "ntokens": 16, "nsentences": 3}
    return model, batch, SimpleNamespace(target_dictionary=dictionary)


def test_the_loss_is_that_of_all_log_probabilities_without_padding():
    model, batch, task = make_model_and_batch()
    log_probabilities, _ = model(batch["net_input"]["src_tokens"])
    by_hand = -sum(
        log_probabilities[row, place, word]
        for row, words in enumerate(batch["target"].tolist())
        for place, word in enumerate(words)
        if word != PAD
    )
    loss, sample_size, log = CausalLMCriterion(task)(model, batch)
    torch.testing.assert_close(loss, by_hand)
    assert sample_size == 16

    with metrics.aggregate(new_root=True) as meters:
        CausalLMCriterion.reduce_metrics([log, log])
    values = meters.get_smoothed_values()
    assert values["loss"] == pytest.approx(by_hand.item() / 16 / math.log(2), abs=1e-3)  # bits a token
    assert values["ppl"] == pytest.approx(math.exp(by_hand.item() / 16), abs=0.1)


def test_it_hands_memory_on_and_never_asks_for_all_log_probabilities():
    model, batch, task = make_model_and_batch()
    memory = batch["net_input"]["memory"] = StreamMemory()
    model.softmax.log_probabilities = None  # whoever calls it fails
    first, *_ = CausalLMCriterion(task)(model, batch)
    assert memory.length == 6
    second, *_ = CausalLMCriterion(task)(model, batch)
    assert first != second


def test_spans_cost_a_loss_of_their_own():
    """The gradient is that of both losses of a token; the logged loss is the cross-entropy, as of any model."""
    pattern = "s[span=40,ramp=3,span_loss=0.01] f s[span=20,ramp=3,span_loss=0.5]"
    model, batch, task = make_model_and_batch(pattern)
    low, high = model.decoder.options.common["spans"]
    low.shares.data.copy_(torch.tensor([0.1, 0.3]))
    high.shares.data.copy_(torch.tensor([0.5, 0.2]))
    loss, sample_size, log = CausalLMCriterion(task)(model, batch)
    penalty = 0.01 * 40 * 0.2 + 0.5 * 20 * 0.35
    nll, _ = model(**batch["net_input"], target=batch["target"])
    torch.testing.assert_close(loss, nll.sum() + 16 * penalty)
    torch.testing.assert_close(log["loss"], nll.sum().detach())

    gradients = torch.autograd.grad(loss / sample_size, [low.shares, high.shares])
    of_nll = torch.autograd.grad(nll.sum() / sample_size, [low.shares, high.shares])
    for found, by_nll, of_penalty in zip(gradients, of_nll, (0.01 * 40 / 2, 0.5 * 20 / 2), strict=True):
        torch.testing.assert_close(found, by_nll + of_penalty)

    with metrics.aggregate(new_root=True) as meters:
        CausalLMCriterion.reduce_metrics([log, log])
    values = meters.get_smoothed_values()
    assert values["span"] == pytest.approx((40 * 0.2 + 20 * 0.35) / 2, abs=0.1)
    assert values["span_loss"] == pytest.approx(penalty / math.log(2), abs=1e-4)
    assert values["loss"] == pytest.approx(nll.sum().item() / 16 / math.log(2), abs=1e-3)


def test_a_model_without_spans_logs_none():
    model, batch, task = make_model_and_batch()
    _, _, log = CausalLMCriterion(task)(model, batch)
    assert not [name for name in log if "span" in name]
