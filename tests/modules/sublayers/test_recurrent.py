"""Recurrent cells compute their papers' equations, step by step or by a scan, whatever stands around the text."""

import pytest
import torch
from every_variant import assert_alike, build
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.evaluation.costs.flops import count_sublayer_flops, count_sublayer_parameters
from lazyformer_fairseq.experiments.pattern.look import build_network, find_attended_tokens
from lazyformer_fairseq.modules.attention.scores import Scores
from lazyformer_fairseq.modules.networks.encoder import Encoder
from lazyformer_fairseq.modules.networks.stream_memory import StreamMemory
from lazyformer_fairseq.modules.sublayers import recurrent
from lazyformer_fairseq.modules.sublayers.interface import Context
from lazyformer_fairseq.modules.sublayers.recurrent import Recurrent, run, scan, scan_by_doubling
from lazyformer_fairseq.patterns.grammar import plan
from lazyformer_fairseq.patterns.kinds import BRC, CAUSAL, ENCODER, MINGRU, NBRC, CausalSizes, EncoderSizes

CELLS = (BRC, NBRC, MINGRU)
WIDTH = 6
of_each_cell = pytest.mark.parametrize("cell", CELLS)


def by_equation(module: Recurrent, x_BTC: Tensor, direction: int = 0) -> Tensor:
    """The states of one direction, as the papers write them."""
    size = WIDTH // module.directions
    parts = 2 if module.cell == MINGRU else 3
    rows = slice(direction * parts * size, (direction + 1) * parts * size)
    weights, biases = (each[rows].chunk(parts) for each in module.in_proj.parameters())
    u = [x_BTC @ weight.T + bias for weight, bias in zip(weights, biases, strict=True)]
    gates = None if module.weight is None else module.weight[direction].chunk(2, -1)

    def of_state(gate: Tensor, h: Tensor) -> Tensor:
        return gate * h if module.cell == BRC else h @ gate

    h, found = x_BTC.new_zeros(len(x_BTC), size), []
    for t in range(x_BTC.size(1)):
        if module.cell == MINGRU:
            z = torch.sigmoid(u[0][:, t])
            h = (1 - z) * h + z * u[1][:, t]
        else:
            a = 1 + torch.tanh(u[0][:, t] + of_state(gates[0], h))
            c = torch.sigmoid(u[1][:, t] + of_state(gates[1], h))
            h = c * h + (1 - c) * torch.tanh(u[2][:, t] + a * h)
        found.append(h)
    return torch.stack(found, 1)


def built(cell: str, is_causal: bool) -> Recurrent:
    torch.manual_seed(1)
    module = Recurrent(WIDTH, cell, is_causal).double()
    for weight in module.parameters():
        torch.nn.init.normal_(weight)
    return module


def compute(module: Recurrent, x_BTC: Tensor, scores: Scores = Scores(), **memory: Tensor) -> Tensor:  # noqa: B008
    return module(x_BTC, {}, Context(scores, lambda *_: "eager"), **memory)[0]


@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize("numbers", [1, 2**17], ids=["block by block", "at once"])
@of_each_cell
def test_it_is_the_papers_equation_with_its_gradients(cell, is_causal, numbers, monkeypatch):
    """Also on texts of several lengths: the second direction begins at the last token of each."""
    monkeypatch.setattr(recurrent, "CACHED", numbers * 40)
    module, x = built(cell, is_causal), torch.randn(3, 19, WIDTH, dtype=torch.float64, requires_grad=True)
    lengths = [19, 1, 12]
    expected = []
    for text, length in zip(x, lengths, strict=True):
        text = text[None, :length]
        ways = [by_equation(module, text)]
        ways += [] if is_causal else [by_equation(module, text.flip(1), 1).flip(1)]
        expected.append(module.out_proj(torch.cat(ways, -1))[0])
    outputs = compute(module, x, Scores(lengths_B=torch.tensor(lengths), is_causal=is_causal))
    found = [output[:length] for output, length in zip(outputs, lengths, strict=True)]
    torch.testing.assert_close(found, expected)
    inputs, ups = [x, *module.parameters()], [torch.randn_like(each) for each in found]
    gradients = (torch.autograd.grad(each, inputs, ups) for each in (found, expected))
    for of_found, of_expected in zip(*gradients, strict=True):
        torch.testing.assert_close(of_found, of_expected)


@settings(max_examples=30, deadline=None)
@given(time=st.integers(1, 40), chunks=st.integers(1, 12), exact=st.booleans())
def test_a_scan_is_the_loop(time, chunks, exact):
    a, b = torch.rand(time, 2, 3, dtype=torch.float64), torch.randn(time, 2, 3, dtype=torch.float64)
    if exact:  # where a product over all steps is 0, or beyond what logarithms hold
        a = a.round()
    h, expected = torch.zeros(2, 3, dtype=torch.float64), []
    for keep, enters in zip(a, b, strict=True):
        h = keep * h + enters
        expected.append(h)
    before = a.clone(), b.clone()
    for found in (scan(a, b, min(chunks, time)), scan(a, b), scan_by_doubling(a, b, time), scan_by_doubling(a, b, 64)):
        torch.testing.assert_close(found, torch.stack(expected))
    assert torch.equal(a, before[0]) and torch.equal(b, before[1])


