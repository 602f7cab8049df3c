"""The tables on the pages say what the logs in docs/records say."""

import csv
import re
import subprocess
import sys
from statistics import fmean, median, stdev

import pytest
from helpers import PAGES, ROOT
from scipy.stats import spearmanr

from lazyformer_fairseq.experiments.compare.results import Comparison, comparison_of
from lazyformer_fairseq.experiments.search.report import FRONTS
from lazyformer_fairseq.patterns.architectures import ARCHITECTURES
from lazyformer_fairseq.storage.json_files import read_json, sha256_of

RECORDS = ROOT / "docs" / "records"


def losses_of(comparison: Comparison, name: str) -> tuple[str, str]:
    """Bits in the end, and what is left to the baseline's of the same seed: medians and ranges."""
    model, baseline = comparison.longest(name), comparison.longest("bert")
    ends, before = ({seed: run.final["loss"] for seed, run in each.runs.items()} for each in (model, baseline))
    assert len(ends) >= 3 and ends.keys() == before.keys()
    beside = [ends[seed] - before[seed] for seed in ends]
    bits = f"{median(ends.values()):.2f} ({min(ends.values()):.2f} to {max(ends.values()):.2f})"
    return bits, f"{median(beside):+.2f} ({min(beside):+.2f} to {max(beside):+.2f})"


def test_models_under_babylms_rules_are_what_their_logs_say():
    log = read_json(RECORDS / "babylm-10M.json")
    accuracies: dict[str, list[float]] = {}
    with (RECORDS / "babylm-10M-blimp.csv").open(newline="") as file:
        for row in csv.DictReader(file):
            accuracies.setdefault(row["model"], []).append(int(row["correct"]) / int(row["pairs"]))
    assert all(len(of_paradigms) == 67 for of_paradigms in accuracies.values())
    comparison = comparison_of(log)
    assert {*comparison.models, "conv_12k", "5-gram"} == accuracies.keys()
    yardsticks = log["data"]["yardsticks"]
    page = PAGES["README.md"]
    assert f"| counts of the two left and two right neighbors | | | {yardsticks['counts']:.2f} | |" in page
    assert f"| 5-gram | | | | {100 * fmean(accuracies['5-gram']):.1f} |" in page
    flops = comparison.models["bert"].facts["flops_per_update"]
    longer = comparison_of(read_json(RECORDS / "babylm-10M-longer.json")).models["conv"]
    assert longer.facts["updates"] == 12_000
    for name, model in {**comparison.models, "conv_12k": longer}.items():
        relative = model.facts["flops_per_update"] / flops
        (loss,) = model.finals("loss")
        shown = f"| {model.facts['parameters'] / 1e6:.1f}M | {relative:.2f} | {loss:.2f} |"
        assert f"{shown} {100 * fmean(accuracies[name]):.1f} |" in page, (name, shown)


def test_bert_and_lazyformer_with_three_seeds_are_what_their_logs_say():
    comparison = comparison_of(read_json(RECORDS / "babylm-10M-seeds.json"))
    of_bert, _ = losses_of(comparison, "bert")
    of_lazyformer, beside = losses_of(comparison, "lazyformer")
    page = PAGES["docs/compare.md"]
    assert f"| bits per masked token | {of_bert} | {of_lazyformer} | {beside} |" in page

    correct: dict[tuple[str, int], list[float]] = {}
    with (RECORDS / "babylm-10M-seeds-blimp.csv").open(newline="") as file:
        for row in csv.DictReader(file):
            correct.setdefault((row["model"], int(row["seed"])), []).append(int(row["correct"]) / int(row["pairs"]))
    assert all(len(of_paradigms) == 67 for of_paradigms in correct.values())
    scores = {run: 100 * fmean(of_paradigms) for run, of_paradigms in correct.items()}
    bert, lazyformer = ([scores[name, seed] for seed in (1, 2, 3)] for name in ("bert", "lazyformer"))
    differences = [of_lazy - of_bert for of_lazy, of_bert in zip(lazyformer, bert, strict=True)]
    cells = [
        f"{median(each):{sign}.1f} ({min(each):{sign}.1f} to {max(each):{sign}.1f})"
        for each, sign in ((bert, ""), (lazyformer, ""), (differences, "+"))
    ]
    assert f"| BLiMP | {' | '.join(cells)} |" in page
    error = stdev(differences) / len(differences) ** 0.5
    mean = fmean(differences)
    more = "more" if mean > 0 else "less"
    stated = f"{abs(mean):.1f} points {more} than BERT, with a standard error of {error:.1f}."
    assert stated in " ".join(page.split())


