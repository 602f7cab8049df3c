"""``lazyformer export --to huggingface``, from checkpoints to what transformers loads."""

import json

import pytest
import torch
import transformers
from click.testing import CliRunner
from helpers import ROOT

from lazyformer_fairseq import LazyFormerModel
from lazyformer_fairseq.cli import main
from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.huggingface import export as exporting
from lazyformer_fairseq.huggingface.export import export_to_huggingface
from lazyformer_fairseq.huggingface.exported import heads

CHECKPOINTS = ROOT / "tests/fixtures/checkpoints_of_2026_11"


def export(*words):
    result = CliRunner().invoke(main, ["export", *map(str, words)])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


def test_a_pre_trained_model(tmp_path):
    result = export(CHECKPOINTS / "encoder", tmp_path / "out", "--to", "huggingface")
    assert "with code of its own" in result.output
    ours = LazyFormerModel.from_pretrained(CHECKPOINTS / "encoder")
    model = heads.LazyFormerForMaskedLM.from_pretrained(tmp_path / "out")
    ids = ours.encode("anna sees ben near the house.", "the house of anna")
    with torch.no_grad():
        wanted, _ = ours.model(ids)
        found = model(ids).logits
    torch.testing.assert_close(found[ids.ne(1)], wanted[ids.ne(1)], atol=1e-5, rtol=1e-5)
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["sublayer_pattern"] == "sflf sf"
    assert [config[f"{name}_token_id"] for name in ("bos", "pad", "eos", "mask")] == [0, 1, 2, 99]


def test_a_fine_tuned_model_and_its_card(tmp_path):
    export(CHECKPOINTS / "fine_tuned", tmp_path / "out", "--to", "huggingface", "--head", "cola")
    ours = LazyFormerModel.from_pretrained(CHECKPOINTS / "fine_tuned")
    model = heads.LazyFormerForSequenceClassification.from_pretrained(tmp_path / "out")
    texts = ("anna sees ben", "the house near the river is old")
    ids = ours.encode(*texts)
    torch.testing.assert_close(model(ids).logits, ours.predict("cola", *texts), atol=1e-5, rtol=1e-5)
    card = (tmp_path / "out" / "README.md").read_text()
    for known in ("`CoLA`", "30 and then 90", "`sflf sf`", "pre-norm", "cola: 0, 1", "trust_remote_code=True"):
        assert known in card
    assert "license:" not in card.split("---")[1], "left to the user"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["encoder", "--as", "bert"], "for --to huggingface"),
        (["encoder", "--to", "huggingface", "--as", "bert"], "this model is no BERT: its pattern is sflf sf"),
        (["encoder", "--to", "huggingface", "--head", "cola"], "no classification head 'cola'"),
        (["fine_tuned", "--to", "huggingface", "--head", "coal"], "did you mean cola"),
        (["language_model", "--to", "huggingface"], "causal language model"),
        (["nowhere", "--to", "huggingface"], "no such file or folder"),
    ],
    ids=str,
)
def test_what_cannot_be_is_refused_in_words_and_nothing_is_written(words, message, tmp_path):
    with pytest.raises(UserError, match=message):
        export(CHECKPOINTS / words[0], tmp_path / "out", *words[1:])
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_is_there_stays(tmp_path):
    (tmp_path / "mine").write_text("mine")
    with pytest.raises(UserError, match="exists already"):
        export(CHECKPOINTS / "encoder", tmp_path, "--to", "huggingface")


def test_a_model_that_computes_something_else_is_not_written(tmp_path, monkeypatch):
    def other_weights(weights, *others, save=exporting.save_file):
        save({name: weight + (name == "lm_head.decoder.bias") for name, weight in weights.items()}, *others)

    monkeypatch.setattr(exporting, "save_file", other_weights)
    with pytest.raises((UserError, ValueError), match="not those that config.json was saved with"):
        export_to_huggingface(CHECKPOINTS / "encoder", tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_pipelines_and_auto_classes_run_the_code_in_the_folder(tmp_path, monkeypatch):
    monkeypatch.setattr(transformers.dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.syspath_prepend(str(tmp_path / "modules"))
    export_to_huggingface(CHECKPOINTS / "encoder", tmp_path / "out")
    code = transformers.dynamic_module_utils.get_class_from_dynamic_module(
        "modeling_lazyformer.LazyFormerForMaskedLM", str(tmp_path / "out")
    )
    assert code.__module__.startswith("transformers_modules.")
    assert code.from_pretrained(tmp_path / "out").config.sublayer_pattern == "sflf sf"
