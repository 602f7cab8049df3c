"""The gradient search of PAR Transformer (section 2): a supernet and its architecture learn in turn.

It resumes to the bit.
"""

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Optional

import torch
from torch import Tensor, nn

from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.experiments.search.material import ARCHITECTURE_SHARE, Part
from lazyformer_fairseq.experiments.search.settings import SearchSettings
from lazyformer_fairseq.experiments.search.supernet import Supernet
from lazyformer_fairseq.progress import Progress
from lazyformer_fairseq.storage.atomic import write_text
from lazyformer_fairseq.storage.checkpoint_file import DamagedCheckpointError, check, named_errors, save
from lazyformer_fairseq.training.laptop import LAPTOP
from lazyformer_fairseq.training.loop import moved
from lazyformer_fairseq.training.muon import mark_matrices
from lazyformer_fairseq.training.optimization import OptimizationConfig

STATE = "state.pt"
HISTORY = "history.jsonl"
LOG_INTERVAL = 100  # updates
SAVE_INTERVAL = 500
# PAR Transformer, section 2.2, names the decays; FBNet, which it follows, the temperatures. LAMB is as in NVIDIA's
# Transformer-XL: weight decay within the trust ratio, no bias correction, a bound of norms, gradients clipped.
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

# (model, batch) -> summed loss in nats, number of predictions
Loss = Callable[[nn.Module, dict[str, Any]], tuple[Tensor, Any]]


@dataclass
class Updates:
    """The updates made so far."""

    weights: int = 0
    architecture: int = 0

    @property
    def total(self) -> int:
        """Return their sum."""
        return self.weights + self.architecture


def temperature_at(update: int, settings: SearchSettings) -> float:
    """Return the Gumbel-softmax's temperature: constant while the architecture is, then decaying exponentially."""
    share = max(update - settings.constant_updates, 0) / (settings.max_updates - settings.constant_updates)
    return FIRST_TEMPERATURE * (FINAL_TEMPERATURE / FIRST_TEMPERATURE) ** share


def weights_optimization(settings: SearchSettings) -> OptimizationConfig:
    """Return how the weights learn: by the recipe laptop as those of one pattern, else by LAMB at a constant rate."""
    if settings.recipe == "laptop":
        options = LAPTOP
    else:
        options = LAMB
    return OptimizationConfig.from_options(
        options,
        updates=settings.max_updates,
        rate=settings.weights_lr,
        seed=settings.seed,
        device=settings.device,
    )


class RunningLoss:
    """The mean loss since it was last read, in bits per prediction; only reading it waits for a GPU."""

    def __init__(self, device: torch.device):
        self.sums = torch.zeros(2, dtype=torch.float64, device=device)

    def add(self, loss: Tensor, count: Tensor) -> None:
        """Add the summed loss of some predictions, in nats."""
        self.sums += torch.stack([loss.double(), count.to(self.sums)])

    def read(self) -> float:
        """Return the mean, and begin anew."""
        loss, count = self.sums.tolist()
        self.sums.zero_()
        return loss / count / math.log(2)


