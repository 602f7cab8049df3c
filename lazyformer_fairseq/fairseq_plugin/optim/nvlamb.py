"""Optimizer ``nvlamb``: LAMB (You et al., 2019, arXiv 1904.00962) as NVIDIA trains with it.

fairseq's own ``lamb`` needs apex, clips the gradients a second time, to norm 1, and knows no other options.

For each tensor, with its weights w and their gradient g, in update t::

    m = b1 m + (1 - b1) g                      v = b2 v + (1 - b2) g^2
    u = (m / c1) / (sqrt(v / c2) + eps) + decay w      c = 1 - b^t, or 1 without bias correction
    w = w - rate (min(|w|, bound) / |u|) u             the ratio is 1 where |w| or |u| is 0

NVIDIA's two recipes differ in what is optional. BERT's is apex's ``FusedLAMB`` (csrc/multi_tensor_lamb.cu): bias
correction, no bound. Transformer-XL's (DeepLearningExamples, PyTorch/LanguageModeling/Transformer-XL/pytorch/lamb.py):
no bias correction, bound 10; it also adds eps to \\|u\\|, which is of the size of the square root of the tensor's.

Clipping the gradients by their global norm is the caller's: ``FusedLAMB`` clips to ``max_grad_norm`` itself.
"""

import logging
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, List, NamedTuple, Optional  # noqa: UP035

import torch
from fairseq.dataclass import FairseqDataclass
from fairseq.optim import register_optimizer
from omegaconf import II
from torch import Tensor

from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.fairseq_plugin.optim.fused_adam import MOMENTS, AdamLikeOptimizer, betas_of
from lazyformer_fairseq.fairseq_plugin.reliability.options import option

logger = logging.getLogger(__name__)

# A processor works on as many elements at a time. Its cache keeps that many of each of the five tensors, and sums of as
# many squares are exact to 1e-6 in single precision; of 25 million, they are to 1e-3.
PIECE = 2**18
# Elements of which a GPU has the updates in memory at once; more only where one tensor has more.
BUCKET = 2**25
DEFAULTS = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-6, "weight_decay": 0.01}
DEFAULTS |= {"bias_correction": True, "max_weight_norm": 0.0, "ratio_without_decay": True}


