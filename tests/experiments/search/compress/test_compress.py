"""What a sublayer may become and costs, and the best patterns under a budget; whole searches from a checkpoint."""

import itertools
import json
import math
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers import ROOT
from hypothesis import given, settings
from hypothesis import strategies as st
from in_process import invoke, refusal
from local_mean import LOCAL_MEAN, registered
from trained_encoders import trained, write_encoder

from lazyformer_fairseq import LazyFormerModel
from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.experiments.search.compress import candidates as compress
from lazyformer_fairseq.experiments.search.compress import selection
from lazyformer_fairseq.experiments.search.compress.budgets import Budgets, Losses, Measured, compare
from lazyformer_fairseq.experiments.search.latency import latency_of
from lazyformer_fairseq.patterns.grammar import expand, plan, producer_indices
from lazyformer_fairseq.patterns.kinds import ENCODER
from lazyformer_fairseq.training.warm_start.losses import BlockLosses, masked_lm_bits, read_text
from lazyformer_fairseq.training.warm_start.start import Trained, start_from


def candidates_of(pattern: str, *names: str, longest: int = 128) -> compress.Candidates:
    own = plan(pattern, ENCODER)
    return compress.Candidates.of(
        own, compress.read_encoder_candidates(names) if names else compress.default_candidates(own, longest)
    )


def texts(candidates: compress.Candidates) -> list[list[str]]:
    return [[option.text for option in options] for options in candidates.options]


def test_by_default_whatever_takes_the_weights_and_a_feed_forward_for_an_attention():
    s = ["s", "s[window=8]", "s[window=16]", "s[window=32]", "l", "k", "f", "-"]
    assert texts(candidates_of("sf")) == [s, ["f", "-"]]
    lazy, windowed = (texts(candidates_of(pattern))[-2] for pattern in ("slf", "s[window=8]f"))
    assert lazy == ["l", "s", *s[1:4], "k", "f", "-"]
    assert windowed == ["s[window=8]", "s", *s[2:]]
    assert texts(candidates_of("s-f"))[1] == ["-"]
    assert texts(candidates_of("sf", "c")) == [["s", "c"], ["f"]]
    users = texts(candidates_of("sf", "identity", "s[window=3,global=1]"))
    assert users == [["s", "-", "s[window=3,global=1]"], ["f", "-"]]
    with registered(LOCAL_MEAN):  # somebody else's kind is a candidate where the model has it
        letter = LOCAL_MEAN.letter
        assert all(letter not in options for options in texts(candidates_of("sf")))
        assert texts(candidates_of(f"s{letter}"))[1] == [letter, "-"]
    with pytest.raises(UserError, match="--candidates x: 'x' is not a sublayer: use s "):
        compress.read_encoder_candidates(["x"])


@pytest.mark.parametrize("pattern", ["ssfs", "sls[window=2]", "skf"])
def test_every_pattern_that_is_scored_starts_from_the_weights(pattern):
    old = trained(pattern)
    candidates = compress.Candidates.of(
        old.plan, compress.read_encoder_candidates(["s", "l", "k", "s[window=3]", "f", "identity"])
    )
    for scoring in selection.list_scorings(candidates, reach=2):
        pattern = candidates.pattern(scoring.by_place)
        made = [each for each in candidates.placed(scoring.by_place) if each.text != "-"]
        start = start_from(old, {"sublayer_pattern": pattern}, candidates.origins(scoring.by_place))
        reads = [None if at is None else made[at].place for at in producer_indices(start.new.plan)]
        assert [each.producer for each in made] == reads
        assert pattern == expand(start.new.cfg.sublayer_pattern)


NAMES = ("s[window=2]", "l", "k", "identity")


def possible(candidates: compress.Candidates) -> list[tuple[str, ...]]:
    every = itertools.product(*([option.text for option in options] for options in candidates.options))
    return [by_place for by_place in every if candidates.is_possible(by_place)]


@settings(max_examples=10)
@given(st.lists(st.sampled_from("sf"), min_size=1, max_size=4).map("".join), st.randoms())
def test_the_sum_is_the_loss_of_every_pattern_where_changes_do_not_interact(pattern, chance):
    candidates = candidates_of(pattern, *NAMES)
    if not candidates.is_possible(candidates.original):
        return
    costs: dict = {}

    def above(by_place) -> float:
        changed = [made for made in candidates.placed(by_place) if made.text != candidates.original[made.place]]
        return sum(costs.setdefault(made, chance.uniform(-1, 1)) for made in changed)

    scorings = selection.list_scorings(candidates, reach=len(pattern))
    scores = selection.scores_of(
        candidates, scorings, {scoring.by_place: above(scoring.by_place) for scoring in scorings}
    )
    for by_place in possible(candidates):
        assert selection.summed(candidates, scores, by_place) == pytest.approx(above(by_place), abs=1e-9)


