"""``lazyformer lm``: texts prepared, what is written and refused; evaluation, which no batch size changes."""

import json
import math
import re
from collections import Counter
from itertools import pairwise

import numpy as np
import pytest
import torch
from helpers import ROOT, write_toy_wikitext
from hypothesis import example, given, settings
from hypothesis import strategies as st
from in_process import invoke, refusal

from lazyformer_fairseq.data.datasets.token_streams import open_tokens
from lazyformer_fairseq.data.text.dictionary_file import load_dictionary
from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.language_modeling import prepare as steps
from lazyformer_fairseq.language_modeling.evaluate import Evaluation, evaluate, in_words, token_losses
from lazyformer_fairseq.language_modeling.prepare import not_official, overview, prepare, read_manifest
from lazyformer_fairseq.modules.networks.causal_lm import CausalLM
from lazyformer_fairseq.modules.networks.options import CausalLMOptions
from lazyformer_fairseq.modules.networks.stream_memory import StreamMemory
from lazyformer_fairseq.storage.indexed_format import MappedItems


@pytest.fixture
def short(monkeypatch):
    """Files of 100 characters."""
    monkeypatch.setattr(steps, "CHARACTERS", {"train": 60, "valid": 20, "test": 20})


@pytest.fixture
def wikitext(tmp_path):
    """Training and test have unknown words already, which are fairseq's own."""
    folder = write_toy_wikitext(tmp_path / "text")
    for split in ("train", "test"):
        with open(folder / f"wiki.{split}.tokens", "a") as file:
            file.write(" a new <unk> <unk> \n")
    return folder


def words_of(folder, split: str) -> list[str]:
    lines = (folder / f"wiki.{split}.tokens").read_text(encoding="utf-8").split("\n")[:-1]
    return [word for line in lines for word in [*line.split(), "</s>"]]


def symbols(folder, split: str) -> list[str]:
    dictionary = load_dictionary(folder / "dict.txt")
    return [dictionary[token] for token in open_tokens(folder / split)]


@pytest.mark.parametrize("block", [1, 100, 1 << 22])
def test_words_stand_as_they_are_and_every_line_ends(wikitext, tmp_path, monkeypatch, block):
    monkeypatch.setattr(steps, "BLOCK", block)
    manifest = prepare("wikitext", wikitext, tmp_path / "data")
    counts = Counter(words_of(wikitext, "train"))
    for split, found in manifest["splits"].items():
        words = [word if word in counts else "<unk>" for word in words_of(wikitext, split)]
        assert symbols(tmp_path / "data", split) == words
        assert found == {"tokens": len(words), "items": words.count("</s>"), "unknown": words.count("<unk>")}
    assert manifest["vocabulary"] == len(counts) and manifest["unit"] == "word"
    assert json.loads((tmp_path / "data" / "manifest.json").read_text()) == read_manifest(tmp_path / "data") == manifest
    # fairseq reads lines, the second of which is empty; its dictionary is sorted by frequency and has no filling.
    dictionary = load_dictionary(tmp_path / "data" / "dict.txt")
    lines = MappedItems(tmp_path / "data" / "train")
    assert all(line[-1] == dictionary.eos() and dictionary.eos() not in line[:-1] for line in lines)
    assert lines[1].tolist() == [dictionary.eos()]
    own = dictionary.symbols[dictionary.nspecial :]
    assert set(own) == counts.keys() - {"</s>", "<unk>"}
    assert all((-counts[one], one) < (-counts[other], other) for one, other in pairwise(own))
    assert [dictionary.count[dictionary.index(word)] for word in own] == [counts[word] for word in own]


@settings(max_examples=15)
@given(st.text(st.characters(codec="utf-8", exclude_characters="<"), min_size=1))
@example("\r")
def test_any_text_keeps_its_words(tmp_path_factory, text):
    folder = write_toy_wikitext(tmp_path_factory.mktemp("any") / "text")
    with open(folder / "wiki.train.tokens", "w", encoding="utf-8", newline="") as file:
        file.write(text)
    lines = text.split("\n")
    expected = [word for line in (lines if lines[-1] else lines[:-1]) for word in [*line.split(), "</s>"]]
    if not text.split():
        with pytest.raises(UserError, match="text: the training text has no words"):
            prepare("wikitext", folder, folder.parent / "data")
        return
    manifest = prepare("wikitext", folder, folder.parent / "data")
    assert manifest["splits"]["train"]["tokens"] == len(expected)
    assert symbols(folder.parent / "data", "train") == expected


