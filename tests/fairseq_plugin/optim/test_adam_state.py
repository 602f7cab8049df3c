"""A run that apex's FusedAdam began goes on with torch's AdamW, and the other way, as if nothing had changed."""

import copy
from types import SimpleNamespace

import apex_stand_in
import pytest
import torch
from fairseq.optim.fp16_optimizer import FP16Optimizer

from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.fairseq_plugin.optim import fused_adam
from lazyformer_fairseq.fairseq_plugin.optim.fused_adam import FusedAdam
from lazyformer_fairseq.fairseq_plugin.reliability.resume.exact_state import load_precise_weights, save_precise_weights


def config(**changes) -> SimpleNamespace:
    options = dict(lr=[0.1], adam_betas="(0.9, 0.98)", adam_eps=1e-3, weight_decay=0.5, no_decay_bias_and_norm=False)
    return SimpleNamespace(**{**options, **changes})


def build(library: str, parameters: list[torch.nn.Parameter], **changes) -> FusedAdam:
    with pytest.MonkeyPatch.context() as patch:
        if library == "apex":
            apex_stand_in.install(patch)
        optimizer = FusedAdam(config(**changes), parameters)
    assert isinstance(optimizer.optimizer, apex_stand_in.FusedAdam if library == "apex" else torch.optim.AdamW)
    return optimizer


def make_parameters() -> list[torch.nn.Parameter]:
    torch.manual_seed(1)
    return [torch.nn.Parameter(torch.randn(shape)) for shape in ((3, 2), (3,), (2, 2))]


def train(optimizer, parameters, updates) -> None:
    for update in updates:
        for number, parameter in enumerate(parameters):
            chance = torch.Generator().manual_seed(10 * update + number)
            parameter.grad = torch.randn(parameter.shape, generator=chance)
        optimizer.step()


def join(parameters: list[torch.nn.Parameter]) -> torch.nn.Parameter:
    """All weights in one vector, as fairseq's FP16Optimizer has them on a GPU."""
    return torch.nn.Parameter(torch.cat([parameter.data.flatten() for parameter in parameters]))


def train_joined(optimizer, vector, parameters, updates) -> None:
    """As ``train``, of the same gradients."""
    for update in updates:
        for number, parameter in enumerate(parameters):
            chance = torch.Generator().manual_seed(10 * update + number)
            parameter.grad = torch.randn(parameter.shape, generator=chance)
        vector.grad = torch.cat([parameter.grad.flatten() for parameter in parameters])
        optimizer.step()


WAYS = [(first, second) for first in ("apex", "torch") for second in ("apex", "torch")]


@pytest.mark.parametrize("options", [{}, {"no_decay_bias_and_norm": True}])
@pytest.mark.parametrize(("first", "second"), WAYS)
def test_a_resumed_run_ends_where_one_without_a_break_does(first, second, options):
    expected = make_parameters()
    train(build("torch", expected, **options), expected, range(6))
    parameters = make_parameters()
    before = build(first, parameters, **options)
    train(before, parameters, range(3))
    after = build(second, parameters, **options)
    after.load_state_dict(copy.deepcopy(before.state_dict()))
    train(after, parameters, range(3, 6))
    for ours, theirs in zip(parameters, expected, strict=True):
        torch.testing.assert_close(ours, theirs)
    assert [group["weight_decay"] for group in after.param_groups] == ([0.5, 0.0] if options else [0.5])


@pytest.mark.parametrize(("first", "second"), WAYS)
def test_the_layout_is_the_librarys_own(first, second):
    """All keys, and what they hold: whatever the library reads of a state it finds."""
    parameters = make_parameters()
    before = build(first, parameters)
    train(before, parameters, range(3))
    after, own = build(second, parameters), build(second, parameters)
    saved = before.state_dict()
    unchanged = copy.deepcopy(saved)
    after.load_state_dict(saved)
    train(own, parameters, range(3))
    found, expected = after.state_dict(), own.state_dict()
    assert [group.keys() for group in found["param_groups"]] == [group.keys() for group in expected["param_groups"]]
    assert found["param_groups"][0].get("step") == expected["param_groups"][0].get("step")
    for number, moments in expected["state"].items():
        assert {name: (type(value), value.dtype, value.shape) for name, value in moments.items()} == {
            name: (type(value), value.dtype, value.shape) for name, value in found["state"][number].items()
        }
        assert moments.get("step") == found["state"][number].get("step")
    assert str(saved) == str(unchanged)  # a checkpoint in memory is the caller's


@pytest.mark.parametrize(("first", "second"), WAYS)
def test_a_state_from_before_the_first_update_loads(first, second):
    parameters = make_parameters()
    after = build(second, parameters)
    after.load_state_dict(build(first, parameters).state_dict())
    given = [parameter.detach().clone() for parameter in parameters]
    train(after, parameters, range(1))
    assert not any(torch.equal(*pair) for pair in zip(given, parameters, strict=True))


