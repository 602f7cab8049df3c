"""Experts: against GShard's Algorithm 1 by einsum; what padding, batch, later tokens and processes do not change."""

import copy
import math
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from every_variant import WORDS, assert_alike, build, tokens
from helpers import ROOT, assert_refused
from torch import Tensor
from torch.nn import functional as F
from trained_encoders import trained

from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.evaluation.costs.flops import count_parameters, count_sublayer_flops
from lazyformer_fairseq.experiments.search.supernet import Architecture, Supernet, supernet_pattern
from lazyformer_fairseq.modules import losses
from lazyformer_fairseq.modules.attention.scores import Scores
from lazyformer_fairseq.modules.networks.auxiliary_loss import pop_expert_outputs
from lazyformer_fairseq.modules.networks.encoder import TokenInfo
from lazyformer_fairseq.modules.networks.masked_lm import MaskedLM
from lazyformer_fairseq.modules.networks.options import MaskedLMOptions
from lazyformer_fairseq.modules.sublayers.feed_forward import Experts, FeedForward
from lazyformer_fairseq.modules.sublayers.interface import Context, SublayerOptions
from lazyformer_fairseq.patterns.grammar import plan
from lazyformer_fairseq.patterns.kinds import ENCODER, EncoderSizes
from lazyformer_fairseq.training.warm_start.start import start_from

WIDTH, HIDDEN, TIME = 6, 5, 16
CONTEXT = Context(Scores(), lambda *_: "eager")


def make(text: str, is_causal: bool = False) -> Experts:
    torch.manual_seed(1)
    options = SublayerOptions(WIDTH, HIDDEN, 2, is_causal=is_causal)
    return FeedForward.build(options, plan(text)[0]).double()