@pytest.mark.slow
def test_wikitext_2_has_the_official_counts(real_data, tmp_path):
    manifest = prepare("wikitext", real_data / "lm" / "wikitext-2", tmp_path / "data", official="wikitext-2")
    counts = {split: found["tokens"] for split, found in manifest["splits"].items()}
    assert counts == {"train": 2_088_628, "valid": 217_646, "test": 245_569}
    assert manifest["vocabulary"] == 33_278 and manifest["official"] == "wikitext-2"
    assert len(load_dictionary(tmp_path / "data" / "dict.txt")) == 33_280  # <s> and <pad>
    assert open_tokens(tmp_path / "data" / "train").dtype == np.uint16
    assert "these are the official counts of wikitext-2" in overview(manifest)


def test_other_counts_are_said_plainly_and_refused_where_asked(wikitext, tmp_path, monkeypatch):
    def refused(official: str, message: str) -> None:
        with pytest.raises(UserError, match=message):
            prepare("wikitext", wikitext, tmp_path / "other", official=official)
        assert not (tmp_path / "other").exists()

    manifest = prepare("wikitext", wikitext, tmp_path / "data")
    counts = {split: found["tokens"] for split, found in manifest["splits"].items()}
    assert manifest["official"] is None
    assert "NOT an official text" in overview(manifest)
    assert f"the train size is {counts['train']:,}, but in wikitext-2 it is 2,088,628" in not_official(manifest)
    refused("wikitext-103", r" is not wikitext-103 \(the train size is")
    refused("text8", "--official text8 is not a version of wikitext")
    as_2 = {**counts, "vocabulary": manifest["vocabulary"]}  # the other one is refused for what it is
    monkeypatch.setitem(steps.OFFICIAL_COUNTS, "wikitext-2", as_2)
    reason = rf"the train size is {counts['train']:,}, but in wikitext-103 it is 103,227,021; .*\); use --official "
    refused("wikitext-103", rf"not wikitext-103 \({reason}wikitext-2")


@pytest.mark.usefixtures("short")
def test_bytes_of_enwik8(tmp_path):
    content = bytes(range(0, 256, 4)) + b"\n <page>\xc3\xa9" * 3 + b"abc"
    content = content + b"z" * (100 - len(content))
    (tmp_path / "enwik8").write_bytes(content)
    manifest = prepare("enwik8", tmp_path, tmp_path / "data")
    known = set(content[:60])
    for split, part in {"train": content[:60], "valid": content[60:80], "test": content[80:]}.items():
        assert symbols(tmp_path / "data", split) == [str(byte) if byte in known else "<unk>" for byte in part]
        assert manifest["splits"][split]["tokens"] == len(part)
    assert (manifest["unit"], manifest["vocabulary"], manifest["official"]) == ("character", len(known), None)
    assert "its MD5 is not a1fa5ffddb56f4953e226637dabbb36a" in overview(manifest)


@pytest.mark.usefixtures("short")
@pytest.mark.parametrize("block", [7, 1 << 22])
def test_characters_of_text8(tmp_path, monkeypatch, block):
    monkeypatch.setattr(steps, "BLOCK", block)
    content = ("the quick brown fox jumps over a lazy dog " * 3)[:100]
    (tmp_path / "text8").write_text(content)
    prepare("text8", tmp_path / "text8", tmp_path / "data")
    assert "".join(symbols(tmp_path / "data", "train")) == content[:60].replace(" ", "_")
    assert "".join(symbols(tmp_path / "data", "test")) == content[80:].replace(" ", "_")


@pytest.mark.usefixtures("short")
def test_a_file_that_the_splits_do_not_fit_or_of_other_characters_is_refused(tmp_path):
    for size in (0, 99, 101):
        (tmp_path / "enwik8").write_bytes(b"x" * size)
        with pytest.raises(UserError, match=f"has {size} bytes, but enwik8 should have 100 .train 60, valid 20, test"):
            prepare("enwik8", tmp_path, tmp_path / "data")
    (tmp_path / "text8").write_bytes(b"abc D" + b"x" * 95)
    with pytest.raises(UserError, match="contains the byte 68, but text8 has only a to z and spaces"):
        prepare("text8", tmp_path, tmp_path / "data")
    assert not (tmp_path / "data").exists()


