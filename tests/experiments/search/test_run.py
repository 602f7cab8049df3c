"""Whole searches at tiny size: one pattern, and fronts; resuming, refusals; by the command."""

import functools
import json
import math
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from helpers import assert_equal_state, golden_experiments
from in_process import invoke, refusal

from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.experiments.search import latency, material, supernet_objective, training
from lazyformer_fairseq.experiments.search.halving import HalvingRuns
from lazyformer_fairseq.experiments.search.latency import latency_of
from lazyformer_fairseq.experiments.search.run import supernet_job
from lazyformer_fairseq.experiments.search.settings import SearchSettings
from lazyformer_fairseq.experiments.search.supernet_objective import WEIGHTS
from lazyformer_fairseq.modules.networks.stack import Stack
from lazyformer_fairseq.patterns.grammar import expand
from lazyformer_fairseq.storage.json_files import read_checked_json
from lazyformer_fairseq.training import loop
from lazyformer_fairseq.training.loop import TrainingLoop
from lazyformer_fairseq.training.objectives.masked_lm import MaskedLMObjective
from lazyformer_fairseq.training.run_record import read_metrics, read_run

PRICES = {"s": 2.0, "f": 1.0, "s_read": 2.5, "l": 1.5, "rest": 1.0}
CANDIDATES = "--candidates s,l,f,identity"
SMALL = "--tokens-per-sample 16 --max-positions 16 --encoder-embed-dim 8 --encoder-ffn-embed-dim 16"
OPTIONS = (
    f"--task masked-lm --arch bert_tiny --sublayers 4 {CANDIDATES} --device cpu --batch-size 128 --max-updates 20 "
    f"--constant-updates 4 {SMALL}"
)
FRONT = "--evaluations 7 --budgets 0.6,1.0 --rungs 2 --validation-tokens 256"
WORDS = {"front": FRONT.split(), "gradient": []}


