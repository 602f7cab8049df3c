"""The optimizer as fairseq sees it: its options, apex, half precision, checkpoints; test_lamb.py has the numbers."""

import copy
import sys
from types import SimpleNamespace

import apex_stand_in
import pytest
import torch
from fairseq import utils
from fairseq.optim.fp16_optimizer import FP16Optimizer
from fairseq_plugin.reliability.damage import WEIGHT, DamagedRun
from helpers import assert_equal_state

from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.fairseq_plugin.optim.fused_adam import FusedAdam
from lazyformer_fairseq.fairseq_plugin.optim.lamb import Lamb
from lazyformer_fairseq.fairseq_plugin.optim.nvlamb import NvLamb, keeping_tensors_apart
from lazyformer_fairseq.fairseq_plugin.reliability.resume.exact_state import load_precise_weights, save_precise_weights

SMALL = "--arch lazyformer_m2x6_s_tiny --sublayer-pattern M2 --criterion masked_lm_accuracy --batch-size 4"


def config(**changes) -> SimpleNamespace:
    options = dict(
        _name="nvlamb", lr=[0.1], lamb_betas="(0.9, 0.98)", lamb_eps=1e-3, weight_decay=0.5, max_weight_norm=0.0,
        no_decay_bias_and_norm=False, no_ratio_without_decay=False, no_bias_correction=False,
    )  # fmt: skip
    return SimpleNamespace(**{**options, **changes})


def build(library: str, parameters: list[torch.nn.Parameter], **changes) -> NvLamb:
    with pytest.MonkeyPatch.context() as patch:
        if library == "apex":
            apex_stand_in.install(patch)
        optimizer = NvLamb(config(**changes), parameters)
    assert isinstance(optimizer.optimizer, apex_stand_in.FusedLAMB if library == "apex" else Lamb)
    return optimizer


def make_parameters() -> list[torch.nn.Parameter]:
    torch.manual_seed(1)
    return [torch.nn.Parameter(torch.randn(shape)) for shape in ((3, 2), (3,), (2, 2))]


def gradient_of(parameter: torch.Tensor, number: int, update: int) -> torch.Tensor:
    return torch.randn(parameter.shape, generator=torch.Generator().manual_seed(10 * update + number))


def train(optimizer: NvLamb, parameters, updates) -> None:
    for update in updates:
        for number, parameter in enumerate(parameters):
            parameter.grad = gradient_of(parameter, number, update)
        optimizer.step()


OPTIONS = [{}, {"no_decay_bias_and_norm": True}, {"no_decay_bias_and_norm": True, "no_ratio_without_decay": True}]
WAYS = [(first, second) for first in ("apex", "torch") for second in ("apex", "torch")]


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize(("first", "second"), WAYS)
def test_a_resumed_run_ends_where_one_without_a_break_does(first, second, options):
    expected = make_parameters()
    train(build("torch", expected, **options), expected, range(6))
    parameters = make_parameters()
    before = build(first, parameters, **options)
    train(before, parameters, range(3))
    saved = before.state_dict()
    unchanged = copy.deepcopy(saved)
    after = build(second, parameters, **options)
    after.load_state_dict(saved)
    assert str(saved) == str(unchanged)  # a checkpoint in memory is the caller's
    train(after, parameters, range(3, 6))
    for ours, theirs in zip(parameters, expected, strict=True):
        torch.testing.assert_close(ours, theirs)
    assert [group["weight_decay"] for group in after.param_groups] == ([0.5, 0.0] if options else [0.5])
    assert {group["step"] for group in after.param_groups} == {6}


def test_weights_without_decay_have_a_ratio_or_take_the_rate_as_it_is():
    bias = make_parameters()[1].detach()
    for without, ratio in ((False, bias.norm() / 3**0.5), (True, 1.0)):
        parameters = make_parameters()
        optimizer = build("torch", parameters, no_decay_bias_and_norm=True, no_ratio_without_decay=without, lamb_eps=0)
        for parameter in parameters:
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        torch.testing.assert_close(parameters[1].detach(), bias - 0.1 * ratio)


