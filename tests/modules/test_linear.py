"""Linear maps: torch's own, and oneDNN's where these are faster."""

from contextlib import nullcontext

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from lazyformer_fairseq.modules import linear
from lazyformer_fairseq.modules.linear import Linear, multiply_by_onednn

needs_onednn = pytest.mark.skipif(not linear.has_onednn(), reason="this torch has not both MKL and oneDNN")
ROWS, INPUTS, OUTPUTS = 256, 256, 512  # as many as are worth it


class KernelNames(TorchDispatchMode):
    """Collects the names of the operators that run."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.names.append(function.name())
        return function(*args, **(kwargs or {}))


def uses_onednn(module: nn.Module, x: torch.Tensor) -> bool:
    with KernelNames() as kernels:
        module(x)
    return "mkldnn::_linear_pointwise" in kernels.names


@pytest.fixture
def amd(monkeypatch):
    monkeypatch.setattr(linear, "is_amd", lambda: True)


@needs_onednn
@settings(deadline=None, max_examples=40)
@given(
    batch=st.lists(st.integers(1, 4), min_size=1, max_size=3),
    inputs=st.integers(1, 40),
    outputs=st.integers(1, 40),
    has_bias=st.booleans(),
    seed=st.integers(0, 2**31),
)
def test_onednn_multiplies_as_float64_does(batch, inputs, outputs, has_bias, seed):
    generator = torch.Generator().manual_seed(seed)
    shapes = [(*batch, inputs), (outputs, inputs)] + [(outputs,)] * has_bias
    ours = [torch.randn(shape, generator=generator).requires_grad_() for shape in shapes]
    exact = [tensor.detach().double().requires_grad_() for tensor in ours]
    weights = torch.randn(*batch, outputs, generator=generator)
    outcome, expected = multiply_by_onednn(*ours), nn.functional.linear(*exact)
    torch.testing.assert_close(outcome.double(), expected, atol=1e-4, rtol=1e-4)
    gradients = torch.autograd.grad((outcome * weights).sum(), ours)
    for ours_of_it, exact_of_it in zip(gradients, torch.autograd.grad((expected * weights).sum(), exact), strict=True):
        torch.testing.assert_close(ours_of_it.double(), exact_of_it, atol=1e-4, rtol=1e-4)


@needs_onednn
def test_a_gradient_has_a_gradient():
    torch.manual_seed(0)
    x, weight, bias = (torch.randn(*shape, requires_grad=True) for shape in ((6, 5), (4, 5), (4,)))

    def of_gradients(multiply):
        gradients = torch.autograd.grad(multiply(x, weight, bias).pow(3).sum(), (x, weight), create_graph=True)
        return torch.autograd.grad(sum(gradient.square().sum() for gradient in gradients), (x, weight, bias))

    for ours, theirs in zip(of_gradients(multiply_by_onednn), of_gradients(nn.functional.linear), strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-2, rtol=1e-4)


@needs_onednn
def test_on_an_amd_processor_onednn_multiplies(amd):
    module = Linear(INPUTS, OUTPUTS)
    assert uses_onednn(module, torch.randn(2, ROWS // 2, INPUTS))
    with torch.inference_mode():
        assert uses_onednn(module, torch.randn(ROWS, INPUTS))


@needs_onednn
@pytest.mark.filterwarnings("ignore:TF32 acceleration")  # says torch of `flags`
@pytest.mark.parametrize(
    "case",
    [
        "another processor",
        "few tokens",
        "an odd number",
        "a part of a matrix",
        "a subclass",
        "bf16",
        "float64",
        "autocast",
        "off",
    ],
)
def test_elsewhere_torch_multiplies(amd, monkeypatch, case):
    if case == "another processor":
        monkeypatch.setattr(linear, "is_amd", lambda: False)
    rows = {"few tokens": 8, "an odd number": ROWS + 1}.get(case, ROWS)
    dtype = {"bf16": torch.bfloat16, "float64": torch.float64}.get(case, torch.float32)
    around = {
        "autocast": torch.autocast("cpu", torch.bfloat16),
        "off": torch.backends.mkldnn.flags(enabled=False),
    }.get(case, nullcontext())
    module, x = Linear(INPUTS, OUTPUTS).to(dtype), torch.randn(rows, INPUTS, dtype=dtype)
    if case == "a subclass":
        x = x.as_subclass(type("Quantised", (torch.Tensor,), {}))
    if case == "a part of a matrix":
        module.weight = nn.Parameter(torch.randn(OUTPUTS, 2 * INPUTS)[:, :INPUTS])
    with around:
        assert not uses_onednn(module, x)


@needs_onednn
@pytest.mark.filterwarnings("ignore:`torch.jit.trace:DeprecationWarning")
def test_exporters_see_torchs_own_operator(amd):
    module, x = Linear(INPUTS, OUTPUTS), torch.randn(ROWS, INPUTS)
    exported = torch.export.export(module, (x,))
    assert "aten.linear" in str(exported.graph) and "mkldnn" not in str(exported.graph)
    torch.testing.assert_close(exported.module()(x), module(x), atol=1e-5, rtol=1e-4)
    assert "mkldnn" not in str(torch.jit.trace(module, x, check_trace=False).inlined_graph)


@needs_onednn
def test_its_flops_are_counted(amd):
    module, x = Linear(INPUTS, OUTPUTS), torch.randn(ROWS, INPUTS, requires_grad=True)
    with FlopCounterMode(display=False) as counter:
        module(x).sum().backward()
    assert counter.get_total_flops() == 3 * 2 * ROWS * INPUTS * OUTPUTS


@needs_onednn
@pytest.mark.filterwarnings("ignore:There is a performance drop")  # says torch of oneDNN's operator under vmap
def test_functional_transforms_go_through(amd):
    module, x = Linear(INPUTS, OUTPUTS), torch.randn(2, ROWS, INPUTS, requires_grad=True)

    def loss(one):
        return module(one).square().mean()

    sum(loss(one) for one in x).backward()
    torch.testing.assert_close(torch.func.vmap(torch.func.grad(loss))(x.detach()), x.grad, atol=1e-6, rtol=1e-4)