@pytest.mark.parametrize(
    ("page", "log"), [("docs/compare.md", "lazy-equal-updates.json"), ("docs/training.md", "laptop-parts.json")]
)
def test_a_table_of_equal_updates_is_what_its_log_says(page, log):
    comparison = comparison_of(results := read_json(RECORDS / log))
    settings = results["settings"]
    assert (settings["recipe"], settings["budget"], settings["baseline"]) == ("laptop", None, "bert")
    assert f"[{settings['updates']:,} updates](records/{log})" in PAGES[page]
    for name, spec in settings["models"].items():
        label = spec.removeprefix("(sf)x7; ").removesuffix("; lr=1e-3,3e-3")
        row = "" if "," in label else f"| `{label}` "  # of several parts the page has words
        assert name == "bert" or f"{row}| {losses_of(comparison, name)[1]} |" in PAGES[page]


def test_what_neighbour_embeddings_bring_is_what_their_log_says():
    log = read_json(RECORDS / "neighbour-embeddings.json")
    settings = log["settings"]
    assert (settings["recipe"], settings["updates"], settings["seeds"]) == ("laptop", 1000, [1, 2, 3])
    settings["baseline"] = "bert"
    comparison = comparison_of(log)
    (bits, _), (before, beside) = (losses_of(comparison, name) for name in ("bert", "before"))
    yardsticks = log["data"]["yardsticks"]
    for line in (
        f"| BERT with the recipe | {bits} |",
        f"| without `neighbour-embeddings` | {before}; difference per seed {beside} |",
        f"| count-based model of the two tokens on either side | {yardsticks['counts']:.2f} |",
        f"| unigram loss | {yardsticks['unigram']:.2f} |",
    ):
        assert line in PAGES["docs/training.md"], line


def test_modern_parts_together_and_each_taken_away_are_what_their_log_says():
    comparison = comparison_of(log := read_json(RECORDS / "modern-parts.json"))
    same = ("recipe", "updates", "sizes", "precision", "rates")
    beside = read_json(RECORDS / "laptop-parts.json")["settings"]
    assert all(log["settings"][name] == beside[name] for name in same)
    labels = {"modern": "these three changes together ([log](records/modern-parts.json))"}
    parts = {"no_rope": "rotary positions", "no_gate": "the gate", "no_rms": "RMSNorm"}
    labels |= {name: f"these three without {part}" for name, part in parts.items()}
    for name, label in labels.items():
        assert f"| {label} | {losses_of(comparison, name)[1]} | |" in PAGES["docs/training.md"]


def test_par_berts_curve_in_miniature_is_what_its_log_says():
    comparison = comparison_of(log := read_json(RECORDS / "par-figure-4.json"))
    page = " ".join(PAGES["docs/reproduce.md"].split())
    archs = {"bert": "bert_base_absolute", "par_bert": "par_bert_base", "distilbert": "distilbert_base"}
    assert log["settings"]["models"] == {name: ARCHITECTURES[arch].sublayer_pattern for name, arch in archs.items()}
    assert log["settings"]["recipe"] == "laptop" and f"After {log['settings']['updates']} updates" in page
    sizes = [log["models"][name]["parameters_without_embeddings"] for name in archs]
    (bits, _), *others = (losses_of(comparison, name) for name in archs)
    losses = [bits.split()[0], *(beside for _, beside in others)]
    for label, size, loss in zip(("BERT", "PAR BERT", "DistilBERT"), sizes, losses, strict=True):
        assert f"| {label} | {size / sizes[0]:.1f} | {loss} |" in page
    assert f"The unigram loss is {log['data']['frequencies_bits']['valid']:.2f} bits" in page


