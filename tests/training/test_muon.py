"""Muon against plain loops in double precision, against torch's, and which weights of each kind of sublayer it takes.

test_optimizers.py has what all optimizers share: options, checkpoints, half precision.
"""

import math
import re
from unittest import mock

import every_variant
import pytest
import torch
from torch import Tensor, nn

from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.evaluation.costs.flops import count_matrix_parameters
from lazyformer_fairseq.modules import products
from lazyformer_fairseq.patterns.kinds import CAUSAL, ENCODER
from lazyformer_fairseq.training import muon
from lazyformer_fairseq.training.muon import (
    COEFFICIENTS,
    Muon,
    MuonAndAdam,
    MuonOptions,
    blocks_of,
    count_flops,
    mark_matrices,
    orthogonal,
)

# Rows, columns, and matrices above each other.
WEIGHTS = ((6, 4, 1), (4, 6, 1), (9, 3, 3), (3, 3, 1), (8, 2, 1), (12, 4, 2))


def make_weights(dtype: torch.dtype = torch.float64) -> list[nn.Parameter]:
    chance = torch.Generator().manual_seed(1)
    weights = [nn.Parameter(torch.randn(*shape, generator=chance).to(dtype)) for *shape, _ in WEIGHTS]
    for weight, (*_, blocks) in zip(weights, WEIGHTS, strict=True):
        weight.optim_overrides = {"blocks": blocks}
    return weights


def gradients_of(update: int) -> list[Tensor]:
    chance = torch.Generator().manual_seed(100 + update)
    return [torch.randn(*shape, generator=chance) for *shape, _ in WEIGHTS]


Matrix = list[list[float]]


def times(a: Matrix, b: Matrix) -> Matrix:
    return [[sum(x * y for x, y in zip(row, column, strict=True)) for column in zip(*b, strict=True)] for row in a]


def plus(*terms: tuple[float, Matrix]) -> Matrix:
    shape = terms[0][1]
    return [[sum(c * of[i][j] for c, of in terms) for j in range(len(shape[0]))] for i in range(len(shape))]


def turned(a: Matrix) -> Matrix:
    return [list(column) for column in zip(*a, strict=True)]


class Reference:
    """Muon on lists of Python's numbers, matrix by matrix."""

    def __init__(self, weights: list[nn.Parameter], **settings):
        self.settings = settings
        self.weights = [block.tolist() for weight in weights for block in weight.detach().chunk(blocks_of(weight))]
        self.moments = [plus((0.0, weight)) for weight in self.weights]

    def step(self, gradients: list[Matrix]) -> None:
        s, mu = self.settings, self.settings["momentum"]
        for number, (w, g) in enumerate(zip(self.weights, gradients, strict=True)):
            m = self.moments[number] = plus((mu, self.moments[number]), (1 - mu, g))
            x = plus((mu, m), (1 - mu, g)) if s["nesterov"] else m
            norm, (a, b, c) = math.sqrt(sum(value**2 for row in x for value in row)), s["coefficients"]
            x = plus((1 / (norm + 1e-7), x))
            for _ in range(s["steps"]):
                gram = times(x, turned(x))  # of the longer side too: the same, only dearer
                x = plus((a, x), (1.0, times(plus((b, gram), (c, times(gram, gram))), x)))
            rows, columns = len(w), len(w[0])
            by_scale = {"original": max(1, rows / columns) ** 0.5, "match_rms_adamw": 0.2 * max(rows, columns) ** 0.5}
            self.weights[number] = plus((1 - s["lr"] * s["weight_decay"], w), (-s["lr"] * by_scale[s["scale"]], x))


@pytest.mark.parametrize(
    "settings",
    [
        dict(scale="original", nesterov=True, momentum=0.95, weight_decay=0.1, steps=5, coefficients=COEFFICIENTS),
        dict(
            scale="match_rms_adamw",
            nesterov=False,
            momentum=0.8,
            weight_decay=0.0,
            steps=3,
            coefficients=(2, -1.5, 0.5),
        ),
    ],
)
@pytest.mark.parametrize("at_once", [10, 2**22])  # elements: one weight, and all of a shape
def test_an_update_is_that_of_plain_loops(settings, at_once, monkeypatch):
    monkeypatch.setattr(muon, "CPU_BUCKET_SIZE", at_once)
    weights = make_weights()
    optimizer, reference = Muon(weights, lr=0.05, **settings), Reference(weights, lr=0.05, **settings)
    for update in range(3):
        gradients = gradients_of(update)
        for weight, gradient in zip(weights, gradients, strict=True):
            weight.grad = gradient.double()
        optimizer.step()
        pairs = zip(weights, gradients, strict=True)
        reference.step([block.double().tolist() for weight, each in pairs for block in each.chunk(blocks_of(weight))])
    found = [block for weight in weights for block in weight.detach().chunk(blocks_of(weight))]
    for ours, theirs in zip(found, reference.weights, strict=True):
        torch.testing.assert_close(ours, torch.tensor(theirs, dtype=torch.float64), rtol=1e-12, atol=1e-13)


def test_singular_values_end_near_1_in_each_precision_and_zero_stays_zero():
    x = torch.randn(2, 16, 40, generator=torch.Generator().manual_seed(1))
    x[1] = 0
    for dtype in (None, torch.bfloat16):
        found = orthogonal(x, 5, COEFFICIENTS, dtype)
        assert found.dtype == (dtype or torch.float32)
        values = torch.linalg.svdvals(found[0].float())
        assert values.min() > 0.5 and values.max() < 1.3
        assert not found[1].any()


