"""What holds for every attention variant: each row of the table goes through all of it.

Whether a variant computes what its paper says is tested in the file of its own.
"""

import shutil
from itertools import combinations, product

import pytest
import torch
import torch._inductor.config
from every_variant import (
    CASES,
    ENCODERS,
    EXAMPLES,
    HEADS,
    ON_A_CPU,
    TOKENS,
    WIDTH,
    WORDS,
    assert_alike,
    build,
    examples,
    of_each_row,
    of_each_variant,
    of_encoders,
    rows,
    run,
    tokens,
)
from helpers import assert_equal_state
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_networks import loud, make_encoder, vectors
from torch._dynamo.utils import counters
from torch.utils.flop_counter import FlopCounterMode

from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.evaluation.costs.flops import count_flops, count_parameters, flops_by_operator
from lazyformer_fairseq.experiments.pattern.look import build_network, find_attended_tokens
from lazyformer_fairseq.modules.attention import counted
from lazyformer_fairseq.modules.compiled import compiled
from lazyformer_fairseq.modules.networks.adaptive_softmax import AdaptiveSoftmax
from lazyformer_fairseq.modules.networks.heads import MaskedLMHead
from lazyformer_fairseq.modules.networks.stream_memory import StreamMemory
from lazyformer_fairseq.patterns.attention_variants import ATTENTION_VARIANTS
from lazyformer_fairseq.patterns.grammar import plan
from lazyformer_fairseq.patterns.kinds import CAUSAL, DISTRIBUTION, ENCODER

MASKED = ("s[window", "s[strided", "s[fixed")


def test_every_row_has_an_example():
    assert set(EXAMPLES) == {row.name for row in ATTENTION_VARIANTS}


@of_each_variant
def test_parameters_by_formula_are_those_of_a_built_network(direction, s):
    pattern = f"{s} f l l {s} l"
    network = build(
        direction, pattern, **({"no_token_positional_embeddings": True} if direction == ENCODER and "rope" in s else {})
    )
    of_head = MaskedLMHead(WIDTH, network.embed_tokens) if direction == ENCODER else AdaptiveSoftmax(network.embedding)
    built = sum(weight.numel() for weight in torch.nn.ModuleList([network, of_head]).parameters())
    assert count_parameters(pattern, network.sizes) == built


@of_each_variant
def test_counted_flops_are_those_that_torch_sees(direction, s, monkeypatch):
    """But for a mask: ``eager`` computes what is out of it too."""
    monkeypatch.setattr(counted, "count_pairs", lambda mask, time, keys, causal: HEADS * time * keys)
    flops_by_operator.cache_clear()
    network = build(direction, f"{s} f l")
    with FlopCounterMode(display=False) as counter:
        run(network, tokens())
    found = count_flops(f"{s} f l", network.sizes, TOKENS, batch=2, predicted=0)
    flops_by_operator.cache_clear()
    # Under a mask positions count with the pairs; eager has a distance more, the future's.
    is_masked = direction == CAUSAL and s.startswith(MASKED) and "rope" not in s
    assert found + is_masked * 2 * 2 * TOKENS * WIDTH == counter.get_total_flops()


@pytest.mark.parametrize(
    ("direction", "s"),
    [case for case in CASES if case.values[1].startswith(MASKED) and "global" not in case.values[1]],
)
def test_a_masks_products_are_those_of_the_pairs_that_it_shows(direction, s):
    planned, *_ = plan(s, direction)
    narrow = build_network(s, direction, HEADS, TOKENS)
    (seen,) = find_attended_tokens(narrow, TOKENS)
    pairs = sum(len(heads) * int((weights > 0).sum()) for heads, weights in seen.by_heads)
    flops = flops_by_operator(planned, narrow.sizes, TOKENS)
    assert flops[counted.COMPARE] == flops[counted.WEIGH] == 2 * pairs * narrow.embed_dim // HEADS


def assert_an_l_reuses_all(direction: str, s: str) -> None:
    """An ``l`` with the values of the ``s`` puts out what the ``s`` does."""
    network = build(direction, f"{s} l")
    attention, lazy = (sublayer.inner for sublayer in network.sublayers)
    with torch.no_grad():
        source = attention.qkv_proj if direction == ENCODER else attention.kv_proj
        lazy.v_proj.weight.copy_(source.weight[-WIDTH:])
        if lazy.v_proj.bias is not None:
            source.bias[-WIDTH:].normal_()
            lazy.v_proj.bias.copy_(source.bias[-WIDTH:])
        lazy.out_proj.load_state_dict(attention.out_proj.state_dict())
        lazy.value_transforms.load_state_dict(attention.value_transforms.state_dict())
    x_BTC = torch.randn(2, TOKENS, WIDTH, dtype=torch.float64)
    shared = network.context(x_BTC)
    given, handed_on = attention(x_BTC, {}, shared)
    reused, _ = lazy(x_BTC, handed_on, shared)
    assert handed_on.keys() == {DISTRIBUTION}
    assert_alike(reused, given)


