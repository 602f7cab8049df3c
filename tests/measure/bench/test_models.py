"""Updates, their memory, and the batch."""

import pytest
import torch

from lazyformer_fairseq.measure.bench.models import PIECES, OurModel, a_dictionary, predicted_words, random_batch
from lazyformer_fairseq.measure.bench.run import Update, encoder_training, inference
from lazyformer_fairseq.measure.costs.latency import peak_memory
from lazyformer_fairseq.patterns.architectures import ARCHITECTURES


def tiny(positions: int = 16, **options) -> OurModel:
    row = ARCHITECTURES["lazyformer_m2x6_s_tiny"].options()
    return OurModel({**row, "sublayer_pattern": "M2", **options}, positions)


@pytest.mark.parametrize(("precision", "bytes_a_weight"), [("float32", 4 + 8), ("bfloat16", 2 + 4 + 8)])
def test_an_update_trains(precision, bytes_a_weight):
    model = tiny()
    model.model.to(getattr(torch, precision))
    update = Update(model, batch=2, time=8)
    update.optimizer.param_groups[0]["lr"] = 0.1
    before = [weight.detach().clone() for weight in update.weights]
    update()
    assert sum(not torch.equal(*pair) for pair in zip(before, update.weights, strict=True)) == len(before)
    assert all(weight.grad is None for weight in [*update.weights, *update.masters])
    steps = 4 * len(before)  # Adam counts them for each weight
    assert update.held_bytes() == bytes_a_weight * model.parameters + steps


def test_the_loss_scale_of_fp16_goes_out_again():
    model, seen = tiny(dropout=0.0), []

    def update_of_it() -> Update:
        update = Update(model, batch=2, time=8)
        update.optimizer.register_step_pre_hook(
            lambda *_: seen.append(torch.cat([master.grad.flatten() for master in update.masters]))
        )
        return update

    in_single = update_of_it()
    in_single()
    model.model.half()
    in_half = update_of_it()
    in_half.batch = in_single.batch
    in_half()
    assert (seen[1] - seen[0]).norm() < 0.05 * seen[0].norm()


def test_encoder_and_inference_leave_no_gradient():
    model = tiny()
    encoder_training(model, 2, 8)()
    assert model.model.training and all(weight.grad is None for weight in model.model.parameters())
    assert inference(model, 2, 8)().shape == (2, 8, 32)
    assert not model.model.training


def test_a_batch_masks_15_percent():
    batch = random_batch(3, 100, "cpu")
    assert batch.masked_BT.sum() == predicted_words(3, 100) == 45
    assert torch.equal(batch.targets_M, batch.tokens_BT[batch.masked_BT])
    assert predicted_words(2, 1) == 2
    assert len(a_dictionary()) == PIECES


@pytest.mark.parametrize("back_end", ["recompute", "fused"])
def test_memory_of_linear_back_ends_grows_linearly(back_end):
    model = tiny(2048)
    model.network.attention_backend = back_end
    at_n, at_2n = (peak_memory(encoder_training(model, 1, time), "cpu") for time in (1024, 2048))
    assert at_2n < 2.2 * at_n
    model.network.attention_backend = "eager"
    assert peak_memory(encoder_training(model, 1, 2048), "cpu") > 3 * at_2n
