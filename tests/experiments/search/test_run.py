"""Whole searches at tiny size: results, resumption, refusals; by Python and by the command."""

import copy
import functools
import json
from collections.abc import Callable, Collection
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from helpers import toy_texts

from lazyformer_fairseq.cli import main
from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.experiments.search import training
from lazyformer_fairseq.experiments.search.fairseq_model import FairseqSearch
from lazyformer_fairseq.experiments.search.run import run_search, time_updates
from lazyformer_fairseq.experiments.search.settings import Schedule, SearchSettings
from lazyformer_fairseq.experiments.search.training import Cost, PatternSearch
from lazyformer_fairseq.language_modeling.prepare import prepare
from lazyformer_fairseq.patterns.grammar import expand, plan
from lazyformer_fairseq.storage.json_files import write_json

CANDIDATES = ("s", "l", "f", "identity")
PRICES = {"s": 2.0, "f": 1.0, "s_read": 2.5, "l": 1.5, "rest": 1.0}
SMALL = "--tokens-per-sample 16 --max-positions 16 --encoder-embed-dim 8 --encoder-ffn-embed-dim 16"


@pytest.fixture(scope="session")
def masked_lm(data_folder) -> FairseqSearch:
    return FairseqSearch(
        SearchSettings(
            data=str(data_folder),
            task="masked-lm",
            arch="bert_tiny",
            baseline="sfsf",
            schedule=Schedule(constant_updates=3, max_updates=24, unchanged_share=99),
            batch_size=128,
            prices=PRICES,
            fairseq_options=tuple(SMALL.split()),
            log_interval=2,
        )
    )


@pytest.fixture(scope="session")
def language_model(masked_lm, tmp_path_factory) -> FairseqSearch:
    source = tmp_path_factory.mktemp("text")
    for split, count in (("train", 40), ("valid", 5), ("test", 5)):
        lines = "".join(f" {text.lower().replace('.', ' .')} \n" for text in toy_texts(count))
        (source / f"wiki.{split}.tokens").write_text(lines)
    prepare("wikitext", source, source / "data", None)
    return FairseqSearch(
        replace(
            masked_lm.settings,
            data=str(source / "data"),
            task="language-model",
            arch="transformer_xl_tiny",
            candidates=CANDIDATES,
            batch_size=16,
            fairseq_options=("--tgt-len", "12", "--mem-len", "12"),
        )
    )


@pytest.fixture
def either(request) -> FairseqSearch:
    return request.getfixturevalue(request.param.replace("-", "_"))


def training_of(fairseq: FairseqSearch, **changes: Any) -> PatternSearch:
    fairseq = copy.copy(fairseq)
    fairseq.settings = settings = replace(fairseq.settings, **changes)
    supernet = fairseq.build_supernet(settings.candidates).supernet
    return PatternSearch(supernet, settings, fairseq.loss_of, fairseq.parts(), settings.prices)


def searched(fairseq: FairseqSearch, path: Path, save_interval: int = 500, **changes: Any) -> PatternSearch:
    """A search without the pictures and tables at its end."""
    search = training_of(fairseq, **changes)
    search.run_in(path, save_interval)
    return search


@pytest.fixture(scope="session")
def whole(tmp_path_factory) -> Callable[[FairseqSearch], Path]:
    """The folder of a search that nothing stopped."""

    @functools.cache
    def folder(fairseq: FairseqSearch) -> Path:
        path = tmp_path_factory.mktemp(fairseq.settings.task)
        searched(fairseq, path)
        return path

    return folder


def contents(folder: Path) -> dict:
    """What must be equal of two searches that are the same."""
    history = (folder / "history.jsonl").read_text()
    return {"state": torch.load(folder / "state.pt", weights_only=True), "history": history}


def assert_equal(ours, theirs):
    if torch.is_tensor(ours):
        assert torch.equal(ours, theirs)
    elif isinstance(ours, dict):
        assert ours.keys() == theirs.keys()
        for key in ours:
            assert_equal(ours[key], theirs[key])
    elif isinstance(ours, list):
        assert len(ours) == len(theirs)
        for our, their in zip(ours, theirs, strict=True):
            assert_equal(our, their)
    else:
        assert ours == theirs


class Killed(BaseException):
    """Stands for a signal: nothing of ours catches it."""


@pytest.fixture
def killed_at(monkeypatch):
    """``killed_at(updates, change)``: saving the state after these updates, changed, ends the process."""
    save = training.save_state

    def at(updates: Collection[int], change: Callable[[dict], dict] = dict) -> None:
        def save_and_die(path, state):
            done = state["spent"]["weights_updates"] + state["spent"]["architecture_updates"]
            save(path, change(state) if done in updates else state)
            if done in updates:
                raise Killed

        monkeypatch.setattr(training, "save_state", save_and_die)

    return at


LANGUAGE_MODEL = pytest.param("language-model", marks=pytest.mark.slow)
EACH = pytest.param(range(1, 24), marks=pytest.mark.slow, id="after each update")


