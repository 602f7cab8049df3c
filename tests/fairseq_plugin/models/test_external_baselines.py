"""Models of fairseq and transformers learn by our task and criterion, as they would by code of their own."""

import sys
from argparse import Namespace
from types import SimpleNamespace

import pytest
import torch
from fairseq.models import ARCH_CONFIG_REGISTRY, ARCH_MODEL_REGISTRY
from helpers import assert_equal_state, dictionary_of, load_script, train_words
from torch.nn import functional as F

from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.fairseq_plugin.criterions.language_modeling import MaskedLMAccuracyCriterion
from lazyformer_fairseq.fairseq_plugin.models.huggingface_bert import HuggingFaceBert, HuggingFaceBertConfig
from lazyformer_fairseq.modules.networks.huggingface_bert import has_transformers
from lazyformer_fairseq.training.muon import blocks_of, mark_matrices

needs_transformers = pytest.mark.skipif(not has_transformers(), reason="transformers is not installed")
OF_TRANSFORMERS = ("bert", "modernbert")
BASELINES = ["roberta_base", *(pytest.param(name, marks=needs_transformers) for name in OF_TRANSFORMERS)]
SIZES = {"encoder_layers": 2, "encoder_embed_dim": 16, "encoder_ffn_embed_dim": 32, "encoder_attention_heads": 2}
OPTIONS = " ".join(f"--{name.replace('_', '-')} {value}" for name, value in SIZES.items()) + " --max-positions 64"
PAD = 1


def build(arch: str) -> torch.nn.Module:
    torch.manual_seed(1)
    task = SimpleNamespace(source_dictionary=dictionary_of(40))
    if arch in OF_TRANSFORMERS:
        config = HuggingFaceBertConfig(model_type=arch, **SIZES, dropout=0.0, max_positions=16)
        return HuggingFaceBert.build_model(config, task)
    options = Namespace(**SIZES, max_positions=16, dropout=0.0, attention_dropout=0.0)
    ARCH_CONFIG_REGISTRY[arch](options)
    return ARCH_MODEL_REGISTRY[arch].build_model(options, task)


def a_batch() -> dict:
    """Three texts of which the second is padded, four words to predict."""
    tokens = torch.randint(5, 40, (3, 8), generator=torch.Generator().manual_seed(2))
    tokens[1, 6:] = PAD
    target = torch.full_like(tokens, PAD)
    target[0, 1], target[0, 3], target[1, 5], target[2, 7] = 7, 8, 9, 10
    positions = target.flatten().ne(PAD).nonzero().squeeze(1)
    net_input = {"src_tokens": tokens, "src_lengths": torch.tensor([8, 6, 8]), "has_padding": True}
    return {"net_input": net_input, "target": target, "masked_positions": positions, "ntokens": 22, "nsentences": 3}


def own_loss(arch: str, model: torch.nn.Module, batch: dict) -> torch.Tensor:
    """Nats of all masked words, by the code that ships with the model."""
    tokens, target = batch["net_input"]["src_tokens"], batch["target"]
    if arch in OF_TRANSFORMERS:
        labels = target.masked_fill(target.eq(PAD), -100)
        return model.bert(tokens, attention_mask=tokens.ne(PAD), labels=labels).loss * 4
    return F.cross_entropy(model(tokens)[0].flatten(0, 1), target.flatten(), ignore_index=PAD, reduction="sum")


@pytest.mark.parametrize("arch", BASELINES)
def test_the_loss_and_its_gradient_are_those_of_the_model_by_its_own_code(arch):
    batch, own, ours = a_batch(), build(arch), build(arch)
    assert_equal_state(own.state_dict(), ours.state_dict())
    criterion = MaskedLMAccuracyCriterion(SimpleNamespace(target_dictionary=dictionary_of(40)))
    loss, sample_size, log = criterion(ours, batch)
    expected = own_loss(arch, own, batch)
    torch.testing.assert_close(loss, expected)
    assert sample_size == 4 and 0 <= log["ncorrect"] <= 4
    loss.backward()
    expected.backward()
    for (name, weight), (_, other) in zip(ours.named_parameters(), own.named_parameters(), strict=True):
        torch.testing.assert_close(weight.grad, other.grad, msg=name)
        assert weight.grad.any() or "k_proj.bias" in name or "key.bias" in name, f"{name} learns nothing"


def training_of(data, arch: str, folder):
    """By our task and criterion."""
    arch = f"huggingface_bert --model-type {arch}" if arch in OF_TRANSFORMERS else arch
    options = f"--arch {arch} --criterion masked_lm_accuracy --max-update 4 --batch-size 4 --seed 3 {OPTIONS}"
    return load_script("fairseq_stepwise").FairseqTraining(train_words(data, options, folder), folder)


@pytest.mark.parametrize("arch", BASELINES)
def test_a_stopped_training_goes_on_as_if_it_had_not_stopped(arch, data_folder, tmp_path):
    whole = training_of(data_folder, arch, tmp_path / "whole")
    for _ in range(4):
        whole.update()
    for _ in range(2):
        training = training_of(data_folder, arch, tmp_path / "parts")
        training.update()
        training.update()
        training.save()
    assert training.updates == 4
    assert_equal_state(training.trainer.model.state_dict(), whole.trainer.model.state_dict())


@pytest.mark.parametrize("arch", BASELINES)
def test_muon_takes_the_maps_of_their_layers_and_nothing_else(arch):
    model = build(arch)
    mark_matrices(model)
    width, ffn = SIZES["encoder_embed_dim"], SIZES["encoder_ffn_embed_dim"]
    of_layer = width * (4 * width + (3 if arch == "modernbert" else 2) * ffn)
    taken = {name: weight for name, weight in model.named_parameters() if blocks_of(weight)}
    assert sum(weight.numel() for weight in taken.values()) == SIZES["encoder_layers"] * of_layer
    stacked = {name.split(".")[-2]: blocks_of(weight) for name, weight in taken.items() if blocks_of(weight) > 1}
    assert stacked == ({"Wqkv": 3, "Wi": 2} if arch == "modernbert" else {})


@needs_transformers
def test_sizes_that_do_not_fit_and_a_lack_of_transformers_are_said(monkeypatch):
    task = SimpleNamespace(source_dictionary=dictionary_of(40))
    with pytest.raises(UserError, match="--encoder-attention-heads 3 does not divide --encoder-embed-dim 16"):
        HuggingFaceBert.build_model(HuggingFaceBertConfig(**{**SIZES, "encoder_attention_heads": 3}), task)
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(UserError, match=r"requires transformers; .*: pip install 'lazyformer_fairseq\[bench\]'"):
        HuggingFaceBert.build_model(HuggingFaceBertConfig(**SIZES), task)