@settings(max_examples=10)
@given(st.sampled_from(["ssss", "sfsfsf", "fssfs"]), st.sampled_from("lk"), st.randoms())
def test_the_sum_over_one_lazy_block_is_its_loss_whatever_losses_are(pattern, letter, chance):
    candidates = candidates_of(pattern, *NAMES)
    losses: dict = {candidates.original: 0.0}
    scorings = selection.list_scorings(candidates, reach=3)
    for scoring in scorings:
        losses.setdefault(scoring.by_place, chance.uniform(-1, 1))
    scores = selection.scores_of(candidates, scorings, losses)
    attentions = [place for place, text in enumerate(pattern) if text == "s"]
    for first, last in itertools.combinations(range(len(attentions)), 2):
        block = list(pattern)
        for place in attentions[first + 1 : last + 1]:
            block[place] = letter
        assert selection.summed(candidates, scores, tuple(block)) == pytest.approx(losses[tuple(block)])


def test_reach_limits_what_is_measured_and_where_those_between_cannot_read_they_go():
    candidates = candidates_of("ssss", "l")
    for reach, expected in ((1, 3), (2, 5), (3, 6)):
        scorings = selection.list_scorings(candidates, reach)
        assert sum(scoring.placed.text == "l" for scoring in scorings) == expected
        scores = selection.scores_of(candidates, scorings, {scoring.by_place: 1.0 for scoring in scorings})
        assert (selection.summed(candidates, scores, ("s", "l", "l", "l")) is None) == (reach < 3)
    # A k cannot read a synthesizer's keys, so that one that stands between goes; nobody else can take its place.
    candidates = candidates_of("ss[synthesizer=random]s", "l", "identity")
    measured = {scoring.placed[:3]: scoring.by_place for scoring in selection.list_scorings(candidates, 2)}
    assert measured[2, "l", 0] == ("s", "l", "l")
    without = candidates_of("sss", "k")
    assert (2, "k", 0) in {scoring.placed[:3] for scoring in selection.list_scorings(without, 2)}


# --- The best patterns under a budget, against all patterns there are, tried one by one


# A k cannot read the keys of a synthesizer.
KINDS = ("s", "l", "k", "s[synthesizer=random]", "identity")


def by_force(candidates: compress.Candidates, scores, ticks, limit: int) -> list[tuple[float, int]]:
    """(sum, ticks) of all patterns within the limit, the least first; from the text of each, not from states."""
    found = []
    for texts in itertools.product(*([option.text for option in options] for options in candidates.options)):
        stay = [place for place, text in enumerate(texts) if text != "-"]
        try:
            planned = plan("".join(texts[place] for place in stay), ENCODER)
        except UserError:
            continue
        reads = {stay[n]: None if at is None else stay[at] for n, at in enumerate(producer_indices(planned))}
        keys = [compress.Placed(place, text, reads.get(place)) for place, text in enumerate(texts)]
        latency = latency_of(ticks, "".join(texts).replace("-", ""))
        if latency <= limit and all(key in scores for key in keys):
            found.append((sum(scores[key] for key in keys), latency))
    return sorted(found)


patterns = st.lists(st.sampled_from(["s", "f", "l", "k", "-"]), max_size=3).map(lambda rest: "".join(["s", *rest]))
ticks_of = st.fixed_dictionaries(
    {name: st.integers(0, 9) for name in (*KINDS[:-1], "f", "s_read", "s[synthesizer=random]_read")}
)


@settings(max_examples=10, deadline=None)
@given(patterns, ticks_of, st.integers(1, 3), st.lists(st.integers(1, 60), min_size=1, max_size=3), st.randoms())
def test_the_best_of_all_patterns(pattern, ticks, reach, limits, chance):
    candidates = candidates_of(pattern, *KINDS)
    ticks = ticks | {"rest": 1}
    scores = {scoring.placed: chance.uniform(-0.2, 1) for scoring in selection.list_scorings(candidates, reach)}
    found = selection.select(candidates, scores, ticks, limits, count=3)
    for limit, best in zip(limits, found, strict=True):
        expected = by_force(candidates, scores, ticks, limit)
        assert [each.score for each in best] == pytest.approx([score for score, _ in expected[:3]])
        assert len({each.by_place for each in best}) == len(best)
        for each in best:
            assert latency_of(ticks, candidates.pattern(each.by_place)) == each.ticks <= limit
            assert candidates.is_possible(each.by_place)


