"""The optimizers of :mod:`lazyformer_fairseq.training`, by fairseq's names."""

from typing import List  # noqa: UP035

from fairseq.optim import FairseqOptimizer, register_optimizer
from omegaconf import II

from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.fairseq_plugin.models.config import as_fairseq_reads
from lazyformer_fairseq.training import muon, optimizers

RATE = (("lr", List[float], II("optimization.lr")),)  # noqa: UP006  omegaconf reads it
FusedAdamConfig = as_fairseq_reads(optimizers.AdamOptions, "FusedAdamConfig", RATE)
NvLambConfig = as_fairseq_reads(optimizers.LambOptions, "NvLambConfig", RATE)
MuonConfig = as_fairseq_reads(muon.MuonOptions, "MuonConfig", base=FusedAdamConfig)


class AdamLikeOptimizer(FairseqOptimizer):
    """The base of optimizers whose moments are in single precision."""

    @property
    def supports_memory_efficient_fp16(self) -> bool:
        """Refuse ``--memory-efficient-fp16`` (or bf16), which leaves no weights in single precision.

        Raises:
            UserError: always: torch's moments would be in half precision, where (1 - b2) g^2 is soon zero.
        """
        raise UserError(
            f"--memory-efficient-fp16, --memory-efficient-bf16: --optimizer {self.NAME} updates weights in single "
            "precision; leave the option out, or give --optimizer adam"
        )


@register_optimizer("fused_adam", dataclass=FusedAdamConfig)
class FusedAdam(optimizers.FusedAdam, AdamLikeOptimizer):
    """:class:`~lazyformer_fairseq.training.optimizers.FusedAdam` as fairseq's optimizer."""

    @property
    def supports_flat_params(self) -> bool:
        """Return whether FSDP may join the weights to one vector, in which biases cannot be told apart."""
        return not self.cfg.no_decay_bias_and_norm


@register_optimizer("nvlamb", dataclass=NvLambConfig)
class NvLamb(optimizers.NvLamb, AdamLikeOptimizer):
    """:class:`~lazyformer_fairseq.training.optimizers.NvLamb` as fairseq's optimizer."""


@register_optimizer("muon", dataclass=MuonConfig)
class MuonAndAdam(muon.MuonAndAdam, AdamLikeOptimizer):
    """:class:`~lazyformer_fairseq.training.muon.MuonAndAdam` as fairseq's optimizer."""