@pytest.fixture(autouse=True, scope="module")
def small():
    """Few rounds, many lines of metrics; enough data for the architecture."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(latency, "ROUNDS_OF_FRONTS", 3)
        patched.setattr(loop, "LOG_INTERVAL", 2)
        patched.setattr(supernet_objective, "ARCHITECTURE_SHARE", 0.4)
        yield


@pytest.fixture(scope="module")
def prices(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("prices") / "prices.json"
    path.write_text(json.dumps(PRICES))
    return path


@pytest.fixture(scope="module")
def search(data_folder, prices):
    """``search(out, options ...)``: what the command prints."""
    return lambda out, *more: invoke("search", data_folder, out, *OPTIONS.split(), "--latencies", prices, *more)


@pytest.fixture(scope="module")
def finished(search, tmp_path_factory) -> Callable[[str], Path]:
    """By its name the folder of a finished search: a front, or one pattern by gradient descent."""

    @functools.cache
    def folder(algorithm: str) -> Path:
        out = tmp_path_factory.mktemp(algorithm) / "out"
        search(out, *WORDS[algorithm])
        return out

    return folder


def result_of(folder: Path) -> dict:
    return read_checked_json(folder / "result.json")


def test_a_front_stands_beside_its_control(search, finished):
    out = finished("front")
    result, table = result_of(out), (out / "table.md").read_text()
    baseline = latency_of(PRICES, "sfsf")
    fronts = ["found", "control", "largest", "ratio"]
    for front in fronts:
        points = [point for point in result[front]["points"] if point["pattern"]]
        assert len(points) == 2 or front == "ratio"
        for point in points:
            assert point["predicted"] <= point["budget"] * baseline * 1.0001
            assert point["predicted"] == pytest.approx(latency_of(PRICES, expand(point["pattern"])))
            assert point["measured"]["median"] > 0 and 5 < point["loss"] < 9
            assert f"`{point['pattern']}`" in table and f"{point['loss']:.3f}" in table
        if front in ("found", "control"):
            assert points[0]["loss"] >= points[1]["loss"]  # a higher budget is never worse
    losses = {each["pattern"]: each["losses"] for each in result["trained"]}
    drawn = [pattern for pattern, of_rungs in losses.items() if of_rungs[0] is not None]
    cost, lengths = result["found"]["cost"], result["settings"]["lengths"]
    assert lengths == [6, 20] and len(drawn) == 7
    assert cost["patterns"] == 7 and cost["trained_whole"] == 2
    assert result["control"]["method"] == "random, the control"
    assert result["control"]["cost"]["counted"] == pytest.approx(cost["counted"], abs=20)
    assert (out / "front.png").read_bytes().startswith(b"\x89PNG")
    assert not [*out.glob("**/trunk.pt")], "what nothing goes on from takes no place"
    assert {path.parent.name for path in out.glob("trainings/**/*.pt")} == {"20"}
    points = [each for front in fronts for each in result[front]["points"] if each["pattern"]]
    ends = [each["loss"] for each in (result["baseline"], *points)]
    is_at_the_unigram_loss = max(ends) > result["yardsticks"]["unigram"] - 0.1
    assert is_at_the_unigram_loss == ("No more than 0.1 bits below the unigram loss: " in table)
    assert 5 < result["yardsticks"]["unigram"] < 9 and "Yardsticks (bits): the unigram loss is " in table
    (out / "table.md").unlink()
    (out / "front.png").write_bytes(b"damaged")
    assert "finished" in search(out, *FRONT.split()) and result_of(out) == result
    assert (out / "table.md").read_text() == table and (out / "front.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(UserError, match="different settings .*evaluations"):
        search(out, *FRONT.split(), "--evaluations", "8")


def test_what_goes_on_is_to_the_bit_what_it_would_be_from_scratch(finished, data_folder, prices, tmp_path):
    """And the best of each budget go on."""
    result, given = result_of(finished("front")), SMALL.split()
    more = {"budgets": (0.6, 1.0), "rungs": 2, "max_updates": 20, "validation_tokens": 256}
    settings = SearchSettings(
        str(data_folder), "masked-lm", "bert_tiny", "sfsf", ("s", "l", "f", "identity"), **more, fairseq_options=given
    )
    trainings, bands = HalvingRuns(material.SearchContext(settings), tmp_path), [[], []]
    highest = 0.6 * latency_of(PRICES, "sfsf") * 1.0001
    for each in result["trained"]:
        if each["losses"][0] is not None:
            bands[each["predicted"] > highest].append((*each["losses"], expand(each["pattern"])))
    for band in bands:
        _, whole, best = min(band)
        trainings.train([best], "whole")
        assert trainings.losses[best] == [None, whole]


@pytest.mark.slow
def test_trainings_in_processes_of_their_own_come_to_the_same(search, finished, tmp_path):
    search(tmp_path / "out", *FRONT.split(), "--alone")
    assert result_of(tmp_path / "out")["trained"] == result_of(finished("front"))["trained"]


@pytest.mark.slow
def test_with_all_kept_ranks_are_compared_over_all(search, tmp_path):
    words = "--evaluations 4 --budgets 1.0 --rungs 2 --keep 1 --no-control --validation-tokens 256"
    said = search(tmp_path / "out", *words.split())
    assert "4 for 6 updates, 4 for 20 updates. This costs as much as about" in said
    result = result_of(tmp_path / "out")
    *drawn, baseline = (each["losses"] for each in result["trained"])
    first, last = zip(*drawn, strict=True)
    assert baseline[0] is None
    assert result["rank_correlations"] == {"6": latency.rank_correlations(first, last)}
    assert "Losses after 6 updates and after complete runs, over 4 patterns" in said
    assert "control" not in result and "largest" not in result


class Killed(BaseException):
    """Stands for a signal: nothing of ours catches it."""


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", ["gradient", "front"])
def test_a_search_killed_anywhere_ends_as_one_that_was_not(algorithm, search, finished, tmp_path, monkeypatch):
    saves, whole, out = [], finished(algorithm), tmp_path / "killed"
    save = TrainingLoop.save

    def save_and_die(*given, **more):
        save(*given, **more)
        saves.append(given)
        if len(saves) in (1, 2, 4, 9, 14):
            raise Killed

    monkeypatch.setattr(training, "SAVE_INTERVAL", 2)
    monkeypatch.setattr(TrainingLoop, "save", save_and_die)
    kills = 0
    while not (out / "result.json").exists():
        try:
            search(out, *WORDS[algorithm])
        except Killed:
            kills += 1
    assert kills >= 3
    found, expected = result_of(out), result_of(whole)
    assert found["trained"] == expected["trained"] and found["probabilities"] == expected["probabilities"]
    for one in whole.glob("**/*.pt"):
        other = out / one.relative_to(whole)
        assert_equal_state(*(torch.load(path, weights_only=True)["model"] for path in (one, other)))


def test_one_pattern_is_the_most_probable_after_so_many_updates(data_folder, tmp_path, monkeypatch):
    """Latency is measured; no budget, no control. DATA is kept as it was given, so that a result names no machine."""
    out = tmp_path / "out"
    monkeypatch.chdir(data_folder.parent)
    invoke("search", data_folder.name, out, *OPTIONS.split(), "--seed", 2)
    result, prices = result_of(out), json.loads((out / "latencies.json").read_text())
    assert result["settings"]["data"] == data_folder.name and prices["s"] > 0
    assert "control" not in result
    cost, (point,) = result["found"]["cost"], result["found"]["points"]
    assert cost == {"weights_updates": 12, "architecture_updates": 8}
    assert not (out / "front.png").exists() and result["trained"] == []
    (rows,) = result["probabilities"]
    assert [sum(row) for row in rows] == pytest.approx([1] * 4) and rows[0][1] == 0
    by_layer = ""
    for row in rows:
        shares = {name: share for name, share in zip("slf-", row, strict=True) if name != "l" or "s" in by_layer}
        by_layer += max(shares, key=shares.get)
    assert point["by_layer"] == by_layer
    assert point["predicted"] == pytest.approx(latency_of(prices, expand(point["pattern"])))
    assert (out / "probabilities.png").read_bytes().startswith(b"\x89PNG")
    lines = read_metrics(out / "supernet", "train")
    golden = golden_experiments("search gradient")["history"]
    assert [line.values["loss"] for line in lines] == pytest.approx(golden, rel=1e-3)
    assert lines[-1].updates == 20
    curve = read_checked_json(out / "supernet" / "result.json")["curve"]
    assert curve["updates"] == [0, 20]
    assert curve["temperature"] == pytest.approx([5.0, 0.087])
    assert curve["entropy"][0] == pytest.approx((math.log2(3) + 3 * 2) / 4)
    record = read_run(out / "supernet")
    assert record.model["candidates"] == ["s", "l", "f", "identity"] and record.task["constant_updates"] == 4
    assert record.optimizer["name"] == "nvlamb" and record.optimizer["architecture_lr"] == 0.01


def test_by_the_recipe_laptop_a_supernet_of_one_pattern_learns_as_that_pattern_does(data_folder, tmp_path):
    """With all weight on one candidate of each layer, on the same batches; it resumes once."""
    names, chosen = ("s", "l", "f", "identity"), ("s", "f", "l", "f")
    how = {"recipe": "laptop", "max_updates": 10, "constant_updates": 9, "batch_size": 32}
    settings = SearchSettings(
        str(data_folder), "masked-lm", "bert_tiny", "sfsf", names, **how, fairseq_options=SMALL.split()
    )
    given = material.SearchContext(settings)
    rows = torch.eye(4)[[names.index(name) for name in chosen]]

    def supernet_training() -> training.SupernetTraining:
        made = training.SupernetTraining(settings, supernet_job(given, tmp_path))
        made.model.architecture.forward = lambda: rows
        return made

    def pairs_of_weights() -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Of the pattern's own model and the supernet."""
        shared = dict(trained.model.model.named_parameters())
        pairs = [(own, shared[name]) for name, own in alone.model.named_parameters() if name in shared]
        for own, mixture, name in zip(network.sublayers, trained.model.mixtures, chosen, strict=True):
            pairs += zip(own.parameters(), mixture.candidate(name).parameters(), strict=True)
        assert len(pairs) == len([*alone.model.parameters()])
        return pairs

    trained = supernet_training()
    (spec,) = given.compared.settings.specs.values()
    optimization = given.compared.optimization(spec, 1, *given.compared.settings.rates_of(spec), 10)
    alone = TrainingLoop(of_weights(given, "".join(chosen)), optimization, tmp_path / "alone")
    network = next(module for module in alone.model.modules() if isinstance(module, Stack))
    with torch.no_grad():
        for own, learned in pairs_of_weights():
            own.copy_(learned)
    for update in range(7):  # the rate falls from the sixth on
        trained.update()
        alone.update()
        assert trained.optimizer.get_lr() == alone.optimizer.get_lr()
        if update == 3:
            trained.save()
            trained = supernet_training()
    for own, learned in pairs_of_weights():
        torch.testing.assert_close(own, learned, atol=1e-4, rtol=1e-3)


