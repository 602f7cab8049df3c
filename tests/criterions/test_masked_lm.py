import math
from types import SimpleNamespace

import pytest
import torch
from fairseq.data import Dictionary
from fairseq.logging import metrics

from lazyformer_fairseq.criterions.masked_lm import MaskedLMAccuracyCriterion
from lazyformer_fairseq.models.config import LazyFormerConfig
from lazyformer_fairseq.models.lazyformer import LazyFormerModel

PAD = 1


def make_model_and_batch():
    dictionary = Dictionary()
    for number in range(20):
        dictionary.add_symbol(f"w{number}")
    torch.manual_seed(1)
    cfg = LazyFormerConfig("M2", encoder_embed_dim=8, encoder_ffn_embed_dim=8, encoder_attention_heads=2)
    model = LazyFormerModel(cfg, dictionary).eval()
    tokens = torch.randint(4, 24, (3, 6))
    target = torch.full_like(tokens, PAD)
    target[0, 1], target[1, 4], target[2, 5] = 7, 8, 9
    batch = {"net_input": {"src_tokens": tokens}, "target": target, "ntokens": 18, "nsentences": 3}
    return model, batch, SimpleNamespace(target_dictionary=dictionary)


def test_loss_and_accuracy_equal_those_of_all_logits():
    model, batch, task = make_model_and_batch()
    logits, _ = model(batch["net_input"]["src_tokens"])
    at_mask = [logits[0, 1], logits[1, 4], logits[2, 5]]
    batch["target"][1, 4] = int(at_mask[1].argmax())  # one right answer
    answers = [int(batch["target"][place]) for place in ((0, 1), (1, 4), (2, 5))]
    by_hand = -sum(scores.log_softmax(-1)[word] for scores, word in zip(at_mask, answers, strict=True))
    right = sum(int(scores.argmax()) == word for scores, word in zip(at_mask, answers, strict=True))

    loss, sample_size, log = MaskedLMAccuracyCriterion(task)(model, batch)
    torch.testing.assert_close(loss, by_hand)
    assert sample_size == 3 and log["ncorrect"] == right >= 1

    with metrics.aggregate(new_root=True) as meters:
        MaskedLMAccuracyCriterion.reduce_metrics([log, log])
    values = meters.get_smoothed_values()
    assert values["loss"] == pytest.approx(by_hand.item() / 3 / math.log(2), abs=1e-3)
    assert values["ppl"] == pytest.approx(math.exp(by_hand.item() / 3), abs=0.1)
    assert values["accuracy"] == pytest.approx(100 * right / 3, abs=0.01)


def test_logits_are_made_at_masked_positions_alone():
    model, batch, task = make_model_and_batch()
    shapes = []
    model.encoder.lm_head.register_forward_hook(lambda module, inputs, output: shapes.append(tuple(output.shape)))
    MaskedLMAccuracyCriterion(task)(model, batch)
    assert shapes == [(3, 24)]
