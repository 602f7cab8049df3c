"""One update: of the supernet's weights, or of its architecture (PAR Transformer, equation 5)."""

import math
from collections.abc import Callable
from typing import Any, Optional

import torch
from torch import Tensor, nn

from lazyformer_fairseq.experiments.search.price import Prices, expected_latency, latency_of
from lazyformer_fairseq.experiments.search.settings import SearchSettings
from lazyformer_fairseq.experiments.search.supernet.mixture import Supernet
from lazyformer_fairseq.fairseq_plugin.optim.nvlamb import Lamb, fitted

# (model, batch) -> summed loss in nats, number of predictions: the first two of what a fairseq criterion returns
Loss = Callable[[nn.Module, dict[str, Any]], tuple[Tensor, Any]]


def weights_optimizer(model: nn.Module, settings: SearchSettings) -> torch.optim.Optimizer:
    """LAMB as in NVIDIA's Transformer-XL: weight decay within the trust ratio, no bias correction."""
    return Lamb(
        model.parameters(), lr=settings.weights_lr, weight_decay=settings.weights_decay, bias_correction=False,
        max_weight_norm=10.0,
    )  # fmt: skip


def update_weights(
    model: nn.Module, optimizer: torch.optim.Optimizer, batch: dict[str, Any], loss_of: Loss, clip_norm: float
) -> tuple[Tensor, Tensor]:
    """One update of a model's weights, a supernet's or a plain one's.

    Returns:
        The summed loss in nats and the number of predictions, detached.
    """
    loss, count = loss_of(model, batch)
    (loss / count).backward()
    if clip_norm:
        nn.utils.clip_grad_norm_([p for group in optimizer.param_groups for p in group["params"]], clip_norm)
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach(), torch.as_tensor(count).detach()


class SupernetTraining:
    """A supernet with both of its optimizers: LAMB for the weights, Adam for the architecture, which pays `prices`."""

    def __init__(self, supernet: Supernet, settings: SearchSettings, loss_of: Loss, prices: Optional[Prices] = None):
        self.supernet = supernet.train()
        self.settings = settings
        self.loss_of = loss_of
        self.prices = prices
        self.weights = weights_optimizer(supernet.model, settings)
        self.architecture = torch.optim.Adam(
            [supernet.choices.logits], lr=settings.architecture_lr, weight_decay=settings.architecture_decay
        )

    def update(self, batch: dict[str, Any], architecture: bool) -> tuple[Tensor, Tensor]:
        """One update of either side. Returns the summed loss in nats, without the price, and the predictions."""
        self.supernet.learn(architecture)
        if not architecture:
            return update_weights(self.supernet, self.weights, batch, self.loss_of, self.settings.clip_norm)
        loss, count = self.loss_of(self.supernet, batch)
        mean = loss / count
        if self.prices and self.settings.latency_price:
            choices = self.supernet.choices
            mean = mean + latency_nats(self.prices, self.settings, choices.probabilities(), choices.candidates)
        mean.backward()
        self.architecture.step()
        self.architecture.zero_grad()
        return loss.detach(), torch.as_tensor(count).detach()

    def state_dict(self) -> dict[str, Any]:
        return {
            "supernet": self.supernet.state_dict(),
            "weights": self.weights.state_dict(),
            "architecture": self.architecture.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.supernet.load_state_dict(state["supernet"])
        self.weights.load_state_dict(fitted(state["weights"], self.weights))
        self.architecture.load_state_dict(state["architecture"])


def latency_nats(
    prices: Prices,
    settings: SearchSettings,
    probabilities_LK: Tensor,
    candidates: tuple[str, ...],
    budget: Optional[float] = None,
) -> Tensor:
    """Nats that the architecture's loss pays for expected latency beyond the baseline's free share, or a `budget`."""
    share = expected_latency(prices, probabilities_LK, candidates) / latency_of(prices, settings.baseline)
    free = settings.latency_budget if budget is None else budget
    return settings.latency_price * (share - free).clamp(min=0)


class RunningLoss:
    """Mean loss since it was last read, in bits per prediction; only reading it waits for a GPU."""

    def __init__(self, device: torch.device):
        self.sums = torch.zeros(2, dtype=torch.float64, device=device)

    def add(self, loss: Tensor, count: Tensor) -> None:
        self.sums += torch.stack([loss.double(), count.to(self.sums)])

    def read(self) -> float:
        loss, count = self.sums.tolist()
        self.sums.zero_()
        return loss / count / math.log(2)
