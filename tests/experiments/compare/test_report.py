"""Results read, joined or refused in words; times to a target; a report's verdict, tables, notes and picture."""

import json
import math
import re

import numpy as np
import pytest
from comparison_results import a_model, a_run, an_example, results_of
from hypothesis import given
from hypothesis import strategies as st
from in_process import invoke, refusal
from matplotlib.image import imread

from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.experiments.compare import results as reading
from lazyformer_fairseq.experiments.compare.report import notes, write_report


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    folder = tmp_path_factory.mktemp("report")
    return folder, write_report(reading.comparison_of(an_example()), folder)


def test_tables_fit_a_screen_and_a_verdict_leads(written):
    folder, markdown = written
    assert (folder / "table.md").read_text() == markdown
    assert imread(folder / "curves.png").shape[0] > 300
    tables = [line for line in markdown.splitlines() if line.startswith("|")]
    assert len(tables) == 7 + 6 and max(map(len, tables)) <= 120
    assert re.search(r"7.200 \(7.180 to 7.220\) \|", markdown)
    assert re.search(r"hf:bert .*not reached \| +not reached \| +- \| +- .* 0 of 3 \|", markdown)
    verdict = markdown.splitlines()[0]
    assert verdict.startswith("Target: 7.5000 (loss, bits); bert trained for 50.0 s (median; seeds: 3). Time")
    assert re.search(r"lazy_50% 0\.\d{3} \(0.\d{3} to 0.\d{3}\) \(whole clock\); hf:bert not reached", verdict)
    assert "- lazy_50%: `(sflf)x1`" in markdown and "- hf:bert: Hugging Face's own model" in markdown


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
    markdown = write_report(reading.comparison_of(results), tmp_path)
    assert "perplexity, per word | " in re.sub(" +", " ", markdown) and " test |" in markdown
    rows = [line for line in markdown.splitlines() if line.startswith("|")]
    assert max(map(len, rows)) <= 140, "with names as long as these"


def test_a_model_that_diverged_is_reported(tmp_path):
    models = {"bert": a_model({"1": a_run([9, 8])}, "bert"), "lost": a_model({"1": a_run([9, math.nan])}, "lost")}
    markdown = write_report(reading.comparison_of(results_of(models, "bert")), tmp_path)
    assert re.search(r"lost .* nan \|", markdown) and re.search(r"lost .*not reached", markdown)


def said(results: dict) -> str:
    return "\n".join(notes(reading.comparison_of(results)))


@pytest.mark.parametrize(
    ("budget", "seconds", "told"),
    [
        (
            15.0,
            5.0,
            "budget of 15.0 s: bert took 5.0 s instead of 15.0 s; lazy took 5.0 s instead of 15.0 s; lazy@0.5 took",
        ),
        (15.0, 45.0, "bert took 45.0 s instead of 15.0 s"),
        (15.0, 13.0, ""),
        (None, 5.0, ""),
    ],
)
def test_trainings_that_did_not_take_their_budget_are_named(budget, seconds, told):
    run = a_run([8.0, 7.0], seconds_per_update=seconds / 20)
    half = a_run([8.0, 7.5], seconds_per_update=seconds / 40)
    models = {"bert": a_model({"1": run}, "bert"), "lazy": a_model({"1": run}, "lazy")}
    models["lazy@0.5"] = a_model({"1": half}, "lazy", share=0.5)
    results = results_of(models, "bert")
    results["settings"]["budget"] = budget
    assert (told in said(results)) if told else ("missed their" not in said(results))


def test_a_noisy_machine_is_named():
    results = an_example()
    assert "The machine was noisy" not in said(results)
    results["models"]["hf:bert"]["milliseconds_per_update"] |= {"median": 10.0, "low": 8.0, "high": 13.0}
    assert "of the median (by 50% for hf:bert)." in said(results)


