r"""Optimizers ``fused_adam`` and ``nvlamb``.

``fused_adam`` is Adam with decoupled weight decay in torch's fused kernel: fairseq's own ``adam`` is fused with NVIDIA
apex alone and otherwise loops over the weights in Python.

``nvlamb`` is LAMB (You et al., 2019, arXiv 1904.00962) as NVIDIA trains with it. fairseq's own ``lamb`` needs apex,
clips the gradients a second time, to norm 1, and knows no other options.

For each tensor, with its weights w and their gradient g, in update t::

    m = b1 m + (1 - b1) g                      v = b2 v + (1 - b2) g^2
    u = (m / c1) / (sqrt(v / c2) + eps) + decay w      c = 1 - b^t, or 1 without bias correction
    w = w - rate (min(|w|, bound) / |u|) u             the ratio is 1 where |w| or |u| is 0

NVIDIA's two recipes differ in what is optional. BERT's is apex's ``FusedLAMB`` (csrc/multi_tensor_lamb.cu): bias
correction, no bound. Transformer-XL's (DeepLearningExamples, PyTorch/LanguageModeling/Transformer-XL/pytorch/lamb.py):
no bias correction, bound 10; it also adds eps to \|u\|, which is of the size of the square root of the tensor's.

Clipping the gradients by their global norm is the caller's: ``FusedLAMB`` clips to ``max_grad_norm`` itself.
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

# Settings by which a group of weights tells its optimizer: our Lamb's, apex's FusedLAMB's, Muon's; Adam has none.
OWN_SETTINGS = {"max_weight_norm": "lamb", "grad_averaging": "lamb", "by_muon": "muon"}
MOMENTS = ("exp_avg", "exp_avg_sq")


class AdamLike:
    """The base of optimizers by fairseq's names.

    Biases and LayerNorms may be a group of their own, without decay; moments are in single precision.

    Args:
        cfg: the optimizer's options, and beside them `lr`, one or several.
        params: weights.

    Attributes:
        NAME: the value of ``--optimizer``.
        PREFIX: of its own options.
    """

    NAME = PREFIX = ""

    def __init__(self, cfg: Any, params: Iterable[Tensor]):
        self.cfg = cfg
        self._optimizer = self.made(list(params))

    def made(self, params: list[Tensor]) -> torch.optim.Optimizer:
        """Return torch's optimizer of these weights."""
        raise NotImplementedError

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """Return torch's optimizer."""
        return self._optimizer

    @property
    def param_groups(self) -> list[dict]:
        """Return the groups of weights."""
        return self.optimizer.param_groups

    def set_lr(self, lr: float) -> None:
        """Set the rate of all groups."""
        for group in self.param_groups:
            group["lr"] = lr

    def get_lr(self) -> float:
        """Return the rate."""
        return self.param_groups[0]["lr"]

    @property
    def optimizer_config(self) -> dict[str, Any]:
        """Return the options of torch's optimizer."""
        rate = self.cfg.lr
        if isinstance(rate, Sequence):  # fairseq's: of epochs
            rate = rate[0]
        betas = getattr(self.cfg, f"{self.PREFIX}_betas")
        return {
            "lr": rate,
            "betas": betas_of(betas, f"--{self.PREFIX}-betas"),
            "eps": getattr(self.cfg, f"{self.PREFIX}_eps"),
            "weight_decay": self.cfg.weight_decay,
        }

    def groups_of(self, params: list[torch.Tensor]) -> list[dict]:
        """Return one group, or with ``--no-decay-bias-and-norm`` two: matrices, and vectors.

        The only vectors of this package's modules are biases and LayerNorms.
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
        """Load what the same optimizer saved.

        Raises:
            UserError: it is of another optimizer, of other weights, or of other groups of them; or it is damaged.
        """
        if not _holds_moments(state_dict):
            raise UserError("the checkpoint's optimizer state is damaged: it holds no moments; give --reset-optimizer")
        self._refuse_another_optimizers(state_dict)
        self.optimizer.load_state_dict(state_dict)
        for weight, state in self.optimizer.state.items():
            for name, value in state.items():
                if name != "step" and value.shape != weight.shape:
                    raise UserError(
                        f"the checkpoint's optimizer state is damaged: {name} of a weight of shape "
                        f"{tuple(weight.shape)} has the shape {tuple(value.shape)}; give --reset-optimizer"
                    )
        for group in self.param_groups:
            group.update(optimizer_overrides or {})
        if self.cfg.no_decay_bias_and_norm:  # --optimizer-overrides are set on every group
            self.param_groups[-1]["weight_decay"] = 0.0

    def _refuse_another_optimizers(self, state_dict: dict[str, Any]) -> None:
        """Raise a UserError for the state of another optimizer, other groups or other weights.

        torch finds out in the first update.
        """
        saved_groups = state_dict["param_groups"]
        settings, saved_settings = (
            {OWN_SETTINGS[name] for name in OWN_SETTINGS.keys() & groups[0]}
            for groups in (self.param_groups, saved_groups)
        )
        if settings != saved_settings:
            raise UserError(
                f"the checkpoint was not trained with --optimizer {self.NAME}: give the one it was trained with, or "
                "--reset-optimizer"
            )
        if len(self.param_groups) != len(saved_groups):
            had = "with" if len(saved_groups) > len(self.param_groups) else "without"
            raise UserError(
                f"the checkpoint was trained {had} --no-decay-bias-and-norm: do the same, or give --reset-optimizer"
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
                "the checkpoint's optimizer state is of other weights than the model's (it has none of positions or "
                "projections that start as copies): give --reset-optimizer"
            )


def _holds_moments(state_dict: Any) -> bool:
    """Return whether this has the form of an optimizer's state."""
    try:
        for group in state_dict["param_groups"]:
            rates = [group.get(name, 0.0) for name in ("lr", "eps", "weight_decay", "step")]
            numbers = [*rates, *group.get("betas", ())]
            if not isinstance(group["params"], list) or not all(isinstance(n, (int, float, Tensor)) for n in numbers):
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
    """Read two numbers in [0, 1), given as a pair or as text.

    Args:
        value: the pair.
        option: the option whose value it is.

    Raises:
        UserError: they are not.
    """
    try:
        first, second = (float(beta) for beta in (ast.literal_eval(value) if isinstance(value, str) else value))
    except (ValueError, TypeError, SyntaxError) as error:
        raise UserError(f"{option} {value!r}: give two numbers, as '(0.9, 0.999)'") from error
    if not (0 <= first < 1 and 0 <= second < 1):
        raise UserError(f"{option} {value!r}: both must lie in [0, 1)")
    return first, second


