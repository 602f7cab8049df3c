"""State that the next update or log line depends on, but that fairseq does not save or does not read back."""

import functools

import torch
from fairseq.logging import metrics

_SCALER = ("_iter", "_last_overflow_iter", "_last_rescale_iter", "_overflows_since_rescale")


def save_precise_weights(state_dict):
    """For fp16 and bf16: the optimizer's weights in fp32, and when the loss scale will grow again.

    fairseq saves the rounded weights alone. Resumed, a run would lose what its updates have added below the 8 bits of
    bf16 or the 11 of fp16. Costs 4 bytes a parameter.
    """

    @functools.wraps(state_dict)
    def wrapped(self):
        state = {**state_dict(self), "fp32_weights": [weights.data for weights in _fp32_weights(self)]}
        if self.scaler is not None:
            state["loss_scaler"] = {name: getattr(self.scaler, name) for name in _SCALER}
        return state

    return wrapped


def load_precise_weights(load_state_dict):
    """Loads what :func:`save_precise_weights` saved. An older checkpoint without it loads as fairseq loads it."""

    @functools.wraps(load_state_dict)
    def wrapped(self, state, optimizer_overrides=None):
        state = dict(state)
        saved, scaler = state.pop("fp32_weights", None), state.pop("loss_scaler", None)
        load_state_dict(self, state, optimizer_overrides)
        if scaler is not None and self.scaler is not None:
            vars(self.scaler).update(scaler)
        if saved:
            everything = torch.cat([weights.flatten() for weights in saved])
            sizes = [weights.numel() for weights in _fp32_weights(self)]  # one vector on a GPU, one each on a CPU
            for weights, part in zip(_fp32_weights(self), everything.split(sizes), strict=True):
                weights.data.copy_(part.view_as(weights))

    return wrapped


def _fp32_weights(optimizer) -> list[torch.nn.Parameter]:
    weights = getattr(optimizer, "fp32_params", ())  # with --memory-efficient-fp16 there are none
    return list(weights.values()) if isinstance(weights, dict) else list(weights)


def keep_between_epochs(load_checkpoint):
    """Keeps what fairseq forgets of an epoch that is over when its checkpoint is written.

    The schedule would have received its validation next. The log's averages over the last updates continue from epoch
    to epoch; only those of the whole epoch start anew.
    """

    @functools.wraps(load_checkpoint)
    def wrapped(
        self, filename, reset_optimizer=False, reset_lr_scheduler=False, optimizer_overrides=None, reset_meters=False
    ):
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

    return wrapped
