"""What ``fused_adam`` and ``nvlamb`` have in common: two moments of each weight, and the settings of both."""

import ast
from collections.abc import Collection
from typing import Any

import torch
from fairseq.optim import FairseqOptimizer

from lazyformer_fairseq.errors import UserError

LAMBS = ("max_weight_norm", "grad_averaging")  # settings that our Lamb and apex's FusedLAMB alone have


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


def are_on_gpu(groups: list[dict]) -> bool:
    """Where apex's kernels are; with --cpu they are not, whatever the machine has."""
    return any(weight.is_cuda for group in groups for weight in group["params"])


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
