"""A report's files: tables that fit a screen, numbers in full precision, LaTeX that is whole, pictures."""

import csv
import json
import math
import re

import pytest
from comparison_results import a_model, a_run, an_example, results_of
from in_process import invoke, refusal
from matplotlib.image import imread

from lazyformer_fairseq.experiments.compare import report as pictures
from lazyformer_fairseq.experiments.compare.report import notes, write_report
from lazyformer_fairseq.experiments.compare.results import comparison_of, times_to_target


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    folder = tmp_path_factory.mktemp("report")
    return folder, write_report(an_example(), folder)


def test_tables_fit_a_screen_and_the_csv_has_every_number_in_full(written):
    folder, markdown = written
    assert (folder / "table.md").read_text() == markdown
    tables = [line for line in markdown.splitlines() if line.startswith("|")]
    assert len(tables) == 7 + 6 and max(map(len, tables)) <= 120
    assert re.search(r"7.200 \(7.180 to 7.220\) \| +s, ms, MiB \|", markdown)
    assert re.search(r"hf:bert .*not reached \| +not reached \| +- \| +- .* 0 of 3 \|", markdown)
    assert "- lazy_50%: `(sflf)x1`" in markdown and "- hf:bert: Hugging Face's own model" in markdown
    with (folder / "table.csv").open(newline="") as file:
        models = {row["model"]: row for row in csv.DictReader(file)}
    assert float(models["lazy_50%@0.7"]["share"]) == 0.7 and models["lazy_50%@0.7"]["of"] == "lazy_50%"
    assert float(models["bert"]["loss_highest"]) == 7.52 and float(models["bert"]["seconds"]) == 50
    assert [name for name, row in models.items() if row["on_front_of_update"] == "1"] == ["lazy_50%"]


def test_latex_is_balanced_and_escaped(written):
    text = (written[0] / "table.tex").read_text()
    body = "\n".join(line for line in text.splitlines() if not line.startswith("%"))
    assert body.count(r"\begin{tabular}") == body.count(r"\end{tabular}") == 2
    assert body.count(r"\toprule") == body.count(r"\bottomrule") == 2
    assert r"lazy\_50\%" in body and not re.search(r"(?<!\\)[_%#$]", body)
    assert body.count("{") - body.count(r"\{") == body.count("}") - body.count(r"\}")
    for table in body.split(r"\begin{tabular}")[1:]:
        columns = re.match(r"\{([lr]+)\}", table)[1]
        cells = [line for line in table.splitlines() if line.strip().endswith(r"\\")]
        assert cells and all(line.count("&") == len(columns) - 1 for line in cells)


def test_pictures_are_drawn(written):
    for name in ("curves", "times", "fronts"):
        picture = imread(written[0] / f"{name}.png")
        assert picture.shape[0] > 300 and picture[..., :3].std() > 0.05


def test_language_models_have_a_test_split(tmp_path):
    def run(*values: float) -> dict:
        found = a_run(list(values))
        found["curve"]["perplexity"] = found["curve"].pop("loss")
        found["final"] = {"perplexity": values[-1], "bits": math.log2(values[-1]), "test_perplexity": values[-1] + 1}
        return found

    latency = {"n": 50, "median": 3.0, "low": 2.8, "high": 3.3}
    models = {
        name: a_model({"1": run(300, end), "2": run(310, end + 2)}, name, latency_milliseconds=latency)
        for name, end in (("transformer_xl", 120.0), ("par_transformer", 118.0))
    }
    measure = {"name": "perplexity", "unit": "per word", "lower_is_better": True}
    results = results_of(models, "transformer_xl", measure=measure, task="language-model")
    markdown = write_report(results, tmp_path)
    assert "perplexity, per word | " in re.sub(" +", " ", markdown) and "of test" in markdown
    rows = [line for line in markdown.splitlines() if line.startswith("|")]
    assert max(map(len, rows)) <= 140, "with names as long as these"


