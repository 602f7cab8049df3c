"""Optimizer ``muon``: Muon for the matrices of sublayers, Adam with a rate of its own for all other weights.

Muon (Jordan et al., 2024, https://kellerjordan.github.io/posts/muon/; at scale: Liu et al., 2025, arXiv 2502.16982)
moves a matrix by its momentum made orthogonal. With weights W and their gradient G, in each update::

    M = mu M + (1 - mu) G             U = mu M + (1 - mu) G with Nesterov's momentum, else M
    X = U / |U|, then so many times:  A = X X^T      X = (a I + b A + c A A) X
    W = (1 - rate decay) W - rate scale X

The steps of Newton and Schulz take all singular values near 1. For X at least twice as wide as high, all steps are
made on X X^T and X is multiplied once in the end. ``scale`` is ``original``'s max(1, rows / columns)^0.5,
or ``match_rms_adamw``'s 0.2 max(rows, columns)^0.5, with which an update is as large as Adam's (2502.16982), so that
Adam's rate and decay serve. Where a map stacks several, as those to queries, keys and values
(:attr:`~lazyformer_fairseq.modules.linear.Linear.blocks`), each is a matrix of its own.

torch's own Muon (from 2.9 on) takes matrices one by one, whole, and computes in bf16 alone; here those of one shape,
whichever way they lie, are one batch of products.
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
    ByGroups,
    buckets,
    gradients_of,
)

logger = logging.getLogger(__name__)

COEFFICIENTS = (3.4445, -4.7750, 2.0315)  # a, b and c: steepest at 0 of those that stay near 1 (Jordan)
EPS = 1e-7  # of a norm
LAYER = re.compile(r"(^|\.)layers?\.\d+\.")  # in names of modules, of fairseq's and transformers' models
SCALES = {
    "match_rms_adamw": lambda rows, columns: 0.2 * math.sqrt(max(rows, columns)),
    "original": lambda rows, columns: math.sqrt(max(1.0, rows / columns)),
}
OVERRIDES = "optim_overrides"  # fairseq's attribute, which its copies of weights in single precision have too
ON_PROCESSOR = 2**22  # elements at once: more take new memory for each product, which costs more than they save
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
    """Mark the weights of a model's sublayers that are matrices, with their number of blocks.

    Of models from elsewhere these are the maps of their layers.
    """
    for name, module in model.named_modules():
        if isinstance(module, Linear) or (isinstance(module, nn.Linear) and LAYER.search(name)):
            overrides = {"blocks": getattr(module, "blocks", 1)}
            setattr(module.weight, OVERRIDES, overrides)


def blocks_of(weight: Tensor) -> int:
    """Return the number of matrices that a weight stacks; 0 for one that is no matrix of a sublayer."""
    return getattr(weight, OVERRIDES, {}).get("blocks", 0)


def orthogonal(
    x: Tensor,
    steps: int,
    coefficients: tuple[float, float, float],
    dtype: Optional[torch.dtype] = None,
) -> Tensor:
    """Take all singular values of matrices near 1.

    Args:
        x: matrices, (X, M, N), M at most N.
        steps: steps of Newton and Schulz.
        coefficients: the coefficients of a step.
        dtype: the precision of the products and of the result; None for that of `x`.
    """
    x = torch.div(x, x.norm(dim=(1, 2), keepdim=True) + EPS, out=torch.empty_like(x, dtype=dtype))
    rows, columns = x.shape[1:]
    if _begins_with_gram(rows, columns) and x.dtype != torch.bfloat16:
        return _times(_factors_by_gram(_times(x, x.mT), steps, coefficients), x)
    for _ in range(steps):
        x = _times(_factor_of(_times(x, x.mT), coefficients), x)
    return x


def _begins_with_gram(rows: int, columns: int) -> bool:
    """Return whether the steps cost less on X X^T, which is square; bf16 is too coarse for its powers."""
    return columns >= 2 * rows


def _factors_by_gram(gram: Tensor, steps: int, coefficients: tuple[float, float, float]) -> Tensor:
    """Return the product of the factors of all steps, (X, M, M).

    A step takes X to F X, and so A = X X^T to F A F: all factors are known without X.
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
    """Return the FLOPs of :func:`orthogonal` for one matrix in fp32: twice the multiply-adds of its products."""
    short, long = sorted((rows, columns))
    square = 2 * short**3
    wide = 2 * short**2 * long
    if _begins_with_gram(short, long):
        return 2 * wide + square + (steps - 1) * 4 * square
    return steps * (2 * wide + square)


def _times(left: Tensor, right: Tensor) -> Tensor:
    """Multiply matrices; several processes take the same library each, as their weights must stay the same."""
    if distributed.is_initialized():
        return torch.bmm(left, right)
    return multiply(left, right)


