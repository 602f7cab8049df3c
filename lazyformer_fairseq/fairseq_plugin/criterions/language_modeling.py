"""Criterions ``causal_lm`` and ``masked_lm_accuracy``: cross-entropy of the next, or of the masked, tokens.

Models that learn their spans (``s[span=...]``) pay for these: the gradient is that of the cross-entropy of a token plus
each sublayer's ``span_loss`` times the mean span of its heads. The logged loss is the cross-entropy alone, so that it
compares with other models'; ``span_loss`` is logged beside it, and ``span``, the mean over heads and sublayers.
"""

import math
from typing import Union

import torch
from fairseq import utils
from fairseq.criterions import FairseqCriterion, register_criterion
from fairseq.dataclass import FairseqDataclass
from fairseq.logging import metrics
from torch import Tensor, nn
from torch.nn import functional as F

from lazyformer_fairseq.modules.compiled import compiled
from lazyformer_fairseq.modules.networks.heads import NEXT_SENTENCE, as_positions
from lazyformer_fairseq.modules.networks.stack import Stack
from lazyformer_fairseq.modules.sublayers.attention_kinds.span import SPANS


@register_criterion("causal_lm", dataclass=FairseqDataclass)
class CausalLMCriterion(FairseqCriterion):
    """Lets the model compute the likelihood of each target, so that nothing makes a (B, T, V) tensor of all bands."""

    def forward(self, model, sample: dict, reduce: bool = True) -> tuple[Tensor, Tensor, dict]:
        """Loss of one batch.

        Returns:
            The summed loss in nats, spans included, the number of predicted tokens (the gradient's denominator),
            and what to log.
        """
        target = sample["target"]
        nll, _ = model(**sample["net_input"], target=target)
        loss, sample_size = nll.sum(), target.ne(self.padding_idx).sum()
        to_log = _to_log(sample, loss, sample_size)
        return with_spans(model, loss, sample_size, to_log), sample_size, to_log

    @classmethod
    def reduce_metrics(cls, logging_outputs: list[dict]) -> None:
        """Logs loss (bits a token: bits per character where tokens are characters) and perplexity over all workers."""
        loss, sample_size = total("loss", logging_outputs), total("sample_size", logging_outputs)
        metrics.log_scalar("loss", loss / sample_size / math.log(2), sample_size, round=3)
        metrics.log_derived("ppl", lambda meters: utils.get_perplexity(meters["loss"].avg))
        if "span" in logging_outputs[0]:
            metrics.log_scalar("span", total("span", logging_outputs) / sample_size, sample_size, round=1)
            span_loss = total("span_loss", logging_outputs) / sample_size / math.log(2)
            metrics.log_scalar("span_loss", span_loss, sample_size, round=5)

    @staticmethod
    def logging_outputs_can_be_summed() -> bool:
        return True


@register_criterion("masked_lm_accuracy", dataclass=FairseqDataclass)
class MaskedLMAccuracyCriterion(CausalLMCriterion):
    """Asks the model for logits at masked positions alone, so that no (B, T, V) tensor is ever made.

    fairseq's own masked language models, such as ``roberta_base``, learn by it too.

    Where the batch is of pairs (``--next-sentence``), the gradient is that of both losses: the mean over its pairs
    counts as much as the mean over its masked tokens (BERT, appendix A.2). The logged loss is that of the tokens alone.

    Nothing here waits for a GPU where the batch says which positions are masked, as those of
    :class:`~lazyformer_fairseq.data.datasets.masked_blocks.FullSentencesDataset` do.
    """

    def forward(self, model, sample: dict, reduce: bool = True) -> tuple[Tensor, int, dict]:
        """Loss of one batch; the number of predicted tokens is that of the masked ones."""
        positions, follows = self.positions(sample), sample.get("next_sentence")
        head = {} if follows is None else {"classification_head_name": NEXT_SENTENCE}
        # fairseq's own models take a mask: places would be rows of the batch to them.
        masked = positions if getattr(model, "takes_positions", False) else sample["target"].ne(self.padding_idx)
        logits, extra = model(**sample["net_input"], masked_tokens=masked, **head)
        loss, to_log = self.score(model, sample, positions, logits)
        if follows is not None:
            of_pairs, right = _score(extra["head_logits"], follows)
            to_log |= {"next_sentence_loss": of_pairs.detach(), "next_sentence_right": right}
            loss = loss + of_pairs * (len(positions) / len(follows))
        return with_spans(model, loss, len(positions), to_log), len(positions), to_log

    def positions(self, sample: dict) -> Tensor:
        """Those of the masked tokens among the B * T of a batch, int64 (M,)."""
        positions = sample.get("masked_positions")
        if positions is None:  # a batch of fairseq's own tasks
            positions = as_positions(sample["target"].ne(self.padding_idx))
        return positions

    def score(self, model, sample: dict, positions: Tensor, logits_MV: Tensor) -> tuple[Tensor, dict]:
        """The summed loss in nats, without that of spans, and what to log."""
        targets = sample["target"].flatten().index_select(0, positions)
        score = compiled(_score) if self.training and getattr(model, "compiles", False) else _score
        loss, ncorrect = score(logits_MV, targets)
        return loss, {**_to_log(sample, loss, len(positions)), "ncorrect": ncorrect}

    @classmethod
    def reduce_metrics(cls, logging_outputs: list[dict]) -> None:
        """Logs accuracy (percent) too, all of masked tokens; of pairs their own loss (bits a pair) and accuracy."""
        super().reduce_metrics(logging_outputs)
        ncorrect, sample_size = total("ncorrect", logging_outputs), total("sample_size", logging_outputs)
        metrics.log_scalar("accuracy", 100 * ncorrect / sample_size, sample_size, round=2)
        if "next_sentence_loss" in logging_outputs[0]:
            pairs, right = total("nsentences", logging_outputs), total("next_sentence_right", logging_outputs)
            bits = total("next_sentence_loss", logging_outputs) / pairs / math.log(2)
            metrics.log_scalar("next_sentence_loss", bits, pairs, round=3)
            metrics.log_scalar("next_sentence_accuracy", 100 * right / pairs, pairs, round=2)


def _to_log(sample: dict, loss: Tensor, sample_size) -> dict:
    sizes = {key: sample[key] for key in ("ntokens", "nsentences")}
    return {"loss": loss.detach(), **sizes, "sample_size": sample_size}


def with_spans(model: nn.Module, loss: Tensor, sample_size: Union[int, Tensor], to_log: dict) -> Tensor:
    """The summed loss with that of spans, if the model has any; logs the latter, and their mean, times tokens."""
    network = next((module for module in model.modules() if isinstance(module, Stack)), None)
    spans = [] if network is None else network.options.common.get(SPANS, [])
    if not spans:
        return loss
    penalty = torch.stack([span.penalty() for span in spans]).sum() * sample_size
    to_log["span_loss"] = penalty.detach()
    to_log["span"] = torch.stack([span.spans.detach().mean() for span in spans]).mean() * sample_size
    return loss + penalty


def total(key: str, logging_outputs: list[dict]):
    return sum(log.get(key, 0) for log in logging_outputs)


def _score(logits_MV: Tensor, targets_M: Tensor) -> tuple[Tensor, Tensor]:
    """Summed cross-entropy in nats, and how often the most likely word is the target."""
    loss = F.cross_entropy(logits_MV.float(), targets_M, reduction="sum")
    return loss, (logits_MV.detach().argmax(dim=-1) == targets_M).sum()
