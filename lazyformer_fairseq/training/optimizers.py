r"""The optimizers ``fused_adam`` and ``nvlamb``.

``fused_adam`` is Adam with decoupled weight decay, computed by torch's fused kernel. fairseq's own ``adam`` is fused
only with NVIDIA apex, and otherwise loops over the weights in Python.

``nvlamb`` is LAMB (You et al., 2019, arXiv 1904.00962) as NVIDIA uses it. fairseq's own ``lamb`` needs apex, clips the
gradients again to norm 1, and has none of the options below.

For a tensor with weights w and gradient g, update t computes::

    m = b1 m + (1 - b1) g                      v = b2 v + (1 - b2) g^2
    u = (m / c1) / (sqrt(v / c2) + eps) + decay w      c = 1 - b^t, or 1 without bias correction
    w = w - rate (min(|w|, bound) / |u|) u             the ratio is 1 where |w| or |u| is 0

NVIDIA's two recipes use different options. BERT uses apex's ``FusedLAMB`` (csrc/multi_tensor_lamb.cu), with bias
correction and without a bound. Transformer-XL (DeepLearningExamples,
PyTorch/LanguageModeling/Transformer-XL/pytorch/lamb.py) uses a bound of 10 and no bias correction; it also adds eps to
\|u\|, which is negligible: \|u\| is about the square root of the tensor's number of elements.

Unlike ``FusedLAMB``, which clips to ``max_grad_norm``, these optimizers leave clipping by the global gradient norm to
the caller.
"""

import ast
import logging
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Optional

import torch
from torch import Tensor

from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.options import AMOUNT, PROPORTION, check, option

logger = logging.getLogger(__name__)

# Parameter-group settings that identify the optimizer: our Lamb, apex's FusedLAMB or Muon. Adam has none of them.
OWN_SETTINGS = {"max_weight_norm": "lamb", "grad_averaging": "lamb", "by_muon": "muon"}
MOMENTS = ("exp_avg", "exp_avg_sq")


