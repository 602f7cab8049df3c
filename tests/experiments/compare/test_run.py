"""Comparisons of tiny models: batches, turns, interrupts, rates, shares, results; causal ones count every token."""

import json
import math
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from comparison_results import an_example
from helpers import golden_experiments
from torch.nn import functional as F

from lazyformer_fairseq import extras
from lazyformer_fairseq.corpus.build import build_corpus
from lazyformer_fairseq.corpus.settings import CorpusSettings
from lazyformer_fairseq.data.datasets.token_streams import open_tokens
from lazyformer_fairseq.data.text.dictionary_file import load_dictionary
from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.experiments import training_runs
from lazyformer_fairseq.experiments.compare import run as comparison_run
from lazyformer_fairseq.experiments.compare import task
from lazyformer_fairseq.experiments.compare.report import write_report
from lazyformer_fairseq.experiments.compare.results import read_folder
from lazyformer_fairseq.experiments.compare.run import compare
from lazyformer_fairseq.experiments.compare.settings import CompareSettings, find_task
from lazyformer_fairseq.experiments.folder import load_or_create
from lazyformer_fairseq.experiments.prose import write_prose
from lazyformer_fairseq.extras import has_fairseq
from lazyformer_fairseq.storage import checkpoint_file
from lazyformer_fairseq.storage.json_files import read_json, sha256_of
from lazyformer_fairseq.training.laptop import LAPTOP
from lazyformer_fairseq.training.loop import DivergedError, TrainingLoop

TWO = {"bert": "sf", "mine": "f"}
MODELS = {"bert": "(sf)x2", "mine": "sff"} | ({"roberta": "fairseq:roberta_base"} if has_fairseq() else {})
CAUSAL = {"transformer_xl": "sfsf", "lazy": "sflf"}
SEGMENTS = {
    **{"embed_dim": 8, "ffn_embed_dim": 16, "heads": 2, "adaptive_softmax_cutoff": (20,), "batch_size": 3},
    **{"tgt_len": 6, "mem_len": 5},
}
TINY = {"embed_dim": 8, "ffn_embed_dim": 16, "heads": 2, "tokens_per_sample": 32, "batch_size": 4}


def tiny(data: Path, task: str = "masked-lm", **changes) -> CompareSettings:
    row, is_causal = find_task(task), task == "language-model"
    given = {"models": CAUSAL, "baseline": "transformer_xl"} if is_causal else {"models": MODELS, "baseline": "bert"}
    given |= {"rates": (3e-3,) if is_causal else (1e-2,), "sizes": {**row.sizes, **(SEGMENTS if is_causal else TINY)}}
    given |= {"device": "cpu", "seeds": (1, 2), "updates": 4, "validation_tokens": 200}
    return CompareSettings(**{"task": task, "data": str(data), **given, **changes})


@pytest.fixture(autouse=True, scope="module")
def two_points():
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(task, "POINTS", 2)
        yield


@pytest.fixture(scope="module")
def finished(data_folder, tmp_path_factory) -> tuple[Path, list]:
    """A comparison that was interrupted in its second seed, and went on; and the batches of all updates."""
    folder, batches = tmp_path_factory.mktemp("finished") / "comparison", []
    original, interrupts = TrainingLoop.update, [True]

    def update(self):
        if getattr(self, "name", None) == "mine" and (self.optimization.seed, self.updates) == (2, 3) and interrupts:
            interrupts.clear()
            raise KeyboardInterrupt

        def train_on(of_update, train=self.train_on):
            (batch,) = of_update
            batches.append((getattr(self, "name", None), self.optimization.seed, self.updates, batch))
            return train(of_update)

        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(self, "train_on", train_on)
            return original(self)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(TrainingLoop, "update", update)
        with pytest.raises(KeyboardInterrupt):
            compare(tiny(data_folder), folder, ["lazyformer", "compare"])
        assert not (folder / "results.json").exists()
        compare(tiny(data_folder), folder, ["lazyformer", "compare"])
    return folder, batches


@pytest.fixture
def without_costs(monkeypatch):
    """They build and train each model once more."""
    monkeypatch.setattr(comparison_run, "measure_costs", lambda _, runs: {name: {} for name in runs})


def results_of(folder: Path) -> dict:
    return json.loads((folder / "results.json").read_text())


