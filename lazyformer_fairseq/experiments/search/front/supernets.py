"""Trains a front's supernet until its share of the search's cost is spent; resumes."""

import json
import math
import random
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path as File
from typing import Any, Optional

import torch
from torch import Tensor, nn
from tqdm import tqdm

from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.experiments.search.front.cost import ARCHITECTURE, Cost, Counting
from lazyformer_fairseq.experiments.search.front.settings import FrontSettings
from lazyformer_fairseq.experiments.search.price import Prices
from lazyformer_fairseq.experiments.search.space import Path, Space
from lazyformer_fairseq.experiments.search.state import HISTORY, STATE, load_state
from lazyformer_fairseq.experiments.search.supernet.data_parts import Part, move_to
from lazyformer_fairseq.experiments.search.supernet.fairseq_model import FairseqSearch
from lazyformer_fairseq.experiments.search.supernet.mixture import Choices
from lazyformer_fairseq.experiments.search.supernet.single_path import SinglePath
from lazyformer_fairseq.experiments.search.supernet.training import (
    RunningLoss,
    latency_nats,
    update_weights,
    weights_optimizer,
)
from lazyformer_fairseq.fairseq_plugin.optim.nvlamb import fitted
from lazyformer_fairseq.fairseq_plugin.reliability.checkpoint_files import save
from lazyformer_fairseq.fairseq_plugin.reliability.options import backend_of
from lazyformer_fairseq.storage.atomic import write_text