class AdamLike:
    """Base class for optimizers with fairseq's interface.

    Biases and LayerNorms can be placed in a separate parameter group without weight decay. Moments are in single
    precision.

    Args:
        cfg: the optimizer's options, and `lr`, which is one learning rate or a sequence of them.
        params: the weights to optimize.

    Attributes:
        NAME: the value of ``--optimizer``.
        PREFIX: the prefix of the option names for betas and epsilon.
    """

    NAME = PREFIX = ""

    def __init__(self, cfg: Any, params: Iterable[Tensor]):
        self.cfg = cfg
        self._optimizer = self.made(list(params))

    def made(self, params: list[Tensor]) -> torch.optim.Optimizer:
        """Build the torch optimizer for these weights."""
        raise NotImplementedError

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """The wrapped torch optimizer."""
        return self._optimizer

    @property
    def param_groups(self) -> list[dict]:
        """The torch optimizer's parameter groups."""
        return self.optimizer.param_groups

    def set_lr(self, lr: float) -> None:
        """Set the learning rate of all parameter groups."""
        for group in self.param_groups:
            group["lr"] = lr

    def get_lr(self) -> float:
        """Return the learning rate of the first parameter group."""
        return self.param_groups[0]["lr"]

    @property
    def optimizer_config(self) -> dict[str, Any]:
        """The torch optimizer's settings."""
        rate = self.cfg.lr
        if isinstance(rate, Sequence):  # fairseq has one learning rate per epoch
            rate = rate[0]
        betas = getattr(self.cfg, f"{self.PREFIX}_betas")
        return {
            "lr": rate,
            "betas": betas_of(betas, f"--{self.PREFIX}-betas"),
            "eps": getattr(self.cfg, f"{self.PREFIX}_eps"),
            "weight_decay": self.cfg.weight_decay,
        }

    def groups_of(self, params: list[torch.Tensor]) -> list[dict]:
        """Return one parameter group or, with ``--no-decay-bias-and-norm``, one group of matrices and one of vectors.

        The only vectors in this package's modules are biases and LayerNorm weights.
        """
        if not self.cfg.no_decay_bias_and_norm:
            return [{"params": params}]
        return [
            {"params": [p for p in params if p.dim() > 1]},
            {"params": [p for p in params if p.dim() <= 1], "weight_decay": 0.0},
        ]

    def load_state_dict(
        self,
        state_dict: dict[str, Any],
        optimizer_overrides: Optional[Mapping[str, Any]] = None,
    ) -> None:
        """Load a state saved by the same optimizer.

        Args:
            state_dict: the saved state.
            optimizer_overrides: settings to override in every parameter group.

        Raises:
            UserError: the state is damaged, or is for a different optimizer, different weights or different parameter
                groups.
        """
        if not _holds_moments(state_dict):
            raise UserError(
                "the checkpoint's optimizer state is damaged: it contains no moments; to start with a new state, pass "
                "--reset-optimizer"
            )
        self._refuse_another_optimizers(state_dict)
        self.optimizer.load_state_dict(state_dict)
        for weight, state in self.optimizer.state.items():
            for name, value in state.items():
                if name != "step" and value.shape != weight.shape:
                    raise UserError(
                        f"the checkpoint's optimizer state is damaged: the {name} of a weight of shape "
                        f"{tuple(weight.shape)} has shape {tuple(value.shape)}; to start with a new state, pass "
                        "--reset-optimizer"
                    )
        for group in self.param_groups:
            group.update(optimizer_overrides or {})
        if self.cfg.no_decay_bias_and_norm:  # --optimizer-overrides may have set weight_decay in every group
            self.param_groups[-1]["weight_decay"] = 0.0

    def _refuse_another_optimizers(self, state_dict: dict[str, Any]) -> None:
        """Raise a UserError if the state is for a different optimizer, different parameter groups or different weights.

        torch itself would fail only at the first update.
        """
        saved_groups = state_dict["param_groups"]
        settings = {OWN_SETTINGS[name] for name in OWN_SETTINGS.keys() & self.param_groups[0]}
        saved_settings = {OWN_SETTINGS[name] for name in OWN_SETTINGS.keys() & saved_groups[0]}
        if settings != saved_settings:
            raise UserError(
                f"the checkpoint was not trained with --optimizer {self.NAME}: use the optimizer that it was trained "
                "with, or pass --reset-optimizer"
            )
        if len(self.param_groups) != len(saved_groups):
            had = "with" if len(saved_groups) > len(self.param_groups) else "without"
            raise UserError(
                f"the checkpoint was trained {had} --no-decay-bias-and-norm: do the same, or pass --reset-optimizer"
            )
        weights = [weight for group in self.param_groups for weight in group["params"]]
        numbers = [number for group in saved_groups for number in group["params"]]
        are_others = len(weights) != len(numbers)
        for weight, number in zip(weights, numbers, strict=False):
            state = state_dict["state"].get(number, {})
            moment = state.get("exp_avg", state.get("momentum_buffer"))
            if moment is not None and moment.numel() != weight.numel():
                are_others = True
        if are_others:
            raise UserError(
                "the checkpoint's optimizer state does not match the model's weights (it has no state for positions "
                "and projections initialized as copies); to start with a new state, pass --reset-optimizer"
            )


def _holds_moments(state_dict: Any) -> bool:
    """Return True if a value has the structure of an optimizer state dict."""
    try:
        for group in state_dict["param_groups"]:
            rates = [group.get(name, 0.0) for name in ("lr", "eps", "weight_decay", "step")]
            numbers = [*rates, *group.get("betas", ())]
            are_numbers = all(isinstance(number, (int, float, Tensor)) for number in numbers)
            if not are_numbers or not isinstance(group["params"], list):
                return False
        for state in state_dict["state"].values():
            moments = {name: value for name, value in state.items() if name != "step"}
            if "momentum_buffer" not in moments and not {*MOMENTS} <= moments.keys():
                return False
            if not all(isinstance(value, Tensor) and value.is_floating_point() for value in moments.values()):
                return False
            if not math.isfinite(float(state.get("step", 0))):
                return False
        return bool(state_dict["param_groups"])
    except (AttributeError, LookupError, RuntimeError, TypeError, ValueError):
        return False


