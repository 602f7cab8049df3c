"""The supernet: architecture parameters, mixtures against equation 4 written out, one pattern at a time, every kind."""

import math
import re

import pytest
import torch
from every_variant import build, of_each_variant, run, tokens
from tiny_networks import loud
from torch import nn

from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.experiments.search.space import letters
from lazyformer_fairseq.experiments.search.supernet import Architecture, Supernet, supernet_pattern
from lazyformer_fairseq.modules.attention.back_ends import StoredDistribution
from lazyformer_fairseq.modules.networks.causal_decoder import CausalDecoder, init_transformer_xl_weights
from lazyformer_fairseq.modules.networks.encoder import Encoder
from lazyformer_fairseq.modules.networks.stream_memory import StreamMemory
from lazyformer_fairseq.patterns.attention_variants import chosen_variants
from lazyformer_fairseq.patterns.grammar import read_sublayer
from lazyformer_fairseq.patterns.kinds import DISTRIBUTION

CANDIDATES = ("s", "l", "f", "identity")
LAYERS = 3
WITHOUT_LAZY = ("s", "f", "identity")
WITH_KEYS = ("s", "l", "k", "f", "identity")


def make_network(network_class, pattern, **more):
    torch.manual_seed(1)
    sizes = dict(vocab_size=11, embed_dim=8, ffn_embed_dim=16, num_heads=2)
    network = network_class(pattern, **sizes, **more, **({} if network_class is Encoder else {"mem_len": 4}))
    network.apply(init_transformer_xl_weights)
    return network


def make_supernet(candidates, network_class=Encoder, layers=LAYERS, **more):
    network = make_network(network_class, supernet_pattern(candidates, layers), **more)
    return Supernet(network, network, Architecture(layers, candidates))


def fix_weights(supernet, rows):
    """Makes the supernet use given weights in place of drawn ones."""
    supernet.architecture.forward = lambda: rows


def naive(supernet, rows, x, shared):
    """Equation 4 and the carried distribution, term by term."""
    names, carried, all_carried = supernet.architecture.candidates, None, []
    for mixture, row in zip(supernet.mixtures, rows, strict=True):
        total = torch.zeros_like(x)
        kept = None
        for name, weight in zip(names, row, strict=True):
            if name == "identity":
                total = total + weight * x
            elif name in mixture.sublayers:
                below = {} if carried is None else {DISTRIBUTION: StoredDistribution(carried)}
                y, own = mixture.sublayers[name](x, below, shared)
                kept = own[DISTRIBUTION].probabilities if name == "s" and "l" in names else kept
                total = total + weight * y
        if "l" in names and kept is not None:
            m = row[names.index("s")]
            carried = kept if carried is None else m * kept + (1 - m) * carried
            all_carried.append(carried)
        x = total
    return x, all_carried


@pytest.mark.parametrize("candidates", [WITHOUT_LAZY, CANDIDATES, ("s", "l", "f")])
@pytest.mark.parametrize("normalize_before", [False, True])
def test_outputs_and_gradients_are_those_of_equation_4(candidates, normalize_before):
    supernet = make_supernet(candidates, normalize_before=normalize_before)
    network = supernet.model
    rows = supernet.architecture().detach().requires_grad_()
    fix_weights(supernet, rows)
    tokens = torch.randint(2, 11, (2, 5))
    found, _ = supernet(tokens)

    x = network.embed_tokens(tokens) + network.embed_positions.weight[:5]
    x = x if normalize_before else network.embedding_layer_norm(x)
    expected, _ = naive(supernet, rows, x, network.context(x))
    expected = network.final_layer_norm(expected) if normalize_before else expected
    assert found.allclose(expected, atol=1e-6)
    weighted = torch.randn_like(found)
    parameters = [rows, *network.parameters()]
    losses = ((output * weighted).sum() for output in (found, expected))
    grads = (torch.autograd.grad(loss, parameters, allow_unused=True) for loss in losses)
    for our, their in zip(*grads, strict=True):
        assert (our is None) == (their is None)
        assert our is None or our.allclose(their, atol=1e-5)


LOCAL = "s[fixed=2,summary=1]"


