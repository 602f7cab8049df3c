"""The supernet: architecture parameters, mixtures against equation 4 written out, one pattern at a time, every kind."""

import json
import math
import re

import pytest
import torch
from click.testing import CliRunner
from every_kind import build, examples, of_each_kind, rows, run, tokens
from torch import nn

from lazyformer_fairseq.cli import main
from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.experiments.search.space import letters
from lazyformer_fairseq.experiments.search.supernet import Choices, SinglePath, Supernet, supernet_pattern
from lazyformer_fairseq.modules.attention.back_ends import StoredDistribution
from lazyformer_fairseq.modules.networks.causal_decoder import CausalDecoder, init_transformer_xl_weights
from lazyformer_fairseq.modules.networks.encoder import Encoder
from lazyformer_fairseq.modules.networks.stack import StreamMemory
from lazyformer_fairseq.modules.sublayers.attention_variant import variant_classes
from lazyformer_fairseq.patterns.grammar import plan, read_sublayer
from lazyformer_fairseq.patterns.kinds import CAUSAL, DISTRIBUTION, ENCODER

CANDIDATES = ("s", "l", "f", "identity")
LAYERS = 3
WITHOUT_LAZY = ("s", "f", "identity")
WITH_KEYS = ("s", "l", "k", "f", "identity")


def make_network(kind, pattern, **more):
    torch.manual_seed(1)
    sizes = dict(vocab_size=11, embed_dim=8, ffn_embed_dim=16, num_heads=2)
    network = kind(pattern, **sizes, **more, **({} if kind is Encoder else {"mem_len": 4}))
    network.apply(init_transformer_xl_weights)
    return network


def make_supernet(candidates, kind=Encoder, layers=LAYERS, **more):
    network = make_network(kind, supernet_pattern(candidates, layers), **more)
    return Supernet(network, network, Choices(layers, candidates))


def of_pattern(supernet, chosen):
    """What the supernet's network computes with the weights all on one candidate a layer, and that pattern's own."""
    candidates = supernet.choices.candidates
    fix_weights(supernet, torch.eye(len(candidates))[[candidates.index(name) for name in chosen]])
    tokens = torch.randint(2, 11, (2, 5))
    found, _ = supernet(tokens)
    sublayers = (mixture.candidate(name) for mixture, name in zip(supernet.mixtures, chosen, strict=True))
    supernet.model.sublayers = nn.ModuleList(sublayers)
    return found, supernet.model(tokens)[0]


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


LOCAL = "s[fixed=2,summary=1]"


@pytest.mark.parametrize("kind", [Encoder, CausalDecoder])
@pytest.mark.parametrize(
    ("candidates", "chosen"),
    [
        (CANDIDATES, ("s", "l", "f")),
        (("s", "s[window=1]", "l", "f"), ("s[window=1]", "l", "l")),
        *((("s", "k", "f"), chosen) for chosen in (("s", "k", "k"), ("s", "s", "k"), ("s", "f", "k"))),
        *(((LOCAL, "k", "f"), chosen) for chosen in ((LOCAL, "k", "k"), (LOCAL, LOCAL, "k"), (LOCAL, "f", "k"))),
    ],
)
def test_a_certain_choice_is_the_network_of_that_pattern(kind, candidates, chosen):
    """With the weights all on one candidate a layer, the supernet is the network that is trained in the end."""
    found, expected = of_pattern(make_supernet(candidates, kind), chosen)
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


def test_weights_are_uniform_at_first_and_rows_sum_to_1():
    choices = Choices(3, ("s", "f", "identity"))
    assert choices.probabilities().allclose(torch.full((3, 3), 1 / 3))
    assert choices.entropy() == pytest.approx(math.log2(3))
    for temperature in (5.0, 0.1):
        choices.temperature = temperature
        assert choices().sum(dim=-1).allclose(torch.ones(3))


def test_each_call_draws_anew_in_training_and_never_in_evaluation():
    choices = Choices(3, ("s", "f", "identity"))
    assert not torch.equal(choices(), choices())
    choices.eval()
    assert torch.equal(choices(), choices.probabilities())


def test_lazy_attention_in_the_first_layer_has_probability_0_exactly():
    choices = Choices(3, CANDIDATES)
    column = CANDIDATES.index("l")
    for weights in (choices(), choices.probabilities()):
        assert weights[0, column] == 0
        assert (weights[1:, column] > 0).all()
    choices().square().sum().backward()
    assert choices.logits.grad.isfinite().all()
    assert choices.logits.grad[0, column] == 0


