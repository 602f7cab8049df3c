"""Optimizer ``nvlamb``: LAMB as NVIDIA trains with it, by apex or by torch; :mod:`.lamb` has the equations.

fairseq's own ``lamb`` needs apex, clips the gradients a second time, to norm 1, and knows no other options.
"""

import logging
from dataclasses import dataclass
from typing import Any, List  # noqa: UP035

import torch
from fairseq.dataclass import FairseqDataclass
from fairseq.optim import register_optimizer
from omegaconf import II

from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.fairseq_plugin.optim import lamb
from lazyformer_fairseq.fairseq_plugin.optim.adam_like import AdamLikeOptimizer, are_on_gpu, betas_of
from lazyformer_fairseq.fairseq_plugin.reliability.options import option

logger = logging.getLogger(__name__)


@dataclass
class NvLambConfig(FairseqDataclass):
    lamb_betas: Any = option("(0.9, 0.999)", "decay of the running means, as '(b1, b2)'")
    lamb_eps: float = option(1e-6, "epsilon")
    weight_decay: float = option(0.01, "decay, within the trust ratio")
    no_decay_bias_and_norm: bool = option(
        False, "exempt biases and LayerNorms from weight decay, as NVIDIA's BERT does"
    )
    no_ratio_without_decay: bool = option(
        False, "weights without decay take the rate as it is, without a trust ratio, as NVIDIA's BERT does"
    )
    no_bias_correction: bool = option(
        False, "leave the running means as they start, at zero, as NVIDIA's Transformer-XL does"
    )
    max_weight_norm: float = option(
        0.0, "bound of a tensor's norm in its trust ratio, 10 in NVIDIA's Transformer-XL; 0 for none"
    )
    lr: List[float] = II("optimization.lr")  # noqa: UP006  omegaconf reads it


@register_optimizer("nvlamb", dataclass=NvLambConfig)
class NvLamb(AdamLikeOptimizer):
    """Gradients are clipped by fairseq's ``--clip-norm`` alone: apex's ``FusedLAMB`` does it itself, to norm 1."""

    NAME = "nvlamb"

    def __init__(self, cfg: NvLambConfig, params):
        super().__init__(cfg)
        _refuse_impossible(cfg)
        self._optimizer = _lamb(self.groups_of(list(params)), self.optimizer_config)

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
        return lamb.fitted(saved, self._optimizer)

    @property
    def supports_flat_params(self) -> bool:
        """False: each tensor has its own ratio."""
        return False


def _refuse_impossible(cfg: NvLambConfig) -> None:
    """Raises a UserError for a number that means nothing."""
    for name in ("lamb_eps", "weight_decay", "max_weight_norm"):
        if not getattr(cfg, name) >= 0:
            raise UserError(f"--{name.replace('_', '-')} {getattr(cfg, name)}: must be 0 or more")


def _lamb(groups: list[dict], options: dict[str, Any]) -> torch.optim.Optimizer:
    if are_on_gpu(groups) and not options["max_weight_norm"]:  # which apex has not
        try:
            from apex.optimizers import FusedLAMB

            others = {name: options[name] for name in ("lr", "betas", "eps", "weight_decay", "bias_correction")}
            optimizer = FusedLAMB(
                groups, adam_w_mode=True, max_grad_norm=torch.inf, use_nvlamb=options["ratio_without_decay"], **others
            )
            logger.info("optimizer: apex.optimizers.FusedLAMB")
            return optimizer
        except (ImportError, RuntimeError) as error:  # RuntimeError: apex was built without its kernels
            logger.info("optimizer: no apex.optimizers.FusedLAMB (%s)", error)
    logger.info("optimizer: LAMB by the kernels of torch's fused Adam")
    return lamb.Lamb(groups, **options)


def keeping_tensors_apart(build_optimizer, cls, cfg, params, **kwargs):
    """``FP16Optimizer.build_optimizer``: of one vector of all weights ``nvlamb`` could not tell the tensors."""
    if cfg.optimizer._name == NvLamb.NAME:
        cfg.common.fp16_no_flatten_grads = True
    return build_optimizer(cls, cfg, params, **kwargs)
