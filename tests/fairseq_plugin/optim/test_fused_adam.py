"""Adam's numbers, and runs by it; test_resuming.py has what it shares with LAMB."""

from types import SimpleNamespace

import pytest
import torch

from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.fairseq_plugin.optim.fused_adam import FusedAdam


def config(**changes) -> SimpleNamespace:
    options = dict(lr=[0.1], adam_betas="(0.9, 0.999)", adam_eps=1e-6, weight_decay=0.5, no_decay_bias_and_norm=False)
    return SimpleNamespace(**{**options, **changes})


def make_parameters() -> list[torch.nn.Parameter]:
    torch.manual_seed(1)
    return [torch.nn.Parameter(torch.randn(shape)) for shape in ((3, 2), (3,), (2, 2))]


def step(optimizer: FusedAdam, parameters: list[torch.nn.Parameter]) -> None:
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()


def test_steps_are_adams_with_decoupled_decay():
    parameters = make_parameters()
    optimizer = FusedAdam(config(), parameters)
    for _ in range(3):
        before = [parameter.detach().clone() for parameter in parameters]
        step(optimizer, parameters)
        for old, new in zip(before, parameters, strict=True):
            # With a constant gradient of 1 both bias-corrected means are 1.
            torch.testing.assert_close(new, old * (1 - 0.1 * 0.5) - 0.1 / (1 + 1e-6))


def test_biases_and_layer_norms_are_exempt_from_decay_by_option():
    parameters = make_parameters()
    optimizer = FusedAdam(config(no_decay_bias_and_norm=True), parameters)
    before = [parameter.detach().clone() for parameter in parameters]
    step(optimizer, parameters)
    for old, new in zip(before, parameters, strict=True):
        decay = 0.5 if old.dim() > 1 else 0
        torch.testing.assert_close(new, old * (1 - 0.1 * decay) - 0.1 / (1 + 1e-6))


def test_the_exemption_is_refused_where_weights_are_one_vector():
    with pytest.raises(UserError, match="--fp16-no-flatten-grads"):
        FusedAdam(config(no_decay_bias_and_norm=True), [torch.nn.Parameter(torch.zeros(10))])


def test_half_precision_weights_are_refused_in_words(fairseq_train, data_folder, tmp_path):
    options = "--arch lazyformer_m2x6_s_tiny --sublayer-pattern M2 --criterion masked_lm_accuracy --max-update 1"
    with pytest.raises(UserError, match="--memory-efficient-fp16.*--optimizer adam"):
        fairseq_train(data_folder, f"{options} --fp16 --memory-efficient-fp16 --batch-size 4", tmp_path)


@pytest.mark.parametrize(("precision", "is_scaled"), [("--bf16", False), ("--fp16", True)])
def test_losses_are_scaled_for_fp16_alone(precision, is_scaled, fairseq_train, data_folder, tmp_path):
    options = f"--arch lazyformer_m2x6_s_tiny --sublayer-pattern M2 --criterion masked_lm_accuracy {precision}"
    state = fairseq_train(data_folder, f"{options} --batch-size 4 --max-update 2 --disable-validation", tmp_path)
    assert ("loss_scale" in state["last_optimizer_state"]) == is_scaled