class Batches:
    """The batches of a part of the data, epoch after epoch, from any position."""

    def __init__(self, part: Part):
        self.part = part
        self.epoch = 1
        self.position = 0
        self._iterator: Optional[Iterator[list[dict[str, Any]]]] = None  # an epoch begins with its first batch

    def next(self) -> list[dict[str, Any]]:
        """Return the next batch, in its chunks."""
        if self.position == len(self.part):
            self.epoch += 1
            self.position = 0
            self._iterator = None
        if self._iterator is None:
            self._iterator = iter(self.part.batches(self.epoch, self.position))
        self.position += 1
        return next(self._iterator)

    def state_dict(self) -> dict[str, Any]:
        """Return the position, and what the part carries."""
        return {"epoch": self.epoch, "position": self.position, "part": self.part.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a position."""
        self.epoch = state["epoch"]
        self.position = state["position"]
        if self.position:
            self._iterator = iter(self.part.batches(self.epoch, self.position))
        else:
            self._iterator = None
        self.part.load_state_dict(state["part"])


class SupernetTraining:
    """The training of a supernet's weights and architecture.

    After the constant phase every n-th update is one of the architecture, where n is the inverse of its data's share.

    Args:
        supernet: mixtures of all candidates.
        settings: of the search.
        loss_of: of a model on a batch.
        parts: of the data, (for the weights, for the architecture).

    Attributes:
        history: rows (update, loss, ...).
    """

    def __init__(self, supernet: Supernet, settings: SearchSettings, loss_of: Loss, parts: Sequence[Part]):
        self.supernet = supernet.train()
        self.settings = settings
        self.loss_of = loss_of
        self.batches = [Batches(part) for part in parts]
        mark_matrices(supernet.model)
        self.optimization = weights_optimization(settings)
        self.weights = self.optimization.build_optimizer(supernet.model.parameters())
        self.schedule = self.optimization.build_schedule(self.weights)
        self.architecture = torch.optim.Adam(
            supernet.architecture.parameters(),
            lr=settings.architecture_lr,
            weight_decay=ARCHITECTURE_DECAY,
        )
        self.made = Updates()
        self.history: list[dict[str, Any]] = []
        self.loss = RunningLoss(torch.device(settings.device))

    def update(self) -> tuple[Tensor, Tensor]:
        """Make one update; return the summed loss in nats, and the number of predictions."""
        update = self.made.total
        every = round(1 / ARCHITECTURE_SHARE)
        is_of_architecture = update >= self.settings.constant_updates and update % every == every - 1
        self.supernet.architecture.temperature = temperature_at(update, self.settings)
        self.supernet.learn(is_of_architecture)
        if is_of_architecture:
            found = self.find_gradients(self.batches[1].next())
            self.architecture.step()
            self.architecture.zero_grad()
            self.made.architecture += 1
            return found

        found = self.find_gradients(self.batches[0].next())
        if self.optimization.clip_norm:
            nn.utils.clip_grad_norm_(self.supernet.model.parameters(), self.optimization.clip_norm)
        self.schedule.step_update(update)
        self.weights.optimizer.step()
        self.weights.optimizer.zero_grad()
        self.made.weights += 1
        return found

    def find_gradients(self, chunks: Sequence[dict[str, Any]]) -> tuple[Tensor, Tensor]:
        """Add the gradients of the mean loss over the chunks of a batch; return as :meth:`update` does."""
        losses = []
        counts = []
        for chunk in chunks:
            loss, count = self.loss_of(self.supernet, moved(chunk, self.settings.device))
            (loss / count / len(chunks)).backward()
            losses.append(loss.detach())
            counts.append(torch.as_tensor(count).detach())
        return sum(losses), sum(counts)

    def run_in(self, folder: Path) -> None:
        """Train to the end, from the state in the folder if there is one."""
        if (folder / STATE).exists():
            self.load_state_dict(load_state(folder / STATE))
            print(f"{folder}: resumes at update {self.made.total}.")
        most = self.settings.max_updates
        with Progress(total=most, initial=self.made.total, desc="supernet", unit=" updates") as progress:
            while self.made.total < most:
                self.loss.add(*self.update())
                progress.update(1)
                if self.made.total % LOG_INTERVAL == 0:
                    progress.set_postfix_str(f"{self._log():.2f} bits")
                if self.made.total % SAVE_INTERVAL == 0:
                    save_state(folder, self.state_dict())
        save_state(folder, self.state_dict())

    def _log(self) -> float:
        loss = self.loss.read()
        update = self.made.total
        if not math.isfinite(loss):
            raise UserError(f"the loss is {loss} at update {update}; give a lower --weights-lr, or look at the data")
        architecture = self.supernet.architecture
        row = {
            "update": update,
            "loss": loss,
            "temperature": architecture.temperature,
            "entropy": architecture.entropy(),
        }
        self.history.append(row)
        return loss

    def state_dict(self) -> dict[str, Any]:
        """Return everything that the rest of the training depends on, as plain values and tensors."""
        state = {
            "model": self.supernet.model.state_dict(),
            "weights": self.weights.optimizer.state_dict(),
            "logits": self.supernet.architecture.state_dict(),
            "architecture": self.architecture.state_dict(),
            "batches": [batches.state_dict() for batches in self.batches],
            "random": torch.get_rng_state(),
            "loss": self.loss.sums,
            "made": asdict(self.made),
            "history": self.history,
        }
        if self.settings.device == "cuda":
            state["random_cuda"] = torch.cuda.get_rng_state()
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a state."""
        self.supernet.model.load_state_dict(state["model"])
        self.weights.optimizer.load_state_dict(state["weights"])
        self.supernet.architecture.load_state_dict(state["logits"])
        self.architecture.load_state_dict(state["architecture"])
        for batches, of_part in zip(self.batches, state["batches"], strict=True):
            batches.load_state_dict(of_part)
        self.loss.sums.copy_(state["loss"])
        self.made = Updates(**state["made"])
        self.history = state["history"]
        torch.set_rng_state(state["random"])
        if "random_cuda" in state:
            torch.cuda.set_rng_state(state["random_cuda"])


def save_state(folder: Path, state: dict[str, Any]) -> None:
    """Write the state, then the history in it as JSON lines."""
    save(state, folder / STATE)
    write_text(folder / HISTORY, "".join(json.dumps(row) + "\n" for row in state["history"]))


def load_state(file: Path) -> dict[str, Any]:
    """Return a saved state, on the CPU.

    Raises:
        UserError: it is damaged, or holds anything but tensors and plain values.
    """
    with named_errors(file):
        try:
            check(file)
        except DamagedCheckpointError as error:
            raise UserError(f"{error}; remove it to start anew") from error
        return torch.load(file, map_location="cpu", weights_only=True)
