"""A supernet is trained, an update at a time, until the search's updates are spent; it resumes to the bit.

It is of mixtures of all candidates, whose architecture learns too (PAR Transformer, section 2).
"""

import copy
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Optional

import torch
from torch import Tensor, nn

from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.evaluation.costs.flops import count_flops, count_sublayer_flops
from lazyformer_fairseq.experiments.search.latency import Prices, expected_latency, latency_of
from lazyformer_fairseq.experiments.search.material import ARCHITECTURE_SHARE, Material, Part
from lazyformer_fairseq.experiments.search.settings import SearchSettings
from lazyformer_fairseq.experiments.search.supernet import Supernet
from lazyformer_fairseq.patterns.grammar import read_sublayer, split_sublayers
from lazyformer_fairseq.progress import Progress
from lazyformer_fairseq.storage.atomic import write_text
from lazyformer_fairseq.storage.checkpoint_file import DamagedCheckpointError, check, named_errors, save
from lazyformer_fairseq.training.laptop import LAPTOP
from lazyformer_fairseq.training.loop import moved
from lazyformer_fairseq.training.muon import mark_matrices
from lazyformer_fairseq.training.optimization import OptimizationConfig

STATE, HISTORY = "state.pt", "history.jsonl"
LOG_INTERVAL, SAVE_INTERVAL = 100, 500  # updates
# PAR Transformer, section 2.2, names the decays; FBNet, which it follows, the temperatures. LAMB is as in NVIDIA's
# Transformer-XL: weight decay within the trust ratio, no bias correction, a bound of norms, gradients clipped.
LAMB: Mapping[str, Any] = {
    **{"optimizer": "nvlamb", "weight_decay": 1e-4, "no_bias_correction": True, "max_weight_norm": 10.0},
    **{"lr_scheduler": "wsd", "warmup_ratio": 0.0, "decay_share": 0.0, "clip_norm": 0.25},
}
ARCHITECTURE_DECAY = 5e-4
FIRST_TEMPERATURE, FINAL_TEMPERATURE = 5.0, 0.087
ARCHITECTURE = 2 / 3  # of an update's cost: no gradient of weights

# (model, batch) -> summed loss in nats, number of predictions: the first two of what a fairseq criterion returns
Loss = Callable[[nn.Module, dict[str, Any]], tuple[Tensor, Any]]


@dataclass
class Cost:
    """What was spent.

    Attributes:
        weights_updates, architecture_updates: how many.
        counted: updates of the baseline, by FLOPs.
    """

    weights_updates: int = 0
    architecture_updates: int = 0
    counted: float = 0.0


class Counting:
    """FLOPs of a pattern and of a mixture of all candidates, in those of the baseline."""

    def __init__(self, material: Material):
        settings = material.settings
        _, network = material.build_model(settings.baseline)
        self.sizes, lengths = network.sizes, material.training_lengths
        predicted = round(material.predicted_share * lengths[0])
        self._count = lambda pattern: count_flops(pattern, self.sizes, *lengths, predicted=predicted)
        self.baseline = self._count(settings.baseline)
        names = [*settings.candidates, *split_sublayers(settings.baseline)]
        each = {name: count_sublayer_flops(read_sublayer(name), self.sizes, *lengths) for name in names}
        rest = self.baseline - sum(each[name] for name in split_sublayers(settings.baseline))
        of_layer = sum(each[name] for name in settings.candidates)
        self.mixture = (rest + settings.layers * of_layer) / self.baseline

    def pattern(self, pattern: str) -> float:
        return self._count(pattern) / self.baseline


def temperature_at(spent: float, settings: SearchSettings) -> float:
    """Of the Gumbel-softmax: constant while the architecture is, then exponential decay to the end of the search."""
    share = max(spent - settings.constant_updates, 0) / (settings.max_updates - settings.constant_updates)
    return FIRST_TEMPERATURE * (FINAL_TEMPERATURE / FIRST_TEMPERATURE) ** share


def latency_nats(
    prices: Prices, settings: SearchSettings, probabilities_LK: Tensor, candidates: tuple[str, ...], budget: float
) -> Tensor:
    """Nats that the architecture's loss pays for expected latency beyond a share of the baseline's."""
    share = expected_latency(prices, probabilities_LK, candidates) / latency_of(prices, settings.baseline)
    return settings.latency_price * (share - budget).clamp(min=0)


