"""A path of a supernet computes what the pattern's own model computes with the same weights."""

import pytest
import torch

from lazyformer_fairseq.experiments.search.report.found_pattern import letters
from lazyformer_fairseq.experiments.search.supernet.mixture import Choices, Supernet, supernet_pattern
from lazyformer_fairseq.experiments.search.supernet.single_path import SinglePath
from lazyformer_fairseq.modules.networks.causal_decoder import CausalDecoder, init_transformer_xl_weights
from lazyformer_fairseq.modules.networks.encoder import Encoder

CANDIDATES = ("s", "l", "k", "f", "identity")
LAYERS = 4
SIZES = dict(vocab_size=11, embed_dim=8, ffn_embed_dim=16, num_heads=2)
PATHS = [("s", "l", "l", "f"), ("f", "s", "k", "l"), ("identity", "s", "identity", "f"), ("s", "f", "f", "s")]


def build(kind, pattern):
    torch.manual_seed(1)
    network = kind(pattern, **SIZES, **({} if kind is Encoder else {"mem_len": 4}))
    network.apply(init_transformer_xl_weights)
    return network


def single_path(kind):
    network = build(kind, supernet_pattern(CANDIDATES, LAYERS))
    return SinglePath(Supernet(network, network, Choices(LAYERS, CANDIDATES)), network, "auto")


@pytest.mark.parametrize("kind", [Encoder, CausalDecoder])
@pytest.mark.parametrize("path", PATHS)
def test_a_path_computes_what_its_own_model_does(kind, path):
    single, own = single_path(kind), build(kind, letters(path))
    chosen = [m.candidate(name) for m, name in zip(single.supernet.mixtures, path, strict=True) if name != "identity"]
    outside = {name: value for name, value in own.state_dict().items() if not name.startswith("sublayers.")}
    single.supernet.model.load_state_dict(outside, strict=False)
    for ours, theirs in zip(chosen, own.sublayers, strict=True):
        ours.load_state_dict(theirs.state_dict())
    tokens = torch.arange(4, 10).unsqueeze(0)
    single.take(path)
    output, expected = single(tokens)[0], own(tokens)[0]
    torch.testing.assert_close(output, expected)
    output.sum().backward()
    trained = {id(p) for p in single.parameters() if p.grad is not None}
    of_path = {id(p) for sublayer in chosen for p in sublayer.parameters()}
    of_all = {id(p) for m in single.supernet.mixtures for p in m.parameters()}
    assert trained & of_all <= of_path  # the others cost nothing


def test_after_a_path_mixtures_are_what_they_were():
    single = single_path(Encoder)
    tokens = torch.arange(4, 10).unsqueeze(0)
    single.eval()
    before = single.supernet(tokens)[0]
    for path in PATHS:
        single.take(path)
        assert not torch.allclose(single(tokens)[0], before)
    single.take(None)
    assert torch.equal(single.supernet(tokens)[0], before)