def test_the_most_probable_candidate_is_drawn_as_often_as_it_is_probable():
    """At any temperature (Maddison et al., 2017): so the mean latency of what is drawn is that of the probabilities."""
    torch.manual_seed(1)
    choices = Choices(2000, ("s", "f", "identity"))
    with torch.no_grad():
        choices.logits += torch.tensor([1.0, 0.0, -1.0])
    choices.temperature = 5.0
    drawn = torch.stack([choices().argmax(dim=-1) for _ in range(10)]).flatten().bincount() / 20_000
    assert drawn.allclose(choices.probabilities()[0], atol=0.02)


SUBNETS = [("s", "l", "l", "f"), ("f", "s", "k", "l"), ("identity", "s", "identity", "f"), ("s", "f", "f", "s")]


def single_path(kind):
    supernet = make_supernet(WITH_KEYS, kind, layers=4)
    return SinglePath(supernet, supernet.model, "auto")


@pytest.mark.parametrize("kind", [Encoder, CausalDecoder])
@pytest.mark.parametrize("subnet", SUBNETS)
def test_a_pattern_of_a_supernet_computes_what_its_own_model_does(kind, subnet):
    single, own = single_path(kind), make_network(kind, letters(subnet))
    chosen = [m.candidate(name) for m, name in zip(single.supernet.mixtures, subnet, strict=True) if name != "identity"]
    outside = {name: value for name, value in own.state_dict().items() if not name.startswith("sublayers.")}
    single.supernet.model.load_state_dict(outside, strict=False)
    for ours, theirs in zip(chosen, own.sublayers, strict=True):
        ours.load_state_dict(theirs.state_dict())
    tokens = torch.arange(4, 10).unsqueeze(0)
    single.take(subnet)
    output, expected = single(tokens)[0], own(tokens)[0]
    torch.testing.assert_close(output, expected)
    output.sum().backward()
    trained = {id(p) for p in single.parameters() if p.grad is not None}
    of_subnet = {id(p) for sublayer in chosen for p in sublayer.parameters()}
    of_all = {id(p) for m in single.supernet.mixtures for p in m.parameters()}
    assert trained & of_all <= of_subnet  # the others cost nothing


def test_after_one_pattern_mixtures_are_what_they_were():
    single = single_path(Encoder)
    tokens = torch.arange(4, 10).unsqueeze(0)
    single.eval()
    before = single.supernet(tokens)[0]
    for subnet in SUBNETS:
        single.take(subnet)
        assert not torch.allclose(single(tokens)[0], before)
    single.take(None)
    assert torch.equal(single.supernet(tokens)[0], before)


def can_be_mixed(s: str) -> bool:
    values = read_sublayer(s).values
    return all(choice.has_probabilities for choice in variant_classes(values))


@of_each_kind
def test_a_supernet_mixes_it_or_refuses_it_by_name(direction, s):
    candidates = ("s", s, "l", "f")
    if not can_be_mixed(s):
        with pytest.raises(UserError, match=re.escape(f"l beside {s}")):
            supernet_pattern(candidates, 2)
        candidates = ("s", s, "f")
    network = build(direction, supernet_pattern(candidates, 3))
    supernet = Supernet(network, network, Choices(3, candidates).double())
    features = run(supernet, tokens())
    features.sin().sum().backward()
    assert features.isfinite().all()
    assert supernet.choices.logits.grad[:, 1].abs().min() > 0


def mixable(direction: str) -> list[str]:
    last = (f"s[{examples(row, direction)[-1]}]" for row in rows(direction))
    return [read_sublayer(s).text for s in last if can_be_mixed(s)]


@pytest.mark.parametrize(
    ("direction", "mixed"),
    [
        (ENCODER, ["s[window=2,global=1]", "s[linformer=3]"]),
        pytest.param(ENCODER, mixable(ENCODER), marks=pytest.mark.slow, id="all of encoders"),
        pytest.param(CAUSAL, mixable(CAUSAL), marks=pytest.mark.slow, id="all of causal models"),
    ],
)
def test_they_are_candidates_of_one_search(direction, mixed, data_folder, lm_data, tmp_path):
    options = ["--candidates", ",".join(["s", *mixed, "l", "f", "identity"]), "--sublayers", "2"]
    options += "--batch-size 16 --constant-updates 1 --max-updates 60 --device cpu --latency-price 0.1".split()
    if direction == ENCODER:
        data, sizes = data_folder, "--task masked-lm --arch bert_tiny --tokens-per-sample 12 --max-positions 12"
        options += ["--relative-position-buckets", "0"]
    else:
        data, sizes = lm_data, "--task language-model --arch transformer_xl_tiny --tgt-len 12 --mem-len 0"
    done = CliRunner().invoke(main, ["search", str(data), str(tmp_path / "found"), *sizes.split(), *options])
    assert done.exit_code == 0, (done.output, done.exception)
    prices = json.loads((tmp_path / "found" / "latencies.json").read_text())
    assert {name for s in mixed for name in (s, f"{s}_read")} <= prices.keys()
    assert (tmp_path / "found" / "probabilities.png").stat().st_size > 1000
