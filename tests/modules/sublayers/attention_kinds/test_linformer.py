"""Linformer against fairseq's ``examples/linformer`` with copied weights, and against its equations by einsum."""

import copy
import math

import pytest
import torch
from attention_by_einsum import BATCH, HEADS, RIGHT, SIZE, WIDTH, Attending, split
from safetensors.torch import load_model, save_model
from tiny_networks import fairseqs_example, make_encoder, vectors
from torch import Tensor, nn

from lazyformer_fairseq.measure.costs.flops import count_sublayer_flops
from lazyformer_fairseq.modules.attention.choice import choose_with_reason
from lazyformer_fairseq.modules.networks.encoder import Encoder
from lazyformer_fairseq.modules.sublayers.attention_kinds.linformer import Linformer, is_first
from lazyformer_fairseq.patterns.grammar import plan

LONGEST = 12


@pytest.mark.parametrize("projected", [3, 11])
@pytest.mark.parametrize("share", ["heads", "kv", "layers"])
def test_fairseqs_module_with_the_same_weights(share, projected, monkeypatch):
    """At 7 positions: 3 projected ones come before keys and values, 11 after them."""
    monkeypatch.setattr("fairseq.utils.softmax", lambda x, dim, onnx_trace: x.softmax(dim))  # not in single precision
    ours = Attending(f"s[linformer={projected},share={share}]", 7, padding=RIGHT, longest=LONGEST)
    choice = ours.s.choices["linformer"]
    module = fairseqs_example("linformer/linformer_src/modules/multihead_linear_attention.py").MultiheadLinearAttention
    theirs = module(WIDTH, HEADS, self_attention=True, max_seq_len=LONGEST, shared_kv_compressed=share != "heads")
    pairs = {"compress_k": choice.key_projection}
    if share == "heads":
        pairs["compress_v"] = choice.value_projection
    for name in pairs:  # else a ratio of LONGEST
        setattr(theirs, name, nn.Linear(LONGEST, projected, bias=False))
    theirs = theirs.double().eval()
    projections = [theirs.q_proj, theirs.k_proj, theirs.v_proj]
    with torch.no_grad():
        for name, weight in pairs.items():
            getattr(theirs, name).weight.copy_(weight)
        for number, part in enumerate(projections):
            part.weight.copy_(ours.s.qkv_proj.weight.chunk(3)[number])
            part.bias.copy_(ours.s.qkv_proj.bias.chunk(3)[number])
    theirs.out_proj.load_state_dict(ours.s.out_proj.state_dict())
    is_text = ~RIGHT[..., None]
    x = (ours.x.detach() * is_text).requires_grad_()
    found = ours.s(x, {}, ours.context())[0] * is_text
    expected = theirs(x.transpose(0, 1), None, None)[0].transpose(0, 1) * is_text
    torch.testing.assert_close(found, expected)
    compressing = [getattr(theirs, name).weight for name in pairs]
    of_x, *of_ours = torch.autograd.grad((found * ours.weights[0]).sum(), [x, *pairs.values()])
    of_same, *of_theirs = torch.autograd.grad((expected * ours.weights[0]).sum(), [x, *compressing])
    torch.testing.assert_close([of_x * is_text, *of_ours], [of_same * is_text, *of_theirs])