def without_times(results: dict) -> dict:
    """Losses, tokens and FLOPs, by name and seed."""
    found = {}
    for entry, model in results["models"].items():
        for seed, run in model["runs"].items():
            curve = {name: values for name, values in run["curve"].items() if name != "seconds"}
            found[entry, seed] = (curve, run["final"])
    return found


def test_an_interrupted_comparison_comes_to_the_same_to_the_bit(finished, data_folder, tmp_path, without_costs):
    whole = without_times(compare(tiny(data_folder, seeds=(2,)), tmp_path / "whole", []))
    resumed = without_times(results_of(finished[0]))
    assert whole == {key: found for key, found in resumed.items() if key[1] == "2"}
    assert resumed.keys() == {(name, seed) for name in MODELS for seed in "12"}
    with pytest.raises(UserError, match=r"different settings \(updates is 4 there, 5 here\)"):
        compare(tiny(data_folder, updates=5), finished[0], [])


def test_a_folder_of_other_data_is_refused(finished, data_folder, monkeypatch):
    monkeypatch.setattr(task, "hash_data", lambda _: {"train.bin": "0" * 64})
    with pytest.raises(
        UserError, match=f"{finished[0]} contains a comparison .*the SHA-256 of train.bin is '.*' there, '00"
    ):
        compare(tiny(data_folder), finished[0], [])


@pytest.mark.parametrize("name", ["lengths.json", "costs.json", "runs/bert-seed1-rate0.01/result.json"])
def test_a_digit_that_changed_is_no_result(name, finished, data_folder, tmp_path):
    shutil.copytree(finished[0], tmp_path / "changed")
    path = tmp_path / "changed" / name
    path.write_text(path.read_text().replace("4", "5", 1))
    with pytest.raises(UserError, match=rf"{name} is damaged: its checksum does not match .*run the same command"):
        compare(tiny(data_folder), tmp_path / "changed", [])


def test_all_models_see_the_same_batches_and_masks_in_turn(finished):
    by_update: dict = {}
    for name, seed, update, sample in finished[1]:
        if name in MODELS:
            by_update.setdefault((seed, update), {})[name] = sample
    assert by_update.keys() == {(seed, update) for seed in (1, 2) for update in range(4)}
    for samples in by_update.values():
        first, *others = samples.values()
        assert len(others) == len(MODELS) - 1
        for other in others:
            assert torch.equal(first["net_input"]["src_tokens"], other["net_input"]["src_tokens"])
            assert torch.equal(first["target"], other["target"])
    assert not torch.equal(by_update[1, 0]["bert"]["target"], by_update[2, 0]["bert"]["target"])
    assert [name for name, seed, *_ in finished[1] if seed == 1 and name in MODELS] == [*MODELS] * 4


def test_results_have_all_that_a_report_reads(finished, data_folder):
    results, example = results_of(finished[0]), an_example()
    (valid,) = data_folder.rglob("valid.bin")
    assert example.keys() == results.keys()
    bert = example["models"]["bert"]
    for name, model in results["models"].items():
        assert bert.keys() <= model.keys(), name
        for run in model["runs"].values():
            assert run.keys() == bert["runs"]["1"].keys()
            assert run["curve"].keys() == bert["runs"]["1"]["curve"].keys()
            assert run["curve"]["updates"] == [0, 1, 4]
            assert run["curve"]["flops"][-1] == 4 * model["flops_per_update"]
            assert run["final"]["loss"] == run["curve"]["loss"][-1]
            assert run["curve"]["loss"][-1] < run["curve"]["loss"][0]
        assert model["peak_memory_bytes"] > 3 * 4 * model["parameters"], "weights, gradients, two moments"
    assert results["data"]["checksums"]["valid.bin"] == sha256_of(valid)
    if (roberta := results["models"].get("roberta")) is not None:
        assert roberta["pattern"] is None
        # The last feed-forward of ours computes predicted tokens alone.
        assert results["models"]["bert"]["flops_per_update"] < roberta["flops_per_update"]


