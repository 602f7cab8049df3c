"""Auxiliary losses of a stack's sublayers: the span penalty and the load-balancing loss of experts."""

from typing import Optional, Union

import torch
from torch import Tensor

from lazyformer_fairseq.modules.networks.stack import Stack
from lazyformer_fairseq.modules.sublayers.attention_variants.span import SPANS
from lazyformer_fairseq.modules.sublayers.feed_forward import EXPERTS, ExpertOutputs


def pop_expert_outputs(network: Stack) -> Optional[ExpertOutputs]:
    """Sum all experts' auxiliary outputs from the last training forward pass, and clear them.

    The loss is multiplied by the network's weight `experts_loss`. Returns None if there are no experts or no outputs.
    """
    outputs = [experts.pop_expert_outputs() for experts in network.options.common.get(EXPERTS, ())]
    outputs = [each for each in outputs if each is not None]
    if not outputs:
        return None
    return ExpertOutputs(
        loss=network.experts_loss * torch.stack([each.loss for each in outputs]).sum(),
        dropped=torch.stack([each.dropped for each in outputs]).sum(),
        wanted=torch.stack([each.wanted for each in outputs]).sum(),
    )


def auxiliary_loss(network: Stack) -> Union[Tensor, float]:
    """Return the auxiliary loss per token in nats, from learned spans and from the experts in the last forward pass."""
    loss = sum(span.penalty() for span in network.options.common.get(SPANS, ()))
    outputs = pop_expert_outputs(network)
    if outputs is not None:
        loss = loss + outputs.loss
    return loss
