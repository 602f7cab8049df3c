"""peft and what else looks for parts of a model by their usual names."""

import functools
from collections.abc import Callable

import every_variant
import pytest
import torch
import transformers
from exports import fresh_model, some_ids
from torch import nn
from torch.testing import assert_close

import lazyformer_fairseq

peft = pytest.importorskip("peft", reason="the extra test has it")

IDS = some_ids()
CLASSES = torch.tensor([2, 0, 1])
# For each model with a head how peft calls its task, and what its loss takes.
TASKS = {
    "LazyFormerForMaskedLM": (None, {"labels": IDS}),
    "LazyFormerForSequenceClassification": ("SEQ_CLS", {"labels": CLASSES}),
    "LazyFormerForTokenClassification": ("TOKEN_CLS", {"labels": IDS % 3}),
    "LazyFormerForQuestionAnswering": ("QUESTION_ANS", {"start_positions": CLASSES, "end_positions": CLASSES + 2}),
    "LazyFormerForCausalLM": ("CAUSAL_LM", {"labels": IDS}),
}
ALL_KINDS = (
    "".join(f"{s}f" for s in every_variant.ENCODERS) + "skc c[form=lightweight] r r[cell=brc] f[gate=gelu] f[experts=3]"
)


@functools.cache
def usual_names() -> set[str]:
    """Return what models of transformers call their parts with weights, and peft those that it trains whole."""
    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}
    names = {*peft.utils.constants.SEQ_CLS_HEAD_NAMES, *peft.utils.constants.EMBEDDING_LAYER_NAMES, "pooler"}
    for family in ("bert", "distilbert", "llama", "modernbert", "gpt2"):
        config = transformers.AutoConfig.for_model(family, **sizes)
        for task in ("MaskedLM", "CausalLM", "SequenceClassification", "TokenClassification", "QuestionAnswering"):
            mapping = getattr(transformers, f"AutoModelFor{task}")._model_mapping
            if type(config) not in mapping:
                continue
            with torch.device("meta"):
                parts = mapping[type(config)](config).named_children()
                names |= {name for name, part in parts if next(part.parameters(), None) is not None}
    return names


def models() -> dict[str, Callable[[], nn.Module]]:
    """Return what builds each class of model that users get, by name."""
    heads = ("LazyFormerModel", *TASKS)
    found = {name: functools.partial(fresh_model, name) for name in heads}
    plain = ("lazyformer_m2x6_s_tiny", "transformer_xl_tiny")
    return found | {arch: functools.partial(lazyformer_fairseq.build, arch, 40) for arch in plain}


@pytest.mark.parametrize("build", models().values(), ids=models().keys())
def test_what_has_the_usual_name_of_a_module_is_a_module(build):
    found = usual_names()
    assert {"score", "classifier", "lm_head", "qa_outputs", "pooler", "vocab_projector", "transformer"} <= found
    for part in build().modules():
        for name in found & {*dir(part)}:
            assert isinstance(getattr(part, name), (nn.Module, type(None))), f"{type(part).__name__}.{name}"


def lora(model: nn.Module, task=None):
    """Return the model with adapters of all maps but the head's, which peft trains whole."""
    has_own_rule = task in (None, "SEQ_CLS", "CAUSAL_LM")
    targets = "all-linear" if has_own_rule else r"lazyformer\.encoder\.sublayers\..*_proj"
    return peft.get_peft_model(model, peft.LoraConfig(task_type=task, target_modules=targets))


@pytest.mark.parametrize("name", TASKS)
def test_an_adapter_trains_and_comes_back_on_a_fresh_base(name, tmp_path):
    task, labels = TASKS[name]
    fresh_model(name).save_pretrained(tmp_path / "base")
    load = getattr(lazyformer_fairseq, name).from_pretrained
    model = lora(load(tmp_path / "base"), task).train()
    optimizer = torch.optim.SGD(model.parameters(), lr=30.0)
    model(IDS, **labels).loss.backward()
    optimizer.step()
    model.eval().save_pretrained(tmp_path / "adapter")
    # A fresh head starts with other random numbers, so the adapter must bring the trained one.
    torch.manual_seed(2)
    again = peft.PeftModel.from_pretrained(load(tmp_path / "base"), tmp_path / "adapter").eval()
    with torch.no_grad():
        wanted, found, before = (each(IDS, **labels) for each in (model, again, load(tmp_path / "base").eval()))
        merged = again.merge_and_unload()(IDS, **labels)
    assert_close(found.to_tuple(), wanted.to_tuple(), rtol=0, atol=0)
    assert_close(merged.loss, wanted.loss)
    assert not torch.allclose(wanted.loss, before.loss)
    if name == "LazyFormerForCausalLM":
        assert torch.equal(again.generate(input_ids=IDS, max_new_tokens=3)[:, : IDS.size(1)], IDS)


@pytest.mark.parametrize("name", ["LazyFormerForSequenceClassification", "LazyFormerForQuestionAnswering"])
def test_an_adapter_brings_the_head_of_a_base_without_one(name, tmp_path):
    task, labels = TASKS[name]
    fresh_model("LazyFormerForMaskedLM").save_pretrained(tmp_path / "base")
    load = getattr(lazyformer_fairseq, name).from_pretrained
    torch.manual_seed(2)
    model = lora(load(tmp_path / "base", num_labels=3), task).eval()
    model.save_pretrained(tmp_path / "adapter")
    torch.manual_seed(3)
    again = peft.PeftModel.from_pretrained(load(tmp_path / "base", num_labels=3), tmp_path / "adapter").eval()
    assert_close(again(IDS, **labels).loss, model(IDS, **labels).loss, rtol=0, atol=0)


def test_adapters_of_every_map_learn():
    """None is passed by where a sublayer reads a part of a map's weight."""
    model = fresh_model("LazyFormerForMaskedLM", ALL_KINDS)
    targets = [name for name, part in model.named_modules() if isinstance(part, nn.Linear) and "lm_head" not in name]
    tables = [name for name, part in model.named_modules() if isinstance(part, nn.Embedding)]
    config = peft.LoraConfig(target_modules=[*targets, *tables])
    adapted = peft.get_peft_model(model, config).train()
    for name, weight in adapted.named_parameters():
        if "lora_" in name:
            nn.init.normal_(weight, std=0.1)
    adapted(IDS, labels=IDS).loss.backward()
    learned = {name: weight.grad for name, weight in adapted.named_parameters() if "lora_" in name}
    assert len(learned) == 2 * len([*targets, *tables])
    assert [name for name, gradient in learned.items() if gradient is None or not gradient.count_nonzero()] == []