@of_each_cell
def test_segments_give_what_the_whole_text_gives_while_the_memory_reaches_its_start(cell):
    decoder = build(CAUSAL, f"r[cell={cell}]f", mem_len=9)
    ids, memory = torch.randint(0, 17, (2, 12)), StreamMemory()
    parts = [decoder(part, memory)[0] for part in ids.split([4, 5, 3], 1)]
    whole = decoder(ids)[0]
    assert_alike(torch.cat(parts, 1), whole)
    decoder.mem_len, memory = 1, StreamMemory()
    parts = [decoder(part, memory)[0] for part in ids.split([4, 5, 3], 1)]
    assert not torch.allclose(torch.cat(parts, 1)[:, 4:], whole[:, 4:]), "it starts from zero at what it remembers"


@of_each_cell
def test_a_plan_counts_its_weights_and_products_and_draws_what_it_sees(cell):
    c, time, batch, memory = 8, 5, 2, 3
    own = {BRC: 4 * c * c + 6 * c, MINGRU: 3 * c * c + 3 * c}
    for direction, sizes, h in ((ENCODER, EncoderSizes(10, c, 16, 2), c // 2), (CAUSAL, CausalSizes(10, c, 16, 2), c)):
        (planned,) = plan(f"r[cell={cell}]", direction)
        expected = own.get(cell, 4 * c * c + 4 * c + 2 * c * h)
        assert count_sublayer_parameters(planned, sizes) == expected + 2 * c  # and LayerNorm
        before = memory if direction == CAUSAL else 0
        module = Recurrent(c, cell, direction == CAUSAL)
        assert sum(weight.numel() for weight in module.parameters()) == expected
        x, memories = torch.randn(batch, time, c), torch.randn(batch, before, c)
        with FlopCounterMode(display=False) as counter, torch.no_grad():
            compute(module, x, **({"memory_BMC": memories} if before else {}))
        assert counter.get_total_flops() == count_sublayer_flops(planned, sizes, time, before, batch)
        (seen,) = find_attended_tokens(build_network(f"r[cell={cell}]", direction, 2, time, before), time, before)
        ((_, weights),) = seen.by_heads
        is_future = torch.ones(time, time + before).triu(before + 1).bool()
        assert torch.equal(weights > 0, ~is_future if direction == CAUSAL else torch.ones(time, time).bool())


def test_fresh_gates_are_those_of_the_published_code():
    assert (Recurrent(WIDTH, BRC).weight == 1).all()
    weight = Recurrent(128, NBRC, is_causal=True).weight
    assert weight.shape == (1, 128, 256)
    bound = (6 / (128 + 128)) ** 0.5  # Glorot's, of each of the two matrices
    assert 0.95 * bound < weight.abs().max() <= bound


def test_an_odd_width_is_refused():
    with pytest.raises(UserError, match=r"r\[cell=nbrc\] splits the embedding dimension .* must be even, not 7"):
        Encoder("rf", None, 7, 8, 1)


@pytest.mark.parametrize("precision", ["bfloat16", "float16", "autocast"])
@of_each_cell
def test_in_half_precision_the_state_is_in_single(cell, precision, monkeypatch):
    dtypes = []
    monkeypatch.setattr(recurrent, "run", lambda x, *given: dtypes.append(x.dtype) or run(x, *given))
    is_auto, narrow = precision == "autocast", torch.bfloat16 if precision == "autocast" else getattr(torch, precision)
    module, x = built(cell, is_causal=False), torch.randn(2, 200, WIDTH, dtype=torch.float64)
    expected = torch.autograd.grad(compute(module, x).sin().sum(), [*module.parameters()])
    module, x = module.to(torch.float32 if is_auto else narrow), x.to(torch.float32 if is_auto else narrow)
    for weight in module.parameters():
        weight.data = weight.data.to(narrow).to(weight.dtype)
    with torch.autocast("cpu", narrow, enabled=is_auto):
        y = compute(module, x)
    assert y.dtype == narrow and dtypes[-1] == torch.float32
    for found, wanted in zip(torch.autograd.grad(y.sin().sum(), [*module.parameters()]), expected, strict=True):
        assert (found.double() - wanted).norm() < 0.25 * wanted.norm()


def test_torch_compiles_it_as_an_operator():
    torch.compiler.reset()
    encoder = Encoder("r r[cell=mingru]", None, 8, 8, 2, relative_position_buckets=0)
    fast = torch.compile(lambda x: encoder(x)[0], backend="aot_eager", fullgraph=True)
    for time in (7, 9):
        x = torch.randn(2, time, 8)
        found, expected = fast(x), encoder(x)[0]
        torch.testing.assert_close(found, expected)
        of_weights = [torch.autograd.grad(y.sin().sum(), [*encoder.sublayers.parameters()]) for y in (found, expected)]
        torch.testing.assert_close(*of_weights)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@of_each_cell
def test_on_a_gpu(cell):
    module, x = built(cell, is_causal=False).float(), torch.randn(2, 300, WIDTH, requires_grad=True)
    found = []
    for device in ("cpu", "cuda"):
        y = compute(module.to(device), x.to(device))
        found.append([y.cpu(), *(each.cpu() for each in torch.autograd.grad(y.sum(), [x, *module.parameters()]))])
    torch.testing.assert_close(*found, atol=1e-3, rtol=1e-3)
    torch.testing.assert_close(run(x.detach().cuda()[:, None], None).cpu(), run(x.detach()[:, None], None))
