"""docs/compare.md: its records are what their logs say, its rows and rules what the script does."""

import csv
import hashlib
import os
import re
import subprocess
import sys
from functools import partial
from pathlib import Path
from statistics import median

import pytest
from helpers import PAGES, ROOT, run_script, write_program
from scipy.stats import spearmanr

from lazyformer_fairseq.experiments.compare.commands import run as compare_run
from lazyformer_fairseq.experiments.compare.models import read_models
from lazyformer_fairseq.experiments.compare.results import Comparison, comparison_of
from lazyformer_fairseq.experiments.compare.settings import find_task
from lazyformer_fairseq.experiments.search.report import FRONTS
from lazyformer_fairseq.patterns.architectures import ARCHITECTURES
from lazyformer_fairseq.storage.json_files import read_json, sha256_of

PAGE, SCRIPT = PAGES["docs/compare.md"], ROOT / "scripts" / "equal_footing.sh"
RECORDS = ROOT / "docs" / "records"
LINES = dict(re.findall(r"^\| `([\w/-]+/[\w-]+)` \| (.*results\.json.*) \|$", PAGE, re.MULTILINE))
SIZES = {"embed_dim": 192, "ffn_embed_dim": 768, "heads": 6}


call = partial(run_script, SCRIPT.name)
ROWS = dict(line.split(" ", 1) for line in call("--list").stdout.splitlines())


def losses_of(comparison: Comparison, name: str) -> tuple[str, str]:
    """Bits in the end, and what is left to the baseline's of the same seed: medians and ranges."""
    model, baseline = comparison.longest(name), comparison.longest("bert")
    ends, before = ({seed: run.final["loss"] for seed, run in each.runs.items()} for each in (model, baseline))
    assert len(ends) >= 3 and ends.keys() == before.keys()
    beside = [ends[seed] - before[seed] for seed in ends]
    bits = f"{median(ends.values()):.2f} ({min(ends.values()):.2f} to {max(ends.values()):.2f})"
    return bits, f"{median(beside):+.2f} ({min(beside):+.2f} to {max(beside):+.2f})"


def record_line(comparison: Comparison, name: str, log: str) -> str:
    """The cells of a record, behind its row."""
    updates = comparison.longest(name).facts["updates"] / comparison.longest("bert").facts["updates"]
    return f"{' | '.join(losses_of(comparison, name))} | {updates:.2f} | [results.json]({log})"


@pytest.mark.parametrize("row", ROWS)
def test_a_row_is_a_model_and_its_record_what_its_log_says(row):
    model = read_models({"bert": "(sf)x7", "it": ROWS[row]}, find_task("masked-lm"), SIZES)["it"]
    assert not model.is_external or model.layers == 7, "as many layers as the baseline"
    track, name = row.split("/")
    results = {file: read_json(file) for file in sorted(RECORDS.glob(f"{track}*.json"))}
    logs = [(file, log) for file, log in results.items() if log["settings"]["models"].get(name) == ROWS[row]]
    ((file, log),) = logs
    comparison, settings = comparison_of(log), log["settings"]
    assert settings["recipe"] == "laptop" and settings["budget"] == {"cpu-512": 600, "cpu-2048": 1800}[track]
    assert settings["sizes"]["tokens_per_sample"] == int(track.split("-")[1])
    assert LINES[row] == record_line(comparison, name, f"records/{file.name}")
    rates = {tuple(each["rate"] for each in model["tries"]) for model in log["models"].values()}
    assert len(rates) == 1 and len(*rates) == 3 and "the same three rates" in PAGE
    sums = [sum_ for name, sum_ in log["data"]["checksums"].items() if name.endswith(".bin")]
    assert all(sum_ in PAGE for sum_ in sums)


