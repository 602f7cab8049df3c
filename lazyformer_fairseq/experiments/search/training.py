"""PAR Transformer's gradient search (section 2.2), which alternately trains a supernet's weights and architecture."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from lazyformer_fairseq.experiments.search.settings import SearchSettings
from lazyformer_fairseq.experiments.search.supernet_objective import ARCHITECTURE, side_at
from lazyformer_fairseq.experiments.training_runs import Job, Training
from lazyformer_fairseq.training.laptop import LAPTOP
from lazyformer_fairseq.training.objectives.interface import Batch
from lazyformer_fairseq.training.optimization import OptimizationConfig
from lazyformer_fairseq.training.optimizers import AdamLike

SAVE_INTERVAL = 500  # updates
# The weight decays are from PAR Transformer, section 2.2, and the temperatures from FBNet, which it follows. LAMB is
# set up as in NVIDIA's Transformer-XL, with weight decay within the trust ratio, no bias correction, a maximum weight
# norm, and gradient clipping.
LAMB: Mapping[str, Any] = {
    "optimizer": "nvlamb",
    "weight_decay": 1e-4,
    "no_bias_correction": True,
    "max_weight_norm": 10.0,
    "lr_scheduler": "wsd",
    "warmup_ratio": 0.0,
    "decay_share": 0.0,
    "clip_norm": 0.25,
}
ARCHITECTURE_DECAY = 5e-4
FIRST_TEMPERATURE = 5.0
FINAL_TEMPERATURE = 0.087


def temperature_at(update: int, settings: SearchSettings) -> float:
    """Return the Gumbel-softmax temperature: constant at first, then decaying while the architecture is trained.

    The decay is exponential and begins after the constant updates.
    """
    share = max(update - settings.constant_updates, 0) / (settings.max_updates - settings.constant_updates)
    return FIRST_TEMPERATURE * (FINAL_TEMPERATURE / FIRST_TEMPERATURE) ** share


class SupernetOptimizer:
    """The weights' and the architecture's optimizers in one object; a step updates the side that has gradients.

    Args:
        weights: the weights' optimizer; the schedule sets its learning rate.
        architecture: the Adam optimizer for the architecture's parameter.
    """

    def __init__(self, weights: AdamLike, architecture: torch.optim.Adam):
        self.weights = weights
        self.architecture = architecture
        self.get_lr = weights.get_lr
        self.set_lr = weights.set_lr

    @property
    def optimizer(self) -> "SupernetOptimizer":
        """The object itself, since the training loop calls ``optimizer.step`` and ``optimizer.state_dict``."""
        return self

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The parameter groups of weights and architecture."""
        return [*self.weights.param_groups, *self.architecture.param_groups]

    def step(self) -> None:
        """Update the weights or the architecture, whichever has gradients."""
        (logits,) = self.architecture.param_groups[0]["params"]
        if logits.grad is None:
            self.weights.optimizer.step()
        else:
            self.architecture.step()

    def state_dict(self) -> dict[str, Any]:
        """Return both optimizers' states."""
        return {"weights": self.weights.optimizer.state_dict(), "architecture": self.architecture.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load both optimizers' states."""
        self.weights.load_state_dict(state["weights"])
        self.architecture.load_state_dict(state["architecture"])


@dataclass(frozen=True)
class SupernetOptimization(OptimizationConfig):
    """The optimization of a supernet.

    Attributes:
        architecture_rate: the architecture's learning rate; all other fields apply to the weights.
    """

    architecture_rate: float = 1e-2

    @classmethod
    def of(cls, settings: SearchSettings) -> "SupernetOptimization":
        """Return the optimization of a search's supernet.

        With the laptop recipe, the weights are trained as in an ordinary model. Otherwise, they are trained with LAMB
        at a constant rate.
        """
        if settings.recipe == "laptop":
            options = LAPTOP
        else:
            options = LAMB
        return cls.from_options(
            options,
            updates=settings.max_updates,
            rate=settings.weights_lr,
            seed=settings.seed,
            update_freq=settings.update_freq,
            device=settings.device,
            architecture_rate=settings.architecture_lr,
        )

    def resolved_optimizer_options(self) -> dict[str, Any]:
        """Return both optimizers' options, with all defaults filled in."""
        architecture = {"architecture_lr": self.architecture_rate, "architecture_decay": ARCHITECTURE_DECAY}
        return super().resolved_optimizer_options() | architecture

    def build_optimizer(self, weights: Iterable[nn.Parameter]) -> SupernetOptimizer:
        """Build a supernet's optimizer; the last parameter in `weights` is the architecture."""
        *own, logits = weights
        architecture = torch.optim.Adam([logits], lr=self.architecture_rate, weight_decay=ARCHITECTURE_DECAY)
        return SupernetOptimizer(super().build_optimizer(own), architecture)


class SupernetTraining(Training):
    """The training loop of a supernet; its curve contains the architecture's entropy and temperature."""

    RATE_OPTION = "--weights-lr"

    def __init__(self, settings: SearchSettings, job: Job):
        super().__init__(job)
        self.settings = settings

    def train_on(self, batches: Sequence[Batch]) -> None:
        """Update either the weights or the architecture; the architecture's gradients are not clipped."""
        is_of_architecture = side_at(self.updates, self.settings.constant_updates) == ARCHITECTURE
        self.model.architecture.temperature = temperature_at(self.updates, self.settings)
        self.model.learn(is_of_architecture)
        if is_of_architecture:
            self.clip_norm = 0.0
        else:
            self.clip_norm = self.optimization.clip_norm
        super().train_on(batches)

    def is_due(self) -> bool:
        """Return whether to measure and save after this update."""
        return self.updates == self.job.updates or self.updates % SAVE_INTERVAL == 0

    def measure(self) -> Mapping[str, float]:
        """Return the architecture's entropy, in bits and averaged over layers, and the temperature."""
        return {
            "entropy": self.model.architecture.entropy(),
            "temperature": temperature_at(self.updates, self.settings),
        }

    def result(self) -> dict[str, Any]:
        """Return the run's result, including the candidates' probabilities in each layer, (L, K)."""
        return {**super().result(), "probabilities": self.model.architecture.probabilities().tolist()}
