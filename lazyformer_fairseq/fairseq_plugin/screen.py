"""The screen output of ``--log-seconds``: a description of the run, followed by periodic progress lines.

Everything that fairseq and this package log still goes to ``train.log`` in ``--save-dir``. The screen also shows
warnings and metrics; see :func:`~lazyformer_fairseq.fairseq_plugin.reliability.run_log.log_to`.
"""

import logging
import math
import sys
import time
from types import SimpleNamespace
from typing import Any

import torch

from lazyformer_fairseq.arguments import options_by_name
from lazyformer_fairseq.fairseq_plugin.reliability.run_log import LOG, SCREEN
from lazyformer_fairseq.report.numbers import duration

logger = logging.getLogger(SCREEN)

TIMED = 1.0  # seconds; passes are repeated for this long, and only the last one is measured
LONG = 10.0  # seconds; a pass that takes longer is not repeated, not even the first one, which also selects back ends


class Screen:
    """The screen output of one trainer's run.

    Attributes:
        seconds: the number of seconds between progress lines; 0 for none.
    """

    def __init__(self, trainer: Any):
        self._trainer = trainer
        self.seconds = getattr(trainer.cfg.task, "log_seconds", 0)
        self._passes = 0  # since training began
        self._began = self._said = time.monotonic()

    def introduce(self) -> None:
        """Describe the model, data and run and, on a CPU, estimate the time; call this after loading the data."""
        if not self.seconds:
            return
        trainer = self._trainer
        cfg = trainer.cfg
        made = trainer.get_num_updates()
        most = cfg.optimization.max_update or 0
        freq = cfg.optimization.update_freq[0]
        length = cfg.task.get("tokens_per_sample") or cfg.task.get("tgt_len")
        arch = options_by_name(sys.argv).get("arch") or cfg.model._name

        if trainer.experts is None:
            parameters = sum(weight.numel() for weight in trainer.get_model().parameters())
        else:
            parameters = trainer.experts.parameters
        updates_of_epoch = math.ceil(len(trainer.epoch_iterator) / freq)
        batch = f"at most {cfg.dataset.max_tokens} tokens"
        if cfg.dataset.batch_size:
            batch = f"{cfg.dataset.batch_size} sequences of {length} tokens"
        device = "GPU" if trainer.cuda else "CPU"
        devices = f"a {device}"
        if trainer.data_parallel_world_size > 1:
            devices = f"each of {trainer.data_parallel_world_size} {device}s"
        whole = f"{most:,} updates" if most else "no limit on updates"

        lines = {
            "model": f"{arch}, {cfg.model.sublayer_pattern}: {parameters:,} parameters",
            "data": f"{cfg.task.data}: {len(trainer.task.source_dictionary):,} symbols, "
            f"{updates_of_epoch:,} updates per epoch",
            "update": f"{freq} x {batch}, on {devices}",
            "run": f"{whole}, {made:,} done; stop it with Ctrl-C and resume it with the same command",
            "files": f"{cfg.checkpoint.save_dir}: checkpoints and {LOG}, which contains all output not shown here",
        }
        if not trainer.cuda and trainer.experts is None:  # with shared experts, a pass needs all processes
            with torch.random.fork_rng(devices=[]):
                update = freq * _seconds_of_pass(trainer)
            lines["time"] = f"about {duration(update)} per update on this CPU"
            if most > made:
                lines["time"] += f", {duration(update * (most - made))} for the run"
        for what, said in lines.items():
            logger.info("%-7s %s", what, said)
        self._began = self._said = time.monotonic()

    def report_finished(self, why: str) -> None:
        """Report that the run was already finished before this start, even without ``--log-seconds``."""
        logger.info("nothing is left to do: %s", why)

    def show_progress(self, made: int, of: int) -> None:
        """Print a progress line if enough seconds have passed since the last one.

        Args:
            made: the number of finished passes in the current update.
            of: the number of passes per update.
        """
        now = time.monotonic()
        trainer = self._trainer
        if self._passes == 1:
            self._warm = now  # excludes the first pass, which compiles the model and selects back ends
        is_due = self.seconds and self._passes and now - self._said >= self.seconds
        if is_due and trainer.is_data_parallel_master:
            self._said = now
            update = trainer.get_num_updates()
            most = trainer.cfg.optimization.max_update
            parts = [f"update {update + 1:,}"]
            if most:
                parts[0] += f" of {most:,}"
            if of > 1:
                parts.append(f"pass {made + 1} of {of}")
            if trainer.guard is not None and trainer.guard.losses:
                parts.append(f"loss {trainer.guard.in_unit(trainer.guard.losses[-1]):.2f} {trainer.guard.unit}")
            parts.append(f"{duration(now - self._began)} so far")
            if most and self._passes > 1:
                passes_left = (most - update) * of - made
                parts.append(f"about {duration((now - self._warm) / (self._passes - 1) * passes_left)} left")
            logger.info(", ".join(parts))
        self._passes += 1


def _seconds_of_pass(trainer: Any) -> float:
    """Return the time in seconds of a forward and backward pass on the first batch, without affecting the run."""
    model = trainer.get_model()
    optimizer = SimpleNamespace(backward=lambda loss: loss.backward())
    criterion = trainer.get_criterion()
    model.train()
    criterion.train()
    began = time.monotonic()
    passes = 0
    while True:
        before = time.monotonic()
        sample, _ = trainer._prepare_sample(trainer._dummy_batch, is_dummy=True)
        trainer.task.train_step(sample, model, criterion, optimizer, 0, ignore_grad=True)
        now = time.monotonic()
        if now - before > LONG or (passes and now - began > TIMED):
            model.zero_grad()
            return now - before
        passes += 1
