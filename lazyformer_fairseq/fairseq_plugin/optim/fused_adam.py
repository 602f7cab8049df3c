"""Optimizer ``fused_adam``: Adam with decoupled weight decay in torch's fused kernel; and what it shares.

fairseq's own ``adam`` is fused with NVIDIA apex alone and otherwise loops over the weights in Python.

Version 0.1.0 took apex's where it was installed. Such a checkpoint counts updates in ``step`` of a group of weights,
torch in ``step`` of each weight; moments have the same names.
"""

import ast
import copy
import logging
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, List  # noqa: UP035

import torch
from fairseq.dataclass import FairseqDataclass
from fairseq.optim import FairseqOptimizer, register_optimizer
from omegaconf import II

from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.fairseq_plugin.reliability.options import option

logger = logging.getLogger(__name__)

LAMBS = ("max_weight_norm", "grad_averaging")  # settings that our Lamb and apex's FusedLAMB alone have
MOMENTS = ("exp_avg", "exp_avg_sq")
SHARED_SETTINGS = ("lr", "betas", "eps", "weight_decay")


class AdamLikeOptimizer(FairseqOptimizer):
    """Biases and LayerNorms may be a group of their own, without decay; moments are in single precision.

    Attributes:
        NAME: the value of ``--optimizer``.
    """

    NAME = ""

    @property
    def rate(self) -> float:
        return self.cfg.lr[0] if isinstance(self.cfg.lr, Collection) else self.cfg.lr

    def groups_of(self, params: list[torch.Tensor]) -> list[dict]:
        """One group, or with ``--no-decay-bias-and-norm`` two: matrices, and vectors.

        The only vectors of this package's modules are biases and LayerNorms.
        """
        if not self.cfg.no_decay_bias_and_norm:
            return [{"params": params}]
        if len(params) == 1 and params[0].dim() == 1:
            raise UserError(
                "--no-decay-bias-and-norm: --fp16 joins all weights to one vector, in which biases cannot be told "
                "apart; add --fp16-no-flatten-grads"
            )
        return [
            {"params": [p for p in params if p.dim() > 1]},
            {"params": [p for p in params if p.dim() <= 1], "weight_decay": 0.0},
        ]

    def load_state_dict(self, state_dict, optimizer_overrides=None) -> None:
        """Loads what the same optimizer saved.

        Raises:
            UserError: it is of another optimizer, of other weights, or of other groups of them.
        """
        if _is_lambs(self.param_groups) != _is_lambs(state_dict["param_groups"]):
            raise UserError(
                f"the checkpoint was not trained with --optimizer {self.NAME}: give the one it was trained with, or "
                "--reset-optimizer"
            )
        self._check_fits(state_dict)
        super().load_state_dict(self.fitted(state_dict), optimizer_overrides)
        if self.cfg.no_decay_bias_and_norm:  # --optimizer-overrides are set on every group
            self.param_groups[1]["weight_decay"] = 0.0

    def fitted(self, saved: dict[str, Any]) -> dict[str, Any]:
        """A checkpoint's state in the layout of this optimizer, of the same weights."""
        raise NotImplementedError

    def _check_fits(self, state_dict: dict[str, Any]) -> None:
        """Raises a UserError where a checkpoint's moments are of other weights: torch finds out in the first update."""
        groups = len(self.param_groups), len(state_dict["param_groups"])
        if groups[0] != groups[1]:
            raise UserError(
                f"the checkpoint was trained with{'out' if groups[1] == 1 else ''} --no-decay-bias-and-norm: do "
                "the same, or give --reset-optimizer"
            )
        own = [p for group in self.param_groups for p in group["params"]]
        saved = [number for group in state_dict["param_groups"] for number in group["params"]]
        moments = [state_dict["state"].get(number, {}).get("exp_avg") for number in saved]
        if len(own) != len(saved) or any(
            moment is not None and moment.numel() != p.numel() for moment, p in zip(moments, own, strict=True)
        ):
            raise UserError(
                "the checkpoint's optimizer state is of other weights than the model's (it has none of positions or "
                "projections that start as copies): give --reset-optimizer"
            )

    @property
    def supports_memory_efficient_fp16(self) -> bool:
        """Asked by fairseq where ``--memory-efficient-fp16`` (or bf16) leaves no weights in single precision.

        Raises:
            UserError: always: torch's moments would be in half precision, where (1 - b2) g^2 is soon zero.
        """
        raise UserError(
            f"--memory-efficient-fp16, --memory-efficient-bf16: --optimizer {self.NAME} updates weights in single "
            "precision; leave the option out, or give --optimizer adam"
        )


def _is_lambs(groups: list[dict]) -> bool:
    return any(name in groups[0] for name in LAMBS)


