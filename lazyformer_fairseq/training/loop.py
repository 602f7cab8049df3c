"""A training loop that does not need fairseq. It runs one update per call, so models can be trained alternately.

With the same settings, the updates equal fairseq-train's, bit for bit where fairseq's arithmetic allows: the batches
and random numbers are the same, and gradients are divided by the number of predictions, clipped and applied in the same
order. Checkpoints have fairseq's layout. Under torchrun all processes contribute to each update, as in fairseq: batches
are assigned to the processes round-robin, and gradients are summed.
"""

import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
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
from lazyformer_fairseq.storage.checked import Amount, as_type
from lazyformer_fairseq.training import run_record
from lazyformer_fairseq.training.gradients import HalfWeights, Weights
from lazyformer_fairseq.training.muon import mark_matrices
from lazyformer_fairseq.training.objectives.interface import Batch, Log, Objective
from lazyformer_fairseq.training.optimization import OptimizationConfig
from lazyformer_fairseq.training.out_of_memory import build_in_memory
from lazyformer_fairseq.training.processes import join_processes
from lazyformer_fairseq.training.run_record import MetricsLine, MetricsLog, RunRecord
from lazyformer_fairseq.training.stop_signals import StopRequest
from lazyformer_fairseq.training.update_guard import BadUpdateError, Reaction, SkippedUpdate, UpdateGuard

CHECKPOINT = "checkpoint_last.pt"
HISTORY = "history"  # stored under this key in the checkpoint's extra state, which the checksum covers
LOG_INTERVAL = 100  # updates per line of metrics.jsonl
HALF = {"bf16": torch.bfloat16, "fp16": torch.float16}


class DivergedError(UserError):
    """Raised when too many consecutive updates had a loss or gradient that was not finite."""


@dataclass
class _Interval:
    """The logs and the number of tokens since the last line of ``metrics.jsonl``."""

    logs: list[Log]
    tokens: int = 0


