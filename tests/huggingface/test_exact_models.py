"""Imported models compute what transformers compute: hidden states and logits of tiny random ones, of all variants."""

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")
pytest.importorskip("tokenizers")

import torch
from safetensors.torch import load_file, save_file
from tiny_berts import ROWS, save_tiny
from torch import Tensor
from torch.testing import assert_close
from transformers import BertTokenizerFast

from lazyformer_fairseq.data.datasets.labelled_texts import token_types_of
from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.fairseq_plugin.models.hub import LazyFormerHub
from lazyformer_fairseq.fairseq_plugin.models.lazyformer import LazyFormerModel
from lazyformer_fairseq.huggingface.importing import import_to

EXACT = {"rtol": 0, "atol": 1e-5}
VARIANTS: list[tuple[str, dict[str, Any]]] = [
    ("BertForMaskedLM", {}),
    ("BertForMaskedLM", {"hidden_act": "gelu_new", "layer_norm_eps": 1e-3}),
    ("BertForMaskedLM", {"hidden_act": "gelu_pytorch_tanh"}),
    ("BertForMaskedLM", {"hidden_act": "gelu_fast", "type_vocab_size": 1}),
    ("BertForMaskedLM", {"hidden_act": "relu", "num_hidden_layers": 1}),
    ("RobertaForMaskedLM", {"type_vocab_size": 1, "layer_norm_eps": 1e-5}),
    ("RobertaForMaskedLM", {"hidden_act": "gelu_new"}),
    ("DistilBertForMaskedLM", {}),
    ("DistilBertForMaskedLM", {"activation": "relu", "sinusoidal_pos_embds": True}),
]


def imported(source: Path, *options: Any, **named: Any) -> LazyFormerHub:
    out = source.with_name("out")
    import_to(source, out, *options, **named)
    return LazyFormerModel.from_pretrained(out)


def padded_batch(pad: int, separator: int) -> tuple[Tensor, Tensor]:
    """Three texts of other lengths, and which of their ids are text."""
    torch.manual_seed(3)
    ids = torch.randint(6, ROWS, (3, 14))
    lengths = torch.tensor([14, 9, 5])
    ids[torch.arange(3), lengths - 1] = separator
    is_text = torch.arange(14) < lengths[:, None]
    return ids.masked_fill(~is_text, pad), is_text


@pytest.mark.parametrize(("kind", "options"), VARIANTS, ids=lambda value: str(value))
def test_hidden_states_and_logits_are_those_of_transformers(tmp_path, kind, options):
    theirs = save_tiny(tmp_path / "in", kind, **options)
    hub = imported(tmp_path / "in")
    dictionary = hub.tokenizer.dictionary
    ids, is_text = padded_batch(dictionary.pad(), dictionary.eos())
    with torch.no_grad():
        expected = theirs(ids, attention_mask=is_text.long(), output_hidden_states=True)
        logits, extra = hub.model(ids, return_all_hiddens=True)
    assert_close(logits[is_text], expected.logits[is_text], **EXACT)
    states = extra["inner_states"][::2]  # after each f
    for ours, hidden in zip(states, expected.hidden_states, strict=True):
        assert_close(ours[is_text], hidden[is_text], **EXACT)
    assert expected.logits.abs().max() > 1  # so that 1e-5 says something


