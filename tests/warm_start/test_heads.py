"""Heads are put where they belong, on distributions that are known."""

from itertools import permutations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from trained_encoders import HEADS, batches, changed, largest_difference, tokens, trained

from lazyformer_fairseq.warm_start.heads import Met, match_heads, squared_moves, start_with_matched_heads
from lazyformer_fairseq.warm_start.start import SUBLAYERS, start_from

NOTHING = "inner.out_proj."


def twins(order, pattern="(sf)x2"):
    """The upper ``s`` has the heads of the lower one in another order, on the same input: what is between adds nothing.

    Head n of the upper one is head order[n] of the lower. LayerNorms have no weights of their own.
    """
    old = trained(pattern, relative_position_buckets=0)
    heads = old.weights[f"{SUBLAYERS}0.inner.qkv_proj.weight"].unflatten(0, (3, HEADS, -1))
    biases = old.weights[f"{SUBLAYERS}0.inner.qkv_proj.bias"].unflatten(0, (3, HEADS, -1))
    weights = {
        "2.inner.qkv_proj.weight": heads[:, list(order)].flatten(0, 2),
        "2.inner.qkv_proj.bias": biases[:, list(order)].flatten(0, 2),
    }
    for name, weight in old.weights.items():
        place = name.removeprefix(SUBLAYERS)
        if place.startswith(("0.inner.out_proj", "1.inner.fc2")):
            weights[place] = torch.zeros_like(weight)
        elif place.startswith(("0.layer_norm", "1.layer_norm")):
            weights[place] = torch.full_like(weight, float(place.endswith("weight")))
    old = changed(old, **weights)
    for kind in ("weight", "bias"):
        embedded = f"encoder.sentence_encoder.embedding_layer_norm.{kind}"
        old.weights[embedded] = torch.full_like(old.weights[embedded], float(kind == "weight"))
    return old


@settings(max_examples=6)
@given(st.permutations(range(HEADS)))
def test_a_planted_order_is_found_and_makes_the_change_exact(order):
    old = twins(order)
    start = start_with_matched_heads(old, {"sublayer_pattern": "M2"}, batches())
    assert start.record["sublayers"][2]["head_order"] == [order.index(head) for head in range(HEADS)]
    distance = start.record["sublayers"][2]["distance"]
    assert distance["matched"] < 1e-4 < distance["plain"] or order == sorted(order)
    assert largest_difference(old, start, tokens()) < 1e-3
    plain = start_from(old, {"sublayer_pattern": "M2"})
    assert order == sorted(order) or largest_difference(old, plain, tokens()) > 0.01


def test_moves_are_those_of_their_definition():
    generator = torch.Generator().manual_seed(1)
    read, own = (torch.rand(2, 3, 4, 4, generator=generator).softmax(-1).double() for _ in range(2))
    values, out = (
        torch.rand(2, 3, 4, 2, generator=generator).double(),
        torch.rand(3, 6, 2, generator=generator).double(),
    )
    is_text = torch.tensor([[True] * 4, [True, True, False, False]])
    found = squared_moves(Met(read, own, values, out), is_text)
    for a in range(3):
        for b in range(3):
            moved = [out[b] @ (values[i, b].T @ (read[i, a, t] - own[i, b, t])) for i in range(2) for t in range(4)]
            by_hand = sum(float(each @ each) for each, counts in zip(moved, is_text.flatten(), strict=True) if counts)
            assert float(found[a, b]) == pytest.approx(by_hand)


@pytest.mark.parametrize("normalize_before", [False, True])
def test_no_order_of_the_heads_is_nearer(normalize_before):
    """What the upper sublayer's heads add is read off its output, each head's alone in turn."""
    old = trained("(sf)x2", encoder_normalize_before=normalize_before)
    match = match_heads(old, start_from(old, {"sublayer_pattern": "M2"}), batches())[2]
    encoder = old.build().encoder.sentence_encoder
    encoder.lazy_backend = "eager"
    kept = {}
    for place in (0, 2):
        encoder.sublayers[place].inner.register_forward_hook(
            lambda inner, args, out, place=place: kept.update({place: (inner, args[0], out[1]["distribution"])})
        )
    totals, length = dict.fromkeys(permutations(range(HEADS)), 0.0), 0.0
    for batch in batches():
        with torch.no_grad():
            encoder(batch["net_input"]["src_tokens"])
            inner, x, own = kept[2]
            values = inner.qkv_proj(x).chunk(3, -1)[2].unflatten(-1, (HEADS, -1)).transpose(1, 2)
            read = kept[0][2].probabilities
            for head in range(HEADS):
                alone = torch.zeros_like(values)
                alone[:, head] = values[:, head]
                added = [
                    inner.out_proj((each @ alone).transpose(1, 2).flatten(2)) - inner.out_proj.bias
                    for each in (own.probabilities, *(read[:, [other] * HEADS] for other in range(HEADS)))
                ]
                length += float(added[0].square().sum())
                moved = [float((each - added[0]).square().sum()) for each in added[1:]]
                for order in totals:
                    totals[order] += moved[order.index(head)]
    assert min(totals, key=totals.get) == match.order
    assert match.matched == pytest.approx((totals[match.order] / length) ** 0.5, rel=1e-4)
    assert match.plain == pytest.approx((totals[tuple(range(HEADS))] / length) ** 0.5, rel=1e-4)


@pytest.mark.parametrize(
    ("old", "new", "moved"),
    [
        ("(sf)x3", "M3", {2, 4}),
        ("(sf)x3", "sflfsf", {2}),
        ("M2x2", "M2x2", set()),  # nothing that an l reads changes
        ("M2x2", "M4", {4, 6}),
        ("M2x2", "(sf)x4", set()),  # an s reads nothing
        ("M2", "s[window=2]flf", {2}),  # it reads less than it did
        ("sfkf", "M2", set()),  # a k hands no distribution on
        ("(sf)x2", "sfkf", {2}),
        ("(sf)x2", "s[persistent=2]flf", set()),  # no distribution over tokens alone
        ("(sf)x2", "s[buckets=4]flf", set()),
        ("(sf)x2", "s[linformer=3]flf", {2}),
    ],
)
def test_which_sublayers_are_matched(old, new, moved):
    old = trained(old, relative_position_buckets=0)
    start = start_from(old, {"sublayer_pattern": new})
    assert set(match_heads(old, start, batches())) == moved


def test_the_settings_of_what_is_read_count():
    """A head that looks near is nearest to one that is made to."""
    old = trained("(sf)x2", relative_position_buckets=8)
    plain, near = (start_from(old, {"sublayer_pattern": p}) for p in ("sflf", "s[window=1]flf"))
    one, other = (match_heads(old, start, batches())[2] for start in (plain, near))
    assert one.plain != other.plain


def test_padding_does_not_count():
    old = trained("(sf)x2")
    start = start_from(old, {"sublayer_pattern": "M2"})
    words = tokens(batch=2, time=8)
    padded = torch.cat([words, torch.full((2, 4), old.dictionary.pad())], dim=1)
    one, other = (match_heads(old, start, [{"net_input": {"src_tokens": each}}])[2] for each in (words, padded))
    assert one.order == other.order and one.plain == pytest.approx(other.plain, abs=1e-6)


def test_global_tokens_that_the_caller_marks():
    old = trained("(sf)x2", relative_position_buckets=0)
    by_number, by_hand = (
        match_heads(old, start_from(old, {"sublayer_pattern": f"s[window=2,global={tokens}]flf"}), batches())[2]
        for tokens in ("1", "given")
    )
    assert by_number == by_hand
