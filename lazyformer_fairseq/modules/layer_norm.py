"""LayerNorm: NVIDIA apex's fused one if both apex and a GPU are present, else torch's own (fused on GPUs too)."""

import functools
import importlib.util

import torch
from torch import Tensor, nn
from torch.nn import functional as F

EPS = 1e-5  # torch's own; BERT's is 1e-12


def layer_norm_class() -> type[nn.Module]:
    """The LayerNorm class in use."""
    # Python alone is installed too where apex was built without its kernels; its class then cannot be built.
    if torch.cuda.is_available() and importlib.util.find_spec("fused_layer_norm_cuda"):
        try:
            from apex.normalization import FusedLayerNorm

            return FusedLayerNorm
        except ImportError:
            pass
    return nn.LayerNorm


def layer_norm(embed_dim: int, eps: float = EPS) -> nn.Module:
    """A LayerNorm over the last dimension, of size `embed_dim`; `eps` is added to the variance."""
    found = layer_norm_class()
    return (found if found is nn.LayerNorm else _torchs_where_compiled(found))(embed_dim, eps=eps)


def describe_layer_norm(compiles: bool) -> str:
    """For the log.

    Args:
        compiles: whether training goes through torch.compile.
    """
    found = layer_norm_class()
    elsewhere = " (in what --compile compiles, torch's own)" if compiles and found is not nn.LayerNorm else ""
    return f"{found.__module__}.{found.__qualname__}{elsewhere}"


@functools.cache
def _torchs_where_compiled(fused: type[nn.Module]) -> type[nn.Module]:
    """The same with torch's own function inside torch.compile, which makes it part of the kernels around it.

    apex's would end the graph before each LayerNorm, or where it is an operator, stay a kernel of its own.
    """

    class FusedLayerNorm(fused):
        def forward(self, x: Tensor) -> Tensor:
            if torch.compiler.is_compiling():
                return F.layer_norm(x, tuple(self.normalized_shape), self.weight, self.bias, self.eps)
            return super().forward(x)

    return FusedLayerNorm