def test_a_model_that_diverged_is_reported(tmp_path):
    models = {"bert": a_model({"1": a_run([9, 8])}, "bert"), "lost": a_model({"1": a_run([9, math.nan])}, "lost")}
    markdown = write_report(results_of(models, "bert"), tmp_path)
    assert re.search(r"lost .* nan \|", markdown) and re.search(r"lost .*not reached", markdown)


def test_a_typical_curve_meets_each_seed_where_it_was_evaluated():
    runs = {"1": a_run([9, 8, 7], every=10), "2": a_run([10, 8], seconds_per_update=1.5, every=20)}
    (model,) = comparison_of(results_of({"bert": a_model(runs, "bert")}, "bert")).models.values()
    spent, values = pictures.typical(model, "seconds", "loss")
    assert spent.tolist() == [20, 30]  # of updates 20 and 30, at 0.5 and 1.5 seconds
    assert values.tolist() == [[8, 7], [10, 9]]


def said(results: dict, target="baseline") -> str:
    comparison = comparison_of(results)
    return "\n".join(notes(comparison, times_to_target(comparison, target), target))


def test_notes_tell_what_is_not_equal():
    results = an_example()
    results["models"]["hf:bert"] |= {"parameters_without_embeddings": 154_000, "tries": [{"rate": 1e-3}]}
    results["models"]["hf:bert"]["runs"].popitem()
    told = said(results)
    assert "Parameters, without embeddings, that are not bert's: hf:bert +10.0%." in told
    assert "Not as many rates tried for each: bert 3, lazy_50% 3, hf:bert 1." in told
    assert "The highest rate that was tried was the best, so a higher one may be better: lazy_50%." in told
    assert "Fewer than 3 seeds, so the spread is not known: hf:bert." in told
    assert "Target: 7.5000 (loss, bits), the median over 3 seeds of bert's end." in told
    assert "50.0 seconds: it reaches its end there by definition." in told
    assert "Ratios are to the time that bert took to reach it" in said(results, 7.6)


def test_notes_tell_what_is_missing_and_what_a_curve_hides():
    results = an_example()
    assert "may take less" not in said(results)
    assert "No shorter training of lazy_50% was tried" in said(results, 7.7)
    assert "Initialised by code of their own: hf:bert." in said(results)
    results["settings"] |= {"sizes": {"relative_position_buckets": 32}, "normalize_before": True}
    told = said(results)
    assert "none of the relative positions (32 buckets) that models of ours have: hf:bert." in told
    assert "LayerNorms behind sublayers, where others have them before: hf:bert." in told
    results = results_of({"bert": a_model({"1": a_run([9, 6, 7])}, "bert")}, "bert")
    assert "though its curve first touches the target at 0.556 of it." in said(results)


def test_the_command_joins_folders_and_files_and_writes_where_it_is_told(tmp_path):
    for name, seeds in (("one", "1"), ("two", "23")):
        results = an_example()
        for model in results["models"].values():
            model["runs"] = {seed: model["runs"][seed] for seed in seeds}
        (tmp_path / name).mkdir()
        (tmp_path / name / "results.json").write_text(json.dumps(results))
    given = ["compare", "report", tmp_path / "one", (tmp_path / "two" / "results.json").rename(tmp_path / "two.json")]
    printed = invoke(*given, "--output", tmp_path / "both", "--target", "7.6")
    assert "3 of 3" in printed and "Target: 7.6" in printed
    assert (tmp_path / "both" / "curves.png").is_file() and not (tmp_path / "one" / "curves.png").exists()
    assert "say with --output" in refusal(*given)
    assert "say with --output" in refusal("compare", "report", tmp_path / "two.json")


@pytest.mark.parametrize(
    ("options", "words"),
    [("{0} --target low", "--target low: is neither"), ("{0}/nowhere", "nowhere"), ("{0}", "no such file")],
)
def test_mistakes_of_the_command(tmp_path, options, words):
    assert words in refusal("compare", "report", *options.format(tmp_path).split())
