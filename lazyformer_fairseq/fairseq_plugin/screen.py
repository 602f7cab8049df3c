"""What a run shows with ``--log-seconds``: ten lines before its first update, then one every so many seconds.

All that fairseq and this package log goes to ``train.log`` in ``--save-dir`` as ever. The screen has warnings and
scores too; see :func:`~lazyformer_fairseq.fairseq_plugin.reliability.options.log_to`.
"""

import logging
import math
import sys
import time
from itertools import count
from types import SimpleNamespace
from typing import Any

import torch
from fairseq.models import build_model
from omegaconf import OmegaConf

from lazyformer_fairseq.arguments import options_by_name
from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.fairseq_plugin.reliability.options import LOG, SCREEN
from lazyformer_fairseq.modules.networks.options import MaskedLMOptions
from lazyformer_fairseq.options import chosen
from lazyformer_fairseq.patterns.architectures import (
    ARCHITECTURES,
    CAUSAL_ARCHITECTURES,
    MASKED_LM,
    name_of_twin,
)  # fmt: skip
from lazyformer_fairseq.report.numbers import duration
from lazyformer_fairseq.training.laptop import LAPTOP, LAPTOP_TOKENS

logger = logging.getLogger(SCREEN)

TIMED = 1.0  # seconds: passes shorter than this are timed again and again
LONG = 10.0  # seconds: a first pass that takes longer counts, though it also chooses back ends
HOUR = 3600
# Of the hour; validation and checkpoints take the rest, and by the recipe laptop twice the masks: 1.6 times the seconds
# of a pass, where the vocabulary is large and the model tiny.
SHARE_OF_UPDATES = 0.9
SHARE_BY_RECIPE = 0.5
SEQUENCES = 16  # of an update of the run that ends in an hour


