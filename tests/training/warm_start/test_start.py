"""What a warm start keeps exactly, what it starts anew, and what it refuses; LayerNorms around what went or came."""

from dataclasses import replace
from itertools import combinations, product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from local_mean import LOCAL_MEAN, registered
from trained_encoders import POSITIONS, WIDTH, changed, largest_difference, logits, tokens, trained

from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.patterns.grammar import plan
from lazyformer_fairseq.training.warm_start import start as start_module
from lazyformer_fairseq.training.warm_start.start import SUBLAYERS, Trained, WarmStart, align, likeness, start_from

EXACT = 1e-9
PRE_NORM = {"encoder_normalize_before": True}
QKV = f"{SUBLAYERS}{{}}.inner.qkv_proj.weight"
sublayers = st.sampled_from(
    ["s", "f", "l", "k", "-", "s[window=2]", "s[window=2,dilation=2]", "s[synthesizer=dense]", "s[persistent=2]"]
)


def is_pattern(text):
    """A ``k`` cannot read from every attention variant."""
    try:
        return bool(plan(text))
    except UserError:
        return False


patterns = st.lists(sublayers, max_size=4).map(lambda rest: "".join(["s", *rest, "sf"])).filter(is_pattern)


def started(old: Trained, pattern: str, *origins: str, **changes) -> WarmStart:
    return start_from(old, {"sublayer_pattern": pattern, **changes}, *([origins] if origins else []))


def without_queries(old):
    """All scores of its ``s`` are equal, whatever the input is."""
    zeros = {}
    for place, planned in enumerate(old.plan):
        for name in (
            f"{place}.inner.qkv_proj.{parameter}" for parameter in ("weight", "bias") if planned.kind.letter == "s"
        ):
            zeros[name] = old.weights[f"{SUBLAYERS}{name}"].clone()
            zeros[name][: 2 * WIDTH] = 0
    return changed(old, **zeros)


@settings(max_examples=15)
@given(patterns, st.booleans())
def test_a_pattern_that_stays_keeps_every_weight(pattern, normalize_before):
    old = trained(pattern, relative_position_buckets=0, encoder_normalize_before=normalize_before)
    before = {name: weight.clone() for name, weight in old.weights.items()}
    start = started(old, pattern)
    assert start.new.weights.keys() == before.keys()
    assert all(torch.equal(start.new.weights[name], weight) for name, weight in before.items())
    assert not start.record["left_out"] and not any(each["new"] for each in start.record["sublayers"])
    for weight in start.new.weights.values():
        weight.zero_()  # of the old model nothing changes
    assert all(torch.equal(old.weights[name], weight) for name, weight in before.items())


MODERN = {"norm": "rms", "no_linear_bias": True, "no_norm_bias": True}


@settings(max_examples=6)
@given(patterns.map(lambda pattern: f"{pattern}f[gate=silu]f"), st.integers(25, 60), st.sampled_from([{}, MODERN]))
def test_wider_feed_forwards_compute_the_same(pattern, width, options):
    old = trained(pattern, relative_position_buckets=0, **options)
    start = start_from(old, {"encoder_ffn_embed_dim": width})
    assert largest_difference(old, start, tokens()) < EXACT
    assert start.record["changed_options"] == {"encoder_ffn_embed_dim": [24, width]}
    fresh = start.new.weights[f"{SUBLAYERS}{len(old.plan) - 1}.inner.fc1.weight"][24:]
    assert fresh.abs().max() > 0  # else they would never learn


@pytest.mark.parametrize(
    ("pattern", "options", "is_same"),
    [
        ("(sf)x2", {"max_positions": 2 * POSITIONS + 1}, True),
        (f"(s[window={POSITIONS}] f)x2", {}, True),  # sees all
        (f"(s[window={POSITIONS},global=1] f)x2", {}, True),  # projections of global tokens start as copies
        (f"(s[strided={POSITIONS}] f)x2", {}, True),
        ("(s[window=2] f)x2", {}, False),
        ("(sf)x4 lf k - c r", PRE_NORM, True),  # new sublayers add nothing
    ],
)
def test_what_computes_the_same(pattern, options, is_same):
    old = trained("(sf)x2", **(options if options == PRE_NORM else {}))
    start = started(old, pattern, **options)
    assert (largest_difference(old, start, tokens()) < EXACT) is is_same
    table = start.new.weights["encoder.sentence_encoder.embed_positions.weight"]
    assert torch.equal(table, table[:POSITIONS].repeat(3, 1)[: options.get("max_positions", POSITIONS)])


