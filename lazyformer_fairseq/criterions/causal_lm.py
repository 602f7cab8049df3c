"""Criterion ``causal_lm``: cross-entropy of the next token, in bits, and perplexity."""

import math

from fairseq import utils
from fairseq.criterions import FairseqCriterion, register_criterion
from fairseq.dataclass import FairseqDataclass
from fairseq.logging import metrics
from torch import Tensor


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
        loss = nll.sum()
        sample_size = target.ne(self.padding_idx).sum()
        logging_output = {
            "loss": loss.detach(),
            "ntokens": sample["ntokens"],
            "nsentences": sample["nsentences"],
            "sample_size": sample_size,
        }
        return loss, sample_size, logging_output

    @staticmethod
    def reduce_metrics(logging_outputs: list[dict]) -> None:
        """Logs loss (bits a token: bits per character where tokens are characters) and perplexity over all workers."""
        loss, sample_size = (sum(log.get(key, 0) for log in logging_outputs) for key in ("loss", "sample_size"))
        metrics.log_scalar("loss", loss / sample_size / math.log(2), sample_size, round=3)
        metrics.log_derived("ppl", lambda meters: utils.get_perplexity(meters["loss"].avg))

    @staticmethod
    def logging_outputs_can_be_summed() -> bool:
        return True
