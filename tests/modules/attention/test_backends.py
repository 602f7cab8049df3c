"""Every back end against a plain softmax in float64, forward and all gradients."""

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F
from torch.profiler import ProfilerActivity, profile

from lazyformer_fairseq.measure.costs.latency import peak_memory
from lazyformer_fairseq.modules.attention import attend, blockwise
from lazyformer_fairseq.modules.attention.choice import back_ends_of
from lazyformer_fairseq.modules.attention.scores import Scores
from lazyformer_fairseq.modules.networks.encoder import RelativePositionBias

BUCKETS, FAR = 8, 6


class Block:
    """Random inputs of an ``s`` and its consumers, and what plain softmax makes of them."""

    def __init__(self, layers, batch, heads, time, size, biased, padded, seed, dtype=torch.double):
        chance = torch.Generator().manual_seed(seed)
        like = {"generator": chance, "dtype": torch.double}
        q, k, *values = (torch.randn(batch, heads, time, size, **like).to(dtype) for _ in range(2 + layers))
        self.inputs = [part.double().requires_grad_() for part in (q, k, *values)]
        self.bias = RelativePositionBias(heads, BUCKETS, FAR).to(dtype)
        torch.nn.init.normal_(self.bias.table, generator=chance)
        self.table = self.bias.table.detach().double().requires_grad_() if biased else None
        self.padding = None  # True (B, T): "right" of the text, or "anywhere"
        if padded == "right":
            self.padding = torch.arange(time) >= torch.randint(1, time + 1, (batch, 1), generator=chance)
        elif padded == "anywhere":
            self.padding = torch.rand(batch, time, generator=chance) < 0.5
            self.padding[torch.arange(batch), torch.randint(time, (batch,), generator=chance)] = False
        self.is_on_right = padded == "right"
        self.weights = [torch.randn(batch, heads, time, size, **like) for _ in range(layers)]
        self.dtype = dtype

    def leaves(self) -> list[torch.Tensor]:
        return [*self.inputs, *([] if self.table is None else [self.table])]

    def scores(self, table) -> Scores:
        scores = Scores()
        if table is not None:
            relative = self.bias(self.inputs[0].size(-2))
            scores = Scores(table, relative.bucket_by_distance, relative.far)
        return scores if self.padding is None else scores.with_padding(self.padding, self.is_on_right)

    def by_plain_softmax(self) -> list[torch.Tensor]:
        q, k, *values = self.inputs
        time = q.size(-2)
        scores = q @ k.transpose(-1, -2) / math.sqrt(q.size(-1))
        if self.table is not None:
            bucket = self.bias(time).bucket_by_distance
            pairs = [[int(bucket[time - 1 + key - query]) for key in range(time)] for query in range(time)]
            scores = scores + self.table[torch.tensor(pairs)].permute(2, 0, 1)
        if self.padding is not None:
            scores = scores.masked_fill(self.padding[:, None, None], -math.inf)
        return self.with_gradients([scores.softmax(-1) @ v for v in values], self.leaves())

    def by(self, backend: str) -> list[torch.Tensor]:
        """In the layout of a model: queries, keys and values of the ``s`` are views of one projection."""
        leaves = [leaf.detach().to(self.dtype).requires_grad_() for leaf in self.leaves()]
        q, k, *values = leaves[: len(self.inputs)]
        q, k, first = (
            part.transpose(1, 2) for part in torch.cat([part.transpose(1, 2) for part in (q, k, values[0])], -1)
            .split(q.size(-1), -1)
        )  # fmt: skip
        table = None if self.table is None else leaves[-1]
        output, reusable = attend(q, k, first, self.scores(table), 0.0, len(values) - 1, backend)
        return self.with_gradients([output, *(reusable.attend(v, 0.0) for v in values[1:])], leaves)

    def with_gradients(self, outputs, leaves) -> list[torch.Tensor]:
        loss = sum((output.double() * weight).sum() for output, weight in zip(outputs, self.weights, strict=True))
        return [*outputs, *torch.autograd.grad(loss, leaves)]


@pytest.mark.parametrize("backend", back_ends_of("cpu"))
@settings(max_examples=20)
@given(
    layers=st.integers(1, 6),
    batch=st.integers(1, 3),
    heads=st.integers(1, 3),
    time=st.integers(1, 33),
    size=st.sampled_from([1, 3, 8, 32]),
    biased=st.booleans(),
    padded=st.sampled_from([None, "right", "anywhere"]),
    elements=st.sampled_from([1, 7, 40, 200, 2**20]),
    seed=st.integers(0, 1000),
)
def test_forward_and_all_gradients(backend, layers, batch, heads, time, size, biased, padded, elements, seed):
    block = Block(layers, batch, heads, time, size, biased, padded, seed)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(blockwise, "PIECE_ELEMENTS", elements)
        found = block.by(backend)
    for ours, theirs in zip(found, block.by_plain_softmax(), strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-12, rtol=1e-9)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("backend", back_ends_of("cpu"))
