import math

from comparison_results import a_model, a_run, an_example, results_of
from hypothesis import given
from hypothesis import strategies as st

from lazyformer_fairseq.experiments.compare.results import comparison_of
from lazyformer_fairseq.experiments.compare.times import fronts, not_dominated

points = st.dictionaries(st.text("abc", min_size=1), st.tuples(st.integers(0, 5), st.integers(0, 5)), min_size=1)


@given(points)
def test_whoever_is_not_on_the_front_is_beaten_by_somebody_on_it_and_nobody_on_it_is(named):
    front = set(not_dominated(named))
    assert front

    def is_beaten_by(name: str, other: str) -> bool:
        (cost, loss), (others_cost, others_loss) = named[name], named[other]
        return others_cost <= cost and others_loss <= loss and (others_cost < cost or others_loss < loss)

    assert not any(is_beaten_by(name, other) for name in front for other in named)
    assert all(any(is_beaten_by(name, other) for other in front) for name in named.keys() - front)


@given(points)
def test_where_more_is_better_the_front_is_mirrored(named):
    mirrored = {name: (cost, -quality) for name, (cost, quality) in named.items()}
    assert not_dominated(mirrored, lower_is_better=False) == not_dominated(named)


def test_the_fronts_of_a_comparison():
    found = {front.name: front for front in fronts(comparison_of(an_example()))}
    assert list(found) == ["training", "update", "memory"]
    assert found["training"].points["bert"] == (50, 7.5)
    assert found["training"].members == ("lazy_50%@0.5", "lazy_50%@0.7", "lazy_50%")
    assert found["update"].members == ("lazy_50%",)
    assert found["memory"].points["lazy_50%"] == (80, 7.2)
    assert set(found["memory"].points) == {"bert", "lazy_50%", "hf:bert"}, "a shorter training changes no memory"


def test_a_measured_latency_counts_before_the_time_of_an_update():
    models = {"bert": a_model({"1": a_run([9, 8])}, "bert", latency_milliseconds={"n": 3, "median": 4.0})}
    found = fronts(comparison_of(results_of(models, "bert")))
    assert [front.name for front in found] == ["training", "latency", "memory"]
    assert found[1].points == {"bert": (4.0, 8)}


def test_a_model_that_diverged_is_on_no_front():
    models = {"bert": a_model({"1": a_run([9, 8])}, "bert"), "lost": a_model({"1": a_run([9, math.nan], 0.1)}, "lost")}
    assert all(front.members == ("bert",) for front in fronts(comparison_of(results_of(models, "bert"))))
