"""Damage that is done to numbers, files and disks of a run, and what is seen of the run meanwhile."""

import copy
import itertools
import os
from argparse import Namespace
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from unittest import mock

import torch
from torch.nn import Linear

from lazyformer_fairseq.fairseq_plugin.criterions.language_modeling import MaskedLMAccuracyCriterion
from lazyformer_fairseq.fairseq_plugin.trainer import SafeTrainer

TINY = "--arch lazyformer_m2x6_s_tiny --sublayer-pattern M2 --criterion masked_lm_accuracy --batch-size 4"


@dataclass
class Update:
    """One call of fairseq's train_step: the state around it."""

    before: dict
    after: dict
    samples: list[int]
    lr: float
    moved: bool  # the model's first weight


@contextmanager
def damaged_run(
    fault_of: Callable[[int], object], criterion=MaskedLMAccuracyCriterion, damages_loss=True, records=True
) -> Iterator[list[Update]]:
    """Within the block, damages calls of train_step and records all of them, unless it `records` none.

    `fault_of` gives for the number of a call, from 0, None or one of: "nan gradient", "inf gradient" (of the model's
    first weight, by a hook in the backward pass); "nan activations" (of the first linear layer, in the forward pass);
    "inf loss" (its gradient stays); a number, by which the loss is multiplied. Losses are those of `criterion`, which
    stays as it is where nothing `damages_loss`.
    """
    train_step, forward = SafeTrainer.train_step, criterion.forward
    updates, calls, fault = [], itertools.count(), None

    def damaged_train_step(trainer, samples, *args, **kwargs):
        nonlocal fault
        fault, hook, model = fault_of(next(calls)), None, trainer.get_model()
        weight = next(model.parameters())
        if fault in ("nan gradient", "inf gradient"):
            first, value = torch.arange(weight.numel()).view_as(weight) == 0, float(fault[:3])
            hook = weight.register_hook(lambda gradient: gradient.masked_fill(first, value))
        elif fault == "nan activations":
            layer = next(module for module in model.modules() if isinstance(module, Linear))
            hook = layer.register_forward_hook(lambda *call: call[-1] * torch.nan)
        old, before, lr = weight.detach().clone(), records and state_of(trainer), trainer.get_lr()
        try:
            return train_step(trainer, samples, *args, **kwargs)
        finally:
            fault = None
            if hook:
                hook.remove()
            if records:
                ids = [index for sample in samples if sample for index in sample["id"].tolist()]
                updates.append(Update(before, state_of(trainer), ids, lr, not torch.equal(weight, old)))

    def damaged_forward(criterion, *args, **kwargs):
        loss, sample_size, log = forward(criterion, *args, **kwargs)
        if fault == "inf loss":
            loss = loss + torch.inf
        elif isinstance(fault, (int, float)):
            loss = loss * fault
        return loss, sample_size, {**log, "loss": loss.detach()}

    loss_patch = mock.patch.object(criterion, "forward", damaged_forward if damages_loss else forward)
    with mock.patch.object(SafeTrainer, "train_step", damaged_train_step), loss_patch:
        yield updates


def state_of(trainer) -> dict:
    """All that a skipped update must leave alone, and the number of updates."""
    state = {
        "model": trainer.get_model().state_dict(),
        "optimizer": trainer.optimizer.state_dict()["state"],
        "ema": trainer.ema.get_model().state_dict() if trainer.cfg.ema.store_ema else {},
        "updates": trainer.get_num_updates(),
    }
    return copy.deepcopy(state)


def flip_a_bit(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 8
    path.write_bytes(content)


def truncate(path):
    os.truncate(path, path.stat().st_size * 2 // 3)


def options(folder, **others):
    """fairseq's options of checkpoints, by default as they are by default."""
    defaults = {"restore_file": "checkpoint_last.pt", "checkpoint_suffix": ""}
    defaults |= {"continue_once": None, "finetune_from_model": None, "no_save_optimizer_state": False}
    return Namespace(save_dir=str(folder), **{**defaults, **others})