def test_the_hour_in_the_readme_is_what_its_log_says():
    log, page = read_json(RECORDS / "hour.json"), " ".join(PAGES["README.md"].split())
    settings = log["settings"]
    assert (settings["budget"], settings["recipe"], settings["equal_parameters"]) == (3600, "laptop", True)
    for model in log["models"].values():
        bits = model["runs"]["1"]["final"]["loss"]
        assert bits < 5 and re.search(rf"`{re.escape(model['pattern'])}`, (ends )?at {bits:.2f}\b", page)


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
        f"| BERT by the recipe | {bits} |",
        f"| without `neighbour-embeddings` | {before}, so {beside} |",
        f"| a table of counts of the two tokens on either side | {yardsticks['counts']:.2f} |",
        f"| frequencies alone (the unigram loss) | {yardsticks['unigram']:.2f} |",
    ):
        assert line in PAGES["docs/training.md"], line


def test_modern_parts_together_and_each_taken_away_are_what_their_log_says():
    comparison = comparison_of(log := read_json(RECORDS / "modern-parts.json"))
    same = ("recipe", "updates", "sizes", "precision", "rates")
    beside = read_json(RECORDS / "laptop-parts.json")["settings"]
    assert all(log["settings"][name] == beside[name] for name in same)
    labels = {"modern": "all three ([log](records/modern-parts.json))", "no_rope": "of them no rotary"}
    labels |= {"no_gate": "no gate", "no_rms": "no RMSNorm"}
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


def test_scores_after_ten_minutes_are_what_their_logs_say():
    models = read_json(RECORDS / "glue-models.json")["models"]
    bits = {name: model["runs"]["1"]["final"]["loss"] for name, model in models.items()}
    (tried, *_) = read_json(RECORDS / "cpu-512-attention.json")["models"]["bert"]["tries"]
    bits[f"bert_{tried['updates']}"] = tried["loss"]
    with open(RECORDS / "glue-scores.csv", encoding="utf-8", newline="") as file:
        scores = {(row["model"], row["task"], row["metric"]): row for row in csv.DictReader(file)}
    assert {row["seeds"] for row in scores.values()} == {"5"}
    for name, loss in bits.items():
        rows = [scores[name, *of] for of in (("SST-2", "accuracy"), ("CoLA", "matthews"))]
        found = [[f"{float(row[key]):.1f}" for key in ("median", "lowest", "highest")] for row in rows]
        cells = " | ".join(f"{median} ({low} to {high})" for median, low, high in found)
        assert f"| `cpu-512/{name}` | {loss:.2f} | {cells} |" in PAGE


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
    assert f"It was better than halving for {sum(map(float.__lt__, losses, ends['found']))} of 5 seeds" in page
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
    assert f"`{log['settings']['models']['found']}`, ends {narrow:+.2f} bits from the baseline. {wide}" in page


@pytest.fixture
def options_of(tmp_path):
    """``options_of(arguments)``: what `lazyformer compare` reads when the script is called."""
    (tmp_path / "scripts").mkdir()
    for name in ("common.sh", "lazyformer.sh", SCRIPT.name):
        script = tmp_path / "scripts" / name
        script.write_bytes((SCRIPT.parent / name).read_bytes())
    python = tmp_path / "bin" / "python3"
    write_program(python, 'for word; do echo "$word"; done')

    def read(*arguments: str) -> dict:
        done = run_script(script, *arguments, env={**os.environ, "PATH": f"{python.parent}:{os.environ['PATH']}"})
        assert done.returncode == 0, done.stderr
        words = done.stdout.splitlines()
        assert words[:3] == ["-m", "lazyformer_fairseq.cli", "compare"]
        return compare_run.make_context("compare", words[3:]).params

    return read


