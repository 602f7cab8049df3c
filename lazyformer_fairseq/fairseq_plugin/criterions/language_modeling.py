"""Criterions ``causal_lm``, ``masked_lm_accuracy`` and ``continued_masked_lm``: cross-entropy of next or masked tokens.

Models that learn their spans (``s[span=...]``) pay for these: the gradient is that of the cross-entropy of a token plus
each sublayer's ``span_loss`` times the mean span of its heads. The logged loss is the cross-entropy alone, so that it
compares with other models'; ``span_loss`` is logged beside it, and ``span``, the mean over heads and sublayers.

``continued_masked_lm`` is for a model that was made from another one, the original. It can learn from the original
(``--distill``): words that it finds likely, and where it looks. The original is there in training alone: checkpoints
hold the new model and nothing else, validation measures that one, and a resumed run loads the original again.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Optional

import torch
from fairseq import utils
from fairseq.criterions import FairseqCriterion, register_criterion
from fairseq.dataclass import FairseqDataclass
from fairseq.logging import metrics
from fairseq.tasks import FairseqTask
from torch import Tensor, nn
from torch.nn import functional as F

from lazyformer_fairseq.arguments import checkpoint_at
from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.evaluation import loading
from lazyformer_fairseq.fairseq_plugin.reliability.checkpoints import load_safely
from lazyformer_fairseq.fairseq_plugin.reliability.options import option
from lazyformer_fairseq.modules import losses
from lazyformer_fairseq.modules.attention.back_ends import StoredDistribution
from lazyformer_fairseq.modules.networks.encoder import Encoder
from lazyformer_fairseq.modules.networks.stack import Stack
from lazyformer_fairseq.patterns.kinds import DISTRIBUTION
from lazyformer_fairseq.training.objectives.interface import Objective, Scalar, in_bits, mean_per_prediction, total
from lazyformer_fairseq.training.objectives.masked_lm import MaskedLMObjective
from lazyformer_fairseq.training.objectives.stream_lm import StreamLMObjective


@register_criterion("causal_lm", dataclass=FairseqDataclass)
class CausalLMCriterion(FairseqCriterion):
    """fairseq's criterion for :class:`~lazyformer_fairseq.training.objectives.stream_lm.StreamLMObjective`."""

    OBJECTIVE: ClassVar[type[Objective]] = StreamLMObjective

    def forward(self, model, sample: dict, reduce: bool = True) -> tuple[Tensor, Tensor, dict]:
        """Compute the loss of one batch.

        Returns:
            The summed loss in nats, spans included, the number of predicted tokens (the gradient's denominator),
            and what to log.
        """
        return losses.causal_lm(model, sample, self.padding_idx)

    @classmethod
    def reduce_metrics(cls, logging_outputs: list[dict]) -> None:
        """Log the objective's scalars over all processes, and the perplexity."""
        log_scalars(cls.OBJECTIVE.scalars(logging_outputs))
        metrics.log_derived("ppl", lambda meters: utils.get_perplexity(meters["loss"].avg))

    @staticmethod
    def logging_outputs_can_be_summed() -> bool:
        """Return True, as all that is logged is sums."""
        return True


@register_criterion("masked_lm_accuracy", dataclass=FairseqDataclass)
class MaskedLMAccuracyCriterion(CausalLMCriterion):
    """fairseq's criterion for :class:`~lazyformer_fairseq.training.objectives.masked_lm.MaskedLMObjective`.

    fairseq's own masked language models, such as ``roberta_base``, can be trained with it too.
    """

    OBJECTIVE = MaskedLMObjective

    def forward(self, model, sample: dict, reduce: bool = True) -> tuple[Tensor, int, dict]:
        """Compute the loss of one batch; the number of predicted tokens is that of the masked ones."""
        return losses.masked_lm(model, sample, self.padding_idx)


def log_scalars(scalars: Mapping[str, Scalar]) -> None:
    """Give scalars to fairseq's meters."""
    for name, scalar in scalars.items():
        metrics.log_scalar(name, scalar.value, scalar.weight, round=scalar.digits)


LEAST = 1e-9  # of a student's probability, where it cannot look
_ADVICE = "give --distill-attention-weight 0"


