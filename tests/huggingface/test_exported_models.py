"""Whole exported models compute what ours do, and behave as models of transformers do."""

import json

import pytest
import torch
import transformers
from exports import POSITIONS, WORDS, code_in, export_custom, some_ids, source_of, tiny_model
from helpers import ROOT, mostly_slow
from safetensors.torch import load_file

from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.huggingface.export import check_same_outputs
from lazyformer_fairseq.huggingface.exported import heads
from lazyformer_fairseq.huggingface.exported.modelling import LazyFormerConfig
from lazyformer_fairseq.patterns.architectures import ARCHITECTURES

FIXTURE = ROOT / "tests/fixtures/export_of_2026_11"
TINY = [name for name in ARCHITECTURES if name.endswith("_tiny")]


def assert_close(one, other):
    torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("arch", mostly_slow(TINY, TINY[0]))
@torch.no_grad()
def test_every_named_model_is_exact(arch, tmp_path):
    model = tiny_model(arch=arch)
    exported = code_in(export_custom(model, tmp_path)).LazyFormerForMaskedLM.from_pretrained(tmp_path)
    for ids in (some_ids(), some_ids(left=1, right=2)):
        text = ids.ne(1)
        wanted, extra = model(ids, return_all_hiddens=True)
        found = exported(ids, attention_mask=text.long(), output_hidden_states=True)
        assert_close(found.logits[text], wanted[text])
        states = extra["inner_states"]
        assert len(found.hidden_states) == len(states)
        for one, other in zip(found.hidden_states, states, strict=True):
            assert_close(one[text], other[text])
    check_same_outputs(source_of(model), exported)
    exported.lm_head.dense.bias += 0.001
    with pytest.raises(UserError, match="differ from the checkpoint's"):
        check_same_outputs(source_of(model), exported)


@torch.no_grad()
def test_pre_norm_wherever_padding_stands_with_and_without_a_mask(tmp_path):
    model = tiny_model("dense", encoder_normalize_before=True, sublayer_pattern="sflf-kf")
    code = code_in(export_custom(model, tmp_path))
    classes = (code.LazyFormerForMaskedLM, code.LazyFormerModel, code.LazyFormerForSequenceClassification)
    masked_lm, encoder, classifier = (each.from_pretrained(tmp_path) for each in classes)
    for left, right in ((0, 0), (0, 3), (2, 0), (2, 3)):
        ids = some_ids(left, right)
        text = ids.ne(1)
        for mask in (text.long(), text, None):
            assert_close(masked_lm(ids, attention_mask=mask).logits[text], model(ids)[0][text])
            found = encoder(ids, attention_mask=mask, output_hidden_states=True)
            assert_close(found.last_hidden_state[text], model(ids, features_only=True)[0][text])
            assert found.hidden_states[-1] is found.last_hidden_state
            logits = classifier(ids, attention_mask=mask).logits
            assert_close(logits, model(ids, classification_head_name="cola")[0])


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@torch.no_grad()
def test_what_else_a_model_takes_and_gives(attention, tmp_path):
    export_custom(tiny_model(sublayer_pattern="sflfkf", relative_position_buckets=8), tmp_path)
    model = heads.LazyFormerModel.from_pretrained(tmp_path, attn_implementation=attention)
    ids = some_ids(right=3)
    plain, asked = model(ids), model(ids, output_attentions=True)
    assert plain.attentions is None
    assert [each.shape for each in asked.attentions] == [(3, 2, 11, 11)] * 3
    assert asked.attentions[2][1, :, :, 8:].abs().max() == 0
    assert_close(plain.last_hidden_state[ids.ne(1)], asked.last_hidden_state[ids.ne(1)])
    (output,) = model(ids, return_dict=False)
    embedded = model(inputs_embeds=model.get_input_embeddings()(ids), attention_mask=ids.ne(1))
    assert_close(embedded.last_hidden_state, output)
    for wrong, words in (
        ({}, "either input_ids or inputs_embeds"),
        ({"input_ids": ids.repeat(1, 3)}, f"33 tokens is longer than the model's {POSITIONS}"),
        ({"input_ids": ids, "token_type_ids": ids}, "no token types"),
        ({"input_ids": ids, "attention_mask": ids[:, None, None].ne(1)}, "must be \\(batch, tokens\\)"),
        ({"input_ids": ids, "global_attention_mask": ids}, "no sublayer of this model asks"),
    ):
        with pytest.raises(ValueError, match=words):
            model(**wrong)


@torch.no_grad()
def test_tokens_that_the_caller_marks(tmp_path):
    model = tiny_model(sublayer_pattern="s[window=1,global=given]flf", relative_position_buckets=0)
    exported = code_in(export_custom(model, tmp_path)).LazyFormerModel.from_pretrained(tmp_path)
    ids = some_ids(right=2)
    marked = torch.zeros_like(ids).index_fill(1, torch.tensor([0, 4]), 1)
    wanted = model(ids, features_only=True, global_positions=marked.bool())[0]
    assert_close(exported(ids, global_attention_mask=marked).last_hidden_state[ids.ne(1)], wanted[ids.ne(1)])
    with pytest.raises(ValueError, match="pass global_attention_mask"):
        exported(ids)


