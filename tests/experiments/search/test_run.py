"""Whole searches at tiny size: one pattern and fronts by every method, resumption, refusals; by the command."""

import functools
import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from helpers import golden_experiments, mostly_slow
from in_process import invoke, refusal

from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.experiments.search import latency, material, training
from lazyformer_fairseq.experiments.search.latency import latency_of
from lazyformer_fairseq.experiments.search.settings import SearchSettings
from lazyformer_fairseq.experiments.search.supernet import supernet_pattern
from lazyformer_fairseq.measure.costs.latency import peak_memory
from lazyformer_fairseq.measure.planning.job import job_of_arch, with_options
from lazyformer_fairseq.options import mask_shares
from lazyformer_fairseq.patterns.grammar import expand
from lazyformer_fairseq.pretraining.recipes import LAPTOP

PRICES = {"s": 2.0, "f": 1.0, "s_read": 2.5, "l": 1.5, "rest": 1.0}
CANDIDATES = "--candidates s,l,f,identity"
SMALL = "--tokens-per-sample 16 --max-positions 16 --encoder-embed-dim 8 --encoder-ffn-embed-dim 16"
OPTIONS = (
    f"--task masked-lm --arch bert_tiny --sublayers 4 {CANDIDATES} --device cpu --batch-size 128 --judged-batches 1 "
    f"--max-updates 20 --constant-updates 4 {SMALL}"
)
FRONT = "--evaluations 9 --budgets 0.6,1.0"


@pytest.fixture(autouse=True, scope="module")
def small():
    """Few rounds, and rows of the history; enough data for the architecture."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(latency, "ROUNDS_OF_FRONTS", 3)
        patched.setattr(training, "LOG_INTERVAL", 2)
        for module in (training, material):
            patched.setattr(module, "ARCHITECTURE_SHARE", 0.4)
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
    """By a method's name the folder of a front that it found, beside its control."""

    @functools.cache
    def folder(method: str) -> Path:
        search(out := tmp_path_factory.mktemp(method) / "out", *FRONT.split(), "--method", method)
        return out

    return folder


def result_of(folder: Path) -> dict:
    return json.loads((folder / "result.json").read_text())


@pytest.mark.parametrize("method", mostly_slow(["gradient", "evolution", "random"], "gradient"))
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
            assert f"-{100 * point['budget']:.0f}={point['pattern']}'" in (out / "table.md").read_text()
    spent = result["found"]["cost"]
    assert spent["evaluations"] <= 9 and 10 < spent["counted"] <= 20
    assert (spent["architecture_updates"] > 0) == (method == "gradient")
    if method != "random":
        assert result["control"]["method"] == "random"
        assert result["control"]["cost"]["counted"] == pytest.approx(spent["counted"], abs=3)
    golden = golden_experiments(f"search {method}")
    history = [json.loads(line)["loss"] for line in (out / "history.jsonl").read_text().splitlines()]
    assert history == pytest.approx(golden["history"], rel=1e-3)
    assert [point["loss"] for point in result["found"]["points"]] == pytest.approx(golden["found"], rel=1e-3)
    pictures = ("probabilities.png",) if method == "gradient" else ()
    for file in ("front.png", *pictures):
        assert (out / file).read_bytes().startswith(b"\x89PNG")
    assert "inherited loss, bits" in (out / "table.md").read_text()
    assert "finished" in search(out, *FRONT.split(), "--method", method) and result_of(out) == result
    with pytest.raises(UserError, match="other settings .*evaluations"):
        search(out, "--method", method, "--budgets", "0.6,1.0", "--evaluations", "8")


class Killed(BaseException):
    """Stands for a signal: nothing of ours catches it."""


@pytest.mark.parametrize("method", mostly_slow(["gradient", "evolution"], "gradient"))
def test_a_search_killed_anywhere_ends_as_one_that_was_not(method, search, finished, tmp_path, monkeypatch):
    folders = (finished(method), tmp_path / "killed")
    save, saves = training.save_state, []

    def save_and_die(path, state):
        save(path, state)
        saves.append(path)
        if len(saves) < 3:
            raise Killed

    monkeypatch.setattr(training, "SAVE_INTERVAL", 2)
    monkeypatch.setattr(training, "save_state", save_and_die)
    words = (tmp_path / "killed", *FRONT.split(), "--method", method, "--no-control")
    for _ in range(2):
        with pytest.raises(Killed):
            search(*words)
    search(*words)
    whole, killed = (result_of(folder)["found"] for folder in folders)
    assert [point["loss"] for point in whole["points"]] == [point["loss"] for point in killed["points"]]
    states = [torch.load(folder / "state.pt", weights_only=True) for folder in folders]
    assert states[0]["history"] == states[1]["history"]
    assert all(torch.equal(states[0]["model"][name], value) for name, value in states[1]["model"].items())


