import math
from types import SimpleNamespace

import pytest
import torch
from fairseq.data import Dictionary
from fairseq.logging import metrics
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lazyformer_fairseq.fairseq_plugin.criterions.language_modeling import MaskedLMAccuracyCriterion
from lazyformer_fairseq.fairseq_plugin.models.config import LazyFormerConfig
from lazyformer_fairseq.fairseq_plugin.models.lazyformer import LazyFormerModel

PAD = 1


def make_model_and_batch(pattern: str = "M2"):
    dictionary = Dictionary()
    for number in range(20):
        dictionary.add_symbol(f"w{number}")
    torch.manual_seed(1)
    sizes = dict(encoder_embed_dim=12, encoder_ffn_embed_dim=8, encoder_attention_heads=2)
    cfg = LazyFormerConfig(sublayer_pattern=pattern, **sizes)
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


class LargestOfWords(TorchDispatchMode):
    """The largest tensor with a number for each word of the vocabulary."""

    largest = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        output = function(*args, **(kwargs or {}))
        for tensor in tree_leaves(output):
            if isinstance(tensor, torch.Tensor) and tensor.dim() and tensor.shape[-1] == 24:
                self.largest = max(self.largest, tensor.numel())
        return output


@pytest.mark.parametrize("training", [True, False])
def test_logits_are_made_at_masked_positions_alone(training):
    model, batch, task = make_model_and_batch()
    criterion = MaskedLMAccuracyCriterion(task).train(training)
    with LargestOfWords() as found, torch.set_grad_enabled(training):
        loss, _, _ = criterion(model.train(training), batch)
        if training:
            loss.backward()
    assert 24 * 3 <= found.largest < 24 * 18  # of the masked positions, and of all


def test_positions_that_the_batch_names_are_those_of_its_targets():
    model, batch, task = make_model_and_batch()
    criterion = MaskedLMAccuracyCriterion(task)
    loss, sample_size, _ = criterion(model, batch)
    named = {**batch, "masked_positions": torch.tensor([1, 6 + 4, 12 + 5])}
    assert criterion(model, named)[:2] == (loss, sample_size)
    logits, _ = model(batch["net_input"]["src_tokens"])
    torch.testing.assert_close(model(**batch["net_input"], masked_tokens=torch.tensor([10]))[0], logits[1, 4:5])