class Screen:
    """Of one trainer.

    Attributes:
        seconds: between two lines; 0 for none.
    """

    def __init__(self, trainer: Any):
        self._trainer = trainer
        self.seconds = getattr(trainer.cfg.task, "log_seconds", 0)
        self._passes = 0  # since training began
        self._began = self._said = time.monotonic()

    def introduce(self) -> None:
        """Says what is about to be trained, on what, and on a processor how long it takes; the data are loaded."""
        trainer = self._trainer
        cfg = self._trainer.cfg
        if not self.seconds:
            return
        made = trainer.get_num_updates()
        most = self._most
        freq = cfg.optimization.update_freq[0]
        batch = cfg.dataset.batch_size
        most_tokens = cfg.dataset.max_tokens
        world = trainer.data_parallel_world_size
        length = cfg.task.get("tokens_per_sample") or cfg.task.get("tgt_len")
        here = sum(weight.numel() for weight in trainer.get_model().parameters())
        if trainer.experts is None:
            parameters = here
        else:
            parameters = trainer.experts.parameters
        of_epoch = math.ceil(len(trainer.epoch_iterator) / freq)
        if batch:
            batch = f"{batch} sequences of {length} tokens"
        else:
            batch = f"at most {most_tokens} tokens"
        device = "GPU" if trainer.cuda else "processor"
        whole = f"{most:,} updates" if most else "no end to updates"
        lines = {
            "model": f"{self._arch}, {cfg.model.sublayer_pattern}: {parameters:,} parameters",
            "data": f"{cfg.task.data}: {len(trainer.task.source_dictionary):,} symbols, {of_epoch:,} updates an epoch",
            "update": f"{freq} x {batch}, on {f'each {device} of {world}' if world > 1 else f'a {device}'}",
            "run": f"{whole}, {made:,} of them made; stop it with Ctrl-C, resume it with the same command",
            "files": f"{cfg.checkpoint.save_dir}: checkpoints, and {LOG}, which has all that is not shown here",
        }
        for what, said in lines.items():
            self._say(what, said)
        if not trainer.cuda and trainer.experts is None:  # whose passes need all processes
            with torch.random.fork_rng(devices=[]):
                self._tell_time(most - made, freq)
        self._began = self._said = time.monotonic()

    def say_nothing_is_left(self, why: str) -> None:
        """Say that the run had ended before it was started again; without ``--log-seconds``, too."""
        logger.info("nothing is left to do: %s", why)

    def _tell_time(self, updates: int, freq: int) -> None:
        """Times passes of the model, and of its twin where the run would take long; leaves no trace in the run."""
        trainer = self._trainer
        twin = name_of_twin(self._arch)
        cfg = trainer.cfg
        update = freq * _seconds_of_pass(trainer, trainer.get_model())
        if updates > 0:
            whole = f", {duration(update * updates)} for the run"
        else:
            whole = ""
        self._say("time", f"about {duration(update)} an update on this processor{whole}")
        if twin is None or update * updates < 2 * HOUR:
            return
        small, share, learning = self._twin(twin)
        passes = max(1, SEQUENCES // (cfg.dataset.batch_size or SEQUENCES))
        within = float(f"{share * HOUR / passes / _seconds_of_pass(trainer, small):.1e}")
        options = (
            f"--sequences-per-update {SEQUENCES} --max-update {within:.0f} --save-interval-updates {within / 10:.0f}"
        )
        self._say("", f"in about an hour: lazyformer pretrain {twin} {cfg.task.data} {options}{learning}")

    def _twin(self, twin: str) -> tuple[torch.nn.Module, float, str]:
        """The model, the share of the hour that its passes may take, and words that say how it learns.

        By the recipe laptop, where the model and what it learns have all of that.
        """
        cfg = self._trainer.cfg
        task = self._trainer.task
        row = {**ARCHITECTURES, **CAUSAL_ARCHITECTURES}[twin]
        usual = OmegaConf.merge(cfg.model, row.options())
        if cfg.task._name == MASKED_LM:
            try:
                small = build_model(OmegaConf.merge(usual, chosen(MaskedLMOptions, LAPTOP)), task)
                length = cfg.task.tokens_per_sample
                if length != LAPTOP_TOKENS:
                    tokens = f" --tokens-per-sample {length}"
                else:
                    tokens = ""
                return small, SHARE_BY_RECIPE, f"{tokens} --recipe laptop"
            except UserError:  # such as of a kind of attention that has no T5's bias
                pass
        if twin in CAUSAL_ARCHITECTURES:
            rate = ""
        else:
            rate = " --lr 1e-3"
        return build_model(usual, task), SHARE_OF_UPDATES, rate

    def tell(self, made: int, of: int) -> None:
        """Says how far the run is, once the seconds are over.

        Args:
            made: passes of the update under way.
            of: how many it has.
        """
        now = time.monotonic()
        trainer = self._trainer
        if self._passes == 1:
            self._warm = now  # the first pass compiles and chooses
        if self.seconds and self._passes and now - self._said >= self.seconds and trainer.is_data_parallel_master:
            self._said = now
            spent = now - self._began
            update = trainer.get_num_updates()
            parts = [f"update {update + 1:,}" + f" of {self._most:,}" * bool(self._most)]
            parts += [f"pass {made + 1} of {of}"] if of > 1 else []
            if trainer.guard is not None and trainer.guard.losses:
                parts.append(f"loss {trainer.guard.in_unit(trainer.guard.losses[-1]):.2f} {trainer.guard.unit}")
            parts.append(f"{duration(spent)} so far")
            if self._most and self._passes > 1:
                left = (self._most - update) * of - made
                parts[-1] += f", about {duration((now - self._warm) / (self._passes - 1) * left)} left"
            logger.info(", ".join(parts))
        self._passes += 1

    @property
    def _arch(self) -> str:
        return options_by_name(sys.argv).get("arch") or self._trainer.cfg.model._name

    @property
    def _most(self) -> int:
        return self._trainer.cfg.optimization.max_update or 0

    def _say(self, what: str, said: str) -> None:
        logger.info("%-7s %s", what, said)


def _seconds_of_pass(trainer: Any, model: torch.nn.Module) -> float:
    """Forward and backward pass of the first batch, with gradients of zero."""
    optimizer = SimpleNamespace(backward=lambda loss: loss.backward())
    criterion = trainer.get_criterion()
    model.to(next(trainer.model.parameters()).dtype).train()
    criterion.train()
    began = time.monotonic()
    for number in count():
        before = time.monotonic()
        sample, _ = trainer._prepare_sample(trainer._dummy_batch, is_dummy=True)
        trainer.task.train_step(sample, model, criterion, optimizer, 0, ignore_grad=True)
        now = time.monotonic()
        if now - before > LONG or (number and now - began > TIMED):
            model.zero_grad()
            return now - before
