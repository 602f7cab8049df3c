"""Optimizer ``fused_adam``: Adam with decoupled weight decay in one fused kernel, by apex or torch.

fairseq's own ``adam`` is fused with apex alone and otherwise loops over the weights in Python.
"""

import logging
from dataclasses import dataclass
from typing import Any, List  # noqa: UP035

import torch
from fairseq.dataclass import FairseqDataclass
from fairseq.optim import register_optimizer
from omegaconf import II

from lazyformer_fairseq.fairseq_plugin.optim import adam_state
from lazyformer_fairseq.fairseq_plugin.optim.adam_like import AdamLikeOptimizer, are_on_gpu, betas_of
from lazyformer_fairseq.fairseq_plugin.reliability.options import option

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
class FusedAdam(AdamLikeOptimizer):
    """Adam in the paper's setting by default (LazyFormer, Table 5)."""

    NAME = "fused_adam"

    def __init__(self, cfg: FusedAdamConfig, params):
        super().__init__(cfg)
        self._optimizer = _fused_adam(self.groups_of(list(params)), self.optimizer_config)

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
            state_dict = adam_state.joined_or_split(state_dict, self._optimizer)
        super().load_state_dict(state_dict, optimizer_overrides)

    def fitted(self, saved: dict[str, Any]) -> dict[str, Any]:
        """apex's and torch's differ."""
        return adam_state.fitted(saved, self._optimizer)

    @property
    def supports_flat_params(self) -> bool:
        return not self.cfg.no_decay_bias_and_norm


def _fused_adam(groups: list[dict], options: dict[str, Any]) -> torch.optim.Optimizer:
    if are_on_gpu(groups):
        try:
            from apex.optimizers import FusedAdam as ApexFusedAdam

            optimizer = ApexFusedAdam(groups, adam_w_mode=True, **options)
            logger.info("optimizer: apex.optimizers.FusedAdam")
            return optimizer
        except (ImportError, RuntimeError) as error:  # RuntimeError: apex was built without its kernels
            logger.info("optimizer: no apex.optimizers.FusedAdam (%s)", error)
    logger.info("optimizer: torch.optim.AdamW(fused=True)")
    return torch.optim.AdamW(groups, fused=True, **options)