@pytest.mark.parametrize("network_class", [Encoder, CausalDecoder])
@pytest.mark.parametrize(
    ("candidates", "chosen"),
    [
        (CANDIDATES, ("s", "l", "f")),
        (("s", "s[window=1]", "l", "f"), ("s[window=1]", "l", "l")),
        *((("s", "k", "f"), chosen) for chosen in (("s", "k", "k"), ("s", "s", "k"), ("s", "f", "k"))),
        *(((LOCAL, "k", "f"), chosen) for chosen in ((LOCAL, "k", "k"), (LOCAL, LOCAL, "k"), (LOCAL, "f", "k"))),
    ],
)
def test_a_certain_choice_is_the_network_of_that_pattern(network_class, candidates, chosen):
    """With the weights all on one candidate a layer, the supernet is the network that is trained in the end."""
    supernet, inputs = make_supernet(candidates, network_class), torch.randint(2, 11, (2, 5))
    fix_weights(supernet, torch.eye(len(candidates))[[candidates.index(name) for name in chosen]])
    found, _ = supernet(inputs)
    sublayers = (mixture.candidate(name) for mixture, name in zip(supernet.mixtures, chosen, strict=True))
    supernet.model.sublayers = nn.ModuleList(sublayers)
    assert found.allclose(supernet.model(inputs)[0], atol=1e-6)


def test_a_certain_choice_of_projected_positions_is_the_network_of_that_pattern():
    """Whose ``l`` adds the bias of its values behind the projection, as its ``s`` does."""
    candidates = ("s[linformer=3]", "l", "f")
    more = {"max_positions": 5, "relative_position_buckets": 0}
    supernet, inputs = make_supernet(candidates, **more), torch.randint(2, 11, (2, 5))
    loud(supernet.model).float()
    fix_weights(supernet, torch.eye(3)[[0, 1, 1]])
    found, _ = supernet(inputs)
    first, *others = supernet.mixtures
    supernet.model.sublayers = nn.ModuleList(
        [first.candidate("s[linformer=3]"), *(each.candidate("l") for each in others)]
    )
    torch.testing.assert_close(found, supernet.model(inputs)[0])


@pytest.mark.parametrize(
    ("candidates", "why"),
    [
        (("s", "s[window=4]", "k"), "k with s and s.window=4.: .* cannot mix the keys and values of different"),
        (("s[entmax=1.5]", "k"), "k with s.entmax=1.5.: .* not the terms that s.entmax=1.5. adds"),
    ],
)
def test_keys_that_do_not_mix_are_refused(candidates, why):
    with pytest.raises(UserError, match=why):
        supernet_pattern(candidates, 2)


@pytest.mark.parametrize("temperature", [5.0, 0.5, 0.05])
def test_memory_goes_to_every_layer_and_carried_distributions_are_distributions(temperature):
    supernet = make_supernet(CANDIDATES, CausalDecoder, layers=4)
    supernet.architecture.temperature = temperature
    carried, memory = [], StreamMemory()
    for mixture in supernet.mixtures:
        mixture.register_forward_hook(lambda module, inputs, output: carried.append(output[1][DISTRIBUTION]))
    first, second = torch.randint(2, 11, (2, 2, 4))
    supernet(first, memory=memory)
    assert len(memory.states) == 4
    supernet.eval()
    with_memory, _ = supernet(second, memory=memory)
    assert carried[3].probabilities.shape[-1] == 4 and carried[7].probabilities.shape[-1] == 8
    assert not with_memory.allclose(supernet(second)[0], atol=1e-4)
    for distribution in (stored.probabilities for stored in carried):
        assert (distribution >= 0).all()
        assert distribution.sum(dim=-1).allclose(torch.ones(()), atol=1e-5)


@pytest.mark.parametrize("architecture", [False, True])
def test_only_one_side_learns(architecture):
    supernet = make_supernet(WITHOUT_LAZY)
    supernet.learn(architecture)
    supernet(torch.randint(2, 11, (2, 5)))[0].square().sum().backward()
    assert (supernet.architecture.logits.grad is not None) == architecture
    assert all((parameter.grad is None) == architecture for parameter in supernet.model.parameters())


