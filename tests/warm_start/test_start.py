"""What a warm start keeps exactly, what it starts anew, and what it refuses."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from local_mean import LOCAL_MEAN
from trained_encoders import POSITIONS, WIDTH, changed, largest_difference, tokens, trained

from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.patterns.grammar import plan
from lazyformer_fairseq.patterns.kinds import registered
from lazyformer_fairseq.warm_start.start import SUBLAYERS, start_from

EXACT = 1e-9
sublayers = st.sampled_from(
    ["s", "f", "l", "k", "-", "s[window=2]", "s[window=2,dilation=2]", "s[synthesizer=dense]", "s[persistent=2]"]
)


def is_pattern(text):
    """A ``k`` cannot read from every kind of attention."""
    try:
        return bool(plan(text))
    except UserError:
        return False


patterns = st.lists(sublayers, max_size=4).map(lambda rest: "".join(["s", *rest, "sf"])).filter(is_pattern)


def without_queries(old):
    """All scores of its ``s`` are equal, whatever the input is."""
    zeros = {}
    for place, planned in enumerate(old.plan):
        if planned.kind.letter == "s":
            for kind in ("weight", "bias"):
                weight = old.weights[f"{SUBLAYERS}{place}.inner.qkv_proj.{kind}"].clone()
                weight[: 2 * WIDTH] = 0
                zeros[f"{place}.inner.qkv_proj.{kind}"] = weight
    return changed(old, **zeros)


@settings(max_examples=15)
@given(patterns, st.booleans())
def test_a_pattern_that_stays_keeps_every_weight(pattern, normalize_before):
    old = trained(pattern, relative_position_buckets=0, encoder_normalize_before=normalize_before)
    start = start_from(old, {"sublayer_pattern": pattern})
    assert start.new.weights.keys() == old.weights.keys()
    assert all(torch.equal(start.new.weights[name], weight) for name, weight in old.weights.items())
    assert not start.record["left_out"] and not any(each["new"] for each in start.record["sublayers"])


@settings(max_examples=6)
@given(patterns, st.integers(25, 60))
def test_wider_feed_forwards_compute_the_same(pattern, width):
    old = trained(pattern, relative_position_buckets=0)
    start = start_from(old, {"encoder_ffn_embed_dim": width})
    assert largest_difference(old, start, tokens()) < EXACT
    assert start.record["changed_options"] == {"encoder_ffn_embed_dim": [24, width]}
    fresh = start.new.weights[f"{SUBLAYERS}{len(old.plan) - 1}.inner.fc1.weight"][24:]
    assert fresh.abs().max() > 0  # else they would never learn


def test_more_positions_repeat_the_old_ones():
    old = trained("(sf)x2")
    start = start_from(old, {"max_positions": 2 * POSITIONS + 1})
    assert largest_difference(old, start, tokens()) < EXACT
    table = start.new.weights["encoder.sentence_encoder.embed_positions.weight"]
    assert torch.equal(table[POSITIONS : 2 * POSITIONS], table[:POSITIONS]) and table.size(0) == 2 * POSITIONS + 1


@pytest.mark.parametrize("normalize_before", [False, True])
@pytest.mark.parametrize("pattern", ["M2x2", "M4", "sflfsfsf"])
def test_an_l_is_exact_where_distributions_do_not_depend_on_the_input(pattern, normalize_before):
    old = without_queries(trained("(sf)x4", encoder_normalize_before=normalize_before))
    start = start_from(old, {"sublayer_pattern": pattern})
    assert largest_difference(old, start, tokens()) < EXACT
    lazy = next(each for each in start.record["sublayers"] if each["sublayer"] == "l")
    assert (lazy["was"], lazy["kept"], lazy["dropped"]) == ("s", ["v", "out", "norm"], ["q", "k"])


def test_an_l_that_becomes_an_s_borrows_queries_and_keys_of_the_one_it_read():
    old = without_queries(trained("M2x2"))
    start = start_from(old, {"sublayer_pattern": "(sf)x4"})
    assert largest_difference(old, start, tokens()) < EXACT
    assert start.record["sublayers"][2]["borrowed"] == ["q", "k"]
    own, read = (start.new.weights[f"{SUBLAYERS}{place}.inner.qkv_proj.weight"] for place in (2, 0))
    assert torch.equal(own[: 2 * WIDTH], read[: 2 * WIDTH]) and not torch.equal(own, read)


def test_a_k_keeps_its_queries_and_an_s_again_borrows_keys_and_values():
    old = trained("(sf)x2")
    there = start_from(old, {"sublayer_pattern": "sfkf"})
    assert there.record["sublayers"][2]["dropped"] == ["k", "v"]
    back = start_from(there.new, {"sublayer_pattern": "(sf)x2"})
    weight = back.new.weights[f"{SUBLAYERS}2.inner.qkv_proj.weight"]
    assert torch.equal(weight[:WIDTH], old.weights[f"{SUBLAYERS}2.inner.qkv_proj.weight"][:WIDTH])
    assert torch.equal(weight[WIDTH:], old.weights[f"{SUBLAYERS}0.inner.qkv_proj.weight"][WIDTH:])


@pytest.mark.parametrize(
    ("pattern", "is_same"),
    [
        (f"(s[window={POSITIONS}] f)x2", True),  # sees all
        ("(s[window=2] f)x2", False),
        (f"(s[strided={POSITIONS}] f)x2", True),
    ],
)
def test_an_s_that_sees_less_keeps_queries_keys_and_values(pattern, is_same):
    old = trained("(sf)x2")
    start = start_from(old, {"sublayer_pattern": pattern})
    assert (largest_difference(old, start, tokens()) < EXACT) is is_same
    assert start.record["sublayers"][0]["kept"] == ["q", "k", "v", "out", "norm"]


def test_projections_of_global_tokens_start_as_copies():
    old = trained("(sf)x2")
    start = start_from(old, {"sublayer_pattern": f"(s[window={POSITIONS},global=1] f)x2"})
    assert largest_difference(old, start, tokens()) < EXACT
    assert start.record["sublayers"][0]["new"] == []


def test_what_a_kind_has_beyond_an_s_starts_fresh_and_a_seed_decides():
    old = trained("(sf)x2")
    changes = {"sublayer_pattern": "(s[synthesizer=random+dot] f)x2"}
    one, same, other = (start_from(old, changes, seed=seed) for seed in (1, 1, 2))
    random = f"{SUBLAYERS}0.inner.choices.synthesizer.random_NLL"
    assert torch.equal(one.new.weights[random], same.new.weights[random])
    assert not torch.equal(one.new.weights[random], other.new.weights[random])
    assert one.record["sublayers"][0]["new"] == [
        "inner.choices.synthesizer.mixture",
        "inner.choices.synthesizer.random_NLL",
    ]


def test_parts_that_two_kinds_of_attention_share_are_not_mixed_up():
    """Both have two parts in one matrix: queries and values here, keys and values there."""
    old = trained("s[synthesizer=dense]f", relative_position_buckets=0)
    start = start_from(old, {"sublayer_pattern": "s[buckets=4]f"})
    before, after = (each.weights[f"{SUBLAYERS}0.inner.qkv_proj.weight"] for each in (old, start.new))
    assert torch.equal(after[WIDTH:], before[WIDTH:]) and not torch.equal(after[:WIDTH], before[:WIDTH])
    assert "inner.qkv_proj.weight" in start.record["sublayers"][0]["new"]


def test_a_matrix_that_all_layers_share_stays_one():
    old = trained("(s[linformer=3,share=layers] f)x2", relative_position_buckets=0)
    start = start_from(old, {"sublayer_pattern": "(s[linformer=3,share=layers] f)x3"}, ["-", "-", "0", "1", "2", "3"])
    names = [name for name in start.new.weights if name.endswith("key_projection")]
    assert len(names) == 3 and len({start.new.weights[name].data_ptr() for name in names}) == 1


def test_new_sublayers_add_nothing_in_a_pre_norm_model():
    old = trained("(sf)x2", encoder_normalize_before=True)
    start = start_from(old, {"sublayer_pattern": "(sf)x4 lf k -"})
    assert largest_difference(old, start, tokens()) < EXACT


def test_the_head_of_a_fine_tuned_model_comes_along():
    old = trained("(sf)x2")
    head = {"classification_heads.cola.out_proj.weight": torch.ones(2, WIDTH)}
    start = start_from(replace(old, weights={**old.weights, **head}), {"sublayer_pattern": "M2"})
    assert torch.equal(*(each["classification_heads.cola.out_proj.weight"] for each in (start.new.weights, head)))


def test_weights_of_the_old_model_stay_as_they_are():
    old = trained("(sf)x2")
    before = {name: weight.clone() for name, weight in old.weights.items()}
    start = start_from(old, {"sublayer_pattern": "sff lf", "encoder_ffn_embed_dim": 30})
    for weight in start.new.weights.values():
        weight.zero_()
    assert all(torch.equal(old.weights[name], weight) for name, weight in before.items())


@pytest.mark.parametrize(
    ("pattern", "changes", "message"),
    [
        ("sf", {"encoder_ffn_embed_dim": 23}, "--encoder-ffn-embed-dim 23: the old model's is 24, and nothing says"),
        ("sf", {"max_positions": 11}, "--max-positions 11: the old model has 12; give 12 or more"),
        ("sf", {"sublayer_pattern": "lf"}, "this l has no s below it"),
        ("sf", {"sublayer_pattern": "s[linformer=2]f"}, "give --relative-position-buckets 0"),
        ("s[synthesizer=random]f", {"max_positions": 20}, "it has a part for each position"),
    ],
)
def test_what_is_refused(pattern, changes, message):
    with pytest.raises(UserError, match=message):
        start_from(trained(pattern), changes)


def test_a_new_kind_that_cannot_start_without_effect_is_refused():
    with registered(LOCAL_MEAN):
        with pytest.raises(UserError, match=r"new sublayer 1 \(m\) has no old one to start from"):
            start_from(trained("sf"), {"sublayer_pattern": "smf"})
        old = trained("smf")
        assert largest_difference(old, start_from(old, {}), tokens()) < EXACT


def test_gradients_reach_what_starts_at_zero():
    start = start_from(trained("(sf)x2"), {"sublayer_pattern": "(sff)x2", "encoder_ffn_embed_dim": 30})
    model = start.new.build()
    model(tokens())[0].square().sum().backward()
    for place in (1, 2):
        assert model.encoder.sentence_encoder.sublayers[place].inner.fc2.weight.grad.abs().max() > 0