@pytest.mark.parametrize("either", ["masked-lm", LANGUAGE_MODEL], indirect=True)
@pytest.mark.parametrize("updates", [(5, 15), EACH])
def test_a_search_killed_anywhere_ends_as_one_that_was_not(either, updates, whole, killed_at, tmp_path, capsys):
    interval = 1 if len(updates) > 2 else 5
    killed_at(updates)
    for _ in updates:
        with pytest.raises(Killed):
            searched(either, tmp_path, interval)
    searched(either, tmp_path, interval)
    assert f"resumes at update {updates[-1]}." in capsys.readouterr().out
    assert_equal(contents(whole(either)), contents(tmp_path))


def as_0_1_0_wrote(state: dict) -> dict:
    """Its layout, with that of pytorch_optimizer's LAMB: settings of its own in a group, norms with each weight."""
    (weights, architecture), spent = state["batches"], Cost(**state["spent"])
    for group in state["weights"]["param_groups"]:
        for name in ("bias_correction", "max_weight_norm", "ratio_without_decay"):
            del group[name]
        group |= {"weight_decouple": False, "fixed_decay": False, "rectify": False, "adam": False, "foreach": None}
        group |= {"grad_averaging": True, "max_grad_norm": 1.0}
    for each in state["weights"]["state"].values():
        each |= dict.fromkeys(("weight_norm", "adam_norm", "trust_ratio"), torch.tensor(1.0))
    model = {f"model.{name}": weight for name, weight in state["model"].items()}
    position = weights["position"] + (architecture["position"] if architecture["epoch"] == weights["epoch"] else 0)
    progress = {"update": spent.weights_updates + spent.architecture_updates, "position": position}
    return {
        "training": {
            "supernet": {**model, "choices.logits": state["choices"]["0.logits"]},
            "weights": state["weights"],
            "architecture": state["architecture"][0],
        },
        "parts": [{}, {}],
        **{name: state[name] for name in ("random", "loss", "history")},
        "progress": {"epoch": weights["epoch"], **progress, **state["found"]},
    }


# Between the two updates of a stage of the architecture; behind one.
@pytest.mark.parametrize("update", [8, pytest.param(20, marks=pytest.mark.slow)])
def test_a_search_that_began_with_0_1_0_goes_on(masked_lm, update, whole, killed_at, tmp_path, capsys):
    killed_at([update], as_0_1_0_wrote)
    with pytest.raises(Killed):
        searched(masked_lm, tmp_path, save_interval=4)
    searched(masked_lm, tmp_path)
    assert "began with pytorch_optimizer's LAMB" in capsys.readouterr().out
    theirs, ours = contents(whole(masked_lm)), contents(tmp_path)
    for each in (theirs, ours):
        spent = each["state"].pop("spent")
        assert spent["weights_updates"] + spent["architecture_updates"] == spent["counted"] == 24
        del each["state"]["batches"]
    assert_equal(theirs, ours)


def test_results_fit_together(masked_lm, tmp_path, capsys):
    """The pattern can be planned, tables and pictures are there, held-apart stages came when they should."""
    candidates = ("s", "l", "f")
    settings = replace(masked_lm.settings, candidates=candidates, latency_price=1.0)
    result = run_search(settings, tmp_path)
    layers = json.loads((tmp_path / "probabilities.json").read_text())
    assert layers["candidates"] == list(candidates)
    assert [sum(row) for row in layers["layers"]] == pytest.approx([1] * 4)
    assert layers["layers"][0][1] == 0
    assert result["by_layer"] == expand(result["pattern"]) == "".join(part.text for part in plan(result["pattern"]))
    baseline, found = result["table"]
    assert (baseline["pattern"], found["pattern"]) == ("sfsf", result["pattern"])
    for picture in ("probabilities.png", "history.png"):
        assert (tmp_path / picture).read_bytes().startswith(b"\x89PNG")
    rows = [json.loads(line) for line in (tmp_path / "history.jsonl").read_text().splitlines()]
    assert rows[-1]["update"] == result["updates"] == 24
    assert {row["stage"] for row in rows} == {"weights", "architecture"}
    assert all(row["stage"] == "weights" and row["temperature"] == 5.0 for row in rows if row["update"] <= 3)
    assert rows[0]["expected_latency"] > rows[-1]["expected_latency"]
    # A second time it says that it is finished; other settings are refused.
    assert run_search(settings, tmp_path) == result
    assert "finished" in capsys.readouterr().out
    with pytest.raises(UserError, match="other settings .*seed is 1 there, 2 here"):
        run_search(replace(settings, seed=2), tmp_path)


@pytest.mark.slow
def test_a_seeded_search_is_repeatable_to_the_bit(masked_lm, whole, tmp_path):
    for name, seed in (("second", 1), ("third", 2)):
        searched(masked_lm, tmp_path / name, seed=seed)
    first, second, third = (contents(path) for path in (whole(masked_lm), tmp_path / "second", tmp_path / "third"))
    assert_equal(first, second)
    assert first["history"] != third["history"]


