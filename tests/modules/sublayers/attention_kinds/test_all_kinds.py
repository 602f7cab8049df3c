"""What holds for every kind of attention: each row of the table goes through all of it, with the settings below.

Whether a kind computes what its paper says is tested in the file of its own.
"""

import copy
import json
import re
import shutil
import sys
from itertools import combinations

import pytest
import torch
from click.testing import CliRunner
from helpers import assert_equal_state
from torch import Tensor
from torch._dynamo.utils import counters
from torch.utils.flop_counter import FlopCounterMode

from lazyformer_fairseq.cli import main
from lazyformer_fairseq.costs.flops import count_flops, count_parameters
from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.models import LazyFormerModel
from lazyformer_fairseq.modules.attention.choice import BACKENDS
from lazyformer_fairseq.modules.compiled import compiled
from lazyformer_fairseq.modules.networks.adaptive_softmax import AdaptiveSoftmax
from lazyformer_fairseq.modules.networks.causal_decoder import CausalDecoder, init_transformer_xl_weights
from lazyformer_fairseq.modules.networks.encoder import Encoder
from lazyformer_fairseq.modules.networks.heads import MaskedLMHead
from lazyformer_fairseq.modules.networks.stack import Stack
from lazyformer_fairseq.modules.sublayers.attention_choice import choice_classes
from lazyformer_fairseq.pattern.seen import build_network, look
from lazyformer_fairseq.patterns.attention_kinds import ATTENTION_KINDS, AttentionKind
from lazyformer_fairseq.patterns.grammar import plan, read_sublayer
from lazyformer_fairseq.patterns.kinds import CAUSAL, DISTRIBUTION, ENCODER
from lazyformer_fairseq.search.supernet.mixture import Choices, Supernet, supernet_pattern

# By the name of a row one or more settings of an s, short enough for a dozen tokens and two heads.
EXAMPLES = {
    "window": ["window=2", "window=1,dilation=2,dilated_heads=1", "window=2,global=1"],
    "strided": ["strided=3", "strided=3,heads=split", "strided=3,part=summary"],
    "fixed": ["fixed=4,summary=1", "fixed=4,part=local", "fixed=4,summary=1,part=summary"],
    "synthesizer": ["synthesizer=dense", "synthesizer=random", "synthesizer=dense+dot"],
    "span": ["span=4,ramp=2"],
    "persistent": ["persistent=3"],
    "entmax": ["entmax=1.5", "entmax=learned"],
    "buckets": ["buckets=4,rounds=2,chunk=4"],
    "linformer": ["linformer=3", "linformer=3,share=none", "linformer=3,share=kv", "linformer=3,share=layers"],
}
TOKENS, MEMORY, WORDS, WIDTH, HEADS = 12, 5, 17, 16, 2


def rows(direction: str) -> list[AttentionKind]:
    return [row for row in ATTENTION_KINDS if direction == ENCODER or not row.why_not_causal]


def examples(row: AttentionKind, direction: str) -> list[str]:
    """Those of a row; a causal synthesizer has to know its longest input."""
    added = f",length={TOKENS}" if direction == CAUSAL and row.name == "synthesizer" else ""
    return [settings + added for settings in EXAMPLES.get(row.name, [])]


CASES = [
    pytest.param(direction, f"s[{settings}]", id=f"{direction} {settings}")
    for direction in (ENCODER, CAUSAL)
    for row in rows(direction)
    for settings in examples(row, direction)
]


def features_of(s: str) -> set[str]:
    """What it puts into scores; nothing where several attentions make one, as with global tokens."""
    values = read_sublayer(s).values
    several = values.get("global") or values.get("span")  # formulas of a span are those of the longest possible
    return set() if several else set().union(*(choice.features(values) for choice in choice_classes(values)))


of_each_kind = pytest.mark.parametrize(("direction", "s"), CASES)
of_encoders = pytest.mark.parametrize("s", [case.values[1] for case in CASES if case.values[0] == ENCODER])