@of_each_variant
def test_an_l_with_the_values_of_the_s_puts_out_what_the_s_does(direction, s):
    assert_an_l_reuses_all(direction, s)


@of_each_variant
def test_an_l_is_a_product_with_the_dense_distribution(direction, s):
    network, x_BTC, padding = build(direction, f"{s} l"), torch.randn(2, TOKENS, WIDTH).double(), ()
    hidden = torch.zeros(2, TOKENS, dtype=torch.bool)
    if direction == ENCODER:
        hidden[0, 9:] = True
        padding = (hidden,)
    _, handed_on = network.sublayers[0].inner(x_BTC, {}, network.context(x_BTC, 0, *padding))
    distribution = handed_on[DISTRIBUTION]
    dense = distribution.probabilities
    values = torch.randn(2, HEADS, dense.size(-1), WIDTH // HEADS, dtype=torch.float64)
    assert_alike(distribution.attend((values, values) if "global" in s else values, 0.0), dense @ values)
    assert not dense[..., :TOKENS].amax(1)[~hidden[:, :, None] & hidden[:, None]].any()
    if "linformer" not in s:  # whose rows are of any sum; one of a query that sees nothing is 0
        assert ((dense.sum(-1) - 1).abs() < 1e-9).logical_or(dense.sum(-1) == 0).all()


@of_each_variant
def test_a_k_with_the_queries_of_the_s_is_the_s_or_is_refused(direction, s):
    """Whatever the s attends to and however, over memory and padding too."""
    try:
        plan(f"{s} f k", direction)
    except UserError as error:
        assert f"this k cannot read {s}: " in str(error)
        return
    options = {"mem_len": 4} if direction == CAUSAL and "positions" not in s else {}
    network, memory = loud(build(direction, f"{s} k", **options)), ()
    first, second = (sublayer.inner for sublayer in network.sublayers)
    x_BTC = torch.randn(2, TOKENS, WIDTH, dtype=torch.float64)
    with torch.no_grad():
        second.out_proj.load_state_dict(first.out_proj.state_dict())
        second.query_makers.load_state_dict(first.query_makers.state_dict())
        if direction == ENCODER:
            second.q_proj.weight.copy_(first.qkv_proj.weight[:WIDTH])
            second.q_proj.bias.copy_(first.qkv_proj.bias[:WIDTH])
            shared = network.context(x_BTC, 0, torch.arange(TOKENS) >= torch.tensor([[TOKENS], [7]]))
        else:
            second.q_proj.load_state_dict(first.q_proj.state_dict())
            if first.position_proj is not None:
                second.position_proj.load_state_dict(first.position_proj.state_dict())
            shared, memory = network.context(x_BTC, 3), (torch.randn(2, 3, WIDTH, dtype=torch.float64),)
    y_BTC, below = first(x_BTC, {}, shared, *memory)
    assert_alike(second(x_BTC, below, shared)[0], y_BTC)
    flops = [count_flops(pattern, network.sizes, TOKENS) for pattern in (f"{s} k", s)]
    assert flops[0] > flops[1]


@settings(max_examples=8)
@given(st.lists(st.lists(st.booleans(), min_size=TOKENS, max_size=TOKENS).filter(any), min_size=1, max_size=4))
@pytest.mark.parametrize(
    "pattern",
    [f"{s} f l c {s} l f" for s in ENCODERS] + ["s f l k c[width=4] s l k f", "r r[cell=brc] s l r[cell=mingru] f"],
)
def test_a_texts_features_do_not_depend_on_padding_or_on_its_batch(pattern, is_text):
    """Wherever padding stands, and whatever stands there."""
    network, is_text = build(ENCODER, pattern), torch.tensor(is_text)
    text = tokens(len(is_text))
    found = run(network, text, ~is_text)
    for tokens_T, found_TC, is_text_T in zip(text, found, is_text, strict=True):
        assert_alike(found_TC[is_text_T], run(network, tokens_T[is_text_T][None])[0])


@pytest.mark.parametrize("s", [case.values[1] for case in CASES if case.values[0] == CAUSAL])
def test_the_future_is_not_seen(s):
    network = build(CAUSAL, f"{s} f l {s} l")
    text = tokens()
    other = text.clone()
    other[:, 7] = (text[:, 7] + 1) % WORDS
    assert_alike(run(network, text)[:, :7], run(network, other)[:, :7])
    assert not torch.equal(run(network, text)[:, 7:], run(network, other)[:, 7:])


@pytest.mark.parametrize("precision", ["bfloat16", "float16", "autocast"])
@of_each_row
def test_in_half_precision_outputs_and_gradients_are_near(direction, s, precision):
    """By every back end that computes it. Hashes, which half precision may change, are to be finite alone."""
    is_auto = precision == "autocast"
    narrow = torch.bfloat16 if is_auto else getattr(torch, precision)
    weights = loud(build(direction, f"{s} l f"), 0.3).to(narrow).state_dict()
    expected = None
    for back_end in ON_A_CPU:
        network = build(direction, f"{s} l f", attention_backend=back_end)
        network.load_state_dict(weights)
        try:
            if expected is None:
                expected = with_gradients(network)
            else:
                run(network, tokens())
        except UserError:
            continue
        with torch.autocast("cpu", narrow, enabled=is_auto):
            found = with_gradients(network.to(torch.float32 if is_auto else narrow))
        assert is_auto or found["features"].dtype == narrow
        for name, value in expected.items():
            assert found[name].isfinite().all(), name
            error = (found[name].double() - value).norm()
            assert "buckets" in s or error <= 0.25 * value.norm() + 0.05, (back_end, name)


def with_gradients(network: torch.nn.Module) -> dict[str, torch.Tensor]:
    network.zero_grad()
    features = run(network, tokens())
    features.float().sin().sum().backward()
    learned = {name: weight.grad for name, weight in network.named_parameters()}
    assert not any(name.startswith("sublayers") and grad is None for name, grad in learned.items())  # all learn
    return {"features": features.detach(), **{name: grad.clone() for name, grad in learned.items() if grad is not None}}


@of_each_variant
def test_attention_dropout_thins_out_or_is_refused(direction, s):
    try:
        network = build(direction, f"{s} l", attention_dropout=0.5, attention_backend="auto")
    except UserError as error:
        assert "dropout" in str(error)
        return
    assert_alike(run(network, tokens()), run(build(direction, f"{s} l"), tokens()))
    network.train()
    one, other = (network(tokens(1).expand(2, -1))[0] for _ in range(2))
    assert one.isfinite().all() and not torch.equal(one, other)
    assert not torch.allclose(one[0], one[1])  # sequences have a dropout of their own


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


@pytest.mark.parametrize("back_end", [name for name in ON_A_CPU if name != "eager"])
@of_each_variant
def test_every_back_end_computes_the_same_or_refuses(direction, s, back_end):
    pattern, results = f"{s} f l {s}", []
    for network in (build(direction, pattern, attention_backend=back_end), build(direction, pattern)):
        try:
            features = run(network, tokens())
        except UserError as error:
            assert f"--attention-backend {back_end}" in str(error)
            return
        features.sin().sum().backward()
        results.append([features, *(weight.grad for weight in network.parameters() if weight.grad is not None)])
    torch.testing.assert_close(*results, atol=1e-6, rtol=1e-6)  # a learned entmax is found by bisection


@pytest.mark.parametrize(
    ("direction", "s", "options", "message"),
    [
        (ENCODER, "s[strided=2,heads=split]", {"num_heads": 1}, "heads=split .* this model has only one head"),
        (ENCODER, "s[window=2,dilation=2,dilated_heads=4]", {}, "dilated_heads=4 exceeds the number of heads, 2"),
        (ENCODER, "s[linformer=2]", {"relative_position_buckets": 8}, "linformer=2.*--relative-position-buckets 0"),
        (CAUSAL, "s[window=2,global=1]", {"mem_len": 5}, r"--mem-len 5 .* s\[window=2,global=1\].*--mem-len 0"),
        (
            CAUSAL,
            "s[synthesizer=random]",
            {"mem_len": 3},
            "--mem-len 3 cannot be .*: a synthesizer has .*--mem-len 0",
        ),
        (CAUSAL, "s[positions=absolute]", {"mem_len": 3}, "--mem-len 3 cannot be .*: absolute positions are counted"),
        (CAUSAL, "s[positions=absolute,length=9] s[positions=absolute,length=8]", {}, "length=8.: another .* length=9"),
        (ENCODER, "s[positions=absolute]", {}, r"not for encoders: an encoder already has learned positions"),
    ],
)
def test_networks_that_cannot_have_it_are_refused(direction, s, options, message):
    with pytest.raises(UserError, match=message):
        build(direction, s, **options)


def test_inputs_that_it_cannot_have_are_refused():
    too_long = tokens(time=TOKENS + 1)
    with pytest.raises(ValueError, match="a sequence of 13 tokens exceeds the 12 positions of Linformer"):
        make_encoder("s[linformer=2]", max_positions=12)(vectors(1, 13))
    with pytest.raises(UserError, match="13 tokens, but .* supports only 12"):
        build(CAUSAL, "s[synthesizer=random,length=12]")(too_long)
    with pytest.raises(UserError, match="13 tokens, but this model's position table has length 12"):
        build(CAUSAL, "s[positions=absolute,length=12]")(too_long)
    for s in ("s[window=2,global=1]", "s[synthesizer=random,length=12]"):
        decoder, memory = build(CAUSAL, s), StreamMemory()
        memory.remember([torch.zeros(2, 4, WIDTH)], 4)
        with pytest.raises(UserError, match="a memory of 4 tokens: .* set --mem-len 0"):
            decoder(tokens(), memory)
        with pytest.raises(UserError, match="--mem-len 3"):
            decoder.mem_len = 3


EVERY_PAIR = [
    pytest.param(direction, one, other, marks=() if is_first else pytest.mark.slow)
    for direction in (ENCODER, CAUSAL)
    for row, of_other in combinations(rows(direction), 2)
    for one, other in product(examples(row, direction), examples(of_other, direction))
    for is_first in [(one, other) == (examples(row, direction)[0], examples(of_other, direction)[0])]
]


@pytest.mark.parametrize(("direction", "one", "other"), EVERY_PAIR)
def test_a_pair_keeps_what_both_promise(direction, one, other):
    """Whatever the back end, the padding around a text, and the segments that a stream comes in; or it is refused."""
    both, *alone = (f"s[{settings}] f l s[{settings}]" for settings in (f"{one},{other}", one, other))
    try:
        plan(both, direction)
    except UserError as error:
        *_, shown, caret = str(error).splitlines()
        assert "s[" in shown and caret.strip() == "^"
        return
    network = loud(build(direction, both), 0.3)
    expected = with_gradients(network)
    for pattern in alone:
        assert not torch.equal(expected["features"], run(loud(build(direction, pattern), 0.3), tokens()))
    assert_an_l_reuses_all(direction, f"s[{one},{other}]")
    for back_end in ON_A_CPU:
        network.attention_backend = back_end
        try:
            found = with_gradients(network)
        except UserError as error:
            assert f"--attention-backend {back_end}" in str(error)
            continue
        torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-6)
    network.attention_backend = "eager"
    if direction == ENCODER:
        is_text = torch.tensor([[False] * 3 + [True] * 9, [True] * 7 + [False] * 5])
        found = run(network, tokens(), ~is_text)
        for tokens_T, found_TC, is_text_T in zip(tokens(), found, is_text, strict=True):
            assert_alike(found_TC[is_text_T], run(network, tokens_T[is_text_T][None])[0])
        return
    try:
        network.mem_len = TOKENS
    except UserError as error:
        assert "--mem-len 12 cannot be used with" in str(error)
        return
    memory = StreamMemory()
    assert_alike(torch.cat([run(network, part, memory) for part in tokens().split(5, 1)], 1), run(network, tokens()))