def test_weights_that_had_fewer_updates_than_others_are_named_where_apex_counts_for_all(caplog):
    parameters = make_parameters()
    before = build("torch", parameters)
    train(before, parameters, range(2))
    parameters[2].grad = None
    before.step()
    after = build("apex", parameters)
    after.load_state_dict(before.state_dict())
    assert after.param_groups[0]["step"] == 3
    assert "some weights had 2 updates and some 3" in caplog.text


def test_other_groups_than_the_checkpoints_are_refused_in_words():
    parameters = make_parameters()
    for given in (False, True):
        before = build("apex", parameters, no_decay_bias_and_norm=given)
        train(before, parameters, range(1))
        with pytest.raises(UserError, match=f"trained with{'' if given else 'out'} --no-decay-bias-and-norm"):
            build("torch", parameters, no_decay_bias_and_norm=not given).load_state_dict(before.state_dict())


def wrapped(library: str, weights: list[torch.nn.Parameter], flat: bool) -> FP16Optimizer:
    """fairseq's mixed precision, as built by ``FP16Optimizer.build_optimizer``."""
    cfg = SimpleNamespace(
        optimizer=config(),
        common=SimpleNamespace(
            fp16_scale_window=8, fp16_init_scale=4, fp16_scale_tolerance=0.0, threshold_loss_scale=None,
            min_loss_scale=1e-4,
        ),
        optimization=SimpleNamespace(update_freq=[1]),
    )  # fmt: skip
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "current_device", lambda: None)  # the key of the flat vector, p.device.index
        masters = FP16Optimizer.build_fp32_params(cfg.optimizer, weights, flatten=flat)
    return FP16Optimizer(cfg, weights, build(library, list(masters.values()) if flat else masters), masters)


def train_in_half(optimizer: FP16Optimizer, weights, updates) -> None:
    for update in updates:
        optimizer.zero_grad()
        for number, weight in enumerate(weights):
            chance = torch.Generator().manual_seed(10 * update + number)
            weight.grad = (torch.randn(weight.shape, generator=chance) * optimizer.scaler.loss_scale).half()
        optimizer._needs_sync = True
        optimizer.clip_grad_norm(1.0)
        optimizer.step()


@pytest.mark.parametrize("flat", [False, True])
@pytest.mark.parametrize(("first", "second"), WAYS)
def test_mixed_precision_resumes_with_its_loss_scale(first, second, flat):
    expected, weights = ([torch.nn.Parameter(p.data.half()) for p in make_parameters()] for _ in range(2))
    train_in_half(wrapped("torch", expected, flat), expected, range(10))
    before, after = wrapped(first, weights, flat), wrapped(second, weights, flat)
    train_in_half(before, weights, range(5))
    saved = save_precise_weights(FP16Optimizer.state_dict, before)
    load_precise_weights(FP16Optimizer.load_state_dict, after, copy.deepcopy(saved))
    train_in_half(after, weights, range(5, 10))
    for ours, theirs in zip(weights, expected, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-3, rtol=1e-3)
    assert after.scaler.loss_scale == 8  # grew in the eighth update, three after the break


def test_the_library_is_told_by_where_the_weights_are():
    assert not fused_adam.are_on_gpu([{"params": make_parameters()}])


@pytest.mark.parametrize(("first", "second"), WAYS)
def test_weights_in_one_vector_resume_apart_and_the_other_way(first, second):
    expected = make_parameters()
    train(build("torch", expected), expected, range(9))

    parameters, apart = make_parameters(), build(first, start := make_parameters())
    train(apart, start, range(3))
    vector = join(start)
    joined = build(second, [vector])
    joined.load_state_dict(copy.deepcopy(apart.state_dict()))
    train_joined(joined, vector, parameters, range(3, 6))
    for parameter, part in zip(parameters, vector.data.split([each.numel() for each in parameters]), strict=True):
        parameter.data.copy_(part.view_as(parameter))
    again = build(first, parameters)
    again.load_state_dict(copy.deepcopy(joined.state_dict()))
    train(again, parameters, range(6, 9))
    for ours, theirs in zip(parameters, expected, strict=True):
        torch.testing.assert_close(ours, theirs)


def test_weights_of_another_number_are_refused_still():
    vector = torch.nn.Parameter(torch.zeros(14))
    optimizer = build("torch", parameters := make_parameters())
    train(optimizer, parameters, range(1))
    with pytest.raises(UserError, match="of other weights than the model's"):
        build("torch", [vector]).load_state_dict(optimizer.state_dict())