@pytest.mark.parametrize(
    ("losses", "at_unigram", "above_counts"),
    [
        ({"bert": 9.0, "lazy": 8.95}, "bert, lazy", ""),
        ({"bert": 8.8, "lazy": 9.4}, "lazy", "bert"),
        ({"bert": 8.8, "lazy": 4.5}, "", "bert, lazy"),
        ({"bert": 4.4, "lazy": 4.0}, "", ""),
    ],
)
@pytest.mark.parametrize("is_perplexity", [False, True])
def test_a_loss_that_counting_reaches_too_is_named(losses, at_unigram, above_counts, is_perplexity):
    """At the unigram loss a comparison has shown nothing; above the table of counts it has not shown much."""
    ends = {name: 2**loss if is_perplexity else loss for name, loss in losses.items()}
    results = results_of({name: a_model({"1": a_run([end])}, name) for name, end in ends.items()}, "bert")
    if is_perplexity:
        results["measure"] = {"name": "perplexity", "unit": "per token", "lower_is_better": True}
        for model in results["models"].values():
            for run in model["runs"].values():
                run["curve"]["perplexity"] = run["curve"].pop("loss")
    told = said(results)
    for sentence, names in (
        ("No more than 0.1 bits below the unigram loss: {}. These models have learned no more", at_unigram),
        ("Not below the loss of the table of counts: {}. Counting the two tokens on either side still", above_counts),
    ):
        assert (sentence.format(names) in told) if names else (sentence.partition("{")[0] not in told)
    unigram, counts = (512, 22.63) if is_perplexity else (9, 4.5)
    assert f": the unigram loss is {unigram:.2f}; a table of counts that sees the two tokens" in told
    assert f"reaches {counts:.2f} (" in told
    del results["data"]["yardsticks"]
    assert "below the" not in said(results) and "ardstick" not in said(results)


def test_notes_tell_what_is_not_equal():
    results = an_example()
    results["models"]["hf:bert"] |= {"parameters_without_embeddings": 154_000, "tries": [{"rate": 1e-3}]}
    told = said(results)
    assert "Parameters without embeddings, relative to bert: hf:bert +10.0%." in told
    assert (
        "Learning rates: bert 0.001 (of 0.0005, 0.001, 0.002); lazy_50% 0.002 (of" in told and "hf:bert 0.001." in told
    )
    assert "Not all models tried the same number of learning rates" in told
    assert "rate is at the edge of the grid, so a rate beyond it may be better: lazy_50% 0.002." in told


def test_the_command_joins_folders_and_files_and_writes_where_it_is_told(tmp_path):
    for name, seeds in (("one", "1"), ("two", "23")):
        results = an_example()
        for model in results["models"].values():
            model["runs"] = {seed: model["runs"][seed] for seed in seeds}
        (tmp_path / name).mkdir()
        (tmp_path / name / "results.json").write_text(json.dumps(results))
    given = ["compare", "report", tmp_path / "one", (tmp_path / "two" / "results.json").rename(tmp_path / "two.json")]
    printed = invoke(*given, "--output", tmp_path / "both", "--target", "7.6")
    assert "3 of 3" in printed and "Target: 7.6000 (loss, bits); bert trained for 50.0 s" in printed
    assert (tmp_path / "both" / "curves.png").is_file() and not (tmp_path / "one" / "curves.png").exists()
    invoke(*given, "--against", "updates", "--output", tmp_path / "narrow")
    three, one = (imread(tmp_path / folder / "curves.png").shape[1] for folder in ("both", "narrow"))
    assert one < three / 2
    assert "the report's folder with --output" in refusal(*given)
    assert "the report's folder with --output" in refusal("compare", "report", tmp_path / "two.json")


@pytest.mark.parametrize(
    ("options", "words"),
    [("{0} --target low", "--target low: must be a number or"), ("{0}/nowhere", "nowhere"), ("{0}", "no such file")],
)
def test_mistakes_of_the_command(tmp_path, options, words):
    assert words in refusal("compare", "report", *options.format(tmp_path).split())


# --- Results: joined or refused in words


def of_runs(**more):
    """A comparison to bert: ``of_runs(bert=run, other={"1": run, "2": run})``, and fields to replace."""
    runs = {name: more.pop(name) for name in list(more) if name in ("bert", "lazy", "other", "par")}
    runs = {name: run if "curve" not in run else {"1": run} for name, run in runs.items()}
    return reading.comparison_of(results_of({name: a_model(run, name) for name, run in runs.items()}, "bert", **more))