def of_weights(given: material.SearchContext, pattern: str) -> MaskedLMObjective:
    """The objective of one pattern on the text of a supernet's weights."""
    side = given.supernet_objective().sides[WEIGHTS]
    return replace(side, network=replace(side.network, options=replace(given.options, sublayer_pattern=pattern)))


def test_an_update_in_chunks_reads_as_much_as_the_whole_and_keeps_its_memory(lm_data, tmp_path):
    """Each chunk has its share of the streams."""
    read = []
    for chunks in (1, 2):
        settings = SearchSettings(
            str(lm_data),
            "language-model",
            "transformer_xl_tiny",
            "sfsf",
            batch_size=8,
            update_freq=chunks,
            fairseq_options=OF_TEXT,
        )
        job = supernet_job(material.SearchContext(settings), tmp_path / str(chunks))
        trained = training.SupernetTraining(settings, job)
        read.append([trained.update() for _ in range(2)])
        memory = job.objective.sides[WEIGHTS].memory.memory
        assert memory.length == 8 and memory.states[0].shape[0] == 8 // chunks
    assert read == [[64, 64], [64, 64]]


OF_TEXT = ("--tgt-len", "8", "--mem-len", "8", "--adaptive-softmax-cutoff", "")


@pytest.mark.slow
def test_a_front_of_language_models_which_remember(lm_data, tmp_path):
    options = (
        "--task language-model --arch transformer_xl_tiny --sublayers 4 --candidates s,l,k,f,identity --device cpu "
        "--batch-size 8 --max-updates 8 --evaluations 6 --rungs 2 --validation-tokens 200 --budgets 0.8,1.0 "
        "--no-control --tgt-len 8 --mem-len 8 --decoder-embed-dim 8 --decoder-ffn-embed-dim 8 "
        "--decoder-attention-heads 2 --adaptive-softmax-cutoff"
    ).split()
    (tmp_path / "prices.json").write_text(json.dumps({**PRICES, "k": 1.8}))
    invoke("search", lm_data, tmp_path / "out", *options, "", "--latencies", tmp_path / "prices.json")
    result = result_of(tmp_path / "out")
    assert result["found"]["points"][-1]["loss"] <= result["found"]["points"][0]["loss"]


