import sys
from dataclasses import replace

import apex_stand_in
import pytest
import torch
from helpers import dictionary_of

from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.fairseq_plugin.models.config import LazyFormerConfig
from lazyformer_fairseq.fairseq_plugin.models.lazyformer import LazyFormerModel
from lazyformer_fairseq.modules.layer_norm import describe_layer_norm, layer_norm, layer_norm_class


def test_apex_is_used_on_a_gpu_where_it_can_be_imported_and_was_built_with_its_kernels(monkeypatch):
    apex_stand_in.install(monkeypatch)
    assert isinstance(layer_norm(8), apex_stand_in.FusedLayerNorm)
    assert describe_layer_norm(compiles=False).endswith(".FusedLayerNorm")
    assert describe_layer_norm(compiles=True).endswith(".FusedLayerNorm (in what --compile compiles, torch's own)")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert layer_norm_class() is torch.nn.LayerNorm
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.delitem(sys.modules, "fused_layer_norm_cuda")  # Python alone
    assert layer_norm_class() is torch.nn.LayerNorm
    apex_stand_in.install(monkeypatch)
    monkeypatch.setitem(sys.modules, "apex.normalization", None)  # cannot be imported
    assert layer_norm_class() is torch.nn.LayerNorm
    assert describe_layer_norm(compiles=True) == "torch.nn.modules.normalization.LayerNorm"


@pytest.mark.parametrize("epsilon", [1e-12, 0.5])
def test_apexs_is_torchs_where_it_is_compiled(monkeypatch, epsilon):
    """Epsilon is added to the variance."""
    x = torch.tensor([[1.0, 3.0, 5.0, 7.0]])
    plain = layer_norm(4, epsilon)
    torch.testing.assert_close(plain(x), (x - x.mean()) / (x.var(unbiased=False) + epsilon).sqrt())
    with monkeypatch.context() as patch:
        apex_stand_in.install(patch)
        fused = layer_norm(4, epsilon)
    torch.nn.init.normal_(fused.weight)
    plain.load_state_dict(fused.state_dict())
    for module in (fused, torch.compile(fused, fullgraph=True, backend="eager")):
        torch.testing.assert_close(module(x), plain(x))
    with pytest.raises(torch._dynamo.exc.Unsupported):  # so the loop above can fail
        torch.compile(apex_stand_in.FusedLayerNorm(4), fullgraph=True, backend="eager")(x)


@pytest.mark.parametrize("prenorm", [False, True])
def test_a_models_epsilon_reaches_all_its_layer_norms(prenorm):
    cfg = LazyFormerConfig(
        sublayer_pattern="sflk-", encoder_embed_dim=8, encoder_attention_heads=2, encoder_ffn_embed_dim=8,
        layer_norm_eps=0.25, encoder_normalize_before=prenorm,
    )  # fmt: skip
    model = LazyFormerModel(cfg, dictionary_of(9))
    found = [module.eps for module in model.modules() if isinstance(module, torch.nn.LayerNorm)]
    assert found == [0.25] * 6  # of s, f, l, k, embeddings or output, head
    with pytest.raises(UserError, match="epsilon of 0: must be above 0 and below 1, such as 1e-05"):
        LazyFormerModel(replace(cfg, layer_norm_eps=0), dictionary_of(9))
