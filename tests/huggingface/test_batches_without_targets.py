"""A batch in which nothing is predicted, as short texts have it, has a loss of zero and gradients of zero."""

import pytest
import torch
from exports import fresh_model, some_ids
from torch.testing import assert_close

# Spans and experts add to a loss.
PATTERNS = ("(sflf)x2", "s[span=8,span_loss=0.5] f[experts=2] l f")
IDS = some_ids()
BATCH, TIME = IDS.shape
NO_TOKEN = torch.full_like(IDS, -100)
NO_TEXT = torch.full((BATCH,), -100)
CUT = torch.full((BATCH,), TIME)  # answers that were cut off
NO_TARGETS = {
    "LazyFormerForMaskedLM": {"labels": NO_TOKEN},
    "LazyFormerForSequenceClassification": {"labels": NO_TEXT},
    "LazyFormerForTokenClassification": {"labels": NO_TOKEN},
    "LazyFormerForQuestionAnswering": {"start_positions": CUT, "end_positions": CUT},
    "LazyFormerForCausalLM": {"labels": NO_TOKEN},
}
COUNTS = (None, 0, 5, torch.tensor(0), torch.tensor(5))


@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("name", NO_TARGETS)
def test_loss_and_gradients_are_zero(name, pattern):
    model = fresh_model(name, pattern)
    for count in COUNTS:
        assert model.eval()(IDS, **NO_TARGETS[name], num_items_in_batch=count).loss == 0
        model.train()(IDS, **NO_TARGETS[name], num_items_in_batch=count).loss.backward()
        gradients = [weight.grad for weight in model.parameters() if weight.grad is not None]
        assert gradients
        assert not any(gradient.count_nonzero() for gradient in gradients)


@pytest.mark.parametrize("name", NO_TARGETS)
def test_what_is_not_predicted_changes_no_mean(name):
    """One row with targets has the same loss alone and beside rows without."""
    model = fresh_model(name, "(sf)x2").eval()
    alone, beside = {}, {}
    for argument, ignored in NO_TARGETS[name].items():
        of_row = IDS[:1] % 3 if ignored.dim() == 2 else torch.tensor([2])
        alone[argument] = of_row
        beside[argument] = torch.cat([of_row, ignored[1:]])
    assert_close(model(IDS, **beside).loss, model(IDS[:1], **alone).loss)
