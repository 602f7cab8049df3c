"""What changes cost, against models that are made by hand."""

import math
from functools import cache

import numpy as np
import pytest
import torch
from helpers import toy_texts, train_tokenizer
from hypothesis import given, settings
from hypothesis import strategies as st
from trained_encoders import trained

from lazyformer_fairseq.data.text.normalisation import TextSettings
from lazyformer_fairseq.data.text.tokenizer import Tokenizer
from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.patterns.grammar import expand, plan
from lazyformer_fairseq.warm_start.losses import Merged, Scorer, masked_lm_bits, measure_losses, read_text
from lazyformer_fairseq.warm_start.start import Trained, WarmStart, start_from


@pytest.fixture(scope="module")
def tokenizer(data_folder) -> Tokenizer:
    return Tokenizer.load(data_folder / "tokenizer")


@pytest.fixture(scope="module")
def text(data_folder, tokenizer):
    return read_text(data_folder, tokenizer, 32, 192, 96)


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


def test_text_is_the_same_at_each_call_and_blocks_are_passed_over(data_folder, tokenizer, text):
    again = read_text(data_folder, tokenizer, 32, 192, 96)
    for one, other in zip(text, again, strict=True):
        assert torch.equal(one["net_input"]["src_tokens"], other["net_input"]["src_tokens"])
    without = read_text(data_folder, tokenizer, 32, 192, 0)
    used, others = ({int(each) for batch in part for each in batch["id"]} for part in (text, without))
    assert len(used) == len(others) == 6 and used != others


def test_raw_text_in_place_of_data_and_what_is_refused(tmp_path, data_folder, tokenizer, old):
    raw = tmp_path / "text.txt"
    raw.write_text("\n\n".join(toy_texts(20)))
    text = read_text(raw, tokenizer, 32, 128, 64)
    assert masked_lm_bits(old, text) > 0
    words = tokenizer.decode(text[0]["target"][0].tolist())
    assert words and "<unk>" not in words
    other = train_tokenizer(tmp_path / "tokenizer", toy_texts(30, seed=2), 90, TextSettings())
    with pytest.raises(UserError, match="has another dictionary than the model"):
        read_text(data_folder, other, 32)
    for content, message in (("", "holds no text"), ("A word.", "one block of 32 tokens, too few to measure losses")):
        raw.write_text(content)
        with pytest.raises(UserError, match=message):
            read_text(raw, tokenizer, 32)


sublayers = st.sampled_from(["s", "f", "l", "-", "s[window=2]"])
patterns = st.lists(sublayers, max_size=6).map(lambda rest: "".join(["s", *rest, "f"]))


@cache
def trained_shape(pattern: str) -> Trained:
    return trained(pattern, encoder_embed_dim=4, encoder_attention_heads=2, encoder_ffn_embed_dim=4)


@settings(max_examples=25)
@given(patterns, patterns)
def test_no_change_is_the_old_pattern_and_all_changes_are_the_new_one(one, other):
    old = trained_shape(one)
    start = start_from(old, {"sublayer_pattern": other})
    merged = Merged.of(old.plan, start)
    changes = merged.changes()
    pattern, origins = merged.with_changes([])
    assert pattern == expand(one)
    assert [int(word) for word in origins] == list(range(len(old.plan)))
    pattern, origins = merged.with_changes(changes)
    assert pattern.replace("-", "") == expand(other).replace("-", "")
    taken = [each["from"] for each in start.record["sublayers"] if each["sublayer"] != "-"]
    kinds = plan(pattern)
    assert [None if o == "-" else int(o) for o, each in zip(origins, kinds, strict=True) if each.text != "-"] == taken


def test_each_change_alone_and_with_those_below(old, text):
    scorer = Scorer(old, text)
    start = scorer.start({"sublayer_pattern": "M3"})
    losses = measure_losses(scorer, start)
    of = {
        pattern: masked_lm_bits(start_from(old, {"sublayer_pattern": pattern}).new, text)
        for pattern in ("(sf)x3", "sflfsf", "sfsflf", "sflflf")
    }
    assert (losses["before"], losses["after"]) == (of["(sf)x3"], of["sflflf"])
    lower, upper = losses["changes"]
    assert (lower["old"], lower["new"], lower["change"]) == (2, 2, "s becomes l")
    assert (lower["alone"], lower["so_far"]) == (of["sflfsf"], of["sflfsf"])
    assert (upper["alone"], upper["so_far"]) == (of["sfsflf"], of["sflflf"])
    assert losses["tokens"] == sum(int(batch["target"].ne(old.dictionary.pad()).sum()) for batch in text)


def test_sublayers_that_go_and_come_and_a_change_that_cannot_stand_alone(old, text):
    def changes(of: Trained, pattern: str, origins: str) -> tuple[WarmStart, list[dict]]:
        scorer = Scorer(of, text)
        start = scorer.start({"sublayer_pattern": pattern}, list(origins))
        return start, measure_losses(scorer, start)["changes"]

    start, rows = changes(old, "sff sfs", "01-234")
    assert [(row["old"], row["new"], row["change"]) for row in rows] == [(None, 2, "f comes"), (5, None, "f goes")]
    assert rows[-1]["so_far"] == masked_lm_bits(start.new, text)
    lazy = start_from(old, {"sublayer_pattern": "sflfsf"}).new
    alone = {row["change"]: row["alone"] for row in changes(lazy, "fffsf", "13-45")[1]}
    assert alone["s goes"] is None  # the l above would read nothing
    assert alone["l goes"] is not None
