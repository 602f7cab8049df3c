"""The optimizer ``muon``: Muon for the sublayers' matrices, and Adam with a separate learning rate for other weights.

Muon (Jordan et al., 2024, https://kellerjordan.github.io/posts/muon/; at scale: Liu et al., 2025, arXiv 2502.16982)
updates a matrix with its orthogonalized momentum. For weights W and gradient G, each update computes::

    M = mu M + (1 - mu) G             U = mu M + (1 - mu) G with Nesterov's momentum, else M
    X = U / |U|, then `steps` times:  A = X X^T      X = (a I + b A + c A A) X
    W = (1 - rate decay) W - rate scale X

These Newton-Schulz steps move all singular values close to 1. If X is at least twice as wide as it is high, all steps
are computed on X X^T, and X is multiplied once at the end. ``scale`` is max(1, rows / columns)^0.5 for ``original``,
and 0.2 max(rows, columns)^0.5 for ``match_rms_adamw``. The latter makes updates as large as Adam's (2502.16982), so
Adam's learning rate and weight decay can be reused. If a weight stacks several projections, such as queries, keys and
values (:attr:`~lazyformer_fairseq.modules.linear.Linear.blocks`), each projection is treated as a separate matrix.

torch's built-in Muon (2.9 and later) processes matrices one by one, and only in bf16. Here, matrices with the same
shape up to transposition are processed as one batch.
"""

import logging
import math
import re
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Optional

import torch
from torch import Tensor, distributed, nn

from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.executors.cpuinfo import has_bf16
from lazyformer_fairseq.executors.nvidia_smi import precision_on
from lazyformer_fairseq.modules.linear import Linear
from lazyformer_fairseq.modules.products import multiply
from lazyformer_fairseq.options import AMOUNT, PROPORTION, check, option
from lazyformer_fairseq.training.optimizers import (
    BUCKET,
    MOMENTS,
    AdamLike,
    AdamOptions,
    GroupwiseOptimizer,
    buckets,
    gradients_of,
)

logger = logging.getLogger(__name__)

# a, b and c. Jordan et al. chose the polynomial to be as steep at 0 as possible while keeping its values near 1.
COEFFICIENTS = (3.4445, -4.7750, 2.0315)
EPS = 1e-7  # added to norms
LAYER = re.compile(r"(^|\.)layers?\.\d+\.")  # matches module names in fairseq's and transformers' models
SCALES = {
    "match_rms_adamw": lambda rows, columns: 0.2 * math.sqrt(max(rows, columns)),
    "original": lambda rows, columns: math.sqrt(max(1.0, rows / columns)),
}
OVERRIDES = "optim_overrides"  # an attribute that fairseq also sets on its single-precision copies of weights
CPU_BUCKET_SIZE = (
    2**22
)  # elements per batch on a CPU: beyond this, allocating the results costs more than batching saves
DEFAULTS = {
    "lr": 0.02,
    "weight_decay": 0.0,
    "momentum": 0.95,
    "nesterov": True,
    "scale": "original",
    "by_muon": True,
    "steps": 5,
    "coefficients": COEFFICIENTS,
    "betas": (0.9, 0.999),
    "eps": 1e-8,
}


def mark_matrices(model: nn.Module) -> None:
    """Mark the weight matrices of a model's sublayers for Muon, and record how many blocks each matrix stacks.

    In models from other libraries, the linear modules inside numbered layers are marked.
    """
    for name, module in model.named_modules():
        is_of_layer = isinstance(module, nn.Linear) and LAYER.search(name)
        if isinstance(module, Linear) or is_of_layer:
            overrides = {"blocks": getattr(module, "blocks", 1)}
            setattr(module.weight, OVERRIDES, overrides)


def blocks_of(weight: Tensor) -> int:
    """Return the number of matrices that a weight stacks; 0 if the weight is not marked as a sublayer's matrix."""
    return getattr(weight, OVERRIDES, {}).get("blocks", 0)


def orthogonal(
    x: Tensor,
    steps: int,
    coefficients: tuple[float, float, float],
    dtype: Optional[torch.dtype] = None,
) -> Tensor:
    """Orthogonalize matrices approximately, so that all their singular values are close to 1.

    Args:
        x: the matrices (X, M, N) with M <= N.
        steps: the number of Newton-Schulz steps.
        coefficients: the coefficients a, b and c of a step.
        dtype: the precision of the matmuls and the result; None for the dtype of `x`.
    """
    norms = x.norm(dim=(1, 2), keepdim=True) + EPS
    x = torch.div(x, norms, out=torch.empty_like(x, dtype=dtype))
    rows, columns = x.shape[1:]
    if _begins_with_gram(rows, columns) and x.dtype != torch.bfloat16:  # bf16 is too coarse for powers of X X^T
        return _times(_factors_by_gram(_times(x, x.mT), steps, coefficients), x)
    for _ in range(steps):
        x = _times(_factor_of(_times(x, x.mT), coefficients), x)
    return x


