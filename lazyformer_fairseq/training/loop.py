"""Trains one update at a time, so that several models can take turns in one process and their times are comparable.

An update is that of fairseq-train with the same settings in one process, to the bit where its arithmetic allows: the
same batches, the same random numbers, gradients divided by what a batch predicts, clipped and applied in the same
order. Checkpoints have fairseq's layout.
"""

import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Optional, Union

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from lazyformer_fairseq.data.shards import keep_tokenizer
from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.evaluation.costs.latency import wait_for
from lazyformer_fairseq.modules.timing import SELECTOR
from lazyformer_fairseq.storage import checkpoint_file
from lazyformer_fairseq.storage.checked import Amount, as_kind
from lazyformer_fairseq.training.gradients import HalfWeights, Weights
from lazyformer_fairseq.training.muon import mark_matrices
from lazyformer_fairseq.training.objectives.interface import Batch, Objective
from lazyformer_fairseq.training.optimization import OptimizationConfig

CHECKPOINT = "checkpoint_last.pt"
HISTORY = "history"  # in a checkpoint's extra state, so that its checksum is the history's too
MOST_SKIPPED = 10  # updates in a row whose numbers are not finite
HALF = {"bf16": torch.bfloat16, "fp16": torch.float16}


class Diverged(UserError):
    """A loss or gradient was not finite in many updates in a row."""


