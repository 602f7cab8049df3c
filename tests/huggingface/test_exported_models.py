"""Whole exported models compute what ours do, behave as models of transformers do, and check their weights."""

import itertools
import json
import logging
import shutil
from contextlib import nullcontext

import pytest
import torch
import transformers
from exports import POSITIONS, WORDS, code_in, export_custom, some_ids, source_of, tiny_model
from helpers import mostly_slow
from safetensors.torch import load_file, save_file

from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.huggingface.export import check_same_outputs
from lazyformer_fairseq.huggingface.models import heads
from lazyformer_fairseq.huggingface.models.configuration import LazyFormerConfig
from lazyformer_fairseq.huggingface.models.encoder import TIES_BY_TABLE
from lazyformer_fairseq.patterns.architectures import ARCHITECTURES

TINY = [name for name in ARCHITECTURES if name.endswith("_tiny")]


def assert_close(one, other):
    torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("arch", mostly_slow(TINY, TINY[0]))
@torch.no_grad()
def test_every_named_model_is_exact(arch, tmp_path):
    model = tiny_model(arch=arch)
    exported = code_in(export_custom(model, tmp_path)).LazyFormerForMaskedLM.from_pretrained(tmp_path).double()
    model = model.double()
    for ids in (some_ids(), some_ids(left=1, right=2)):
        text = ids.ne(1)
        wanted, extra = model(ids, return_all_hiddens=True)
        found = exported(ids, attention_mask=text.long(), output_hidden_states=True)
        assert_close(found.logits[text], wanted[text])
        states = extra["inner_states"]
        if model.cfg.encoder_normalize_before:
            states[-1] = model(ids, features_only=True)[0]
        assert len(found.hidden_states) == len(states)
        for one, other in zip(found.hidden_states, states, strict=True):
            assert_close(one[text], other[text])
    check_same_outputs(source_of(model), exported)
    exported.lm_head.decoder.bias += 0.001
    with pytest.raises(UserError, match="differ from the checkpoint's"):
        check_same_outputs(source_of(model), exported)


NEO = {"norm": "rms", "no_linear_bias": True, "plain_lm_head": True, "untied_lm_head": True}


@pytest.mark.parametrize("options", [{}, NEO, {"no_norm_bias": True, "embedding_norm": True}], ids=str)
@torch.no_grad()
def test_pre_norm_wherever_padding_stands_with_and_without_a_mask(options, tmp_path):
    pattern = "-sf[gate=silu]lf[experts=3]-kf[experts=2,top=1]" if options else "sflf-kf"
    model = tiny_model("dense", encoder_normalize_before=True, sublayer_pattern=pattern, **options)
    code = code_in(export_custom(model, tmp_path))
    classes = (code.LazyFormerForMaskedLM, code.LazyFormerModel, code.LazyFormerForSequenceClassification)
    masked_lm, encoder, classifier = (each.from_pretrained(tmp_path) for each in classes)
    for left, right in ((0, 0), (2, 3)):
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
    (output,) = model(some_ids(), return_dict=False)
    assert_close(model(inputs_embeds=model.get_input_embeddings()(some_ids())).last_hidden_state, output)
    for wrong, words in (
        ({}, "either input_ids or inputs_embeds"),
        ({"input_ids": ids.repeat(1, 3)}, f"33 tokens is longer than the model's {POSITIONS}"),
        ({"input_ids": ids, "token_type_ids": ids}, "the model has none"),
        ({"input_ids": ids, "attention_mask": ids[:, None, None].ne(1)}, "must have the shape \\(batch, tokens\\)"),
        ({"input_ids": ids[:1], "attention_mask": ids[:2].ne(1)}, r"the shape \(2, 11\), but must .*, here \(1, 11\)"),
        ({"input_ids": ids, "attention_mask": ids[:, 1:].ne(1)}, r"the shape \(3, 10\), but must"),
        (
            {"input_ids": ids, "attention_mask": torch.zeros(3, 11).masked_fill(ids.eq(1), -1e9)},
            "contains -1000000000.0",
        ),
        (
            {"input_ids": ids, "attention_mask": ids.ne(1).float() / 2},
            "contains 0.5, but must be 1 at tokens that count",
        ),
        ({"input_ids": ids, "attention_mask": ids.ne(1).float() * torch.nan}, "contains nan"),
        ({"input_ids": ids, "attention_mask": ids.ne(1).long() * 2}, "contains 2"),
        ({"input_ids": ids, "global_attention_mask": ids}, "none of this model's sublayers uses"),
    ):
        with pytest.raises(ValueError, match=words):
            model(**wrong)


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


