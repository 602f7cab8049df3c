"""Distillation: a masked language model learns from a trained one, the teacher.

It learns from the teacher's distribution over words, at the masked positions, and from where the teacher's last
attention looks. The teacher is there in training alone: checkpoints hold the new model and nothing else, and a resumed
run loads the teacher again.
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

LEAST = 1e-9  # the probability of a key that the student's query cannot see
ADVICE = "give --distill-attention-weight 0"


class Distillation:
    """The loss of masked words, with the terms of a teacher.

    It is no module, so that neither the optimizer nor a checkpoint finds the teacher.

    Args:
        teacher: the trained model.
        temperature: the temperature of both models' distributions over words.
        masked_lm_weight: weight of the masked words themselves.
        words_weight: weight of the divergence from the teacher's distribution over words.
        attention_weight: weight of the divergence from its last attention.
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
            The summed loss, the number of masked words, and sums to log: the `loss` is that of the words alone.
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
            states = (extra["inner_states"], teachers_extra["inner_states"])
            attention = self._attention_kl(model, *states, padding_mask) * count
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
        """Return the mean divergence of the last distributions, from the inputs of both models' sublayers."""
        student = encoder_of(model)
        teacher = encoder_of(self.teacher)
        place, teachers_place = last_attentions(student, teacher)
        found = distribution(student, place, states[place], padding_mask)
        with torch.no_grad():
            teachers_own = distribution(teacher, teachers_place, teachers_states[teachers_place], padding_mask)
        return attention_kl(found, teachers_own, padding_mask)


def encoder_of(model: nn.Module) -> Encoder:
    """Return the encoder of a model.

    Raises:
        UserError: it is none of ours.
    """
    network = losses.network_of(model)
    if not isinstance(network, Encoder):
        raise UserError(f"--distill: {type(model).__name__} is no encoder of this package; {ADVICE}")
    return network


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
            f"cannot be compared; {ADVICE}"
        )
    found = [
        [number for number, planned in enumerate(network.plan) if DISTRIBUTION in planned.kind.hands_on]
        for network in (student, teacher)
    ]
    if not all(found):
        raise UserError("--distill: teacher or model has no sublayer that makes an attention distribution; " + ADVICE)
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
        raise UserError(f"--distill: the distribution of {text} is not one over tokens alone; {ADVICE}")
    return found.probabilities


def _single(x: Tensor) -> Tensor:
    """Return a tensor in single precision at least."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def load_teacher(path: str, dictionary: Dictionary) -> nn.Module:
    """Load a masked language model in evaluation mode, whose weights do not learn.

    Args:
        path: a checkpoint, or a folder that holds one.
        dictionary: the symbols, which must be the checkpoint's too.

    Raises:
        UserError: the file is missing or damaged, or it is no encoder of ours, or has another dictionary.
    """
    file = checkpoint_at(Path(path))
    state = checkpoints.load(file)
    if loading.is_causal(state):
        raise UserError(f"{file}: is a causal language model; give a masked one")
    model = loading.build(state, dictionary, file)
    return model.eval().requires_grad_(False)
