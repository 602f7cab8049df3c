"""The Triton kernels against a dense reference in float64; ``test_triton.py`` runs this in the interpreter."""

import math

import numpy as np
import pytest
import torch
import triton.language as tl
from hypothesis import example, given, settings
from hypothesis import strategies as st
from masked_attention import BUCKETS, Case
from torch import Tensor
from triton._C.libtriton import ir
from triton.runtime.interpreter import InterpreterBuilder

from lazyformer_fairseq.modules.attention import triton_kernels
from lazyformer_fairseq.modules.attention.scores import Scores
from lazyformer_fairseq.modules.attention.triton_kernels import InTriton
from lazyformer_fairseq.modules.networks.encoder import Encoder, init_bert_weights
from lazyformer_fairseq.modules.sublayers.attention_variants import rope
from lazyformer_fairseq.modules.sublayers.attention_variants.rope import Rotation

KERNELS = InTriton()
# Largest error of an entry, as a share of the tensor's largest entry.
TOLERANCE = {torch.float32: 3e-6, torch.float16: 3e-3, torch.bfloat16: 2e-2}


class Block(Case):
    """A lazy block of m layers: random inputs, and what a dense computation in float64 makes of them."""

    def __init__(self, batch, heads, time, size, layers, dtype, biased, padded, seed=1):
        parts = {*(["bias"] if biased else []), *(["right"] if padded else [])}
        given = {"heads": heads, "size": size, "consumers": layers - 1, "dtype": dtype, "seed": seed}
        super().__init__(None, batch, time, parts=parts, **given)
        table = self.scores.table_KN
        self.table = None if table is None else table.float().detach().clone()
        self.scores = self.scores.with_own(table_KN=self.table)
        self.learned = {} if table is None else {"table_KN": self.table}
        self.q, self.k, *rest = (leaf.detach() for leaf in (self.q, self.k, *self.values, *self.d_outputs))
        self.values, self.d_outputs = rest[:layers], rest[layers:]
        self.compute()

    def compute(self) -> None:
        found = self.by("eager", dtype=torch.double)
        layers = len(self.values)
        self.outputs, (self.dq, self.dk, *self.dv), self.d_table = found[:layers], found[layers : 2 * layers + 2], None
        if self.table is not None:
            self.d_table = found[-1]
        scores = self.q.double() @ self.k.double().transpose(-1, -2) / math.sqrt(self.q.size(-1))
        added = self.scores.with_own(table_KN=None if self.table is None else self.table.double())
        added._cache = {}
        added = added.dense(self.q.size(-2), self.k.size(-2), scores)
        self.lse = (scores if added is None else scores + added).logsumexp(-1)
        sums = [(d.double() * output).sum(-1) for d, output in zip(self.d_outputs, self.outputs, strict=True)]
        self.delta = torch.stack(sums).sum(0).float()

    def gradients(self, lse: Tensor | None = None) -> tuple[Tensor, ...]:
        """dQ, dK, dV of the ``s`` and of the table."""
        lse = self.lse.float() if lse is None else lse
        arguments = (self.q, self.k, self.values, self.d_outputs, self.delta, lse, self.scores)
        return KERNELS.block_gradient(*arguments)[:4]


@pytest.fixture(autouse=True, scope="module")
def bfloat16_products():
    """The interpreter keeps a bfloat16 in 16 bits of an integer, and multiplies those: gives its products numbers."""
    create_dot = InterpreterBuilder.create_dot

    def numbers(operand):
        if operand.dtype.scalar == tl.bfloat16:
            data = (operand.data.astype(np.uint32) << 16).view(np.float32)
            return type(operand)(data, tl.float32)
        return operand

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            InterpreterBuilder, "create_dot", lambda self, a, b, *rest: create_dot(self, numbers(a), numbers(b), *rest)
        )
        yield


