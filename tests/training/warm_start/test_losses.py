"""What changes cost, against models that are made by hand; `lazyformer import` of a checkpoint of ours."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers import head_logits, toy_texts, train_tokenizer
from in_process import invoke, refusal
from tiny_berts import save_tiny
from trained_encoders import trained, write_encoder

from lazyformer_fairseq import load
from lazyformer_fairseq.data.text.normalisation import TextSettings
from lazyformer_fairseq.data.text.tokenizer import Tokenizer
from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.training.warm_start.losses import Scorer, masked_lm_bits, measure_losses, read_text
from lazyformer_fairseq.training.warm_start.start import Trained, start_from


@pytest.fixture(scope="module")
def tokenizer(data_folder) -> Tokenizer:
    return Tokenizer.load(data_folder / "tokenizer")


@pytest.fixture(scope="module")
def text(data_folder, tokenizer):
    return read_text(data_folder, tokenizer, 32, 192)


@pytest.fixture(scope="module")
def old(tokenizer) -> Trained:
    return trained("(sf)x3", dictionary=tokenizer.dictionary, max_positions=32)


def test_the_loss_is_the_mean_of_surprise_at_masked_tokens_in_bits(old, text):
    model = old.build()
    bits = []
    for batch in text:
        with torch.no_grad():
            probabilities = model(batch["net_input"]["src_tokens"])[0].softmax(-1)
        for row, targets in zip(probabilities, batch["target"], strict=True):
            bits += [-math.log2(row[at, word]) for at, word in enumerate(targets) if word != old.dictionary.pad()]
    assert masked_lm_bits(old, text) == pytest.approx(np.mean(bits), rel=1e-5)


def test_text_is_the_same_at_each_call_and_more_text_begins_with_it(data_folder, tokenizer, text):
    again = read_text(data_folder, tokenizer, 32, 192)
    for one, other in zip(text, again, strict=True):
        assert torch.equal(one["net_input"]["src_tokens"], other["net_input"]["src_tokens"])
    more = read_text(data_folder, tokenizer, 32, 384)
    some, others = ({int(each) for batch in part for each in batch["id"]} for part in (text, more))
    assert len(some) == 6 and len(others) == 12 and some < others


def test_raw_text_in_place_of_data_and_what_is_refused(tmp_path, data_folder, tokenizer, old):
    raw = tmp_path / "text.txt"
    raw.write_text("\n\n".join(toy_texts(20)))
    text = read_text(raw, tokenizer, 32, 128)
    assert masked_lm_bits(old, text) > 0
    words = tokenizer.decode(text[0]["target"][0].tolist())
    assert words and "<unk>" not in words
    other = train_tokenizer(tmp_path / "tokenizer", toy_texts(30, seed=2), 90, TextSettings())
    with pytest.raises(UserError, match="has a different dictionary from the model"):
        read_text(data_folder, other, 32)
    for content, message in (("", "contains no text"), ("A word.", "is too short .* at least two blocks of 32 tokens")):
        raw.write_text(content)
        with pytest.raises(UserError, match=message):
            read_text(raw, tokenizer, 32)


def test_the_loss_before_and_after(old, text):
    scorer = Scorer(old, text)
    start = scorer.start({"sublayer_pattern": "M3"})
    assert measure_losses(scorer, start) == {
        "unit": "bits",
        "tokens": sum(int(batch["target"].ne(old.dictionary.pad()).sum()) for batch in text),
        "before": masked_lm_bits(start_from(old, {"sublayer_pattern": "(sf)x3"}).new, text),
        "after": masked_lm_bits(start_from(old, {"sublayer_pattern": "sflflf"}).new, text),
    }


# --- The command: a folder that loads, with its record, or nothing

TEXTS = ("Anna sees Ben near the house.", "The garden.")


@pytest.fixture(scope="module")
def model(tmp_path_factory, data_folder) -> Path:
    """A folder with an (sf)x4, as `lazyformer export` writes it."""
    return write_encoder(tmp_path_factory.mktemp("model"), data_folder, "(sf)x4", "cola", 2)


def record_of(source: Path, out: Path, *words: object) -> dict:
    invoke("import", source, out, *words)
    return json.loads((out / "warm_start.json").read_text())


def test_a_report(model, data_folder, tmp_path):
    out = tmp_path / "out"
    record = record_of(model, out, "--sublayer-pattern", "M2x2", "--text", data_folder)
    files = "config.json model.safetensors tokenizer warm_start.json warm_start.md".split()
    assert sorted(path.name for path in out.iterdir()) == files
    assert (record["old_pattern"], record["new_pattern"]) == ("sfsfsfsf", "sflfsflf")
    assert record["source"] == model.name
    page = (out / "warm_start.md").read_text()
    assert "`s` 2" in page and f"{record['losses']['before']:.3f} bits before" in page
    hub = load(out)
    assert hub.model.cfg.sublayer_pattern == "M2x2" and head_logits(hub, "cola", TEXTS[0]).shape == (1, 2)
    head = "classification_heads.cola.out_proj.weight"
    before, after = (load(each).model.get_parameter(head) for each in (model, out))
    assert torch.equal(before, after)


def test_without_text_a_wider_model_computes_the_same(model, tmp_path):
    record = record_of(model, tmp_path / "out", "--encoder-ffn-embed-dim", 40, "--max-positions", 50)
    folders = (model, tmp_path / "out")
    before, after = (load(folder).extract_features(*TEXTS) for folder in folders)
    torch.testing.assert_close(before, after, atol=1e-5, rtol=1e-5)
    assert record["changed_options"] == {"encoder_ffn_embed_dim": [24, 40], "max_positions": [32, 50]}
    assert record["losses"] is None


def test_raw_text_and_an_alignment_of_the_users_own(model, tmp_path):
    (tmp_path / "text.txt").write_text("\n".join(toy_texts(30)))
    words = ("--sublayer-pattern", "s-f", "--from-sublayers", "2, -,3", "--text", tmp_path / "text.txt")
    record = record_of(model, tmp_path / "out", *words)
    assert record["left_out"] == [0, 1, 4, 5, 6, 7] and record["losses"]["after"] > 0
    assert "sublayers are not used: 0, 1, 4, 5, 6, 7." in (tmp_path / "out" / "warm_start.md").read_text()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--from-sublayers 0,1", "--from-sublayers and --text require a changed model"),
        ("--sublayer-pattern lf", "character 1: this l has no s below it"),
        ("--sublayer-pattern M4 --text missing.txt", "missing.txt: no such file or folder"),
        ("--sublayer-pattern M2 --from-sublayers 0", "one entry for each of the new pattern's 4 sublayers"),
        (
            "--sublayer-pattern M2 --from-sublayers 0,1,2,8",
            "'8' must be a sublayer's index in the old pattern, from 0 to 7",
        ),
        ("--sublayer-pattern M2 --from-sublayers 0,1,2,x", "'x' must be a sublayer's index in the old pattern"),
        ("--sublayer-pattern M2 --from-sublayers 0,2,2,3", "1 (f) cannot use the weights of old sublayer 2 (s)"),
        ("--encoder-ffn-embed-dim 8", "--encoder-ffn-embed-dim 8: the old model's is 24, and hidden units"),
        ("--max-positions 11", "--max-positions 11: the old model has 32; use 32 or more"),
        ("--sublayer-pattern s[linformer=2]f", "use --relative-position-buckets 0"),
    ],
)
def test_what_is_refused_leaves_nothing_behind(model, tmp_path, options, message):
    assert message in refusal("import", model, tmp_path / "out", *options.split())
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("family", "layers"), [("Roberta", "num_hidden_layers"), ("DistilBert", "n_layers")])
def test_a_model_of_the_hub_starts_another_pattern_with_its_own_tokenizer(tmp_path, family, layers):
    save_tiny(tmp_path / "in", f"{family}ForMaskedLM", **{layers: 4})
    (tmp_path / "text.txt").write_text("The cat sat on the mat, a dog ran.\n" * 30)
    words = ("--sublayer-pattern", "M2x2", "--encoder-ffn-embed-dim", 60, "--text", tmp_path / "text.txt")
    record = record_of(tmp_path / "in", tmp_path / "out", *words)
    assert [each["from"] for each in record["sublayers"]] == list(range(8))
    assert record["losses"]["before"] > 0
    hub = load(tmp_path / "out")
    assert len(hub.fill_mask(f"the cat {hub.tokenizer.mask_word} on the mat", topk=3)) == 3
