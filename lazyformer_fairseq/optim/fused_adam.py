"""Optimizer ``fused_adam``: Adam with decoupled weight decay in one fused kernel, by apex or torch.

fairseq's own ``adam`` is fused with apex alone and otherwise loops over the weights in Python.
"""

import ast
import logging
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, List  # noqa: UP035

import torch
from fairseq.dataclass import FairseqDataclass
from fairseq.optim import FairseqOptimizer, register_optimizer
from omegaconf import II

from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.optim import adam_state
from lazyformer_fairseq.reliability.options import option

logger = logging.getLogger(__name__)


@dataclass
class FusedAdamConfig(FairseqDataclass):
    adam_betas: Any = option("(0.9, 0.999)", "decay of the running means, as '(b1, b2)'")
    adam_eps: float = option(1e-6, "epsilon")
    weight_decay: float = option(0.01, "decoupled weight decay")
    no_decay_bias_and_norm: bool = option(
        False, "exempt biases and LayerNorms from weight decay (the paper's code decays everything)"
    )
    lr: List[float] = II("optimization.lr")  # noqa: UP006  omegaconf reads it


@register_optimizer("fused_adam", dataclass=FusedAdamConfig)
class FusedAdam(FairseqOptimizer):
    """Adam in the paper's setting by default (LazyFormer, Table 5)."""

    def __init__(self, cfg: FusedAdamConfig, params):
        super().__init__(cfg)
        params = list(params)
        groups = self._groups(params) if cfg.no_decay_bias_and_norm else [{"params": params}]
        self._optimizer = _fused_adam(groups, self.optimizer_config)

    @staticmethod
    def _groups(params: list[torch.Tensor]) -> list[dict]:
        """Splits into matrices and vectors: the only vectors of this package's modules are biases and LayerNorms."""
        if len(params) == 1 and params[0].dim() == 1:
            raise UserError(
                "--no-decay-bias-and-norm: --fp16 joins all weights to one vector, in which biases cannot be told "
                "apart; add --fp16-no-flatten-grads"
            )
        return [
            {"params": [p for p in params if p.dim() > 1]},
            {"params": [p for p in params if p.dim() <= 1], "weight_decay": 0.0},
        ]

    @property
    def optimizer_config(self) -> dict[str, Any]:
        """Options of the torch optimizer."""
        return {
            "lr": self.cfg.lr[0] if isinstance(self.cfg.lr, Collection) else self.cfg.lr,
            "betas": _betas(self.cfg.adam_betas),
            "eps": self.cfg.adam_eps,
            "weight_decay": self.cfg.weight_decay,
        }

    def load_state_dict(self, state_dict, optimizer_overrides=None) -> None:
        if not self.cfg.no_decay_bias_and_norm:  # which one vector cannot have
            state_dict = adam_state.joined_or_split(state_dict, self._optimizer)
        self._check_fits(state_dict)
        super().load_state_dict(adam_state.fitted(state_dict, self._optimizer), optimizer_overrides)
        if self.cfg.no_decay_bias_and_norm:  # --optimizer-overrides are set on every group
            self._optimizer.param_groups[1]["weight_decay"] = 0.0

    def _check_fits(self, state_dict: dict[str, Any]) -> None:
        """Raises a UserError where a checkpoint's moments are of other weights: torch finds out in the first update."""
        groups = len(self._optimizer.param_groups), len(state_dict["param_groups"])
        if groups[0] != groups[1]:
            raise UserError(
                f"the checkpoint was trained with{'out' if groups[1] == 1 else ''} --no-decay-bias-and-norm: do "
                "the same, or give --reset-optimizer"
            )
        own = [p for group in self._optimizer.param_groups for p in group["params"]]
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
            "--memory-efficient-fp16, --memory-efficient-bf16: --optimizer fused_adam updates weights in single "
            "precision; leave the option out, or give --optimizer adam"
        )

    @property
    def supports_flat_params(self) -> bool:
        return not self.cfg.no_decay_bias_and_norm


def _fused_adam(groups: list[dict], options: dict[str, Any]) -> torch.optim.Optimizer:
    if _are_on_gpu(groups):  # with --cpu they are not, whatever the machine has
        try:
            from apex.optimizers import FusedAdam as ApexFusedAdam

            optimizer = ApexFusedAdam(groups, adam_w_mode=True, **options)
            logger.info("optimizer: apex.optimizers.FusedAdam")
            return optimizer
        except (ImportError, RuntimeError) as error:  # RuntimeError: apex was built without its kernels
            logger.info("optimizer: no apex.optimizers.FusedAdam (%s)", error)
    logger.info("optimizer: torch.optim.AdamW(fused=True)")
    return torch.optim.AdamW(groups, fused=True, **options)


def _are_on_gpu(groups: list[dict]) -> bool:
    return any(weight.is_cuda for group in groups for weight in group["params"])


def _betas(value) -> tuple[float, float]:
    """Two numbers in [0, 1), given as a pair or as text."""
    try:
        first, second = (float(beta) for beta in (ast.literal_eval(value) if isinstance(value, str) else value))
    except (ValueError, TypeError, SyntaxError) as error:
        raise UserError(f"--adam-betas {value!r}: give two numbers, as '(0.9, 0.999)'") from error
    if not (0 <= first < 1 and 0 <= second < 1):
        raise UserError(f"--adam-betas {value!r}: both must lie in [0, 1)")
    return first, second
