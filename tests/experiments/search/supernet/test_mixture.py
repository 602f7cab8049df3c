"""Mixtures against equation 4 written out, for both kinds of network."""

import pytest
import torch
from torch import nn

from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.experiments.search.supernet.mixture import Choices, Supernet, supernet_pattern
from lazyformer_fairseq.modules.attention.torch_back_ends import StoredDistribution
from lazyformer_fairseq.modules.networks.causal_decoder import CausalDecoder, init_transformer_xl_weights
from lazyformer_fairseq.modules.networks.encoder import Encoder
from lazyformer_fairseq.modules.networks.stream_memory import StreamMemory
from lazyformer_fairseq.patterns.grammar import plan
from lazyformer_fairseq.patterns.kinds import DISTRIBUTION

CANDIDATES = ("s", "l", "f", "identity")
LAYERS = 3
WITHOUT_LAZY = ("s", "f", "identity")


def make_supernet(candidates, kind=Encoder, layers=LAYERS, normalize_before=False):
    torch.manual_seed(1)
    sizes = dict(vocab_size=11, embed_dim=8, ffn_embed_dim=16, num_heads=2, normalize_before=normalize_before)
    network = kind(supernet_pattern(candidates, layers), **sizes, **({} if kind is Encoder else {"mem_len": 4}))
    network.apply(init_transformer_xl_weights)
    return Supernet(network, network, Choices(layers, candidates))


def fix_weights(supernet, rows):
    """Makes the supernet use given weights in place of drawn ones."""
    supernet.choices.forward = lambda: rows


def naive(supernet, rows, x, shared):
    """Equation 4 and the carried distribution, term by term."""
    names, carried, all_carried = supernet.choices.candidates, None, []
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
    rows = supernet.choices().detach().requires_grad_()
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
    ours, theirs = (
        torch.autograd.grad((output * weighted).sum(), parameters, allow_unused=True) for output in (found, expected)
    )
    for our, their in zip(ours, theirs, strict=True):
        assert (our is None) == (their is None)
        assert our is None or our.allclose(their, atol=1e-5)


def test_identity_alone_returns_its_input():
    supernet = make_supernet(WITHOUT_LAZY, normalize_before=True)
    fix_weights(supernet, torch.tensor([[0.0, 0.0, 1.0]] * LAYERS))
    tokens = torch.randint(2, 11, (2, 5))
    _, states = supernet(tokens, return_all=True)
    assert all(torch.equal(state, states[0]) for state in states)


@pytest.mark.parametrize("kind", [Encoder, CausalDecoder])
def test_a_certain_choice_is_the_network_of_that_pattern(kind):
    """With the weights all on one candidate a layer, the supernet is the network that is trained in the end."""
    supernet = make_supernet(CANDIDATES, kind)
    rows = torch.eye(4)[[CANDIDATES.index(name) for name in ("s", "l", "f")]]
    fix_weights(supernet, rows)
    tokens = torch.randint(2, 11, (2, 5))
    found, _ = supernet(tokens)
    network = supernet.model
    network.sublayers = nn.ModuleList(
        mixture.sublayers[name] for mixture, name in zip(supernet.mixtures, ("s", "l", "f"), strict=True)
    )
    expected, _ = network(tokens)
    assert found.allclose(expected, atol=1e-6)


@pytest.mark.parametrize("kind", [Encoder, CausalDecoder])
@pytest.mark.parametrize("producer", ["s", "s[fixed=2,summary=1]"])
@pytest.mark.parametrize("chosen", ["producer k k", "producer producer k", "producer f k"])
def test_a_certain_choice_of_shared_keys_is_the_network_of_that_pattern(kind, producer, chosen):
    candidates = (producer, "k", "f")
    chosen = [producer if name == "producer" else name for name in chosen.split()]
    supernet = make_supernet(candidates, kind)
    fix_weights(supernet, torch.eye(3)[[candidates.index(name) for name in chosen]])
    tokens = torch.randint(2, 11, (2, 5))
    found, _ = supernet(tokens)
    network = supernet.model
    network.sublayers = nn.ModuleList(
        mixture.sublayers[name] for mixture, name in zip(supernet.mixtures, chosen, strict=True)
    )
    expected, _ = network(tokens)
    assert found.allclose(expected, atol=1e-6)


def test_mixed_keys_have_gradients():
    supernet = make_supernet(("s", "l", "k", "f"))
    supernet(torch.randint(2, 11, (2, 5)))[0].square().sum().backward()
    assert all(weight.grad is not None for weight in supernet.mixtures[1].sublayers["k"].parameters())
    first = supernet.mixtures[0].sublayers["s"].inner.qkv_proj.weight.grad
    assert supernet.choices.logits.grad[1:].abs().min() > 0 and first.abs().sum() > 0