def betas_of(value: Any, option: str) -> tuple[float, float]:
    """Parse two betas in [0, 1) from a pair or a string.

    Args:
        value: the pair or string.
        option: the option's name, for the error message.

    Raises:
        UserError: the value is not a pair of numbers in [0, 1).
    """
    try:
        pair = ast.literal_eval(value) if isinstance(value, str) else value
        first, second = (float(beta) for beta in pair)
    except (ValueError, TypeError, SyntaxError) as error:
        raise UserError(f"{option} {value!r}: must be two numbers, such as '(0.9, 0.999)'") from error
    if not (0 <= first < 1 and 0 <= second < 1):
        raise UserError(f"{option} {value!r}: both must be in [0, 1)")
    return first, second


@dataclass
class AdamOptions:
    """Options for :class:`FusedAdam`."""

    adam_betas: Any = option(
        "(0.9, 0.999)", "Adam's betas, the decay rates of its two moments, as '(b1, b2)'", bounds=PROPORTION
    )
    adam_eps: float = option(1e-6, "Adam's epsilon, added to the square root of the second moment", bounds=AMOUNT)
    weight_decay: float = option(0.01, "decoupled weight decay", bounds=AMOUNT)
    no_decay_bias_and_norm: bool = option(
        False,
        "exempt biases and LayerNorms from weight decay; the LazyFormer paper's code decays all weights",
    )


class FusedAdam(AdamLike):
    """Adam with decoupled weight decay; the defaults come from the LazyFormer paper, Table 5."""

    NAME = "fused_adam"
    PREFIX = "adam"

    def made(self, params: list[Tensor]) -> torch.optim.Optimizer:
        """Build torch's AdamW."""
        logger.info("optimizer: torch.optim.AdamW(fused=True)")
        return torch.optim.AdamW(self.groups_of(params), fused=True, **self.optimizer_config)


# Number of elements processed at once on a CPU. That many elements of each of the five tensors fit into its cache. In
# single precision, the sum of that many squares is accurate to 1e-6, but the sum of 25 million squares only to 1e-3.
CHUNK_SIZE = 2**18
# Maximum number of elements per bucket on a GPU, where all of a bucket's updates are in memory at once. A tensor with
# more elements gets a separate bucket.
BUCKET = 2**25
DEFAULTS = {
    "lr": 1e-3,
    "betas": (0.9, 0.999),
    "eps": 1e-6,
    "weight_decay": 0.01,
    "bias_correction": True,
    "max_weight_norm": 0.0,
    "ratio_without_decay": True,
}


class GroupwiseOptimizer(torch.optim.Optimizer):
    """Base class for torch optimizers that process parameter groups one by one.

    The number of updates is stored in each group under ``step``.
    """

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Update all weights that have a gradient."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            weights = [weight for weight in group["params"] if weight.grad is not None and weight.numel()]
            self._step_on(group, weights)
        return loss

    def _step_on(self, group: dict[str, Any], weights: list[Tensor]) -> None:
        raise NotImplementedError

    def _moments(self, weights: list[Tensor], names: Iterable[str]) -> list[list[Tensor]]:
        """Return, for each name, the weights' moments; missing moments are initialized to contiguous zeros."""
        for weight in weights:
            state = self.state[weight]
            for name in names:
                if name not in state:
                    state[name] = torch.zeros_like(weight, memory_format=torch.contiguous_format)
        return [[self.state[weight][name] for weight in weights] for name in names]


