"""The fairseq criterions ``causal_lm``, ``masked_lm_accuracy`` and ``continued_masked_lm``.

All of them compute the cross-entropy of the next or the masked tokens. For models with learned attention spans
(``s[span=...]``), the training loss per token also includes a penalty: each sublayer's ``span_loss`` coefficient times
the mean span of its heads. The logged loss is the cross-entropy alone and therefore comparable across models. The
penalty is logged as ``span_loss``, and the mean span over heads and sublayers as ``span``.

``continued_masked_lm`` is for models initialized from the weights of another model. It can also distill a teacher
(``--distill``).
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Optional

from fairseq import utils
from fairseq.criterions import FairseqCriterion, register_criterion
from fairseq.dataclass import FairseqDataclass
from fairseq.logging import metrics
from torch import Tensor

from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.fairseq_plugin.reliability.options import option
from lazyformer_fairseq.modules import losses
from lazyformer_fairseq.training.distillation import Distillation, load_teacher
from lazyformer_fairseq.training.objectives.interface import Objective, Scalar, in_bits, mean_per_prediction, total
from lazyformer_fairseq.training.objectives.masked_lm import MaskedLMObjective
from lazyformer_fairseq.training.objectives.stream_lm import StreamLMObjective


@register_criterion("causal_lm", dataclass=FairseqDataclass)
class CausalLMCriterion(FairseqCriterion):
    """The fairseq criterion for :class:`~lazyformer_fairseq.training.objectives.stream_lm.StreamLMObjective`."""

    OBJECTIVE: ClassVar[type[Objective]] = StreamLMObjective

    def forward(self, model, sample: dict, reduce: bool = True) -> tuple[Tensor, Tensor, dict]:
        """Compute the loss of one batch.

        Returns:
            The summed loss in nats, including the span penalty; the number of predicted tokens, which normalizes the
            gradient; and the values to log.
        """
        return losses.causal_lm(model, sample, self.padding_idx)

    @classmethod
    def reduce_metrics(cls, logging_outputs: list[dict]) -> None:
        """Log the perplexity and the objective's scalars, aggregated over all processes."""
        log_scalars(cls.OBJECTIVE.scalars(logging_outputs))
        metrics.log_derived("ppl", lambda meters: utils.get_perplexity(meters["loss"].avg))

    @staticmethod
    def logging_outputs_can_be_summed() -> bool:
        """Return True, because all logged values are sums."""
        return True


@register_criterion("masked_lm_accuracy", dataclass=FairseqDataclass)
class MaskedLMAccuracyCriterion(CausalLMCriterion):
    """The fairseq criterion for :class:`~lazyformer_fairseq.training.objectives.masked_lm.MaskedLMObjective`.

    It can also train fairseq's own masked language models, such as ``roberta_base``.
    """

    OBJECTIVE = MaskedLMObjective

    def forward(self, model, sample: dict, reduce: bool = True) -> tuple[Tensor, int, dict]:
        """Compute the loss of one batch on its masked tokens."""
        return losses.masked_lm(model, sample, self.padding_idx)


def log_scalars(scalars: Mapping[str, Scalar]) -> None:
    """Log scalars to fairseq's meters."""
    for name, scalar in scalars.items():
        metrics.log_scalar(name, scalar.value, scalar.weight, round=scalar.digits)


@dataclass
class ContinuedMaskedLMConfig(FairseqDataclass):
    """Options of :class:`ContinuedMaskedLMCriterion`."""

    distill: Optional[str] = option(None, "teacher to distill from: a checkpoint, or a folder that contains one")
    distill_temperature: float = option(2.0, "temperature of the teacher's and the model's token distributions")
    distill_masked_lm_weight: float = option(1.0, "weight of the masked-LM loss when distilling")
    distill_words_weight: float = option(
        1.0,
        "weight of the KL divergence from the teacher's token distribution at the masked positions",
    )
    distill_attention_weight: float = option(
        1.0,
        "weight of the KL divergence from the teacher's last attention distribution, averaged over queries",
    )


@register_criterion("continued_masked_lm", dataclass=ContinuedMaskedLMConfig)
class ContinuedMaskedLMCriterion(MaskedLMAccuracyCriterion):
    """The fairseq criterion for :class:`~lazyformer_fairseq.training.distillation.Distillation`.

    Validation reports the masked-LM loss alone.

    Raises:
        UserError: an option is out of range, a file is missing or damaged, or the teacher has a different dictionary.
    """

    def __init__(self, cfg: ContinuedMaskedLMConfig, task):
        super().__init__(task)
        for name in ("distill_masked_lm_weight", "distill_words_weight", "distill_attention_weight"):
            if not 0 <= (value := getattr(cfg, name)) < math.inf:
                raise UserError(f"--{name.replace('_', '-')} {value:g}: must be 0 or more")
        if not 0 < cfg.distill_temperature < math.inf:
            raise UserError(f"--distill-temperature {cfg.distill_temperature:g}: must be more than 0")
        self.distillation: Optional[Distillation] = None
        if cfg.distill is not None:
            self.distillation = Distillation(
                load_teacher(cfg.distill, task.source_dictionary),
                temperature=cfg.distill_temperature,
                masked_lm_weight=cfg.distill_masked_lm_weight,
                words_weight=cfg.distill_words_weight,
                attention_weight=cfg.distill_attention_weight,
            )

    def forward(self, model, sample: dict, reduce: bool = True) -> tuple[Tensor, int, dict]:
        """Compute the loss of one batch; during training it includes the KL divergences from the teacher."""
        if not self.training or self.distillation is None:
            return super().forward(model, sample, reduce)
        return self.distillation.loss(model, sample, self.padding_idx)

    @classmethod
    def reduce_metrics(cls, logging_outputs: list[dict]) -> None:
        """Log the masked-LM metrics and both KL divergences from the teacher, in bits."""
        super().reduce_metrics(logging_outputs)
        predictions = total(logging_outputs, "sample_size")
        for name in ("words_kl", "attention_kl"):
            if name in logging_outputs[0]:
                log_scalars({name: Scalar(in_bits(mean_per_prediction(logging_outputs, name)), predictions)})