def betas_of(value: Any, option: str) -> tuple[float, float]:
    """Two numbers in [0, 1), given as a pair or as text, by `option`.

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
class FusedAdamConfig(FairseqDataclass):
    adam_betas: Any = option("(0.9, 0.999)", "decay of the running means, as '(b1, b2)'")
    adam_eps: float = option(1e-6, "epsilon")
    weight_decay: float = option(0.01, "decoupled weight decay")
    no_decay_bias_and_norm: bool = option(False, "exempt biases and LayerNorms from decay; the paper's code decays all")
    lr: List[float] = II("optimization.lr")  # noqa: UP006  omegaconf reads it


@register_optimizer("fused_adam", dataclass=FusedAdamConfig)
class FusedAdam(AdamLikeOptimizer):
    """Adam in the paper's setting by default (LazyFormer, Table 5)."""

    NAME = "fused_adam"

    def __init__(self, cfg: FusedAdamConfig, params):
        super().__init__(cfg)
        logger.info("optimizer: torch.optim.AdamW(fused=True)")
        self._optimizer = torch.optim.AdamW(self.groups_of(list(params)), fused=True, **self.optimizer_config)

    @property
    def optimizer_config(self) -> dict[str, Any]:
        """Options of the torch optimizer."""
        return {
            "lr": self.rate,
            "betas": betas_of(self.cfg.adam_betas, "--adam-betas"),
            "eps": self.cfg.adam_eps,
            "weight_decay": self.cfg.weight_decay,
        }

    def load_state_dict(self, state_dict, optimizer_overrides=None) -> None:
        if not self.cfg.no_decay_bias_and_norm:  # which one vector cannot have
            state_dict = joined_or_split(state_dict, self._optimizer)
        super().load_state_dict(state_dict, optimizer_overrides)

    def fitted(self, saved: dict[str, Any]) -> dict[str, Any]:
        """apex's counts the updates elsewhere."""
        return from_apex(saved, self._optimizer)

    @property
    def supports_flat_params(self) -> bool:
        return not self.cfg.no_decay_bias_and_norm


def from_apex(saved: dict[str, Any], own: torch.optim.Optimizer) -> dict[str, Any]:
    """A checkpoint's state in the layout of torch's AdamW, which is to load it; what is torch's comes back as it is.

    Args:
        saved: what ``state_dict`` of apex's FusedAdam returned, or torch's, with as many groups as `own` has.
    """
    if (
        any("step" in moments for moments in saved["state"].values())
        or "bias_correction" not in saved["param_groups"][0]
    ):
        return saved
    state, groups, updates = dict(saved["state"]), [], 0
    for group, own_group in zip(saved["param_groups"], own.param_groups, strict=True):
        updates = int(group.get("step", 0))
        for number in state.keys() & set(group["params"]):
            state[number] = {**state[number], "step": torch.tensor(float(updates))}
        groups.append({**own_group, **{name: group[name] for name in (*SHARED_SETTINGS, "params")}})
    logger.info("optimizer: the checkpoint's state is apex's FusedAdam's, after %d updates", updates)
    return {**saved, "state": state, "param_groups": groups}


def joined_or_split(saved: dict[str, Any], own: torch.optim.Optimizer) -> dict[str, Any]:
    """A checkpoint's state for as many tensors as the optimizer that is to load it has.

    With ``--fp16`` on a GPU fairseq joins all weights to one vector, elsewhere they stay apart: a run in bf16 may be
    resumed in fp16 on an older GPU, and back. What is of other weights comes back as it is.

    Args:
        saved: what ``state_dict`` of FusedAdam or AdamW returned.
        own: one of them.
    """
    weights = [weight for group in own.param_groups for weight in group["params"]]
    numbers = [number for group in saved["param_groups"] for number in group["params"]]
    moments = [saved["state"][number] for number in numbers if number in saved["state"]]
    sizes = [weight.numel() for weight in weights]
    fewer, more = sorted((len(weights), len(numbers)))
    are_joined = fewer == 1 < more and len(saved["param_groups"]) == 1
    if not are_joined or sum(sizes) != sum(each["exp_avg"].numel() for each in moments):
        return saved
    others = {name: value for name, value in moments[0].items() if name not in MOMENTS}
    if "step" in others:
        counts = {int(each["step"]) for each in moments}  # torch counts those of a weight that had a gradient
        if len(counts) > 1:
            logger.warning("optimizer: weights had %d to %d updates; the most count for all", min(counts), max(counts))
        others["step"] = torch.tensor(float(max(counts)))
    state = [copy.deepcopy(others) for _ in weights]  # torch counts each tensor's updates in place
    for name in MOMENTS:
        vector = torch.cat([each[name].flatten() for each in moments])
        for own_state, weight, part in zip(state, weights, vector.split(sizes), strict=True):
            own_state[name] = part.view(weight.shape)
    group = {**saved["param_groups"][0], "params": list(range(len(weights)))}
    return {**saved, "state": dict(enumerate(state)), "param_groups": [group]}
