import math
from types import SimpleNamespace

import pytest
import torch
from fairseq.data import Dictionary
from fairseq.logging import metrics

from lazyformer_fairseq.criterions.language_modeling import CausalLMCriterion
from lazyformer_fairseq.models.causal_lm import CausalLanguageModel
from lazyformer_fairseq.models.causal_lm_config import CausalLMConfig
from lazyformer_fairseq.modules.networks.stream_memory import StreamMemory

PAD = 1


def make_model_and_batch():
    dictionary = Dictionary()
    for number in range(20):
        dictionary.add_symbol(f"w{number}")
    torch.manual_seed(1)
    sizes = dict(decoder_embed_dim=8, decoder_ffn_embed_dim=8, decoder_attention_heads=2)
    cfg = CausalLMConfig(sublayer_pattern="sf", adaptive_softmax_cutoff="7", **sizes)
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