def of_seed(seed: int, end: float = 7.0, **more):
    return of_runs(bert={str(seed): a_run([9, end], 1)}, lazy={str(seed): a_run([9, end], 0.5)}, **more)


def test_folders_of_other_seeds_are_one_comparison_unless_machines_differ():
    joined = reading.join({"a": of_seed(1), "b": of_seed(2, 7.5), "c": of_seed(3, 7.2)})
    assert list(joined.models) == ["bert", "lazy"]
    assert joined.models["lazy"].finals("loss") == [7.0, 7.5, 7.2]
    assert reading.times_to_target(joined)[0].target == 7.2
    joined = reading.join({"a": of_seed(1), "b": of_seed(2, machine={"device": "another"})})
    assert joined.facts["machines"] == ["AMD EPYC, 2 cores", "another"]
    assert "lazy [b]" in joined.models, "seconds of two machines have no common median"


def test_folders_of_other_models_are_each_compared_with_their_own_baseline():
    joined = reading.join({"a": of_seed(1), "b": of_runs(bert=a_run([9, 6], 2), par=a_run([9, 6]))})
    assert list(joined.models) == ["bert [a]", "lazy", "bert [b]", "par"]
    assert joined.models["par"].baseline == "bert [b]" and joined.models["lazy"].baseline == "bert [a]"
    ratios = {time.model: time.ratios["seconds"].median for time in reading.times_to_target(joined)}
    assert ratios == {"bert [a]": 1, "lazy": 0.5, "bert [b]": 1, "par": 0.25}
    joined = reading.join({"a": reading.comparison_of(an_example()), "b": reading.comparison_of(an_example())})
    assert joined.models["lazy_50% [b]@0.7"].family == "lazy_50% [b]", "shorter trainings keep their share in the name"


@pytest.mark.parametrize(
    ("more", "named"),
    [
        ({"data": {"checksums": {"train.bin": "cc"}}}, r"the data \(by checksum\) is .*'aa'.* in the first and .*'cc'"),
        ({"task": "language-model"}, "the task is 'masked-lm' in the first and 'language-model'"),
        ({"measure": {"name": "loss", "unit": "nats"}}, "the metric is"),
        ({"settings": {"sizes": {"tokens_per_sample": 128}}}, "sizes.tokens_per_sample is None in the first and 128"),
        (
            {"data": {"checksums": {"train.bin": "aa", "valid.bin": "bb"}, "validation": {"seed": 7}}},
            "the validation setup",
        ),
    ],
)
def test_other_rules_are_not_joined(more, named):
    with pytest.raises(UserError, match=f"a and b cannot be joined: {named}"):
        reading.join({"a": of_seed(1), "b": of_seed(2, **more)})


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda found: found["models"]["bert"].update(runs={}), "the baseline, bert, has no finished run yet"),
        (lambda found: found.pop("measure"), "results.json does not contain the results of a comparison"),
        (lambda found: found["models"]["bert"]["runs"]["1"]["curve"]["seconds"].pop(), "the curve for seed 1 is empty"),
    ],
)
def test_results_that_lack_something_or_are_of_something_else_are_refused(tmp_path, spoil, message):
    results = an_example()
    spoil(results)
    (tmp_path / "results.json").write_text(json.dumps(results))
    with pytest.raises(UserError, match=message):
        reading.read_folder(tmp_path)
    with pytest.raises(UserError, match="the same folder is specified twice"):
        reading.read_folders([tmp_path, tmp_path])


# --- Times to a target

LOSS = reading.Measure("loss", "bits")
losses = st.lists(st.floats(0.5, 12), min_size=1, max_size=12)
targets = st.floats(0, 13)


def places(values: list[float]) -> np.ndarray:
    return np.arange(1.0, len(values) + 1)


def by_family(comparison, clock: str = "curve", target="baseline") -> dict:
    return {time.model: time for time in reading.times_to_target(comparison, target) if time.clock == clock}