def test_pairs_of_bert_are_exact_by_their_token_types_unless_they_are_folded(tmp_path):
    theirs = save_tiny(tmp_path / "in")
    kept = imported(tmp_path / "in")
    import_to(tmp_path / "in", tmp_path / "folded", "fold")
    folded = LazyFormerModel.from_pretrained(tmp_path / "folded")
    pairs = [("the cat sat", "a dog ran"), ("a cat", "on"), ("big dog", "a red house, a mat")]
    batch = BertTokenizerFast.from_pretrained(tmp_path / "in")(pairs, padding=True, return_tensors="pt")
    ids, types, is_text = batch["input_ids"], batch["token_type_ids"], batch["attention_mask"].bool()
    for pair, row, keep in zip(pairs, ids, is_text, strict=True):
        assert kept.tokenizer.build_input(*pair) == row[keep].tolist()
    assert torch.equal(token_types_of(ids, kept.tokenizer.dictionary.eos(), kept.tokenizer.dictionary.pad()), types)
    with torch.no_grad():
        of_pair = theirs(**batch).logits[is_text]
        of_single = theirs(ids, attention_mask=is_text.long()).logits[is_text]
        assert_close(kept.model(ids, token_types=types)[0][is_text], of_pair, **EXACT)
        assert_close(kept.model(ids)[0][is_text], of_single, **EXACT)
        assert_close(folded.model(ids)[0][is_text], of_single, **EXACT)
    assert (of_pair - of_single).abs().max() > 0.1
    with pytest.raises(UserError, match="the model has none"):
        folded.model(ids, token_types=types)


@pytest.mark.parametrize("kind", ["BertForSequenceClassification", "RobertaForSequenceClassification"])
def test_a_fine_tuned_model_keeps_its_classifier_as_a_head(tmp_path, kind):
    theirs = save_tiny(tmp_path / "in", kind, num_labels=3)
    hub = imported(tmp_path / "in", head_name="mnli")
    dictionary = hub.tokenizer.dictionary
    ids, is_text = padded_batch(dictionary.pad(), dictionary.eos())
    with torch.no_grad():
        expected = theirs(ids, attention_mask=is_text.long()).logits
        assert_close(hub.model(ids, classification_head_name="mnli")[0], expected, **EXACT)
    assert hub.predict("mnli", "the cat sat").shape == (1, 3)


def test_berts_pooler_is_a_head_and_what_new_dense_heads_start_from(tmp_path):
    theirs = save_tiny(tmp_path / "in", "BertForPreTraining")
    hub = imported(tmp_path / "in")
    ids = hub.encode("the cat sat on the mat")
    with torch.no_grad():
        assert_close(hub.predict("pooler", "the cat sat on the mat"), theirs.bert(ids).pooler_output, **EXACT)
    fresh = LazyFormerModel(hub.model.cfg, hub.tokenizer.dictionary)
    fresh.register_classification_head("rte", 2, "dense")
    fresh.register_classification_head("cola", 2, "linear")
    fresh.load_state_dict(hub.model.state_dict())
    head = fresh.classification_heads
    assert torch.equal(head["rte"].dense.weight, theirs.bert.pooler.dense.weight)
    assert torch.equal(head["rte"].dense.bias, theirs.bert.pooler.dense.bias)
    assert "pooler" not in head and head["cola"].out_proj.weight.std() < 0.1


def test_berts_head_for_next_sentences_is_one_of_ours(tmp_path):
    theirs = save_tiny(tmp_path / "in", "BertForPreTraining")
    hub = imported(tmp_path / "in")
    ids, is_text = padded_batch(hub.tokenizer.special.pad, hub.tokenizer.special.eos)
    types = token_types_of(ids, hub.tokenizer.special.eos, hub.tokenizer.special.pad)
    with torch.no_grad():
        expected = theirs(ids, attention_mask=is_text.long(), token_type_ids=types)
        found, _ = hub.model(ids, classification_head_name="next_sentence", token_types=types)
    assert_close(found, expected.seq_relationship_logits, **EXACT)


def test_a_model_without_masked_lm_head_gets_a_fresh_one_and_says_so(tmp_path):
    theirs = save_tiny(tmp_path / "in", "BertModel")
    notes = import_to(tmp_path / "in", tmp_path / "out")
    assert any("no masked-LM head" in note for note in notes) and any("pooler" in note for note in notes)
    hub = LazyFormerModel.from_pretrained(tmp_path / "out")
    ids = hub.encode("the cat sat")
    with torch.no_grad():
        assert_close(hub.model(ids, features_only=True)[0], theirs(ids).last_hidden_state, **EXACT)
    import_to(tmp_path / "in", tmp_path / "again")
    ours, again = (load_file(tmp_path / name / "model.safetensors") for name in ("out", "again"))
    assert all(torch.equal(ours[name], again[name]) for name in ours)  # the fresh head too
    assert 0.01 < ours["encoder.lm_head.dense.weight"].std() < 0.03