class Lamb(GroupwiseOptimizer):
    r"""LAMB with a per-tensor trust ratio that includes the weight decay; see the module docstring for the formulas.

    The state has the same layout as in apex's ``FusedLAMB``: ``step`` per parameter group, and ``exp_avg`` and
    ``exp_avg_sq`` per weight.

    Args:
        params: weights or parameter groups, all in single or all in double precision. A group may override any of the
            settings below.
        lr: the learning rate.
        betas: the decay rates of the two moments.
        eps: added to the square root of the second moment.
        weight_decay: the weight decay, applied within u.
        bias_correction: whether to correct the moments for being initialized to zero.
        max_weight_norm: the bound on \|w\| in the ratio; 0 for no bound.
        ratio_without_decay: whether to apply the ratio to weights without decay as well, like apex's ``use_nvlamb``.
    """

    def __init__(self, params: Iterable[Any], **settings: Any):
        super().__init__(params, {**DEFAULTS, **settings})

    _scratch: Optional[Tensor] = None  # a reused buffer for CPU updates: allocation costs more than the arithmetic

    def _step_on(self, group: dict[str, Any], weights: list[Tensor]) -> None:
        time = _time_of(group, torch.device("cpu"))
        for weight in weights:
            if not _is_on_gpu(weight):
                self._step_on_processor(group, time, *self._tensors_of(weight))
        for bucket in buckets(filter(_is_on_gpu, weights)):
            _step_on_gpu(group, [self._tensors_of(weight) for weight in bucket])

    def _tensors_of(self, weight: Tensor) -> list[Tensor]:
        """Return a weight, its gradient and its two moments; all but the weight are contiguous."""
        assert weight.grad is not None
        (first_moment,), (second_moment,) = self._moments([weight], MOMENTS)
        return [weight, weight.grad.contiguous(), first_moment, second_moment]

    def _step_on_processor(self, group: dict[str, Any], time: Tensor, own: Tensor, *tensors: Tensor) -> None:
        weight = own.contiguous()
        update = self._scratch_like(weight)
        flat = [tensor.view(-1) for tensor in (weight, update, *tensors)]
        weight_square = 0.0
        update_square = 0.0
        chunks = [tensor.split(CHUNK_SIZE) for tensor in flat]
        for w, u, g, m, v in zip(*chunks, strict=True):
            torch.mul(w, -group["weight_decay"], out=u)
            _subtract_adams_update(group, [time], [u], [g], [m], [v])
            weight_square += torch.dot(w, w).item()
            update_square += torch.dot(u, u).item()
        ratio = _ratio(math.sqrt(weight_square), math.sqrt(update_square), group)
        flat[0].add_(update, alpha=group["lr"] * ratio)
        if weight is not own:
            own.copy_(weight)

    def _scratch_like(self, weight: Tensor) -> Tensor:
        """Return an uninitialized flat buffer with the size and precision of `weight`; the memory is reused."""
        scratch = self._scratch
        if scratch is None or scratch.numel() < weight.numel() or scratch.dtype != weight.dtype:
            self._scratch = scratch = torch.empty(weight.numel(), dtype=weight.dtype)
        return scratch[: weight.numel()]


def _step_on_gpu(group: dict[str, Any], tensors: list[list[Tensor]]) -> None:
    """Update many tensors with a few kernels and a single synchronization, which copies the norms to the CPU."""
    own, *others = map(list, zip(*tensors, strict=True))
    weights = [weight.contiguous() for weight in own]
    updates = list(torch._foreach_mul(weights, -group["weight_decay"]))
    times = [_time_of(group, weights[0].device)] * len(weights)
    _subtract_adams_update(group, times, updates, *others)

    norms = [*torch._foreach_norm(weights), *torch._foreach_norm(updates)]
    numbers = torch.stack(norms).tolist()
    pairs = zip(numbers[: len(weights)], numbers[len(weights) :], strict=True)
    rates = [group["lr"] * _ratio(weight_norm, update_norm, group) for weight_norm, update_norm in pairs]

    torch._foreach_mul_(updates, rates)
    torch._foreach_add_(weights, updates)
    for each, weight in zip(own, weights, strict=True):
        if weight is not each:
            each.copy_(weight)


def gradients_of(weights: Iterable[Tensor]) -> list[Tensor]:
    """Return the weights' gradients; every weight must have one."""
    return [weight.grad for weight in weights if weight.grad is not None]


def _is_on_gpu(weight: Tensor) -> bool:
    return weight.is_cuda