@given(losses, targets)
def test_a_crossing_is_where_numpy_interpolates_to_the_target(values, target):
    spent, found = places(values), reading.first_crossing(places(values), np.array(values), target, LOSS)
    if min(values) > target:
        assert found == reading.NEVER
    else:
        assert min(np.interp(found, spent, values), values[0]) <= target + 1e-9
        assert all(value > target for value in values[: math.ceil(found) - 1])
    # Nothing is interpolated from a loss that is no number.
    for broken, where in (([math.nan, 2.0], 2), ([4.0, math.nan], reading.NEVER)):
        assert reading.first_crossing(places(broken), np.array(broken), 3, LOSS) == where
    mirrored = reading.Measure("accuracy", "", lower_is_better=False)
    assert found == reading.first_crossing(spent, -np.array(values), -target, mirrored), "where more is better"


def test_the_baselines_own_time_is_its_whole_training_unless_the_target_is_a_number():
    """Even where its curve dips below its end before that."""
    found = by_family(of_runs(bert=a_run([9, 6, 7]), other=a_run([9, 7, 6])))
    assert found["bert"].times[1]["updates"] == 30 and found["bert"].ratios["updates"].median == 1
    assert found["other"].times[1]["updates"] == 20
    comparison = of_runs(bert=a_run([9, 8, 7]), other=a_run([8, 7, 6]))
    found = by_family(comparison, target=8.0)
    assert found["bert"].times[1]["updates"] == 20 and found["other"].times[1]["updates"] == 10
    assert found["other"].ratios["updates"].median == 0.5
    assert by_family(comparison, target=6.5)["other"].ratios == {}, "the baseline has no time to compare with"


def test_the_target_is_the_median_of_the_baselines_ends_and_pairs_are_of_equal_seed():
    bert = {str(seed): a_run([9, end]) for seed, end in ((1, 7.0), (2, 7.5), (3, 8.0))}
    other = {str(seed): a_run([8, end], 0.25) for seed, end in ((1, 7.0), (2, 7.9), (4, 1.0))}
    found = by_family(of_runs(bert=bert, other=other))["other"]
    assert found.target == 7.5
    assert found.times[1]["updates"] == 15 and found.times[2]["updates"] == reading.NEVER
    ratio = found.ratios["seconds"]
    assert ratio.by_seed == {1: 15 * 0.25 / 10, 2: reading.NEVER}, "no baseline has seed 4"
    assert (ratio.low, ratio.median, ratio.high, ratio.reached) == (0.375, reading.NEVER, reading.NEVER, 1)


def test_the_whole_clock_takes_the_shortest_training_that_ends_well():
    models = {"bert": a_model({"1": a_run([9, 8])}, "bert")}
    for share, end in ((1.0, 6.0), (0.3, 8.2), (0.5, 8.0), (0.7, 7.0)):
        run = a_run([9, end], 0.5, every=round(10 * (9 - end)))
        models["other" if share == 1 else f"other@{share}"] = a_model({"1": run}, "other", share)
    comparison = reading.comparison_of(results_of(models, "bert"))
    found = by_family(comparison, "whole")
    assert set(found) == {"other"}, "a single length of training says nothing by this clock"
    assert found["other"].times[1]["updates"] == 20, "that of half the updates"
    assert found["other"].ratios["seconds"].median == 1
    assert by_family(comparison, "whole", 5.9)["other"].times[1]["seconds"] == reading.NEVER


def test_the_bounds_are_students_over_the_logarithms_of_the_ratios():
    ratios = reading.Ratio({1: 0.7, 2: 0.8, 3: 0.75})
    logs = np.log([0.7, 0.8, 0.75])
    half = 4.302652729911275 * logs.std(ddof=1) / math.sqrt(3)  # the 97.5% point of t with two degrees of freedom
    assert ratios.bounds == pytest.approx((math.exp(logs.mean() - half), math.exp(logs.mean() + half)))
    assert reading.Ratio({1: 0.7, 2: 0.8}).bounds is None
    assert reading.Ratio({1: 0.7, 2: 0.8, 3: reading.NEVER}).bounds is None


def test_the_families_of_a_comparison():
    comparison = reading.comparison_of(an_example())
    assert [model.name for model in comparison.families["lazy_50%"]] == ["lazy_50%@0.5", "lazy_50%@0.7", "lazy_50%"]
    assert comparison.longest("lazy_50%").finals("loss") == [7.2, 7.22, 7.18]
    assert comparison.baselines == ["bert"]