def test_options_reach_the_optimizer():
    group = build("torch", make_parameters(), max_weight_norm=10.0, no_bias_correction=True).param_groups[0]
    del group["params"]
    assert group == {
        "lr": 0.1, "betas": (0.9, 0.98), "eps": 1e-3, "weight_decay": 0.5, "bias_correction": False,
        "max_weight_norm": 10.0, "ratio_without_decay": True,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"lamb_betas": "(0.9)"}, "--lamb-betas '.0.9.': give two numbers"),
        ({"lamb_betas": "(0.9, 1)"}, "--lamb-betas '.0.9, 1.': both must lie in"),
        ({"lamb_eps": -1e-6}, "--lamb-eps -1e-06: must be 0 or more"),
        ({"weight_decay": float("nan")}, "--weight-decay nan: must be 0 or more"),
        ({"max_weight_norm": -1}, "--max-weight-norm -1: must be 0 or more"),
    ],
)
def test_impossible_options_are_user_errors(changes, words):
    with pytest.raises(UserError, match=words):
        NvLamb(config(**changes), make_parameters())


def test_apex_is_used_on_a_gpu_where_it_does_the_same(monkeypatch, caplog):
    caplog.set_level("INFO")

    def without_kernels(*arguments, **options):
        raise RuntimeError("apex.optimizers.FusedLAMB requires cuda extensions")

    def built(**changes) -> torch.optim.Optimizer:
        return NvLamb(config(**changes), make_parameters()).optimizer

    apex_stand_in.install(monkeypatch)
    assert built().use_nvlamb and not built(no_ratio_without_decay=True).use_nvlamb
    assert isinstance(built(max_weight_norm=10.0), Lamb)  # apex knows no bound
    monkeypatch.setitem(sys.modules, "apex.optimizers", SimpleNamespace(FusedLAMB=without_kernels))
    assert isinstance(built(), Lamb)
    monkeypatch.setitem(sys.modules, "apex.optimizers", None)  # cannot be imported
    assert isinstance(built(), Lamb)
    monkeypatch.undo()  # on a processor, --cpu
    assert isinstance(built(), Lamb)
    assert caplog.messages[0] == "optimizer: apex.optimizers.FusedLAMB"
    assert "requires cuda extensions" in caplog.messages[3]
    assert caplog.messages[-1] == "optimizer: LAMB by the kernels of torch's fused Adam"


@pytest.mark.parametrize("library", ["apex", "torch"])
def test_gradients_are_clipped_once_by_the_norm_of_all(library):
    """As FusedLAMB does it itself in NVIDIA's BERT: fairseq's clipping before it gives the same numbers."""
    expected, parameters = make_parameters(), make_parameters()
    theirs = apex_stand_in.FusedLAMB(expected, lr=0.1, betas=(0.9, 0.98), eps=1e-3, weight_decay=0.5, max_grad_norm=1)
    ours = build(library, parameters)
    for update in range(4):
        for number, (parameter, other) in enumerate(zip(parameters, expected, strict=True)):
            parameter.grad = 10 ** (1 - update) * gradient_of(parameter, number, update)
            other.grad = parameter.grad.clone()
        assert (utils.clip_grad_norm_(expected, 0) > 1) == (update < 2)
        ours.clip_grad_norm(1.0)
        ours.step()
        theirs.step()
    for found, other in zip(parameters, expected, strict=True):
        torch.testing.assert_close(found, other, rtol=1e-5, atol=1e-6)


def test_a_state_of_other_groups_or_weights_is_refused_in_words():
    parameters = make_parameters()
    for exempts in (False, True):
        before = build("torch", parameters, no_decay_bias_and_norm=exempts)
        train(before, parameters, range(1))
        with pytest.raises(UserError, match=f"trained with{'' if exempts else 'out'} --no-decay-bias-and-norm"):
            build("torch", parameters, no_decay_bias_and_norm=not exempts).load_state_dict(before.state_dict())
    before = build("torch", parameters)
    train(before, parameters, range(1))
    with pytest.raises(UserError, match="of other weights than the model's"):
        build("torch", [torch.nn.Parameter(torch.zeros(14))]).load_state_dict(before.state_dict())


