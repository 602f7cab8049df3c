"""A plain (sf)xN is a BERT of transformers; what is none is told why."""

import pytest
import torch
import transformers
from exports import WORDS, some_ids, source_of, tiny_model

from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.huggingface.export import (
    AUTO,
    BERT,
    CUSTOM,
    choose_form,
    why_not_bert,
    write_bert,
)

PLAIN = {"sublayer_pattern": "(sf)x3", "relative_position_buckets": 0}


@pytest.mark.parametrize("right", [0, 3])
@pytest.mark.parametrize("kind", ["", "dense"])
@torch.no_grad()
def test_logits_and_hidden_states_are_exact(kind, right, tmp_path):
    model = tiny_model(kind, **PLAIN)
    bert_class = write_bert(source_of(model), tmp_path)
    assert bert_class.__module__.startswith("transformers.models.bert.")
    bert, loading = bert_class.from_pretrained(tmp_path, output_loading_info=True)
    assert not loading["missing_keys"] and not loading["mismatched_keys"]
    ids = some_ids(right=right)
    text = ids.ne(1)
    found = bert(ids, attention_mask=text.long(), output_hidden_states=True)
    if kind:
        wanted, _ = model(ids, classification_head_name="cola")
        torch.testing.assert_close(found.logits, wanted, atol=1e-5, rtol=1e-5)
    else:
        wanted, _ = model(ids)
        torch.testing.assert_close(found.logits[text], wanted[text], atol=1e-5, rtol=1e-5)
    states = model(ids, features_only=True, return_all_hiddens=True)[1]["inner_states"]
    for one, other in zip(found.hidden_states, states[::2], strict=True):
        torch.testing.assert_close(one[text], other[text], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(("arch", "layers"), [("bert_base_absolute_tiny", 12), ("distilbert_tiny", 6)])
@torch.no_grad()
def test_named_berts_are_berts_of_as_many_layers(arch, layers, tmp_path):
    model = tiny_model(arch=arch)
    bert = write_bert(source_of(model), tmp_path).from_pretrained(tmp_path)
    assert bert.config.num_hidden_layers == layers
    ids = some_ids()
    torch.testing.assert_close(bert(ids).logits, model(ids)[0], atol=1e-5, rtol=1e-5)


@torch.no_grad()
def test_an_imported_bert_goes_back_with_its_pooler_and_token_types(tmp_path):
    activations = {"activation_fn": "gelu_tanh", "head_activation_fn": "gelu_tanh"}
    model = tiny_model("pooler", **PLAIN, **activations, token_types=1, layer_norm_eps=1e-12)
    write_bert(source_of(model), tmp_path)
    bert, loading = transformers.BertModel.from_pretrained(tmp_path, output_loading_info=True)
    assert not loading["missing_keys"]
    ids = some_ids()
    wanted, _ = model(ids, classification_head_name="pooler")
    torch.testing.assert_close(bert(ids).pooler_output, wanted, atol=1e-5, rtol=1e-5)


@torch.no_grad()
def test_a_model_of_pairs_is_a_bert_for_pre_training(tmp_path):
    model = tiny_model("next_sentence", **PLAIN, token_types=2)
    bert_class = write_bert(source_of(model), tmp_path)
    assert bert_class is transformers.BertForPreTraining
    bert, loading = bert_class.from_pretrained(tmp_path, output_loading_info=True)
    assert not loading["missing_keys"] and not loading["unexpected_keys"]
    ids, types = some_ids(right=3), torch.arange(11).gt(5).long().expand(3, -1)
    text = ids.ne(1)
    found = bert(ids, attention_mask=text.long(), token_type_ids=types)
    given = {"token_types": types, "masked_tokens": text, "classification_head_name": "next_sentence"}
    words, extra = model(ids, **given)
    torch.testing.assert_close(found.prediction_logits[text], words, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(found.seq_relationship_logits, extra["head_logits"], atol=1e-5, rtol=1e-5)
    _, loading = transformers.BertForMaskedLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not loading["missing_keys"]


@torch.no_grad()
def test_spans_are_those_of_a_bert_for_question_answering(tmp_path):
    model = tiny_model("span", **PLAIN, token_types=2)
    bert_class = write_bert(source_of(model), tmp_path)
    assert bert_class is transformers.BertForQuestionAnswering
    bert, loading = bert_class.from_pretrained(tmp_path, output_loading_info=True)
    assert not loading["missing_keys"]
    ids, types = some_ids(right=3), torch.arange(11).gt(5).long().expand(3, -1)
    text = ids.ne(1)
    found = bert(ids, attention_mask=text.long(), token_type_ids=types)
    wanted, _ = model(ids, token_types=types, classification_head_name="cola")
    for logits, ours in zip((found.start_logits, found.end_logits), wanted.unbind(-1), strict=True):
        torch.testing.assert_close(logits[text], ours[text], atol=1e-5, rtol=1e-5)


def test_both_heads_of_a_fine_tuned_model_are_there(tmp_path):
    source = source_of(tiny_model("dense", **PLAIN))
    write_bert(source, tmp_path)
    for bert_class in (transformers.BertForMaskedLM, transformers.BertModel):
        _, loading = bert_class.from_pretrained(tmp_path, output_loading_info=True)
        assert not loading["missing_keys"]
    config = transformers.AutoConfig.from_pretrained(tmp_path)
    assert (config.architectures, config.id2label) == (["BertForSequenceClassification"], {0: "0", 1: "1"})
    assert (config.pad_token_id, config.vocab_size, config.layer_norm_eps) == (1, WORDS, 1e-5)


@pytest.mark.parametrize(
    ("options", "head", "why"),
    [
        ({"sublayer_pattern": "sflf"}, "", "its pattern is sflf"),
        ({"sublayer_pattern": "fs"}, "", "its pattern is fs"),
        ({"sublayer_pattern": "(s[window=3]f)x2"}, "", "its pattern is"),
        ({"relative_position_buckets": 8}, "", "relative position bias"),
        ({"encoder_normalize_before": True}, "", "normalises before"),
        ({"activation_fn": "relu"}, "", "relu"),
        ({"activation_dropout": 0.1}, "", "dropout 0.1 within"),
        ({}, "linear", "classification head cola is linear"),
    ],
    ids=str,
)
def test_what_is_no_bert_is_told_why(options, head, why):
    source = source_of(tiny_model(head, **{**PLAIN, **options}))
    assert why in why_not_bert(source)
    assert choose_form(source, AUTO) == choose_form(source, CUSTOM) == CUSTOM
    with pytest.raises(UserError, match=f"no BERT: .*{why}"):
        choose_form(source, BERT)


def test_auto_takes_a_bert_where_there_is_one():
    source = source_of(tiny_model(**PLAIN))
    assert (choose_form(source, AUTO), choose_form(source, CUSTOM)) == (BERT, CUSTOM)