def test_what_is_missing_or_wrong_is_named_and_nothing_is_written(wikitext, tmp_path):
    def refused(message: str) -> None:
        with pytest.raises(UserError, match=message):
            prepare("wikitext", wikitext, tmp_path / "data")
        assert not (tmp_path / "data").exists()

    valid = wikitext / "wiki.valid.tokens"
    for content, message in {
        b" fine \n\n caf\xe9 \n": r"valid\.tokens, line 3: not UTF-8",
        b" fine \n a <pad> b \n": r"valid\.tokens, line 2: <pad> is a special symbol in fairseq",
        b" a </s> \n": r"valid\.tokens, line 1: </s> is a special symbol in fairseq",
        b"": r"valid\.tokens is empty",
    }.items():
        valid.write_bytes(content)
        refused(message)
    valid.unlink()
    refused(r"wiki\.valid\.tokens: no such file")
    with pytest.raises(UserError, match=r"nowhere: no such file; pass the unpacked file enwik8"):
        prepare("enwik8", tmp_path / "nowhere", tmp_path / "data")
    with pytest.raises(UserError, match=r"manifest\.json: no such file; pass a folder written by `lazyformer lm"):
        read_manifest(tmp_path)
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "mine").write_text("mine")
    with pytest.raises(UserError, match="data already exists"):
        prepare("wikitext", wikitext, tmp_path / "data")
    assert [path.name for path in (tmp_path / "data").iterdir()] == ["mine"]


WORDS = 24


def tiny_model(pattern: str) -> CausalLM:
    """With weights large enough that what is far back matters to the loss."""
    torch.manual_seed(0)
    sizes = dict(decoder_embed_dim=8, decoder_ffn_embed_dim=8, decoder_attention_heads=2, mem_len=5, dropout=0.3)
    options = CausalLMOptions(sublayer_pattern=pattern, adaptive_softmax_cutoff="", **sizes)
    model = CausalLM(options, WORDS + 4)
    for name, parameter in model.named_parameters():
        if "layer_norm" not in name:
            torch.nn.init.normal_(parameter, std=0.7)
    return model


def text(count: int) -> np.ndarray:
    return np.random.default_rng(0).integers(4, WORDS + 4, count)


def reference_losses(model, tokens, tgt_len, mem_len, clamp_len=0, same_length=False) -> list[float]:
    """A plain loop at batch size 1, by log-probabilities of all words."""
    model.eval()
    model.decoder.mem_len, model.decoder.clamp_len, model.decoder.same_length = mem_len, clamp_len, same_length
    memory, losses = StreamMemory(), []
    source = torch.tensor([2, *tokens[:-1]])
    for start in range(0, len(tokens), tgt_len):
        with torch.no_grad():
            log_probabilities, _ = model(source[None, start : start + tgt_len], memory=memory)
        targets = tokens[start : start + tgt_len]
        losses += [-log_probabilities[0, place, target].item() for place, target in enumerate(targets)]
    return losses


patterns = st.sampled_from(["sfsf", "sflfsf", "sff", "fsf", "sslf"])
lengths = st.tuples(st.integers(1, 9), st.integers(0, 14), st.sampled_from([0, 3]), st.booleans())


@settings(max_examples=10)
@given(patterns, st.integers(1, 90), lengths, st.integers(2, 12))
def test_every_batch_size_gives_the_number_of_batch_size_1(pattern, count, lengths, batch_size):
    model, tokens = tiny_model(pattern), text(count)
    tgt_len, mem_len, clamp_len, same_length = lengths
    lengths = (tgt_len, mem_len, clamp_len, same_length and mem_len > 0)
    alone = token_losses(model, tokens, 2, *lengths)
    together = token_losses(model, tokens, 2, *lengths, batch_size=batch_size)
    np.testing.assert_allclose(together, alone, atol=1e-4)
    np.testing.assert_allclose(alone, reference_losses(model, tokens, *lengths), atol=1e-4)


def test_the_number_is_the_mean_over_every_token_the_first_among_them():
    model, tokens = tiny_model("sf"), text(50)
    result = evaluate(model, tokens, 2, tgt_len=8, mem_len=8)
    losses = reference_losses(model, tokens, 8, 8)
    assert result.tokens == 50 == len(losses)
    assert result.nats == pytest.approx(sum(losses) / 50, abs=1e-5)
    assert result.perplexity == pytest.approx(math.exp(result.nats))
    assert result.bits == pytest.approx(math.log2(result.perplexity))
    assert result.seconds > 0


def test_with_the_same_length_the_number_does_not_depend_on_the_segments():
    model, tokens = tiny_model("sflfsf"), text(60)
    by_segment = [token_losses(model, tokens, 2, tgt_len, 6, same_length=True) for tgt_len in (1, 4, 13, 60)]
    for losses in by_segment[1:]:
        np.testing.assert_allclose(losses, by_segment[0], atol=1e-4)
    assert np.abs(token_losses(model, tokens, 2, 13, 6) - by_segment[0]).max() > 1e-2