def test_parameters_are_those_of_the_trained_models(finished):
    folder, _ = finished
    for name, model in results_of(folder)["models"].items():
        saved = torch.load(folder / "runs" / f"{name}-seed1-rate0.01" / "checkpoint_last.pt", weights_only=False)
        kept = {key: each for key, each in saved["model"].items() if each.is_floating_point() and "version" not in key}
        tied = {each.data_ptr(): each.numel() for each in kept.values()}
        assert model["parameters"] == sum(tied.values()), name
        tables = {each.data_ptr(): each.numel() for key, each in kept.items() if "embed_" in key}
        assert model["parameters_without_embeddings"] == model["parameters"] - sum(tables.values()), name


def test_validation_is_the_same_for_all_seeds_and_counts_masked_pieces_alone(data_folder, tmp_path):
    """Against the whole (B, T, V) of logits, which our measure never makes."""
    compared = find_task("masked-lm").load(tiny(data_folder))
    others = find_task("masked-lm").load(tiny(data_folder, seeds=(7,)))
    for batch, other in zip(compared._batches, others._batches, strict=True):
        assert torch.equal(batch["net_input"]["src_tokens"], other["net_input"]["src_tokens"])
    bert = compared.settings.specs["bert"]
    training = TrainingLoop(compared.objective(bert, 1, 4), compared.optimization(bert, 1, 1e-3, 4), tmp_path)
    found = compared.measure(training)
    nats, right, count = 0.0, 0, 0
    training.model.eval()
    with torch.no_grad():
        for batch in compared._batches:
            logits, _ = training.model(batch["net_input"]["src_tokens"])
            is_masked = batch["target"] != training.objective.dictionary.pad()
            nats += F.cross_entropy(logits[is_masked], batch["target"][is_masked], reduction="sum").item()
            right += (logits[is_masked].argmax(-1) == batch["target"][is_masked]).sum().item()
            count += int(is_masked.sum())
    assert found["loss"] == pytest.approx(nats / count / math.log(2), rel=1e-5)
    assert found["accuracy"] == pytest.approx(100 * right / count)
    assert compared.describe_data()["validation"]["predicted"] == count
    assert training.model.training is False, "as it was before"


def slow_trial(monkeypatch, **seconds: float) -> None:
    """A trial in which an update of each model takes so long."""
    monkeypatch.setattr(comparison_run, "_trial", lambda *_: {name: 1000 * each for name, each in seconds.items()})


def test_a_budget_or_a_share_of_the_baselines_seconds_becomes_updates_once(data_folder, tmp_path, monkeypatch):
    settings = tiny(data_folder, models=TWO, updates=None, budget=3.0)
    compared, path = settings.row.load(settings), tmp_path / "lengths.json"
    for seconds in ({"bert": 0.5, "mine": 0.25}, {"bert": 0.1, "mine": 0.1}):
        slow_trial(monkeypatch, **seconds)
        found = load_or_create(path, lambda: comparison_run.find_lengths(compared, settings.specs))["entries"]
        assert found == {"bert": ["bert", 6], "mine": ["mine", 12]}
    slow_trial(monkeypatch, bert=0.5, mine=0.25)
    settings = tiny(data_folder, models=TWO, updates=10, shares=(1.0, 0.5))
    found = comparison_run.find_lengths(settings.row.load(settings), settings.specs)["entries"]
    assert found == {"bert": ("bert", 10), "mine": ("mine", 20), "mine@0.5": ("mine", 10)}


def test_short_tries_choose_the_rate_and_stay_apart_from_the_runs(data_folder, tmp_path, without_costs, monkeypatch):
    monkeypatch.setattr(task, "POINTS", 8)
    settings = tiny(data_folder, models=TWO, rates=(1e-4, 1e-2, 0.5), rate_updates=3, seeds=(1,))
    for model in compare(settings, tmp_path, [])["models"].values():
        losses = {each["rate"]: each["loss"] for each in model["tries"]}
        assert losses.keys() == {1e-4, 1e-2, 0.5} and model["rate"] == min(losses, key=losses.get)
        assert [each["updates"] for each in model["tries"]] == [3] * 3 and model["updates"] == 4
        assert {run["rate"] for run in model["runs"].values()} == {model["rate"]}
    for folder, count, validated in (("tries", 6, [0, 1, 3]), ("runs", 2, [0, 1, 2, 3, 4])):
        found = [read_json(path)["curve"]["updates"] for path in (tmp_path / folder).glob("*/result.json")]
        assert found == [validated] * count, "a try is validated once on its way"