class TrainingLoop:
    """Trains a model, one update at a time; resumes from the last checkpoint, of this class or of fairseq-train's.

    Args:
        objective: what it learns.
        optimization: how.
        folder: for checkpoints; a training found there resumes.
        start: a checkpoint of another training, to go on from where `folder` has none.

    Attributes:
        model: on its device, in its precision.
        updates: made so far.
        seconds: per update, including those before a stop.
        history: values by name that checkpoints keep of all updates so far, `seconds` among them.
        log: what the objective logged of the last batch it trained on.

    Raises:
        UserError: what is found there is damaged, or of another model.
    """

    def __init__(
        self, objective: Objective, optimization: OptimizationConfig, folder: Path, start: Optional[Path] = None
    ):
        folder.mkdir(parents=True, exist_ok=True)
        self.objective, self.optimization, self.folder = objective, optimization, folder
        SELECTOR.waits = False
        np.random.seed(optimization.seed)
        torch.manual_seed(optimization.seed)
        self.device, self.half = torch.device(optimization.device), HALF.get(optimization.precision)
        self.model = objective.build_model().to(self.device, self.half)
        if optimization.optimizer == "muon":
            mark_matrices(self.model)
        weights, scales = self.model.parameters(), self.half is torch.float16
        self.weights = Weights(weights) if self.half is None else HalfWeights(weights, scales)
        self.optimizer = optimization.build_optimizer(self.weights.updated)
        self.schedule = optimization.build_schedule(self.optimizer)
        self.updates = self._skipped_in_a_row = 0
        self.batches = objective.batches()
        self.history: dict[str, Any] = {}
        self.log: Mapping[str, Any] = {}
        if found := [path for path in (folder / CHECKPOINT, start) if path and path.exists()]:
            self._resume(found[0])
        self.schedule.step_update(self.updates)
        self.seconds: list[float] = self.from_history("seconds", list[Amount], [])
        self._pass: Iterator[Batch] = iter(self.batches)

    @property
    def parameters(self) -> int:
        return sum(parameter.numel() for parameter in self.model.parameters())

    def from_history(self, name: str, kind: Any, default: Any) -> Any:
        """Return a part of the history in the checkpoint that this training resumed from, checked for its type."""
        if name not in self.history:
            return default
        remedy = f"remove {self.folder} to start anew"
        return as_kind(kind, self.history[name], f"{self.folder / CHECKPOINT}, its {name}", remedy)

    def _next_batch(self) -> Batch:
        if (batch := next(self._pass, None)) is None:  # the epoch is over
            self._pass = iter(self.batches)
            batch = next(self._pass)
        return batch

    def rest_of_epoch(self) -> Iterator[int]:
        """Train on the batches that are left of the epoch. Yield the tokens of each, once it is trained on."""
        for batch in self._pass:
            before = self.updates
            seconds = self._train_and_time(batch)
            if self.updates > before:
                self.seconds.append(seconds)
            yield batch["ntokens"]
        self._pass = iter(self.batches)

    def _train_and_time(self, batch: Batch) -> float:
        """Train on a batch, and return the seconds it took."""
        wait_for(self.device)
        start = time.perf_counter()
        self.train_on(batch)
        wait_for(self.device)
        return time.perf_counter() - start

    def update(self) -> int:
        """Trains on one batch, or on the next until fp16's scale fits; returns their tokens."""
        before = self.updates
        seconds = 0.0
        tokens = 0
        while self.updates == before:
            batch = self._next_batch()
            seconds += self._train_and_time(batch)
            tokens += batch["ntokens"]
        self.seconds.append(seconds)
        return tokens

    def train_on(self, batch: Batch) -> None:
        """One update. What is random in it depends on the seed and its number alone.

        Raises:
            Diverged: this and others before it had a loss or gradient that is not finite.
        """
        torch.manual_seed(self.optimization.seed + self.updates)
        self.model.train()
        self.weights.clear()
        batch = moved(self.objective.at_update(batch, self.updates), self.device, self.half)
        loss, size, log = self.objective.loss(self.model, batch)
        self.log = log
        self.weights.backward(loss)
        # A batch may predict nothing; it is an update all the same, of zero gradients.
        share = 1 / (size.clamp(min=1).float() if torch.is_tensor(size) else float(size) or 1.0)
        norm = self.weights.clip(share, self.optimization.clip_norm, self.optimizer.param_groups)
        norm_is_finite, loss_is = torch.stack([norm, log["loss"].to(norm)]).isfinite().tolist()
        if not norm_is_finite and self.weights.lower_scale():
            return  # the update is to be made again, on the next batch
        if norm_is_finite and loss_is:
            self.optimizer.optimizer.step()
            self.weights.write_back()
            self._skipped_in_a_row = 0
        else:
            self._skip()
        self.updates += 1
        self.schedule.step_update(self.updates)

    def _skip(self) -> None:
        self._skipped_in_a_row += 1
        self.weights.clear()
        self.objective.forget()
        if self._skipped_in_a_row == MOST_SKIPPED:
            raise Diverged(
                f"{self.folder}: {MOST_SKIPPED} updates in a row, up to update {self.updates + 1}, had a loss or "
                "gradient that is NaN or Inf; try a lower --lr"
            )

    @torch.no_grad()
    def evaluate(self, split: str = "valid") -> dict[str, float]:
        """What the objective measures on a split."""
        self.model.eval()
        batches = (moved(batch, self.device, self.half) for batch in self.objective.held_out(split))
        logs = [self.objective.loss(self.model, batch)[2] for batch in batches]
        return self.objective.measures(logs)

    def save(self, with_optimizer: bool = True, name: str = CHECKPOINT) -> None:
        """Write a checkpoint into the folder, whole or not at all. Without the optimizer a model cannot resume."""
        self.history["seconds"] = self.seconds
        if self.objective.tokenizer_folder is not None:
            keep_tokenizer(self.objective.tokenizer_folder, self.folder)
        made_by = "FP16Optimizer" if isinstance(self.weights, HalfWeights) else type(self.optimizer).__name__
        history = {
            "criterion_name": self.objective.CRITERION,
            "optimizer_name": made_by,
            "lr_scheduler_state": self.schedule.state_dict(),
            "num_updates": self.updates,
        }
        state = {
            "args": None,
            "cfg": {"common": {"seed": self.optimization.seed}, **self.objective.settings()},
            "model": self.model.state_dict(),
            "criterion": None,
            "optimizer_history": [history],
            "task_state": self.objective.task_state(),
            "extra_state": {
                "train_iterator": {"version": 2, "shuffle": self.batches.shuffle, **self.batches.state_dict()},
                "attention_back_ends": SELECTOR.state_dict(),
                "previous_training_time": sum(self.seconds),
                HISTORY: self.history,
                "val_loss": None,
                **self.objective.state_dict(),
            },
        }
        if with_optimizer:
            state["last_optimizer_state"] = {**self.optimizer.optimizer.state_dict(), **self.weights.state_dict()}
        checkpoint_file.save(checkpoint_file.on_cpu(state), self.folder / name)

    def _resume(self, path: Path) -> None:
        try:
            state = checkpoint_file.load(path)
        except UserError as error:
            raise UserError(f"{error}; remove {path}, and the same command trains this model anew") from None
        last = state.get("last_optimizer_state")
        if last is None:
            raise UserError(f"{path}: has no optimizer's state, so that nothing resumes from it; remove {self.folder}")
        try:
            self.model.load_state_dict(state["model"])
        except RuntimeError as error:
            raise UserError(f"{path}: is of another model; remove {self.folder} to start anew ({error})") from None
        try:
            checkpoint_file.check_place(path, state)
            last, history, extra = dict(last), state["optimizer_history"][-1], state["extra_state"]
            self.weights.load_state_dict(last)
            self.optimizer.load_state_dict(last)
            self._resume_schedule(history["lr_scheduler_state"])
            self.updates = history["num_updates"]
            self.batches.load_state_dict(extra["train_iterator"])
            SELECTOR.load_state_dict(extra.get("attention_back_ends", {}))
            self.objective.load_state_dict(extra)
            self.history = dict(extra.get(HISTORY, {}))  # fairseq-train's checkpoints have none
        except (AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
            said = checkpoint_file.first_line(error)
            raise UserError(f"{path}: nothing resumes from it; remove {self.folder} to start anew ({said})") from error

    def _resume_schedule(self, state: Mapping[str, Any]) -> None:
        self.schedule.load_state_dict(state)


def moved(batch: Batch, device: Union[str, torch.device], half: Optional[torch.dtype] = None) -> Batch:
    """Return a batch on a device, its float32 tensors in this precision; scores in float64 stay exact."""
    return tree_map_only(Tensor, lambda each: each.to(device, half if each.dtype is torch.float32 else None), batch)
