"""A plain (sf)xN is a BERT of transformers; what is none is told why."""

import pytest
import torch
import transformers
from exports import WORDS, some_ids, source_of, tiny_model

from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.huggingface.export import AUTO, BERT, CUSTOM, choose_form, why_not_bert, write_bert

PLAIN = {"sublayer_pattern": "(sf)x3", "relative_position_buckets": 0}
PAIRS = {**PLAIN, "token_types": 2}
IMPORTED = {**PLAIN, "activation_fn": "gelu_tanh", "head_activation_fn": "gelu_tanh", "layer_norm_eps": 1e-12}


def our_outputs(model, head, ids, given) -> dict[str, torch.Tensor]:
    """By their names in transformers."""
    words, _ = model(ids, **given)
    if not head:
        return {"logits": words}
    found, _ = model(ids, classification_head_name="cola" if head in ("dense", "span") else head, **given)
    return {
        "dense": {"logits": found},
        "pooler": {"pooler_output": found},
        "next_sentence": {"prediction_logits": words, "seq_relationship_logits": found},
        "span": {"start_logits": found[..., 0], "end_logits": found[..., -1]},
    }[head]


@pytest.mark.parametrize("right", [0, 3])
@pytest.mark.parametrize(
    ("head", "options", "classes"),  # the first one is that of the folder, the others find all their weights too
    [
        ("", PLAIN, "BertForMaskedLM"),
        ("", {"arch": "bert_base_absolute_tiny"}, "BertForMaskedLM"),
        ("", {"arch": "distilbert_tiny"}, "BertForMaskedLM"),
        ("dense", PLAIN, "BertForSequenceClassification BertForMaskedLM BertModel"),
        ("pooler", {**IMPORTED, "token_types": 1}, "BertForMaskedLM BertModel"),
        ("next_sentence", PAIRS, "BertForPreTraining BertForMaskedLM"),
        ("span", PAIRS, "BertForQuestionAnswering"),
    ],
)
@torch.no_grad()
def test_outputs_and_hidden_states_are_exact(head, options, classes, right, tmp_path):
    model, names = tiny_model(head, **options), classes.split()
    source = source_of(model)
    assert (choose_form(source, AUTO), choose_form(source, CUSTOM)) == (BERT, CUSTOM)
    assert write_bert(source, tmp_path) is getattr(transformers, names[0])
    for name in names:
        bert, loading = getattr(transformers, name).from_pretrained(tmp_path, output_loading_info=True)
        assert not loading["missing_keys"] and not loading["mismatched_keys"]
        assert not loading["unexpected_keys"] or name != "BertForPreTraining"
        if name == ("BertModel" if head == "pooler" else names[0]):
            theirs = bert
    ids = some_ids(right=right)
    text, types = ids.ne(1), torch.arange(11).gt(5).long().expand(3, -1)
    given, same = ({"token_types": types}, {"token_type_ids": types}) if options.get("token_types") == 2 else ({}, {})
    found = theirs(ids, attention_mask=text.long(), output_hidden_states=True, **same)
    for name, wanted in our_outputs(model, head, ids, given).items():
        of_text = text if wanted.shape[:2] == text.shape else slice(None)
        torch.testing.assert_close(found[name][of_text], wanted[of_text], atol=1e-5, rtol=1e-5)
    states = model(ids, features_only=True, return_all_hiddens=True, **given)[1]["inner_states"]
    for one, other in zip(found.hidden_states, states[::2], strict=True):
        torch.testing.assert_close(one[text], other[text], atol=1e-5, rtol=1e-5)
    config = theirs.config
    assert (config.pad_token_id, config.vocab_size) == (1, WORDS)
    assert config.layer_norm_eps == options.get("layer_norm_eps", 1e-5)
    assert head != "dense" or config.id2label == {0: "0", 1: "1"}


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
