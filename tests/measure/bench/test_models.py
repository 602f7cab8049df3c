"""Updates, their memory, and the peak of a matrix product."""

import pytest
import torch

from lazyformer_fairseq.measure.bench.models import PIECES, OurModel, a_dictionary, predicted_words, random_batch
from lazyformer_fairseq.measure.bench.run import Update, encoder_training, inference
from lazyformer_fairseq.measure.costs import latency
from lazyformer_fairseq.measure.costs.latency import Timing, peak_memory
from lazyformer_fairseq.patterns.architectures import ARCHITECTURES


def tiny() -> OurModel:
    return OurModel({**ARCHITECTURES["lazyformer_m2x6_s_tiny"].options(), "sublayer_pattern": "M2"}, 16)


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
    options = {**ARCHITECTURES["lazyformer_m2x6_s_tiny"].options(), "sublayer_pattern": "M2", "dropout": 0.0}
    model = OurModel(options, 16)
    update = Update(model, batch=2, time=8)
    seen = {}
    update.optimizer.register_step_pre_hook(lambda *_: seen.update(fp32=gradients_of(update)))
    update()
    model.model.half()
    in_half = Update(model, batch=2, time=8)
    in_half.batch = update.batch
    in_half.optimizer.register_step_pre_hook(lambda *_: seen.update(fp16=gradients_of(in_half)))
    in_half()
    assert (seen["fp16"] - seen["fp32"]).norm() < 0.05 * seen["fp32"].norm()


def gradients_of(update: Update) -> torch.Tensor:
    return torch.cat([master.grad.flatten() for master in update.masters])


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


def test_peak_memory_counts_what_was_held_at_once():
    def two_then_one():
        kept = torch.ones(1000)  # 4,000 bytes
        gone = torch.ones(3000)
        del gone
        return kept, torch.ones(500)

    assert peak_memory(two_then_one, "cpu") == 16_000
    assert peak_memory(two_then_one, "cpu") == 16_000, "the same on every run"


@pytest.mark.parametrize("back_end", ["recompute", "fused"])
def test_memory_of_linear_back_ends_grows_linearly(back_end):
    model = OurModel({**ARCHITECTURES["lazyformer_m2x6_s_tiny"].options(), "sublayer_pattern": "M2"}, 2048)
    model.network.attention_backend = back_end
    at_n, at_2n = (peak_memory(encoder_training(model, 1, time), "cpu") for time in (1024, 2048))
    assert at_2n < 2.2 * at_n
    model.network.attention_backend = "eager"
    assert peak_memory(encoder_training(model, 1, 2048), "cpu") > 3 * at_2n


@pytest.mark.parametrize("onednn", [True, False])
def test_a_peak_is_measured_by_every_library_that_models_use(monkeypatch, onednn):
    monkeypatch.setattr(latency, "MATRIX_SIZES", {"cpu": (8, 16)})
    monkeypatch.setattr(latency, "has_onednn", lambda: onednn)
    names = {"matrix product 8", "matrix product 16"}
    assert set(latency.matrix_products("cpu", torch.bfloat16)) == names
    names |= {"matrix product by oneDNN 8", "matrix product by oneDNN 16"} if onednn else set()
    assert set(latency.matrix_products("cpu", torch.float32)) == names


def test_the_peak_is_of_the_fastest_product():
    timings = {"matrix product 8": Timing((2.0,)), "matrix product 16": Timing((4.0,)), "a model": Timing((1e-9,))}
    assert latency.matrix_peak(timings) == 2 * 16**3 / 4
    assert latency.matrix_peak({**timings, "matrix product by oneDNN 16": Timing((3.0,))}) == 2 * 16**3 / 3