@pytest.mark.parametrize("head", ["pooler", "next_sentence"])
@torch.no_grad()
def test_token_types_a_pooler_and_other_activations(head, tmp_path):
    """What next sentences were told by is the pooler."""
    activations = {"activation_fn": "gelu_tanh", "head_activation_fn": "relu_squared"}
    model = tiny_model(head, token_types=3, layer_norm_eps=1e-3, **activations)
    code = code_in(export_custom(model, tmp_path))
    ids = some_ids(left=1, right=2)
    types, text = torch.arange(ids.numel()).view_as(ids) % 3, ids.ne(1)
    masked_lm = code.LazyFormerForMaskedLM.from_pretrained(tmp_path)
    assert_close(masked_lm(ids, token_type_ids=types).logits[text], model(ids, token_types=types)[0][text])
    assert_close(masked_lm(ids).logits[text], model(ids)[0][text])
    found = code.LazyFormerModel.from_pretrained(tmp_path)(ids, token_type_ids=types).pooler_output
    found = model.classification_heads[head].out_proj(found) if head == "next_sentence" else found
    assert_close(found, model(ids, token_types=types, classification_head_name=head)[0])


@pytest.mark.parametrize(("kind", "labels"), [("dense", 3), ("linear", 3), ("dense", 1)])
def test_classification_heads_and_their_losses(kind, labels, tmp_path):
    """Of one class, of several, and of a score."""
    model = tiny_model(kind, labels=labels)
    export_custom(model, tmp_path)
    exported = heads.LazyFormerForSequenceClassification.from_pretrained(tmp_path)
    ids, classes, scores = some_ids(right=2), torch.tensor([2, 0, 1]), torch.tensor([0.0, 2.5, 5.0])
    wanted = model(ids, classification_head_name="cola")[0]
    found = exported(ids, labels=classes if labels == 3 else scores)
    assert_close(found.logits, wanted)
    if labels == 1:
        assert exported.config.problem_type == "regression"
        assert_close(found.loss, ((wanted[:, 0] - scores) ** 2).mean())
    else:
        assert_close(found.loss, torch.nn.functional.cross_entropy(wanted, classes))
        exported.config.problem_type = None
        several = torch.tensor([[1.0, 0, 1], [0, 0, 0], [1, 1, 1]])
        assert_close(exported(ids, labels=several).loss, torch.nn.BCEWithLogitsLoss()(wanted, several))


def test_other_heads_start_fresh_and_learn(tmp_path):
    export_custom(tiny_model(), tmp_path)
    ids = some_ids()
    token = heads.LazyFormerForTokenClassification.from_pretrained(tmp_path, num_labels=4)
    loss = token(ids, labels=torch.full_like(ids, -100).index_fill(1, torch.tensor([1]), 3)).loss
    question = heads.LazyFormerForQuestionAnswering.from_pretrained(tmp_path)
    places = torch.tensor([1, 2, 99])  # the last one was cut off
    loss = loss + question(ids, start_positions=places, end_positions=places).loss
    loss.backward()
    assert token.token_classifier.weight.grad.abs().max() > 0
    assert question.lazyformer.embed_tokens.weight.grad.abs().max() > 0


def test_more_words_keep_decoder_and_embedding_one(tmp_path):
    export_custom(tiny_model(), tmp_path)
    model = heads.LazyFormerForMaskedLM.from_pretrained(tmp_path)
    ids = some_ids()
    before = model(ids).logits
    model.resize_token_embeddings(WORDS + 5)
    assert model.lm_head.decoder.weight is model.lazyformer.embed_tokens.weight
    assert_close(model(ids).logits[..., :WORDS], before)
    model.save_pretrained(tmp_path / "more")
    again = heads.LazyFormerForMaskedLM.from_pretrained(tmp_path / "more")
    assert again.config.vocab_size == WORDS + 5
    assert_close(again(ids).logits, model(ids).logits)


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@torch.no_grad()
def test_a_folder_exported_before_loads_by_todays_classes(attention):
    """Its hashes are checked, too: names and shapes of weights are those of old."""
    wanted = load_file(FIXTURE / "wanted.safetensors")
    model = heads.LazyFormerForMaskedLM.from_pretrained(FIXTURE, attn_implementation=attention)
    text = wanted["ids"].ne(1)
    assert_close(model(wanted["ids"]).logits[text], wanted["logits"][text])


def test_a_saved_model_has_its_code_and_loads_by_it_and_one_matrix_of_all_layers_stays_one(tmp_path):
    s = "s[linformer=3,share=layers]"
    export_custom(tiny_model(sublayer_pattern=f"{s}f{s}fl{s}f", relative_position_buckets=0), tmp_path / "first")
    model = heads.LazyFormerForMaskedLM.from_pretrained(tmp_path / "first")
    model.lazyformer.embed_tokens.weight.data += 0.1
    transformers.AutoModelForMaskedLM.register(LazyFormerConfig, heads.LazyFormerForMaskedLM, exist_ok=True)
    model.save_pretrained(tmp_path / "second")
    code = code_in(tmp_path / "second")
    assert {"Linformer", "LazyAttention"} <= set(vars(code))
    assert "Window" not in vars(code), "only what the pattern needs"
    again = code.LazyFormerForMaskedLM.from_pretrained(tmp_path / "second")
    again.save_pretrained(tmp_path / "third")
    second, third = ((tmp_path / name / "modeling_lazyformer.py").read_text() for name in ("second", "third"))
    assert second == third
    config = json.loads((tmp_path / "third" / "config.json").read_text())
    assert config["auto_map"]["AutoModelForMaskedLM"] == "modeling_lazyformer.LazyFormerForMaskedLM"
    for each in (model, again):
        assert_close(each(some_ids()).logits, model(some_ids()).logits)
        matrices = [(n, w) for n, w in each.named_parameters(remove_duplicate=False) if "key_projection" in n]
        assert (len(matrices), len({id(weight) for _, weight in matrices})) == (3, 1)