@pytest.mark.parametrize(("head_type", "labels"), [("dense", 3), ("linear", 3), ("dense", 1)])
def test_classification_heads_and_their_losses(head_type, labels, tmp_path):
    """Of one class, of several, and of a score."""
    model = tiny_model(head_type, labels=labels)
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


def test_more_words_keep_decoder_and_embedding_one(tmp_path):
    export_custom(tiny_model(), tmp_path)
    model = heads.LazyFormerForMaskedLM.from_pretrained(tmp_path)
    ids = some_ids()
    before = model(ids).logits
    model.resize_token_embeddings(WORDS + 5)
    assert model.lm_head.decoder.weight is model.lazyformer.encoder.embed_tokens.weight
    assert_close(model(ids).logits[..., :WORDS], before)
    model.save_pretrained(tmp_path / "more")
    again = heads.LazyFormerForMaskedLM.from_pretrained(tmp_path / "more")
    assert again.config.vocab_size == WORDS + 5
    assert_close(again(ids).logits, model(ids).logits)


def test_a_saved_model_has_its_code_and_loads_by_it_and_one_matrix_of_all_layers_stays_one(tmp_path):
    s = "s[linformer=3,share=layers]"
    export_custom(tiny_model(sublayer_pattern=f"{s}f{s}fl{s}f", relative_position_buckets=0), tmp_path / "first")
    model = heads.LazyFormerForMaskedLM.from_pretrained(tmp_path / "first")
    model.lazyformer.encoder.embed_tokens.weight.data += 0.1
    transformers.AutoModelForMaskedLM.register(LazyFormerConfig, heads.LazyFormerForMaskedLM, exist_ok=True)
    model.save_pretrained(tmp_path / "second")
    code = code_in(tmp_path / "second")
    variants = {file.name for file in (tmp_path / "second").glob("modules_sublayers_attention_variants_*")}
    names = ("interface", "linformer", "span")
    assert variants == {f"modules_sublayers_attention_variants_{name}.py" for name in names}
    again = code.LazyFormerForMaskedLM.from_pretrained(tmp_path / "second")
    again.save_pretrained(tmp_path / "third")
    second, third = (
        {file.name: file.read_text() for file in (tmp_path / name).glob("*.py")} for name in ("second", "third")
    )
    assert second == third
    config = json.loads((tmp_path / "third" / "config.json").read_text())
    assert config["auto_map"]["AutoModelForMaskedLM"] == "modeling_lazyformer.LazyFormerForMaskedLM"
    for each in (model, again):
        assert_close(each(some_ids()).logits, model(some_ids()).logits)
        matrices = [(n, w) for n, w in each.named_parameters(remove_duplicate=False) if "key_projection" in n]
        assert (len(matrices), len({id(weight) for _, weight in matrices})) == (3, 1)


# Weights that are not those that were saved never load in silence


WEIGHTS = "model.safetensors"
A_WEIGHT = "lazyformer.encoder.sublayers.0.inner.qkv_proj.weight"
OTHER_NUMBERS = "do not match the hashes in config.json"
CLASSIFIER = heads.LazyFormerForSequenceClassification
HEADS = {heads.LazyFormerModel: "no head", heads.LazyFormerForMaskedLM: "lm_head.", CLASSIFIER: "classifier."}


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    return export_custom(tiny_model("dense", sublayer_pattern="sflf"), tmp_path_factory.mktemp("export"))


@pytest.fixture
def folder(exported, tmp_path):
    """One to damage."""
    return shutil.copytree(exported, tmp_path / "copy")


def change(folder, changing):
    weights = load_file(folder / WEIGHTS)
    changing(weights)
    save_file({name: weight.clone() for name, weight in weights.items()}, folder / WEIGHTS, {"format": "pt"})


def change_a_number(weights):
    weights[A_WEIGHT][1, 2] += 0.25