def test_one_pattern_is_the_most_probable_after_so_many_updates(data_folder, tmp_path):
    """Latency is measured; no budget, no control."""
    out = tmp_path / "out"
    invoke("search", data_folder, out, *OPTIONS.split(), "--seed", 2)
    result, prices = result_of(out), json.loads((out / "latencies.json").read_text())
    assert prices["s"] > 0
    assert "control" not in result
    cost, (point,) = result["found"]["cost"], result["found"]["points"]
    assert (cost["weights_updates"], cost["architecture_updates"], cost["evaluations"]) == (12, 8, 1)
    (rows,) = result["probabilities"]
    assert [sum(row) for row in rows] == pytest.approx([1] * 4) and rows[0][1] == 0
    likeliest = [max(range(4), key=lambda place: row[place]) for row in rows]
    names = ("s", "l", "f", "-")
    if likeliest[0] == 0:  # what an l may read is there
        assert point["by_layer"] == "".join(names[place] for place in likeliest)
    assert point["predicted"] == pytest.approx(latency_of(prices, expand(point["pattern"])))
    rows = [json.loads(line) for line in (out / "history.jsonl").read_text().splitlines()]
    assert rows[-1]["update"] == 20 and all(row["temperature"] == 5.0 for row in rows if row["update"] <= 4)


OF_TEXT = ("--tgt-len", "8", "--mem-len", "8", "--adaptive-softmax-cutoff", "")


@pytest.mark.parametrize(("task", "arch", "options"), [
    ("masked-lm", "bert_tiny", SMALL.split()), ("language-model", "transformer_xl_tiny", OF_TEXT),
])  # fmt: skip
def test_an_update_in_pieces_is_that_of_the_whole(task, arch, options, data_folder, lm_data):
    """But for rounding; of masked text, whose pieces predict unequal numbers of words, the losses are."""
    found = []
    for parts in (None, 2):
        data, dropless = lm_data if "xl" in arch else data_folder, ("--dropout", "0", "--activation-dropout", "0")
        more = {"method": "evolution", "batch_size": 8, "update_freq": parts, "prices": PRICES}
        settings = SearchSettings(str(data), task, arch, "sfsf", **more, fairseq_options=(*options, *dropless))
        given = material.Material(settings)
        single = given.build_supernet(settings.candidates)
        single.take(("s", "f", "s", "f"))
        of_data = (given.loss_of, given.parts(), 9, PRICES, training.Counting(given))
        trained = training.SubnetTraining(single, settings, *of_data)
        losses = [trained.find_gradients(single, trained.batches[0].next()) for _ in range(2)]
        found.append((losses, [weight.grad for weight in single.supernet.parameters() if weight.grad is not None]))
    (whole, gradients), (divided, others) = found
    torch.testing.assert_close(whole, divided, atol=1e-5, rtol=1e-5)
    if task == "language-model":
        torch.testing.assert_close(gradients, others, atol=1e-6, rtol=1e-4)


def test_the_recipe_laptop_gives_model_and_masks_and_words_behind_it_win():
    words = (*material.words_of_recipe(), "--dropout", "0.3")
    options, text = material.read_given("masked-lm", "bert_tiny", words)
    assert (options.local_heads, options.frequency_bias, options.zero_last_maps, options.dropout) == (*[True] * 3, 0.3)
    assert options.encoder_normalize_before and text == {"mask_prob": str(mask_shares(LAPTOP["mask_prob"])[0])}


