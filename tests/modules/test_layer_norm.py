import sys
from types import ModuleType, SimpleNamespace

import torch

from lazyformer_fairseq.modules.layer_norm import layer_norm, layer_norm_class


class LayerNormOfApex(torch.nn.LayerNorm):
    pass


def test_apex_is_used_on_a_gpu_where_it_can_be_imported(monkeypatch):
    monkeypatch.setitem(sys.modules, "apex", ModuleType("apex"))
    monkeypatch.setitem(sys.modules, "apex.normalization", SimpleNamespace(FusedLayerNorm=LayerNormOfApex))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert layer_norm_class() is torch.nn.LayerNorm
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert isinstance(layer_norm(8), LayerNormOfApex)
    monkeypatch.setitem(sys.modules, "apex.normalization", None)  # cannot be imported
    assert layer_norm_class() is torch.nn.LayerNorm