class Batches:
    """The batches of a part, epoch after epoch, from any place."""

    def __init__(self, part: Part):
        self.part = part
        self.epoch, self.position = 1, 0
        self._iterator: Optional[Iterator[dict[str, Any]]] = None

    def next(self) -> dict[str, Any]:
        if self.position == len(self.part):
            self.epoch, self.position, self._iterator = self.epoch + 1, 0, None
        if self._iterator is None:
            self._iterator = iter(self.part.batches(self.epoch, self.position))
        self.position += 1
        return next(self._iterator)

    def state_dict(self) -> dict[str, Any]:
        return {"epoch": self.epoch, "position": self.position, "part": self.part.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.epoch, self.position, self._iterator = state["epoch"], state["position"], None
        self.part.load_state_dict(state["part"])


class SupernetTraining(ABC):
    """Trains a supernet, an update at a time.

    Args:
        cost: of all updates, in updates of the baseline, at most.

    Attributes:
        single: the supernet, of which a path can be taken.
        history: rows (update, counted, loss, ...).
    """

    def __init__(self, fairseq: FairseqSearch, counting: Counting, cost: float):
        self.fairseq, self.settings, self.counting, self.most = fairseq, fairseq.settings, counting, cost
        attention_backend = backend_of(fairseq.cfg.model)
        self.supernet, network = fairseq.build_supernet_and_network(self.settings.candidates)
        self.single = SinglePath(self.supernet, network, attention_backend)
        self.weights = weights_optimizer(self.supernet.model, self.settings)
        self.batches = [Batches(part) for part in fairseq.parts()]
        self.spent = Cost()
        self.history: list[dict[str, Any]] = []
        self.loss = RunningLoss(torch.device(self.settings.device))

    @property
    def updates(self) -> int:
        return self.spent.weights_updates + self.spent.architecture_updates

    @abstractmethod
    def next_cost(self) -> float:
        """Of the next update, in updates of the baseline."""

    @abstractmethod
    def update(self) -> tuple[Tensor, Tensor]:
        """One update. Returns the summed loss in nats and the number of predictions."""

    def shares(self) -> Optional[list[list[list[float]]]]:
        """By budget the probabilities (L rows of K) that were learned; None where none are."""
        return None

    def run(self, folder: File, save_interval: int) -> None:
        """Trains to the end, from the state in the folder if there is one."""
        if (folder / STATE).exists():
            self.load_state_dict(load_state(folder / STATE))
            print(f"{folder}: the supernet resumes at update {self.updates}.")
        self.supernet.train()
        with tqdm(total=round(self.most), initial=round(self.spent.counted), desc="supernet", unit=" updates") as bar:
            while self.spent.counted + (cost := self.next_cost()) <= self.most:
                with self.spent.timed(self.settings.device):
                    self.loss.add(*self.update())
                self.spent.counted += cost
                bar.update(round(self.spent.counted) - bar.n)
                if self.updates % self.settings.log_interval == 0:
                    bar.set_postfix_str(f"{self._log():.2f} bits")
                if self.updates % save_interval == 0:
                    self.save(folder)
        self.save(folder)

    def _log(self) -> float:
        loss = self.loss.read()
        if not math.isfinite(loss):
            raise UserError(
                f"the loss is {loss} at update {self.updates}; give a lower --weights-lr, or look at the data"
            )
        self.history.append({"update": self.updates, "counted": self.spent.counted, "loss": loss, **self._details()})
        return loss

    def _details(self) -> dict[str, Any]:
        return {}

    def _batch(self, number: int) -> dict[str, Any]:
        return move_to(self.batches[number].next(), self.settings.device)

    def _update_weights(self, model: nn.Module) -> tuple[Tensor, Tensor]:
        self.spent.weights_updates += 1
        return update_weights(model, self.weights, self._batch(0), self.fairseq.loss_of, self.settings.clip_norm)

    def save(self, folder: File) -> None:
        folder.mkdir(exist_ok=True)
        save(self.state_dict(), folder / STATE)
        write_text(folder / HISTORY, "".join(json.dumps(row) + "\n" for row in self.history))

    def state_dict(self) -> dict[str, Any]:
        state = {
            "model": self.supernet.model.state_dict(),
            "weights": self.weights.state_dict(),
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
        self.weights.load_state_dict(fitted(state["weights"], self.weights))
        for batches, kept in zip(self.batches, state["batches"], strict=True):
            batches.load_state_dict(kept)
        self.loss.sums.copy_(state["loss"])
        self.spent, self.history = Cost(**state["spent"]), state["history"]
        torch.set_rng_state(state["random"])
        if "random_cuda" in state:
            torch.cuda.set_rng_state(state["random_cuda"])


class PathTraining(SupernetTraining):
    """Each update trains one path, uniform over the valid ones (Guo et al., 2020, section 3.2)."""

    def __init__(self, fairseq: FairseqSearch, counting: Counting, cost: float):
        super().__init__(fairseq, counting, cost)
        self.space: Space = counting.space

    def _path(self) -> Path:
        """Of the next update; what decides it is its number alone, so that a resumed search repeats it."""
        return self.space.draw(random.Random(f"{self.settings.seed} {self.updates}"))

    def next_cost(self) -> float:
        return self.counting.path(self._path())

    def update(self) -> tuple[Tensor, Tensor]:
        self.single.take(self._path())
        return self._update_weights(self.single)


class MixtureTraining(SupernetTraining):
    """Mixtures of all candidates (PAR Transformer, section 2): weights are shared, each budget has its own choices.

    Budgets take turns. After the constant phase every n-th update is one of the architecture, n the inverse of the
    architecture's share. Temperature and phases go by the cost spent.

    Args:
        budgets: shares of the baseline's latency, the lowest first.
        prices: what the architecture pays for.
    """

    def __init__(self, fairseq: FairseqSearch, counting: Counting, cost: float, front: FrontSettings, prices: Prices):
        super().__init__(fairseq, counting, cost)
        self.budgets, self.prices = sorted(front.budgets), prices
        settings, device = self.settings, self.settings.device
        each = [Choices(settings.layers, settings.candidates).to(device) for _ in self.budgets]
        self.choices = nn.ModuleList(each)
        self.optimizers = [
            torch.optim.Adam(
                choices.parameters(), lr=settings.architecture_lr, weight_decay=settings.architecture_decay
            )
            for choices in each
        ]

    def _is_architecture(self) -> bool:
        """Whether the next update is one of the architecture."""
        is_constant = self.spent.counted < self.settings.schedule.constant_updates
        every = max(2, round(1 / self.settings.architecture_share))
        return not is_constant and self.updates % every == every - 1

    def next_cost(self) -> float:
        return self.counting.mixture * (ARCHITECTURE if self._is_architecture() else 1)

    def update(self) -> tuple[Tensor, Tensor]:
        is_architecture = self._is_architecture()
        made = self.spent.architecture_updates if is_architecture else self.spent.weights_updates
        number = made % len(self.budgets)
        choices = self.supernet.choices = self.choices[number]
        choices.train().temperature = self.settings.schedule.temperature_at(self.spent.counted)
        self.supernet.learn(is_architecture)
        return self._update_choices(number, choices) if is_architecture else self._update_weights(self.supernet)

    def _update_choices(self, number: int, choices: Choices) -> tuple[Tensor, Tensor]:
        self.spent.architecture_updates += 1
        loss, count = self.fairseq.loss_of(self.supernet, self._batch(1))
        price = latency_nats(
            self.prices, self.settings, choices.probabilities(), choices.candidates, self.budgets[number]
        )
        (loss / count + price).backward()
        self.optimizers[number].step()
        self.optimizers[number].zero_grad()
        return loss.detach(), torch.as_tensor(count).detach()

    def shares(self) -> list[list[list[float]]]:
        return [choices.probabilities().tolist() for choices in self.choices]

    def _details(self) -> dict[str, Any]:
        entropy = [choices.entropy() for choices in self.choices]
        return {"temperature": self.supernet.choices.temperature, "entropy": entropy}

    def state_dict(self) -> dict[str, Any]:
        optimizers = [optimizer.state_dict() for optimizer in self.optimizers]
        return {**super().state_dict(), "choices": self.choices.state_dict(), "architecture": optimizers}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.choices.load_state_dict(state["choices"])
        for optimizer, kept in zip(self.optimizers, state["architecture"], strict=True):
            optimizer.load_state_dict(kept)
        super().load_state_dict(state)