def build(direction: str, pattern: str, **options) -> Stack:
    """A tiny network of embeddings, in double precision, with the weights that it gets by itself."""
    torch.manual_seed(1)
    sizes = (WIDTH, 8, HEADS)
    if direction == ENCODER:
        given = {"max_positions": TOKENS, "relative_position_buckets": 0, "lazy_backend": "eager", **options}
        return Encoder(pattern, WORDS, *sizes, **given).double().eval()
    decoder = CausalDecoder(pattern, WORDS, *sizes, **{"mem_len": 0, "lazy_backend": "eager", **options})
    return decoder.apply(init_transformer_xl_weights).double().eval()


def tokens(batch: int = 2, time: int = TOKENS) -> Tensor:
    return torch.randint(2, WORDS, (batch, time), generator=torch.Generator().manual_seed(2))


def run(network: Stack, tokens_BT: Tensor, *padding: Tensor) -> Tensor:
    """Features; what is drawn in a forward pass, such as buckets, is drawn alike in each."""
    torch.manual_seed(3)
    return network(tokens_BT, *padding)[0]


def assert_alike(one: Tensor, other: Tensor) -> None:
    torch.testing.assert_close(one, other, atol=1e-9, rtol=1e-9)


def test_every_row_has_an_example():
    assert set(EXAMPLES) == {row.name for row in ATTENTION_KINDS}


# --- formulas --------------------------------------------------------------------------------------------------------


@of_each_kind
def test_parameters_by_formula_are_those_of_a_built_network(direction, s):
    pattern = f"{s} f l l {s} l"
    network = build(direction, pattern)
    of_head = MaskedLMHead(WIDTH, network.embed_tokens) if direction == ENCODER else AdaptiveSoftmax(network.embedding)
    built = sum(weight.numel() for weight in torch.nn.ModuleList([network, of_head]).parameters())
    assert count_parameters(pattern, network.sizes) == built


@of_each_kind
def test_flops_by_formula_are_those_that_torch_counts(direction, s, monkeypatch):
    """But for a sight: ``eager`` computes what is out of it too."""

    def of_all_pairs(sizes, sight, time, keys, batch, flops):
        return flops._replace(products=4 * batch * time * keys * sizes.embed_dim)

    for row in ATTENTION_KINDS:
        module = sys.modules[row.load().__module__]
        monkeypatch.setattr(module, "flops_in_sight", of_all_pairs, raising=False)
    network = build(direction, f"{s} f l")
    with FlopCounterMode(display=False) as counter:
        run(network, tokens())
    assert counter.get_total_flops() == count_flops(f"{s} f l", network.sizes, TOKENS, batch=2, predicted=0)


@pytest.mark.parametrize(
    ("direction", "s"),
    [case for case in CASES if "sight" in features_of(case.values[1])],
)
def test_a_sights_products_are_those_of_the_pairs_that_it_shows(direction, s):
    planned, *_ = plan(s, direction)
    narrow = build_network(s, direction, HEADS, TOKENS)
    (seen,) = look(narrow, TOKENS)
    pairs = sum(len(heads) * int((weights > 0).sum()) for heads, weights in seen.by_heads)
    flops = planned.kind.module(direction).count_flops(narrow.sizes, planned, TOKENS, TOKENS, 1)
    assert flops.products == 4 * pairs * narrow.embed_dim // HEADS


# --- what it computes ------------------------------------------------------------------------------------------------


@of_each_kind
def test_an_l_with_the_values_of_the_s_puts_out_what_the_s_does(direction, s):
    network = build(direction, f"{s} l")
    attention, lazy = (sublayer.inner for sublayer in network.sublayers)
    with torch.no_grad():
        source = next(
            getattr(attention, name) for name in ("qkv_proj", "kv_proj", "v_proj") if hasattr(attention, name)
        )
        lazy.v_proj.weight.copy_(source.weight[-WIDTH:])
        if lazy.has_bias:  # Linformer adds an s's after its projection, as the published code does
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
        network = build(direction, f"{s} l", attention_dropout=0.5, lazy_backend="auto")
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


