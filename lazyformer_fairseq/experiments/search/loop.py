"""The search itself: epochs of weights updates, each followed by a stage of architecture updates."""

import math
from collections.abc import Callable
from typing import Any

import torch
from tqdm import tqdm

from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.experiments.search.price import Prices, expected_latency
from lazyformer_fairseq.experiments.search.report.found_pattern import by_layer, compact, letters, most_probable
from lazyformer_fairseq.experiments.search.settings import Schedule
from lazyformer_fairseq.experiments.search.supernet.data_parts import Part, move_to
from lazyformer_fairseq.experiments.search.supernet.training import RunningLoss, SupernetTraining

SAVE_INTERVAL = 500


class Search:
    """Runs a search from any state to its end.

    An epoch is all batches of the weights' part, then, after the constant phase, all of the architecture's part.

    Args:
        parts: of the data, (for the weights, for the architecture).
        prices: for the history.
        log_interval: updates between rows of the history.

    Attributes:
        history: rows (update, epoch, stage, loss, temperature, entropy, pattern, ...).
        converged: whether the pattern has stayed the same for long enough.

    Raises:
        UserError: the updates end before the architecture's first stage.
    """

    def __init__(
        self,
        training: SupernetTraining,
        parts: tuple[Part, Part],
        schedule: Schedule,
        prices: Prices,
        log_interval: int = 100,
    ):
        self.training = training
        self.choices = training.supernet.choices
        self.device = self.choices.logits.device
        self.weights_part, self.architecture_part = parts
        self.schedule = schedule
        self.prices = prices
        self.log_interval = log_interval
        self.loss = RunningLoss(self.device)
        self.history: list[dict[str, Any]] = []
        self.update = 0
        self.epoch = 1
        self.position = 0  # updates done in this epoch
        self.unchanged = 0  # architecture updates in a row that did not change the pattern
        self.chosen = self.most_probable()
        self.converged = False
        first = schedule.first_architecture_update(len(self.weights_part))
        if first >= schedule.max_updates:
            raise UserError(
                f"--max-updates {schedule.max_updates}: the first update of the architecture would be number "
                f"{first + 1}: after --constant-updates {schedule.constant_updates}, at the end of an epoch of "
                f"{len(self.weights_part)}; give more updates, fewer constant ones, or a larger --batch-size"
            )

    @property
    def is_finished(self) -> bool:
        return self.converged or self.update >= self.schedule.max_updates

    def most_probable(self) -> list[str]:
        """The pattern as of now, by layer."""
        return most_probable(self.choices.probabilities().tolist(), self.choices.candidates)

    def run(self, save: Callable[[dict[str, Any]], None], save_interval: int = SAVE_INTERVAL) -> None:
        """Searches to the end; `save` gets the state every `save_interval` updates and at the end."""
        with tqdm(total=self.schedule.max_updates, initial=self.update, desc="search", unit=" updates") as bar:
            while not self.is_finished:
                if self._epoch_is_over():
                    self.epoch, self.position = self.epoch + 1, 0
                self._stage(self.position >= len(self.weights_part), save, save_interval, bar)
        save(self.state_dict())

    def _epoch_is_over(self) -> bool:
        """After the weights' part in the constant phase, later after the architecture's."""
        is_constant = self.update < self.schedule.constant_updates
        weights_updates = len(self.weights_part)
        return self.position == weights_updates + (0 if is_constant else len(self.architecture_part))

    def _stage(self, is_architecture: bool, save, save_interval: int, bar: tqdm) -> None:
        """Runs the rest of this epoch's updates of one kind."""
        part = self.architecture_part if is_architecture else self.weights_part
        begin = len(self.weights_part) if is_architecture else 0
        for batch in part.batches(self.epoch, self.position - begin):
            self.choices.temperature = self.schedule.temperature_at(self.update)
            self.loss.add(*self.training.update(move_to(batch, self.device), is_architecture))
            self.update += 1
            self.position += 1
            bar.update()
            if is_architecture:
                self._watch(len(part))
            is_last = self.is_finished or self.position == begin + len(part)  # a row holds updates of one kind
            if is_last or self.update % self.log_interval == 0:
                self._log("architecture" if is_architecture else "weights")
                bar.set_postfix_str(f"{self.history[-1]['loss']:.2f} bits, {self.history[-1]['pattern']}")
            if self.is_finished:
                return
            if self.update % save_interval == 0:
                save(self.state_dict())

    def _watch(self, stage_updates: int) -> None:
        """Counts how long the pattern has stayed the same."""
        chosen = self.most_probable()
        self.unchanged = self.unchanged + 1 if chosen == self.chosen else 0
        self.chosen = chosen
        self.converged = self.schedule.is_converged(self.unchanged, stage_updates)

    def _log(self, stage: str) -> None:
        chosen, probabilities = self.most_probable(), self.choices.probabilities().detach()
        loss = self.loss.read()
        if not math.isfinite(loss):
            raise UserError(
                f"the loss is {loss} at update {self.update}; give a lower --weights-lr, or look at the data"
            )
        self.history.append(
            {
                "update": self.update,
                "epoch": self.epoch,
                "stage": stage,
                "loss": loss,
                "temperature": self.choices.temperature,
                "entropy": self.choices.entropy(),
                "pattern": compact(letters(chosen)),
                "by_layer": by_layer(chosen),
                "expected_latency": float(expected_latency(self.prices, probabilities.cpu(), self.choices.candidates)),
            }
        )

    def state_dict(self) -> dict[str, Any]:
        """All that the rest of the search depends on; plain values and tensors."""
        state = {
            "training": self.training.state_dict(),
            "parts": [self.weights_part.state_dict(), self.architecture_part.state_dict()],
            "random": torch.get_rng_state(),
            "loss": self.loss.sums,
            "history": self.history,
            "progress": {
                name: getattr(self, name)
                for name in ("update", "epoch", "position", "unchanged", "chosen", "converged")
            },
        }
        if self.device.type == "cuda":
            state["random_cuda"] = torch.cuda.get_rng_state(self.device)
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.training.load_state_dict(state["training"])
        self.weights_part.load_state_dict(state["parts"][0])
        self.architecture_part.load_state_dict(state["parts"][1])
        self.loss.sums.copy_(state["loss"])
        self.history = state["history"]
        for name, value in state["progress"].items():
            setattr(self, name, value)
        torch.set_rng_state(state["random"])
        if "random_cuda" in state:
            torch.cuda.set_rng_state(state["random_cuda"], self.device)
