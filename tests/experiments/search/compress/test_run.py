"""Whole searches from a tiny checkpoint: by the command, stopped and resumed, refused."""

import json
import math
import re
from pathlib import Path

import pytest
import torch
from helpers import ROOT
from in_process import invoke, refusal
from trained_encoders import write_encoder

from lazyformer_fairseq import LazyFormerModel
from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.experiments.search.compress.budgets import Losses
from lazyformer_fairseq.experiments.search.latency import latency_of
from lazyformer_fairseq.patterns.grammar import expand
from lazyformer_fairseq.warm_start.losses import masked_lm_bits, read_text
from lazyformer_fairseq.warm_start.start import Trained

PRICES = {"s": 3.0, "s_read": 4.0, "l": 1.0, "f": 2.0, "rest": 1.0}
COMPRESS = ("search", "compress")
SMALL = ("--tokens", 96, "--candidates", "l,identity", "--top", 2)


@pytest.fixture(scope="module")
def model(tmp_path_factory, data_folder) -> Path:
    return write_encoder(tmp_path_factory.mktemp("model"), data_folder, "(sf)x2")


@pytest.fixture
def latencies(tmp_path) -> Path:
    path = tmp_path / "latencies.json"
    path.write_text(json.dumps(PRICES))
    return path


def test_a_search_and_what_it_writes(model, data_folder, latencies, tmp_path):
    out = tmp_path / "out"
    said = invoke(*COMPRESS, model, data_folder, out, "--budgets", "0.8,0.5", "--latencies", latencies, *SMALL)
    files = "settings.json scores.json result.json report.md changes.csv patterns.csv losses.png models .lock"
    assert {path.name for path in out.iterdir()} == set(files.split())
    result = json.loads((out / "result.json").read_text())
    old = LazyFormerModel.from_pretrained(model)
    text = read_text(data_folder, old.tokenizer, 32, 96, 96)
    original = bits(old, text)
    assert result["original"]["bits"] == pytest.approx(original)
    whole = latency_of(PRICES, "sfsf")
    for row in result["budgets"]:
        found = row["found"]
        assert found["predicted_ms"] == latency_of(PRICES, found["pattern"]) <= row["budget"] * whole + 0.01
        folder = out / "models" / f"{row['budget']:g}"
        hub = LazyFormerModel.from_pretrained(folder)
        assert hub.model.cfg.sublayer_pattern == found["pattern"]
        assert bits(hub, text) - original == pytest.approx(found["above"], abs=1e-5)
        assert found["on_other_text"]["above"] == pytest.approx(rise_on_other_text(old, hub, data_folder), abs=1e-5)
        record = json.loads((folder / "warm_start.json").read_text())
        assert (record["old_pattern"], record["new_pattern"]) == ("sfsf", found["pattern"])
        assert f"lazyformer pretrain {folder} {data_folder} --save-dir" in (out / "report.md").read_text()
        assert found["pattern"] in [expand(pattern) for pattern in patterns_in(said)]


def bits(hub, text) -> float:
    return masked_lm_bits(Trained(hub.model.cfg, hub.model.state_dict(), hub.tokenizer.dictionary), text)


def rise_on_other_text(old, new, data_folder) -> float:
    """From losses of single tokens of the blocks that the search did not see."""
    more = read_text(data_folder, old.tokenizer, 32, 192, 96)
    used = read_text(data_folder, old.tokenizer, 32, 96, 96)
    seen = {int(block) for batch in used for block in batch["id"]}
    rises = []
    for batch in more:
        tokens, targets = batch["net_input"]["src_tokens"], batch["target"]
        with torch.no_grad():
            one, other = (hub.model(tokens)[0].log_softmax(-1) for hub in (old, new))
        rises += [
            float(one[row, at, targets[row, at]] - other[row, at, targets[row, at]])
            for row, at in targets.ne(old.tokenizer.special.pad).nonzero().tolist()
            if int(batch["id"][row]) not in seen
        ]
    return sum(rises) / len(rises) / math.log(2)