@pytest.mark.parametrize(
    ("algorithm", "name", "message"),
    [
        ("front", "thesis.tex", "contains no search"),
        pytest.param(
            "front",
            "trainings/000/20/checkpoint_last.pt",
            "checkpoint_last.pt: truncated",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "gradient",
            "supernet/checkpoint_last.pt",
            "checkpoint_last.pt: truncated",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_folder_with_other_or_damaged_files_is_refused(search, finished, tmp_path, algorithm, name, message):
    (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / name).write_bytes(b"PK")
    if name != "thesis.tex":
        (tmp_path / "settings.json").write_text((finished(algorithm) / "settings.json").read_text())
    with pytest.raises(UserError, match=message):
        search(tmp_path, *WORDS[algorithm])
    assert (tmp_path / name).read_bytes() == b"PK"


@pytest.mark.parametrize("budgets", [(), ("--budgets", "1.0")])
def test_a_recipe_sets_options_of_models_and_text_where_the_task_has_it(budgets, lm_data, data_folder, tmp_path):
    words = ("--task", "language-model", "--arch", "transformer_xl_tiny", "--recipe", "laptop", *OF_TEXT, *budgets)
    said = refusal("search", lm_data, tmp_path / "out", *words)
    assert "--recipe laptop: not supported for --task language-model" in said
    more = {"budgets": (1.0,), "recipe": "laptop", "fairseq_options": ("--dropout", "0.3")}
    given = material.SearchContext(SearchSettings(str(data_folder), "masked-lm", "bert_tiny", "sfsf", **more))
    options = given.options
    assert options.local_heads and options.encoder_normalize_before and given.predicted_share == 0.3
    assert options.dropout == 0.3 and options.attention_dropout == 0.0, "words win"
    trainings = HalvingRuns(given, tmp_path)
    optimization = trainings.optimization(50_000)
    assert (optimization.optimizer, optimization.rate, optimization.schedule) == ("muon", 0.005, "wsd")
    assert (
        optimization.schedule_options.items() >= {"warmup_updates": 500, "decay_share": 0.5, "decay": "linear"}.items()
    )
    assert trainings.made == [5555, 16666 - 2777, 50_000 - 8333]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--budgets 0.5,x", "'--budgets': 'x' is not a valid float"),
        ("--budgets 0.5,0.5", "'--budgets': 0.5 is specified twice"),
        ("--budgets 0.01", "no 4-layer pattern of these candidates takes less"),
        ("--budgets 0.5 --rungs 4", "fewer than two updates; use --rungs 3, or --max-updates 54 or more"),
        ("--sublayers 0", "--sublayers 0"),
        ("--baseline-pattern sf", "has 2 sublayers"),
        ("--candidates l,f", "add s"),
        ("--frobnicate 3", "unknown option --frobnicate"),
        ("--arch bert_tinny", "bert_tinny: not .* choose from bert_tiny, "),
        ("--arch transformer", "transformer: .* from lazyformer, .*par_bert_base"),
        ("--arch transformer_xl_tiny", "not an architecture for --task masked-lm; choose from .*lazyformer"),
        ("--sublayer-pattern sf", "the search sets this option itself"),
        ("--batch-size 128 --max-updates 4", "more than --constant-updates 4, .* or use --constant-updates 0, a fifth"),
        ("--mask-prob 0.3:0.15", "--mask-prob 0.3:0.15: in a search, the mask probability"),
        ("--length-schedule 8:0.5", "--length-schedule: in a search, .* length"),
        ("--batch-size 128 --update-freq 3", "--update-freq 3: does not divide --batch-size 128"),
    ],
)
def test_mistakes_are_named(options, message, data_folder, prices, tmp_path):
    base = OPTIONS.replace(CANDIDATES, "") if "--candidates" in options else OPTIONS
    words = (*base.split(), "--latencies", prices, "--evaluations", "9", *options.split())
    assert re.search(message, refusal("search", data_folder, tmp_path / "out", *words))
