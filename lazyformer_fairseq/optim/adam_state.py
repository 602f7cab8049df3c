"""Adam's state, as apex's FusedAdam keeps it and as torch's AdamW does: a run may be resumed on either.

| | apex (apex/optimizers/fused_adam.py) | torch |
|---|---|---|
| number of updates | `step` of a group, a number (a tensor where capturable) | `step` of each weight, a tensor |
| moments | `exp_avg`, `exp_avg_sq` of each weight | the same |
| settings of a group | lr, betas, eps, weight_decay, bias_correction | lr, betas, eps, weight_decay, fused and more |

Each takes the other's without a word until the next update: torch then misses `step`, and apex begins to count anew, so
that the moments are corrected for a bias that they no longer have.
"""

import logging
from collections.abc import Iterable
from typing import Any

import torch

logger = logging.getLogger(__name__)

SHARED_SETTINGS = ("lr", "betas", "eps", "weight_decay")


def fitted(saved: dict[str, Any], own: torch.optim.Optimizer) -> dict[str, Any]:
    """A checkpoint's state in the layout of the optimizer that is to load it; the checkpoint's stays as it is.

    Args:
        saved: what ``state_dict`` of either returned, with as many groups as `own` has.
        own: apex's FusedAdam, or torch's AdamW.
    """
    own_is_torchs = isinstance(own, torch.optim.AdamW)
    if own_is_torchs == _is_torchs(saved):
        return saved
    state, groups, updates = dict(saved["state"]), [], 0
    for group, own_group in zip(saved["param_groups"], own.param_groups, strict=True):
        settings = {name: value for name, value in own_group.items() if name not in ("params", "step")}
        settings |= {name: group[name] for name in SHARED_SETTINGS} | {"params": group["params"]}
        moments = {number: state[number] for number in group["params"] if number in state}
        if own_is_torchs:
            updates = int(group.get("step", 0))
            state |= {number: {**each, "step": torch.tensor(float(updates))} for number, each in moments.items()}
        elif moments:
            settings["step"] = updates = _same_for_all(int(each["step"]) for each in moments.values())
            state |= {number: _without_step(each) for number, each in moments.items()}
        groups.append(settings)
    logger.info(
        "optimizer: the checkpoint's state is %s, after %d updates; it continues as %s",
        *(("apex's FusedAdam's", updates, "torch's AdamW's") if own_is_torchs else
          ("torch's AdamW's", updates, "apex's FusedAdam's")),
    )  # fmt: skip
    return {**saved, "state": state, "param_groups": groups}


def _is_torchs(saved: dict[str, Any]) -> bool:
    if saved["state"]:
        return any("step" in moments for moments in saved["state"].values())
    return "bias_correction" not in saved["param_groups"][0]  # before the first update


def _same_for_all(updates: Iterable[int]) -> int:
    """apex counts the updates of a group; a weight that had no gradient in some has fewer with torch."""
    counts = sorted(set(updates))
    if len(counts) > 1:
        logger.warning(
            "optimizer: some weights had %d updates and some %d; apex's FusedAdam counts %d for all",
            counts[0], counts[-1], counts[-1],
        )  # fmt: skip
    return counts[-1]


def _without_step(moments: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in moments.items() if name != "step"}
