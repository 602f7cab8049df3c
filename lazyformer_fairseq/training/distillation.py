"""Knowledge distillation from a trained masked language model (the teacher) to another one (the student).

The student is trained to match the teacher's distribution over the vocabulary at the masked positions and the
teacher's last attention distribution. The teacher is needed only during training: checkpoints contain only the
student, and a resumed run reloads the teacher.
"""

from pathlib import Path
from typing import Any, Optional

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lazyformer_fairseq.arguments import checkpoint_at
from lazyformer_fairseq.data.text.dictionary_file import Dictionary
from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.evaluation import checkpoints, loading
from lazyformer_fairseq.modules import losses
from lazyformer_fairseq.modules.attention.back_ends import StoredDistribution
from lazyformer_fairseq.modules.networks.encoder import Encoder
from lazyformer_fairseq.modules.networks.stack import Stack
from lazyformer_fairseq.patterns.kinds import DISTRIBUTION
from lazyformer_fairseq.training.objectives.interface import Batch

LEAST = 1e-9  # the probability assigned to keys that the student's query cannot attend to
ADVICE = "set --distill-attention-weight 0 to distill without attention"


class Distillation:
    """The distillation loss: the masked-LM loss plus the KL divergences from a teacher.

    This is deliberately not an ``nn.Module``: the teacher must not end up in the optimizer or in checkpoints.

    Args:
        teacher: the trained model.
        temperature: the temperature of both models' distributions over the vocabulary.
        masked_lm_weight: the weight of the masked-LM loss.
        words_weight: the weight of the divergence from the teacher's distribution over the vocabulary.
        attention_weight: the weight of the divergence from the teacher's last attention distribution. If it is 0, the
            divergence is not computed.
    """

    def __init__(
        self,
        teacher: nn.Module,
        temperature: float,
        masked_lm_weight: float,
        words_weight: float,
        attention_weight: float,
    ):
        self.teacher = teacher
        self.temperature = temperature
        self.masked_lm_weight = masked_lm_weight
        self.words_weight = words_weight
        self.attention_weight = attention_weight
        self._is_placed = False

    def loss(self, model: nn.Module, batch: Batch, pad: int) -> tuple[Tensor, int, dict[str, Any]]:
        """Compute the weighted loss of a batch.

        Returns:
            The summed loss, the number of masked tokens, and the sums to log. The logged `loss` is only the masked-LM
            loss.
        """
        if not self._is_placed:
            weight = next(model.parameters())
            self.teacher.to(device=weight.device, dtype=weight.dtype)
            self._is_placed = True
        positions = losses.positions_of(batch, pad)
        count = len(positions)
        wants_attention = self.attention_weight > 0
        given = {**batch["net_input"], "masked_tokens": positions, "return_all_hiddens": wants_attention}
        logits, extra = model(**given)
        with torch.no_grad():
            teachers_logits, teachers_extra = self.teacher(**given)
        masked_lm, to_log = losses.score_masked(model, batch, positions, logits)
        words = words_kl(logits, teachers_logits, self.temperature)
        loss = self.masked_lm_weight * masked_lm + self.words_weight * words
        to_log["words_kl"] = words.detach()
        if wants_attention:
            padding_mask = None
            if batch["net_input"].get("has_padding", True):
                padding_mask = batch["net_input"]["src_tokens"].eq(pad)
            mean_kl = self._attention_kl(model, extra["inner_states"], teachers_extra["inner_states"], padding_mask)
            attention = mean_kl * count
            loss = loss + self.attention_weight * attention
            to_log["attention_kl"] = attention.detach()
        return losses.with_spans(model, loss, count, to_log), count, to_log

    def _attention_kl(
        self,
        model: nn.Module,
        states: list[Tensor],
        teachers_states: list[Tensor],
        padding_mask: Optional[Tensor],
    ) -> Tensor:
        """Return the mean KL divergence between the student's and the teacher's last attention distributions.

        Args:
            model: the student.
            states: the inputs of the student's sublayers.
            teachers_states: the inputs of the teacher's sublayers.
            padding_mask: (B, T), True at padding; None if the batch has no padding.
        """
        student = encoder_of(model)
        teacher = encoder_of(self.teacher)
        place, teachers_place = last_attentions(student, teacher)
        found = distribution(student, place, states[place], padding_mask)
        with torch.no_grad():
            teachers_own = distribution(teacher, teachers_place, teachers_states[teachers_place], padding_mask)
        return attention_kl(found, teachers_own, padding_mask)


