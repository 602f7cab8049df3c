"""A supernet is trained, an update at a time, until the search's updates are spent; it resumes to the bit.

What is trained decides between two kinds: mixtures of all candidates, whose architecture learns too (PAR Transformer,
section 2), and one random pattern an update (Guo et al., 2020). Costs count in updates of the baseline.
"""

import copy
import json
import math
import random
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, Optional

import torch
from torch import Tensor, nn
from tqdm import tqdm

from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.experiments.search.fairseq_model import FairseqSearch, Part, move_to
from lazyformer_fairseq.experiments.search.latency import REST, Prices, expected_latency, latency_of
from lazyformer_fairseq.experiments.search.settings import SearchSettings
from lazyformer_fairseq.experiments.search.space import Space, Subnet, by_layer, compact, letters, most_probable
from lazyformer_fairseq.experiments.search.supernet import SinglePath, Supernet
from lazyformer_fairseq.fairseq_plugin.optim.nvlamb import Lamb, fitted
from lazyformer_fairseq.fairseq_plugin.reliability.checkpoint_files import save
from lazyformer_fairseq.measure.costs.flops import count_flops, count_sublayer_flops
from lazyformer_fairseq.measure.costs.latency import wait_for
from lazyformer_fairseq.patterns.grammar import read_sublayer, split_sublayers
from lazyformer_fairseq.storage.atomic import write_text

STATE, HISTORY = "state.pt", "history.jsonl"
SAVE_INTERVAL = 500
FORWARD = 1 / 3  # of an update: its backward pass costs twice the forward pass
ARCHITECTURE = 2 / 3  # no gradient of weights

# (model, batch) -> summed loss in nats, number of predictions: the first two of what a fairseq criterion returns
Loss = Callable[[nn.Module, dict[str, Any]], tuple[Tensor, Any]]


@dataclass
class Cost:
    """What was spent.

    Attributes:
        weights_updates, architecture_updates, evaluations: how many; an evaluation is of one pattern.
        counted: updates of the baseline, by FLOPs.
        seconds: of updates and evaluations; on a processor, of its cores together.
    """

    weights_updates: int = 0
    architecture_updates: int = 0
    evaluations: int = 0
    counted: float = 0.0
    seconds: float = 0.0

    @contextmanager
    def timed(self, device: str) -> Iterator[None]:
        clock = clock_of(device)
        began = clock()
        yield
        self.seconds += clock() - began

    def __add__(self, other: "Cost") -> "Cost":
        return Cost(**{name: value + getattr(other, name) for name, value in asdict(self).items()})


def clock_of(device: str) -> Callable[[], float]:
    """Seconds: a processor's own, which others on the machine do not lengthen; of a GPU those that pass."""
    if device == "cpu":
        return time.process_time

    def passed() -> float:
        wait_for(device)
        return time.perf_counter()

    return passed


class Counting:
    """FLOPs of a search's forward passes, in forward passes of the baseline."""

    def __init__(self, fairseq: FairseqSearch):
        settings = fairseq.settings
        _, network = fairseq.build_model(settings.baseline)
        sizes, lengths = network.sizes, fairseq.training_lengths
        predicted = round(fairseq.predicted_share * lengths[0])
        self.baseline = count_flops(settings.baseline, sizes, *lengths, predicted=predicted)
        names = {*settings.candidates, *split_sublayers(settings.baseline)}
        each = {name: count_sublayer_flops(read_sublayer(name), sizes, *lengths) for name in names}
        rest = self.baseline - sum(each[name] for name in split_sublayers(settings.baseline))
        flops = {read_sublayer(name).text: float(count) for name, count in each.items()}
        self.space = Space(settings.candidates, settings.layers, {**flops, REST: float(rest)})
        of_layer = sum(flops[read_sublayer(name).text] for name in settings.candidates)
        self.mixture = (rest + settings.layers * of_layer) / self.baseline

    def subnet(self, subnet: Subnet) -> float:
        return self.space.latency(subnet) / self.baseline


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


class Batches:
    """The batches of a part, epoch after epoch, from any place."""

    def __init__(self, part: Part):
        self.part = part
        self.epoch, self.position = 1, 0
        self._iterator: Optional[Iterator[dict[str, Any]]] = None

    @property
    def is_over(self) -> bool:
        """Whether the epoch is."""
        return self.position == len(self.part)

    def next(self, epoch: Optional[int] = None) -> dict[str, Any]:
        """The next batch; the first one of another `epoch`, if that is given."""
        if epoch not in (None, self.epoch) or self.is_over:
            self.epoch, self.position, self._iterator = epoch or self.epoch + 1, 0, None
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


