"""Matches classification heads when a checkpoint loads: pre-training has none, fine-tuning adds them."""

import logging

from torch import Tensor, nn

logger = logging.getLogger(__name__)

PREFIX = "classification_heads."


def match_classification_heads(state_dict: dict[str, Tensor], heads: nn.ModuleDict) -> None:
    """Makes the heads in `state_dict` those of the model, in place, and logs which it leaves out or starts anew.

    A head that only the checkpoint has, or has in another size, is left out; a head that only the model has keeps its
    fresh weights.
    """
    own = {f"{PREFIX}{name}": weight for name, weight in heads.state_dict().items()}
    in_checkpoint = {name for name in state_dict if name.startswith(PREFIX)}
    unfit = {_head(name) for name in in_checkpoint if name not in own or state_dict[name].shape != own[name].shape}
    for head in sorted(unfit):
        reason = "has another number of outputs there" if head in heads else "is none of this task's"
        logger.warning("classification head %s of the checkpoint is left out: it %s", head, reason)
    for name in in_checkpoint:
        if _head(name) in unfit:
            del state_dict[name]
    fresh = {_head(name) for name in own if name not in state_dict}
    for head in sorted(fresh):
        logger.info("classification head %s is not in the checkpoint and starts with fresh weights", head)
    for name, weight in own.items():
        state_dict.setdefault(name, weight)


def _head(name: str) -> str:
    return name[len(PREFIX) :].split(".")[0]


def heads_in_checkpoint(state_dict: dict[str, Tensor]) -> dict[str, int]:
    """Names of the classification heads among the weights, and how many outputs each has."""
    suffix = ".out_proj.weight"
    return {
        _head(name): weight.size(0)
        for name, weight in state_dict.items()
        if name.startswith(PREFIX) and name.endswith(suffix)
    }