FIXTURES = ROOT / "tests" / "fixtures"
TRAINED = FIXTURES / "checkpoints" / "language_model"  # on segments of 12 tokens after a memory of 16
CHECKPOINT = TRAINED / "checkpoint_last.pt"


def test_the_command_tells_and_writes_the_number(tmp_path):
    def result(options: str = "") -> dict:
        file = ("--json", tmp_path / "result.json", "--device", "cpu")
        said = invoke("lm", "evaluate", CHECKPOINT, TRAINED / "data", *file, *options.split())
        found = json.loads((tmp_path / "result.json").read_text())
        words = rf"{found['split']}: perplexity {found['perplexity']:.2f} per word \(.* bits per word\) over"
        assert re.search(words, said)
        return found

    def lengths(found: dict) -> tuple:
        return tuple(found[name] for name in ("tgt_len", "mem_len", "clamp_len", "split", "same_length"))

    plain = result()
    assert plain["tokens"] == len(open_tokens(TRAINED / "data" / "test"))
    assert lengths(plain) == (12, 16, 0, "test", False)
    other = result("--tgt-len 18 --mem-len 20 --clamp-len 17 --batch-size 4 --split valid")
    assert lengths(other) == (18, 20, 17, "valid", False)
    assert lengths(result("--lengths large --batch-size 9")) == (128, 1600, 1000, "test", True)
    (tmp_path / "own.yaml").write_text("tgt_len: 18\nmem_len: 20\n")
    assert lengths(result(f"--lengths {tmp_path / 'own.yaml'} --mem-len 7")) == (18, 7, 0, "test", False)
    same = result("--same-length")
    assert lengths(same) == (12, 16, 0, "test", True)
    assert len({found["bits_per_token"] for found in (plain, other, same)}) == 3
    told = in_words(Evaluation(tokens=1000, nats=0.693147, seconds=2.0), "character", "test")
    assert told.startswith("test: 1.0000 bits per character (perplexity 2.00 per character) over 1,000 characters; 500")


def test_the_command_names_what_is_wrong(tmp_path, monkeypatch):
    def refused(message: str, *arguments: object) -> None:
        assert re.search(message, refusal("lm", "evaluate", *arguments))

    data = TRAINED / "data"
    for option, value in (("--tgt-len", 0), ("--mem-len", -1), ("--clamp-len", -2), ("--batch-size", 0)):
        refused(f"'{option}': {value} is not in the range x>={value + 1}.", CHECKPOINT, data, option, value)
    for content, message in (
        ("tgt_len: x", "field 'tgt_len' is 'x', but must be a valid integer"),
        ("[", "not a valid YAML settings file"),
        ("tgt_len: 0", "field 'tgt_len' is 0, but must be greater than 0"),
    ):
        (tmp_path / "own.yaml").write_text(content)
        refused(message, CHECKPOINT, data, "--lengths", tmp_path / "own.yaml")
    refused("--lengths lage: .*nor one of 24b, base, large; did you mean large", CHECKPOINT, data, "--lengths", "lage")
    refused(r"manifest\.json: no such file", CHECKPOINT, tmp_path)
    refused("none.pt: no such checkpoint", tmp_path / "none.pt", data)
    encoder = FIXTURES / "checkpoints" / "m2x2" / "checkpoint_last.pt"
    refused("not a language model .* trained on the task full_sentences_masked_lm", encoder, data)
    state = torch.load(CHECKPOINT, weights_only=False)
    no_model, no_task = "no_task.pt: not a checkpoint", "not a language model from this package; it names no task"
    for cfg, message in ((None, no_model), ({}, no_task), ({"model": {}}, no_task)):
        torch.save({**state, "cfg": cfg}, tmp_path / "no_task.pt")
        refused(message, tmp_path / "no_task.pt", data)
    exported = FIXTURES / "checkpoints" / "exported" / "model.safetensors"
    refused("not a language model from this package", exported, data)
    refused("--json .*: the file's folder does not exist", CHECKPOINT, data, "--json", tmp_path / "no" / "r.json")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    refused("--device cuda: torch finds no GPU here", CHECKPOINT, data, "--device", "cuda")
    text = write_toy_wikitext(tmp_path / "text")
    (text / "wiki.train.tokens").write_text(" ".join(f"another{n}" for n in range(30)))
    said = invoke("lm", "prepare", "wikitext", text, tmp_path / "other")
    assert "NOT an official text" in said and "vocabulary:" in said
    refused("--same-length with --mem-len 0", CHECKPOINT, data, "--same-length", "--mem-len", 0)
    refused("dictionary", CHECKPOINT, tmp_path / "other")
