"""Orders drawn are what they should be, and a tiny run of all has its table and its two figures; it resumes."""

import csv
import json
from collections import Counter

import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from lazyformer_fairseq.cli import main
from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.experiments.search.orders import (
    random_balances,
    random_orders,
    sandwich,
    share_of_attention_below,
)
from lazyformer_fairseq.experiments.trainings import Training
from lazyformer_fairseq.patterns.architectures import CAUSAL_ARCHITECTURES
from lazyformer_fairseq.patterns.grammar import expand


def test_sandwich_is_that_of_the_named_model():
    assert sandwich(32, 6) == expand(CAUSAL_ARCHITECTURES["sandwich_transformer_base"].sublayer_pattern)
    assert sandwich(16, 0) == "sf" * 8
    with pytest.raises(UserError, match="--sandwich 8: with 16 sublayers, from 0 to 7"):
        sandwich(16, 8)


@given(st.integers(4, 10), st.integers(0, 1000))
def test_random_orders_have_as_many_of_either_kind_and_are_distinct(half, seed):
    beside = [sandwich(2 * half, 0)]
    found = random_orders(2 * half, 8, seed, beside)
    assert len({*found, *beside}) == 9
    assert all(Counter(order) == {"s": half, "f": half} for order in found)
    assert found == random_orders(2 * half, 8, seed, beside)


@given(st.integers(4, 10), st.integers(0, 1000))
def test_random_balances_have_the_baselines_parameters(half, seed):
    parameters = {"s": 100, "f": 199}
    found = random_balances(2 * half, 8, seed, parameters)
    for order in found:
        assert sum(parameters[letter] for letter in order) == pytest.approx(half * 299, rel=0.02)
    assert len({len(order) for order in found}) > 1 or half < 6


def test_too_many_orders_are_refused():
    with pytest.raises(UserError, match="--orders 7: only 6 were found"):
        random_orders(4, 7, 1)
    with pytest.raises(UserError, match="--sublayers 5: give an even number"):
        random_orders(5, 1, 1)


def test_attention_below_is_counted():
    assert [share_of_attention_below(order) for order in ("sfsf", "ssff", "ffss")] == [0.5, 1.0, 0.0]


SIZES = {
    "masked-lm": "--arch bert_tiny --tokens-per-sample 16 --max-positions 16 --encoder-embed-dim 8 "
    "--encoder-ffn-embed-dim 16",
}


def test_orders_are_trained_reported_and_resumed(data_folder, tmp_path, monkeypatch):
    command = ["search", "orders", str(data_folder), str(tmp_path / "out"), "--task", "masked-lm"]
    options = (
        f"{SIZES['masked-lm']} --sublayers 6 --orders 3 --balances 2 --sandwich 1 --baseline-seeds 2 --updates 4 "
        "--batch-size 64 --device cpu"
    )
    save, saves = Training.save, []

    def save_and_stop(training, with_optimizer=True):
        save(training, with_optimizer)
        saves.append(training.updates)
        if len(saves) == 3:
            raise KeyboardInterrupt

    monkeypatch.setattr(Training, "save", save_and_stop)
    stopped = CliRunner().invoke(main, [*command, *options.split()])
    assert stopped.exit_code == 130 and "rerun to resume" in stopped.output
    done = CliRunner().invoke(main, [*command, *options.split()], catch_exceptions=False)
    assert done.exit_code == 0 and "seconds of processor time" in done.output
    rows = json.loads((tmp_path / "out" / "results.json").read_text())["rows"]
    assert Counter((row["figure"], row["what"]) for row in rows) == {
        ("counts", "random"): 3, ("counts", "sandwich"): 1, ("counts", "interleaved"): 2,
        ("parameters", "random"): 2, ("parameters", "sandwich"): 1, ("parameters", "interleaved"): 2,
    }  # fmt: skip
    assert all(row["loss"] > 0 and row["cpu_seconds"] > 0 for row in rows)
    same = {row["parameters"] for row in rows if row["figure"] == "counts"}
    assert len(same) == 1
    losses = [row["loss"] for row in rows if row["what"] == "interleaved"][:2]
    assert losses[0] != losses[1]  # of two seeds
    assert len(list(csv.DictReader((tmp_path / "out" / "orders.csv").open()))) == len(rows)
    assert (tmp_path / "out" / "orders.png").read_bytes().startswith(b"\x89PNG")