@pytest.mark.parametrize("library", ["apex", "torch"])
def test_adams_state_is_refused_and_lambs_by_adam(library):
    """In half precision fairseq sees one name for both: its wrapper's."""
    adam = {"_name": "fused_adam", "adam_betas": (0.9, 0.98), "adam_eps": 1e-3}
    with pytest.MonkeyPatch.context() as patch:
        if library == "apex":
            apex_stand_in.install(patch)
        optimizers = [NvLamb(config(), make_parameters()), FusedAdam(config(**adam), make_parameters())]
    for own, other in (optimizers, optimizers[::-1]):
        with pytest.raises(UserError, match=f"not trained with --optimizer {own.NAME}: .*--reset-optimizer"):
            own.load_state_dict(other.state_dict())


def test_overrides_are_set_where_there_is_decay():
    parameters = make_parameters()
    optimizer = build("torch", parameters, no_decay_bias_and_norm=True)
    train(optimizer, parameters, range(1))
    again = build("torch", parameters, no_decay_bias_and_norm=True)
    again.load_state_dict(optimizer.state_dict(), optimizer_overrides={"weight_decay": 0.25, "max_weight_norm": 3})
    assert [group["weight_decay"] for group in again.param_groups] == [0.25, 0.0]
    assert [group["max_weight_norm"] for group in again.param_groups] == [3, 3]


def wrapped(weights: list[torch.nn.Parameter], is_bf16: bool) -> FP16Optimizer:
    """fairseq's mixed precision, as on a GPU: it joins the weights unless it is told not to."""
    scaling = dict(fp16_scale_window=8, fp16_init_scale=4, fp16_scale_tolerance=0.0, threshold_loss_scale=None)
    cfg = SimpleNamespace(
        optimizer=config(),
        common=SimpleNamespace(**scaling, min_loss_scale=1e-4, bf16=is_bf16, fp16_no_flatten_grads=False),
        optimization=SimpleNamespace(update_freq=[1]),
    )

    def build_optimizer(cls, cfg, params):
        masters = cls.build_fp32_params(cfg.optimizer, params, flatten=not cfg.common.fp16_no_flatten_grads)
        return cls(cfg, params, NvLamb(cfg.optimizer, masters), masters)

    return keeping_tensors_apart(build_optimizer, FP16Optimizer, cfg, weights)


def train_in_half(optimizer: FP16Optimizer, weights, updates) -> None:
    scale = 1.0 if optimizer.scaler is None else None
    for update in updates:
        optimizer.zero_grad()
        for number, weight in enumerate(weights):
            gradient = gradient_of(weight, number, update) * (scale or optimizer.scaler.loss_scale)
            weight.grad = gradient.to(weight.dtype)
        optimizer._needs_sync = True
        optimizer.clip_grad_norm(1.0)
        optimizer.step()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_has_a_ratio_for_each_tensor_and_resumes_to_the_bit(dtype):
    is_bf16 = dtype == torch.bfloat16
    expected, weights, single = ([torch.nn.Parameter(p.data.to(dtype)) for p in make_parameters()] for _ in range(3))
    without_break = wrapped(expected, is_bf16)
    train_in_half(without_break, expected, range(10))
    before, after = wrapped(weights, is_bf16), wrapped(weights, is_bf16)
    train_in_half(before, weights, range(5))
    saved = copy.deepcopy(save_precise_weights(FP16Optimizer.state_dict, before))
    load_precise_weights(FP16Optimizer.load_state_dict, after, saved)
    train_in_half(after, weights, range(5, 10))
    assert all(torch.equal(*pair) for pair in zip(after.fp32_params, without_break.fp32_params, strict=True))

    masters = [torch.nn.Parameter(weight.data.float()) for weight in single]
    plain = build("torch", masters)
    for update in range(10):
        for number, master in enumerate(masters):
            master.grad = gradient_of(master, number, update)
        plain.clip_grad_norm(1.0)
        plain.step()
    for found, master in zip(after.fp32_params, masters, strict=True):
        torch.testing.assert_close(found, master, rtol=2e-2, atol=2e-2)