def test_it_ends_when_the_pattern_has_stayed_through_three_quarters_of_a_stage(masked_lm, tmp_path):
    schedule = Schedule(constant_updates=3, max_updates=24, unchanged_share=0.75)
    price = {"prices": {"s": 9.0, "s_read": 9.0, "f": 9.0, "l": 9.0, "rest": 0.0}, "latency_price": 100.0}
    search = searched(masked_lm, tmp_path, schedule=schedule, architecture_lr=0.1, **price)  # identity wins at once
    assert search.converged
    assert search.updates < 24
    assert search.unchanged >= 0.75 * len(search.batches[1].part)
    assert search.history[-1]["update"] == search.updates


def test_a_high_price_on_attention_leaves_none_of_it(masked_lm, tmp_path):
    prices = {"s": 100.0, "s_read": 100.0, "f": 0.0, "l": 0.0, "rest": 0.0}
    search = searched(masked_lm, tmp_path, prices=prices, latency_price=100.0, architecture_lr=0.1)
    assert "s" not in search.most_probable()
    assert search.choices[0].probabilities()[:, 0].max() < 0.3


@pytest.mark.slow
def test_where_nothing_is_left_the_result_says_so(masked_lm, tmp_path):
    prices = dict.fromkeys(PRICES, 100.0)
    settings = replace(masked_lm.settings, prices=prices, latency_price=100.0, architecture_lr=0.1)
    result = run_search(settings, tmp_path)
    assert result["pattern"] == ""
    assert [row["name"] for row in result["table"]] == ["baseline"]


def test_too_few_updates_for_a_stage_of_architecture(masked_lm, tmp_path):
    with pytest.raises(UserError, match="--max-updates 4: the first update of the architecture would be number"):
        run_search(replace(masked_lm.settings, schedule=Schedule(3, 4)), tmp_path)
    assert not (tmp_path / "state.pt").exists()  # other settings may be given


def test_a_damaged_state_is_named(masked_lm, tmp_path):
    write_json(tmp_path / "settings.json", asdict(masked_lm.settings))
    (tmp_path / "state.pt").write_bytes(b"PK")
    with pytest.raises(UserError, match="state.pt: damaged"):
        run_search(masked_lm.settings, tmp_path)


def test_another_folder_is_not_taken(masked_lm, tmp_path):
    (tmp_path / "thesis.tex").touch()
    with pytest.raises(UserError, match="holds no search"):
        run_search(masked_lm.settings, tmp_path)
    assert [file.name for file in tmp_path.iterdir()] == ["thesis.tex"]


def test_updates_can_be_timed(masked_lm, tmp_path):
    settings = replace(masked_lm.settings, candidates=("s", "l", "f", "identity"))
    table = time_updates(settings, tmp_path, rounds=2)
    assert "s, f, identity: weights" in table and "s, l, f, identity: architecture" in table
    assert len(json.loads((tmp_path / "update_cost.json").read_text())["seconds"]["baseline"]) == 2


def test_the_command_searches_and_measures_latency_itself(data_folder, tmp_path):
    command = (
        f"search {data_folder} {tmp_path / 'out'} --task masked-lm --arch par_bert_tiny --sublayers 2 --device cpu "
        "--batch-size 128 --constant-updates 3 --max-updates 12 --unchanged-share 99 --latency-price 0.1 "
        f"--latency-budget 0.5 {SMALL}"
    )
    done = CliRunner().invoke(main, command.split(), catch_exceptions=False)
    assert done.exit_code == 0
    assert "--sublayer-pattern '" in done.output or "no sublayer is left" in done.output
    assert json.loads((tmp_path / "out" / "latencies.json").read_text())["s"] > 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--task masked-lm --arch bert_tiny --sublayers 0", "--sublayers 0"),
        ("--task masked-lm --arch bert_tiny --sublayers 3", "odd"),
        ("--task masked-lm --arch bert_tiny --baseline-pattern sf --sublayers 4", "has 2 sublayers"),
        ("--task masked-lm --arch bert_tiny --candidates l,f", "add s"),
        ("--task masked-lm --arch bert_tiny --frobnicate 3", "--frobnicate: no such option here"),
        ("--task masked-lm --arch bert_tinny", "bert_tinny: no .* choose from bert_tiny, "),
        ("--task masked-lm --arch transformer", "transformer: .* from lazyformer, .*par_bert_base"),
        ("--task masked-lm --arch bert_tiny --sublayer-pattern sf", "the search sets it itself"),
        (
            "--task masked-lm --arch transformer_xl_tiny",
            "no architecture for --task masked-lm; choose from .*lazyformer",
        ),
        ("--task masked-lm --arch bert_tiny --architecture-share 0.0001", "make no second part"),
    ],
)
def test_mistakes_are_named(data_folder, tmp_path, options, message):
    command = f"search {data_folder} {tmp_path / 'out'} --device cpu {options}"
    with pytest.raises(UserError, match=message):
        CliRunner().invoke(main, command.split(), catch_exceptions=False)
    assert not (tmp_path / "out").exists()