@pytest.mark.parametrize("normalize_before", [False, True])
@pytest.mark.parametrize("pattern", ["M2x2", "M4", "sflfsfsf"])
def test_an_l_is_exact_where_distributions_do_not_depend_on_the_input_and_the_s_it_becomes_again(
    pattern, normalize_before
):
    old = without_queries(trained("(sf)x4", encoder_normalize_before=normalize_before))
    lazy = started(old, pattern)
    back = started(lazy.new, "(sf)x4")
    assert largest_difference(old, lazy, tokens()) < EXACT and largest_difference(old, back, tokens()) < EXACT
    place = plan(pattern).index(next(each for each in plan(pattern) if each.kind.letter == "l"))
    own, read = (back.new.weights[QKV.format(at)] for at in (place, 0))
    assert back.record["sublayers"][place]["borrowed"] == ["q", "k"]
    assert torch.equal(own[: 2 * WIDTH], read[: 2 * WIDTH]) and not torch.equal(own, read)


def test_a_k_keeps_its_queries_and_an_s_again_borrows_keys_and_values():
    old = trained("(sf)x2")
    back = started(started(old, "sfkf").new, "(sf)x2")
    weight = back.new.weights[QKV.format(2)]
    assert torch.equal(weight[:WIDTH], old.weights[QKV.format(2)][:WIDTH])
    assert torch.equal(weight[WIDTH:], old.weights[QKV.format(0)][WIDTH:])


SYNTHESIZER = "inner.choices.synthesizer"


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("(sf)x2", "sflf", {"was": "s", "kept": ["v", "out", "norm"], "dropped": ["q", "k"]}),
        ("(sf)x2", "sfkf", {"dropped": ["k", "v"]}),
        ("(sf)x2", "sfs[window=2]f", {"kept": ["q", "k", "v", "out", "norm"], "new": []}),
        ("(sf)x2", "sfs[window=2,global=1]f", {"new": []}),
        ("(sf)x2", "sfs[synthesizer=random+dot]f", {"new": [f"{SYNTHESIZER}.mixture", f"{SYNTHESIZER}.random_NLL"]}),
    ],
)
def test_the_record_says_what_became_of_a_sublayer(old, new, said):
    record = started(trained(old, relative_position_buckets=0), new).record["sublayers"][2]
    assert {name: record[name] for name in said} == said


def test_what_a_variant_has_beyond_an_s_starts_fresh_and_a_seed_decides():
    changes = {"sublayer_pattern": "(s[synthesizer=random+dot] f)x2"}
    starts = (start_from(trained("(sf)x2"), changes, seed=seed) for seed in (1, 1, 2))
    one, same, other = (start.new.weights[f"{SUBLAYERS}0.{SYNTHESIZER}.random_NLL"] for start in starts)
    assert torch.equal(one, same) and not torch.equal(one, other)


def test_parts_that_two_attention_variants_share_are_not_mixed_up():
    """Both have two parts in one matrix: queries and values here, keys and values there."""
    old = trained("s[synthesizer=dense]f", relative_position_buckets=0)
    start = started(old, "s[buckets=4]f")
    before, after = (each.weights[QKV.format(0)] for each in (old, start.new))
    assert torch.equal(after[WIDTH:], before[WIDTH:]) and not torch.equal(after[:WIDTH], before[:WIDTH])
    assert "inner.qkv_proj.weight" in start.record["sublayers"][0]["new"]


def test_a_matrix_that_all_layers_share_stays_one():
    old = trained("(s[linformer=3,share=layers] f)x2", relative_position_buckets=0)
    start = started(old, "(s[linformer=3,share=layers] f)x3", *"--0123")
    shared = [weight for name, weight in start.new.weights.items() if name.endswith("key_projection")]
    assert len(shared) == 3 and len({weight.data_ptr() for weight in shared}) == 1


def test_what_cannot_start_without_effect_is_refused():
    with pytest.raises(UserError, match="the shape depends on the number of positions"):
        start_from(trained("s[synthesizer=random]f"), {"max_positions": 20})
    with registered(LOCAL_MEAN):
        with pytest.raises(UserError, match=r"new sublayer 1 \(m\) has no old one to start from"):
            started(trained("sf"), "smf")
        old = trained("smf")
        assert largest_difference(old, start_from(old, {}), tokens()) < EXACT


def test_gradients_reach_what_starts_at_zero():
    start = started(trained("(sf)x2"), "(sff)x2", encoder_ffn_embed_dim=30)
    model = start.new.build()
    model(tokens())[0].square().sum().backward()
    for place in (1, 2):
        assert model.encoder.sentence_encoder.sublayers[place].inner.fc2.weight.grad.abs().max() > 0


