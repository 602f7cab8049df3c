"""Criterions ``causal_lm`` and ``masked_lm_accuracy``: cross-entropy of the next, or of the masked, tokens."""

import math

from fairseq import utils
from fairseq.criterions import FairseqCriterion, register_criterion
from fairseq.dataclass import FairseqDataclass
from fairseq.logging import metrics
from torch import Tensor
from torch.nn import functional as F

from lazyformer_fairseq.modules.compiled import compiled
from lazyformer_fairseq.modules.networks.heads import as_positions


@register_criterion("causal_lm", dataclass=FairseqDataclass)
class CausalLMCriterion(FairseqCriterion):
    """Lets the model compute the likelihood of each target, so that nothing makes a (B, T, V) tensor of all bands."""

    def forward(self, model, sample: dict, reduce: bool = True) -> tuple[Tensor, Tensor, dict]:
        """Loss of one batch.

        Returns:
            The summed loss in nats, the number of predicted tokens (the gradient's denominator), and what to log.
        """
        target = sample["target"]
        nll, _ = model(**sample["net_input"], target=target)
        loss, sample_size = nll.sum(), target.ne(self.padding_idx).sum()
        return loss, sample_size, _to_log(sample, loss, sample_size)

    @classmethod
    def reduce_metrics(cls, logging_outputs: list[dict]) -> None:
        """Logs loss (bits a token: bits per character where tokens are characters) and perplexity over all workers."""
        loss, sample_size = _total("loss", logging_outputs), _total("sample_size", logging_outputs)
        metrics.log_scalar("loss", loss / sample_size / math.log(2), sample_size, round=3)
        metrics.log_derived("ppl", lambda meters: utils.get_perplexity(meters["loss"].avg))

    @staticmethod
    def logging_outputs_can_be_summed() -> bool:
        return True


@register_criterion("masked_lm_accuracy", dataclass=FairseqDataclass)
class MaskedLMAccuracyCriterion(CausalLMCriterion):
    """Asks the model for logits at masked positions alone, so that no (B, T, V) tensor is ever made.

    Nothing here waits for a GPU where the batch says which positions are masked, as those of
    :class:`~lazyformer_fairseq.data.datasets.full_sentences.FullSentencesDataset` do.
    """

    def forward(self, model, sample: dict, reduce: bool = True) -> tuple[Tensor, int, dict]:
        """Loss of one batch; the number of predicted tokens is that of the masked ones."""
        positions = sample.get("masked_positions")
        if positions is None:  # a batch of fairseq's own tasks
            positions = as_positions(sample["target"].ne(self.padding_idx))
        logits, _ = model(**sample["net_input"], masked_tokens=positions)
        targets = sample["target"].flatten().index_select(0, positions)
        score = compiled(_score) if self.training and getattr(model, "compiles", False) else _score
        loss, ncorrect = score(logits, targets)
        sample_size = len(positions)
        return loss, sample_size, {**_to_log(sample, loss, sample_size), "ncorrect": ncorrect}

    @classmethod
    def reduce_metrics(cls, logging_outputs: list[dict]) -> None:
        """Logs accuracy (percent) too; all of masked tokens."""
        super().reduce_metrics(logging_outputs)
        ncorrect, sample_size = _total("ncorrect", logging_outputs), _total("sample_size", logging_outputs)
        metrics.log_scalar("accuracy", 100 * ncorrect / sample_size, sample_size, round=2)


def _to_log(sample: dict, loss: Tensor, sample_size) -> dict:
    sizes = {key: sample[key] for key in ("ntokens", "nsentences")}
    return {"loss": loss.detach(), **sizes, "sample_size": sample_size}


def _total(key: str, logging_outputs: list[dict]):
    return sum(log.get(key, 0) for log in logging_outputs)


def _score(logits_MV: Tensor, targets_M: Tensor) -> tuple[Tensor, Tensor]:
    """Summed cross-entropy in nats, and how often the most likely word is the target."""
    loss = F.cross_entropy(logits_MV.float(), targets_M, reduction="sum")
    return loss, (logits_MV.detach().argmax(dim=-1) == targets_M).sum()