class Projecting(Attending):
    """Equation 7; what is padding counts as zeros."""

    def expected(self) -> list[Tensor]:
        choice = self.s.choices["linformer"]
        e, f = choice.key_projection, choice.value_projection
        hidden = torch.zeros(BATCH, self.time, dtype=torch.bool) if self.padding is None else self.padding

        def project(matrix: Tensor, x_BTC: Tensor) -> Tensor:
            of_tokens = matrix.expand(HEADS, -1, -1)[:, :, : self.time]
            return torch.einsum("npt,bntd->bnpd", of_tokens, split(x_BTC.masked_fill(hidden[..., None], 0)))

        weights, biases = self.s.qkv_proj.weight.chunk(3), self.s.qkv_proj.bias.chunk(3)
        q = split(self.x @ weights[0].T + biases[0])
        k = project(e, self.x @ weights[1].T) + biases[1].view(HEADS, 1, SIZE)
        values = [project(e if f is None else f, x) for x in (self.x @ weights[2].T, self.l.v_proj(self.above))]
        values[0] = values[0] + biases[2].view(HEADS, 1, SIZE)
        probabilities = (torch.einsum("bntd,bnpd->bntp", q, k) / math.sqrt(SIZE)).softmax(-1)
        heads = [torch.einsum("bntp,bnpd->btnd", probabilities, each).flatten(2) for each in values]
        return [self.s.out_proj(heads[0]), self.l.out_proj(heads[1])]


@pytest.mark.parametrize("share", ["none", "heads", "kv", "layers"])
@pytest.mark.parametrize("projected", [1, 4, 9])
@pytest.mark.parametrize("back_end", ["eager", "recompute", "materialize", "fused"])
def test_the_equations_and_all_gradients(share, projected, back_end):
    for given in ({"time": 7, "padding": padding} for padding in (None, RIGHT)):
        Projecting(f"s[linformer={projected},share={share}]", **given, longest=12, back_end=back_end).assert_equations()
    for time in (3, LONGEST):
        Projecting(f"s[linformer={projected},share={share}]", time, longest=12, back_end=back_end).assert_equations()


def test_it_takes_the_cheaper_order():
    before, after = ("s[linformer=4,share=heads]", "s[linformer=4,share=none]")
    sizes = make_encoder(before, max_positions=LONGEST).sizes
    flops = [count_sublayer_flops(plan(pattern)[0], sizes, time=10) for pattern in (before, after)]
    assert flops[1] - flops[0] == 2 * (10 - 4) * 2 * WIDTH**2
    assert is_first(True, 4, 10) and not is_first(True, 10, 10)


def test_one_projection_of_all_layers_stays_one(tmp_path):
    pattern = "(s[linformer=4,share=layers] f)x3 s[linformer=2,share=layers]"
    encoder, loaded = (make_encoder(pattern, max_positions=LONGEST) for _ in range(2))

    def is_one(encoder: Encoder) -> bool:
        found = [module.key_projection for module in encoder.modules() if isinstance(module, Linformer)]
        return found[0] is found[1] is found[2] is not found[3]

    assert is_one(encoder) and is_one(copy.deepcopy(encoder))
    save_model(encoder, str(tmp_path / "model.safetensors"))
    nn.init.zeros_(loaded.sublayers[0].inner.choices["linformer"].key_projection)
    load_model(loaded, str(tmp_path / "model.safetensors"))
    x = vectors(1, 5)
    assert is_one(loaded) and torch.equal(loaded(x)[0], encoder(x)[0])
    assert is_one(encoder.half()) and is_one(encoder.float())


def test_it_starts_as_fairseqs_model_does():
    """There, too, RoBERTa's N(0, 0.02) is what replaces the initialisation of the module."""
    encoder = Encoder("s[linformer=64]", None, WIDTH, 16, HEADS, max_positions=512, relative_position_buckets=0)
    for projection in encoder.sublayers[0].inner.choices["linformer"].parameters():
        assert projection.std().item() == pytest.approx(0.02, rel=0.05) and projection.mean().abs() < 1e-3


def test_auto_takes_torchs_kernel_where_keys_are_few(monkeypatch):
    encoder = make_encoder("s[linformer=4]", max_positions=LONGEST, attention_backend="auto")
    seen = {}
    monkeypatch.setattr(
        "lazyformer_fairseq.modules.networks.stack.choose",
        lambda name, workload, consumers, among: seen.setdefault("workload", workload) and "eager",
    )
    encoder(vectors(2, 7), RIGHT[:2])
    assert seen["workload"].keys == 4 and not seen["workload"].features
    assert choose_with_reason(seen["workload"], 0)[0] == "recompute"
