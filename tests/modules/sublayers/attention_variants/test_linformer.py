"""Linformer against fairseq's ``examples/linformer`` with copied weights."""

import copy

import pytest
import torch
from attention_by_einsum import HEADS, RIGHT, WIDTH, Attending
from safetensors.torch import load_model, save_model
from tiny_networks import fairseqs_example, make_encoder, vectors
from torch import nn

from lazyformer_fairseq.modules.networks.encoder import Encoder
from lazyformer_fairseq.modules.sublayers.attention_variants.linformer import Linformer

LONGEST = 12


@pytest.mark.parametrize("projected", [3, 11])
@pytest.mark.parametrize("share", ["none", "heads", "kv", "layers"])
def test_fairseqs_module_with_the_same_weights(share, projected, monkeypatch):
    """At 7 positions: 3 projected ones come before keys and values, 11 after them. Theirs are shared by all heads."""
    monkeypatch.setattr("fairseq.utils.softmax", lambda x, dim, onnx_trace: x.softmax(dim))  # not in single precision
    ours = Attending(f"s[linformer={projected},share={share}]", 7, padding=RIGHT, longest=LONGEST)
    choice = ours.s.choices["linformer"]
    module = fairseqs_example("linformer/linformer_src/modules/multihead_linear_attention.py").MultiheadLinearAttention
    is_one = share in ("kv", "layers")
    theirs = module(WIDTH, HEADS, self_attention=True, max_seq_len=LONGEST, shared_kv_compressed=is_one)
    pairs = {"compress_k": choice.key_projection}
    if not is_one:
        pairs["compress_v"] = choice.value_projection
    for name in pairs:  # else a ratio of LONGEST
        setattr(theirs, name, nn.Linear(LONGEST, projected, bias=False))
    theirs = theirs.double().eval()
    projections = [theirs.q_proj, theirs.k_proj, theirs.v_proj]
    with torch.no_grad():
        for name, weight in pairs.items():
            if share == "none":
                weight[1:] = weight[0].clone()
            getattr(theirs, name).weight.copy_(weight[0] if share == "none" else weight)
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
    of_ours = [each.sum(0) if share == "none" else each for each in of_ours]
    torch.testing.assert_close([of_x * is_text, *of_ours], [of_same * is_text, *of_theirs])


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