@pytest.mark.parametrize("columns", [8, 12, 20, 64])
def test_the_formula_counts_what_the_products_cost(columns):
    from torch.utils.flop_counter import FlopCounterMode

    with FlopCounterMode(display=False) as counter:
        orthogonal(torch.randn(3, 8, columns), 5, COEFFICIENTS)
    assert counter.get_total_flops() == 3 * count_flops(columns, 8)


@pytest.mark.parametrize("rank", [3, 32])
def test_steps_on_the_square_of_wide_matrices_are_as_exact_as_those_on_the_matrices(rank):
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(2, 32, rank, generator=generator) @ torch.randn(2, rank, 128, generator=generator)
    exact = orthogonal(x.double(), 5, COEFFICIENTS)
    with mock.patch.object(muon, "_begins_with_gram", lambda rows, columns: False):
        torch.testing.assert_close(orthogonal(x.double(), 5, COEFFICIENTS), exact, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(orthogonal(x, 5, COEFFICIENTS).double(), exact, rtol=1e-4, atol=1e-4)


def test_of_several_processes_none_chooses_its_library():
    """Processes that multiply by different libraries round otherwise, and nothing brings their weights together."""
    x = torch.randn(1, 128, 512)
    with mock.patch.object(muon, "multiply", side_effect=products.multiply) as chooses:
        orthogonal(x, 1, COEFFICIENTS)
        assert chooses.call_count == 3
        with mock.patch("torch.distributed.is_initialized", lambda: True):
            orthogonal(x, 1, COEFFICIENTS)
        assert chooses.call_count == 3


# --- which weights it takes

OTHERS = {
    ENCODER: ["sflfkf", "scf", "sf[gate=silu]"],
    CAUSAL: ["sflf", "scf", "skf", "sf[gate=gelu]"],
}
NETWORKS = [*every_variant.CASES, *(pytest.param(way, pattern) for way, some in OTHERS.items() for pattern in some)]


@pytest.mark.parametrize(("direction", "pattern"), NETWORKS)
def test_linear_maps_of_sublayers_are_muon_s_and_all_else_is_adam_s(direction, pattern):
    network = every_variant.build(direction, pattern)
    mark_matrices(network)
    taken = {name: blocks_of(weight) for name, weight in network.named_parameters() if blocks_of(weight)}
    weights = dict(network.named_parameters())
    is_map = re.compile(r"sublayers\.\d+\..*(_proj|fc\d|\.dense|factorised_dense)\.weight")
    assert taken.keys() == {name for name in weights if is_map.fullmatch(name)}
    for name, blocks in taken.items():
        size = every_variant.WIDTH if re.search(r"(qkv|kv|in)_proj", name) else 8 if "fc1" in name else None
        assert blocks == (weights[name].size(0) // size if size else 1), name
    assert sum(weights[name].numel() for name in taken) == count_matrix_parameters(pattern, network.sizes)


def options(**changes) -> MuonOptions:
    config = MuonOptions(**changes)
    config.lr = [0.1]
    return config


def test_adam_s_rate_keeps_its_proportion_to_muon_s():
    weights = [*make_weights(torch.float32)[:2], nn.Parameter(torch.zeros(3)), nn.Parameter(torch.zeros(2, 2))]
    for given, expected in ((None, [0.05, 0.05, 0.05]), (0.02, [0.05, 0.01, 0.01])):
        optimizer = MuonAndAdam(options(adam_lr=given, no_decay_bias_and_norm=True), weights)
        optimizer.set_lr(0.05)
        assert [group["lr"] for group in optimizer.param_groups] == pytest.approx(expected)
        assert [len(group["params"]) for group in optimizer.param_groups] == [2, 1, 1]
        assert optimizer.get_lr() == 0.05
    before = weights[-1].detach().clone()
    for weight in weights:
        weight.grad = torch.ones_like(weight)
    optimizer.optimizer.step()
    torch.testing.assert_close(weights[-1], before - 0.01, atol=1e-6, rtol=0)  # of zeros there is no decay
    assert {len(optimizer.optimizer.state[weight]) for weight in weights[:2]} == {1}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"muon_momentum": 1.0}, "--muon-momentum 1.0: must be at least 0 and below 1"),
        ({"adam_lr": -1.0}, "--adam-lr -1.0: must be 0 or more"),
    ],
)
def test_impossible_options_are_refused(changes, words):
    with pytest.raises(UserError, match=words):
        MuonAndAdam(options(**changes), make_weights(torch.float32))


def test_a_model_of_others_is_refused():
    with pytest.raises(UserError, match="--optimizer muon: found no sublayer matrices"):
        MuonAndAdam(options(), list(nn.Linear(3, 2).parameters()))


@pytest.mark.parametrize("precision", ["auto", "fp32", "bf16"])
def test_products_are_in_bf16_where_the_processor_has_it(precision, monkeypatch):
    for has_it in (True, False):
        monkeypatch.setattr(muon, "has_bf16", lambda has_it=has_it: has_it)
        found = MuonAndAdam(options(muon_precision=precision), make_weights(torch.float32)).optimizer.dtype
        assert (found == torch.bfloat16) == (precision == "bf16" or (precision == "auto" and has_it))
