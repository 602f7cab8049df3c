"""The loss that sublayers of a stack add by themselves: of learned spans, and of experts to be used equally."""

from typing import Optional, Union

import torch
from torch import Tensor

from lazyformer_fairseq.modules.networks.stack import Stack
from lazyformer_fairseq.modules.sublayers.attention_variants.span import SPANS
from lazyformer_fairseq.modules.sublayers.feed_forward import EXPERTS, Told


def take_told(network: Stack) -> Optional[Told]:
    """Return the weighted loss and the counts of the experts in the last pass of training, summed; only once."""
    told = [experts.take_told() for experts in network.options.common.get(EXPERTS, ())]
    told = [each for each in told if each is not None]
    if not told:
        return None
    loss, dropped, wanted = (torch.stack(each).sum() for each in zip(*told, strict=True))
    return Told(network.experts_loss * loss, dropped, wanted)


def own_loss(network: Stack) -> Union[Tensor, float]:
    """Return what learned spans and experts of the last pass add to the loss per token, in nats."""
    loss = sum(span.penalty() for span in network.options.common.get(SPANS, ()))
    told = take_told(network)
    if told is not None:
        loss = loss + told.loss
    return loss