def test_an_s_is_read_just_where_an_l_is_above_and_keeps_nothing_else():
    assert supernet_pattern(WITHOUT_LAZY, 2) == "-sf-sf"
    assert supernet_pattern(CANDIDATES, 3) == "-sf-lsf-lsf"
    with pytest.raises(UserError, match="--sublayers 0"):
        supernet_pattern(CANDIDATES, 0)
    for candidates, consumers in ((WITHOUT_LAZY, [0] * 3), (CANDIDATES, [1, 1, 0])):
        mixtures = make_supernet(candidates).mixtures
        assert [mixture.sublayers["s"].inner.consumers for mixture in mixtures] == consumers
    supernet = make_supernet(WITHOUT_LAZY)
    supernet.mixtures[-1].register_forward_hook(lambda module, inputs, output: pytest.fail() if output[1] else None)
    supernet(torch.randint(2, 11, (2, 5)))


def test_weights_are_uniform_at_first_drawn_anew_in_training_and_never_lazy_in_the_first_layer():
    architecture = Architecture(3, ("s", "f", "identity"))
    assert architecture.probabilities().allclose(torch.full((3, 3), 1 / 3))
    assert architecture.entropy() == pytest.approx(math.log2(3))
    for architecture.temperature in (5.0, 0.1):
        assert architecture().sum(dim=-1).allclose(torch.ones(3)) and not torch.equal(architecture(), architecture())
    architecture.eval()
    assert torch.equal(architecture(), architecture.probabilities())
    architecture, column = Architecture(3, CANDIDATES), CANDIDATES.index("l")
    for weights in (architecture(), architecture.probabilities()):
        assert weights[0, column] == 0 and (weights[1:, column] > 0).all()
    architecture().square().sum().backward()
    assert architecture.logits.grad.isfinite().all() and architecture.logits.grad[0, column] == 0


def test_the_most_probable_candidate_is_drawn_as_often_as_it_is_probable():
    """At any temperature (Maddison et al., 2017): so the mean latency of what is drawn is that of the probabilities."""
    torch.manual_seed(1)
    architecture = Architecture(2000, ("s", "f", "identity"))
    with torch.no_grad():
        architecture.logits += torch.tensor([1.0, 0.0, -1.0])
    architecture.temperature = 5.0
    drawn = torch.stack([architecture().argmax(dim=-1) for _ in range(10)]).flatten().bincount() / 20_000
    assert drawn.allclose(architecture.probabilities()[0], atol=0.02)


INPUTS = torch.arange(4, 10).unsqueeze(0)
SUBNETS = [("s", "l", "l", "f"), ("f", "s", "k", "l"), ("identity", "s", "identity", "f"), ("s", "f", "f", "s")]
MODERN = {"normalize_before": True, "embedding_norm": True, "norm": "rms", "linear_bias": False}


@pytest.mark.parametrize(
    ("network_class", "subnet", "more"),
    [
        *((network_class, subnet, {}) for network_class in (Encoder, CausalDecoder) for subnet in SUBNETS),
        *((Encoder, subnet, MODERN) for subnet in SUBNETS if subnet[0] != "identity"),
    ],
)
def test_a_certain_choice_computes_what_the_patterns_own_model_does(network_class, subnet, more):
    supernet = make_supernet(WITH_KEYS, network_class, layers=4, **more)
    own = make_network(network_class, letters(subnet), **more)
    chosen = [m.candidate(name) for m, name in zip(supernet.mixtures, subnet, strict=True) if name != "identity"]
    outside = {name: value for name, value in own.state_dict().items() if not name.startswith("sublayers.")}
    supernet.model.load_state_dict(outside, strict=False)
    for ours, theirs in zip(chosen, own.sublayers, strict=True):
        ours.load_state_dict(theirs.state_dict())
    fix_weights(supernet, torch.eye(len(WITH_KEYS))[[WITH_KEYS.index(name) for name in subnet]])
    torch.testing.assert_close(supernet(INPUTS)[0], own(INPUTS)[0])


@of_each_variant
def test_a_supernet_mixes_it_or_refuses_it_by_name(direction, s):
    candidates = ("s", s, "l", "f")
    if not all(row.has_probabilities for row in chosen_variants(read_sublayer(s).values)):
        with pytest.raises(UserError, match=re.escape(f"l with {s}")):
            supernet_pattern(candidates, 2)
        candidates = ("s", s, "f")
    network = build(direction, supernet_pattern(candidates, 3))
    supernet = Supernet(network, network, Architecture(3, candidates).double())
    features = run(supernet, tokens())
    features.sin().sum().backward()
    assert features.isfinite().all()
    assert supernet.architecture.logits.grad[:, 1].abs().min() > 0