@dataclass
class AdamOptions:
    """Options of :class:`FusedAdam`."""

    adam_betas: Any = option("(0.9, 0.999)", "decay of the running means, as '(b1, b2)'", bounds=PROPORTION)
    adam_eps: float = option(1e-6, "epsilon", bounds=AMOUNT)
    weight_decay: float = option(0.01, "decoupled weight decay", bounds=AMOUNT)
    no_decay_bias_and_norm: bool = option(False, "exempt biases and LayerNorms from decay; the paper's code decays all")


class FusedAdam(AdamLike):
    """Adam in the paper's setting by default (LazyFormer, Table 5)."""

    NAME = "fused_adam"
    PREFIX = "adam"

    def made(self, params: list[Tensor]) -> torch.optim.Optimizer:
        """Return torch's AdamW."""
        logger.info("optimizer: torch.optim.AdamW(fused=True)")
        return torch.optim.AdamW(self.groups_of(params), fused=True, **self.optimizer_config)


# A processor works on as many elements at a time. Its cache keeps that many of each of the five tensors, and sums of as
# many squares are exact to 1e-6 in single precision; of 25 million, they are to 1e-3.
PIECE = 2**18
# Elements of which a GPU has the updates in memory at once; more only where one tensor has more.
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


class ByGroups(torch.optim.Optimizer):
    """The base of our optimizers: a subclass steps on a group's weights, whose updates the group's ``step`` counts."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Update all weights that have a gradient."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            self._step_on(group, [weight for weight in group["params"] if weight.grad is not None and weight.numel()])
        return loss

    def _step_on(self, group: dict[str, Any], weights: list[Tensor]) -> None:
        raise NotImplementedError

    def _moments(self, weights: list[Tensor], names: Iterable[str]) -> list[list[Tensor]]:
        """Return the weights' moments of each of these names, zero at first, contiguous."""
        for weight in weights:
            for name in names:
                if name not in self.state[weight]:
                    self.state[weight][name] = torch.zeros_like(weight, memory_format=torch.contiguous_format)
        return [[self.state[weight][name] for weight in weights] for name in names]