@dataclass
class ContinuedMaskedLMConfig(FairseqDataclass):
    """Options of :class:`ContinuedMaskedLMCriterion`."""

    distill: Optional[str] = option(None, "a teacher: a checkpoint, or a folder with one")
    distill_temperature: float = option(2.0, "of the words' distributions, teacher's and model's")
    distill_masked_lm_weight: float = option(1.0, "of the masked words themselves, beside the teacher")
    distill_words_weight: float = option(1.0, "of the teacher's distribution over words, at the masked positions")
    distill_attention_weight: float = option(1.0, "of its last attention: a query counts as a masked word does")


@register_criterion("continued_masked_lm", dataclass=ContinuedMaskedLMConfig)
class ContinuedMaskedLMCriterion(MaskedLMAccuracyCriterion):
    """Masked LM, with terms of a teacher: the gradient is of all, weighted; the logged loss is of masked words alone.

    Raises:
        UserError: a number is out of range, a file is missing or damaged, or the original has another dictionary.
    """

    def __init__(self, cfg: ContinuedMaskedLMConfig, task):
        super().__init__(task)
        for name in ("distill_masked_lm_weight", "distill_words_weight", "distill_attention_weight"):
            if not 0 <= (value := getattr(cfg, name)) < math.inf:
                raise UserError(f"--{name.replace('_', '-')} {value:g}: must be 0 or more")
        if not 0 < cfg.distill_temperature < math.inf:
            raise UserError(f"--distill-temperature {cfg.distill_temperature:g}: must be more than 0")
        self.cfg = cfg
        # In a plain container, so that neither the optimizer nor a checkpoint finds this model.
        self.teacher = () if cfg.distill is None else (load_original(cfg.distill, task),)
        self.networks: tuple[Stack, ...] = ()  # the student's, then the teacher's

    def forward(self, model, sample: dict, reduce: bool = True) -> tuple[Tensor, Any, dict]:
        """Compute the loss of one batch, in training with a teacher's terms."""
        if not self.training or not self.teacher:
            return super().forward(model, sample, reduce)
        if not self.networks:  # puts the teacher where the model is
            (teacher,) = self.teacher
            weight = next(model.parameters())
            teacher.to(device=weight.device, dtype=weight.dtype)
            self.networks = (losses.network_of(model), losses.network_of(teacher))
        cfg = self.cfg
        positions = losses.positions_of(sample, self.padding_idx)
        wants_attention = cfg.distill_attention_weight > 0
        given = {**sample["net_input"], "masked_tokens": positions, "return_all_hiddens": wants_attention}
        logits, extra = model(**given)
        with torch.no_grad():
            teachers_logits, teachers_extra = self.teacher[0](**given)
        masked_lm, to_log = losses.score_masked(model, sample, positions, logits)
        words = words_kl(logits, teachers_logits, cfg.distill_temperature)
        loss = cfg.distill_masked_lm_weight * masked_lm + cfg.distill_words_weight * words
        to_log["words_kl"] = words.detach()
        if wants_attention:
            states = extra["inner_states"], teachers_extra["inner_states"]
            attention = self._attention(sample["net_input"], *states) * len(positions)
            loss = loss + cfg.distill_attention_weight * attention
            to_log["attention_kl"] = attention.detach()
        return losses.with_spans(model, loss, len(positions), to_log), len(positions), to_log

    @classmethod
    def reduce_metrics(cls, logging_outputs: list[dict]) -> None:
        """Log both divergences too, in bits."""
        super().reduce_metrics(logging_outputs)
        predictions = total(logging_outputs, "sample_size")
        for name in ("words_kl", "attention_kl"):
            if name in logging_outputs[0]:
                log_scalars({name: Scalar(in_bits(mean_per_prediction(logging_outputs, name)), predictions)})

    def _attention(self, net_input: dict, *states: list[Tensor]) -> Tensor:
        """Return the mean divergence of the last distributions, from the states of the model and the teacher."""
        padding_mask = None
        if net_input.get("has_padding", True):
            padding_mask = net_input["src_tokens"].eq(self.padding_idx)
        (own, place), (teachers, teachers_place) = zip(self.networks, last_attentions(*self.networks), strict=True)
        found = distribution(own, place, states[0][place], padding_mask)
        with torch.no_grad():
            teachers_own = distribution(teachers, teachers_place, states[1][teachers_place], padding_mask)
        return attention_kl(found, teachers_own, padding_mask)