def test_a_model_has_options_and_rates_of_its_own(data_folder, tmp_path):
    models = {"bert": "sf", "mine": "sf; norm=rms; lr=1e-3, 1e-2"}
    found = compare(tiny(data_folder, models=models, baseline="bert", seeds=(1,)), tmp_path, [])["models"]
    assert [each["rate"] for each in found["mine"]["tries"]] == [1e-3, 1e-2] and not found["bert"]["tries"]
    assert found["mine"]["parameters"] < found["bert"]["parameters"], "an RMSNorm has no bias"
    settings = tiny(data_folder, models={"bert": "sf; width=3"}, baseline="bert")
    with pytest.raises(UserError, match="unknown option --width"):
        compare(settings, tmp_path / "wrong", [])


def test_a_trial_times_all_models_and_leaves_nothing(data_folder, monkeypatch):
    monkeypatch.setattr(comparison_run, "TRIAL_WARM_UP", 0)
    monkeypatch.setattr(comparison_run, "TRIAL_UPDATES", 1)
    settings = tiny(data_folder, models=TWO, updates=None, budget=1.0)
    found = comparison_run.find_lengths(settings.row.load(settings), settings.specs)["milliseconds"]
    assert found.keys() == TWO.keys() and min(found.values()) > 0


@pytest.mark.slow
def test_alone_comes_to_the_same_as_in_turn(finished, data_folder, tmp_path, without_costs):
    models = {name: MODELS[name] for name in ("bert", "mine")}
    alone = compare(tiny(data_folder, models=models, seeds=(1,), in_turn=False), tmp_path, [])
    together = without_times(results_of(finished[0]))
    for key, (curve, *others) in without_times(alone).items():  # processes of their own have more points
        expected, *its_others = together[key]
        places = [curve["updates"].index(update) for update in expected["updates"]]
        assert {name: [values[place] for place in places] for name, values in curve.items()} == expected
        assert others == its_others


@pytest.mark.slow
def test_a_process_that_dies_names_its_log(data_folder, tmp_path, monkeypatch):
    """A width that three heads do not divide is found where the model is built."""
    settings = tiny(data_folder, models={"bert": "sf; heads=3"}, seeds=(1,), in_turn=False)
    with pytest.raises(UserError, match=r"train\.log is: .*3.*Rerun to resume"):
        compare(settings, tmp_path, [])


@pytest.mark.parametrize(("asked", "workers", "given"), [(3, 2, 3), (8, 2, 4), (1, 8, 1), (3, None, 3)])
def test_a_process_has_as_many_threads_as_were_asked_for(asked, workers, given, monkeypatch):
    monkeypatch.setattr(training_runs, "processors_here", lambda: 8)
    monkeypatch.setattr(training_runs.torch, "get_num_threads", lambda: asked)
    assert training_runs.threads_per_run(workers) == given


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_on_a_gpu_in_turn_and_alone(data_folder, tmp_path):
    models = {"bert": "sf", "roberta": "fairseq:roberta_base"}
    how = {"models": models, "seeds": (1,), "device": "cuda"}
    together = compare(tiny(data_folder, **how), tmp_path / "in_turn", [])
    alone = compare(tiny(data_folder, **how, in_turn=False), tmp_path / "alone", [])
    assert without_times(together) == without_times(alone)
    assert all(model["peak_memory_bytes"] > 0 for model in together["models"].values())


@pytest.fixture(scope="module")
def causal(lm_data, tmp_path_factory) -> dict:
    folder = tmp_path_factory.mktemp("finished")
    compare(tiny(lm_data, "language-model"), folder, ["lazyformer", "compare", "toy"])
    return json.loads((folder / "results.json").read_text())


