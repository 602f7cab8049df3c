"""Linear maps: torch's own, and oneDNN's where these are faster."""

from contextlib import nullcontext

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from lazyformer_fairseq.modules import linear, products, timing
from lazyformer_fairseq.modules.linear import Linear, Products, multiply_by_onednn

pytestmark = pytest.mark.skipif(not products.has_onednn(), reason="this torch has not both MKL and oneDNN")
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


def wins(*products: bool):
    return lambda rows, inputs, outputs, is_training: Products(*products)


@pytest.fixture
def onednn_is_faster(monkeypatch):
    monkeypatch.setattr(linear, "faster_products", wins(True, True, True))


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
    found = [part.double() for part in torch.autograd.grad((outcome * weights).sum(), ours)]
    expected = list(torch.autograd.grad((expected * weights).sum(), exact))
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)


def test_a_gradient_has_a_gradient():
    torch.manual_seed(0)
    x, weight, bias = (torch.randn(*shape, requires_grad=True) for shape in ((6, 5), (4, 5), (4,)))

    def of_gradients(multiply):
        gradients = torch.autograd.grad(multiply(x, weight, bias).pow(3).sum(), (x, weight), create_graph=True)
        return torch.autograd.grad(sum(gradient.square().sum() for gradient in gradients), (x, weight, bias))

    ours, theirs = map(of_gradients, (multiply_by_onednn, nn.functional.linear))
    torch.testing.assert_close(ours, theirs, atol=1e-2, rtol=1e-4)


