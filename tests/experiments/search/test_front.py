"""Whole fronts at tiny size: every method, its control, resumption, refusals."""

import functools
import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

from lazyformer_fairseq.cli import main
from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.experiments.search import front as a_front
from lazyformer_fairseq.experiments.search import training
from lazyformer_fairseq.experiments.search.latency import latency_of, rank_correlations
from lazyformer_fairseq.patterns.grammar import expand

PRICES = {"s": 2.0, "f": 1.0, "s_read": 2.5, "l": 1.5, "rest": 1.0}
CANDIDATES = "--candidates s,l,f,identity"
OPTIONS = (
    f"--task masked-lm --arch bert_tiny --sublayers 4 {CANDIDATES} --device cpu --batch-size 128 "
    "--max-updates 20 --constant-updates 4 --evaluations 9 --judged-batches 1 --check-patterns 3 "
    "--architecture-share 0.4 --log-interval 2 --tokens-per-sample 16 --max-positions 16 --encoder-embed-dim 8 "
    "--encoder-ffn-embed-dim 16"
)


@pytest.fixture(scope="module")
def prices(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("prices") / "prices.json"
    path.write_text(json.dumps(PRICES))
    return path


@pytest.fixture(scope="module")
def search(data_folder, prices):
    def run(out: Path, method: str, *more: str, budgets: str = "0.6,1.0"):
        command = ["search", str(data_folder), str(out), *OPTIONS.split(), "--latencies", str(prices)]
        command += ["--budgets", budgets, "--method", method, *more]
        return CliRunner().invoke(main, command, catch_exceptions=False)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(a_front, "ROUNDS_OF_FRONTS", 3)
        yield run


@pytest.fixture(scope="module")
def finished(search, tmp_path_factory) -> Callable[[str], Path]:
    """By a method's name the folder of a front that it found, beside its control."""

    @functools.cache
    def folder(method: str) -> Path:
        out = tmp_path_factory.mktemp(method) / "out"
        assert search(out, method).exit_code == 0
        return out

    return folder


def result_of(folder: Path) -> dict:
    return json.loads((folder / "result.json").read_text())


SLOW = [pytest.param(method, marks=pytest.mark.slow) for method in ("evolution", "greedy", "random")]


@pytest.mark.parametrize("method", ["gradient", *SLOW])
def test_a_method_finds_a_front_beside_its_control(method, search, finished):
    out = finished(method)
    result = result_of(out)
    baseline = latency_of(PRICES, "sfsf")
    assert ("control" in result) == (method != "random")
    for front in ("found", "control"):
        points = [point for point in result.get(front, {"points": ()})["points"] if point["pattern"]]
        losses = [point["loss"] for point in points]
        assert losses == sorted(losses, reverse=True)  # a higher budget is never worse
        for point in points:
            expand(point["pattern"])
            assert point["predicted"] <= point["budget"] * baseline * 1.0001
            assert point["predicted"] == pytest.approx(latency_of(PRICES, expand(point["pattern"])))
            assert point["measured"]["median"] > 0
    spent = result["found"]["cost"]
    assert spent["evaluations"] <= 9 and spent["counted"] <= 20
    assert spent["counted"] > 10 and spent["measured"] > 0
    assert (spent["architecture_updates"] > 0) == (method == "gradient")
    if method != "random":
        assert result["control"]["method"] == "random"
        assert result["control"]["cost"]["counted"] == pytest.approx(spent["counted"], abs=3)
    assert result["latency_check"]["correlation"]["n"] == 3
    for file in ("front.png", "latency_check.png"):
        assert (out / file).read_bytes().startswith(b"\x89PNG")
    assert "inherited loss, bits" in (out / "table.md").read_text()
    again = search(out, method)
    assert "finished" in again.output and result_of(out) == result
    with pytest.raises(UserError, match="other settings .*evaluations"):
        search(out, method, "--evaluations", "8")


class Killed(BaseException):
    """Stands for a signal: nothing of ours catches it."""


@pytest.mark.parametrize("method", ["gradient", pytest.param("evolution", marks=pytest.mark.slow)])
def test_a_front_killed_anywhere_ends_as_one_that_was_not(method, search, finished, tmp_path, monkeypatch):
    folders = (finished(method), tmp_path / "killed")
    save, saves = training.save_state, []

    def save_and_die(path, state):
        save(path, state)
        saves.append(path)
        if len(saves) < 3:
            raise Killed

    monkeypatch.setattr(training, "save_state", save_and_die)
    for _ in range(2):
        with pytest.raises(Killed):
            search(tmp_path / "killed", method, "--no-control", "--save-interval", "2")
    search(tmp_path / "killed", method, "--no-control", "--save-interval", "2")
    whole, killed = (result_of(folder)["found"] for folder in folders)
    assert [point["loss"] for point in whole["points"]] == [point["loss"] for point in killed["points"]]
    states = [torch.load(folder / "state.pt", weights_only=True) for folder in folders]
    assert states[0]["history"] == states[1]["history"]
    assert all(torch.equal(states[0]["model"][name], value) for name, value in states[1]["model"].items())


@pytest.mark.slow
def test_a_front_of_language_models_which_remember(lm_data, prices, tmp_path, monkeypatch):
    monkeypatch.setattr(a_front, "ROUNDS_OF_FRONTS", 3)
    options = (
        "--task language-model --arch transformer_xl_tiny --sublayers 4 --candidates s,l,k,f,identity --device cpu "
        "--batch-size 8 --max-updates 8 --evaluations 4 --judged-batches 2 --check-patterns 0 --budgets 0.8,1.0 "
        "--method evolution --no-control --train-updates 1 --tgt-len 8 --mem-len 8 --decoder-embed-dim 8 "
        "--decoder-ffn-embed-dim 8 --decoder-attention-heads 2 --adaptive-softmax-cutoff"
    )
    prices = {**json.loads(prices.read_text()), "k": 1.8}
    (tmp_path / "prices.json").write_text(json.dumps(prices))
    command = ["search", str(lm_data), str(tmp_path / "out"), *options.split(), "", "--latencies"]
    done = CliRunner().invoke(main, [*command, str(tmp_path / "prices.json")], catch_exceptions=False)
    assert done.exit_code == 0 and "seconds of processor time" in done.output
    result = result_of(tmp_path / "out")
    assert "control" not in result and result["latency_check"]["correlation"] is None
    assert result["found"]["points"][-1]["loss"] <= result["found"]["points"][0]["loss"]


def test_a_finished_front_is_trained_from_scratch_beside_its_control(search, finished, tmp_path):
    shutil.copytree(finished("gradient"), tmp_path, dirs_exist_ok=True)
    before = result_of(tmp_path)
    some = ("--train-updates", "1", "--train-patterns", "3", "--train-seeds", "2")
    done = search(tmp_path, "gradient", *some)
    assert done.exit_code == 0 and "loss from scratch, of 3 patterns" in done.output
    assert result_of(tmp_path) == before
    trained = json.loads((tmp_path / "trained.json").read_text())
    points = before["found"]["points"] + before["control"]["points"]
    found = {expand(point["pattern"]) for point in points}
    assert set(trained["losses"]) == {"sfsf", *found}
    assert all(set(of_seeds) == {"2"} for of_seeds in trained["losses"].values())
    for inherited, true in trained["inherited_and_from_scratch"].values():
        assert inherited > 0 and true > 0
    assert trained["cpu_seconds"] > 0
    assert (tmp_path / "inherited.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(UserError, match="--train-patterns 9: this search judged 3"):
        search(tmp_path, "gradient", "--train-updates", "1", "--train-patterns", "9")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--method gradient --evaluations 3", "--evaluations: of a front; give --budgets"),
        ("--method evolution --budgets 0.5,x", "'--budgets': x: give shares"),
        ("--method evolution --budgets 0.5,0.5", "'--budgets': 0.5 is there twice"),
        ("--method evolution --budgets 0.01", "no pattern of these candidates .* costs less"),
        ("--method evolution --latency-budget 0.5", "a front has --budgets"),
        ("--method evolution --evaluations 900", "900 evaluations on . batches cost as much as"),
        ("--method random --check-patterns 2", "needs 3 or more"),
        ("--method gradient --train-updates 2", "--train-updates: of a front"),
        ("--method random --train-patterns 3", "give --train-updates too"),
        ("--method greedy --candidates f,identity", "lack sublayers of it"),
    ],
)
def test_mistakes_are_named(options, message, data_folder, prices, tmp_path):
    base = OPTIONS.split("--evaluations")[0].split()
    if "--candidates" in options:
        base = " ".join(base).replace(CANDIDATES, "").split()
    sizes = "--tokens-per-sample 16 --max-positions 16 --encoder-embed-dim 8 --encoder-ffn-embed-dim 16".split()
    command = ["search", str(data_folder), str(tmp_path / "out"), *base, *sizes, "--latencies", str(prices)]
    if "--evaluations" not in options and "--method gradient" not in options:
        options += " --evaluations 9 --judged-batches 1"
    done = CliRunner().invoke(main, [*command, *options.split()])
    assert re.search(message, str(done.exception) if isinstance(done.exception, UserError) else done.output)


def test_rank_correlations_are_of_ranks():
    assert rank_correlations([1, 2, 3, 4], [10, 20, 40, 30])["spearman"] == pytest.approx(0.8)
    assert rank_correlations([1, 2, 3], [1, 8, 27])["kendall"] == 1
    assert rank_correlations([1, 2], [2, 1]) is None
