import sys
from types import SimpleNamespace

import apex_stand_in
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


def test_loading_a_state_keeps_the_exemption():
    parameters = make_parameters()
    optimizer = FusedAdam(config(no_decay_bias_and_norm=True), parameters)
    step(optimizer, parameters)
    again = FusedAdam(config(no_decay_bias_and_norm=True), parameters)
    again.load_state_dict(optimizer.state_dict(), optimizer_overrides={"weight_decay": 0.25})
    assert [group["weight_decay"] for group in again.param_groups] == [0.25, 0.0]


def test_the_exemption_is_refused_where_weights_are_one_vector():
    with pytest.raises(UserError, match="--fp16-no-flatten-grads"):
        FusedAdam(config(no_decay_bias_and_norm=True), [torch.nn.Parameter(torch.zeros(10))])


@pytest.mark.parametrize("betas", ["(0.9)", "(0.9, 1.0)", "0.9, x", "__import__('os')", (0.9,), "(-0.1, 0.9)"])
def test_impossible_betas_are_user_errors(betas):
    with pytest.raises(UserError, match="--adam-betas"):
        FusedAdam(config(adam_betas=betas), make_parameters())


def test_betas_may_be_a_pair_or_text():
    for betas in ("(0.9, 0.98)", "0.9, 0.98", [0.9, 0.98]):
        optimizer = FusedAdam(config(adam_betas=betas), make_parameters())
        assert optimizer.param_groups[0]["betas"] == (0.9, 0.98)


def test_apex_is_used_on_a_gpu_where_it_can_be_imported_and_was_built_with_its_kernels(monkeypatch, caplog):
    caplog.set_level("INFO")

    def without_kernels(*arguments, **options):
        raise RuntimeError("apex.optimizers.FusedAdam requires cuda extensions")

    def kind() -> type:
        return type(FusedAdam(config(), make_parameters()).optimizer)

    apex_stand_in.install(monkeypatch)
    assert kind() is apex_stand_in.FusedAdam
    monkeypatch.setitem(sys.modules, "apex.optimizers", SimpleNamespace(FusedAdam=without_kernels))
    assert kind() is torch.optim.AdamW
    monkeypatch.setitem(sys.modules, "apex.optimizers", None)  # cannot be imported
    assert kind() is torch.optim.AdamW
    monkeypatch.undo()  # on a processor, --cpu
    assert kind() is torch.optim.AdamW
    apex, *others = caplog.messages
    assert apex == "optimizer: apex.optimizers.FusedAdam"
    assert "requires cuda extensions" in others[0]
    assert others[1] == others[-1] == "optimizer: torch.optim.AdamW(fused=True)"


def test_half_precision_weights_are_refused_in_words(fairseq_train, data_folder, tmp_path):
    options = "--arch lazyformer_m2x6_s_tiny --sublayer-pattern M2 --criterion masked_lm_accuracy --max-update 1"
    with pytest.raises(UserError, match="--memory-efficient-fp16.*--optimizer adam"):
        fairseq_train(data_folder, f"{options} --fp16 --memory-efficient-fp16 --batch-size 4", tmp_path)


@pytest.mark.parametrize(("precision", "is_scaled"), [("--bf16", False), ("--fp16", True)])
def test_losses_are_scaled_for_fp16_alone(precision, is_scaled, fairseq_train, data_folder, tmp_path):
    options = f"--arch lazyformer_m2x6_s_tiny --sublayer-pattern M2 --criterion masked_lm_accuracy {precision}"
    state = fairseq_train(data_folder, f"{options} --batch-size 4 --max-update 2 --disable-validation", tmp_path)
    assert ("loss_scale" in state["last_optimizer_state"]) == is_scaled