# LayerNorms above and below sublayers that went or came


def even(old, *places: int):
    """The same with LayerNorms, of these sublayers and of embeddings, whose output has one mean and one deviation."""
    weights = {}
    for name, scale, shift in (
        *((f"{SUBLAYERS}{place}.layer_norm", 1.7, 0.3) for place in places),
        ("encoder.sentence_encoder.embedding_layer_norm", 0.6, -0.2),
    ):
        weights |= {f"{name}.weight": torch.full((WIDTH,), scale), f"{name}.bias": torch.full((WIDTH,), shift)}
    return replace(old, weights={**old.weights, **weights})


def silent(old, *places: int):
    """The same with sublayers that add nothing."""
    names = [name for name in old.weights for place in places if name.startswith(f"{SUBLAYERS}{place}.inner.")]
    return replace(old, weights={**old.weights, **{name: torch.zeros_like(old.weights[name]) for name in names}})


@pytest.mark.parametrize("pattern", ["s(sf)x2", "sffsf", "sfsffffs f", "ssffsf", "scfsfc"])
def test_a_sublayer_that_comes_changes_nothing_where_norms_are_even(pattern):
    old = even(trained("(sf)x2"), 0, 1, 2, 3)
    assert largest_difference(old, started(old, pattern), tokens()) < 1e-3


@pytest.mark.parametrize(
    ("silenced", "pattern", "origins"),
    [
        ((0,), "fsfsf", "12345"),
        ((1,), "ssfsf", "02345"),
        ((1, 2), "sfsf", "0345"),
        ((5,), "sfsfs", "01234"),
        ((0, 5), "fsfs", "1234"),
        ((2,), "sff fsf", "01-345"),  # one comes where another went
    ],
)
def test_a_silent_sublayer_goes_without_a_trace_where_norms_are_even(silenced, pattern, origins):
    old = silent(even(trained("(sf)x3"), *range(6)), *silenced)
    start = started(old, pattern, *origins)
    assert largest_difference(old, start, tokens()) < 1e-3
    assert start.record["left_out"] == list(silenced)


def test_carrying_norms_is_nearer_than_not_where_they_are_uneven(monkeypatch):
    old = silent(trained("(sf)x3", encoder_embed_dim=64), 2, 3)
    carried = started(old, "(sf)x2", *"0145")
    monkeypatch.setattr(start_module, "carry_norms", lambda *_: {})
    left = started(old, "(sf)x2", *"0145")
    truth = logits(old, tokens())
    near, far = ((logits(each, tokens()) - truth).square().mean() for each in (carried, left))
    assert near < 0.2 * far


def test_a_pre_norm_model_leaves_its_norms_alone():
    old = trained("(sf)x2", **PRE_NORM)
    start = started(old, "sf", *"03")
    for name in (f"{SUBLAYERS}0.layer_norm.{parameter}" for parameter in ("weight", "bias")):
        assert torch.equal(start.new.weights[name], old.weights[name])


# Alignments against all that there are, and those that a reader would draw

short = st.lists(st.sampled_from(["s", "f", "l", "k", "s[window=2]", "-"]), max_size=5)
short = short.map(lambda rest: "".join(["s", *rest]))


def value(pairs, old, new) -> tuple[int, int, float]:
    """What an alignment is judged by, straight from its description."""
    rows, columns = ([at for at, each in enumerate(plan_) if not each.kind.is_identity] for plan_ in (old, new))
    depth = sum(((rows.index(i) + 0.5) / len(rows) - (columns.index(j) + 0.5) / len(columns)) ** 2 for i, j in pairs)
    return len(pairs), sum(likeness(old[i], new[j]) for i, j in pairs), -round(depth, 9)


def all_alignments(old, new):
    for count in range(min(len(old), len(new)) + 1):
        for places in product(*(combinations(range(len(side)), count) for side in (old, new))):
            pairs = list(zip(*places, strict=True))
            if all(likeness(old[i], new[j]) and not old[i].kind.is_identity for i, j in pairs):
                yield pairs


@settings(max_examples=60)
@given(short, short)
def test_no_other_alignment_is_better(one, other):
    old, new = plan(one), plan(other)
    found = [(i, j) for j, i in enumerate(align(old, new)) if i is not None]
    assert found == sorted(found) and all(likeness(old[i], new[j]) for i, j in found)
    assert value(found, old, new) == max(value(pairs, old, new) for pairs in all_alignments(old, new))
