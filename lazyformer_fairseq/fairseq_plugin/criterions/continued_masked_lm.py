"""Criterion ``continued_masked_lm``: masked LM of a model that was made from another one, the original.

It can learn from the original (``--distill``), and let the original's sublayers give way one by one
(``--replace-progressively``). Both are there in training alone: checkpoints hold the new model and nothing else,
validation measures that one, and a resumed run loads the original again.
"""

import logging
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Optional

import torch
from fairseq.criterions import register_criterion
from fairseq.dataclass import ChoiceEnum, FairseqDataclass
from fairseq.logging import metrics
from omegaconf import II
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.fairseq_plugin.criterions.distillation import (
    attention_kl,
    distribution,
    last_attentions,
    words_kl,
)
from lazyformer_fairseq.fairseq_plugin.criterions.language_modeling import MaskedLMAccuracyCriterion, total, with_spans
from lazyformer_fairseq.fairseq_plugin.criterions.original import load_original, read_record
from lazyformer_fairseq.fairseq_plugin.reliability.options import option
from lazyformer_fairseq.modules.networks.replacement import TOGETHER, UPPER_FIRST, Replacement, Schedule
from lazyformer_fairseq.modules.networks.stack import Stack

logger = logging.getLogger(__name__)


@dataclass
class ContinuedMaskedLMConfig(FairseqDataclass):
    distill: Optional[str] = option(
        None, "a checkpoint, or a folder with one: the teacher, whose words and last attention the model learns too"
    )
    distill_temperature: float = option(2.0, "of the words' distributions, teacher's and model's")
    distill_masked_lm_weight: float = option(1.0, "of the masked words themselves, beside the teacher")
    distill_words_weight: float = option(1.0, "of the teacher's distribution over words, at the masked positions")
    distill_attention_weight: float = option(
        1.0, "of its last attention distribution: the mean divergence of a query counts as much as a masked word's"
    )
    replace_progressively: Optional[str] = option(
        None, "the checkpoint, or the folder with it, that the model was made from: its sublayers, frozen, give way"
    )
    replace_until: float = option(0.5, "share of --max-update after which all sublayers are the new ones")
    replace_start: float = option(0.0, "how far the replacement has come at first, 0 to 1")
    replace_order: ChoiceEnum([UPPER_FIRST, TOGETHER]) = option(
        UPPER_FIRST, "whether upper sublayers give way before lower ones, or all with the same probability"
    )
    warm_start: Optional[str] = option(
        None, "warm_start.json of `lazyformer import`: which sublayer came from which; --replace-progressively needs it"
    )
    max_update: int = II("optimization.max_update")
    seed: int = II("common.seed")