@pytest.mark.parametrize(
    ("changing", "message"),
    [
        (A_WEIGHT, "lacks .*sublayers.0.inner.qkv_proj.weight.*random"),
        (lambda weights: weights.update({A_WEIGHT.replace("_proj", ""): weights.pop(A_WEIGHT)}), "lacks .*qkv_proj"),
        # transformers names a tied weight by either of its names.
        ("lazyformer.encoder.embed_tokens.weight", "lacks .*(embed_tokens|lm_head.decoder).weight.*random"),
        ("lazyformer.encoder.sublayers.3.layer_norm.bias", "lacks .*sublayers.3.layer_norm.bias.*random"),
        ("lm_head.dense.weight", "lacks lm_head.dense.weight"),
        ("classifier.out_proj.bias", "lacks classifier.out_proj.bias"),
        (change_a_number, OTHER_NUMBERS),
    ],
)
def test_weights_that_are_missing_or_changed_are_an_error(changing, message, folder):
    change(folder, lambda weights: weights.pop(changing) if isinstance(changing, str) else changing(weights))
    for model_class, head in HEADS.items():
        reads_it = message == OTHER_NUMBERS or message.startswith(("lacks .*", f"lacks {head}"))
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            with pytest.raises(ValueError, match=message) if reads_it else nullcontext():
                model_class.from_pretrained(folder, dtype=dtype)


def test_a_decoder_of_its_own_is_an_error(folder):
    change(
        folder, lambda all_: all_.update({"lm_head.decoder.weight": all_["lazyformer.encoder.embed_tokens.weight"] + 1})
    )
    # transformers 4 ties it to the embedding in any case.
    with pytest.raises(ValueError, match="a separate decoder") if TIES_BY_TABLE else nullcontext():
        model = heads.LazyFormerForMaskedLM.from_pretrained(folder)
        assert model.lm_head.decoder.weight is model.lazyformer.encoder.embed_tokens.weight


def test_a_config_without_hashes_is_warned_about_and_lacks_nothing(folder, caplog, monkeypatch):
    config = json.loads((folder / "config.json").read_text())
    del config["weights_sha256"]
    (folder / "config.json").write_text(json.dumps(config))
    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)
    heads.LazyFormerModel.from_pretrained(folder)
    assert "no weights_sha256" in caplog.text or "cannot tell" in caplog.text
    change(folder, lambda weights: weights.pop(A_WEIGHT))
    with pytest.raises(ValueError, match="lacks"):
        heads.LazyFormerModel.from_pretrained(folder)


PRECISIONS = [*itertools.product(("float32", "bfloat16", "float16"), ("float32", "bfloat16", "float16", "float64"))]


@pytest.mark.parametrize("precisions", mostly_slow(PRECISIONS, ("float32", "bfloat16"), ("float16", "float64")))
@torch.no_grad()
def test_any_precision_after_any_other(precisions, exported, tmp_path):
    """A model that was saved in one precision computes the same, up to rounding, loaded in another one."""
    saved, loaded = (getattr(torch, name) for name in precisions)
    first = heads.LazyFormerForMaskedLM.from_pretrained(exported)
    wanted = first(some_ids()).logits
    first.to(saved).save_pretrained(tmp_path)
    model = heads.LazyFormerForMaskedLM.from_pretrained(tmp_path, dtype=loaded)
    found = model(some_ids()).logits
    assert {weight.dtype for weight in model.parameters()} == {found.dtype} == {loaded}
    assert (found.float() - wanted).abs().mean() < 0.05 * wanted.abs().mean()


def test_what_was_learned_is_what_is_checked_next_time(exported, tmp_path):
    model = CLASSIFIER.from_pretrained(exported)
    ids = some_ids()
    model(ids, labels=torch.tensor([0, 1, 0])).loss.backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    model.save_pretrained(tmp_path)
    again = CLASSIFIER.from_pretrained(tmp_path)
    assert torch.equal(again(ids).logits, model.eval()(ids).logits)
    change(tmp_path, lambda weights: weights["classifier.out_proj.bias"].add_(1))
    with pytest.raises(ValueError, match=OTHER_NUMBERS):
        CLASSIFIER.from_pretrained(tmp_path)
    fresh = {"num_labels": 5, "ignore_mismatched_sizes": True}  # a head for other classes may start so
    assert CLASSIFIER.from_pretrained(exported, **fresh).classifier.out_proj.out_features == 5


def test_a_state_that_is_given_is_what_is_hashed(exported, tmp_path):
    """As Trainer gives it, of a model that is shared out; without a folder there is none to compare with."""
    model = heads.LazyFormerForMaskedLM.from_pretrained(exported)
    state = {name: weight * 2 for name, weight in model.state_dict().items()}
    state["lm_head.decoder.weight"] = state["lazyformer.encoder.embed_tokens.weight"]
    model.save_pretrained(tmp_path, state_dict=state)
    for folder, given in ((tmp_path, {}), (None, {"config": model.config, "state_dict": state})):
        again = heads.LazyFormerForMaskedLM.from_pretrained(folder, **given)
        assert torch.equal(again.state_dict()[A_WEIGHT], state[A_WEIGHT])
