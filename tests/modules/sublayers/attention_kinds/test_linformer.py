"""Linformer against fairseq's ``examples/linformer`` with copied weights, and against its equations by einsum."""

import copy
import importlib.util
import math
from pathlib import Path

import fairseq
import pytest
import torch
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from safetensors.torch import load_model, save_model
from torch import Tensor

from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.measure.costs.flops import count_sublayer_flops
from lazyformer_fairseq.modules.attention.choice import choose_with_reason
from lazyformer_fairseq.modules.networks.encoder import Encoder
from lazyformer_fairseq.modules.sublayers.attention_kinds.linformer import Linformer, is_first
from lazyformer_fairseq.patterns.grammar import plan

HEADS, WIDTH, LONGEST = 2, 8, 12
SHARES = ["none", "heads", "kv", "layers"]


def encoder_of(pattern: str, back_end: str = "eager", **options) -> Encoder:
    """Blocks alone in float64, every parameter drawn anew, biases too."""
    torch.manual_seed(0)
    options = {"max_positions": LONGEST, "relative_position_buckets": 0, **options}
    encoder = Encoder(pattern, None, WIDTH, 16, HEADS, attention_backend=back_end, **options).double()
    for parameter in encoder.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    return encoder.eval()


def attention_of(encoder: Encoder, sublayer: int = 0):
    return encoder.sublayers[sublayer].inner


def through(encoder: Encoder, x_BTC: Tensor, padding_BT=None, sublayers: int = 1) -> Tensor:
    """The output of the last of the first `sublayers`, without the residual connection."""
    below = {}
    shared = encoder.context(x_BTC, 0, padding_BT, is_padded_on_right=False)
    for sublayer in encoder.sublayers[:sublayers]:
        y_BTC, handed_on = sublayer.inner(x_BTC, below, shared)
        below = {**below, **handed_on}
    return y_BTC


def padded(batch: int, time: int) -> Tensor:
    """Padding on the right, on the left and in between."""
    mask = torch.zeros(batch, time, dtype=torch.bool)
    mask[1:2, time - 2 :] = True
    mask[2:3, :1] = True
    mask[2:3, 2] = True
    return mask