def test_every_token_of_both_splits_counts(causal, lm_data):
    splits = json.loads((lm_data / "manifest.json").read_text())["splits"]
    for model in causal["models"].values():
        for run in model["runs"].values():
            assert run["final"]["tokens"] == splits["valid"]["tokens"]
            assert run["final"]["test_tokens"] == splits["test"]["tokens"]
            assert run["final"]["perplexity"] == pytest.approx(2 ** run["final"]["loss"])
            assert run["curve"]["perplexity"][-1] < run["curve"]["perplexity"][0]
        assert model["latency_milliseconds"]["n"] == 50
    assert causal["measure"] == {"name": "perplexity", "unit": "per word", "lower_is_better": True}
    assert causal["models"]["lazy"]["flops"] < causal["models"]["transformer_xl"]["flops"]
    assert causal["machine"]["threads"] == torch.get_num_threads()
    train, valid = (open_tokens(lm_data / split).tolist() for split in ("train", "valid"))
    symbols = len(load_dictionary(lm_data / "dict.txt"))
    shares = [(train.count(token) + 1) / (len(train) + symbols - 2) for token in valid]  # of all but <s> and <pad>
    yardsticks = causal["data"]["yardsticks"]
    assert yardsticks["unigram"] == pytest.approx(-np.mean(np.log2(shares)))
    assert 0 < yardsticks["counts"] < yardsticks["unigram"]


def test_losses_are_those_of_fairseqs_trainer(finished, causal):
    """As they were when it trained all of this: 2026-11-26."""
    for name_of_task, results in (("masked-lm", results_of(finished[0])), ("language-model", causal)):
        runs = {f"{name} {seed}": run for name, of in results["models"].items() for seed, run in of["runs"].items()}
        golden = golden_experiments(name_of_task)
        assert runs.keys() <= golden.keys()
        for name, run in runs.items():
            assert run["curve"]["loss"] == pytest.approx(golden[name], rel=1e-3), (name_of_task, name)


def test_a_recipe_norms_and_the_rate_reach_training(lm_data):
    settings = tiny(lm_data, "language-model", recipe="nvidia", normalize_before=False)
    optimization = settings.row.load(settings).optimization(settings.specs["lazy"], 1, 0.02, 200)
    lamb = {"max_weight_norm": 10, "weight_decay": 0, "no_bias_correction": True}
    assert (optimization.optimizer, optimization.optimizer_options, optimization.rate) == ("nvlamb", lamb, 0.02)
    assert (optimization.schedule, optimization.schedule_options) == ("cosine", {"warmup_updates": 5, "min_lr": 0.002})
    assert (
        not settings.row.load(settings)
        .objective(settings.specs["lazy"], 1, 200)
        .network.options.decoder_normalize_before
    )


def laptop_of(data: Path, models: dict, words: str = "", **changes):
    """The network's options, the text's and how a model learns, of the first model; and the task."""
    given = {"rates": (), "sizes": {}, "recipe": "laptop", "fairseq_options": tuple(words.split()), **changes}
    compared = tiny(data, models=models, baseline=next(iter(models)), **given)
    task, spec = compared.row.load(compared), next(iter(compared.specs.values()))
    objective = task.objective(spec, 1, 100)
    return (
        objective.network.options,
        objective.texts.options,
        task.optimization(spec, 1, compared.rates_of(spec)[0], 100),
        task,
    )


def test_the_recipe_laptop_reaches_all_and_what_is_given_wins(data_folder):
    options, text, optimization, compared = laptop_of(data_folder, {"bert": "sf"})
    made = {**vars(options), **vars(text), **optimization.optimizer_options, **optimization.schedule_options}
    made |= {"optimizer": optimization.optimizer, "lr_scheduler": optimization.schedule, "lr": optimization.rate}
    made["clip_norm"] = optimization.clip_norm
    assert {name: made[name] for name in LAPTOP} == LAPTOP
    assert (text.tokens_per_sample, compared.settings.sizes["batch_size"]) == (512, 2)
    assert compared._text.masking.probability == 0.15  # of what is scored, whatever the recipe trains on
    words = "--mask-prob 0.2 --length-schedule 64:0.5 --adam-lr 1e-4 --clip-norm 2 --dropout 0.2"
    more = {"normalize_before": False, "rates": (0.1,), "sizes": {"tokens_per_sample": 32}}
    options, text, optimization, _ = laptop_of(data_folder, {"bert": "sf"}, words, **more)
    assert (options.encoder_normalize_before, options.dropout, options.local_heads) == (False, 0.2, True)
    assert (text.mask_prob, text.length_schedule, text.tokens_per_sample) == ("0.2", "64:0.5", 32)
    assert (optimization.rate, optimization.optimizer_options["adam_lr"], optimization.clip_norm) == (0.1, 1e-4, 2)