class Lamb(ByGroups):
    r"""LAMB with decay in the ratio and a ratio for each tensor. A group's settings are those of the arguments.

    The state has the layout of apex's ``FusedLAMB``: ``step`` of a group, ``exp_avg`` and ``exp_avg_sq`` of a weight.

    Args:
        params: weights, or groups of them, in one precision, single or double.
        lr: the rate.
        betas: decay of both moments.
        eps: added to the root of the second moment.
        weight_decay: the decay within u.
        bias_correction: whether moments are corrected for having started at zero.
        max_weight_norm: the bound of \|w\| in the ratio; 0 for none.
        ratio_without_decay: whether the ratio holds for weights that are not decayed, too: apex's ``use_nvlamb``.
    """

    def __init__(self, params: Iterable[Any], **settings: Any):
        super().__init__(params, {**DEFAULTS, **settings})

    _scratch: Optional[Tensor] = None  # one tensor's update on a processor, kept: new memory costs more than the sums

    def _step_on(self, group: dict[str, Any], weights: list[Tensor]) -> None:
        time = _time_of(group, torch.device("cpu"))
        for weight in weights:
            if not _is_on_gpu(weight):
                self._step_on_processor(group, time, *self._tensors_of(weight))
        for bucket in buckets(filter(_is_on_gpu, weights)):
            _step_on_gpu(group, [self._tensors_of(weight) for weight in bucket])

    def _tensors_of(self, weight: Tensor) -> list[Tensor]:
        """Return the weight, its gradient, its first and second moments; all but the weight contiguous."""
        assert weight.grad is not None
        return [weight, weight.grad.contiguous(), *(moment for (moment,) in self._moments([weight], MOMENTS))]

    def _step_on_processor(self, group: dict[str, Any], time: Tensor, own: Tensor, *tensors: Tensor) -> None:
        weight = own.contiguous()
        update = self._scratch_like(weight)
        flat = [tensor.view(-1) for tensor in (weight, update, *tensors)]
        weight_square = 0.0
        update_square = 0.0
        for w, u, g, m, v in zip(*(tensor.split(PIECE) for tensor in flat), strict=True):
            torch.mul(w, -group["weight_decay"], out=u)
            _subtract_adams_update(group, [time], [u], [g], [m], [v])
            weight_square += torch.dot(w, w).item()
            update_square += torch.dot(u, u).item()
        ratio = _ratio(math.sqrt(weight_square), math.sqrt(update_square), group)
        flat[0].add_(update, alpha=group["lr"] * ratio)
        if weight is not own:
            own.copy_(weight)

    def _scratch_like(self, weight: Tensor) -> Tensor:
        """Return memory of the largest tensor so far, as `weight`; what it holds is undefined."""
        scratch = self._scratch
        if scratch is None or scratch.numel() < weight.numel() or scratch.dtype != weight.dtype:
            self._scratch = scratch = torch.empty(weight.numel(), dtype=weight.dtype)
        return scratch[: weight.numel()]


