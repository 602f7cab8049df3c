"""State that the next update or log line depends on, but that fairseq does not save or does not read back."""

import torch
from fairseq.logging import metrics

_SCALER = ("_iter", "_last_overflow_iter", "_last_rescale_iter", "_overflows_since_rescale")


def save_precise_weights(state_dict, self):
    """For fp16 and bf16: the optimizer's weights in fp32, and when the loss scale will grow again.

    fairseq saves the rounded weights alone. Resumed, a run would lose what its updates have added below the 8 bits of
    bf16 or the 11 of fp16. Costs 4 bytes a parameter.
    """
    state = {**state_dict(self), "fp32_weights": [weights.data for weights in _fp32_weights(self)]}
    if self.scaler is not None:
        state["loss_scaler"] = {name: getattr(self.scaler, name) for name in _SCALER}
    return state


def load_precise_weights(load_state_dict, self, state_dict, optimizer_overrides=None):
    """Loads what :func:`save_precise_weights` saved. An older checkpoint without it loads as fairseq loads it."""
    state = dict(state_dict)
    saved, scaler = state.pop("fp32_weights", None), state.pop("loss_scaler", None)
    load_state_dict(self, state, optimizer_overrides)
    if scaler is not None and self.scaler is not None:
        vars(self.scaler).update(scaler)
    if saved:
        everything = torch.cat([weights.flatten() for weights in saved])
        sizes = [weights.numel() for weights in _fp32_weights(self)]  # one vector on a GPU, one each on a CPU
        for weights, part in zip(_fp32_weights(self), everything.split(sizes), strict=True):
            weights.data.copy_(part.view_as(weights))


def _fp32_weights(optimizer) -> list[torch.nn.Parameter]:
    weights = getattr(optimizer, "fp32_params", ())  # with --memory-efficient-fp16 there are none
    return list(weights.values()) if isinstance(weights, dict) else list(weights)


def keep_between_epochs(
    load_checkpoint,
    self,
    filename,
    reset_optimizer=False,
    reset_lr_scheduler=False,
    optimizer_overrides=None,
    reset_meters=False,
):
    """Keeps what fairseq forgets of an epoch that is over when its checkpoint is written.

    The schedule would have received its validation next. The log's averages over the last updates continue from epoch
    to epoch; only those of the whole epoch start anew.
    """
    extra_state = load_checkpoint(
        self, filename, reset_optimizer, reset_lr_scheduler, optimizer_overrides, reset_meters
    )
    if extra_state is not None and not extra_state["train_iterator"]["iterations_in_epoch"]:
        if not reset_meters:
            meters = extra_state.get("metrics", {})
            metrics.load_state_dict({name: meters[name] for name in ("train_inner",) if name in meters})
        if not (reset_optimizer or reset_lr_scheduler):
            self.lr_step(extra_state["train_iterator"]["epoch"] - 1, extra_state.get("val_loss"))
    return extra_state


def keep_the_clock_running(load_checkpoint, self, filename, *args, **kwargs):
    """For ``Trainer.load_checkpoint``: ``wall`` in the log is the time since this process began to train."""
    before = metrics.get_meter("default", "wall")
    extra_state = load_checkpoint(self, filename, *args, **kwargs)
    loaded = metrics.get_meter("default", "wall")
    if before is not None and loaded is not None:
        loaded.start_time = before.start_time
    return extra_state


def gather_memory(save_checkpoint, cfg, trainer, epoch_itr, val_loss):
    """For ``checkpoint_utils.save_checkpoint``, which all processes call, though only the first one writes.

    What a task carries from batch to batch (see ``tasks/stream_language_modeling.py``) is gathered while all are here.
    """
    if hasattr(trainer.task, "gather_memory") and not cfg.no_save:
        trainer.task.gather_memory()
    return save_checkpoint(cfg, trainer, epoch_itr, val_loss)


def give_memory_back(load_checkpoint, self, filename, *args, **kwargs):
    """For ``Trainer.load_checkpoint``, which sends the extra state to all processes, but not to the task."""
    extra_state = load_checkpoint(self, filename, *args, **kwargs)
    if extra_state is not None and hasattr(self.task, "take_from_checkpoint"):
        self.task.take_from_checkpoint(extra_state)
    return extra_state
