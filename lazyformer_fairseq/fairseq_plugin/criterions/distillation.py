"""What a student learns from its teacher: words that the teacher finds likely, and where it looks."""

from typing import Optional

import torch
from torch import Tensor
from torch.nn import functional as F

from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.modules.attention.eager import StoredDistribution
from lazyformer_fairseq.modules.networks.encoder import Encoder
from lazyformer_fairseq.modules.networks.replacement import on_eager
from lazyformer_fairseq.modules.networks.stack import Stack
from lazyformer_fairseq.patterns.kinds import DISTRIBUTION

LEAST = 1e-9  # of a student's probability, where it cannot look
_ADVICE = "give --distill-attention-weight 0"


def words_kl(student_MV: Tensor, teacher_MV: Tensor, temperature: float) -> Tensor:
    """T^2 KL(teacher || student) of distributions at temperature T, summed over M words, in nats.

    Hinton et al., 2015, section 2: the gradients of soft targets scale as 1 / T^2.
    """
    student, teacher = ((_single(logits) / temperature).log_softmax(-1) for logits in (student_MV, teacher_MV))
    return temperature**2 * F.kl_div(student, teacher, reduction="sum", log_target=True)


def attention_kl(student_BNTK: Tensor, teacher_BNTK: Tensor, padding_mask_BT: Optional[Tensor] = None) -> Tensor:
    """KL(teacher || student) of distributions, the mean over heads and queries, in nats.

    MiniLM's transfer of the last attention (Wang et al., 2020, section 3.1). A key that a student's query cannot see
    has the probability 1e-9.

    Args:
        padding_mask_BT: queries to leave out, True at padding.
    """
    student, teacher = _single(student_BNTK).clamp(min=LEAST).log(), _single(teacher_BNTK)
    kl_BNT = (torch.xlogy(teacher, teacher) - teacher * student).sum(-1)
    if padding_mask_BT is None:
        return kl_BNT.mean()
    text_B1T = ~padding_mask_BT[:, None]
    return (kl_BNT * text_B1T).sum() / (text_B1T.sum() * kl_BNT.size(1))


def last_attentions(student: Stack, teacher: Stack) -> tuple[int, int]:
    """The numbers of the last sublayers, of each, that make a distribution of their own.

    Raises:
        UserError: one has none, or they have other numbers of heads.
    """
    if student.num_heads != teacher.num_heads:
        raise UserError(
            f"--distill: the teacher has {teacher.num_heads} heads, the model {student.num_heads}: their attention "
            f"cannot be compared; {_ADVICE}"
        )
    return _last_attention(student), _last_attention(teacher)


def _last_attention(network: Stack) -> int:
    found = [number for number, planned in enumerate(network.plan) if DISTRIBUTION in planned.kind.hands_on]
    if not found:
        raise UserError("--distill: teacher or model has no sublayer that makes an attention distribution; " + _ADVICE)
    return found[-1]


def distribution(network: Encoder, number: int, x_BTC: Tensor, padding_mask_BT: Optional[Tensor]) -> Tensor:
    """Where sublayer `number` looks given its input, (B, N, T, K): computed anew, whatever back end the network has.

    Padding may stand anywhere.

    Raises:
        UserError: what it computes is no distribution over tokens.
    """
    shared = on_eager(network.context(x_BTC, 0, padding_mask_BT))
    _, handed_on = network.sublayers[number](x_BTC, {}, shared)
    found = handed_on[DISTRIBUTION]
    if not isinstance(found, StoredDistribution):
        text = network.plan[number].text
        raise UserError(f"--distill: the distribution of {text} is not one over tokens alone; {_ADVICE}")
    return found.probabilities


def _single(x: Tensor) -> Tensor:
    """At least in single precision."""
    return x.to(torch.promote_types(x.dtype, torch.float32))
