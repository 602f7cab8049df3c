"""The torch optimizer against the published equations in double precision, tensor by tensor, number by number."""

import math

import pytest
import torch

from lazyformer_fairseq.training import optimizers
from lazyformer_fairseq.training.optimizers import Lamb

SHAPES = ((3, 5), (7,), (), (2, 3, 4), (1,))
BERT = dict(lr=0.006, betas=(0.9, 0.999), eps=1e-6, weight_decay=0.01, bias_correction=True, max_weight_norm=0.0)
TRANSFORMER_XL = dict(lr=0.01, betas=(0.9, 0.999), eps=1e-6, weight_decay=0.0, bias_correction=False, max_weight_norm=2)

OTHER = dict(lr=0.1, betas=(0.0, 0.99), eps=1e-2, weight_decay=0.5, bias_correction=True, max_weight_norm=0.5)


def make_weights() -> list[torch.nn.Parameter]:
    chance = torch.Generator().manual_seed(1)
    return [torch.nn.Parameter(torch.randn(shape, generator=chance)) for shape in SHAPES]


def gradient_of(weight: torch.Tensor, number: int, update: int) -> torch.Tensor:
    return torch.randn(weight.shape, generator=torch.Generator().manual_seed(100 * update + number))


class Reference:
    """LAMB on lists of Python's numbers, which are in double precision."""

    def __init__(self, weights: list[torch.Tensor], **settings):
        self.weights = [weight.detach().double().flatten().tolist() for weight in weights]
        self.moments = [([0.0] * len(weight), [0.0] * len(weight)) for weight in self.weights]
        self.settings = settings
        self.updates = 0

    def step(self, gradients: list[torch.Tensor]) -> None:
        self.updates += 1
        s = self.settings
        b1, b2 = s["betas"]
        c1, c2 = (1 - b**self.updates if s["bias_correction"] else 1 for b in (b1, b2))
        for w, (m, v), gradient in zip(self.weights, self.moments, gradients, strict=True):
            g = gradient.double().flatten().tolist()
            m[:] = [b1 * mi + (1 - b1) * gi for mi, gi in zip(m, g, strict=True)]
            v[:] = [b2 * vi + (1 - b2) * gi * gi for vi, gi in zip(v, g, strict=True)]
            adam = [(mi / c1) / (math.sqrt(vi / c2) + s["eps"]) for mi, vi in zip(m, v, strict=True)]
            u = [ai + s["weight_decay"] * wi for ai, wi in zip(adam, w, strict=True)]
            w_norm, u_norm = (math.sqrt(sum(x * x for x in some)) for some in (w, u))
            ratio = 1.0
            if w_norm > 0 and u_norm > 0 and (s["weight_decay"] or s.get("ratio_without_decay", True)):
                ratio = min(w_norm, s["max_weight_norm"] or math.inf) / u_norm
            w[:] = [wi - s["lr"] * ratio * ui for wi, ui in zip(w, u, strict=True)]


def assert_follows(settings: dict, updates: int) -> None:
    weights = make_weights()
    optimizer, reference = Lamb(weights, **settings), Reference(weights, **settings)
    for update in range(updates):
        gradients = [gradient_of(weight, number, update) for number, weight in enumerate(weights)]
        for weight, gradient in zip(weights, gradients, strict=True):
            weight.grad = gradient.clone()
        optimizer.step()
        reference.step(gradients)
        for weight, gradient in zip(weights, gradients, strict=True):
            assert torch.equal(weight.grad, gradient)  # is the caller's
    for weight, expected in zip(weights, reference.weights, strict=True):
        found = weight.detach().double().flatten()
        torch.testing.assert_close(found, torch.tensor(expected, dtype=torch.float64), rtol=2e-5, atol=2e-6)


@pytest.fixture(params=[False, True], ids=["processor", "GPU"])
def way(request, monkeypatch):
    """A GPU's kernels run on a processor too; small buckets, so that there are several."""
    monkeypatch.setattr(optimizers, "BUCKET", 16)
    monkeypatch.setattr(optimizers, "_is_on_gpu", lambda weight: request.param)


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("settings", [BERT, TRANSFORMER_XL, OTHER], ids=["BERT", "Transformer-XL", "other"])
@pytest.mark.parametrize("ratio_without_decay", [True, False])
def test_updates_are_those_of_the_equations(settings, ratio_without_decay):
    assert_follows({**settings, "ratio_without_decay": ratio_without_decay}, updates=6)


def test_a_tensor_of_several_pieces_has_one_ratio(monkeypatch):
    monkeypatch.setattr(optimizers, "CHUNK_SIZE", 4)
    assert_follows(BERT, updates=3)


@pytest.mark.usefixtures("way")
def test_zeros_have_ratio_one_and_weights_without_a_gradient_or_elements_stay():
    zero, still = torch.nn.Parameter(torch.zeros(4)), torch.nn.Parameter(torch.ones(4))
    zero.grad, still.grad = torch.ones(4), torch.zeros(4)
    Lamb([zero, still], **{**BERT, "weight_decay": 0.0}).step()
    torch.testing.assert_close(zero.detach(), torch.full((4,), -0.006 / (1 + 1e-6)))
    assert torch.equal(still.detach(), torch.ones(4))

    weights = [*make_weights(), torch.nn.Parameter(torch.zeros(0, 3))]
    before = weights[0].detach().clone()
    for number, weight in enumerate(weights[1:]):
        weight.grad = gradient_of(weight, number, 0)
    optimizer = Lamb(weights, **BERT)
    optimizer.step()
    assert torch.equal(weights[0].detach(), before)
    assert set(optimizer.state) == set(weights[1:-1])
    optimizer.zero_grad()
    optimizer.step()