@pytest.mark.parametrize("kind", ["xlm-roberta", "camembert"])
def test_models_with_robertas_layers_are_read_as_one(tmp_path, kind):
    theirs = save_tiny(tmp_path / "in", "RobertaForMaskedLM")
    config = tmp_path / "in" / "config.json"
    config.write_text(config.read_text().replace('"model_type": "roberta"', f'"model_type": "{kind}"'))
    ids = torch.randint(6, ROWS, (2, 9))
    with torch.no_grad():
        assert_close(imported(tmp_path / "in").model(ids)[0], theirs(ids).logits, **EXACT)


def test_a_folder_of_links_is_read_as_the_hubs_cache_has_them(tmp_path):
    save_tiny(tmp_path / "blobs")
    (tmp_path / "in").mkdir()
    for file in (tmp_path / "blobs").iterdir():
        (tmp_path / "in" / file.name).symlink_to(Path("..", "blobs", file.name))
    assert len(imported(tmp_path / "in").fill_mask("the [MASK] sat", topk=2)) == 2


@pytest.mark.parametrize("form", ["sharded", "bin", "old bin", "bin in shards", "old names", "half", "without prefix"])
def test_every_form_of_weights_is_read(tmp_path, form):
    theirs = save_tiny(tmp_path / "in", "BertModel" if form == "without prefix" else "BertForMaskedLM")
    folder, weights = tmp_path / "in", load_file(tmp_path / "in" / "model.safetensors")
    atol = 1e-5
    if form in ("sharded", "bin in shards"):
        suffix = "safetensors" if form == "sharded" else "bin"
        name = "model.safetensors" if form == "sharded" else "pytorch_model.bin"
        halves = [dict(list(weights.items())[start::2]) for start in (0, 1)]
        files = {f"part-{number}.{suffix}": half for number, half in enumerate(halves)}
        for file, half in files.items():
            save_file(half, folder / file) if form == "sharded" else torch.save(half, folder / file)
        of_weight = {weight: file for file, half in files.items() for weight in half}
        (folder / "model.safetensors").unlink()
        (folder / f"{name}.index.json").write_text(json.dumps({"metadata": {}, "weight_map": of_weight}))
    elif form in ("bin", "old bin"):
        (folder / "model.safetensors").unlink()
        weights["bert.embeddings.position_ids"] = torch.arange(16)[None]
        torch.save(weights, folder / "pytorch_model.bin", _use_new_zipfile_serialization=form == "bin")
    elif form == "old names":
        changed = {
            name.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta"): weight
            for name, weight in weights.items()
        }
        save_file(changed, folder / "model.safetensors")
    elif form == "half":
        save_file({name: weight.half() for name, weight in weights.items()}, folder / "model.safetensors")
        atol = 0.1
    hub = imported(folder)
    ids = torch.randint(6, ROWS, (2, 9))
    with torch.no_grad():
        if form == "without prefix":
            assert_close(hub.model(ids, features_only=True)[0], theirs(ids).last_hidden_state, **EXACT)
        else:
            assert_close(hub.model(ids)[0], theirs(ids).logits, rtol=0, atol=atol)


def test_fill_mask_speaks_its_own_tokenizer(tmp_path):
    theirs = save_tiny(tmp_path / "in")
    hub = imported(tmp_path / "in")
    text = "The cat [MASK] on the mat."
    ids = torch.tensor([BertTokenizerFast.from_pretrained(tmp_path / "in")(text)["input_ids"]])
    assert torch.equal(hub.encode(text), ids)
    with torch.no_grad():
        probabilities = theirs(ids).logits[0, 3].softmax(-1)
    answers = hub.fill_mask(text, topk=4)
    assert [answer.probability for answer in answers] == pytest.approx(probabilities.topk(4).values.tolist(), abs=1e-5)
    for answer, row in zip(answers, probabilities.topk(4).indices.tolist(), strict=True):
        assert answer.word == hub.tokenizer.decode([row])
