"""The optimizers of :mod:`lazyformer_fairseq.training`, registered with fairseq."""

from typing import List  # noqa: UP035

from fairseq.optim import FairseqOptimizer, register_optimizer
from omegaconf import II

from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.fairseq_plugin.models.config import to_fairseq_dataclass
from lazyformer_fairseq.training import muon, optimizers

RATE = (("lr", List[float], II("optimization.lr")),)  # noqa: UP006  omegaconf reads the annotation
FusedAdamConfig = to_fairseq_dataclass(optimizers.AdamOptions, "FusedAdamConfig", RATE)
NvLambConfig = to_fairseq_dataclass(optimizers.LambOptions, "NvLambConfig", RATE)
MuonConfig = to_fairseq_dataclass(muon.MuonOptions, "MuonConfig", base=FusedAdamConfig)


class AdamLikeOptimizer(FairseqOptimizer):
    """The base class of our fairseq optimizers, which keep their moments in single precision."""

    @property
    def supports_memory_efficient_fp16(self) -> bool:
        """Reject ``--memory-efficient-fp16`` and ``--memory-efficient-bf16``.

        Without single-precision weights, torch's moments would be in half precision, and (1 - b2) g^2 would soon
        underflow to zero.

        Raises:
            UserError: always.
        """
        raise UserError(
            f"--memory-efficient-fp16, --memory-efficient-bf16: --optimizer {self.NAME} requires single-precision "
            "weights; omit the option, or use --optimizer adam"
        )


@register_optimizer("fused_adam", dataclass=FusedAdamConfig)
class FusedAdam(optimizers.FusedAdam, AdamLikeOptimizer):
    """:class:`~lazyformer_fairseq.training.optimizers.FusedAdam` as a fairseq optimizer."""

    @property
    def supports_flat_params(self) -> bool:
        """True if FSDP may flatten the weights into one vector, where biases cannot be exempted from decay."""
        return not self.cfg.no_decay_bias_and_norm


@register_optimizer("nvlamb", dataclass=NvLambConfig)
class NvLamb(optimizers.NvLamb, AdamLikeOptimizer):
    """:class:`~lazyformer_fairseq.training.optimizers.NvLamb` as a fairseq optimizer."""


@register_optimizer("muon", dataclass=MuonConfig)
class MuonAndAdam(muon.MuonAndAdam, AdamLikeOptimizer):
    """:class:`~lazyformer_fairseq.training.muon.MuonAndAdam` as a fairseq optimizer."""
