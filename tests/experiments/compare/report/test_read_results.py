"""Results are read, joined where they may be, and refused in words where they may not."""

import json

import pytest
from comparison_results import a_model, a_run, an_example, results_of
from example_comparison import example_results

from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.experiments.compare.results import comparison_of, join, read_folder, read_folders
from lazyformer_fairseq.experiments.compare.times import times_to_target


def of_seed(seed: int, end: float = 7.0, **more):
    models = {
        name: a_model({str(seed): a_run([9, end], seconds)}, name) for name, seconds in (("bert", 1), ("lazy", 0.5))
    }
    return comparison_of(results_of(models, "bert", **more))


def test_families_are_the_models_of_one_name_the_shortest_training_first():
    comparison = comparison_of(example_results())
    assert [model.name for model in comparison.families["mine"]] == ["mine@0.7", "mine@0.8", "mine"]
    assert comparison.longest("mine").finals("loss") == [5.9, 5.92, 5.94]
    assert comparison.baselines == ["bert"]


def test_folders_of_other_seeds_are_one_comparison():
    joined = join({"a": of_seed(1), "b": of_seed(2, 7.5), "c": of_seed(3, 7.2)})
    assert list(joined.models) == ["bert", "lazy"]
    assert joined.models["lazy"].finals("loss") == [7.0, 7.5, 7.2]
    assert times_to_target(joined)[0].target == 7.2


def test_folders_of_other_models_are_each_compared_with_their_own_baseline():
    second = results_of(
        {"bert": a_model({"1": a_run([9, 6], 2)}, "bert"), "par": a_model({"1": a_run([9, 6])}, "par")}, "bert"
    )
    joined = join({"a": of_seed(1), "b": comparison_of(second)})
    assert list(joined.models) == ["bert [a]", "lazy", "bert [b]", "par"]
    assert joined.models["par"].baseline == "bert [b]" and joined.models["lazy"].baseline == "bert [a]"
    ratios = {time.model: time.ratios["seconds"].median for time in times_to_target(joined)}
    assert ratios == {"bert [a]": 1, "lazy": 0.5, "bert [b]": 1, "par": 0.25}


def test_shorter_trainings_keep_their_share_in_a_joined_name():
    joined = join({"a": comparison_of(an_example()), "b": comparison_of(an_example())})
    assert joined.models["lazy_50% [b]@0.7"].family == "lazy_50% [b]"


@pytest.mark.parametrize(
    ("more", "named"),
    [
        ({"data": {"checksums": {"train.bin": "cc"}}}, "the data's checksums is .*'aa'.* in the first and .*'cc'"),
        ({"task": "language-model"}, "the task is 'masked-lm' in the first and 'language-model'"),
        ({"measure": {"name": "loss", "unit": "nats"}}, "the measure is"),
        ({"settings": {"sizes": {"tokens_per_sample": 128}}}, "sizes.tokens_per_sample is None in the first and 128"),
        ({"settings": {"fairseq_options": ["--mask-prob", "0.4"]}}, "fairseq_options is None in the first and"),
        (
            {"data": {"checksums": {"train.bin": "aa", "valid.bin": "bb"}, "validation": {"seed": 7}}},
            "what is masked and counted in validation is None in the first and .*7",
        ),
    ],
)
def test_other_rules_are_not_joined(more, named):
    with pytest.raises(UserError, match=f"a and b cannot be joined: {named}"):
        join({"a": of_seed(1), "b": of_seed(2, **more)})


def test_machines_of_their_own_are_told():
    joined = join({"a": of_seed(1), "b": of_seed(2, machine={"device": "another"})})
    assert joined.facts["machines"] == ["AMD EPYC, 2 cores", "another"]
    assert "lazy [b]" in joined.models, "seconds of two machines have no common median"


def test_a_baseline_without_a_run_is_told(tmp_path):
    results = example_results()
    results["models"]["bert"]["runs"] = {}
    (tmp_path / "results.json").write_text(json.dumps(results))
    with pytest.raises(UserError, match="the baseline, bert, has no finished run yet"):
        read_folder(tmp_path)


@pytest.mark.parametrize(
    "spoil", [lambda results: results.pop("measure"), lambda results: results["models"].update(x=3)]
)
def test_results_of_something_else_are_refused(tmp_path, spoil):
    results = example_results()
    spoil(results)
    (tmp_path / "results.json").write_text(json.dumps(results))
    with pytest.raises(UserError, match="results.json: is no comparison's results"):
        read_folder(tmp_path)


def test_a_curve_of_columns_that_differ_in_length_is_refused(tmp_path):
    results = example_results()
    results["models"]["bert"]["runs"]["1"]["curve"]["seconds"].pop()
    (tmp_path / "results.json").write_text(json.dumps(results))
    with pytest.raises(UserError, match="the curve of seed 1 is empty, or its columns differ in length"):
        read_folder(tmp_path)


def test_a_folder_given_twice_is_refused(tmp_path):
    with pytest.raises(UserError, match="a folder is there twice"):
        read_folders([tmp_path, tmp_path])