def encoder_of(model: nn.Module) -> Encoder:
    """Return a model's encoder.

    Raises:
        UserError: the model's network is not an :class:`Encoder` from this package.
    """
    network = losses.network_of(model)
    if not isinstance(network, Encoder):
        raise UserError(f"--distill: {type(model).__name__} has no encoder from this package; {ADVICE}")
    return network


def words_kl(student_MV: Tensor, teacher_MV: Tensor, temperature: float) -> Tensor:
    """Return T^2 KL(teacher || student) at temperature T, summed over the M masked tokens, in nats.

    The factor T^2 compensates for the gradients of soft targets, which scale as 1 / T^2 (Hinton et al., 2015, section
    2).

    Args:
        student_MV: the student's logits.
        teacher_MV: the teacher's logits.
        temperature: the temperature T of both distributions.
    """
    student = (_single(student_MV) / temperature).log_softmax(-1)
    teacher = (_single(teacher_MV) / temperature).log_softmax(-1)
    return temperature**2 * F.kl_div(student, teacher, reduction="sum", log_target=True)


def attention_kl(student_BNTK: Tensor, teacher_BNTK: Tensor, padding_mask_BT: Optional[Tensor] = None) -> Tensor:
    """Return KL(teacher || student) of attention distributions, averaged over heads and queries, in nats.

    This is MiniLM's self-attention distribution transfer (Wang et al., 2020, section 3.1). Keys that the student's
    query cannot attend to are assigned probability 1e-9.

    Args:
        student_BNTK: the student's attention distributions.
        teacher_BNTK: the teacher's attention distributions.
        padding_mask_BT: True at padding; queries at padding are excluded.
    """
    student = _single(student_BNTK).clamp(min=LEAST).log()
    teacher = _single(teacher_BNTK)
    kl_BNT = (torch.xlogy(teacher, teacher) - teacher * student).sum(-1)
    if padding_mask_BT is None:
        return kl_BNT.mean()
    text_B1T = ~padding_mask_BT[:, None]
    count = text_B1T.sum() * kl_BNT.size(1)
    return (kl_BNT * text_B1T).sum() / count


def last_attentions(student: Stack, teacher: Stack) -> tuple[int, int]:
    """Return, for each network, the index of the last sublayer that computes its own attention distribution.

    Raises:
        UserError: a network has no such sublayer, or the networks have different numbers of heads.
    """
    if student.num_heads != teacher.num_heads:
        raise UserError(
            f"--distill: the teacher has {teacher.num_heads} heads and the model has {student.num_heads}, so their "
            f"attention cannot be compared; {ADVICE}"
        )
    students = _attentions(student)
    teachers = _attentions(teacher)
    if not students or not teachers:
        raise UserError(
            "--distill: the teacher or the model has no sublayer that computes an attention distribution; " + ADVICE
        )
    return students[-1], teachers[-1]


def _attentions(network: Stack) -> list[int]:
    return [number for number, planned in enumerate(network.plan) if DISTRIBUTION in planned.kind.hands_on]


def distribution(network: Encoder, number: int, x_BTC: Tensor, padding_mask_BT: Optional[Tensor]) -> Tensor:
    """Compute one sublayer's attention distribution (B, N, T, K), using the eager back end.

    Args:
        network: the encoder.
        number: the sublayer's index.
        x_BTC: the sublayer's input.
        padding_mask_BT: True at padding, which must be at the end of each row; None if there is no padding.

    Raises:
        UserError: the sublayer does not compute a distribution over tokens.
    """
    shared = network.context(x_BTC, 0, padding_mask_BT)._replace(back_end=lambda *_: "eager")
    _, handed_on = network.sublayers[number](x_BTC, {}, shared)
    found = handed_on[DISTRIBUTION]
    if not isinstance(found, StoredDistribution):
        text = network.plan[number].text
        raise UserError(f"--distill: {text} does not compute a distribution over the input tokens only; {ADVICE}")
    return found.probabilities


def _single(x: Tensor) -> Tensor:
    """Cast a tensor to at least single precision."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def load_teacher(path: str, dictionary: Dictionary) -> nn.Module:
    """Load a masked language model in evaluation mode with frozen weights.

    Args:
        path: a checkpoint or a folder that contains one.
        dictionary: the run's dictionary, which must equal the checkpoint's.

    Raises:
        UserError: the file is missing or damaged, is not a masked language model, or has a different dictionary.
    """
    file = checkpoint_at(Path(path))
    state = checkpoints.load(file)
    if loading.is_causal(state):
        raise UserError(f"{file} is a causal language model; choose a masked language model as the teacher")
    model = loading.build(state, dictionary, file)
    return model.eval().requires_grad_(False)