def test_in_low_precision_no_back_end_is_worse_than_rounding(backend, dtype):
    block = Block(3, 2, 2, 40, 32, biased=True, padded="right", seed=1, dtype=dtype)
    for ours, theirs in zip(block.by(backend), block.by_plain_softmax(), strict=True):
        error = (ours.double() - theirs).norm() / theirs.norm()
        assert error < 16 * torch.finfo(dtype).eps, error


@pytest.mark.parametrize("backend", ["materialize", "fused", "tiles"])
def test_the_gradient_of_the_bias_is_the_same_each_time(backend):
    block = Block(3, 3, 2, 50, 8, biased=True, padded="right", seed=2, dtype=torch.float32)
    first, second = block.by(backend), block.by(backend)
    for one, other in zip(first, second, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("backend", ["materialize", "fused", "tiles"])
def test_a_graph_may_be_kept_run_twice_and_run_in_part(backend):
    block = Block(3, 2, 2, 9, 4, biased=True, padded=None, seed=3)
    q, k, *values = block.inputs
    output, reusable = attend(q, k, values[0], block.scores(block.table), 0.0, 2, backend)
    second, third = (reusable.attend(v, 0.0) for v in values[1:])
    weights = block.weights
    parts = [(part * weight).sum() for part, weight in zip((output, second, third), weights, strict=True)]
    # An l alone, then all, then all again: nothing of one run is left for the next.
    torch.autograd.grad(parts[2], values[2], retain_graph=True)
    for _ in range(2):
        found = torch.autograd.grad(sum(parts), block.leaves(), retain_graph=True)
        for ours, theirs in zip(found, block.by_plain_softmax()[3:], strict=True):
            torch.testing.assert_close(ours, theirs)
    # One l is not in the loss; the s itself is not.
    for absent in (0, 1):
        loss = sum(part for number, part in enumerate(parts) if number != absent)
        block.weights = [weight * (number != absent) for number, weight in enumerate(weights)]
        found = torch.autograd.grad(loss, block.inputs[:2], retain_graph=True)
        for ours, theirs in zip(found, block.by_plain_softmax()[3:5], strict=True):
            torch.testing.assert_close(ours, theirs)


@pytest.mark.slow
@pytest.mark.parametrize(("backend", "biased"), list(itertools.product(["fused", "recompute"], [False, True])))
def test_memory_grows_linearly_with_the_length(backend, biased):
    """Twice the length takes twice the memory, where a distribution would take four times as much."""
    taken = {}
    for time in (1024, 2048):
        block = Block(2, 1, 2, time, 8, biased, padded=None, seed=1, dtype=torch.float32)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(blockwise, "PIECE_ELEMENTS", 64 * time)
            taken[time] = peak_memory(lambda block=block: block.by(backend), "cpu")
    assert taken[2048] < 2.6 * taken[1024]
    distributions = {
        time: peak_memory(lambda time=time: Block(2, 1, 2, time, 8, biased, False, 1, torch.float32).by("eager"), "cpu")
        for time in taken
    }
    assert distributions[2048] > 3 * distributions[1024]  # so the test can fail


def names_of_kernels(run) -> set[str]:
    with profile(activities=[ProfilerActivity.CPU]) as recorded:
        run()
    return {event.key for event in recorded.key_averages()}


@pytest.mark.parametrize("backend", back_ends_of("cpu"))
@pytest.mark.parametrize("biased", [False, True])
def test_which_kernel_runs(backend, biased):
    """With a bias that learns, torch's attention would fall back to its unfused form: ours takes its place."""
    block = Block(2, 2, 2, 64, 32, biased, padded=None, seed=1, dtype=torch.float32)
    names = names_of_kernels(lambda: block.by(backend))
    flash = "aten::_scaled_dot_product_flash_attention_for_cpu"
    unfused = "aten::_scaled_dot_product_attention_math"
    operators = {"materialize": "materialize", "fused": "blockwise", "tiles": "stored_tiles"}
    ours = {name: f"lazyformer::{operator}_block_gradient" for name, operator in operators.items()}
    expected = {
        "eager": "aten::_softmax_backward_data",
        "recompute": ours["fused"] if biased else f"{flash}_backward",
        **ours,
    }
    assert expected[backend] in names
    assert unfused not in names
    assert (flash in names) == (backend == "recompute" and not biased)


def test_torch_itself_would_not_fuse_a_bias_that_learns():
    """Why recompute needs more than torch. If this fails, torch has learned it: simplify."""
    q = torch.randn(1, 2, 16, 8, requires_grad=True)
    bias = torch.randn(1, 2, 16, 16, requires_grad=True)
    names = names_of_kernels(lambda: F.scaled_dot_product_attention(q, q, q, attn_mask=bias).sum().backward())
    assert "aten::_scaled_dot_product_attention_math" in names


def test_each_reader_and_no_more_than_announced():
    block = Block(2, 1, 1, 5, 4, False, False, 1)
    q, k, first, second = block.inputs
    for backend, consumers in itertools.product(("materialize", "fused", "tiles"), (0, 1)):
        _, reusable = attend(q, k, first, Scores(), 0.0, consumers, backend)
        for _ in range(consumers):
            reusable.attend(second, 0.0)
        with pytest.raises(StopIteration):
            reusable.attend(second, 0.0)