def optimization_of(settings: SearchSettings) -> OptimizationConfig:
    """How a supernet's weights learn: by the recipe laptop as a whole pattern's, else by LAMB at a constant rate."""
    more = {"updates": settings.max_updates, "rate": settings.weights_lr, "seed": settings.seed}
    return OptimizationConfig.from_options(
        LAPTOP if settings.recipe == "laptop" else LAMB, **more, device=settings.device
    )


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


class Batches:
    """The batches of a part, epoch after epoch, from any place."""

    def __init__(self, part: Part):
        self.part = part
        self.epoch, self.position = 1, 0
        self._iterator: Optional[Iterator[list[dict[str, Any]]]] = None  # an epoch begins with its first batch

    def next(self) -> list[dict[str, Any]]:
        """In its pieces."""
        if self.position == len(self.part):
            self.epoch, self.position, self._iterator = self.epoch + 1, 0, None
        if self._iterator is None:
            self._iterator = iter(self.part.batches(self.epoch, self.position))
        self.position += 1
        return next(self._iterator)

    def state_dict(self) -> dict[str, Any]:
        return {"epoch": self.epoch, "position": self.position, "part": self.part.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.epoch, self.position = state["epoch"], state["position"]
        self._iterator = iter(self.part.batches(self.epoch, self.position)) if self.position else None
        self.part.load_state_dict(state["part"])


class SupernetTraining:
    """Trains mixtures until the next update would cost more than is left: weights are shared, each budget has choices.

    Budgets take turns. After the constant phase every n-th update is one of the architecture, n the inverse of the
    share of its data. Rate, temperature and phases go by the cost spent; where there is no budget an update costs 1.

    Args:
        parts: of the data, (for the weights, for the architecture).

    Attributes:
        choices: the architecture, for each budget its own.
        history: rows (update, loss, ...).
    """

    def __init__(
        self,
        supernet: Supernet,
        settings: SearchSettings,
        loss_of: Loss,
        parts: Sequence[Part],
        prices: Prices,
        counting: Counting,
    ):
        self.supernet, self.settings, self.loss_of = supernet.train(), settings, loss_of
        self.prices, self.counting = prices, counting
        self.batches = [Batches(part) for part in parts]
        mark_matrices(supernet.model)
        self.optimization = optimization_of(settings)
        self.weights = self.optimization.build_optimizer(supernet.model.parameters())
        self.schedule = self.optimization.build_schedule(self.weights)
        self.budgets: Sequence[Optional[float]] = sorted(settings.budgets) or [None]
        others = [copy.deepcopy(supernet.choices) for _ in self.budgets[1:]]
        self.choices = nn.ModuleList([supernet.choices, *others])
        how = {"lr": settings.architecture_lr, "weight_decay": ARCHITECTURE_DECAY}
        self.architecture = [torch.optim.Adam(each.parameters(), **how) for each in self.choices]
        self.spent = Cost()
        self.history: list[dict[str, Any]] = []
        self.loss = RunningLoss(torch.device(settings.device))

    @property
    def updates(self) -> int:
        return self.spent.weights_updates + self.spent.architecture_updates

    def is_architecture(self) -> bool:
        """Whether the next update is one of the architecture."""
        every = round(1 / ARCHITECTURE_SHARE)
        return self.spent.counted >= self.settings.constant_updates and self.updates % every == every - 1

    def next_cost(self) -> float:
        """Of the next update."""
        if not self.settings.budgets:
            return 1
        return self.counting.mixture * (ARCHITECTURE if self.is_architecture() else 1)

    def update(self) -> tuple[Tensor, Tensor]:
        """One update. Returns the summed loss in nats, without the price, and the number of predictions."""
        is_architecture = self.is_architecture()
        made = self.spent.architecture_updates if is_architecture else self.spent.weights_updates
        number = made % len(self.budgets)
        self.supernet.choices = self.choices[number]
        self.supernet.choices.temperature = temperature_at(self.spent.counted, self.settings)
        self.supernet.learn(is_architecture)
        return self.learn_architecture(number) if is_architecture else self.learn_weights()

    def learn_architecture(self, number: int) -> tuple[Tensor, Tensor]:
        """Of the budget of this number, by PAR Transformer's equation 5."""
        self.spent.architecture_updates += 1
        choices, budget = self.choices[number], self.budgets[number]

        def price() -> Tensor:
            return latency_nats(self.prices, self.settings, choices.probabilities(), choices.candidates, budget)

        found = self.find_gradients(self.batches[1].next(), None if budget is None else price)
        self.architecture[number].step()
        self.architecture[number].zero_grad()
        return found

    def run_in(self, folder: Path) -> None:
        """Trains to the end, from the state in the folder if there is one."""
        if (folder / STATE).exists():
            self.load_state_dict(load_state(folder / STATE))
            print(f"{folder}: resumes at update {self.updates}.")
        most, spent = self.settings.max_updates, round(self.spent.counted)
        with Progress(total=most, initial=spent, desc="supernet", unit=" updates") as bar:
            while self.spent.counted + (cost := self.next_cost()) <= most:
                self.loss.add(*self.update())
                self.spent.counted += cost
                bar.update(round(self.spent.counted) - bar.n)
                if self.updates % LOG_INTERVAL == 0:
                    bar.set_postfix_str(f"{self._log()['loss']:.2f} bits")
                if self.updates % SAVE_INTERVAL == 0:
                    save_state(folder, self.state_dict())
        save_state(folder, self.state_dict())

    def _log(self) -> dict[str, Any]:
        loss = self.loss.read()
        if not math.isfinite(loss):
            raise UserError(
                f"the loss is {loss} at update {self.updates}; give a lower --weights-lr, or look at the data"
            )
        row = {"update": self.updates, "loss": loss, "counted": self.spent.counted}
        row |= {"temperature": self.supernet.choices.temperature, "entropy": [each.entropy() for each in self.choices]}
        self.history.append(row)
        return row

    def learn_weights(self) -> tuple[Tensor, Tensor]:
        self.spent.weights_updates += 1
        found = self.find_gradients(self.batches[0].next())
        if self.optimization.clip_norm:
            nn.utils.clip_grad_norm_(self.supernet.model.parameters(), self.optimization.clip_norm)
        self.schedule.step_update(round(self.spent.counted))
        self.weights.optimizer.step()
        self.weights.optimizer.zero_grad()
        return found

    def find_gradients(
        self, pieces: Sequence[dict[str, Any]], price: Optional[Callable[[], Tensor]] = None
    ) -> tuple[Tensor, Tensor]:
        """Of the mean loss over the pieces of a batch, and of what `price` adds. Returns as :meth:`update` does."""
        found = []
        for piece in pieces:
            loss, count = self.loss_of(self.supernet, moved(piece, self.settings.device))
            mean = loss / count
            ((mean if price is None else mean + price()) / len(pieces)).backward()
            found.append((loss.detach(), torch.as_tensor(count).detach()))
        losses, counts = zip(*found, strict=True)
        return sum(losses), sum(counts)

    def state_dict(self) -> dict[str, Any]:
        """All that the rest of the training depends on; plain values and tensors."""
        state = {
            "model": self.supernet.model.state_dict(),
            "weights": self.weights.optimizer.state_dict(),
            "choices": self.choices.state_dict(),
            "architecture": [optimizer.state_dict() for optimizer in self.architecture],
            "batches": [batches.state_dict() for batches in self.batches],
            "random": torch.get_rng_state(),
            "loss": self.loss.sums,
            "spent": asdict(self.spent),
            "history": self.history,
        }
        if self.settings.device == "cuda":
            state["random_cuda"] = torch.cuda.get_rng_state()
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.supernet.model.load_state_dict(state["model"])
        self.weights.optimizer.load_state_dict(state["weights"])
        self.choices.load_state_dict(state["choices"])
        for name in ("architecture", "batches"):
            for each, kept in zip(getattr(self, name), state[name], strict=True):
                each.load_state_dict(kept)
        self.loss.sums.copy_(state["loss"])
        self.spent, self.history = Cost(**state["spent"]), state["history"]
        torch.set_rng_state(state["random"])
        if "random_cuda" in state:
            torch.cuda.set_rng_state(state["random_cuda"])


def save_state(folder: Path, state: dict[str, Any]) -> None:
    """Writes the state, then the history in it as JSON lines."""
    save(state, folder / STATE)
    write_text(folder / HISTORY, "".join(json.dumps(row) + "\n" for row in state["history"]))


def load_state(file: Path) -> dict[str, Any]:
    """A saved state, on the CPU (UserError where it is damaged, or holds anything else)."""
    with named_errors(file):
        try:
            check(file)
        except DamagedCheckpointError as error:
            raise UserError(f"{error}; remove it to start anew") from error
        return torch.load(file, map_location="cpu", weights_only=True)