@pytest.fixture(params=["pointers", "descriptors"], scope="module", autouse=True)
def loads(request):
    """How kernels load the tiles in their loops. The interpreter lacks the addition to a tile of a descriptor."""
    tiles = triton_kernels._FALLBACK_TILES[0]._replace(descriptors=request.param == "descriptors")

    def add(builder, kind, descriptor, value, indices):
        pointers, mask = descriptor.materialize_pointers(indices)
        return builder.create_atomic_rmw(ir.ATOMIC_OP.FADD, pointers, value, mask, ir.MEM_SEMANTIC.RELAXED, None)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(triton_kernels, "_FALLBACK_TILES", (tiles,))
        patch.setattr(triton_kernels, "supports_descriptors", lambda strided: True)
        patch.setattr(InterpreterBuilder, "create_descriptor_reduce", add, raising=False)
        yield request.param


BLOCKS = st.builds(
    Block,
    batch=st.integers(1, 2),
    heads=st.integers(1, 2),
    time=st.integers(2, 70),
    size=st.sampled_from([32, 48, 64, 128]),
    layers=st.integers(1, 6),
    dtype=st.sampled_from(list(TOLERANCE)),
    biased=st.booleans(),
    padded=st.booleans(),
    seed=st.integers(0, 1000),
)
few = settings(max_examples=6, deadline=None)


def assert_close(computed: Tensor, expected: Tensor, dtype: torch.dtype, name: str, least: float = 1e-3) -> None:
    """`least` is the size that rounding is measured by where numbers of that size cancel out."""
    error = (computed.double() - expected).abs().max() / expected.abs().max().clamp(min=least)
    assert error < TOLERANCE[dtype], f"{name}: {error:.1e}"


@few
@given(BLOCKS)
def test_forward(block: Block):
    dtype = block.q.dtype
    output, lse = KERNELS.attend_forward(block.q, block.k, block.values[0], block.scores)
    assert_close(output, block.outputs[0], dtype, "output of s")
    assert_close(lse, block.lse, dtype, "log-sum-exp")
    assert output.transpose(1, 2).is_contiguous()
    for v, expected in zip(block.values[1:], block.outputs[1:], strict=True):
        read = KERNELS.reuse_forward(block.q, block.k, v, lse, block.scores)
        assert_close(read, expected, dtype, "output of l")


@few
@given(BLOCKS)
def test_value_gradient(block: Block):
    lse = block.lse.float()
    dv = KERNELS.value_gradient(block.q, block.k, block.d_outputs[-1], lse, block.scores)
    assert_close(dv, block.dv[-1], block.q.dtype, "dV of l")


@few
@given(BLOCKS)
@example(Block(1, 2, time=2, size=32, layers=1, dtype=torch.float32, biased=False, padded=True, seed=0))
def test_block_gradient(block: Block):
    *gradients, d_table = block.gradients()
    for name, computed, expected in zip(("dQ", "dK", "dV"), gradients, (block.dq, block.dk, block.dv[0]), strict=True):
        # dP - delta is the difference of numbers around sqrt(D), and zero where there is one key.
        assert_close(computed, expected, block.q.dtype, name, least=1e-3 if name == "dV" else 1.0)
    if block.table is None:
        assert d_table.shape == (0,)
    else:
        assert_close(d_table, block.d_table, block.q.dtype, "d table", least=1.0)
        assert torch.equal(d_table, block.gradients()[3])


def test_more_layers_than_fit_beside_each_other():
    block = Block(batch=1, heads=1, time=9, size=32, layers=8, dtype=torch.float32, biased=True, padded=True)
    expected = block.dq, block.dk, block.dv[0], block.d_table
    for computed, exact in zip(block.gradients(), expected, strict=True):
        assert_close(computed, exact, torch.float32, "gradient")


def test_one_token():
    block = Block(batch=2, heads=1, time=1, size=32, layers=2, dtype=torch.float32, biased=True, padded=False)
    output, lse = KERNELS.attend_forward(block.q, block.k, block.values[0], block.scores)
    assert_close(output, block.outputs[0], torch.float32, "output")
    dq, dk, dv, d_table = block.gradients(lse)
    assert_close(dv, block.dv[0], torch.float32, "dV")
    for gradient in (dq, dk, d_table):  # a distribution over one token cannot change
        assert gradient.abs().max() < 1e-5