def all_in_one(direction: str) -> str:
    return " ".join(f"s[{examples(row, direction)[0]}] l f" for row in rows(direction))


def assert_resumes_to_the_bit(data, folder, fairseq_train, options: str, *task: str) -> None:
    """Trains four updates at once, and again from the checkpoint of the second; all is the same to the bit."""
    options += " --max-update 4 --save-interval-updates 2"
    whole = fairseq_train(data, options, folder / "whole", *task)
    (folder / "resumed").mkdir()
    shutil.copy(folder / "whole" / "checkpoint_1_2.pt", folder / "resumed" / "checkpoint_last.pt")
    resumed = fairseq_train(data, options, folder / "resumed", *task)
    assert_equal_state(resumed["model"], whole["model"])
    assert_equal_state(resumed["last_optimizer_state"], whole["last_optimizer_state"])


def test_a_causal_model_of_all_variants_trains_and_resumes(lm_data, tmp_path, fairseq_train):
    options = (
        f"--arch transformer_xl_tiny --sublayer-pattern '{all_in_one(CAUSAL)}' --criterion causal_lm --batch-size 4 "
        "--adaptive-softmax-cutoff '' --mem-len 0"
    )
    assert_resumes_to_the_bit(lm_data, tmp_path, fairseq_train, options, "stream_language_modeling --tgt-len 8")


@pytest.mark.slow
@of_each_row
@torch._inductor.config.patch(fallback_random=True)  # hashes are drawn anew in training, here as without a compiler
def test_compiled_it_computes_the_same(direction, s):
    compiled.cache_clear()
    torch._dynamo.reset()
    counters.clear()
    results = []
    for compiles in (False, True):
        network = build(direction, f"{s} f l").train()
        network.compiles = compiles
        features = run(network, tokens())
        features.sin().sum().backward()
        results.append([features, *(weight.grad for weight in network.parameters() if weight.grad is not None)])
    torch.testing.assert_close(*results, atol=1e-8, rtol=1e-6)
    assert counters["stats"]["unique_graphs"] == 1 and not counters["graph_break"], counters
