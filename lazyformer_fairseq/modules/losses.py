"""Losses of a batch: cross-entropy of next tokens and of masked ones.

Models that learn their spans (``s[span=...]``) pay for these: the gradient is that of the cross-entropy of a token plus
each sublayer's ``span_loss`` times the mean span of its heads. The loss to log is the cross-entropy alone.

So do models with experts (``f[experts=8]``): for the one that keeps these busy, times ``--experts-loss``.

Each returns the summed loss in nats, spans included, the number of predicted tokens (the gradient's denominator), and
what to log, in sums.
"""

from collections.abc import Mapping
from typing import Any, Optional, Union

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lazyformer_fairseq.modules.compiled import compiled
from lazyformer_fairseq.modules.networks.heads import NEXT_SENTENCE, as_positions
from lazyformer_fairseq.modules.networks.own_loss import take_told
from lazyformer_fairseq.modules.networks.stack import Stack
from lazyformer_fairseq.modules.sublayers.attention_variants.span import SPANS

Sample = Mapping[str, Any]  # a batch, as a dataset's collater makes it


def causal_lm(model: nn.Module, sample: Sample, pad: int) -> tuple[Tensor, Tensor, dict]:
    """Let the model compute the likelihood of each target, so that nothing makes a (B, T, V) tensor of all bands."""
    target = sample["target"]
    nll, _ = model(**sample["net_input"], target=target)
    loss = nll.sum()
    sample_size = target.ne(pad).sum()
    to_log = _to_log(sample, loss, sample_size)
    return with_spans(model, loss, sample_size, to_log), sample_size, to_log


def masked_lm(model: nn.Module, sample: Sample, pad: int) -> tuple[Tensor, int, dict]:
    """Ask the model for logits at masked positions alone, so that no (B, T, V) tensor is ever made.

    Where the batch is of pairs (``--next-sentence``), the gradient is that of both losses: the mean over its pairs
    counts as much as the mean over its masked tokens (BERT, appendix A.2). The logged loss is that of the tokens alone.

    Nothing here waits for a GPU where the batch says which positions are masked, as those of
    :class:`~lazyformer_fairseq.data.datasets.masked_blocks.FullSentencesDataset` do.
    """
    positions = positions_of(sample, pad)
    follows = sample.get("next_sentence")
    if follows is None:
        head = {}
    else:
        head = {"classification_head_name": NEXT_SENTENCE}
    # fairseq's own models take a mask: places would be rows of the batch to them.
    if getattr(model, "takes_positions", False):
        masked = positions
    else:
        masked = sample["target"].ne(pad)
    logits, extra = model(**sample["net_input"], masked_tokens=masked, **head)
    loss, to_log = score_masked(model, sample, positions, logits)
    if follows is not None:
        of_pairs, right = _score(extra["head_logits"], follows)
        to_log |= {"next_sentence_loss": of_pairs.detach(), "next_sentence_right": right}
        loss = loss + of_pairs * (len(positions) / len(follows))
    return with_spans(model, loss, len(positions), to_log), len(positions), to_log


def positions_of(sample: Sample, pad: int) -> Tensor:
    """Return the places of the masked tokens among the B * T of a batch, int64 (M,)."""
    if (positions := sample.get("masked_positions")) is not None:
        return positions
    return as_positions(sample["target"].ne(pad))  # a batch of fairseq's own tasks


def score_masked(model: nn.Module, sample: Sample, positions: Tensor, logits_MV: Tensor) -> tuple[Tensor, dict]:
    """Return the summed loss in nats, without that of spans, and what to log."""
    targets = sample["target"].flatten().index_select(0, positions)
    if model.training and getattr(model, "compiles", False):
        score = compiled(_score)
    else:
        score = _score
    loss, ncorrect = score(logits_MV, targets)
    return loss, {**_to_log(sample, loss, len(positions)), "ncorrect": ncorrect}


def _to_log(sample: Sample, loss: Tensor, sample_size: Union[int, Tensor]) -> dict:
    sizes = {key: sample[key] for key in ("ntokens", "nsentences")}
    return {"loss": loss.detach(), **sizes, "sample_size": sample_size}


def with_spans(model: nn.Module, loss: Tensor, sample_size: Union[int, Tensor], to_log: dict) -> Tensor:
    """Return the summed loss with those of spans and experts; log these, and the mean span, times tokens."""
    loss = with_experts(model, loss, sample_size, to_log)
    network = network_of(model)
    if network is None:
        spans = []
    else:
        spans = network.options.common.get(SPANS, [])
    if not spans:
        return loss
    penalty = torch.stack([span.penalty() for span in spans]).sum() * sample_size
    to_log["span_loss"] = penalty.detach()
    to_log["span"] = torch.stack([span.spans.detach().mean() for span in spans]).mean() * sample_size
    return loss + penalty


def with_experts(model: nn.Module, loss: Tensor, sample_size: Union[int, Tensor], to_log: dict) -> Tensor:
    """Return the summed loss with that of experts, if any; log it times predictions, and choices without a slot."""
    network = network_of(model)
    if network is None:
        told = None
    else:
        told = take_told(network)
    if told is None:
        return loss
    penalty = told.loss * sample_size
    to_log |= {"experts_loss": penalty.detach(), "experts_dropped": told.dropped, "experts_wanted": told.wanted}
    return loss + penalty


def network_of(model: nn.Module) -> Optional[Stack]:
    """Return the model's stack of sublayers; None where it has none."""
    return next((module for module in model.modules() if isinstance(module, Stack)), None)


def _score(logits_MV: Tensor, targets_M: Tensor) -> tuple[Tensor, Tensor]:
    """Return the summed cross-entropy in nats, and how often the most likely word is the target."""
    loss = F.cross_entropy(logits_MV.float(), targets_M, reduction="sum")
    return loss, (logits_MV.detach().argmax(dim=-1) == targets_M).sum()