def buckets(weights: Iterable[Tensor], most: int = BUCKET) -> Iterator[list[Tensor]]:
    """Yield the weights in order, grouped into buckets on the same device.

    Args:
        weights: the weights.
        most: the maximum number of elements per bucket, exceeded only by a single weight that is larger.
    """
    bucket: list[Tensor] = []
    size = 0
    for weight in weights:
        is_too_large = size + weight.numel() > most
        if bucket and (is_too_large or weight.device != bucket[0].device):
            yield bucket
            bucket = []
            size = 0
        bucket.append(weight)
        size += weight.numel()
    if bucket:
        yield bucket


def _time_of(group: dict[str, Any], device: torch.device) -> Tensor:
    """Return the update number t, or infinity to disable bias correction, which vanishes as t grows."""
    time = group["step"] if group["bias_correction"] else torch.inf
    return torch.tensor(time, dtype=torch.float32, device=device)


def _subtract_adams_update(
    group: dict[str, Any],
    times: list[Tensor],
    values: list[Tensor],
    gradients: list[Tensor],
    first_moments: list[Tensor],
    second_moments: list[Tensor],
) -> None:
    """Update both moments and subtract Adam's update at learning rate 1, all in torch's fused Adam kernel.

    Args:
        group: the settings of the parameter group.
        times: the number of completed updates, per tensor.
        values: the tensors to subtract the update from, in place.
        gradients: the gradients of the weights.
        first_moments: the running averages of the gradients, updated in place.
        second_moments: the running averages of the squared gradients, updated in place.
    """
    b1, b2 = group["betas"]
    torch._fused_adam_(
        values,
        gradients,
        first_moments,
        second_moments,
        [],
        times,
        lr=1.0,
        beta1=b1,
        beta2=b2,
        weight_decay=0.0,
        eps=group["eps"],
        amsgrad=False,
        maximize=False,
    )


def _ratio(weight_norm: float, update_norm: float, group: dict[str, Any]) -> float:
    has_ratio = group["weight_decay"] or group["ratio_without_decay"]
    if not (has_ratio and weight_norm > 0 and update_norm > 0):
        return 1.0
    return min(weight_norm, group["max_weight_norm"] or math.inf) / update_norm


@dataclass
class LambOptions:
    """Options for :class:`NvLamb`."""

    lamb_betas: Any = option(
        "(0.9, 0.999)", "LAMB's betas, the decay rates of its two moments, as '(b1, b2)'", bounds=PROPORTION
    )
    lamb_eps: float = option(1e-6, "LAMB's epsilon, added to the square root of the second moment", bounds=AMOUNT)
    weight_decay: float = option(0.01, "weight decay, applied within the trust ratio", bounds=AMOUNT)
    no_decay_bias_and_norm: bool = option(
        False,
        "exempt biases and LayerNorms from weight decay, as NVIDIA's BERT does",
    )
    no_ratio_without_decay: bool = option(
        False,
        "apply the trust ratio only to weights with decay, as NVIDIA's BERT does",
    )
    no_bias_correction: bool = option(
        False,
        "do not correct the moments for being initialized to zero, as in NVIDIA's Transformer-XL",
    )
    max_weight_norm: float = option(
        0.0,
        "upper bound on the weight norm in the trust ratio (10 in NVIDIA's Transformer-XL); 0: no bound",
        bounds=AMOUNT,
    )


class NvLamb(AdamLike):
    """LAMB without built-in gradient clipping; use ``--clip-norm``. apex's ``FusedLAMB`` always clips to norm 1."""

    NAME = "nvlamb"
    PREFIX = "lamb"

    def made(self, params: list[Tensor]) -> torch.optim.Optimizer:
        """Build a :class:`Lamb` for these weights."""
        check(self.cfg, LambOptions)
        logger.info("optimizer: LAMB with torch's fused Adam kernels")
        return Lamb(self.groups_of(params), **self.optimizer_config)

    @property
    def optimizer_config(self) -> dict[str, Any]:
        """The torch optimizer's settings."""
        return {
            **super().optimizer_config,
            "bias_correction": not self.cfg.no_bias_correction,
            "max_weight_norm": self.cfg.max_weight_norm,
            "ratio_without_decay": not self.cfg.no_ratio_without_decay,
        }