class TrainingLoop:
    """A training run that performs one update per call and resumes from its own or fairseq-train's last checkpoint.

    Args:
        objective: the training objective.
        optimization: the optimizer, schedule and precision.
        folder: the folder for the checkpoints and the run's record. If it contains a checkpoint, that run is resumed.
        start: another run's checkpoint to continue from if `folder` has none.
        report_to: names of experiment trackers, such as ``wandb``; see ``training.trackers``.

    Attributes:
        model: the model, on its device and in its precision.
        updates: the number of updates completed so far.
        seconds: the duration of each update, including updates before the run was resumed.
        history: the per-update values that checkpoints store, by name, such as `seconds`.
        log: the objective's log for the last training batch.
        clip_norm: the norm to which the next update's gradients are clipped; 0 disables clipping.
        guard: the check that each update must pass before it is applied.
        stop: the stop request set by a signal, which has an effect only while the caller listens for signals.
        processes: the processes that contribute to each update.
        RATE_OPTION: the name of the learning-rate option, for error messages.

    Raises:
        UserError: the checkpoint in the folder is damaged or does not match the model.
    """

    RATE_OPTION = "--lr"

    def __init__(
        self,
        objective: Objective,
        optimization: OptimizationConfig,
        folder: Path,
        start: Optional[Path] = None,
        report_to: Sequence[str] = (),
    ):
        folder.mkdir(parents=True, exist_ok=True)
        self.objective = objective
        self.optimization = optimization
        self.folder = folder
        self.report_to = report_to
        self.processes = join_processes(optimization.device)
        self.clip_norm = optimization.clip_norm
        self.guard = UpdateGuard()
        self.stop = StopRequest()
        self.updates = 0
        self.history: dict[str, Any] = {}
        self.log: Log = {}

        SELECTOR.waits = False
        np.random.seed(optimization.seed)
        torch.manual_seed(optimization.seed)
        self.device = torch.device(optimization.device)
        self.half = HALF.get(optimization.precision)
        self.model = build_in_memory(objective.build_model).to(self.device, self.half)
        if optimization.optimizer == "muon":
            mark_matrices(self.model)
        if self.half is None:
            self.weights = Weights(self.model.parameters())
        else:
            self.weights = HalfWeights(self.model.parameters(), scales=self.half is torch.float16)
        self.optimizer = optimization.build_optimizer(self.weights.updated)
        self.schedule = optimization.build_schedule(self.optimizer)
        self.batches = objective.batches(self.processes)

        found = [path for path in (folder / CHECKPOINT, start) if path and path.exists()]
        if found:
            self._resume(found[0])
        self.schedule.step_update(self.updates)
        self.seconds: list[float] = self.from_history("seconds", list[Amount], [])
        self._pass: Iterator[Batch] = iter(self.batches)
        self._interval = _Interval(logs=[])
        self._metrics: Optional[MetricsLog] = None

    @property
    def parameters(self) -> int:
        """The number of parameters in the model."""
        return sum(parameter.numel() for parameter in self.model.parameters())

    def from_history(self, name: str, expected: Any, default: Any) -> Any:
        """Return a value from the history of the checkpoint that this run resumed from.

        Args:
            name: the value's key in the history.
            expected: the type that the value must have.
            default: the value to return if the history does not have this key.

        Raises:
            UserError: the value has a different type.
        """
        if name not in self.history:
            return default
        remedy = f"remove {self.folder} to start over"
        return as_type(expected, self.history[name], f"{self.folder / CHECKPOINT}, its {name}", remedy)

    # Updates

    def update(self) -> int:
        """Perform one update with the next `update_freq` batches.

        In fp16, if the gradients overflow, the loss scale is lowered, and the update is retried with the batches that
        follow.

        Returns:
            The number of tokens processed, summed over all processes.
        """
        before = self.updates
        seconds = 0.0
        tokens = 0
        if self._metrics is None:
            self._begin_record()
        while self.updates == before:
            batches = self._next_batches()
            seconds += self._train_and_time(batches)
            tokens += sum(batch["ntokens"] for batch in batches if batch)
        if self.processes.count > 1:
            tokens = int(self.processes.sum(torch.tensor(tokens, device=self.device)))
        self.seconds.append(seconds)
        self._interval.tokens += tokens
        if self.updates % LOG_INTERVAL == 0:
            self._log_interval()
        return tokens

    def rest_of_epoch(self) -> Iterator[int]:
        """Perform one update per remaining batch of the epoch, and yield each batch's number of tokens."""
        for batch in self._pass:
            before = self.updates
            seconds = self._train_and_time([batch])
            if self.updates > before:
                self.seconds.append(seconds)
            yield batch["ntokens"]
        self._pass = iter(self.batches)

    def _train_and_time(self, batches: Sequence[Batch]) -> float:
        """Perform an update and return its duration in seconds."""
        wait_for(self.device)
        start = time.perf_counter()
        self.train_on(batches)
        wait_for(self.device)
        return time.perf_counter() - start

    def _next_batches(self) -> list[Batch]:
        """Return this process's batches for one update; an epoch's last update may have fewer than the others."""
        batches: list[Batch] = []
        while len(batches) < self.optimization.update_freq:
            batch = next(self._pass, None)
            if batch is not None:
                batches.append(batch)
                continue
            self._pass = iter(self.batches)  # the epoch is over
            if batches:
                break
        return batches

    def train_on(self, batches: Sequence[Batch]) -> None:
        """Perform one update, with randomness that depends only on the seed and the number of previous updates.

        Args:
            batches: the batches to sum gradients over. A batch is empty if only other processes have one, as at the
                end of an epoch.

        Raises:
            DivergedError: too many consecutive updates had a loss or gradient that was not finite.
        """
        torch.manual_seed(self.optimization.seed + self.updates)
        self.model.train()
        self.weights.clear()
        logs = []
        sizes = []
        for batch in filter(None, batches):
            of_update = self.objective.at_update(batch, self.updates)
            loss, size, log = self.objective.loss(self.model, to_device(of_update, self.device, self.half))
            self.weights.backward(loss)
            self.log = log
            logs.append(log)
            sizes.append(size)

        loss, size = self._sum_over_processes(logs, sizes)
        # If the batches contain nothing to predict, the update is performed with zero gradients.
        factor: Union[Tensor, float]
        if torch.is_tensor(size):
            factor = 1 / size.clamp(min=1).float()
        else:
            factor = 1 / (float(size) or 1.0)
        norm = self.weights.clip(factor, self.clip_norm, self.optimizer.param_groups)

        numbers = torch.stack([norm, loss.to(norm) * factor]).tolist()  # a single copy from the device
        if not np.isfinite(numbers[0]) and self.weights.lower_scale():
            return  # an fp16 overflow: the caller retries with the next batches
        try:
            self.guard.judge(loss=numbers[1], gradient_norm=numbers[0])
        except BadUpdateError as bad:
            self._skip(bad, loss=numbers[1], gradient_norm=numbers[0], batches=batches)
        else:
            self.optimizer.optimizer.step()
            self.weights.write_back()
            self.guard.accept(numbers[1])
            self._interval.logs.extend(logs)
        self.updates += 1
        self.schedule.step_update(self.updates)

    def _sum_over_processes(self, logs: Sequence[Log], sizes: Sequence[Any]) -> tuple[Tensor, Any]:
        """Sum gradients, losses, predictions and stop requests over all processes.

        Returns:
            The summed loss without penalty terms, and the number of predictions.
        """
        loss = sum(log["loss"] for log in logs)
        size = sum(sizes)
        if self.processes.count == 1:
            self.stop.agree(self.stop.note())
            return loss, size
        self.processes.sum_gradients(self.weights.own)
        own = [float(loss), float(size), self.stop.note()]
        loss, size, asked = self.processes.sum(torch.tensor(own, dtype=torch.float64, device=self.device))
        self.stop.agree(asked.item())
        return loss, size

    def _skip(self, bad: BadUpdateError, loss: float, gradient_norm: float, batches: Sequence[Batch]) -> None:
        """Record a bad update without applying it, and end the run after too many bad updates in a row."""
        samples = [torch.as_tensor(batch["id"]).tolist() for batch in batches if "id" in batch]
        skipped = SkippedUpdate(
            update=self.updates + 1,
            epoch=self.batches.epoch,
            reason=str(bad),
            loss=loss,
            gradient_norm=gradient_norm,
            learning_rate=self.optimizer.get_lr(),
            samples=samples,
        )
        reaction = self.guard.skip(skipped)
        self.weights.clear()
        self.objective.forget()
        if reaction is not Reaction.CONTINUE:
            self.guard.write_report(
                self.folder,
                bad_of_processes=[list(self.guard.bad)],
                losses=list(self.guard.losses),
                unit="nats",
            )
            raise DivergedError(
                f"{self.folder}: {self.guard.skipped_in_a_row} updates in a row, up to update {self.updates + 1}, "
                f"had a loss or gradient that is NaN or Inf; try a lower {self.RATE_OPTION}"
            )

    @torch.no_grad()
    def evaluate(self, split: str = "valid") -> dict[str, float]:
        """Return the objective's metrics on a split. Every process evaluates the entire split."""
        self.model.eval()
        logs = []
        for batch in self.objective.held_out(split):
            _, _, log = self.objective.loss(self.model, to_device(batch, self.device, self.half))
            logs.append(log)
        return self.objective.measures(logs)

    # The run's record

    def _begin_record(self) -> None:
        """Write ``run.json``, and remove the lines of ``metrics.jsonl`` for updates that will be repeated."""
        if self.processes.rank == 0:
            run_record.write_run(self.folder, self.describe())
            self._metrics = MetricsLog(self.folder, self.updates, self.report_to)

    def describe(self) -> RunRecord:
        """Return the record of everything that determines this run's result."""
        optimization = self.optimization
        settings = self.objective.settings()
        return RunRecord(
            command=tuple(sys.argv),
            model=run_record.named(settings["model"]),
            parameters=self.parameters,
            task={**run_record.named(settings["task"]), "vocab_size": len(self.objective.dictionary)},
            criterion=run_record.named(settings["criterion"]),
            data=run_record.hash_data(self.objective.data_folders()),
            optimizer={"name": optimization.optimizer, **optimization.resolved_optimizer_options()},
            schedule={
                "name": optimization.schedule,
                "lr": optimization.rate,
                "max_update": optimization.updates,
                **optimization.resolved_schedule_options(),
            },
            batch={
                "batch_size": self.objective.batch_size,
                "update_freq": optimization.update_freq,
                "clip_norm": optimization.clip_norm,
            },
            precision=optimization.precision,
            seed=optimization.seed,
            processes=self.processes.count,
            **run_record.describe_here(self.device),
        )

    def log_metrics(self, split: str, values: Mapping[str, Any]) -> None:
        """Append a line to ``metrics.jsonl``; only the first process writes."""
        if self.processes.rank > 0:
            return
        if self._metrics is None:
            self._begin_record()
        line = MetricsLine(
            updates=self.updates,
            split=split,
            seconds=sum(self.seconds),
            values=run_record.finite_values(values),
            epoch=self.batches.epoch,
        )
        assert self._metrics is not None
        self._metrics.append(line)

    def close(self) -> None:
        """Close the experiment trackers."""
        if self._metrics is not None:
            self._metrics.close()

    def _log_interval(self) -> None:
        """Log this process's training metrics for the updates since the previous interval."""
        interval = self._interval
        self._interval = _Interval(logs=[])
        if interval.logs:
            scalars = self.objective.scalars(interval.logs)
        else:
            scalars = {}
        values = {name: scalar.value for name, scalar in scalars.items()}
        rates = {"lr": self.optimizer.get_lr(), "tokens": interval.tokens, "skipped": self.guard.skipped}
        self.log_metrics("train", values | rates)

    # Checkpoints

    def save(self, with_optimizer: bool = True, name: str = CHECKPOINT) -> None:
        """Write a checkpoint into the folder atomically.

        Args:
            with_optimizer: whether to include the optimizer's state, which is needed to resume the run.
            name: the file name.
        """
        self.history["seconds"] = self.seconds
        carried = self.objective.state_dict()  # a collective call: every process must take part
        if self.processes.rank > 0:
            return
        if self.objective.tokenizer_folder is not None:
            keep_tokenizer(self.objective.tokenizer_folder, self.folder)
        if isinstance(self.weights, HalfWeights):
            made_by = "FP16Optimizer"
        else:
            made_by = type(self.optimizer).__name__

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
                "bad_updates": self.guard.state_dict(),
                "previous_training_time": sum(self.seconds),
                HISTORY: self.history,
                "val_loss": None,
                **carried,
            },
        }
        if with_optimizer:
            state["last_optimizer_state"] = {**self.optimizer.optimizer.state_dict(), **self.weights.state_dict()}
        checkpoint_file.save(checkpoint_file.on_cpu(state), self.folder / name)

    def _resume(self, path: Path) -> None:
        """Restore the entire training state from a checkpoint.

        Raises:
            UserError: the checkpoint is damaged, does not match the model, or has no optimizer state to resume from.
        """
        try:
            state = checkpoint_file.load(path)
        except UserError as error:
            raise UserError(f"{error}; remove {path} and rerun the command to retrain this model") from None
        last = state.get("last_optimizer_state")
        if last is None:
            raise UserError(
                f"{path} has no optimizer state, so training cannot resume from it; remove {self.folder} to start over"
            )
        try:
            self.model.load_state_dict(state["model"])
        except RuntimeError as error:
            raise UserError(f"{path} does not match the model; remove {self.folder} to start over ({error})") from None
        try:
            checkpoint_file.check_place(path, state)
            last = dict(last)
            history = state["optimizer_history"][-1]
            extra = state["extra_state"]
            self.weights.load_state_dict(last)
            self.optimizer.load_state_dict(last)
            self._resume_schedule(history["lr_scheduler_state"])
            self.updates = history["num_updates"]
            self.batches.load_state_dict(extra["train_iterator"])
            SELECTOR.load_state_dict(extra.get("attention_back_ends", {}))
            if "bad_updates" in extra:
                self.guard.load_state_dict(extra["bad_updates"])
            self.objective.load_state_dict(extra)
            self.history = dict(extra.get(HISTORY, {}))  # fairseq-train's checkpoints have none
        except (AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
            said = checkpoint_file.first_line(error)
            raise UserError(
                f"{path}: training cannot resume from this checkpoint; remove {self.folder} to start over ({said})"
            ) from error

    def _resume_schedule(self, state: Mapping[str, Any]) -> None:
        self.schedule.load_state_dict(state)


def to_device(batch: Batch, device: Union[str, torch.device], half: Optional[torch.dtype] = None) -> Batch:
    """Move a batch to a device, and cast float32 tensors to `half` if specified; float64 targets are left unchanged."""

    def move(tensor: Tensor) -> Tensor:
        if tensor.dtype is torch.float32:
            return tensor.to(device, half)
        return tensor.to(device)

    return tree_map_only(Tensor, move, batch)