@pytest.mark.parametrize("parts", [None, 4])
def test_memory_of_an_update_is_that_of_a_training_of_all_candidates(parts, lm_data):
    """As the plan of PAR's search counts it."""
    sizes = "--tgt-len 64 --mem-len 64 --decoder-embed-dim 128 --decoder-ffn-embed-dim 512 --decoder-attention-heads 4"
    more = ("--adaptive-softmax-cutoff", "", "--decoder-normalize-before", "--attention-backend", "eager")
    given = {"batch_size": 8, "update_freq": parts, "prices": PRICES, "fairseq_options": (*sizes.split(), *more)}
    settings = SearchSettings(str(lm_data), "language-model", "transformer_xl_tiny", "sf" * 6, **given)
    built = material.Material(settings)
    of_data = (built.loss_of, built.parts(), 50_000, PRICES, training.Counting(built))
    trained = training.MixtureTraining(built.build_supernet(settings.candidates), settings, *of_data)
    for _ in range(2):  # the optimizer's moments are there from the first on
        trained.update()
    states = [value for state in trained.weights.state.values() for value in state.values()]
    memories = [state for memory in trained.batches[0].part.memories for state in memory.states]
    kept = filter(torch.is_tensor, [*trained.supernet.parameters(), *states, *memories])
    held = sum(each.numel() * each.element_size() for each in kept)
    job = job_of_arch("transformer_xl_tiny", len(built.dictionary))
    options = vars(built.options)
    options |= {"sublayer_pattern": supernet_pattern(settings.candidates, settings.layers), "tgt_len": 64}
    counted = with_options(job, options).count_memory(8 // (parts or 1), "fp32", "cpu", "eager", bool(parts)).peak
    assert counted == pytest.approx(held + peak_memory(trained.update, "cpu"), rel=0.15)


def test_a_high_price_on_attention_leaves_none_of_it(search, tmp_path):
    (tmp_path / "prices.json").write_text(json.dumps({"s": 100.0, "f": 1.0, "l": 1.0}))
    price = ("--latency-price", "100", "--architecture-lr", "0.2", "--latencies", str(tmp_path / "prices.json"))
    search(tmp_path / "out", "--budgets", "0.1", "--evaluations", "1", "--no-control", *price)
    (rows,) = result_of(tmp_path / "out")["probabilities"]
    assert max(row[0] for row in rows) < 0.3
    assert "s" not in result_of(tmp_path / "out")["found"]["points"][0]["pattern"]


@pytest.mark.slow
def test_a_front_of_language_models_which_remember(lm_data, tmp_path):
    options = (
        "--task language-model --arch transformer_xl_tiny --sublayers 4 --candidates s,l,k,f,identity --device cpu "
        "--batch-size 8 --max-updates 8 --evaluations 4 --judged-batches 2 --budgets 0.8,1.0 --method evolution "
        "--no-control --tgt-len 8 --mem-len 8 --decoder-embed-dim 8 --decoder-ffn-embed-dim 8 "
        "--decoder-attention-heads 2 --adaptive-softmax-cutoff"
    ).split()
    (tmp_path / "prices.json").write_text(json.dumps({**PRICES, "k": 1.8}))
    invoke("search", lm_data, tmp_path / "out", *options, "", "--latencies", tmp_path / "prices.json")
    result = result_of(tmp_path / "out")
    assert "control" not in result
    assert result["found"]["points"][-1]["loss"] <= result["found"]["points"][0]["loss"]


@pytest.mark.parametrize(("name", "message"), [("state.pt", "state.pt: truncated"), ("thesis.tex", "holds no search")])
def test_a_folder_with_other_or_damaged_files_is_refused(search, finished, tmp_path, name, message):
    (tmp_path / name).write_bytes(b"PK")
    if name == "state.pt":
        (tmp_path / "settings.json").write_text((finished("gradient") / "settings.json").read_text())
    with pytest.raises(UserError, match=message):
        search(tmp_path, *FRONT.split())
    assert (tmp_path / name).read_bytes() == b"PK"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--method evolution --budgets 0.5,x", "'--budgets': 'x' is not a valid float"),
        ("--method evolution --budgets 0.5,0.5", "'--budgets': 0.5 is there twice"),
        ("--method evolution --budgets 0.01", "no pattern of these candidates .* costs less"),
        ("--method evolution --evaluations 900", "900 evaluations on . batches cost as much as"),
        ("--sublayers 0", "--sublayers 0"),
        ("--baseline-pattern sf", "has 2 sublayers"),
        ("--candidates l,f", "add s"),
        ("--frobnicate 3", "--frobnicate: no such option here"),
        ("--arch bert_tinny", "bert_tinny: no .* choose from bert_tiny, "),
        ("--arch transformer", "transformer: .* from lazyformer, .*par_bert_base"),
        ("--arch transformer_xl_tiny", "no architecture for --task masked-lm; choose from .*lazyformer"),
        ("--sublayer-pattern sf", "the search sets it itself"),
        ("--batch-size 128 --max-updates 4", "--max-updates 4: must be more"),
        ("--mask-prob 0.3:0.15", "--mask-prob 0.3:0.15: a search has one share"),
        ("--batch-size 128 --update-freq 3", "--update-freq 3: does not divide --batch-size 128"),
    ],
)
def test_mistakes_are_named(options, message, data_folder, prices, tmp_path):
    base = OPTIONS.replace(CANDIDATES, "") if "--candidates" in options else OPTIONS
    words = (*base.split(), "--latencies", prices, "--evaluations", "9", *options.split())
    assert re.search(message, refusal("search", data_folder, tmp_path / "out", *words))
