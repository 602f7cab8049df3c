"""Our optimizers as fairseq sees them: a run goes on as if nothing had been, in half precision too.

test_lamb.py has the numbers of LAMB, test_muon.py those of Muon.
"""

import copy
from types import SimpleNamespace
from unittest import mock

import apex_stand_in
import pytest
import torch
from fairseq import utils
from helpers import assert_equal_state, mostly_slow, train_in_two_processes, train_words, updates_of

from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.fairseq_plugin.optim.half_precision import FP16Optimizer
from lazyformer_fairseq.fairseq_plugin.optim.optimizers import AdamLikeOptimizer, FusedAdam, MuonAndAdam, NvLamb
from lazyformer_fairseq.training.muon import MuonOptions

ADAM, LAMB, MUON = FusedAdam.NAME, NvLamb.NAME, MuonAndAdam.NAME
OF_LAMB = dict(lamb_betas="(0.9, 0.98)", lamb_eps=1e-3, max_weight_norm=0.0)
OWN = {
    ADAM: (FusedAdam, dict(adam_betas="(0.9, 0.98)", adam_eps=1e-3)),
    LAMB: (NvLamb, dict(**OF_LAMB, no_ratio_without_decay=False, no_bias_correction=False)),
    MUON: (MuonAndAdam, {**vars(MuonOptions()), "adam_betas": "(0.9, 0.98)", "adam_eps": 1e-3, "adam_lr": 0.05}),
}
ALL = pytest.mark.parametrize("name", [ADAM, LAMB, MUON])
SHAPES = ((3, 2), (3,), (2, 2))
EXEMPT = {"no_decay_bias_and_norm": True}
SMALL = "--arch lazyformer_m2x6_s_tiny --sublayer-pattern M2 --criterion masked_lm_accuracy --batch-size 4"
ONE_BY_ONE = f"{SMALL} --batch-size 1 --dropout 0 --disable-validation --clip-norm 1.0"


def config(name: str, **changes) -> SimpleNamespace:
    shared = dict(_name=name, lr=[0.1], weight_decay=0.5, no_decay_bias_and_norm=False)
    return SimpleNamespace(**{**OWN[name][1], **shared, **changes})


def build(name: str, parameters: list[torch.nn.Parameter], **changes) -> AdamLikeOptimizer:
    return OWN[name][0](config(name, **changes), parameters)


def make_parameters(dtype: torch.dtype = torch.float32) -> list[torch.nn.Parameter]:
    """The first one is a matrix of a sublayer."""
    torch.manual_seed(1)
    parameters = [torch.nn.Parameter(torch.randn(shape).to(dtype)) for shape in SHAPES]
    parameters[0].optim_overrides = {"blocks": 1}
    return parameters


def set_gradients(parameters: list[torch.nn.Parameter], update: int, scale: float = 1.0) -> None:
    for number, parameter in enumerate(parameters):
        gradient = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(10 * update + number))
        parameter.grad = (gradient * scale).to(parameter.dtype)


def train(optimizer, parameters, updates, vector: torch.nn.Parameter = None) -> None:
    """With `vector`, the optimizer has all weights joined in it, as fairseq's FP16Optimizer has them on a GPU."""
    for update in updates:
        set_gradients(parameters, update)
        if vector is not None:
            vector.grad = torch.cat([parameter.grad.flatten() for parameter in parameters])
        optimizer.step()


def assert_close(found, expected, **bounds) -> None:
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, **bounds)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        *((name, options) for name in (ADAM, LAMB, MUON) for options in ({}, EXEMPT)),
        (LAMB, {**EXEMPT, "no_ratio_without_decay": True}),
    ],
)
@pytest.mark.parametrize("stop", [0, 3])  # before the first update, too
def test_a_resumed_run_ends_where_one_without_a_break_does(name, options, stop):
    expected, parameters = make_parameters(), make_parameters()
    whole = build(name, expected, **options)
    train(whole, expected, range(6))
    before, after = build(name, parameters, **options), build(name, parameters, **options)
    train(before, parameters, range(stop))
    saved = before.state_dict()
    unchanged = copy.deepcopy(saved)
    after.load_state_dict(saved)
    assert str(saved) == str(unchanged)  # a checkpoint in memory is the caller's
    train(after, parameters, range(stop, 6))
    assert_close(parameters, expected)
    layout, own = ([group.keys() for group in of.state_dict()["param_groups"]] for of in (after, whole))
    assert layout == own  # whatever torch reads of a group it finds
    decays = [*[0.5] * (name == MUON), *([0.5, 0.0] if options else [0.5])]
    assert [group["weight_decay"] for group in after.param_groups] == decays


