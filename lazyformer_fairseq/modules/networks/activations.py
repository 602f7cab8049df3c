"""Activations by the names that options have for them."""

from collections.abc import Callable, Mapping

from torch import Tensor
from torch.nn import functional as F


def gelu_tanh(x: Tensor) -> Tensor:
    """GELU's approximation by a hyperbolic tangent (Hendrycks and Gimpel, 2016, section 2)."""
    return F.gelu(x, approximate="tanh")


ACTIVATIONS: Mapping[str, Callable[[Tensor], Tensor]] = {"gelu": F.gelu, "gelu_tanh": gelu_tanh, "relu": F.relu}