class SupernetTraining(ABC):
    """Trains a supernet until the next update would cost more than is left.

    Args:
        parts: of the data, (for the weights, for the architecture).
        most: cost of all updates.
        prices: what the architecture pays for; None for nothing.
        budgets: shares of the baseline's latency. Each has choices of its own; None: as the settings have it.
        counting: for those that count FLOPs.
        single: the supernet, for those that train one pattern of it at a time.

    Attributes:
        history: rows (update, loss, ...).
    """

    times_updates = True  # which waits for a GPU

    def __init__(
        self,
        supernet: Supernet,
        settings: SearchSettings,
        loss_of: Loss,
        parts: Sequence[Part],
        most: float,
        prices: Optional[Prices] = None,
        budgets: Sequence[Optional[float]] = (),
        counting: Optional[Counting] = None,
        single: Optional[SinglePath] = None,
    ):
        self.supernet, self.settings, self.loss_of = supernet.train(), settings, loss_of
        self.counting, self.single = counting, single
        self.most, self.prices, self.budgets = most, prices, budgets
        self.batches = [Batches(part) for part in parts]
        self.weights = weights_optimizer(supernet.model, settings)
        others = [copy.deepcopy(supernet.choices) for _ in budgets[1:]]
        self.choices = nn.ModuleList([supernet.choices, *others] if budgets else [])
        self.architecture = [
            torch.optim.Adam(each.parameters(), lr=settings.architecture_lr, weight_decay=settings.architecture_decay)
            for each in self.choices
        ]
        self.spent = Cost()
        self.history: list[dict[str, Any]] = []
        self.loss = RunningLoss(torch.device(settings.device))

    @property
    def updates(self) -> int:
        return self.spent.weights_updates + self.spent.architecture_updates

    @property
    def is_finished(self) -> bool:
        return self.spent.counted + self.next_cost() > self.most

    def next_cost(self) -> float:
        """Of the next update."""
        return 1

    @abstractmethod
    def update(self) -> tuple[Tensor, Tensor]:
        """One update. Returns the summed loss in nats, without the price, and the number of predictions."""

    def row_is_due(self) -> bool:
        """Whether a row of the history ends with this update."""
        return self.updates % self.settings.log_interval == 0

    def details(self) -> dict[str, Any]:
        """What a row has beside update and loss."""
        return {"counted": self.spent.counted}

    def shares(self) -> Optional[list[list[list[float]]]]:
        """By budget the probabilities (L rows of K) that were learned; None where none are."""
        return [choices.probabilities().tolist() for choices in self.choices] or None

    def run_in(self, folder: Path, save_interval: int = SAVE_INTERVAL) -> None:
        """Trains to the end, from the state in the folder if there is one."""
        self.resume(folder)
        self.run(partial(save_state, folder), save_interval)

    def run(self, save: Callable[[dict[str, Any]], None], save_interval: int = SAVE_INTERVAL) -> None:
        """Trains to the end; `save` gets the state every `save_interval` updates and at the end."""
        with tqdm(total=round(self.most), initial=round(self.spent.counted), desc="supernet", unit=" updates") as bar:
            while not self.is_finished:
                cost = self.next_cost()
                with self.spent.timed(self.settings.device) if self.times_updates else nullcontext():
                    self.loss.add(*self.update())
                self.spent.counted += cost
                bar.update(round(self.spent.counted) - bar.n)
                if self.row_is_due():
                    row = self._log()
                    bar.set_postfix_str(f"{row['loss']:.2f} bits {row.get('pattern', '')}")
                if self.updates % save_interval == 0:
                    save(self.state_dict())
        save(self.state_dict())

    def _log(self) -> dict[str, Any]:
        loss = self.loss.read()
        if not math.isfinite(loss):
            raise UserError(
                f"the loss is {loss} at update {self.updates}; give a lower --weights-lr, or look at the data"
            )
        self.history.append({"update": self.updates, "loss": loss, **self.details()})
        return self.history[-1]

    def prepare(self, number: int, architecture: bool) -> None:
        """For an update by the choices of the budget of this number: of the weights, or of these choices."""
        self.supernet.choices = self.choices[number]
        self.supernet.choices.temperature = self.settings.schedule.temperature_at(self.spent.counted)
        self.supernet.learn(architecture)

    def learn_weights(self, model: nn.Module) -> tuple[Tensor, Tensor]:
        """Of `model`, the supernet or the one pattern of it that runs."""
        self.spent.weights_updates += 1
        batch = move_to(self.batches[0].next(), self.settings.device)
        return update_weights(model, self.weights, batch, self.loss_of, self.settings.clip_norm)

    def learn_architecture(self, number: int, epoch: Optional[int] = None) -> tuple[Tensor, Tensor]:
        """Of the budget of this number, by PAR Transformer's equation 5."""
        self.spent.architecture_updates += 1
        choices = self.choices[number]
        loss, count = self.loss_of(self.supernet, move_to(self.batches[1].next(epoch), self.settings.device))
        mean = loss / count
        if self.prices and self.settings.latency_price:
            probabilities = choices.probabilities()
            budget = self.budgets[number]
            mean = mean + latency_nats(self.prices, self.settings, probabilities, choices.candidates, budget)
        mean.backward()
        self.architecture[number].step()
        self.architecture[number].zero_grad()
        return loss.detach(), torch.as_tensor(count).detach()

    def state_dict(self) -> dict[str, Any]:
        """All that the rest of the training depends on; plain values and tensors."""
        state = {
            "model": self.supernet.model.state_dict(),
            "weights": self.weights.state_dict(),
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
        self.weights.load_state_dict(fitted(state["weights"], self.weights))
        self.choices.load_state_dict(state.get("choices", {}))
        for optimizer, kept in zip(self.architecture, state.get("architecture", ()), strict=True):
            optimizer.load_state_dict(kept)
        for batches, kept in zip(self.batches, state["batches"], strict=True):
            batches.load_state_dict(kept)
        self.loss.sums.copy_(state["loss"])
        self.spent, self.history = Cost(**state["spent"]), state["history"]
        torch.set_rng_state(state["random"])
        if "random_cuda" in state:
            torch.cuda.set_rng_state(state["random_cuda"])

    def resume(self, folder: Path) -> None:
        """Takes up the state in the folder, if there is one."""
        if not (folder / STATE).exists():
            return
        state = _in_todays_layout(load_state(folder / STATE), len(self.batches[0].part))
        self.load_state_dict(state)
        if "max_weight_norm" not in state["weights"]["param_groups"][0]:
            print(
                f"{folder}: began with pytorch_optimizer's LAMB; it goes on with the package's own, which does not "
                "divide the rate by 1 - 0.9^update and rounds differently."
            )
        print(f"{folder}: resumes at update {self.updates}.")


class SubnetTraining(SupernetTraining):
    """Each update trains one pattern, uniform over the valid ones (Guo et al., 2020, section 3.2)."""

    def _subnet(self) -> Subnet:
        """Of the next update; what decides it is its number alone, so that a resumed search repeats it."""
        return self.counting.space.draw(random.Random(f"{self.settings.seed} {self.updates}"))

    def next_cost(self) -> float:
        return self.counting.subnet(self._subnet())

    def update(self) -> tuple[Tensor, Tensor]:
        self.single.take(self._subnet())
        return self.learn_weights(self.single)


class MixtureTraining(SupernetTraining):
    """Mixtures of all candidates (PAR Transformer, section 2): weights are shared, each budget has its own choices.

    Budgets take turns. After the constant phase every n-th update is one of the architecture, n the inverse of the
    architecture's share. Temperature and phases go by the cost spent.
    """

    def is_architecture(self) -> bool:
        """Whether the next update is one of the architecture."""
        is_constant = self.spent.counted < self.settings.schedule.constant_updates
        every = max(2, round(1 / self.settings.architecture_share))
        return not is_constant and self.updates % every == every - 1

    def next_cost(self) -> float:
        return self.counting.mixture * (ARCHITECTURE if self.is_architecture() else 1)

    def update(self) -> tuple[Tensor, Tensor]:
        is_architecture = self.is_architecture()
        made = self.spent.architecture_updates if is_architecture else self.spent.weights_updates
        number = made % len(self.budgets)
        self.prepare(number, is_architecture)
        return self.learn_architecture(number) if is_architecture else self.learn_weights(self.supernet)

    def details(self) -> dict[str, Any]:
        entropy = [choices.entropy() for choices in self.choices]
        return super().details() | {"temperature": self.supernet.choices.temperature, "entropy": entropy}


class PatternSearch(SupernetTraining):
    """One pattern, as in PAR Transformer, section 2.2: epochs of weights updates, each followed by the architecture's.

    An epoch is all batches of the weights' part, then, after the constant phase, all of the architecture's part.

    Attributes:
        converged: whether the pattern has stayed the same for long enough.

    Raises:
        UserError: the updates end before the architecture's first stage.
    """

    times_updates = False

    def __init__(
        self, supernet: Supernet, settings: SearchSettings, loss_of: Loss, parts: Sequence[Part], prices: Prices
    ):
        super().__init__(supernet, settings, loss_of, parts, settings.schedule.max_updates, prices, [None])
        self.schedule = settings.schedule
        self.is_architecture_now = self.converged = False
        self.unchanged = 0  # architecture updates in a row that did not change the pattern
        self.chosen = self.most_probable()
        weights = len(self.batches[0].part)
        first = self.schedule.first_architecture_update(weights)
        if first >= self.schedule.max_updates:
            raise UserError(
                f"--max-updates {self.schedule.max_updates}: the first update of the architecture would be number "
                f"{first + 1}: after --constant-updates {self.schedule.constant_updates}, at the end of an epoch of "
                f"{weights}; give more updates, fewer constant ones, or a larger --batch-size"
            )

    @property
    def is_finished(self) -> bool:
        return self.converged or super().is_finished

    def most_probable(self) -> list[str]:
        """The pattern as of now, by layer."""
        choices = self.choices[0]
        return most_probable(choices.probabilities().tolist(), choices.candidates)

    def update(self) -> tuple[Tensor, Tensor]:
        weights, architecture = self.batches
        is_due = weights.is_over and self.spent.counted >= self.schedule.constant_updates
        is_architecture = is_due and (architecture.epoch != weights.epoch or not architecture.is_over)
        self.prepare(0, is_architecture)
        self.is_architecture_now = is_architecture
        if not is_architecture:
            return self.learn_weights(self.supernet)
        found = self.learn_architecture(0, weights.epoch)
        chosen = self.most_probable()
        self.unchanged = self.unchanged + 1 if chosen == self.chosen else 0
        self.chosen = chosen
        self.converged = self.schedule.is_converged(self.unchanged, len(architecture.part))
        return found

    def row_is_due(self) -> bool:
        """Also at the end of a stage: a row holds updates of one kind."""
        return self.batches[self.is_architecture_now].is_over or self.is_finished or super().row_is_due()

    def details(self) -> dict[str, Any]:
        choices, chosen = self.choices[0], self.most_probable()
        probabilities = choices.probabilities().detach().cpu()
        return {
            "epoch": self.batches[0].epoch,
            "stage": "architecture" if self.is_architecture_now else "weights",
            "temperature": choices.temperature,
            "entropy": choices.entropy(),
            "pattern": compact(letters(chosen)),
            "by_layer": by_layer(chosen),
            "expected_latency": float(expected_latency(self.prices or {}, probabilities, choices.candidates)),
        }

    def state_dict(self) -> dict[str, Any]:
        found = {"unchanged": self.unchanged, "chosen": self.chosen, "converged": self.converged}
        return super().state_dict() | {"found": found}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        for name, value in state["found"].items():
            setattr(self, name, value)


def save_state(folder: Path, state: dict[str, Any]) -> None:
    """Writes the state, then the history in it as JSON lines."""
    folder.mkdir(exist_ok=True)
    save(state, folder / STATE)
    write_text(folder / HISTORY, "".join(json.dumps(row) + "\n" for row in state["history"]))


def load_state(file: Path) -> dict[str, Any]:
    """A saved state, on the CPU (UserError where it is damaged)."""
    try:
        return torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:  # torch raises many kinds of errors on a damaged file
        raise UserError(
            f"{file}: damaged, or no state of a search ({type(error).__name__}); remove it to start anew"
        ) from error


def _in_todays_layout(state: dict[str, Any], weights_batches: int) -> dict[str, Any]:
    """Of a search for one pattern that began with 0.1.0, whose epochs counted the updates of both kinds together."""
    if "training" not in state:
        return state
    training, progress = state["training"], state["progress"]
    names = {"model.": "model", "choices.": "choices"}
    kept: dict[str, dict[str, Tensor]] = {"model": {}, "choices": {}}
    for name, tensor in training["supernet"].items():
        start = next(start for start in names if name.startswith(start))
        kept[names[start]][("0." if start == "choices." else "") + name.removeprefix(start)] = tensor
    at = (min(progress["position"], weights_batches), max(progress["position"] - weights_batches, 0))
    return {
        **{name: state[name] for name in ("random", "random_cuda", "loss", "history") if name in state},
        **kept,
        "weights": training["weights"],
        "architecture": [training["architecture"]],
        "batches": [
            {"epoch": progress["epoch"], "position": position, "part": part}
            for position, part in zip(at, state["parts"], strict=True)
        ],
        "spent": asdict(Cost(weights_updates=progress["update"], counted=progress["update"])),
        "found": {name: progress[name] for name in ("unchanged", "chosen", "converged")},
    }
