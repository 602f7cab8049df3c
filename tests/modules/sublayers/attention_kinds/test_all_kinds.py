"""What holds for every kind of attention: each row of the table goes through all of it.

Whether a kind computes what its paper says is tested in the file of its own.
"""

from itertools import combinations

import pytest
import torch
from every_kind import (
    CASES,
    EXAMPLES,
    HEADS,
    TOKENS,
    WIDTH,
    WORDS,
    assert_alike,
    build,
    examples,
    of_each_kind,
    of_encoders,
    rows,
    run,
    tokens,
)
from torch.nn.attention import flex_attention as torchs_flex
from torch.utils.flop_counter import FlopCounterMode

from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.measure.costs.flops import count_flops, count_parameters, sublayer_flops
from lazyformer_fairseq.measure.pattern.look import build_network, look
from lazyformer_fairseq.modules.attention import counted
from lazyformer_fairseq.modules.attention.choice import back_ends_of
from lazyformer_fairseq.modules.networks.adaptive_softmax import AdaptiveSoftmax
from lazyformer_fairseq.modules.networks.heads import MaskedLMHead
from lazyformer_fairseq.modules.sublayers.attention_variant import variant_classes
from lazyformer_fairseq.patterns.attention_kinds import ATTENTION_KINDS
from lazyformer_fairseq.patterns.grammar import plan, read_sublayer
from lazyformer_fairseq.patterns.kinds import CAUSAL, DISTRIBUTION, ENCODER


def features_of(s: str) -> set[str]:
    """What it puts into scores; nothing where several attentions make one, as with global tokens."""
    values = read_sublayer(s).values
    several = values.get("global") or values.get("span")  # formulas of a span are those of the longest possible
    return set() if several else set().union(*(choice.features(values) for choice in variant_classes(values)))


def test_every_row_has_an_example():
    assert set(EXAMPLES) == {row.name for row in ATTENTION_KINDS}


@of_each_kind
def test_parameters_by_formula_are_those_of_a_built_network(direction, s):
    pattern = f"{s} f l l {s} l"
    network = build(direction, pattern)
    of_head = MaskedLMHead(WIDTH, network.embed_tokens) if direction == ENCODER else AdaptiveSoftmax(network.embedding)
    built = sum(weight.numel() for weight in torch.nn.ModuleList([network, of_head]).parameters())
    assert count_parameters(pattern, network.sizes) == built


@of_each_kind
def test_counted_flops_are_those_that_torch_sees(direction, s, monkeypatch):
    """But for a mask: ``eager`` computes what is out of it too."""
    monkeypatch.setattr(counted, "count_pairs", lambda mask, time, keys, causal: HEADS * time * keys)
    sublayer_flops.cache_clear()
    network = build(direction, f"{s} f l")
    with FlopCounterMode(display=False) as counter:
        run(network, tokens())
    found = count_flops(f"{s} f l", network.sizes, TOKENS, batch=2, predicted=0)
    sublayer_flops.cache_clear()
    # Under a mask positions count with the pairs; eager has a distance more, the future's.
    is_masked = direction == CAUSAL and s.startswith(("s[window", "s[strided", "s[fixed"))
    assert found + is_masked * 2 * 2 * TOKENS * WIDTH == counter.get_total_flops()


@pytest.mark.parametrize(
    ("direction", "s"),
    [case for case in CASES if "mask" in features_of(case.values[1])],
)
def test_a_masks_products_are_those_of_the_pairs_that_it_shows(direction, s):
    planned, *_ = plan(s, direction)
    narrow = build_network(s, direction, HEADS, TOKENS)
    (seen,) = look(narrow, TOKENS)
    pairs = sum(len(heads) * int((weights > 0).sum()) for heads, weights in seen.by_heads)
    flops = sublayer_flops(planned, narrow.sizes, TOKENS)
    assert flops.scores == flops.values == 2 * pairs * narrow.embed_dim // HEADS


def assert_an_l_reuses_all(direction: str, s: str) -> None:
    """An ``l`` with the values of the ``s`` puts out what the ``s`` does."""
    network = build(direction, f"{s} l")
    attention, lazy = (sublayer.inner for sublayer in network.sublayers)
    with torch.no_grad():
        source = next(
            getattr(attention, name) for name in ("qkv_proj", "kv_proj", "v_proj") if hasattr(attention, name)
        )
        lazy.v_proj.weight.copy_(source.weight[-WIDTH:])
        if lazy.v_proj.bias is not None:  # Linformer adds an s's after its projection, as the published code does
            lazy.v_proj.bias.zero_()
            source.bias[-WIDTH:].zero_()
        lazy.out_proj.load_state_dict(attention.out_proj.state_dict())
        lazy.value_makers.load_state_dict(attention.value_makers.state_dict())
    x_BTC = torch.randn(2, TOKENS, WIDTH, dtype=torch.float64)
    shared = network.context(x_BTC)
    given, handed_on = attention(x_BTC, {}, shared)
    reused, _ = lazy(x_BTC, handed_on, shared)
    assert handed_on.keys() == {DISTRIBUTION}
    assert_alike(reused, given)


@of_each_kind
def test_an_l_with_the_values_of_the_s_puts_out_what_the_s_does(direction, s):
    assert_an_l_reuses_all(direction, s)