def patterns_in(table: str) -> list[str]:
    return [cell.strip("` ") for line in table.splitlines() for cell in line.split("|") if "`" in cell]


def test_a_search_that_was_stopped_measures_the_rest(model, data_folder, latencies, tmp_path, monkeypatch):
    words = (*COMPRESS, model, data_folder, tmp_path / "out", "--budgets", "0.7", "--latencies", latencies, *SMALL)
    asked: list[str] = []
    measure = Losses._by_block

    def stops_at(count):
        def by_block(self, by_place):
            if len(asked) == count:
                raise KeyboardInterrupt
            asked.append(" ".join(by_place))
            return measure(self, by_place)

        return by_block

    monkeypatch.setattr(Losses, "_by_block", stops_at(5))
    invoke(*words, code=1)
    monkeypatch.setattr(Losses, "_by_block", stops_at(-1))
    invoke(*words)
    assert sorted(each for each in set(asked) if asked.count(each) > 1) == ["s f s f"], "the original alone comes twice"
    before = list(asked)
    assert "this search is finished" in invoke(*words) and asked == before
    with pytest.raises(UserError, match="holds a search of other settings .seed is 1 there, 2 here"):
        invoke(*words, "--seed", 2)


@pytest.mark.parametrize(
    ("pattern", "options"),
    [("s[window=4]flf", {"encoder_normalize_before": True}), ("s[window=4,global=given]s-f", {})],
)
def test_settings_lazy_models_and_pre_norm(data_folder, tmp_path, pattern, options):
    model = write_encoder(tmp_path / "model", data_folder, pattern, **options)
    few = ("--tokens", 64, "--top", 1, "--latency-tokens", 8)
    words = ("--budgets", 0.9, "--candidates", "s,l,identity", *few)
    said = invoke(*COMPRESS, model, data_folder, tmp_path / "out", *words)
    (found,) = (each for each in patterns_in(said))
    hub = LazyFormerModel.from_pretrained(tmp_path / "out" / "models" / "0.9")
    assert expand(hub.model.cfg.sublayer_pattern) == expand(found) != expand(pattern)


@pytest.mark.slow
def test_a_bert_of_the_hub_is_imported_first(tmp_path):
    pytest.importorskip("transformers")
    from tiny_berts import save_tiny

    save_tiny(tmp_path / "in")
    (tmp_path / "text.txt").write_text("The cat sat on the mat, a dog ran.\n" * 60)
    with pytest.raises(UserError, match="becomes a checkpoint of this package first: lazyformer import"):
        invoke(*COMPRESS, tmp_path / "in", tmp_path / "text.txt", tmp_path / "out")
    invoke("import", tmp_path / "in", tmp_path / "ours")
    words = ("--tokens", 64, "--candidates", "identity", "--top", 1, "--budgets", 0.8)
    said = invoke(*COMPRESS, tmp_path / "ours", tmp_path / "text.txt", tmp_path / "out", *words)
    assert "`" in said and "lazyformer pretrain" in (tmp_path / "out" / "report.md").read_text()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--candidates k", "--budgets 0.1: no choice of --candidates makes the model so fast"),
        ("--candidates f[width=2]", "--candidates: .*has no setting"),
        ("--candidates s", "--candidates s: no sublayer of .* becomes any of them"),
        ("--latency-tokens 99", "--latency-tokens 99: the model reads 32 at most"),
        ("", "is a causal language model; search compress takes masked-LM encoders"),
    ],
)
def test_what_is_refused(model, data_folder, latencies, tmp_path, words, message):
    (tmp_path / "latencies.json").write_text(json.dumps(PRICES | {"k": 2.0}))
    given = model if words else ROOT / "tests/fixtures/checkpoints_of_2026_11/language_model"
    options = ("--budgets", 0.1, "--latencies", latencies, *words.split())
    assert re.search(message, refusal(*COMPRESS, given, data_folder, tmp_path / "out", *options))
    assert not (tmp_path / "out" / "scores.json").exists()