def fairseqs():
    """The module of ``examples/linformer``, whose package would register models as well."""
    file = Path(fairseq.__file__).parent / "examples/linformer/linformer_src/modules/multihead_linear_attention.py"
    spec = importlib.util.spec_from_file_location("multihead_linear_attention", file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.MultiheadLinearAttention


@pytest.mark.parametrize("projected", [3, 11])
@pytest.mark.parametrize("share", ["heads", "kv", "layers"])
def test_fairseqs_module_with_the_same_weights(share, projected, monkeypatch):
    """At 7 positions: 3 projected ones come before keys and values, 11 after them."""
    monkeypatch.setattr("fairseq.utils.softmax", lambda x, dim, onnx_trace: x.softmax(dim))  # not in single precision
    encoder = encoder_of(f"s[linformer={projected},share={share}]")
    ours = attention_of(encoder)
    choice = ours.choices["linformer"]
    theirs = fairseqs()(WIDTH, HEADS, self_attention=True, max_seq_len=LONGEST, shared_kv_compressed=share != "heads")
    for name in ("compress_k", "compress_v")[: 1 + (share == "heads")]:  # else a ratio of LONGEST
        setattr(theirs, name, torch.nn.Linear(LONGEST, projected, bias=False))
    theirs = theirs.double().eval()
    theirs.compress_k.weight.data.copy_(choice.key_projection)
    if share == "heads":
        theirs.compress_v.weight.data.copy_(choice.value_projection)
    for number, name in enumerate(("q_proj", "k_proj", "v_proj")):
        rows = slice(number * WIDTH, (number + 1) * WIDTH)
        getattr(theirs, name).weight.data.copy_(ours.qkv_proj.weight[rows])
        getattr(theirs, name).bias.data.copy_(ours.qkv_proj.bias[rows])
    theirs.out_proj.load_state_dict(ours.out_proj.state_dict())
    x = torch.randn(2, 7, WIDTH, dtype=torch.float64)
    is_padding = padded(2, 7)
    x = x.masked_fill(is_padding[..., None], 0)
    mine, other = x.clone().requires_grad_(), x.clone().requires_grad_()
    y = through(encoder, mine, is_padding)
    expected = theirs(other.transpose(0, 1), None, None)[0].transpose(0, 1)
    torch.testing.assert_close(y[~is_padding], expected[~is_padding])

    weights = torch.randn_like(y).masked_fill(is_padding[..., None], 0)
    (y * weights).sum().backward()
    (expected * weights).sum().backward()
    torch.testing.assert_close(mine.grad[~is_padding], other.grad[~is_padding])
    torch.testing.assert_close(choice.key_projection.grad, theirs.compress_k.weight.grad)
    if share == "heads":
        torch.testing.assert_close(choice.value_projection.grad, theirs.compress_v.weight.grad)
    for number, name in enumerate(("q_proj", "k_proj", "v_proj")):
        rows = slice(number * WIDTH, (number + 1) * WIDTH)
        torch.testing.assert_close(ours.qkv_proj.weight.grad[rows], getattr(theirs, name).weight.grad)
        torch.testing.assert_close(ours.qkv_proj.bias.grad[rows], getattr(theirs, name).bias.grad)


def by_equation(attention, x_BTC: Tensor, is_padding: Tensor, lazy=None) -> Tensor:
    """Equation 7, one sequence and head after the other: text alone, at the first columns; then an `l` above, if given.

    Places inside a text that are padding are zeros.
    """
    choice = attention.choices["linformer"]
    e, f = choice.key_projection, choice.value_projection
    f = e if f is None else f
    e, f = (each.expand(HEADS, -1, -1) for each in (e, f))
    size = WIDTH // HEADS
    outputs = []
    for x_TC, hidden in zip(x_BTC, is_padding, strict=True):
        first = int((~hidden).nonzero()[0])
        text = x_TC.masked_fill(hidden[:, None], 0)[first:]
        columns = len(text)
        w = attention.qkv_proj.weight.view(3, HEADS, size, WIDTH)
        b = attention.qkv_proj.bias.view(3, HEADS, size)
        heads = []
        for head in range(HEADS):
            q = torch.einsum("tc,dc->td", x_TC, w[0, head]) + b[0, head]
            k = torch.einsum("pt,tc,dc->pd", e[head][:, :columns], text, w[1, head]) + b[1, head]
            v = torch.einsum("pt,tc,dc->pd", f[head][:, :columns], text, w[2, head]) + b[2, head]
            if lazy is not None:
                rows = slice(head * size, (head + 1) * size)
                own = torch.einsum("tc,dc->td", x_TC, lazy.v_proj.weight[rows]) + lazy.v_proj.bias[rows]
                own = own.masked_fill(hidden[:, None], 0)[first:]
                v = torch.einsum("pt,td->pd", f[head][:, :columns], own)
            scores = torch.einsum("td,pd->tp", q, k) / math.sqrt(size)
            heads.append(torch.einsum("tp,pd->td", scores.softmax(-1), v))
        outputs.append(torch.cat(heads, -1))
    out_proj = attention.out_proj if lazy is None else lazy.out_proj
    return torch.einsum("btc,dc->btd", torch.stack(outputs), out_proj.weight) + out_proj.bias


@hypothesis_settings(max_examples=25, deadline=None)
@given(
    share=st.sampled_from(SHARES),
    projected=st.integers(1, 9),
    time=st.integers(3, LONGEST),
    batch=st.integers(1, 3),
    back_end=st.sampled_from(["eager", "recompute", "materialize", "fused"]),
    lazy=st.booleans(),
)
def test_the_equations_and_all_gradients(share, projected, time, batch, back_end, lazy):
    encoder = encoder_of(f"s[linformer={projected},share={share}] {'l' * lazy}", back_end)
    x = torch.randn(batch, time, WIDTH, dtype=torch.float64)
    is_padding = padded(batch, time)
    consumer = attention_of(encoder, 1) if lazy else None
    weights = torch.randn_like(x).masked_fill(is_padding[..., None], 0)
    results = []
    for compute in (
        lambda x: through(encoder, x, is_padding, 1 + lazy),
        lambda x: by_equation(attention_of(encoder), x, is_padding, consumer),
    ):
        leaf = x.clone().requires_grad_()
        y = compute(leaf)
        leaves = [leaf, *encoder.parameters()]
        gradients = torch.autograd.grad((y * weights).sum(), leaves, allow_unused=True, materialize_grads=True)
        results.append((y[~is_padding], gradients))
    torch.testing.assert_close(results[0][0], results[1][0])
    for ours, expected in zip(results[0][1], results[1][1], strict=True):
        torch.testing.assert_close(ours, expected, atol=1e-10, rtol=1e-7)


@pytest.mark.parametrize("share", SHARES)
def test_text_behind_padding_is_as_the_text_alone(share):
    encoder = encoder_of(f"(s[linformer=3,share={share}] l f)x2")
    text = torch.randn(1, 6, WIDTH, dtype=torch.float64)
    alone, _ = encoder(text)
    noise = torch.full((1, 3, WIDTH), float("nan"), dtype=torch.float64)
    mask = torch.zeros(1, 9, dtype=torch.bool)
    for places in (slice(0, 6), slice(3, 9)):
        x, is_padding = torch.cat([noise, text, noise], 1)[:, 3 - places.start : 12 - places.start], ~mask
        is_padding[:, places] = False
        among_padding, _ = encoder(x.nan_to_num(5.0), is_padding)
        torch.testing.assert_close(among_padding[:, places], alone)


@pytest.mark.parametrize("share", SHARES)
def test_a_lazy_sublayer_is_a_product_with_the_dense_distribution(share):
    encoder = encoder_of(f"s[linformer=3,share={share}] l")
    x, is_padding = torch.randn(3, 7, WIDTH, dtype=torch.float64), padded(3, 7)
    shared = encoder.context(x, 0, is_padding, is_padded_on_right=False)
    _, handed_on = attention_of(encoder)(x, {}, shared)
    (distribution,) = handed_on.values()
    values = torch.randn(3, HEADS, 7, 4, dtype=torch.float64)
    assert not distribution.probabilities[is_padding[:, None, None, :].expand(3, HEADS, 7, 7)].any()
    torch.testing.assert_close(distribution.attend(values, 0.0), distribution.probabilities @ values)


def test_it_takes_the_cheaper_order():
    before, after = ("s[linformer=4,share=heads]", "s[linformer=4,share=none]")
    sizes = encoder_of(before).sizes
    flops = [count_sublayer_flops(plan(pattern)[0], sizes, time=10) for pattern in (before, after)]
    assert flops[1] - flops[0] == 2 * (10 - 4) * 2 * WIDTH**2
    assert is_first(True, 4, 10) and not is_first(True, 10, 10)


def test_one_projection_of_all_layers_stays_one(tmp_path):
    encoder = encoder_of("(s[linformer=4,share=layers] f)x3 s[linformer=2,share=layers]")

    def is_one(encoder: Encoder) -> bool:
        found = [module.key_projection for module in encoder.modules() if isinstance(module, Linformer)]
        return found[0] is found[1] is found[2] is not found[3]

    assert is_one(encoder) and is_one(copy.deepcopy(encoder))
    save_model(encoder, str(tmp_path / "model.safetensors"))
    loaded = encoder_of("(s[linformer=4,share=layers] f)x3 s[linformer=2,share=layers]")
    torch.nn.init.zeros_(loaded.sublayers[0].inner.choices["linformer"].key_projection)
    load_model(loaded, str(tmp_path / "model.safetensors"))
    x = torch.randn(1, 5, WIDTH, dtype=torch.float64)
    assert is_one(loaded) and torch.equal(loaded(x)[0], encoder(x)[0])
    assert is_one(encoder.half()) and is_one(encoder.float())


def test_it_starts_as_fairseqs_model_does():
    """There, too, RoBERTa's N(0, 0.02) is what replaces the initialisation of the module."""
    encoder = Encoder("s[linformer=64]", None, WIDTH, 16, HEADS, max_positions=512, relative_position_buckets=0)
    for projection in attention_of(encoder).choices["linformer"].parameters():
        assert projection.std().item() == pytest.approx(0.02, rel=0.05) and projection.mean().abs() < 1e-3


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(dtype):
    encoder = encoder_of("s[linformer=4] l f s[linformer=4,share=none]", "recompute")
    x, is_padding = torch.randn(3, 8, WIDTH, dtype=torch.float64), padded(3, 8)
    expected, _ = encoder(x, is_padding)
    y, _ = encoder.to(dtype)(x.to(dtype), is_padding)
    assert y.dtype == dtype
    torch.testing.assert_close(y[~is_padding].double(), expected[~is_padding], atol=0.15, rtol=0.05)
    y.float().sum().backward()
    assert all(parameter.grad.isfinite().all() for parameter in encoder.parameters())


def test_auto_takes_torchs_kernel_where_keys_are_few(monkeypatch):
    encoder = encoder_of("s[linformer=4]", "auto")
    seen = {}
    monkeypatch.setattr(
        "lazyformer_fairseq.modules.networks.stack.choose",
        lambda name, workload, consumers, among: seen.setdefault("workload", workload) and "eager",
    )
    encoder(torch.randn(3, 9, WIDTH, dtype=torch.float64), padded(3, 9))
    assert seen["workload"].keys == 4 and not seen["workload"].features
    assert choose_with_reason(seen["workload"], 0)[0] == "recompute"


def test_networks_that_cannot_have_it():
    with pytest.raises(UserError, match=r"s\[linformer=2\].*--relative-position-buckets 0"):
        encoder_of("s[linformer=2]", relative_position_buckets=8)
    with pytest.raises(ValueError, match="a sequence of 13 tokens is longer than the 12"):
        encoder_of("s[linformer=2]")(torch.randn(1, 13, WIDTH, dtype=torch.float64))