class Muon(ByGroups):
    """Muon for groups with ``by_muon``, the default; Adam with decoupled decay for others.

    A weight of Muon's is a matrix, or as many above each other as :func:`blocks_of` says. Settings of a group are `lr`
    and `weight_decay`; of Muon `momentum`, `nesterov`, `scale` (a key of :data:`SCALES`), `steps` and `coefficients`;
    of Adam `betas` and `eps`. The state has one moment for a matrix, ``momentum_buffer``, and Adam's two.

    Args:
        params: weights, or groups of them, in single or double precision.
        dtype: the precision of Muon's products; None for that of the weights.
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
            for bucket in buckets(same, BUCKET if same[0].is_cuda else ON_PROCESSOR):
                self._step_by_muon(group, bucket)

    def _step_by_muon(self, group: dict[str, Any], weights: list[Tensor]) -> None:
        """Update weights whose matrices have one shape, or that shape turned."""
        (moments,) = self._moments(weights, ("momentum_buffer",))
        gradients = gradients_of(weights)
        torch._foreach_lerp_(moments, gradients, 1 - group["momentum"])
        if group["nesterov"]:
            updates = list(torch._foreach_lerp(gradients, moments, group["momentum"]))
        else:
            updates = moments
        stacked = torch.cat([_lying(_blocks(each, of)) for each, of in zip(updates, weights, strict=True)])
        found = orthogonal(stacked, group["steps"], group["coefficients"], self.dtype)
        torch._foreach_mul_(weights, 1 - group["lr"] * group["weight_decay"])
        sizes = [max(1, blocks_of(weight)) for weight in weights]
        for weight, part in zip(weights, found.split(sizes), strict=True):
            blocks = _blocks(weight)
            scale = SCALES[group["scale"]](*blocks.shape[1:])
            blocks.add_(part if blocks.shape == part.shape else part.mT, alpha=-group["lr"] * scale)

    def _step_by_adam(self, group: dict[str, Any], weights: list[Tensor]) -> None:
        if not weights:
            return
        b1, b2 = group["betas"]
        first_moments, second_moments = self._moments(weights, MOMENTS)
        torch._fused_adamw_(
            weights,
            gradients_of(weights),
            first_moments,
            second_moments,
            [],
            [torch.tensor(float(group["step"]), device=weights[0].device)] * len(weights),
            lr=group["lr"],
            beta1=b1,
            beta2=b2,
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            amsgrad=False,
            maximize=False,
        )


def _blocks(tensor: Tensor, weight: Optional[Tensor] = None) -> Tensor:
    """Return a view, (X, M, N), of a tensor as large as a weight, which has X blocks."""
    return tensor.unflatten(0, (max(1, blocks_of(tensor if weight is None else weight)), -1))


def _lying(x: Tensor) -> Tensor:
    """Return matrices turned so that they have at most as many rows as columns."""
    if x.size(1) > x.size(2):
        return x.mT
    return x


@dataclass
class MuonOptions(AdamOptions):
    """Options of :class:`MuonAndAdam`."""

    adam_lr: Optional[float] = option(None, "Adam's peak rate; default: --lr", bounds=AMOUNT)
    muon_momentum: float = option(0.95, "share of momentum that stays", bounds=PROPORTION)
    muon_no_nesterov: bool = option(False, "without Nesterov's momentum")
    muon_scale: str = option(
        "match_rms_adamw",
        "of updates: that, 0.2 max(rows, columns)^0.5, or original, max(1, rows / columns)^0.5",
        choices=tuple(SCALES),
    )
    muon_precision: str = option(
        "auto",
        "of products; auto: bf16 where fast, or fp32",
        choices=("auto", "fp32", "bf16"),
    )


class MuonAndAdam(AdamLike):
    """Muon and Adam; ``--lr`` and its schedule are Muon's, and Adam's rate keeps its proportion to it."""

    NAME = "muon"
    PREFIX = "adam"

    def made(self, params: list[Tensor]) -> torch.optim.Optimizer:
        """Return :class:`Muon`."""
        cfg = self.cfg
        check(cfg, MuonOptions)
        groups = self.groups_of(params)
        matrices = groups[0]["params"]
        precision = str(cfg.muon_precision)
        if precision == "auto":
            is_fast = precision_on("cuda") == "bf16" if matrices[0].is_cuda else has_bf16()
            precision = "bf16" if is_fast else "fp32"
        logger.info("optimizer: Muon for %d matrices, its products in %s; Adam for the rest", len(matrices), precision)
        dtype = torch.bfloat16 if precision == "bf16" else None
        return Muon(groups, dtype, **self.optimizer_config)

    @property
    def optimizer_config(self) -> dict[str, Any]:
        """Return the options of torch's optimizer."""
        return {
            **super().optimizer_config,
            "momentum": self.cfg.muon_momentum,
            "nesterov": not self.cfg.muon_no_nesterov,
            "scale": str(self.cfg.muon_scale),
        }

    def groups_of(self, params: list[Tensor]) -> list[dict]:
        """Return a group of matrices of sublayers, and one or two of other weights."""
        matrices = [weight for weight in params if blocks_of(weight)]
        if not matrices:
            raise UserError(
                "--optimizer muon: finds no matrices of sublayers; it trains the models of this package, with its own "
                "tasks: give those, or --optimizer fused_adam"
            )
        others = super().groups_of([weight for weight in params if not blocks_of(weight)])
        return [{"params": matrices}, *({**group, "by_muon": False} for group in others)]

    def set_lr(self, lr: float) -> None:
        """Set Muon's rate, and in proportion Adam's."""
        super().set_lr(lr)
        peak = self.optimizer_config["lr"]
        share = 1.0
        if self.cfg.adam_lr is not None and peak:
            share = self.cfg.adam_lr / peak
        for group in self.param_groups[1:]:
            group["lr"] = lr * share