def test_parts_of_the_recipe_are_left_out(data_folder):
    """Of one model; the others keep them."""
    of_mine = "; without=local-heads, length-schedule,no-token-positional-embeddings,encoder-normalize-before"
    models = {"mine": f"sf{of_mine}", "bert": "sf"}
    options, text, optimization, compared = laptop_of(data_folder, models)
    assert not (options.local_heads or options.no_token_positional_embeddings or text.length_schedule)
    assert options.zero_last_maps and optimization.optimizer == "muon" and not options.encoder_normalize_before
    mine, bert = compared.settings.specs.values()
    assert (compared.phases(mine, 100), compared.phases(bert, 100)) == (
        [(512, range(100))],
        [(128, range(80)), (512, range(80, 100))],
    )
    assert compared.objective(bert, 1, 100).network.options.local_heads
    assert laptop_of(data_folder, {"bert": "sf; without=lr-scheduler"})[2].schedule == "linear_warmup"
    assert laptop_of(data_folder, {"bert": "sf; without=relative-position-buckets"})[0].relative_position_buckets == 0
    by_adam = ("sf; without=optimizer", ""), ("sf; optimizer=fused_adam", ""), ("sf", "--optimizer fused_adam")
    for spec, words in by_adam:
        optimization = laptop_of(data_folder, {"bert": spec}, words)[2]
        assert (optimization.optimizer, optimization.rate) == ("fused_adam", LAPTOP["adam_lr"])
        assert optimization.optimizer_options == {"adam_betas": LAPTOP["adam_betas"], "weight_decay": 0.0}
    options = laptop_of(data_folder, {"modern": "bert_modern_base; sizes=own"})[0]  # which has no bias to begin with
    assert not options.local_heads and options.relative_position_buckets == 0
    for spec, recipe, said in (
        (
            "sf; without=heads",
            "laptop",
            "--without heads: not one of the recipe's options, which are encoder-normalize-before, no-",
        ),
        ("sf; without=lr", "adam", "--model bert: without=lr works only with --recipe laptop"),
    ):
        with pytest.raises(UserError, match=said):
            laptop_of(data_folder, {"bert": spec}, recipe=recipe)
    with pytest.raises(UserError, match="--recipe laptop: not supported for --task .*; choose adam or nvidia"):
        CompareSettings(task="language-model", data=str(data_folder), recipe="laptop")


@pytest.mark.parametrize("model", MODELS.values())
def test_flops_and_a_trial_are_of_the_lengths_that_a_training_reads(model, data_folder, tmp_path, monkeypatch):
    words, sizes = ("--length-schedule", "8:0.5,16:0.9"), {"sizes": {**TINY, "dropout": 0.0}}
    settings = tiny(data_folder, models={"a": "sf", "b": model}, baseline="a", **sizes, fairseq_options=words)
    compared = settings.row.load(settings)
    assert compared.phases(settings.specs["b"], 10) == [(8, range(5)), (16, range(5, 9)), (32, range(9, 10))]
    spec, of = settings.specs["a"], compared.flops_of_update
    flops = [of(spec, 160, length) for length in (8, 16, 32)]
    assert flops == sorted(set(flops))
    assert compared.mean_flops(spec, 160) == round(0.5 * flops[0] + 0.4 * flops[1] + 0.1 * flops[2])
    seconds = [9.0] * comparison_run.TRIAL_WARM_UP + [1.0] * 8 + [2.0] * 10 + [4.0] * 2  # 25 in all
    assert comparison_run._mean_of_medians(compared, spec, seconds) == pytest.approx(0.5 * 1 + 0.4 * 2 + 0.1 * 4)
    job = comparison_run.Jobs(compared, tmp_path, settings.specs, {"b": ("b", 10)}).job("b", 1, 0.01)
    training = task.ComparedTraining(compared, job)
    shapes = []
    monkeypatch.setattr(training.model, "forward", lambda **batch: shapes.append(batch["src_tokens"].shape[1]) or 1 / 0)
    for update in (0, 5, 9):
        training.updates = update
        with pytest.raises(ZeroDivisionError):
            training.update()
    assert shapes == [8, 16, 32]