@pytest.mark.parametrize(("row", "length", "batch"), [("cpu-512/conv", 512, 2), ("cpu-2048/window", 2048, 1)])
def test_the_script_does_what_the_page_says_of_a_track(options_of, row, length, batch):
    options = options_of("--any-data", row, "data", "out dir")
    track, name = row.split("/")
    (line,) = re.findall(rf"^\| `{track}` \| (.*) \|$", PAGE, re.MULTILINE)
    sizes = line.replace(",", "")
    said = "the same" if track == "cpu-2048" else f"{options['embed_dim']} wide feed-forward {options['ffn_embed_dim']}"
    assert said in sizes and f"n = {length} batch {batch}" in sizes
    assert f"{options['budget'] / 60:g} minutes" in sizes and f"`{options['specs']['bert']}`" in sizes
    assert (options["tokens_per_sample"], options["batch_size"]) == (length, batch)
    assert options["specs"].keys() == {"bert", name} and options["specs"][name] == ROWS[row]
    assert options["baseline"] == "bert" and options["out"] == Path("out dir")
    assert options["seeds"] == (1, 2, 3) and len(options["rates"]) == 3 and options["equal_parameters"]
    assert (options["device"], options["recipe"], options["in_turn"]) == ("cpu", "laptop", False)


def test_a_track_is_all_of_its_rows(options_of):
    of_track = {row.split("/")[1]: model for row, model in ROWS.items() if row.startswith("cpu-2048/")}
    assert options_of("--any-data", "cpu-2048", "data", "out")["specs"] == {"bert": "(sf)x7", **of_track}
    two = options_of("--any-data", "cpu-2048/window,conv", "data", "out")["specs"]
    assert two == {"bert": "(sf)x7", "window": of_track["window"], "conv": of_track["conv"]}


def test_options_that_follow_take_the_place_of_the_tracks(options_of):
    options = options_of("--any-data", "cpu-512/conv", "data", "out", "--seeds", "4,5,6", "--time-fractions", "0.3")
    assert options["seeds"] == (4, 5, 6) and options["shares"] == (0.3,) and options["rate_updates"] == 250
    options = options_of("--any-data", "cpu-512/conv", "data", "out", "--updates=9", "--seeds=4")
    assert options["seeds"] == (4,)
    assert (options["updates"], options["budget"]) == (9, None)


def test_other_data_and_rows_are_refused_and_the_pages_are_the_scripts(tmp_path):
    assert LINES.keys() == ROWS.keys()
    sums = re.findall(r"\b[0-9a-f]{64}\b", SCRIPT.read_text())
    assert len(sums) == 2 and all(sum_ in PAGE for sum_ in sums)
    for wrong in ("cpu-512/nothing", "cpu-512/conv,nothing", "cpu-51"):
        assert call(wrong, "data", "out").stderr.startswith(f"error: {wrong}: no such row or track")
    assert call("cpu-512/conv").stderr.startswith("error: give TRACK or TRACK/ROW,..., DATA and OUT")
    assert call().stdout.startswith("usage: scripts/equal_footing.sh TRACK[/ROW,...] DATA OUT")
    (tmp_path / "shard0").mkdir()
    for name in ("train.bin", "valid.bin"):
        (tmp_path / "shard0" / name).write_bytes(b"other")
    done = call("cpu-512/conv", str(tmp_path), "out")
    assert done.returncode == 2 and hashlib.sha256(b"other").hexdigest() in done.stderr
    assert "is not the track's, 2ca08a60" in done.stderr and "--any-data" in done.stderr
    assert "no such file" in call("cpu-512/conv", str(tmp_path / "nowhere"), "out").stderr


@pytest.mark.slow
def test_the_corpus_is_built_with_these_checksums(real_data, tmp_path):
    (command,) = re.findall(r"^lazyformer (corpus wikitext:.*)$", PAGE, re.MULTILINE)
    text = real_data / "lm" / "wikitext-2" / "wiki.train.tokens"
    words = command.replace("my_wikitext/wiki.train.tokens", str(text)).replace("footing", str(tmp_path / "built"))
    subprocess.run([sys.executable, "-m", "lazyformer_fairseq.cli", *words.split()], cwd=ROOT, check=True)
    for name in ("train.bin", "valid.bin"):
        assert sha256_of(tmp_path / "built" / "shard0" / name) in PAGE
