"""LayerNorm: NVIDIA apex's fused one if both apex and a GPU are present, else torch's own (fused on GPUs too)."""

import torch
from torch import nn


def layer_norm_class() -> type[nn.Module]:
    """The LayerNorm class in use."""
    if torch.cuda.is_available():
        try:
            from apex.normalization import FusedLayerNorm

            return FusedLayerNorm
        except ImportError:
            pass
    return nn.LayerNorm


def layer_norm(embed_dim: int) -> nn.Module:
    """A LayerNorm over the last dimension, of size `embed_dim`."""
    return layer_norm_class()(embed_dim)