def test_weights_in_half_precision_alone_are_refused_in_words(fairseq_train, data_folder, tmp_path):
    with pytest.raises(UserError, match="--memory-efficient-fp16.*--optimizer nvlamb"):
        fairseq_train(
            data_folder, f"{SMALL} --optimizer nvlamb --max-update 1 --fp16 --memory-efficient-fp16", tmp_path
        )


@pytest.mark.parametrize("precision", ["", "--bf16", "--fp16"])
def test_a_resumed_run_of_fairseq_ends_where_one_without_a_break_does(precision, fairseq_train, data_folder, tmp_path):
    options = f"{SMALL} --optimizer nvlamb --lr 0.01 --clip-norm 1.0 --disable-validation {precision}"
    options += " --lr-scheduler polynomial_warmup --warmup-ratio 0.3 --max-update 4"
    expected = fairseq_train(data_folder, f"{options} --save-interval-updates 2", tmp_path / "whole")
    half = tmp_path / "whole" / "checkpoint_1_2.pt"
    found = fairseq_train(data_folder, f"{options} --restore-file {half}", tmp_path / "resumed")
    assert found["optimizer_history"][-1]["num_updates"] == 4
    assert all(torch.equal(found["model"][name], value) for name, value in expected["model"].items())
    groups = found["last_optimizer_state"]["param_groups"]
    assert [(group["step"], group["lr"]) for group in groups] == [(4, 0.0)]


@pytest.mark.parametrize("precision", ["", "--bf16"])
def test_an_update_with_a_bad_gradient_leaves_weights_and_moments_as_they_were(
    precision, fairseq_train, data_folder, tmp_path
):
    options = f"{SMALL} --optimizer nvlamb --lr 0.01 --clip-norm 1.0 --disable-validation --max-update 4 {precision}"
    with DamagedRun(lambda call: "nan gradient" if call == 2 else None) as run:
        found = fairseq_train(data_folder, options, tmp_path)
    assert found["extra_state"]["bad_updates"]["skipped"] == 1
    for call, update in enumerate(run.updates):
        assert torch.equal(update.after["model"][WEIGHT], update.before["model"][WEIGHT]) == (call == 2)
    for part in ("model", "optimizer"):
        assert_equal_state(run.updates[2].after[part], run.updates[2].before[part], part)
    assert [group["step"] for group in found["last_optimizer_state"]["param_groups"]] == [3]


def test_several_batches_an_update_are_one_large_batch(fairseq_train, data_folder, tmp_path):
    """Each update sees all of the data: fairseq shuffles batches."""
    options = f"{SMALL} --dropout 0 --optimizer nvlamb --lr 0.01 --clip-norm 1.0 --disable-validation --max-update 2"
    one, several = (
        fairseq_train(data_folder, f"{options} --batch-size {batch} --update-freq {batches}", tmp_path / str(batch))
        for batch, batches in ((400, 1), (100, 4))
    )
    assert one["extra_state"]["train_iterator"]["epoch"] == several["extra_state"]["train_iterator"]["epoch"] == 3
    for name, weight in one["model"].items():
        torch.testing.assert_close(several["model"][name], weight, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_a_small_masked_lm_learns(fairseq_train, data_folder, tmp_path):
    """From the uniform distribution over 160 pieces, 7.3 bits."""
    options = f"{SMALL} --dropout 0 --optimizer nvlamb --lr 0.02 --clip-norm 1.0 --validate-interval-updates 150"
    options += " --lr-scheduler polynomial_warmup --warmup-ratio 0.2843 --max-update 150"
    assert fairseq_train(data_folder, options, tmp_path)["extra_state"]["val_loss"] < 6
