"""``lazyformer lm`` as a user calls it."""

import json
import re

import pytest
import torch
from click.testing import CliRunner
from helpers import ROOT
from language_model_data import write_toy_wikitext

from lazyformer_fairseq.cli import main
from lazyformer_fairseq.data.datasets.token_streams import open_tokens
from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.language_modeling.evaluate import Evaluation, in_words


def lm(*arguments: object) -> str:
    result = CliRunner().invoke(main, ["lm", *map(str, arguments)], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


@pytest.fixture
def checkpoint(lm_data, tmp_path, fairseq_train):
    task = "stream_language_modeling --tgt-len 8"
    options = "--arch lazy_par_transformer_tiny --sublayer-pattern sflf --criterion causal_lm --batch-size 8"
    fairseq_train(lm_data, f"{options} --max-update 3 --disable-validation --mem-len 12", tmp_path / "run", task)
    return tmp_path / "run" / "checkpoint_last.pt"


def test_evaluate_tells_and_writes_the_number(checkpoint, lm_data, tmp_path):
    said = lm("evaluate", checkpoint, lm_data, "--json", tmp_path / "result.json", "--device", "cpu")
    result = json.loads((tmp_path / "result.json").read_text())
    assert result["tokens"] == len(open_tokens(lm_data / "test"))
    assert (result["tgt_len"], result["mem_len"], result["clamp_len"], result["split"]) == (8, 12, 0, "test")
    assert re.search(rf"test: perplexity {result['perplexity']:.2f} per word \(.* bits per word\) over", said)
    lengths = ("--tgt-len", 16, "--mem-len", 20, "--clamp-len", 18, "--batch-size", 4, "--split", "valid")
    lm("evaluate", checkpoint, lm_data, *lengths, "--json", tmp_path / "other.json", "--device", "cpu")
    other = json.loads((tmp_path / "other.json").read_text())
    assert (other["tgt_len"], other["mem_len"], other["clamp_len"], other["split"]) == (16, 20, 18, "valid")
    assert other["bits_per_token"] != result["bits_per_token"]
    assert (result["same_length"], other["same_length"]) == (False, False)
    lm("evaluate", checkpoint, lm_data, "--same-length", "--json", tmp_path / "same.json", "--device", "cpu")
    same = json.loads((tmp_path / "same.json").read_text())
    assert same["same_length"] and same["bits_per_token"] != result["bits_per_token"]


@pytest.mark.parametrize(
    ("option", "value"), [("--tgt-len", 0), ("--mem-len", -1), ("--clamp-len", -2), ("--batch-size", 0)]
)
def test_evaluate_refuses_lengths_that_cannot_be(lm_data, option, value):
    command = ["lm", "evaluate", str(lm_data / "dict.txt"), str(lm_data), option, str(value)]
    result = CliRunner().invoke(main, command)
    assert result.exit_code == 2
    assert f"'{option}': {value} is not in the range x>={value + 1}." in result.output


def test_evaluate_names_what_is_wrong(checkpoint, lm_data, tmp_path, monkeypatch):
    def refused(message: str, *arguments: object) -> None:
        with pytest.raises(UserError, match=message):
            lm("evaluate", *arguments)

    refused(r"manifest\.json: no such file", checkpoint, tmp_path)
    refused("none.pt: no such checkpoint", tmp_path / "none.pt", lm_data)
    encoder = ROOT / "tests" / "fixtures" / "checkpoint_of_0.1.0" / "checkpoint_last.pt"
    refused("is no language model .* trained on the task full_sentences_masked_lm", encoder, lm_data)
    state = torch.load(checkpoint, weights_only=False)
    for content in ({**state, "cfg": None}, {**state, "cfg": {}}, {**state, "cfg": {"model": {}}}):
        torch.save(content, tmp_path / "no_task.pt")
        refused("is no language model of this package; it names no task", tmp_path / "no_task.pt", lm_data)
    exported = ROOT / "tests" / "fixtures" / "checkpoints_of_2026_11" / "exported" / "model.safetensors"
    refused("is no language model of this package", exported, lm_data)
    refused("--json .*: its folder is not there", checkpoint, lm_data, "--json", tmp_path / "no" / "r.json")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    refused("--device cuda: torch finds no GPU here", checkpoint, lm_data, "--device", "cuda")
    other = tmp_path / "other"
    text = write_toy_wikitext(tmp_path / "text")
    (text / "wiki.train.tokens").write_text(" quite another text \n")
    lm("prepare", "wikitext", text, other)
    refused("dictionary", checkpoint, other)


def test_prepare_says_what_the_text_is(tmp_path):
    said = lm("prepare", "wikitext", write_toy_wikitext(tmp_path / "text"), tmp_path / "data")
    assert "NOT an official text" in said and "vocabulary:" in said


def test_characters_are_told_in_bits():
    told = in_words(Evaluation(tokens=1000, nats=0.693147, seconds=2.0), "character", "test")
    assert told.startswith("test: 1.0000 bits per character (perplexity 2.00 per character) over 1,000 characters; 500")


def test_help_has_defaults_and_the_papers_lengths():
    told = " ".join(lm("evaluate", "--help").split())
    assert "base on WikiText-103 64 640 400" in told and "[default: (the training's)" in told
    assert "prepare" in lm("--help") and "evaluate" in lm("--help")