# --- Few patterns of each budget are measured


TICKS = {"s": 10, "s_read": 12, "l": 4, "f": 5, "rest": 1}


class GivenLosses(dict):
    """By a function of the pattern."""

    def __init__(self, above):
        self.above = above

    def measure(self, patterns, description):
        self.update({each: Measured(self.above(each), 0.0) for each in patterns})


def budgets_of(pattern: str, above, limits, names=("l", "identity")) -> Budgets:
    return Budgets(candidates_of(pattern, *names), GivenLosses(above), TICKS, limits)


def test_a_second_round_finds_what_sums_hide():
    """Alone each f seems to cost little; the lower two cost much where both go."""

    def above(by_place):
        single = {0: 9.0, 1: 0.1, 2: 0.2, 3: 0.3}
        cost = sum(single[place] for place, text in enumerate(by_place) if text == "-")
        return cost + (5.0 if by_place[1] == by_place[2] == "-" else 0.0)

    budgets = budgets_of("sfff", above, [16], ("identity",))
    budgets.score()
    for find, best in ((budgets.find, 5.3), (budgets.find_again, 0.4)):
        find(top=1)
        assert budgets.losses[budgets.best(16)].above == pytest.approx(best)


def test_the_error_is_that_of_the_mean_where_blocks_are_alike():
    chance = np.random.default_rng(1)
    original, gains = chance.uniform(5, 9, 50), chance.normal(0.2, 1, 50)
    found = compare(BlockLosses(original + gains, np.full(50, 7)), BlockLosses(original, np.full(50, 7)))
    bits = gains / 7 / np.log(2)
    assert (found.above, found.error) == pytest.approx((bits.mean(), bits.std(ddof=1) / np.sqrt(50)))


# --- Whole searches from a tiny checkpoint

PRICES = {"s": 3.0, "s_read": 4.0, "l": 1.0, "f": 2.0, "rest": 1.0}
COMPRESS = ("search", "compress")
SMALL = ("--tokens", 96, "--candidates", "l,identity", "--top", 2)


@pytest.fixture(scope="module")
def model(tmp_path_factory, data_folder) -> Path:
    return write_encoder(tmp_path_factory.mktemp("model"), data_folder, "(sf)x2")


@pytest.fixture
def latencies(tmp_path) -> Path:
    path = tmp_path / "latencies.json"
    path.write_text(json.dumps(PRICES))
    return path


def test_a_search_and_what_it_writes(model, data_folder, latencies, tmp_path):
    out = tmp_path / "out"
    said = invoke(*COMPRESS, model, data_folder, out, "--budgets", "0.8,0.5", "--latencies", latencies, *SMALL)
    files = "settings.json scores.json result.json report.md losses.png models .lock"
    assert {path.name for path in out.iterdir()} == set(files.split())
    result = json.loads((out / "result.json").read_text())
    old = LazyFormerModel.from_pretrained(model)
    text = read_text(data_folder, old.tokenizer, 32, 96)
    original = bits(old, text)
    assert result["original"]["bits"] == pytest.approx(original)
    whole = latency_of(PRICES, "sfsf")
    for row in result["budgets"]:
        found = row["found"]
        assert found["predicted_ms"] == latency_of(PRICES, found["pattern"]) <= row["budget"] * whole + 0.01
        folder = out / "models" / f"{row['budget']:g}"
        hub = LazyFormerModel.from_pretrained(folder)
        assert hub.model.cfg.sublayer_pattern == found["pattern"]
        assert bits(hub, text) - original == pytest.approx(found["above"], abs=1e-5)
        assert found["on_other_text"]["above"] == pytest.approx(rise_on_other_text(old, hub, data_folder), abs=1e-5)
        record = json.loads((folder / "warm_start.json").read_text())
        assert (record["old_pattern"], record["new_pattern"]) == ("sfsf", found["pattern"])
        assert found["pattern"] in [expand(pattern) for pattern in patterns_in(said)]


def bits(hub, text) -> float:
    return masked_lm_bits(Trained(hub.model.cfg, hub.model.state_dict(), hub.tokenizer.dictionary), text)