@pytest.mark.slow
def test_a_short_training_by_the_recipe_leaves_the_plateau_and_others_do_not(tmp_path):
    """On the prose that Python carries; measured: 7.99 and 9.20 bits, where frequencies cost 9.11."""
    prose, data = write_prose(tmp_path / "prose.jsonl"), tmp_path / "data"
    build_corpus([str(prose)], data, CorpusSettings(vocab_size=4000, valid_share=0.2))
    sizes = {"embed_dim": 64, "ffn_embed_dim": 128, "heads": 4, "tokens_per_sample": 128, "batch_size": 8}
    losses = {}
    for recipe, words in (("laptop", ("--length-schedule", "32:0.8")), ("adam", ())):
        given = {"recipe": recipe, "sizes": sizes, "updates": 150, "fairseq_options": words, "rates": ()}
        settings = tiny(data, models={"bert": "(sf)x3"}, validation_tokens=4000, **given)
        compared = settings.row.load(settings)
        bert = settings.specs["bert"]
        optimization = compared.optimization(bert, 1, *settings.rates_of(bert), 150)
        training = TrainingLoop(compared.objective(bert, 1, 150), optimization, tmp_path / recipe)
        while training.updates < 150:
            training.update()
        losses[recipe] = compared.measure(training)["loss"]
    frequencies = compared.describe_data()["yardsticks"]["unigram"]
    assert losses["laptop"] < frequencies - 0.8 and losses["adam"] > frequencies - 0.2


def test_further_options_reach_model_text_and_optimizer(data_folder, lm_data):
    words = "--weight-decay 0.1 --optimizer muon --lr-scheduler=wsd --decay-share 0.5 --clip-norm 3 --mask-prob 0.3"
    settings = tiny(data_folder, fairseq_options=(*words.split(), "--activation-dropout", "0.2"))
    compared = settings.row.load(settings)
    bert = settings.specs["bert"]
    optimization, objective = compared.optimization(bert, 1, 0.02, 200), compared.objective(bert, 1, 200)
    assert (optimization.optimizer, optimization.optimizer_options["weight_decay"]) == ("muon", 0.1)
    assert optimization.schedule_options == {"warmup_ratio": 0.1, "decay_share": 0.5} and optimization.clip_norm == 3
    assert objective.network.options.activation_dropout == 0.2 and objective.texts.masking.probability == 0.3
    for words, said in (
        ("--update-freq 2", "unknown option --update-freq"),
        (
            "--optimizer adafactor",
            "--optimizer adafactor: choose from fused_adam, nvlamb, muon; any other value requires",
        ),
        ("--attention-dropout 2", "'--attention-dropout': 2.0 is not in the range 0.0<=x<1.0"),
        ("--pooler-dropout 0.1", "--pooler-dropout: hf:bert does not support this option"),
    ):
        settings = tiny(data_folder, models={"bert": "sf", "hf": "hf:bert"}, fairseq_options=tuple(words.split()))
        compared = settings.row.load(settings)
        with pytest.raises(UserError, match=said):
            [(compared.optimization(spec, 1, 1, 1), compared.objective(spec, 1, 1)) for spec in settings.specs.values()]


def test_a_model_of_fairseqs_says_that_it_needs_fairseq(data_folder, monkeypatch):
    monkeypatch.setattr(extras, "has_fairseq", lambda: False)
    settings = tiny(data_folder, models={"bert": "sf", "roberta": "fairseq:roberta_base"})
    with pytest.raises(UserError, match="roberta=fairseq:roberta_base requires fairseq, which is not installed"):
        settings.row.load(settings).objective(settings.specs["roberta"], 1, 2)


def test_a_model_that_diverges_ends_in_no_number_and_the_others_go_on(data_folder, tmp_path, monkeypatch):
    """By a schedule that no trial of two updates has room for, which measures the costs nevertheless."""
    train_on = TrainingLoop.train_on

    def diverge(self, batches):
        if getattr(self, "name", None) == "mine" and self.updates == 2:
            raise DivergedError("NaN")
        train_on(self, batches)

    monkeypatch.setattr(TrainingLoop, "train_on", diverge)
    schedule = ("--lr-scheduler", "wsd", "--decay-share", "0.6")
    settings = tiny(data_folder, models=TWO, seeds=(1,), fairseq_options=schedule)
    models = compare(settings, tmp_path / "both", [])["models"]
    curves = {name: model["runs"]["1"]["curve"] for name, model in models.items()}
    assert curves["bert"]["updates"] == curves["mine"]["updates"] == [0, 1, 4]
    assert math.isnan(curves["mine"]["loss"][-1]) and math.isfinite(curves["mine"]["loss"][-2])
    assert math.isfinite(curves["bert"]["loss"][-1])
    assert "nan" in write_report(read_folder(tmp_path / "both"), tmp_path / "report")


