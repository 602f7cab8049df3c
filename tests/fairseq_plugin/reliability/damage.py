"""Numbers that are made to go wrong in a real run, and what is seen of the run while they do."""

import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from unittest import mock

import torch
from torch.nn import Linear

from lazyformer_fairseq.fairseq_plugin.criterions.language_modeling import MaskedLMAccuracyCriterion
from lazyformer_fairseq.fairseq_plugin.trainer import SafeTrainer

WEIGHT = "encoder.sentence_encoder.embed_tokens.weight"


@dataclass
class Update:
    """One call of fairseq's train_step: the state around it."""

    before: dict
    after: dict
    samples: list[int]
    lr: float


@dataclass
class DamagedRun:
    """Within the block, damages the calls of train_step that `kinds` names (from 0) and records all of them.

    Args:
        kinds: for the number of a call None or one of
            "nan gradient", "inf gradient": of one weight, by a hook in the backward pass.
            "nan activations": of the first linear layer, in the forward pass.
            "inf loss": the loss gets infinite, its gradient stays.
            a number: the loss is that many times itself.
        criterion: the class whose loss is damaged.
        weight: whose gradient is damaged; the model's first if not given.
        damages_loss: else the criterion stays as it is.
    """

    kinds: Callable[[int], object]
    criterion: type = MaskedLMAccuracyCriterion
    weight: str = ""
    damages_loss: bool = True
    updates: list[Update] = field(default_factory=list)

    def __enter__(self):
        train_step, forward = SafeTrainer.train_step, self.criterion.forward
        kind = None

        def damaged_train_step(trainer, samples, *args, **kwargs):
            nonlocal kind
            kind = self.kinds(len(self.updates))
            weights = dict(trainer.get_model().named_parameters())
            self.weight = self.weight or next(iter(weights))
            weight = weights[self.weight]
            value = {"nan gradient": torch.nan, "inf gradient": torch.inf}.get(kind)
            hook = weight.register_hook(lambda gradient: poisoned(gradient, value)) if value else None
            if kind == "nan activations":
                layer = next(module for module in trainer.get_model().modules() if isinstance(module, Linear))
                hook = layer.register_forward_hook(lambda *call: call[-1] * torch.nan)
            before, lr = state_of(trainer), trainer.get_lr()
            try:
                return train_step(trainer, samples, *args, **kwargs)
            finally:
                kind = None
                if hook:
                    hook.remove()
                ids = [index for sample in samples if sample for index in sample["id"].tolist()]
                self.updates.append(Update(before, state_of(trainer), ids, lr))

        def damaged_forward(criterion, *args, **kwargs):
            loss, sample_size, log = forward(criterion, *args, **kwargs)
            if kind == "inf loss":
                loss = loss + torch.inf
            elif isinstance(kind, (int, float)):
                loss = loss * kind
            return loss, sample_size, {**log, "loss": loss.detach()}

        self.patches = [mock.patch.object(SafeTrainer, "train_step", damaged_train_step)]
        if self.damages_loss:
            self.patches.append(mock.patch.object(self.criterion, "forward", damaged_forward))
        for patch in self.patches:
            patch.start()
        return self

    def __exit__(self, *_):
        for patch in self.patches:
            patch.stop()


def poisoned(gradient: torch.Tensor, value: float) -> torch.Tensor:
    gradient = gradient.clone()
    gradient.view(-1)[0] = value
    return gradient


def state_of(trainer) -> dict:
    """All that a skipped update must leave alone, and the number of updates."""
    state = {
        "model": trainer.get_model().state_dict(),
        "optimizer": trainer.optimizer.state_dict()["state"],
        "ema": trainer.ema.get_model().state_dict() if trainer.cfg.ema.store_ema else {},
        "updates": trainer.get_num_updates(),
    }
    return copy.deepcopy(state)