@ALL
def test_a_state_of_other_groups_or_weights_or_of_another_optimizer_is_refused_in_words(name):
    """In half precision fairseq sees one name for all optimizers: its wrapper's."""
    parameters = make_parameters()
    for exempts in (False, True):
        before = build(name, parameters, no_decay_bias_and_norm=exempts)
        train(before, parameters, range(1))
        with pytest.raises(UserError, match=f"trained with{'' if exempts else 'out'} --no-decay-bias-and-norm"):
            build(name, parameters, no_decay_bias_and_norm=not exempts).load_state_dict(before.state_dict())
    before = build(name, parameters)
    train(before, parameters, range(1))
    with pytest.raises(UserError, match="does not match the model's weights"):
        build(name, make_parameters()[:-1]).load_state_dict(before.state_dict())
    for other in {ADAM, LAMB, MUON} - {name}:
        saved = build(other, make_parameters()).state_dict()
        with pytest.raises(UserError, match=f"not trained with --optimizer {name}: .*--reset-optimizer"):
            build(name, make_parameters()).load_state_dict(saved)


@ALL
def test_options_are_set_overridden_and_refused(name):
    parameters = make_parameters()
    optimizer, again = (build(name, parameters, **EXEMPT) for _ in range(2))
    train(optimizer, parameters, range(1))
    again.load_state_dict(optimizer.state_dict(), optimizer_overrides={"weight_decay": 0.25})
    assert [group["weight_decay"] for group in again.param_groups] == [*[0.25] * (name == MUON), 0.25, 0.0]
    option = f"{'lamb' if name == LAMB else 'adam'}_betas"
    for betas in ("(0.9, 0.98)", "0.9, 0.98", [0.9, 0.98]):
        assert build(name, parameters, **{option: betas}).param_groups[0]["betas"] == (0.9, 0.98)
    for betas in ("(0.9)", "(0.9, 1.0)", "0.9, x", "__import__('os')", (0.9,), "(-0.1, 0.9)"):
        with pytest.raises(UserError, match=f"--{option.replace('_', '-')} .*must be"):
            build(name, parameters, **{option: betas})
    if name == MUON:
        with pytest.raises(UserError, match="found no sublayer matrices"):
            build(name, [torch.nn.Parameter(torch.zeros(10))], **EXEMPT)


def test_options_of_lamb_reach_the_optimizer_or_are_refused():
    group = build(LAMB, make_parameters(), max_weight_norm=10.0, no_bias_correction=True).param_groups[0]
    del group["params"]
    assert group == {
        "lr": 0.1, "betas": (0.9, 0.98), "eps": 1e-3, "weight_decay": 0.5, "bias_correction": False,
        "max_weight_norm": 10.0, "ratio_without_decay": True,
    }  # fmt: skip
    for changes, words in (
        ({"lamb_eps": -1e-6}, "--lamb-eps -1e-06: must be 0 or more"),
        ({"weight_decay": float("nan")}, "--weight-decay nan: must be a number, 0 or more"),
        ({"max_weight_norm": -1}, "--max-weight-norm -1: must be 0 or more"),
    ):
        with pytest.raises(UserError, match=words):
            build(LAMB, make_parameters(), **changes)


def in_half_precision(name: str, weights) -> FP16Optimizer:
    """fairseq's mixed precision."""
    scaling = dict(fp16_scale_window=8, fp16_init_scale=4, fp16_scale_tolerance=0.0, threshold_loss_scale=None)
    common = dict(bf16=weights[0].dtype == torch.bfloat16, min_loss_scale=1e-4)
    cfg = SimpleNamespace(
        optimizer=config(name), common=SimpleNamespace(**scaling, **common),
        optimization=SimpleNamespace(update_freq=[1]),
    )  # fmt: skip

    with mock.patch("fairseq.optim.build_optimizer", lambda _, params: build(name, params)):
        return FP16Optimizer.build_optimizer(cfg, weights)


def train_in_half(optimizer: FP16Optimizer, weights, updates) -> None:
    for update in updates:
        optimizer.zero_grad()
        set_gradients(weights, update, 1.0 if optimizer.scaler is None else optimizer.scaler.loss_scale)
        optimizer._needs_sync = True
        optimizer.clip_grad_norm(1.0)
        optimizer.step()