def test_large_scores_neither_overflow_nor_vanish():
    """Without a running maximum an ``l`` relies on the log-sum-exp alone; rows reach scores of thousands."""
    block = Block(batch=1, heads=1, time=40, size=32, layers=2, dtype=torch.float32, biased=False, padded=True)
    block.q = block.q * 5000
    block.compute()
    output, lse = KERNELS.attend_forward(block.q, block.k, block.values[0], block.scores)
    read = KERNELS.reuse_forward(block.q, block.k, block.values[1], lse, block.scores)
    assert block.lse.abs().max() > 1000
    assert (output - block.outputs[0]).abs().max() < 1e-2
    assert (read - block.outputs[1]).abs().max() < 1e-2


def test_forward_of_cudnn(monkeypatch):
    """cuDNN returns what torch's kernel for CPUs returns, apart from the shape of the log-sum-exp."""

    def like_cudnn(q, k, v, bias, compute_log_sumexp):
        assert bias is None and compute_log_sumexp
        output, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v)
        return output, lse.unsqueeze(-1), None

    monkeypatch.setattr(triton_kernels, "_has_cudnn", lambda *_: True)
    monkeypatch.setattr(triton_kernels, "cudnn_attention", like_cudnn)
    block = Block(batch=2, heads=3, time=40, size=32, layers=2, dtype=torch.float32, biased=False, padded=False)
    output, lse = KERNELS.attend_forward(block.q, block.k, block.values[0], block.scores)
    assert lse.is_contiguous() and output.transpose(1, 2).is_contiguous()
    assert_close(output, block.outputs[0], torch.float32, "output of s")
    assert_close(lse, block.lse, torch.float32, "log-sum-exp")
    read = KERNELS.reuse_forward(block.q, block.k, block.values[1], lse, block.scores)
    assert_close(read, block.outputs[1], torch.float32, "output of l")


def test_an_encoder_learns_as_with_eager():
    torch.manual_seed(1)
    encoder = Encoder("sl", 50, 32, 32, 1, relative_position_buckets=BUCKETS, relative_position_max_distance=6)
    encoder.apply(init_bert_weights)
    torch.nn.init.normal_(encoder.relative_position_bias.table)
    tokens = torch.randint(2, 50, (2, 33))
    mask = torch.arange(33) >= torch.tensor([[33], [9]])
    found = {}
    for backend in ("fused", "eager"):
        encoder.attention_backend = backend
        encoder.zero_grad()
        features, _ = encoder(tokens, mask)
        features.masked_fill(mask.unsqueeze(-1), 0).sin().sum().backward()
        found[backend] = [features.detach(), *(parameter.grad.clone() for parameter in encoder.parameters())]
    for fused, eager in zip(found["fused"], found["eager"], strict=True):
        torch.testing.assert_close(fused, eager, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize("size", [6, 64])
@pytest.mark.parametrize("places", ["by index", "given"])
def test_rotation(dtype: torch.dtype, size: int, places: str, monkeypatch):
    """The kernel against torch's operations in single precision: keys with a memory, and views of one projection."""
    batch, heads, time, keys = 2, 3, 70, 81
    generator = torch.Generator().manual_seed(1)
    projected = torch.randn(batch, time, 2 * heads * size, generator=generator)
    x = projected.to(dtype).unflatten(-1, (2 * heads, size)).transpose(1, 2)[:, heads:].requires_grad_()
    d_rotated = torch.randn(batch, heads, size, time, generator=generator).to(dtype).transpose(-2, -1)
    scores = Scores()
    if places == "given":
        scores = scores.with_own(places_BT=torch.randint(0, 5000, (batch, time), generator=generator))
    rotation = Rotation(base=100)
    assert "rotate" in type(rotation(x, scores, keys).grad_fn).__name__, "the kernel rotates"

    def rotated_and_gradient(dtype: torch.dtype) -> list[Tensor]:
        given = x.detach().to(dtype).requires_grad_()
        rotated = rotation(given, scores, keys)
        (gradient,) = torch.autograd.grad(rotated, given, d_rotated.to(dtype))
        return [rotated, gradient]

    by_kernel = rotated_and_gradient(dtype)
    monkeypatch.setattr(rope, "_has_kernel", lambda x: False)
    for found, wanted in zip(by_kernel, rotated_and_gradient(torch.float32), strict=True):
        assert found.dtype == dtype
        error = (found.float() - wanted).abs().max() / wanted.abs().max()
        assert error < TOLERANCE[dtype]