def test_costs_are_measured_anew_where_trainings_were_removed_for_other_settings(data_folder, tmp_path):
    def parameters(**sizes) -> int:
        settings = tiny(data_folder, models={"bert": "sf"}, seeds=(1,), updates=1, sizes={**TINY, **sizes})
        return compare(settings, tmp_path, [])["models"]["bert"]["parameters"]

    small = parameters()
    shutil.rmtree(tmp_path / "runs")
    assert parameters(ffn_embed_dim=24) > small


def test_a_mistake_does_not_claim_the_folder(lm_data, tmp_path):
    with pytest.raises(UserError, match="3 attention heads"):
        compare(tiny(lm_data, "language-model", sizes={**SEGMENTS, "heads": 3}), tmp_path, [])
    models = {"models": {"lazy": "sflf"}, "baseline": "lazy"}
    found = compare(tiny(lm_data, "language-model", seeds=(1,), updates=1, **models), tmp_path, [])
    assert found["settings"]["sizes"]["heads"] == 2


def test_models_are_kept_by_words_read_and_a_budget_of_words_is_kept(data_folder, tmp_path):
    """A checkpoint without an optimizer at each number of words; a training beyond the budget does not begin."""
    data = shutil.copytree(data_folder, tmp_path / "data")
    counts = {"words": 60, "tokens": 100, "sentences": 15}
    (data / "manifest.json").write_text(json.dumps({"train": counts, "documents": {"train": 5}}))  # half a word an id
    words = {"checkpoint_words": (100, 10_000), "models": {"bert": "sf"}, "seeds": (1,), "updates": 4}
    settings = tiny(data, **words, word_budget=4 * 4 * 16)
    compare(settings, tmp_path / "out", ["lazyformer", "compare"])
    (kept,) = (tmp_path / "out").glob("runs/*/checkpoint_*_words.pt")
    assert kept.name == "checkpoint_0.0001M_words.pt"
    assert not checkpoint_file.load(kept).get("last_optimizer_state")
    assert checkpoint_file.load(kept)["optimizer_history"][-1]["num_updates"] < 4
    most = 4 * settings.sizes["batch_size"] * settings.sizes["tokens_per_sample"] // 2
    with pytest.raises(UserError, match=f"--word-budget {most - 1}: bert would read {most} words in its 4 updates"):
        compare(tiny(data, **words, word_budget=most - 1), tmp_path / "more", [])
    timed = {**words, "updates": None, "budget": 60.0}
    found = compare(tiny(data, **timed, word_budget=most), tmp_path / "timed", [])
    assert found["models"]["bert"]["updates"] == 4, "a budget of time ends where that of words does"
    (data / "manifest.json").unlink()
    with pytest.raises(UserError, match="no manifest.json with word counts found"):
        compare(tiny(data, **words, word_budget=most), tmp_path / "none", [])


def test_a_length_without_room_for_the_schedule_is_refused_by_the_option_that_decides_it(
    data_folder, tmp_path, monkeypatch
):
    given = {"recipe": "laptop", "models": {"bert": "sf"}, "seeds": (1,)}
    with pytest.raises(UserError, match="^--updates 1: allows only 1 update for bert, but .* requires at least 2; use"):
        compare(tiny(data_folder, **given, updates=1), tmp_path / "short", [])
    monkeypatch.setattr(comparison_run, "_trial", lambda compared, specs: dict.fromkeys(specs, 1000.0))
    budget = {"updates": None, "budget": 3.0, "fairseq_options": ("--warmup-updates", "40")}
    with pytest.raises(UserError, match="^--budget 3s: allows only 3 updates for bert, but .* requires at least 80"):
        compare(tiny(data_folder, **given, **budget), tmp_path / "short", [])
    tries = {"updates": 4, "rate_updates": 1, "rates": (1e-3, 2e-3)}
    with pytest.raises(UserError, match="^--rate-updates 1: allows only 1 update for bert"):
        compare(tiny(data_folder, **given, **tries), tmp_path / "short", [])