def _step_on_gpu(group: dict[str, Any], tensors: list[list[Tensor]]) -> None:
    """Update many tensors in a few kernels, and wait once for their norms."""
    own, *others = map(list, zip(*tensors, strict=True))
    weights = [weight.contiguous() for weight in own]
    updates = list(torch._foreach_mul(weights, -group["weight_decay"]))
    times = [_time_of(group, weights[0].device)] * len(weights)
    _subtract_adams_update(group, times, updates, *others)
    norms = torch.stack([*torch._foreach_norm(weights), *torch._foreach_norm(updates)]).tolist()
    pairs = zip(norms[: len(weights)], norms[len(weights) :], strict=True)
    torch._foreach_mul_(updates, [group["lr"] * _ratio(*pair, group) for pair in pairs])
    torch._foreach_add_(weights, updates)
    for each, weight in zip(own, weights, strict=True):
        if weight is not each:
            each.copy_(weight)


def gradients_of(weights: Iterable[Tensor]) -> list[Tensor]:
    """Return the gradients of weights that all have one."""
    return [weight.grad for weight in weights if weight.grad is not None]


def _is_on_gpu(weight: Tensor) -> bool:
    return weight.is_cuda


def buckets(weights: Iterable[Tensor], most: int = BUCKET) -> Iterator[list[Tensor]]:
    """Yield the weights in turn, as many together as have `most` elements; those of a bucket on one device."""
    bucket: list[Tensor] = []
    size = 0
    for weight in weights:
        if bucket and (size + weight.numel() > most or weight.device != bucket[0].device):
            yield bucket
            bucket = []
            size = 0
        bucket.append(weight)
        size += weight.numel()
    if bucket:
        yield bucket


def _time_of(group: dict[str, Any], device: torch.device) -> Tensor:
    """Return t; infinity where there is no bias correction, as after many updates nothing is left to correct."""
    return torch.tensor(group["step"] if group["bias_correction"] else torch.inf, dtype=torch.float32, device=device)


def _subtract_adams_update(
    group: dict[str, Any],
    times: list[Tensor],
    values: list[Tensor],
    gradients: list[Tensor],
    first_moments: list[Tensor],
    second_moments: list[Tensor],
) -> None:
    """Update both moments and subtract Adam's update, at rate 1: torch's fused Adam, one kernel.

    Args:
        group: its settings.
        times: updates made, for each tensor.
        values: the tensors that it is subtracted from.
        gradients: the gradients of the weights.
        first_moments: the running means of the gradients.
        second_moments: the running means of the squared gradients.
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
    """Options of :class:`NvLamb`."""

    lamb_betas: Any = option("(0.9, 0.999)", "decay of the running means, as '(b1, b2)'", bounds=PROPORTION)
    lamb_eps: float = option(1e-6, "epsilon", bounds=AMOUNT)
    weight_decay: float = option(0.01, "decay, within the trust ratio", bounds=AMOUNT)
    no_decay_bias_and_norm: bool = option(False, "exempt biases and LayerNorms from decay, as NVIDIA's BERT does")
    no_ratio_without_decay: bool = option(False, "no trust ratio without decay, as in NVIDIA's BERT")
    no_bias_correction: bool = option(False, "leave the means as they start, as NVIDIA's Transformer-XL does")
    max_weight_norm: float = option(
        0.0,
        "bound of a norm in the trust ratio, 10 in NVIDIA's Transformer-XL; 0: none",
        bounds=AMOUNT,
    )


class NvLamb(AdamLike):
    """LAMB; ``--clip-norm`` alone clips gradients, where apex's ``FusedLAMB`` does it itself, to norm 1."""

    NAME = "nvlamb"
    PREFIX = "lamb"

    def made(self, params: list[Tensor]) -> torch.optim.Optimizer:
        """Return :class:`Lamb`."""
        check(self.cfg, LambOptions)
        logger.info("optimizer: LAMB by the kernels of torch's fused Adam")
        return Lamb(self.groups_of(params), **self.optimizer_config)

    @property
    def optimizer_config(self) -> dict[str, Any]:
        """Return the options of torch's optimizer."""
        return {
            **super().optimizer_config,
            "bias_correction": not self.cfg.no_bias_correction,
            "max_weight_norm": self.cfg.max_weight_norm,
            "ratio_without_decay": not self.cfg.no_ratio_without_decay,
        }