@of_encoders
def test_padding_on_the_right_changes_nothing(s):
    network = build(ENCODER, f"{s} f l")
    alone = tokens(time=TOKENS - 4)
    padded = torch.cat([alone, torch.ones(2, 4, dtype=torch.long)], 1)
    assert_alike(run(network, padded, padded.eq(1))[:, : TOKENS - 4], run(network, alone))


@pytest.mark.parametrize("where", ["right", "left", "holes"])
@of_encoders
def test_what_stands_at_padding_is_not_looked_at(s, where):
    is_padding = torch.zeros(2, TOKENS, dtype=torch.bool)
    places = {"right": slice(-3, None), "left": slice(0, 3), "holes": slice(2, None, 3)}
    is_padding[0, places[where]] = True
    text = tokens()
    other = text.clone()
    other[is_padding] = (text[is_padding] + 3) % WORDS
    network = build(ENCODER, f"{s} f l {s} l")
    assert_alike(run(network, text, is_padding)[~is_padding], run(network, other, is_padding)[~is_padding])


@pytest.mark.parametrize("s", [case.values[1] for case in CASES if case.values[0] == CAUSAL])
def test_the_future_is_not_seen(s):
    network = build(CAUSAL, f"{s} f l {s} l")
    text = tokens()
    other = text.clone()
    other[:, 7] = (text[:, 7] + 1) % WORDS
    assert_alike(run(network, text)[:, :7], run(network, other)[:, :7])
    assert not torch.equal(run(network, text)[:, 7:], run(network, other)[:, 7:])


@of_each_kind
def test_it_works_in_half_precision_and_all_weights_learn(direction, s):
    network = build(direction, f"{s} f l {s} l").to(torch.bfloat16).train()
    features = run(network, tokens())
    assert features.dtype == torch.bfloat16 and features.isfinite().all()
    features.float().square().sum().backward()
    unread = {name for name, weight in network.named_parameters() if weight.grad is None}
    assert {name for name in unread if name.startswith("sublayers")} == set()
    assert all(weight.grad.isfinite().all() for weight in network.parameters() if weight.grad is not None)


@of_each_kind
def test_attention_dropout_thins_out_or_is_refused(direction, s):
    try:
        network = build(direction, f"{s} l", attention_dropout=0.5, attention_backend="auto")
    except UserError as error:
        assert "dropout" in str(error)
        return
    assert_alike(run(network, tokens()), run(build(direction, f"{s} l"), tokens()))
    network.train()
    one, other = (network(tokens())[0] for _ in range(2))
    assert one.isfinite().all() and not torch.equal(one, other)


@of_encoders
def test_t5s_bias_counts_or_is_refused(s):
    try:
        network = build(ENCODER, f"{s} l", relative_position_buckets=4)
    except UserError as error:
        assert "--relative-position-buckets" in str(error)
        return
    before = run(network, tokens())
    with torch.no_grad():
        network.relative_position_bias.table.normal_()
    after = run(network, tokens())
    assert not torch.equal(after, before)
    after.square().sum().backward()
    assert network.relative_position_bias.table.grad.abs().sum() > 0


@of_each_kind
def test_flex_computes_the_same_or_refuses(direction, s, monkeypatch):
    """Forward: on a processor torch computes it unfused, and without gradients."""
    monkeypatch.setattr(torchs_flex, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True, raising=False)
    try:
        other = build(direction, f"{s} f l {s}", attention_backend="flex")
    except UserError as error:
        assert "--attention-backend flex" in str(error)
        return
    with torch.no_grad():
        found = run(other, tokens())
    torch.testing.assert_close(found, run(build(direction, f"{s} f l {s}"), tokens()), atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("back_end", [name for name in back_ends_of("cpu") if name != "eager"])
@of_each_kind
def test_every_back_end_computes_the_same_or_refuses(direction, s, back_end):
    pattern = f"{s} f l {s}"
    try:
        other = build(direction, pattern, attention_backend=back_end)
    except UserError as error:
        assert f"--attention-backend {back_end}" in str(error)
        return
    results = []
    for network in (build(direction, pattern), other):
        features = run(network, tokens())
        features.sin().sum().backward()
        results.append([features, *(weight.grad for weight in network.parameters() if weight.grad is not None)])
    for one, same in zip(*results, strict=True):
        torch.testing.assert_close(same, one, atol=1e-6, rtol=1e-6)  # a learned entmax is found by bisection


PAIRS = [
    (direction, *pair)
    for direction in (ENCODER, CAUSAL)
    for pair in combinations([examples(row, direction)[0] for row in rows(direction)], 2)
]


@pytest.mark.parametrize(("direction", "one", "other"), PAIRS)
def test_two_of_them_combine_or_are_refused(direction, one, other):
    pattern = f"s[{one},{other}] f l"
    try:
        plan(pattern, direction)
    except UserError as error:
        *_, shown, caret = str(error).splitlines()
        assert "s[" in shown and caret.strip() == "^"
        return
    features = run(build(direction, pattern), tokens())
    assert features.isfinite().all()
    alone = [run(build(direction, f"s[{settings}] f l"), tokens()) for settings in (one, other)]
    assert not any(torch.equal(features, each) for each in alone)
    assert_an_l_reuses_all(direction, f"s[{one},{other}]")
