"""The losses of causal and masked language models.

The training loss includes penalties. In models with learned attention spans (``s[span=...]``), each sublayer adds
``span_loss`` times the mean span of its heads to the cross-entropy per token. Models with experts (``f[experts=8]``)
add the load-balancing loss times ``--experts-loss``. The logged loss is only the cross-entropy.

:func:`causal_lm` and :func:`masked_lm` return the summed loss in nats, including penalties; the number of predicted
tokens, which normalizes the gradient; and the values to log, as sums.
"""

from collections.abc import Mapping
from typing import Any, Optional, Union

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lazyformer_fairseq.modules.compiled import compiled
from lazyformer_fairseq.modules.networks.auxiliary_loss import pop_expert_outputs
from lazyformer_fairseq.modules.networks.heads import NEXT_SENTENCE, as_positions
from lazyformer_fairseq.modules.networks.stack import Stack
from lazyformer_fairseq.modules.sublayers.attention_variants.span import SPANS

Sample = Mapping[str, Any]  # a batch, as returned by a dataset's collater


def causal_lm(model: nn.Module, sample: Sample, pad: int) -> tuple[Tensor, Tensor, dict]:
    """Compute the causal language modeling loss.

    The model itself computes the negative log-likelihood of each target, which avoids a (B, T, V) tensor of logits.
    """
    target = sample["target"]
    nll, _ = model(**sample["net_input"], target=target)
    loss = nll.sum()
    sample_size = target.ne(pad).sum()
    to_log = _to_log(sample, loss, sample_size)
    return with_spans(model, loss, sample_size, to_log), sample_size, to_log


def masked_lm(model: nn.Module, sample: Sample, pad: int) -> tuple[Tensor, int, dict]:
    """Compute the masked language modeling loss.

    The model computes logits only at masked positions, which avoids a (B, T, V) tensor.

    If the batch consists of pairs (``--next-sentence``), the loss includes next-sentence prediction: the mean loss over
    pairs has the same weight as the mean loss over masked tokens (BERT, appendix A.2). The logged loss covers only the
    masked tokens.

    This function does not synchronize with the GPU if the batch lists its masked positions, as batches of
    :class:`~lazyformer_fairseq.data.datasets.masked_blocks.FullSentencesDataset` do.
    """
    positions = positions_of(sample, pad)
    follows = sample.get("next_sentence")
    if follows is None:
        head = {}
    else:
        head = {"classification_head_name": NEXT_SENTENCE}
    # fairseq's own models expect a mask, and would interpret positions as rows of the batch.
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
    """Return the positions of the masked tokens in the flattened batch of B * T tokens, int64 (M,)."""
    if (positions := sample.get("masked_positions")) is not None:
        return positions
    return as_positions(sample["target"].ne(pad))  # fairseq's own tasks do not list the positions


def score_masked(model: nn.Module, sample: Sample, positions: Tensor, logits_MV: Tensor) -> tuple[Tensor, dict]:
    """Return the summed cross-entropy of masked tokens in nats, without penalties, and the values to log.

    Args:
        model: the model; its `compiles` attribute determines whether the loss is compiled.
        sample: the batch.
        positions: the positions of the masked tokens in the flattened batch, int64 (M,).
        logits_MV: the logits at these positions.
    """
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
    """Add the penalties for spans and experts to the summed loss and to the values to log; return the loss.

    Penalties and the mean span are multiplied by the number of predicted tokens before they are logged.
    """
    loss = with_experts(model, loss, sample_size, to_log)
    network = network_of(model)
    if network is None:
        spans = []
    else:
        spans = network.options.common.get(SPANS, [])
    if not spans:
        return loss
    penalty = torch.stack([span.penalty() for span in spans]).sum() * sample_size
    mean_spans = [span.spans.detach().mean() for span in spans]
    to_log["span_loss"] = penalty.detach()
    to_log["span"] = torch.stack(mean_spans).mean() * sample_size
    return loss + penalty


def with_experts(model: nn.Module, loss: Tensor, sample_size: Union[int, Tensor], to_log: dict) -> Tensor:
    """Add the load-balancing loss of experts, if any, to the summed loss and to the values to log; return the loss.

    The logged values are the load-balancing loss times the number of predicted tokens, the number of token-to-expert
    assignments dropped because the expert had no slots left, and the total number of assignments.
    """
    network = network_of(model)
    if network is None:
        outputs = None
    else:
        outputs = pop_expert_outputs(network)
    if outputs is None:
        return loss
    penalty = outputs.loss * sample_size
    to_log |= {"experts_loss": penalty.detach(), "experts_dropped": outputs.dropped, "experts_wanted": outputs.wanted}
    return loss + penalty


def network_of(model: nn.Module) -> Optional[Stack]:
    """Return the model's stack of sublayers, or None if there is none."""
    return next((module for module in model.modules() if isinstance(module, Stack)), None)


def _score(logits_MV: Tensor, targets_M: Tensor) -> tuple[Tensor, Tensor]:
    """Return the summed cross-entropy in nats, and the number of correctly predicted targets."""
    loss = F.cross_entropy(logits_MV.float(), targets_M, reduction="sum")
    is_right_M = logits_MV.detach().argmax(dim=-1) == targets_M
    return loss, is_right_M.sum()