@pytest.mark.parametrize(
    ("batch", "time", "faster", "kernels"),
    [
        *((*sizes, (True, True, True), (1, 2)) for sizes in ((2, 120), (3, 252), (1, 340))),
        (2, ROWS // 2, (True, False, False), (1, 0)),
        (2, ROWS // 2, (False, True, False), (0, 1)),
        (2, ROWS // 2, (False, False, True), (0, 1)),
    ],
)
def test_each_product_has_its_own_library(monkeypatch, batch, time, faster, kernels):
    """Tokens a little below a multiple are filled up."""
    torch.manual_seed(0)
    monkeypatch.setattr(linear, "faster_products", wins(*faster))
    module, x = Linear(INPUTS, OUTPUTS), torch.randn(batch, time, INPUTS, requires_grad=True)
    with KernelNames() as forward:
        output = module(x)
    with KernelNames() as backward:
        output.square().sum().backward()
    assert tuple(run.names.count("mkldnn::_linear_pointwise") for run in (forward, backward)) == kernels
    exact, x_exact = nn.Linear(INPUTS, OUTPUTS).double(), x.detach().double().requires_grad_()
    exact.load_state_dict(module.state_dict())
    exact(x_exact).square().sum().backward()
    found = [x.grad.double(), *(parameter.grad.double() for parameter in module.parameters())]
    wanted = [x_exact.grad, *(parameter.grad for parameter in exact.parameters())]
    torch.testing.assert_close(found, wanted, atol=1e-3, rtol=1e-3)
    torch.testing.assert_close(output.double(), exact(x_exact), atol=1e-4, rtol=1e-4)


@pytest.fixture
def chosen(monkeypatch, tmp_path):
    """What this process chooses: nothing is known yet, here or in the cache folder."""
    monkeypatch.setenv("LAZYFORMER_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(products, "SELECTOR", made := timing.Autotuner())
    return made


@pytest.mark.filterwarnings("ignore:There is a performance drop")  # says torch of oneDNN's operator under vmap
def test_choosing_leaves_no_trace_in_what_is_computed(chosen):
    chosen.time_at_once()
    module, x = Linear(INPUTS, OUTPUTS), torch.randn(2, ROWS, INPUTS)
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    with torch.inference_mode(), KernelNames() as kernels:
        torch.func.vmap(module)(x)
    assert len(*chosen.known.values()) == 1
    assert sum("linear" in name or "mm" in name for name in kernels.names) <= 2
    assert torch.equal(torch.rand(3), expected)
    for part in x:
        with torch.no_grad():
            module(part)
    module(x.requires_grad_()).sum().backward()  # no part of inference mode has stayed
    assert x.grad is not None


def test_each_product_of_a_run_s_rows_is_chosen_once(chosen):
    chosen.time_at_once()
    module = Linear(INPUTS, OUTPUTS)
    for rows in (ROWS, ROWS, ROWS + 10 * 128, ROWS + 40 * 128):
        module(torch.randn(rows, INPUTS)).sum().backward()
    (shapes,) = chosen.known.values()
    said = [f"of about {rows} rows of a map of {INPUTS} to {OUTPUTS}" for rows in (ROWS, 1024)]
    assert list(shapes) == [
        f"{what} {of}" for of in said for what in ("product", "input's gradient", "weight's gradient")
    ]
    assert set(shapes.values()) <= {"MKL", "oneDNN"}


@pytest.mark.parametrize("library", ["MKL", "oneDNN"])
def test_the_faster_library_is_found(chosen, monkeypatch, library):
    def slow(multiply):
        return lambda *factors: [multiply(*factors) for _ in range(4)].pop()

    place, name = (linear, "linear_by_onednn") if library == "MKL" else (linear.F, "linear")
    monkeypatch.setattr(place, name, slow(getattr(place, name)))
    assert linear.faster_products(256, 256, 256, True).forward == (library == "oneDNN")


@settings(deadline=None, max_examples=20)
@given(
    sizes=st.tuples(st.integers(1, 3), *[st.integers(1, 40)] * 3),
    turned=st.booleans(),
    adds=st.booleans(),
    part=st.booleans(),
)
def test_both_libraries_multiply_batches_alike(sizes, turned, adds, part):
    """First factors that are turned, second ones as keys stand in projections, results with room behind their rows."""
    torch.manual_seed(0)
    batch, rows, shared, columns = sizes
    a = torch.randn(batch, shared, rows).mT if turned else torch.randn(batch, rows, shared)
    b = torch.randn(batch, shared, 3 * columns)[..., :columns] if part else torch.randn(batch, columns, shared).mT
    outs = [torch.ones(batch, rows, columns + part)[..., :columns] for _ in range(2)]
    by_mkl, by_onednn = (
        multiply(a, b, out, adds) for multiply, out in zip(products._BATCHED.values(), outs, strict=True)
    )
    torch.testing.assert_close(by_onednn, by_mkl, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(outs[1].double(), a.double() @ b.double() + adds, atol=1e-4, rtol=1e-4)


class WeightsSeen(TorchDispatchMode):
    """Collects whether oneDNN's second factors are whole matrices, in either order."""

    def __init__(self):
        super().__init__()
        self.are_whole = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if "_linear_pointwise" in function.name():
            self.are_whole.append(args[1].is_contiguous() or args[1].t().is_contiguous())
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("turned", [False, True])
def test_onednn_never_takes_a_part_of_a_matrix_as_its_second_factor(turned):
    """It would take a thousand times as long, as for probabilities in rows with room for more keys."""
    torch.manual_seed(0)
    x, room = torch.randn(4, 8), torch.randn(8, 32)
    weight = room[:, :16].t() if turned else room[:, :8]
    a, out = torch.randn(2, 8, 32)[..., :16], torch.empty(2, 16 if turned else 8, 4)
    a, b = (a.mT, torch.randn(2, 8, 4)) if turned else (a, torch.randn(2, 16, 4))
    with WeightsSeen() as seen:
        by_part = products.linear_by_onednn(x, weight)
        products._multiply_by_onednn(a, b, out, adds=False)
    assert seen.are_whole == [True] * 3
    torch.testing.assert_close(by_part, x @ weight.t())
    torch.testing.assert_close(out, a @ b)


@pytest.mark.parametrize(
    ("shape", "dtype", "may"),
    [
        ((2, 256, 64, 256), torch.float32, True),
        ((2, 256, 64, 250), torch.float32, False),  # oneDNN keeps memory for each length
        ((2, 128, 64, 128), torch.float32, False),  # too short
        ((2, 256, 64, 256), torch.bfloat16, False),  # torch takes oneDNN itself
    ],
)
def test_batches_are_multiplied_by_the_faster_library_where_there_is_a_choice(chosen, shape, dtype, may):
    chosen.time_at_once()
    batch, rows, shared, columns = shape
    a, b = torch.randn(batch, rows, shared, dtype=dtype), torch.randn(batch, shared, columns, dtype=dtype)
    torch.testing.assert_close(products.multiply(a, b), a @ b, atol=1e-4, rtol=1e-3)
    assert bool(chosen.known) == may


@pytest.mark.filterwarnings("ignore:TF32 acceleration")  # says torch of `flags`
@pytest.mark.parametrize(
    ("rows", "dtype", "around"),
    [
        pytest.param(8, torch.float32, nullcontext(), id="few tokens"),
        pytest.param(129, torch.float32, nullcontext(), id="far below a multiple"),
        pytest.param(ROWS, torch.bfloat16, nullcontext(), id="bf16"),
        pytest.param(ROWS, torch.float64, nullcontext(), id="float64"),
        pytest.param(ROWS, torch.float32, torch.autocast("cpu", torch.bfloat16), id="autocast"),
        pytest.param(ROWS, torch.float32, torch.backends.mkldnn.flags(enabled=False), id="off"),
    ],
)
def test_elsewhere_torch_multiplies(onednn_is_faster, rows, dtype, around):
    with around:
        assert not uses_onednn(Linear(INPUTS, OUTPUTS).to(dtype), torch.randn(rows, INPUTS, dtype=dtype))


def test_torch_multiplies_parts_of_matrices_subclasses_and_where_it_is_faster(onednn_is_faster, monkeypatch):
    module, x = Linear(INPUTS, OUTPUTS), torch.randn(ROWS, INPUTS)
    assert not uses_onednn(module, x.as_subclass(type("Quantised", (torch.Tensor,), {})))
    part = Linear(INPUTS, OUTPUTS)
    part.weight = nn.Parameter(torch.randn(OUTPUTS, 2 * INPUTS)[:, :INPUTS])
    assert uses_onednn(module, x) and not uses_onednn(part, x)
    with torch.inference_mode():
        assert uses_onednn(module, x)
    monkeypatch.setattr(linear, "faster_products", wins(False, False, False))
    assert not uses_onednn(module, x)


@pytest.mark.filterwarnings("ignore:`torch.jit.trace:DeprecationWarning")
def test_exporters_see_torchs_own_operator(onednn_is_faster):
    module, x = Linear(INPUTS, OUTPUTS), torch.randn(ROWS, INPUTS)
    exported = torch.export.export(module, (x,))
    assert "aten.linear" in str(exported.graph) and "mkldnn" not in str(exported.graph)
    torch.testing.assert_close(exported.module()(x), module(x), atol=1e-5, rtol=1e-4)
    assert "mkldnn" not in str(torch.jit.trace(module, x, check_trace=False).inlined_graph)