def _begins_with_gram(rows: int, columns: int) -> bool:
    """Return True if the steps are cheaper on the square matrix X X^T than on X."""
    return columns >= 2 * rows


def _factors_by_gram(gram: Tensor, steps: int, coefficients: tuple[float, float, float]) -> Tensor:
    """Return the product of all steps' factors (X, M, M).

    A step replaces X with F X and therefore A = X X^T with F A F, so all factors can be computed without X.
    """
    product = _factor_of(gram, coefficients)
    factor = product
    for _ in range(steps - 1):
        gram = _times(_times(factor, gram), factor)
        factor = _factor_of(gram, coefficients)
        product = _times(factor, product)
    return product


def _factor_of(gram: Tensor, coefficients: tuple[float, float, float]) -> Tensor:
    """Return a I + b A + c A A for A = X X^T."""
    a, b, c = coefficients
    if gram.is_cuda:
        factor = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
    else:
        factor = _times(gram, gram).mul_(c).add_(gram, alpha=b)
    factor.diagonal(dim1=1, dim2=2).add_(a)
    return factor


def count_flops(rows: int, columns: int, steps: int = 5) -> int:
    """Return the FLOPs of :func:`orthogonal` for one fp32 matrix, counting each multiply-add as two."""
    short, long = sorted((rows, columns))
    square = 2 * short**3
    wide = 2 * short**2 * long
    if _begins_with_gram(short, long):
        return 2 * wide + square + (steps - 1) * 4 * square
    return steps * (2 * wide + square)


def _times(left: Tensor, right: Tensor) -> Tensor:
    """Multiply matrices. Distributed runs always use torch, which keeps the weights of all processes identical."""
    if distributed.is_initialized():
        return torch.bmm(left, right)
    return multiply(left, right)


class Muon(GroupwiseOptimizer):
    """Muon for parameter groups with ``by_muon`` (the default), and Adam with decoupled weight decay for the others.

    A weight in a Muon group is a matrix or a stack of :func:`blocks_of` matrices. Every group has the settings `lr` and
    `weight_decay`. Muon groups also have `momentum`, `nesterov`, `scale` (a key of :data:`SCALES`), `steps` and
    `coefficients`; Adam groups have `betas` and `eps`. The optimizer state consists of a ``momentum_buffer`` per Muon
    weight and two moments per Adam weight.

    Args:
        params: weights or parameter groups, in single or double precision.
        dtype: the precision of Muon's matmuls; None for the weights' precision.
        settings: defaults for settings that a group does not have.
    """

    def __init__(self, params: Iterable[Any], dtype: Optional[torch.dtype] = None, **settings: Any):
        super().__init__(params, {**DEFAULTS, **settings})
        self.dtype = dtype

    def _step_on(self, group: dict[str, Any], weights: list[Tensor]) -> None:
        if not group["by_muon"]:
            self._step_by_adam(group, weights)
            return
        alike = defaultdict(list)
        for weight in weights:
            rows, columns = _blocks(weight).shape[1:]
            alike[min(rows, columns), max(rows, columns)].append(weight)
        for same in alike.values():
            for bucket in buckets(same, BUCKET if same[0].is_cuda else CPU_BUCKET_SIZE):
                self._step_by_muon(group, bucket)

    def _step_by_muon(self, group: dict[str, Any], weights: list[Tensor]) -> None:
        """Update weights that consist of matrices with the same shape up to transposition."""
        (moments,) = self._moments(weights, ("momentum_buffer",))
        gradients = gradients_of(weights)
        torch._foreach_lerp_(moments, gradients, 1 - group["momentum"])
        if group["nesterov"]:
            updates = list(torch._foreach_lerp(gradients, moments, group["momentum"]))
        else:
            updates = moments
        matrices = [_as_wide(_blocks(update, weight)) for update, weight in zip(updates, weights, strict=True)]
        found = orthogonal(torch.cat(matrices), group["steps"], group["coefficients"], self.dtype)

        torch._foreach_mul_(weights, 1 - group["lr"] * group["weight_decay"])
        sizes = [max(1, blocks_of(weight)) for weight in weights]
        for weight, part in zip(weights, found.split(sizes), strict=True):
            blocks = _blocks(weight)
            is_transposed = part.shape != blocks.shape
            scale = SCALES[group["scale"]](*blocks.shape[1:])
            blocks.add_(part.mT if is_transposed else part, alpha=-group["lr"] * scale)

    def _step_by_adam(self, group: dict[str, Any], weights: list[Tensor]) -> None:
        if not weights:
            return
        b1, b2 = group["betas"]
        first_moments, second_moments = self._moments(weights, MOMENTS)
        step = torch.tensor(float(group["step"]), device=weights[0].device)
        torch._fused_adamw_(
            weights,
            gradients_of(weights),
            first_moments,
            second_moments,
            [],
            [step] * len(weights),
            lr=group["lr"],
            beta1=b1,
            beta2=b2,
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            amsgrad=False,
            maximize=False,
        )


