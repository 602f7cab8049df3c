"""Weights that are not those that were saved never load in silence."""

import json
import logging
import shutil

import pytest
import torch
from exports import export_custom, some_ids, tiny_model
from safetensors.torch import load_file, save_file

from lazyformer_fairseq.huggingface.exported import heads, modelling

WEIGHTS = "model.safetensors"
A_WEIGHT = "lazyformer.sublayers.0.inner.qkv_proj.weight"
MODELS = [heads.LazyFormerModel, heads.LazyFormerForMaskedLM, heads.LazyFormerForSequenceClassification]
of_each_model = pytest.mark.parametrize("model_class", MODELS, ids=lambda each: each.__name__)


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


@of_each_model
@pytest.mark.parametrize("name", [A_WEIGHT, "lazyformer.embed_tokens.weight", "lazyformer.sublayers.3.layer_norm.bias"])
def test_a_missing_weight_is_an_error(model_class, name, folder):
    change(folder, lambda weights: weights.pop(name))
    # transformers names a tied weight by either of its names.
    named = "(embed_tokens|lm_head.decoder).weight" if "embed" in name else name.removeprefix("lazyformer.")
    with pytest.raises(ValueError, match=rf"lacks .*{named}.*random"):
        model_class.from_pretrained(folder)


@of_each_model
def test_a_renamed_weight_is_an_error(model_class, folder):
    change(folder, lambda weights: weights.update({A_WEIGHT.replace("qkv_proj", "qkv"): weights.pop(A_WEIGHT)}))
    with pytest.raises(ValueError, match="lacks .*qkv_proj"):
        model_class.from_pretrained(folder)


@of_each_model
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_changed_number_is_an_error(model_class, dtype, folder):
    def one_number(weights):
        weights[A_WEIGHT][1, 2] += 0.25

    change(folder, one_number)
    with pytest.raises(ValueError, match="not those that config.json was saved with"):
        model_class.from_pretrained(folder, dtype=dtype)


@pytest.mark.parametrize(
    ("model_class", "name"),
    [(heads.LazyFormerForMaskedLM, "lm_head.dense.weight"), (MODELS[2], "classifier.out_proj.bias")],
)
def test_a_head_is_checked_where_it_is_loaded(model_class, name, folder):
    change(folder, lambda weights: weights.pop(name))
    heads.LazyFormerModel.from_pretrained(folder)
    with pytest.raises(ValueError, match=f"lacks {name}"):
        model_class.from_pretrained(folder)


def test_a_decoder_of_its_own_is_an_error(folder):
    change(
        folder,
        lambda weights: weights.update({"lm_head.decoder.weight": weights["lazyformer.embed_tokens.weight"] + 1}),
    )
    if modelling.TIES_BY_TABLE:
        with pytest.raises(ValueError, match="decoder of its own"):
            heads.LazyFormerForMaskedLM.from_pretrained(folder)
    else:  # transformers 4 ties it to the embedding in any case
        model = heads.LazyFormerForMaskedLM.from_pretrained(folder)
        assert model.lm_head.decoder.weight is model.lazyformer.embed_tokens.weight


def test_a_config_without_hashes_is_warned_about_and_lacks_nothing(folder, caplog):
    config = json.loads((folder / "config.json").read_text())
    del config["weights_sha256"]
    (folder / "config.json").write_text(json.dumps(config))
    library = logging.getLogger("transformers")
    library.propagate, before = True, library.propagate
    try:
        heads.LazyFormerModel.from_pretrained(folder)
    finally:
        library.propagate = before
    assert "no weights_sha256" in caplog.text or "cannot tell" in caplog.text
    change(folder, lambda weights: weights.pop(A_WEIGHT))
    with pytest.raises(ValueError, match="lacks"):
        heads.LazyFormerModel.from_pretrained(folder)


@pytest.mark.parametrize("saved", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("loaded", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_any_precision_after_any_other(saved, loaded, exported, tmp_path):
    heads.LazyFormerForMaskedLM.from_pretrained(exported).to(saved).save_pretrained(tmp_path)
    model = heads.LazyFormerForMaskedLM.from_pretrained(tmp_path, dtype=loaded)
    assert model.dtype == loaded


def test_what_was_learned_is_what_is_checked_next_time(exported, tmp_path):
    model = heads.LazyFormerForSequenceClassification.from_pretrained(exported)
    ids = some_ids()
    model(ids, labels=torch.tensor([0, 1, 0])).loss.backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    model.save_pretrained(tmp_path)
    again = heads.LazyFormerForSequenceClassification.from_pretrained(tmp_path)
    assert torch.equal(again(ids).logits, model.eval()(ids).logits)
    change(tmp_path, lambda weights: weights["classifier.out_proj.bias"].add_(1))
    with pytest.raises(ValueError, match="not those"):
        heads.LazyFormerForSequenceClassification.from_pretrained(tmp_path)


def test_a_state_that_is_given_is_what_is_hashed(exported, tmp_path):
    """As Trainer gives it, of a model that is shared out."""
    model = heads.LazyFormerForMaskedLM.from_pretrained(exported)
    state = {name: weight * 2 for name, weight in model.state_dict().items()}
    state["lm_head.decoder.weight"] = state["lazyformer.embed_tokens.weight"]
    model.save_pretrained(tmp_path, state_dict=state)
    again = heads.LazyFormerForMaskedLM.from_pretrained(tmp_path)
    assert torch.equal(again.state_dict()[A_WEIGHT], state[A_WEIGHT])


def test_a_head_for_other_classes_may_start_fresh(exported):
    model = heads.LazyFormerForSequenceClassification.from_pretrained(
        exported, num_labels=5, ignore_mismatched_sizes=True
    )
    assert model.classifier.out_proj.out_features == 5


def test_weights_in_place_of_a_folder_are_not_compared_with_one(exported):
    model = heads.LazyFormerModel.from_pretrained(exported)
    state = {name: weight + 1 for name, weight in model.state_dict().items()}
    changed = heads.LazyFormerModel.from_pretrained(None, config=model.config, state_dict=state)
    assert not torch.equal(changed.embed_tokens.weight, model.embed_tokens.weight)
