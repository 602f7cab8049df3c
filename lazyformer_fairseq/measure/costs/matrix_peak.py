"""The fastest matrix product of this machine: reports give a model's FLOP/s as a share of it."""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from lazyformer_fairseq.measure.costs.latency import Timing
from lazyformer_fairseq.modules.linear import has_onednn, multiply_by_onednn

SIZES = {"cpu": (1024, 2048), "cuda": (4096, 8192)}
SLOW_SIZES = (128, 256)  # a product of 2048 takes minutes on processors without fp16 instructions


def matrix_products(device: torch.device | str, dtype: torch.dtype) -> dict[str, Callable[[], Tensor]]:
    """Products of two square matrices, by name, by each library that models use; measure them in turn with models."""
    kind, things = torch.device(device).type, {}
    for size in SLOW_SIZES if (kind, dtype) == ("cpu", torch.float16) else SIZES[kind]:
        left, right = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
        things[f"matrix product {size}"] = _product(torch.matmul, left, right)
        if (kind, dtype) == ("cpu", torch.float32) and has_onednn():
            things[f"matrix product by oneDNN {size}"] = _product(multiply_by_onednn, left, right)
    return things


def matrix_peak(timings: Mapping[str, Timing]) -> float:
    """FLOP/s of the fastest product among `timings`; only names from :func:`matrix_products` count."""
    speeds = []
    for name, timing in timings.items():
        if name.startswith("matrix product"):
            speeds.append(2 * int(name.rpartition(" ")[2]) ** 3 / timing.median)
    return max(speeds)


def _product(multiply: Callable[[Tensor, Tensor], Tensor], left: Tensor, right: Tensor) -> Callable[[], Tensor]:
    return torch.inference_mode()(lambda: multiply(left, right))