@pytest.mark.parametrize("back_end", [name for name in BACKENDS if name != "eager"])
@of_each_kind
def test_every_back_end_computes_the_same_or_refuses(direction, s, back_end):
    pattern = f"{s} f l {s}"
    try:
        other = build(direction, pattern, lazy_backend=back_end)
    except UserError as error:
        assert f"--lazy-backend {back_end}" in str(error)
        return
    results = []
    for network in (build(direction, pattern), other):
        features = run(network, tokens())
        features.sin().sum().backward()
        results.append([features, *(weight.grad for weight in network.parameters() if weight.grad is not None)])
    for one, same in zip(*results, strict=True):
        torch.testing.assert_close(same, one, atol=1e-6, rtol=1e-6)  # a learned entmax is found by bisection


# --- what kinds do together ------------------------------------------------------------------------------------------

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


# --- keeping, resuming, handing on -----------------------------------------------------------------------------------


@of_each_kind
def test_a_state_is_loaded_whole(direction, s):
    network = build(direction, f"{s} l")
    torch.manual_seed(5)
    fresh = copy.deepcopy(network)
    with torch.no_grad():
        for weight in fresh.parameters():
            weight.add_(torch.randn_like(weight))
    fresh.load_state_dict(network.state_dict())
    assert torch.equal(run(fresh, tokens()), run(network, tokens()))


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


def test_an_encoder_of_all_kinds_trains_resumes_and_is_exported(data_folder, tmp_path, fairseq_train):
    pattern = all_in_one(ENCODER)
    options = (
        f"--arch bert_tiny --sublayer-pattern '{pattern}' --relative-position-buckets 0 --attention-dropout 0 "
        "--criterion masked_lm_accuracy --batch-size 4 --max-positions 32"
    )
    assert_resumes_to_the_bit(data_folder, tmp_path, fairseq_train, options)
    model = LazyFormerModel.from_pretrained(tmp_path / "whole")
    done = CliRunner().invoke(main, ["export", str(tmp_path / "whole"), str(tmp_path / "exported")])
    assert done.exit_code == 0, done.output
    config = json.loads((tmp_path / "exported" / "config.json").read_text())
    assert config["model"]["sublayer_pattern"] == pattern
    exported, text = LazyFormerModel.from_pretrained(tmp_path / "exported"), "Anna sees the house."
    features = []
    for each in (model, exported):
        torch.manual_seed(1)
        features.append(each.extract_features(text))
    torch.testing.assert_close(*features)


def test_a_causal_model_of_all_kinds_trains_and_resumes(lm_data, tmp_path, fairseq_train):
    options = (
        f"--arch transformer_xl_tiny --sublayer-pattern '{all_in_one(CAUSAL)}' --criterion causal_lm --batch-size 4 "
        "--adaptive-softmax-cutoff '' --mem-len 0"
    )
    assert_resumes_to_the_bit(lm_data, tmp_path, fairseq_train, options, "stream_language_modeling --tgt-len 8")


# --- search ----------------------------------------------------------------------------------------------------------


def can_be_mixed(s: str) -> bool:
    values = read_sublayer(s).values
    return all(choice.has_probabilities for choice in choice_classes(values))


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
    assert (tmp_path / "found" / "history.png").stat().st_size > 1000


@pytest.mark.slow
@pytest.mark.parametrize(
    ("direction", "s"),
    [(direction, f"s[{examples(row, direction)[0]}]") for direction in (ENCODER, CAUSAL) for row in rows(direction)],
)
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
    for one, same in zip(*results, strict=True):
        torch.testing.assert_close(same, one, atol=1e-8, rtol=1e-6)
    assert counters["stats"]["unique_graphs"] == 1 and not counters["graph_break"], counters