def words_kl(student_MV: Tensor, teacher_MV: Tensor, temperature: float) -> Tensor:
    """Return T^2 KL(teacher || student) of distributions at temperature T, summed over M words, in nats.

    Hinton et al., 2015, section 2: the gradients of soft targets scale as 1 / T^2.
    """
    student, teacher = ((_single(logits) / temperature).log_softmax(-1) for logits in (student_MV, teacher_MV))
    return temperature**2 * F.kl_div(student, teacher, reduction="sum", log_target=True)


def attention_kl(student_BNTK: Tensor, teacher_BNTK: Tensor, padding_mask_BT: Optional[Tensor] = None) -> Tensor:
    """Return KL(teacher || student) of distributions, the mean over heads and queries, in nats.

    MiniLM's transfer of the last attention (Wang et al., 2020, section 3.1). A key that a student's query cannot see
    has the probability 1e-9.

    Args:
        student_BNTK: the model's distributions.
        teacher_BNTK: the teacher's.
        padding_mask_BT: queries to leave out, True at padding.
    """
    student = _single(student_BNTK).clamp(min=LEAST).log()
    teacher = _single(teacher_BNTK)
    kl_BNT = (torch.xlogy(teacher, teacher) - teacher * student).sum(-1)
    if padding_mask_BT is None:
        return kl_BNT.mean()
    text_B1T = ~padding_mask_BT[:, None]
    return (kl_BNT * text_B1T).sum() / (text_B1T.sum() * kl_BNT.size(1))


def last_attentions(student: Stack, teacher: Stack) -> tuple[int, int]:
    """Return the numbers of the last sublayers, of each, that make a distribution of their own.

    Raises:
        UserError: one has none, or they have other numbers of heads.
    """
    if student.num_heads != teacher.num_heads:
        raise UserError(
            f"--distill: the teacher has {teacher.num_heads} heads, the model {student.num_heads}: their attention "
            f"cannot be compared; {_ADVICE}"
        )
    found = [
        [number for number, planned in enumerate(network.plan) if DISTRIBUTION in planned.kind.hands_on]
        for network in (student, teacher)
    ]
    if not all(found):
        raise UserError("--distill: teacher or model has no sublayer that makes an attention distribution; " + _ADVICE)
    return found[0][-1], found[1][-1]


def distribution(network: Encoder, number: int, x_BTC: Tensor, padding_mask_BT: Optional[Tensor]) -> Tensor:
    """Compute where sublayer `number` looks given its input, (B, N, T, K), whatever back end the network has.

    Padding comes last in each row, as datasets have it.

    Raises:
        UserError: what it computes is no distribution over tokens.
    """
    shared = network.context(x_BTC, 0, padding_mask_BT)._replace(back_end=lambda *_: "eager")
    _, handed_on = network.sublayers[number](x_BTC, {}, shared)
    found = handed_on[DISTRIBUTION]
    if not isinstance(found, StoredDistribution):
        text = network.plan[number].text
        raise UserError(f"--distill: the distribution of {text} is not one over tokens alone; {_ADVICE}")
    return found.probabilities


def _single(x: Tensor) -> Tensor:
    """Return a tensor in single precision at least."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def load_original(path: str, task: FairseqTask) -> nn.Module:
    """Load a masked language model in evaluation mode, whose weights do not learn.

    Args:
        path: a checkpoint, or a folder that holds one.
        task: the task, whose dictionary must be the checkpoint's.

    Raises:
        UserError: as `load_safely`, or it is no encoder of ours, or has another dictionary.
    """
    file = checkpoint_at(Path(path))
    state = load_safely(file)
    if loading.is_causal(state):
        raise UserError(f"{file}: is a causal language model; give a masked one")
    model = loading.build(state, task.source_dictionary, file)
    return model.eval().requires_grad_(False)
