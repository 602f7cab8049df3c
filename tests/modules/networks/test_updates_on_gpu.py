"""An update of each family of models on a GPU against a processor's in double precision. A processor rehearses this."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lazyformer_fairseq import build

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
WORDS = 500
BATCH, TIME = 4, 64
SIZES = {"encoder_embed_dim": 64, "encoder_ffn_embed_dim": 64, "encoder_attention_heads": 4}
NO_DROPOUT = {"dropout": 0.0, "attention_dropout": 0.0, "activation_dropout": 0.0}
# By family: an arch, and options of its own.
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "bert": ("bert_tiny", {}),
    "lazyformer": ("lazyformer_m2x6_s_tiny", {}),
    "par": ("par_bert_tiny", {}),
    "convolutions": ("bert_tiny", {"sublayer_pattern": "cf cf sf"}),
    "shared keys": ("bert_tiny", {"sublayer_pattern": "sfkf"}),
    "modernbert": ("modernbert_tiny", {}),
    "lazy modernbert": ("lazy_modernbert_tiny", {}),
    "neobert": ("neobert_tiny", {}),
    "modern parts": ("bert_modern_tiny", {}),
    "windows": ("longformer_tiny", {}),
    "linformer": ("linformer_tiny", {"max_positions": TIME}),
    "recurrences": ("nbrc_tiny", {}),
    "experts": ("gshard_tiny", {}),
    "reversible": ("bert_tiny", {"reversible": True, "encoder_normalize_before": True}),
    "recomputed": ("bert_tiny", {"checkpoint_activations": True}),
}
CAUSAL_FAMILIES = {
    "transformer-xl": "transformer_xl_tiny",
    "par": "par_transformer_tiny",
    "mingru": "mingru_tiny",
    "images": "igpt_s_tiny",
}
LOSS_SCALE = 128.0  # without it small gradients vanish in fp16
# The distance of a gradient, as a share of its length.
WITHIN = {torch.float32: 1e-3, torch.bfloat16: 0.1, torch.float16: 0.02}
# Where rounding chooses another expert, or another state of a bistable cell, gradients differ by no bounded amount.
CHOOSES = ("experts", "recurrences")


@pytest.fixture(autouse=True)
def no_chance(monkeypatch):
    """The second expert of a token is drawn, on each device by other numbers."""
    monkeypatch.setattr(torch, "rand", lambda *size, **how: torch.full(size, 0.5, **how))


def masked_loss(model: nn.Module, tokens: Tensor, **more: Any) -> Tensor:
    """The loss of every eighth token."""
    places = torch.arange(0, tokens.numel(), 8, device=tokens.device)
    logits, _ = model(tokens, masked_tokens=places, has_padding=False, **more)
    return nn.functional.cross_entropy(
        logits.float() if logits.dtype != torch.double else logits, tokens.flatten()[places]
    )


def causal_loss(model: nn.Module, tokens: Tensor) -> Tensor:
    return model(tokens[:, :-1], target=tokens[:, 1:])[0].mean()


def gradients(model: nn.Module, loss: Tensor) -> Tensor:
    (LOSS_SCALE * loss).backward()
    found = [weight.grad.detach().cpu().double().flatten() for weight in model.parameters() if weight.grad is not None]
    return torch.cat(found)


def assert_same_update(model: nn.Module, loss_of, dtype: torch.dtype, chooses: bool = False, **more: Any) -> None:
    tokens = torch.randint(5, WORDS, (BATCH, TIME), generator=torch.Generator().manual_seed(1))
    here = copy.deepcopy(model).to(DEVICE, dtype).train()
    reference = model.double().train()
    wanted = loss_of(reference, tokens, **more)
    found = loss_of(here, tokens.to(DEVICE), **more)
    assert found.item() == pytest.approx(wanted.item(), rel=10 * torch.finfo(dtype).eps)
    if chooses and dtype != torch.float32:
        return
    expected = gradients(reference, wanted)
    distance = (gradients(here, found) - expected).norm() / expected.norm()
    assert distance < WITHIN[dtype]


PRECISIONS = pytest.mark.parametrize("dtype", WITHIN, ids=str)


def model_of(family: str) -> nn.Module:
    torch.manual_seed(1)
    arch, options = FAMILIES[family]
    return build(arch, WORDS, **{**SIZES, **NO_DROPOUT, **options})


@PRECISIONS
@pytest.mark.parametrize("family", FAMILIES)
def test_an_update_of_a_masked_lm_on_gpu(family, dtype):
    assert_same_update(model_of(family), masked_loss, dtype, family in CHOOSES)


@PRECISIONS
@pytest.mark.parametrize("family", ["bert", "lazyformer", "modern parts"])
def test_an_update_within_documents_on_gpu(family, dtype):
    lengths = [[20, 44], [64], [1, 3, 60], [32, 32]]
    assert_same_update(model_of(family), masked_loss, dtype, documents=lengths)


@PRECISIONS
@pytest.mark.parametrize("family", CAUSAL_FAMILIES)
def test_an_update_of_a_causal_model_on_gpu(family, dtype):
    torch.manual_seed(1)
    assert_same_update(build(CAUSAL_FAMILIES[family], WORDS, **NO_DROPOUT), causal_loss, dtype)