def _blocks(tensor: Tensor, weight: Optional[Tensor] = None) -> Tensor:
    """View a tensor as X blocks (X, M, N).

    Args:
        tensor: a weight, or a tensor with a weight's shape.
        weight: the weight marked with the number of blocks; default: `tensor` itself.
    """
    if weight is None:
        weight = tensor
    number = max(1, blocks_of(weight))
    return tensor.unflatten(0, (number, -1))


def _as_wide(x: Tensor) -> Tensor:
    """Transpose matrices that have more rows than columns, and return all others unchanged."""
    if x.size(1) > x.size(2):
        return x.mT
    return x


@dataclass
class MuonOptions(AdamOptions):
    """Options for :class:`MuonAndAdam`."""

    adam_lr: Optional[float] = option(None, "Adam's peak learning rate; default: the value of --lr", bounds=AMOUNT)
    muon_momentum: float = option(
        0.95, "Muon's momentum: the fraction of the previous average that each update keeps", bounds=PROPORTION
    )
    muon_no_nesterov: bool = option(False, "use plain momentum instead of Nesterov momentum")
    muon_scale: str = option(
        "match_rms_adamw",
        "scale of Muon's updates: match_rms_adamw, which is 0.2 max(rows, columns)^0.5, or original, which is "
        "max(1, rows / columns)^0.5",
        choices=tuple(SCALES),
    )
    muon_precision: str = option(
        "auto",
        "precision of Muon's matmuls; auto: bf16 on hardware with fast bf16, otherwise fp32",
        choices=("auto", "fp32", "bf16"),
    )


class MuonAndAdam(AdamLike):
    """Muon and Adam behind fairseq's interface; ``--lr`` is Muon's learning rate, and Adam's is proportional to it."""

    NAME = "muon"
    PREFIX = "adam"

    def made(self, params: list[Tensor]) -> torch.optim.Optimizer:
        """Build a :class:`Muon` for these weights."""
        cfg = self.cfg
        check(cfg, MuonOptions)
        groups = self.groups_of(params)
        matrices = groups[0]["params"]
        precision = str(cfg.muon_precision)
        if precision == "auto":
            is_fast = precision_on("cuda") == "bf16" if matrices[0].is_cuda else has_bf16()
            precision = "bf16" if is_fast else "fp32"
        logger.info("optimizer: Muon for %d matrices, with matmuls in %s; Adam for the rest", len(matrices), precision)
        dtype = torch.bfloat16 if precision == "bf16" else None
        return Muon(groups, dtype, **self.optimizer_config)

    @property
    def optimizer_config(self) -> dict[str, Any]:
        """The torch optimizer's settings."""
        return {
            **super().optimizer_config,
            "momentum": self.cfg.muon_momentum,
            "nesterov": not self.cfg.muon_no_nesterov,
            "scale": str(self.cfg.muon_scale),
        }

    def groups_of(self, params: list[Tensor]) -> list[dict]:
        """Split the weights into one parameter group for the sublayers' matrices and one or two for all other weights.

        Raises:
            UserError: no weight is marked as a sublayer's matrix.
        """
        matrices = [weight for weight in params if blocks_of(weight)]
        if not matrices:
            raise UserError(
                "--optimizer muon: found no sublayer matrices; this optimizer works only with this package's models "
                "and tasks, so use one of these tasks, or --optimizer fused_adam"
            )
        others = super().groups_of([weight for weight in params if not blocks_of(weight)])
        return [{"params": matrices}, *({**group, "by_muon": False} for group in others)]

    def set_lr(self, lr: float) -> None:
        """Set Muon's learning rate, and scale Adam's by the same factor."""
        super().set_lr(lr)
        peak = self.optimizer_config["lr"]
        adam_ratio = 1.0
        if self.cfg.adam_lr is not None and peak:
            adam_ratio = self.cfg.adam_lr / peak
        for group in self.param_groups[1:]:
            group["lr"] = lr * adam_ratio
