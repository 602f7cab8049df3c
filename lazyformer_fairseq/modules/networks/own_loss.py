"""The losses that sublayers of a stack add to the objective: the penalty on spans and the balance of experts."""

from typing import Optional, Union

import torch
from torch import Tensor

from lazyformer_fairseq.modules.networks.stack import Stack
from lazyformer_fairseq.modules.sublayers.attention_variants.span import SPANS
from lazyformer_fairseq.modules.sublayers.feed_forward import EXPERTS, Told


def take_told(network: Stack) -> Optional[Told]:
    """Return the auxiliary outputs of all experts in the last forward pass in training, summed, and forget them.

    The loss is multiplied by the weight `experts_loss` of the network. None if there are no experts, or no outputs.
    """
    told = [experts.take_told() for experts in network.options.common.get(EXPERTS, ())]
    told = [each for each in told if each is not None]
    if not told:
        return None
    loss, dropped, wanted = (torch.stack(each).sum() for each in zip(*told, strict=True))
    return Told(network.experts_loss * loss, dropped, wanted)


def own_loss(network: Stack) -> Union[Tensor, float]:
    """Return what learned spans and the experts of the last forward pass add to the loss per token, in nats."""
    loss = sum(span.penalty() for span in network.options.common.get(SPANS, ()))
    told = take_told(network)
    if told is not None:
        loss = loss + told.loss
    return loss