def texts(count: int = 3, lengths: tuple[int, ...] = ()) -> tuple[Tensor, Context]:
    x_BTC = torch.randn(count, TIME, WIDTH, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    x_BTC += 2 * x_BTC[:, :1]  # texts have subjects: some experts are asked for more often than they have slots
    if not lengths:
        return x_BTC, CONTEXT
    is_padding_BT = torch.arange(TIME) >= torch.tensor(lengths)[:, None]
    return x_BTC, CONTEXT._replace(scores=Scores().with_padding(is_padding_BT))


def algorithm_1(module: Experts, x_SC: Tensor, draws_S: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Of one text: output, the paper's loss, and how many choices have a slot; GShard's dispatch by einsum."""
    count, slots = module.count, math.ceil(module.capacity * module.top * len(x_SC) / module.count - 1e-9)
    gates_SE = (x_SC @ module.gate.weight.t()).softmax(-1)
    first_SE = F.one_hot(gates_SE.argmax(-1), count).double()
    second_SE = F.one_hot((gates_SE - 2 * first_SE).argmax(-1), count).double()
    gate_1, gate_2 = ((gates_SE * each).sum(-1) for each in (first_SE, second_SE))
    loss = (first_SE.mean(0) * gates_SE.mean(0)).mean()
    if module.top == 1:
        choices = [(first_SE, gate_1)]
    else:
        gate_1, gate_2 = gate_1 / (gate_1 + gate_2), gate_2 / (gate_1 + gate_2)
        choices = [(first_SE, gate_1), (second_SE * (draws_S < 2 * gate_2)[:, None], gate_2)]
    combine_SEC, taken_E = x_SC.new_zeros(len(x_SC), count, slots), x_SC.new_zeros(count)
    for chosen_SE, gate_S in choices:
        place_SE = (chosen_SE.cumsum(0) - chosen_SE + taken_E) * chosen_SE
        has_slot_SE = chosen_SE * (place_SE < slots)
        at_SEC = F.one_hot(place_SE.long().clamp(max=slots - 1), slots)
        combine_SEC = combine_SEC + torch.einsum("s,se,sec->sec", gate_S, has_slot_SE, at_SEC.double())
        taken_E = taken_E + has_slot_SE.sum(0)
    inputs_ECM = torch.einsum("sec,sm->ecm", (combine_SEC > 0).double(), x_SC)
    outputs = [expert.compute(each) for expert, each in zip(module.experts.values(), inputs_ECM, strict=True)]
    return torch.einsum("sec,ecm->sm", combine_SEC, torch.stack(outputs)), loss, taken_E.sum()


@pytest.mark.parametrize("lengths", [(), (16, 7, 1)])
@pytest.mark.parametrize("settings", ["experts=4", "experts=4,top=1,capacity=1", "experts=3,capacity=0.5,gate=silu"])
def test_training_is_algorithm_1_of_each_text(settings, lengths):
    module, (x_BTC, context) = make(f"f[{settings}]"), texts(3, lengths)
    x_BTC.requires_grad_()
    torch.manual_seed(3)
    y_BTC = module(x_BTC, {}, context)[0]
    outputs = module.pop_expert_outputs()
    torch.manual_seed(3)
    draws_BT = torch.rand(3 * TIME, 1, dtype=torch.float64).view(3, TIME)
    of_texts = zip(x_BTC, draws_BT, lengths or 3 * (TIME,), strict=True)
    found = [algorithm_1(module, x[:n], draws[:n]) for x, draws, n in of_texts]
    expected = torch.stack([F.pad(y, (0, 0, 0, TIME - len(y))) for y, _, _ in found])
    assert_alike(y_BTC, expected)
    assert_alike(outputs.loss, module.count**2 * torch.stack([loss for _, loss, _ in found]).mean())
    assert outputs.wanted - outputs.dropped == sum(taken for _, _, taken in found)
    assert outputs.dropped > 0
    inputs = (x_BTC, *module.parameters())
    ours, theirs = (torch.autograd.grad(y.square().sum(), inputs, retain_graph=True) for y in (y_BTC, expected))
    for one, other in zip(ours, theirs, strict=True):
        assert_alike(one, other)


def test_slots_are_the_ceiling_and_a_token_that_no_expert_takes_passes_by_the_residual():
    assert make("f[experts=8]").slots(torch.tensor([512, 10, 1, 0])).tolist() == [160, 4, 1, 0]
    assert make("f[experts=8,capacity=1.1]").slots(torch.tensor([40])).tolist() == [11]  # not 12 by rounding
    module = make("f[experts=2,top=1,capacity=0.125]")  # a slot of each expert, for 16 tokens
    y_BTC = module(texts(1)[0], {}, CONTEXT)[0]
    outputs = module.pop_expert_outputs()
    assert outputs.wanted == 16 and outputs.dropped in (14, 15)
    assert (y_BTC == 0).all(-1).sum() == outputs.dropped


@pytest.mark.parametrize("settings", ["experts=4,capacity=0.5", "experts=4,top=1,capacity=0.5"])
def test_features_do_not_depend_on_the_batch_and_nothing_is_drawn(settings):
    module = make(f"f[{settings}]").eval()
    (x_BTC, padded), state = texts(3, (16, 7, 5)), torch.get_rng_state()
    y_BTC = module(x_BTC, {}, padded)[0]
    assert torch.equal(torch.get_rng_state(), state) and module.pop_expert_outputs() is None
    for x, y, length in zip(x_BTC, y_BTC, (16, 7, 5), strict=True):
        assert_alike(y[:length], module(x[None, :length], {}, CONTEXT)[0][0])
    weights_SK, experts_SK = module.gates(x_BTC[0]).topk(module.top)
    weights_SK = weights_SK / weights_SK.sum(-1, keepdim=True) if module.top > 1 else weights_SK
    pairs = zip(x_BTC[0], experts_SK.tolist(), weights_SK, strict=True)
    expected = [sum(w * module.experts[str(e)].compute(x) for e, w in zip(of, ws, strict=True)) for x, of, ws in pairs]
    assert_alike(y_BTC[0], torch.stack(expected))


@pytest.mark.parametrize("is_causal", [True, False])
def test_in_causal_models_no_slot_tells_of_later_tokens(is_causal):
    """An encoder's second choices wait for all first ones, and so tell of them: the test sees it there."""
    module = make("f[experts=4,capacity=0.5]", is_causal)

    def run(x_BTC: Tensor) -> Tensor:
        torch.manual_seed(3)
        return module(x_BTC, {}, CONTEXT)[0]

    x_BTC, _ = texts(8)
    other = torch.cat([x_BTC[:, :9], -x_BTC[:, 9:]], 1)
    one, two = run(x_BTC), run(other)
    assert torch.allclose(one[:, :9], two[:, :9]) == is_causal
    assert not torch.allclose(one[:, 9:], two[:, 9:])


@pytest.mark.parametrize("is_training", [False, True])
def test_a_document_is_a_text_wherever_it_stands(is_training):
    network = build(ENCODER, "sf[experts=4,top=1,capacity=0.5]").train(is_training)
    ids = tokens(2)
    lengths = ((12,), (5, 7))
    found = network(ids, None, info=TokenInfo(documents=lengths, restart_positions=True))[0]
    assert_alike(found[0], network(ids[:1])[0][0])
    short = ids.new_ones(1, 12)
    short[:, :7] = ids[1, 5:]
    mask = short.eq(1)
    if not is_training:
        assert_alike(found[1, 5:], network(short, mask, info=TokenInfo(documents=[(7,)]))[0][0, :7])
    module = next(each for each in network.modules() if isinstance(each, Experts))
    x_BTC, padded = texts(2, (12, 9))
    x_BTC = x_BTC.repeat(1, 1, 3)[..., :16]
    module.train()
    rows = module(x_BTC, {}, padded)[0]
    row = torch.cat([x_BTC[0, :12], x_BTC[1, :9]])[None]
    in_a_row = CONTEXT._replace(documents=SimpleNamespace(lengths=torch.tensor([12, 9]).numpy()))
    assert_alike(module(row, {}, in_a_row)[0][0], torch.cat([rows[0, :12], rows[1, :9]]))


def test_costs_are_those_of_the_experts_that_compute():
    sizes = EncoderSizes(WORDS, 16, 32, 2)
    plain, experts, one = plan("f f[experts=4] f[experts=4,top=1,gate=gelu]")
    gate = 4 * 16
    alone = count_sublayer_flops(plain, sizes, 8)
    assert count_sublayer_flops(experts, sizes, 8) == 2 * alone + 2 * 8 * gate
    assert count_sublayer_flops(one, sizes, 8) == alone * 3 // 2 + 2 * 8 * gate
    of_f = 2 * 16 * 32 + 16 + 32
    assert count_parameters("f[experts=4]", sizes) - count_parameters("f", sizes) == 3 * of_f + gate


@pytest.mark.parametrize(
    ("pattern", "under", "why"),
    [
        ("sf[top=1]", "top", "top needs experts, as in f[experts=8,top=...]"),
        ("sf[capacity=2]", "capacity", "capacity needs experts"),
        ("sf[experts=1]", "1]", "experts must be 2 or more, not 1"),
        ("sf[experts=4,top=3]", "3]", "top must be from 1 to 2, not 3"),
        ("sf[experts=4,capacity=0]", "0]", "capacity must be 0.01 or more, not 0"),
    ],
)
def test_settings_without_a_meaning_are_refused_with_a_caret(pattern, under, why):
    assert_refused(pattern, under, why)


def options(**given) -> MaskedLMOptions:
    sizes = {"encoder_embed_dim": 16, "encoder_ffn_embed_dim": 8, "encoder_attention_heads": 2, "max_positions": 16}
    return MaskedLMOptions(**{"sublayer_pattern": "sf[experts=4]", "dropout": 0.0, **sizes, **given})


def batch(rows: slice = slice(None)) -> dict:
    ids = torch.randint(4, WORDS, (4, 16), generator=torch.Generator().manual_seed(5))
    ids[1, 9:] = 1
    target = ids.masked_fill(torch.arange(16) % 3 > 0, 1)
    return {"net_input": {"src_tokens": ids[rows]}, "target": target[rows], "ntokens": 0, "nsentences": 0}


def test_the_loss_that_keeps_experts_busy_has_its_weight_and_is_logged_apart():
    found = {}
    for weight in (0.0, 0.5):
        torch.manual_seed(1)
        model = MaskedLM(options(experts_loss=weight), WORDS)
        torch.manual_seed(2)
        found[weight] = loss, size, log = losses.masked_lm(model, batch(), 1)
        assert_alike(loss.detach(), log["loss"] + log["experts_loss"])
        gate = next(each for each in model.modules() if isinstance(each, Experts)).gate
        found[weight] = log["experts_loss"] / size, torch.autograd.grad(loss, gate.weight)[0]
    assert found[0.0][0] == 0 and 0.5 <= found[0.5][0] < 1  # at least 1, of equal use, times the weight
    assert not torch.equal(found[0.0][1], found[0.5][1])
    copy.deepcopy(model)
    assert "experts_loss" not in losses.masked_lm(model.eval(), batch(), 1)[2]
    with pytest.raises(UserError, match="--experts-loss -1: must be 0 or more"):
        MaskedLM(options(experts_loss=-1.0), WORDS)
    with pytest.raises(UserError, match="--compile: models with experts cannot be compiled"):
        MaskedLM(options(compile=True), WORDS)


def test_recomputed_activations_learn_the_same_and_tell_validation_nothing():
    found = []
    for given in ({}, {"checkpoint_activations": True}):
        torch.manual_seed(1)
        model = MaskedLM(options(activation_dropout=0.1, **given), WORDS)
        torch.manual_seed(2)
        loss, _, log = losses.masked_lm(model, batch(), 1)
        loss.backward()
        found.append([log["experts_loss"], *(each.grad for each in model.parameters() if each.grad is not None)])
    for one, other in zip(*found, strict=True):
        assert_alike(one, other)
    assert "experts_loss" not in losses.masked_lm(model.eval(), batch(), 1)[2]
    with pytest.raises(UserError, match="--reversible: f.experts=4. would not learn to balance its experts"):
        MaskedLM(options(reversible=True, encoder_normalize_before=True), WORDS)


def test_a_search_mixes_experts_and_takes_their_loss_of_what_ran():
    candidates = ("s", "f", "f[experts=4]", "identity")
    network = build(ENCODER, supernet_pattern(candidates, 2))
    supernet = Supernet(network, network, Architecture(2, candidates)).double().train()
    supernet(tokens())[0].square().sum().backward()
    outputs = pop_expert_outputs(network)
    assert outputs.wanted > 0 and outputs.loss >= 2 * network.experts_loss * 0.9 and pop_expert_outputs(network) is None
    assert supernet.architecture.logits.grad.abs().sum() > 0


def test_a_warm_start_has_as_many_experts_or_begins_with_experts_that_add_nothing():
    old = trained("sf")
    with pytest.raises(UserError, match="experts=4. cannot use the weights of f, because their numbers of experts"):
        start_from(old, {"sublayer_pattern": "sf[experts=4]"})
    start = start_from(old, {"sublayer_pattern": "sff[experts=4]"}, ["0", "1", "-"])
    last = [weight for name, weight in start.new.weights.items() if ".experts." in name and ".fc2." in name]
    assert len(last) == 8 and not any(weight.any() for weight in last)


def test_the_gate_is_in_single_precision_whatever_the_model_is_in():
    module = make("f[experts=4]").to(torch.bfloat16)
    x_BTC = texts()[0].to(torch.bfloat16)
    assert module.gates(x_BTC[0]).dtype == torch.float32 and module(x_BTC, {}, CONTEXT)[0].dtype == torch.bfloat16
    single, x_TC = module.float(), x_BTC[0].float()
    with torch.autocast("cpu", torch.bfloat16):
        found = single.gates(x_TC)
    torch.testing.assert_close(found, (x_TC @ single.gate.weight.t()).softmax(-1))


def train(model: torch.nn.Module, parts: list[slice], share: float) -> tuple[list[Tensor], Tensor]:
    """Adds up gradients; each part draws alike wherever it is computed."""
    found = []
    for part in parts:
        torch.manual_seed(part.start)
        loss, size, _ = losses.masked_lm(model, batch(part), 1)
        (loss * share).backward()
        found.append(size)
    return found


PARTS = [slice(0, 2), slice(2, 4)]


def two_processes() -> None:
    """What each of two processes runs: its half, gathered, clipped, and all that is saved loaded again."""
    from torch import distributed
    from torch.nn.parallel import DistributedDataParallel

    from lazyformer_fairseq.modules.shared_experts import distribute_experts

    distributed.init_process_group("gloo")
    rank = distributed.get_rank()
    torch.manual_seed(1)
    model = MaskedLM(options(), WORDS).double()
    before = copy.deepcopy(model.state_dict())
    shared = distribute_experts(model)
    assert sum("experts" in name for name in shared.own) == 2 * 4 == len(model.state_dict()) - len(before) + 16
    parallel = DistributedDataParallel(model, find_unused_parameters=True)  # there are heads
    optimizer = torch.optim.Adam(weights := list(model.parameters()))
    train(parallel, PARTS[rank : rank + 1], 1.0)
    everywhere = [each.grad.norm() for each in weights if each.grad is not None and not hasattr(each, "expert")]
    norm = shared.norm(torch.stack(everywhere).norm(), weights)
    gradients = shared.whole_weights({name: weight.grad for name, weight in model.named_parameters()})
    optimizer.step()
    groups = optimizer.param_groups
    state = {"model": shared.whole_weights(model.state_dict()), "gradients": gradients, "norm": norm}
    state["optimizer"] = shared.whole_optimizer(optimizer.state_dict(), groups, weights)
    model.eval()
    state["features"] = model(batch()["net_input"]["src_tokens"])[0].detach()
    if rank == 0:
        torch.save(state, sys.argv[1])
    distributed.barrier()
    saved = torch.load(sys.argv[1])
    again = {name: weight.clone() for name, weight in model.state_dict().items()}
    moments = copy.deepcopy(optimizer.state_dict())
    model.load_state_dict(shared.own_weights({name: value.zero_() for name, value in before.items()}))
    model.load_state_dict(shared.own_weights(saved["model"]))
    optimizer.load_state_dict(shared.own_optimizer(saved["optimizer"], groups, weights))
    assert all(torch.equal(weight, again[name]) for name, weight in model.state_dict().items())
    for number, state in optimizer.state_dict()["state"].items():
        assert torch.equal(state["exp_avg"], moments["state"][number]["exp_avg"])
    distributed.barrier()
    distributed.destroy_process_group()


def test_two_processes_are_one(tmp_path, free_port, warm_python):
    paths = {"PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests'}", "MASTER_ADDR": "127.0.0.1"}
    common = {**os.environ, **paths, "OMP_NUM_THREADS": "1", "MASTER_PORT": str(free_port), "WORLD_SIZE": "2"}
    command = [warm_python / "python", __file__, tmp_path / "two"]
    runs = [
        subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env={**common, "RANK": str(rank)})
        for rank in (0, 1)
    ]
    said = [run.communicate()[1] for run in runs]
    assert [run.returncode for run in runs] == [0, 0], "\n".join(said)
    two = torch.load(tmp_path / "two")
    torch.manual_seed(1)
    model = MaskedLM(options(), WORDS).double()
    train(model, PARTS, 0.5)
    for name, weight in model.named_parameters():
        if weight.grad is not None:
            assert_alike(two["gradients"][name], weight.grad)
    gradients = [each.grad for each in model.parameters() if each.grad is not None]
    torch.testing.assert_close(two["norm"], torch.stack([each.norm() for each in gradients]).norm().float())
    optimizer = torch.optim.Adam(model.parameters())
    optimizer.step()
    state = optimizer.state_dict()
    assert two["optimizer"]["param_groups"] == state["param_groups"]
    assert two["optimizer"]["state"].keys() == state["state"].keys()
    for number, moments in state["state"].items():
        assert_alike(two["optimizer"]["state"][number]["exp_avg"], moments["exp_avg"])
    assert list(two["model"]) == list(model.state_dict())
    model.load_state_dict(two["model"])  # of two in one
    assert_alike(two["features"], model.eval()(batch()["net_input"]["src_tokens"])[0])


if __name__ == "__main__":
    two_processes()