class Lamb(torch.optim.Optimizer):
    """LAMB with decay in the ratio and a ratio for each tensor. A group's settings are those of the arguments.

    The state has the layout of apex's ``FusedLAMB``: ``step`` of a group, ``exp_avg`` and ``exp_avg_sq`` of a weight.

    Args:
        params: weights, or groups of them, in one precision, single or double.
        lr: the rate.
        betas: decay of both moments.
        eps: added to the root of the second moment.
        weight_decay: the decay within u.
        bias_correction: whether moments are corrected for having started at zero.
        max_weight_norm: the bound of \\|w\\| in the ratio; 0 for none.
        ratio_without_decay: whether the ratio holds for weights that are not decayed, too: apex's ``use_nvlamb``.
    """

    def __init__(self, params: Iterable[Any], **settings: Any):
        super().__init__(params, {**DEFAULTS, **settings})

    _scratch: Optional[Tensor] = None  # one tensor's update on a processor, kept: new memory costs more than the sums

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """One update of all weights that have a gradient."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            weights = [weight for weight in group["params"] if weight.grad is not None and weight.numel()]
            time = _time_of(group, torch.device("cpu"))
            for weight in weights:
                if not _is_on_gpu(weight):
                    self._step_on_processor(group, time, self._tensors_of(weight))
            for bucket in _buckets(filter(_is_on_gpu, weights)):
                _step_on_gpu(group, [self._tensors_of(weight) for weight in bucket])
        return loss

    def _tensors_of(self, weight: Tensor) -> "_Tensors":
        state = self.state[weight]
        if not state:
            for name in MOMENTS:
                state[name] = torch.zeros_like(weight, memory_format=torch.contiguous_format)
        return _Tensors(weight, weight.grad.contiguous(), *(state[name] for name in MOMENTS))

    def _step_on_processor(self, group: dict[str, Any], time: Tensor, tensors: "_Tensors") -> None:
        weight = tensors.weight.contiguous()
        update = self._scratch_like(weight)
        flat = [tensor.view(-1) for tensor in (weight, update, *tensors[1:])]
        squares = [0.0, 0.0]
        for w, u, g, m, v in zip(*(tensor.split(PIECE) for tensor in flat), strict=True):
            torch.mul(w, -group["weight_decay"], out=u)
            _subtract_adams_update(group, [time], [u], [g], [m], [v])
            squares[0] += torch.dot(w, w).item()
            squares[1] += torch.dot(u, u).item()
        flat[0].add_(update, alpha=group["lr"] * _ratio(*map(math.sqrt, squares), group))
        if weight is not tensors.weight:
            tensors.weight.copy_(weight)

    def _scratch_like(self, weight: Tensor) -> Tensor:
        """Memory of the largest tensor so far, as `weight`; what it holds is undefined."""
        scratch = self._scratch
        if scratch is None or scratch.numel() < weight.numel() or scratch.dtype != weight.dtype:
            self._scratch = scratch = torch.empty(weight.numel(), dtype=weight.dtype)
        return scratch[: weight.numel()]


class _Tensors(NamedTuple):
    """A weight and what belongs to it; all but the weight contiguous."""

    weight: Tensor
    gradient: Tensor
    first: Tensor
    second: Tensor


def _step_on_gpu(group: dict[str, Any], tensors: list[_Tensors]) -> None:
    """Of many tensors in a few kernels, and once waiting for their norms."""
    weights = [each.weight.contiguous() for each in tensors]
    updates = torch._foreach_mul(weights, -group["weight_decay"])
    times = [_time_of(group, weights[0].device)] * len(weights)
    _subtract_adams_update(group, times, updates, *map(list, list(zip(*tensors, strict=True))[1:]))
    norms = torch.stack([*torch._foreach_norm(weights), *torch._foreach_norm(updates)]).tolist()
    pairs = zip(norms[: len(weights)], norms[len(weights) :], strict=True)
    torch._foreach_mul_(updates, [group["lr"] * _ratio(*pair, group) for pair in pairs])
    torch._foreach_add_(weights, updates)
    for each, weight in zip(tensors, weights, strict=True):
        if weight is not each.weight:
            each.weight.copy_(weight)


def _is_on_gpu(weight: Tensor) -> bool:
    return weight.is_cuda


def _buckets(weights: Iterable[Tensor]) -> Iterator[list[Tensor]]:
    """The weights in turn, as many together as have BUCKET elements; those of a bucket on one device."""
    bucket, size = [], 0
    for weight in weights:
        if bucket and (size + weight.numel() > BUCKET or weight.device != bucket[0].device):
            yield bucket
            bucket, size = [], 0
        bucket.append(weight)
        size += weight.numel()
    if bucket:
        yield bucket


def _time_of(group: dict[str, Any], device: torch.device) -> Tensor:
    """t, or after infinitely many updates, where nothing is left to correct."""
    return torch.tensor(group["step"] if group["bias_correction"] else torch.inf, dtype=torch.float32, device=device)


def _subtract_adams_update(group: dict[str, Any], times: list[Tensor], *tensors: list[Tensor]) -> None:
    """Updates both moments and subtracts Adam's update, at rate 1: torch's fused Adam, one kernel.

    Args:
        times: updates made, for each tensor.
        tensors: what it is subtracted from, gradients, first and second moments.
    """
    b1, b2 = group["betas"]
    rates = {"lr": 1.0, "beta1": b1, "beta2": b2, "eps": group["eps"], "weight_decay": 0.0}
    torch._fused_adam_(*tensors, [], times, **rates, amsgrad=False, maximize=False)


def _ratio(weight_norm: float, update_norm: float, group: dict[str, Any]) -> float:
    if not group["weight_decay"] and not group["ratio_without_decay"]:
        return 1.0
    if not (weight_norm > 0 and update_norm > 0):
        return 1.0
    return min(weight_norm, group["max_weight_norm"] or math.inf) / update_norm


def fitted(saved: dict[str, Any], own: torch.optim.Optimizer) -> dict[str, Any]:
    """A state that another LAMB saved, for `own` to load: it keeps its settings that the other does not know.

    Ours, apex's ``FusedLAMB`` and pytorch_optimizer's ``Lamb`` count updates in the same place and have moments of the
    same names.
    """
    groups = []
    for group, own_group in zip(saved["param_groups"], own.param_groups, strict=True):
        known = {name: value for name, value in own_group.items() if name not in ("params", "step")}
        shared = {name: value for name, value in group.items() if name in known or name in ("params", "step")}
        groups.append({**known, **shared})
    moments = {number: {name: each[name] for name in MOMENTS} for number, each in saved["state"].items() if each}
    return {**saved, "state": moments, "param_groups": groups}


@dataclass
class NvLambConfig(FairseqDataclass):
    lamb_betas: Any = option("(0.9, 0.999)", "decay of the running means, as '(b1, b2)'")
    lamb_eps: float = option(1e-6, "epsilon")
    weight_decay: float = option(0.01, "decay, within the trust ratio")
    no_decay_bias_and_norm: bool = option(False, "exempt biases and LayerNorms from decay, as NVIDIA's BERT does")
    no_ratio_without_decay: bool = option(False, "no trust ratio without decay, as in NVIDIA's BERT")
    no_bias_correction: bool = option(False, "leave the means as they start, as NVIDIA's Transformer-XL does")
    max_weight_norm: float = option(0.0, "bound of a norm in the trust ratio, 10 in NVIDIA's Transformer-XL; 0: none")
    lr: List[float] = II("optimization.lr")  # noqa: UP006  omegaconf reads it


@register_optimizer("nvlamb", dataclass=NvLambConfig)
class NvLamb(AdamLikeOptimizer):
    """Gradients are clipped by fairseq's ``--clip-norm`` alone: apex's ``FusedLAMB`` does it itself, to norm 1."""

    NAME = "nvlamb"

    def __init__(self, cfg: NvLambConfig, params):
        super().__init__(cfg)
        for name in ("lamb_eps", "weight_decay", "max_weight_norm"):
            if not getattr(cfg, name) >= 0:
                raise UserError(f"--{name.replace('_', '-')} {getattr(cfg, name)}: must be 0 or more")
        logger.info("optimizer: LAMB by the kernels of torch's fused Adam")
        self._optimizer = Lamb(self.groups_of(list(params)), **self.optimizer_config)

    @property
    def optimizer_config(self) -> dict[str, Any]:
        """Options of the torch optimizer."""
        return {
            "lr": self.rate,
            "betas": betas_of(self.cfg.lamb_betas, "--lamb-betas"),
            "eps": self.cfg.lamb_eps,
            "weight_decay": self.cfg.weight_decay,
            "bias_correction": not self.cfg.no_bias_correction,
            "max_weight_norm": self.cfg.max_weight_norm,
            "ratio_without_decay": not self.cfg.no_ratio_without_decay,
        }

    def fitted(self, saved: dict[str, Any]) -> dict[str, Any]:
        """apex's and ours differ in their settings."""
        return fitted(saved, self._optimizer)

    @property
    def supports_flat_params(self) -> bool:
        """False: each tensor has its own ratio."""
        return False