@pytest.mark.parametrize(
    ("candidates", "why"),
    [
        (("s", "s[window=4]", "k"), "k beside s and s.window=4.: .* those of several kinds do not mix"),
        (("s[entmax=1.5]", "k"), "k beside s.entmax=1.5.: .* not what each s.entmax=1.5. adds"),
    ],
)
def test_keys_that_do_not_mix_are_refused(candidates, why):
    with pytest.raises(UserError, match=why):
        supernet_pattern(candidates, 2)


@pytest.mark.parametrize("kind", [Encoder, CausalDecoder])
@pytest.mark.parametrize("seed", range(3))
def test_carried_distributions_are_distributions(kind, seed):
    supernet = make_supernet(CANDIDATES, kind, layers=4)
    torch.manual_seed(seed)
    supernet.choices.temperature = (5.0, 0.5, 0.05)[seed]
    carried = []
    for mixture in supernet.mixtures:
        mixture.register_forward_hook(lambda module, inputs, output: carried.append(output[1][DISTRIBUTION]))
    memory = {"memory": StreamMemory()} if kind is CausalDecoder else {}
    for _ in range(2):  # the second segment has memory
        supernet(torch.randint(2, 11, (2, 4)), **memory)
    assert len(carried) == 8
    assert carried[-1].probabilities.shape[-1] == (8 if memory else 4)
    for distribution in (stored.probabilities for stored in carried):
        assert (distribution >= 0).all()
        assert distribution.sum(dim=-1).allclose(torch.ones(()), atol=1e-5)


def test_without_lazy_candidates_no_distribution_is_kept():
    for candidates, consumers in ((WITHOUT_LAZY, [0] * 3), (CANDIDATES, [1, 1, 0])):
        mixtures = make_supernet(candidates).mixtures
        assert [mixture.sublayers["s"].inner.consumers for mixture in mixtures] == consumers
    supernet = make_supernet(WITHOUT_LAZY)
    supernet.mixtures[-1].register_forward_hook(lambda module, inputs, output: pytest.fail() if output[1] else None)
    supernet(torch.randint(2, 11, (2, 5)))


def test_memory_goes_to_every_layer_and_matters():
    supernet = make_supernet(CANDIDATES, CausalDecoder).eval()
    first, second = torch.randint(2, 11, (2, 2, 4))
    memory = StreamMemory()
    supernet(first, memory=memory)
    assert len(memory.states) == LAYERS
    with_memory, _ = supernet(second, memory=memory)
    assert not with_memory.allclose(supernet(second)[0], atol=1e-4)


@pytest.mark.parametrize("architecture", [False, True])
def test_only_one_side_learns(architecture):
    supernet = make_supernet(WITHOUT_LAZY)
    supernet.learn(architecture)
    supernet(torch.randint(2, 11, (2, 5)))[0].square().sum().backward()
    assert (supernet.choices.logits.grad is not None) == architecture
    assert all((parameter.grad is None) == architecture for parameter in supernet.model.parameters())


def test_the_pattern_of_a_supernet_has_an_s_read_just_where_an_l_is_above():
    assert supernet_pattern(WITHOUT_LAZY, 2) == "-sf-sf"
    assert supernet_pattern(CANDIDATES, 3) == "-sf-lsf-lsf"
    assert [len(sublayer.consumers) for sublayer in plan("sflsflsf")] == [1, 0, 0, 1, 0, 0, 0, 0]
    with pytest.raises(UserError, match="--sublayers 0"):
        supernet_pattern(CANDIDATES, 0)


def test_kinds_of_attention_are_mixed_and_a_certain_choice_is_the_network_of_that_pattern():
    candidates = ("s", "s[window=1]", "l", "f")
    supernet = make_supernet(candidates)
    tokens = torch.randint(2, 11, (2, 5))
    assert supernet(tokens)[0].isfinite().all()
    chosen = ("s[window=1]", "l", "l")
    fix_weights(supernet, torch.eye(4)[[candidates.index(name) for name in chosen]])
    found, _ = supernet(tokens)
    network = supernet.model
    network.sublayers = nn.ModuleList(
        mixture.sublayers[name] for mixture, name in zip(supernet.mixtures, chosen, strict=True)
    )
    assert found.allclose(network(tokens)[0], atol=1e-6)


def test_a_kind_whose_distribution_cannot_be_mixed_is_refused_beside_l_alone():
    assert supernet_pattern(("s[persistent=1]", "f"), 2) == "s[persistent=1]fs[persistent=1]f"
    assert supernet_pattern(("s[window=2]", "l"), 2) == "s[window=2]ls[window=2]"
    with pytest.raises(UserError, match=r"l beside s\[persistent=1\]: a search mixes the distributions that l reuses"):
        supernet_pattern(("s", "s[persistent=1]", "l"), 2)