@pytest.mark.parametrize("name", [LAMB, MUON])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_tensors_keep_their_shapes_in_half_precision_and_resume_to_the_bit(name, dtype):
    expected, weights = make_parameters(dtype), make_parameters(dtype)
    without_break = in_half_precision(name, expected)
    train_in_half(without_break, expected, range(10))
    before, after = (in_half_precision(name, weights) for _ in range(2))
    train_in_half(before, weights, range(5))
    after.load_state_dict(copy.deepcopy(before.state_dict()))
    train_in_half(after, weights, range(5, 10))
    assert all(torch.equal(*pair) for pair in zip(after.fp32_params, without_break.fp32_params, strict=True))

    masters = make_parameters()
    for master, weight in zip(masters, make_parameters(dtype), strict=True):
        master.data.copy_(weight.data)
    plain = build(name, masters)
    for update in range(10):
        set_gradients(masters, update)
        plain.clip_grad_norm(1.0)
        plain.step()
    assert_close(after.fp32_params, masters, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("options", [{}, EXEMPT])
def test_steps_are_adams_with_decoupled_decay_of_all_but_the_exempt(options):
    parameters = make_parameters()
    optimizer = build(ADAM, parameters, adam_eps=1e-6, **options)
    for _ in range(3):
        before = [parameter.detach().clone() for parameter in parameters]
        for parameter in parameters:
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        for old, new in zip(before, parameters, strict=True):
            decay = 0.5 if old.dim() > 1 or not options else 0
            # With a constant gradient of 1 both bias-corrected means are 1.
            torch.testing.assert_close(new, old * (1 - 0.1 * decay) - 0.1 / (1 + 1e-6))


def test_gradients_are_clipped_once_by_the_norm_of_all():
    """As FusedLAMB does it itself in NVIDIA's BERT: fairseq's clipping before it gives the same numbers."""
    expected, parameters = make_parameters(), make_parameters()
    theirs = apex_stand_in.FusedLAMB(expected, lr=0.1, betas=(0.9, 0.98), eps=1e-3, weight_decay=0.5, max_grad_norm=1)
    ours = build(LAMB, parameters)
    for update in range(4):
        for each in (parameters, expected):
            set_gradients(each, update, 10 ** (1 - update))
        assert (utils.clip_grad_norm_(expected, 0) > 1) == (update < 2)
        ours.clip_grad_norm(1.0)
        ours.step()
        theirs.step()
    assert_close(parameters, expected, rtol=1e-5, atol=1e-6)


@ALL
def test_half_precision_weights_are_refused_in_words(name, fairseq_train, data_folder, tmp_path):
    with pytest.raises(UserError, match=f"--memory-efficient-fp16.*--optimizer {name} .*use --optimizer adam"):
        options = f"{SMALL} --max-update 1 --optimizer {name} --fp16 --memory-efficient-fp16"
        fairseq_train(data_folder, options, tmp_path)


# --- the sum of an update's gradients in half precision, beside the same gradients added in double precision ----------


@pytest.fixture(params=["bf16", "fp16"])
def optimizer(request) -> FP16Optimizer:
    return in_half_precision(ADAM, make_parameters(torch.bfloat16 if request.param == "bf16" else torch.half))


def sums(optimizer: FP16Optimizer, gradients: list[list[torch.Tensor]], skips=()) -> tuple[torch.Tensor, float]:
    """All gradients' sums as one vector, in double precision, as the optimizer steps with them, and their norm.

    `skips` tells for each batch how many of the first weights it does not use.
    """
    count = len(gradients)
    with optimizer.summing_in_fp32([]):
        optimizer.zero_grad()
        for number, sample in enumerate(gradients):
            pairs = list(zip(optimizer.fp16_params, sample, strict=True))[skips[number] if skips else 0 :]
            optimizer.backward(sum((weight * gradient).sum() for weight, gradient in pairs).float())
        optimizer.multiply_grads(1 / count)
        norm = optimizer.clip_grad_norm(0.0)
        optimizer._unscale_grads()
    found = torch.cat([master.grad.flatten() for master in optimizer.fp32_params])
    return count * found.double(), count * float(norm)


def draw(optimizer: FP16Optimizer, batches: int, scale: float = 1.0) -> list[list[torch.Tensor]]:
    """Gradients of a mean, in which batches agree, and noise."""
    random = torch.Generator().manual_seed(1)
    dtype = optimizer.fp16_params[0].dtype
    return [[(scale * (1 + torch.rand(shape, generator=random))).to(dtype) for shape in SHAPES] for _ in range(batches)]


def exact(gradients: list[list[torch.Tensor]]) -> torch.Tensor:
    return sum(torch.cat([gradient.double().flatten() for gradient in sample]) for sample in gradients)


def test_512_batches_add_up(optimizer):
    gradients = draw(optimizer, 512)
    for _ in range(2):  # the second update begins at zero
        found, norm = sums(optimizer, gradients)
        torch.testing.assert_close(found, exact(gradients), rtol=1e-5, atol=0)
        assert norm == pytest.approx(float(exact(gradients).norm()), rel=1e-5)
    assert optimizer.fp32_sum_groups is None


def test_a_weight_that_few_batches_use_has_their_sum(optimizer):
    gradients = draw(optimizer, 20)
    skips = [2 if number in (3, 7) else 1 for number in range(20)]  # the first weight in all, the second in two
    found, _ = sums(optimizer, gradients, skips)
    for sample, skipped in zip(gradients, skips, strict=True):
        for gradient in sample[:skipped]:
            gradient.zero_()
    torch.testing.assert_close(found, exact(gradients), rtol=1e-5, atol=0)


@pytest.mark.parametrize("optimizer", ["fp16"], indirect=True)
def test_a_sum_may_be_larger_than_fp16_but_no_batch_s_gradient(optimizer):
    gradients = draw(optimizer, 32, scale=6000.0)  # times the loss scale, 4: each below 65,504, their sum above
    torch.testing.assert_close(sums(optimizer, gradients)[0], exact(gradients), rtol=1e-5, atol=0)
    assert optimizer.scaler.loss_scale == 4
    gradients[5][1][0] = torch.inf
    with pytest.raises(OverflowError):
        sums(optimizer, gradients)
    assert optimizer.scaler.loss_scale == 2 and optimizer.fp32_sum_groups is None


LARGE, BY_LAMB = "--update-freq 9", "--optimizer nvlamb --lr 0.01 --lr-scheduler polynomial_warmup --warmup-ratio 0.3"
BY_MUON = "--optimizer muon --lr 0.01 --adam-lr 0.001 --muon-scale original"
QUICK = [f"{LARGE} --bf16", f"{BY_MUON} --bf16"]
SLOW = [
    f"{LARGE} --fp16",
    f"{BY_LAMB} --bf16",
    f"{BY_LAMB} --fp16",
    BY_LAMB,
    f"{BY_MUON} --fp16",
    f"{BY_MUON} --muon-precision bf16",
]


@pytest.mark.parametrize("options", mostly_slow([*QUICK, *SLOW], *QUICK))
def test_a_run_is_resumed_to_the_bit(options, fairseq_train, data_folder, tmp_path):
    with mock.patch.object(FP16Optimizer, "_add", autospec=True, side_effect=FP16Optimizer._add) as add:
        options = f"{ONE_BY_ONE} --max-update 4 {options}"
        expected = fairseq_train(data_folder, f"{options} --save-interval-updates 2", tmp_path / "whole")
    assert add.call_count == (4 * 9 if LARGE in options else 0)
    half = tmp_path / "whole" / "checkpoint_1_2.pt"
    found = fairseq_train(data_folder, f"{options} --restore-file {half}", tmp_path / "resumed")
    assert updates_of(found) == 4
    assert_equal_state(found["model"], expected["model"])
    groups = found["last_optimizer_state"]["param_groups"]
    assert [group["lr"] for group in groups] == [0.0] * (1 + (BY_MUON in options))


@pytest.mark.slow
@pytest.mark.parametrize("more", ["", BY_MUON])
def test_two_processes_add_up_as_one_does(more, fairseq_train, data_folder, tmp_path, free_port):
    options = f"{ONE_BY_ONE} --bf16 --max-update 1 {more}"
    alone = fairseq_train(data_folder, f"{options} --update-freq 18", tmp_path / "one")
    words = train_words(data_folder, f"{options} --update-freq 9", tmp_path / "two")
    run = train_in_two_processes(words, free_port)
    assert run.returncode == 0, run.stdout[-3000:] + run.stderr[-3000:]
    states = alone["last_optimizer_state"], torch.load(tmp_path / "two" / "checkpoint_last.pt")["last_optimizer_state"]
    moments = [[each.get("exp_avg", each.get("momentum_buffer")) for each in of["state"].values()] for of in states]
    one, two = (torch.cat([each.flatten() for each in some]) for some in moments)
    assert (one - two).norm() < 3e-3 * one.norm()  # the last two batches' mean is rounded to bf16