def test_short_trainings_of_a_search_rank_as_its_log_says():
    log = read_json(RECORDS / "search-ranks.json")
    losses = [each["losses"] for each in log["trained"] if None not in each["losses"]]
    early, later, whole = zip(*losses, strict=True)
    first, second, last = log["settings"]["lengths"]
    ranks = [spearmanr(rung, whole).statistic for rung in (later, early)]
    page = PAGES["docs/search.md"]
    assert (
        f"| updates | rank correlation with {last} updates |" in page and f"We measured {len(losses)} patterns" in page
    )
    for updates, rank in zip((second, first), ranks, strict=True):
        assert f"| {updates} | {rank:.2f} |" in page


def test_searches_beside_their_controls_found_what_their_log_says():
    logs, page = read_json(RECORDS / "search-seeds.json"), " ".join(PAGES["docs/search.md"].split())
    assert [*logs] == ["1", "2", "3", "4", "5"] and "five seeds ([log](records/search-seeds.json)):" in page
    ends = {front: [log[front]["points"][0]["loss"] for log in logs.values()] for front in FRONTS}
    ends["baseline"] = [log["baseline"]["loss"] for log in logs.values()]
    called = ("halving", "random search", "most parameters", "`sff`", "the baseline")
    for losses, name in zip(ends.values(), called, strict=True):
        assert f"| {name} | {median(losses):.2f} ({min(losses):.2f} to {max(losses):.2f}) |" in page
    won = [sum(map(float.__lt__, ends["found"], ends[other])) for other in FRONTS[1:]]
    assert f"Halving was better than random search for {won[0]} of 5 seeds" in page and won[1:] == [5, 5]
    by_gradient = read_json(RECORDS / "search-gradient.json")
    assert [*by_gradient] == [*logs] and all(log["found"]["method"] == "gradient" for log in by_gradient.values())
    losses = [log["found"]["points"][0]["loss"] for log in by_gradient.values()]
    assert f"it reached {median(losses):.2f} ({min(losses):.2f} to {max(losses):.2f})" in page
    assert f"It was better than halving for only {sum(map(float.__lt__, losses, ends['found']))} of 5 seeds" in page
    assert all(
        by_gradient[seed]["found"]["cost"]["counted"] <= log["found"]["cost"]["counted"] for seed, log in logs.items()
    )


def test_the_best_pattern_of_a_search_trains_three_times_as_wide_as_its_log_says():
    log, page = read_json(RECORDS / "search-transfer.json"), " ".join(PAGES["docs/search.md"].split())
    points = {log["found"]["points"][0]["loss"]: log for log in read_json(RECORDS / "search-seeds.json").values()}
    best = points[min(points)]
    assert log["settings"]["models"] == {"bert": "(sf)x7", "found": best["found"]["points"][0]["pattern"]}
    assert log["settings"]["sizes"]["embed_dim"] == 3 * best["sizes"]["embed_dim"]
    assert log["settings"]["updates"] == best["settings"]["lengths"][-1]
    _, beside = losses_of(comparison_of(log), "found")
    narrow = best["found"]["points"][0]["loss"] - best["baseline"]["loss"]
    wide = f"At three times the width and with three seeds the difference is {beside}"
    assert f"`{log['settings']['models']['found']}`, is {-narrow:.2f} bits lower than the baseline's. {wide}" in page


@pytest.mark.slow
def test_the_corpus_is_built_with_these_checksums(real_data, tmp_path):
    page = (RECORDS / "README.md").read_text(encoding="utf-8")
    (command,) = re.findall(r"^lazyformer (corpus wikitext:.*)$", page, re.MULTILINE)
    text = real_data / "lm" / "wikitext-2" / "wiki.train.tokens"
    words = command.replace("my_wikitext/wiki.train.tokens", str(text)).replace("footing", str(tmp_path / "built"))
    subprocess.run([sys.executable, "-m", "lazyformer_fairseq.cli", *words.split()], cwd=ROOT, check=True)
    for name in ("train.bin", "valid.bin"):
        assert sha256_of(tmp_path / "built" / "shard0" / name) in page
