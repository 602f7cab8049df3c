"""Weights that are not those that were saved never load in silence."""

import json
import logging
import shutil
from contextlib import nullcontext

import pytest
import torch
from exports import export_custom, some_ids, tiny_model
from safetensors.torch import load_file, save_file

from lazyformer_fairseq.huggingface.exported import modelling
from lazyformer_fairseq.huggingface.exported.heads import (
    LazyFormerForMaskedLM,
    LazyFormerForSequenceClassification,
    LazyFormerModel,
)

WEIGHTS = "model.safetensors"
A_WEIGHT = "lazyformer.sublayers.0.inner.qkv_proj.weight"
OTHER_NUMBERS = "not those that config.json was saved with"


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
        (lambda weights: weights.update(qkv=weights.pop(A_WEIGHT)), "lacks .*qkv_proj"),
        # transformers names a tied weight by either of its names.
        ("lazyformer.embed_tokens.weight", "lacks .*(embed_tokens|lm_head.decoder).weight.*random"),
        ("lazyformer.sublayers.3.layer_norm.bias", "lacks .*sublayers.3.layer_norm.bias.*random"),
        ("lm_head.dense.weight", "lacks lm_head.dense.weight"),
        ("classifier.out_proj.bias", "lacks classifier.out_proj.bias"),
        (change_a_number, OTHER_NUMBERS),
    ],
)
def test_weights_that_are_missing_or_changed_are_an_error(changing, message, folder):
    change(folder, lambda weights: weights.pop(changing) if isinstance(changing, str) else changing(weights))
    for model_class in (LazyFormerModel, LazyFormerForMaskedLM, LazyFormerForSequenceClassification):
        head = {LazyFormerForMaskedLM: "lm_head.", LazyFormerForSequenceClassification: "classifier."}.get(model_class)
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            if message.startswith("lacks .*") or message == OTHER_NUMBERS or message.startswith(f"lacks {head}"):
                with pytest.raises(ValueError, match=message):
                    model_class.from_pretrained(folder, dtype=dtype)
            else:  # it has not the head whose weight is missing
                model_class.from_pretrained(folder, dtype=dtype)


def test_a_decoder_of_its_own_is_an_error(folder):
    change(folder, lambda all_: all_.update({"lm_head.decoder.weight": all_["lazyformer.embed_tokens.weight"] + 1}))
    # transformers 4 ties it to the embedding in any case.
    with pytest.raises(ValueError, match="decoder of its own") if modelling.TIES_BY_TABLE else nullcontext():
        model = LazyFormerForMaskedLM.from_pretrained(folder)
        assert model.lm_head.decoder.weight is model.lazyformer.embed_tokens.weight


def test_a_config_without_hashes_is_warned_about_and_lacks_nothing(folder, caplog, monkeypatch):
    config = json.loads((folder / "config.json").read_text())
    del config["weights_sha256"]
    (folder / "config.json").write_text(json.dumps(config))
    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)
    LazyFormerModel.from_pretrained(folder)
    assert "no weights_sha256" in caplog.text or "cannot tell" in caplog.text
    change(folder, lambda weights: weights.pop(A_WEIGHT))
    with pytest.raises(ValueError, match="lacks"):
        LazyFormerModel.from_pretrained(folder)


@pytest.mark.parametrize("saved", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("loaded", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@torch.no_grad()
def test_any_precision_after_any_other(saved, loaded, exported, tmp_path):
    first = LazyFormerForMaskedLM.from_pretrained(exported)
    wanted = first(some_ids()).logits
    first.to(saved).save_pretrained(tmp_path)
    model = LazyFormerForMaskedLM.from_pretrained(tmp_path, dtype=loaded)
    found = model(some_ids()).logits
    assert {weight.dtype for weight in model.parameters()} == {found.dtype} == {loaded}
    assert (found.float() - wanted).abs().mean() < 0.05 * wanted.abs().mean()


def test_what_was_learned_is_what_is_checked_next_time(exported, tmp_path):
    model = LazyFormerForSequenceClassification.from_pretrained(exported)
    ids = some_ids()
    model(ids, labels=torch.tensor([0, 1, 0])).loss.backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    model.save_pretrained(tmp_path)
    again = LazyFormerForSequenceClassification.from_pretrained(tmp_path)
    assert torch.equal(again(ids).logits, model.eval()(ids).logits)
    change(tmp_path, lambda weights: weights["classifier.out_proj.bias"].add_(1))
    with pytest.raises(ValueError, match=OTHER_NUMBERS):
        LazyFormerForSequenceClassification.from_pretrained(tmp_path)
    fresh = {"num_labels": 5, "ignore_mismatched_sizes": True}  # a head for other classes may start so
    assert LazyFormerForSequenceClassification.from_pretrained(exported, **fresh).classifier.out_proj.out_features == 5


def test_a_state_that_is_given_is_what_is_hashed(exported, tmp_path):
    """As Trainer gives it, of a model that is shared out; without a folder there is none to compare with."""
    model = LazyFormerForMaskedLM.from_pretrained(exported)
    state = {name: weight * 2 for name, weight in model.state_dict().items()}
    state["lm_head.decoder.weight"] = state["lazyformer.embed_tokens.weight"]
    model.save_pretrained(tmp_path, state_dict=state)
    for folder, given in ((tmp_path, {}), (None, {"config": model.config, "state_dict": state})):
        again = LazyFormerForMaskedLM.from_pretrained(folder, **given)
        assert torch.equal(again.state_dict()[A_WEIGHT], state[A_WEIGHT])