def rise_on_other_text(old, new, data_folder) -> float:
    """From losses of single tokens of the blocks that the search did not see."""
    more = read_text(data_folder, old.tokenizer, 32, 192)
    used = read_text(data_folder, old.tokenizer, 32, 96)
    seen = {int(block) for batch in used for block in batch["id"]}
    rises = []
    for batch in more:
        tokens, targets = batch["net_input"]["src_tokens"], batch["target"]
        with torch.no_grad():
            one, other = (hub.model(tokens)[0].log_softmax(-1) for hub in (old, new))
        rises += [
            float(one[row, at, targets[row, at]] - other[row, at, targets[row, at]])
            for row, at in targets.ne(old.tokenizer.special.pad).nonzero().tolist()
            if int(batch["id"][row]) not in seen
        ]
    return sum(rises) / len(rises) / math.log(2)


def patterns_in(table: str) -> list[str]:
    return [cell.strip("` ") for line in table.splitlines() for cell in line.split("|") if "`" in cell]


def test_a_search_that_was_stopped_measures_the_rest(model, data_folder, latencies, tmp_path, monkeypatch):
    words = (*COMPRESS, model, data_folder, tmp_path / "out", "--budgets", "0.7", "--latencies", latencies, *SMALL)
    asked: list[str] = []
    measure = Losses.by_block

    def stops_at(count):
        def by_block(self, by_place):
            if len(asked) == count:
                raise KeyboardInterrupt
            asked.append(" ".join(by_place))
            return measure(self, by_place)

        return by_block

    monkeypatch.setattr(Losses, "by_block", stops_at(5))
    assert "stopped; rerun to resume" in invoke(*words, code=130)
    monkeypatch.setattr(Losses, "by_block", stops_at(-1))
    invoke(*words)
    assert sorted(each for each in set(asked) if asked.count(each) > 1) == ["s f s f"], "the original alone comes twice"
    before = list(asked)
    assert " contains a finished search" in invoke(*words) and asked == before
    with pytest.raises(UserError, match="contains a search with different settings .seed is 1 there, 2 here"):
        invoke(*words, "--seed", 2)


@pytest.mark.parametrize(
    ("pattern", "options"),
    [("s[window=4]flf", {"encoder_normalize_before": True}), ("s[window=4,global=given]s-f", {})],
)
def test_settings_lazy_models_and_pre_norm(data_folder, tmp_path, pattern, options):
    model = write_encoder(tmp_path / "model", data_folder, pattern, **options)
    few = ("--tokens", 64, "--top", 1, "--latency-tokens", 8)
    words = ("--budgets", 0.9, "--candidates", "s,l,identity", *few)
    said = invoke(*COMPRESS, model, data_folder, tmp_path / "out", *words)
    (found,) = (each for each in patterns_in(said))
    hub = LazyFormerModel.from_pretrained(tmp_path / "out" / "models" / "0.9")
    assert expand(hub.model.cfg.sublayer_pattern) == expand(found) != expand(pattern)


@pytest.mark.slow
def test_a_bert_of_the_hub_is_to_be_imported_first(tmp_path):
    pytest.importorskip("transformers")
    from tiny_berts import save_tiny

    save_tiny(tmp_path / "in")
    with pytest.raises(UserError, match="First convert a BERT from the Hub to this package's checkpoint format"):
        invoke(*COMPRESS, tmp_path / "in", tmp_path / "in", tmp_path / "out")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--candidates k", "--budgets 0.1: no combination of the --candidates makes the model that fast"),
        ("--candidates f[width=2]", r"--candidates f\[width=2\]: .* has no setting"),
        ("--candidates s", "--candidates s: none of them can replace a sublayer of "),
        ("--latency-tokens 99", "--latency-tokens 99: the model reads at most 32"),
        ("", "is a causal language model; search compress supports only masked-LM encoders"),
    ],
)
def test_what_is_refused(model, data_folder, latencies, tmp_path, words, message):
    (tmp_path / "latencies.json").write_text(json.dumps(PRICES | {"k": 2.0}))
    given = model if words else ROOT / "tests/fixtures/checkpoints/language_model"
    options = ("--budgets", 0.1, "--latencies", latencies, *words.split())
    assert re.search(message, refusal(*COMPRESS, given, data_folder, tmp_path / "out", *options))
    assert not (tmp_path / "out" / "scores.json").exists()