@register_criterion("continued_masked_lm", dataclass=ContinuedMaskedLMConfig)
class ContinuedMaskedLMCriterion(MaskedLMAccuracyCriterion):
    """The gradient is that of all terms, weighted; what is logged as the loss is the masked words' alone.

    Raises:
        UserError: a number is out of range, a file is missing or damaged, or the original has another dictionary.
    """

    def __init__(self, cfg: ContinuedMaskedLMConfig, task):
        super().__init__(task)
        _check(cfg)
        self.cfg = cfg
        self.record = None if cfg.warm_start is None else read_record(Path(cfg.warm_start))
        # In plain containers, so that neither the optimizer nor a checkpoint finds these models.
        paths = {cfg.distill, cfg.replace_progressively} - {None}
        self.originals: dict[str, nn.Module] = {path: load_original(path, task) for path in paths}
        self.networks: tuple[Stack, ...] = ()  # the student's, then the teacher's

    def forward(self, model, sample: dict, reduce: bool = True) -> tuple[Tensor, Any, dict]:
        """As :class:`MaskedLMAccuracyCriterion`'s; in training with a teacher's terms and among old sublayers."""
        if self.training and not self.networks:
            self._meet(model)
        if not self.training or self.cfg.distill is None:
            return super().forward(model, sample, reduce)
        cfg, positions = self.cfg, self.positions(sample)
        wants_attention = cfg.distill_attention_weight > 0
        given = {**sample["net_input"], "masked_tokens": positions, "return_all_hiddens": wants_attention}
        logits, extra = model(**given)
        with torch.no_grad():
            teachers_logits, teachers_extra = self.originals[cfg.distill](**given)
        masked_lm, to_log = self.score(model, sample, positions, logits)
        words = words_kl(logits, teachers_logits, cfg.distill_temperature)
        loss = cfg.distill_masked_lm_weight * masked_lm + cfg.distill_words_weight * words
        to_log["words_kl"] = words.detach()
        if wants_attention:
            states = extra["inner_states"], teachers_extra["inner_states"]
            attention = self._attention(sample["net_input"], *states) * len(positions)
            loss = loss + cfg.distill_attention_weight * attention
            to_log["attention_kl"] = attention.detach()
        return with_spans(model, loss, len(positions), to_log), len(positions), to_log

    @classmethod
    def reduce_metrics(cls, logging_outputs: list[dict]) -> None:
        """Logs both divergences too, in bits."""
        super().reduce_metrics(logging_outputs)
        sample_size = total("sample_size", logging_outputs)
        for name in ("words_kl", "attention_kl"):
            if name in logging_outputs[0]:
                bits = total(name, logging_outputs) / sample_size / math.log(2)
                metrics.log_scalar(name, bits, sample_size, round=3)

    def _meet(self, model: nn.Module) -> None:
        """Puts the originals where the model is, and old sublayers among the model's."""
        own = network_of(model)
        weight = next(model.parameters())
        for original in self.originals.values():
            original.to(device=weight.device, dtype=weight.dtype)
        if (path := self.cfg.replace_progressively) is not None:
            _refuse_strict_ddp(model)
            own.replacement = self._replacement(own, network_of(self.originals[path]))
        if self.cfg.distill is None:
            self.networks = (own,)
            return
        self.networks = (own, network_of(self.originals[self.cfg.distill]))
        if self.cfg.distill_attention_weight > 0:
            last_attentions(*self.networks)  # raises where they cannot be compared

    def _replacement(self, own: Stack, old: Stack) -> Replacement:
        assert self.record is not None
        self.record.check(own.plan, old.plan)
        cfg = self.cfg
        schedule = Schedule(max(1, round(cfg.replace_until * cfg.max_update)), cfg.replace_start, cfg.replace_order)
        found = Replacement(own.sublayers, old.sublayers, (own.plan, old.plan), self.record.sources, schedule, cfg.seed)
        logger.info("%d sublayers give way until update %d", len(found.changing), schedule.until)
        return found

    def _attention(self, net_input: dict, states: list[Tensor], teachers_states: list[Tensor]) -> Tensor:
        """The mean divergence of the last distributions; 0 while an old sublayer stands in the student's place."""
        own, teachers = self.networks
        last, teachers_last = last_attentions(own, teachers)
        place = own.place_in_training(last)
        if place is None:
            return states[0].new_zeros(())
        padding_mask = net_input["src_tokens"].eq(self.padding_idx)
        padding_mask = padding_mask if net_input.get("has_padding", True) else None
        found = distribution(own, last, states[place], padding_mask)
        with torch.no_grad():
            teachers_own = distribution(teachers, teachers_last, teachers_states[teachers_last], padding_mask)
        order = None if self.record is None else self.record.head_order(teachers_last, last)
        return attention_kl(found, teachers_own if order is None else teachers_own[:, order], padding_mask)


def network_of(model: nn.Module) -> Stack:
    """The encoder's sublayers, in whatever fairseq wraps the model."""
    return next(module for module in model.modules() if isinstance(module, Stack))


def _check(cfg: ContinuedMaskedLMConfig) -> None:
    """Raises a UserError for a number that means nothing, and for options that need another."""
    for name, least, most in (
        ("distill_masked_lm_weight", 0.0, math.inf),
        ("distill_words_weight", 0.0, math.inf),
        ("distill_attention_weight", 0.0, math.inf),
        ("replace_until", 0.0, 1.0),
        ("replace_start", 0.0, 1.0),
    ):
        value = getattr(cfg, name)
        if not (least <= value <= most and math.isfinite(value)):
            bounds = f"must be {least:g} or more" + (f", and {most:g} or less" if most < math.inf else "")
            raise UserError(f"--{name.replace('_', '-')} {value:g}: {bounds}")
    if not 0 < cfg.distill_temperature < math.inf:
        raise UserError(f"--distill-temperature {cfg.distill_temperature:g}: must be more than 0")
    if cfg.replace_progressively is None:
        return
    if cfg.warm_start is None:
        raise UserError(
            "--replace-progressively: also give --warm-start FOLDER/warm_start.json, which says which sublayer came "
            "from which; `lazyformer import` writes it"
        )
    if not cfg.max_update:
        raise UserError("--replace-progressively needs --max-update to know when it is to end")


def _refuse_strict_ddp(model: nn.Module) -> None:
    """Raises a UserError where torch would wait for gradients of sublayers that stand aside."""
    for module in model.modules():
        if isinstance(module, DistributedDataParallel) and not module.find_unused_parameters:
            raise UserError(
                "--replace-progressively: in some updates some weights have no gradient; add --find-unused-parameters, "
                "or give --ddp-backend legacy_ddp"
            )
