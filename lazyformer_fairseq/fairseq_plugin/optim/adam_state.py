"""Adam's state, as apex's FusedAdam keeps it and as torch's AdamW does: a run may be resumed on either.

| | apex (apex/optimizers/fused_adam.py) | torch |
|---|---|---|
| number of updates | `step` of a group, a number (a tensor where capturable) | `step` of each weight, a tensor |
| moments | `exp_avg`, `exp_avg_sq` of each weight | the same |
| settings of a group | lr, betas, eps, weight_decay, bias_correction | lr, betas, eps, weight_decay, fused and more |

Each takes the other's without a word until the next update: torch then misses `step`, and apex begins to count anew, so
that the moments are corrected for a bias that they no longer have.
"""

import copy
import logging
from collections.abc import Iterable
from typing import Any

import torch

logger = logging.getLogger(__name__)

MOMENTS = ("exp_avg", "exp_avg_sq")
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


def joined_or_split(saved: dict[str, Any], own: torch.optim.Optimizer) -> dict[str, Any]:
    """A checkpoint's state for as many tensors as the optimizer that is to load it has.

    With ``--fp16`` on a GPU fairseq joins all weights to one vector, elsewhere they stay apart: a run in bf16 may be
    resumed in fp16 on an older GPU, and back. What is of other weights comes back as it is.

    Args:
        saved: what ``state_dict`` of FusedAdam or AdamW returned.
        own: one of them.
    """
    weights = [weight for group in own.param_groups for weight in group["params"]]
    numbers = [number for group in saved["param_groups"] for number in group["params"]]
    moments = [saved["state"][number] for number in numbers if number in saved["state"]]
    sizes = [weight.numel() for weight in weights]
    fewer, more = sorted((len(weights), len(numbers)))
    are_joined = fewer == 1 < more and len(saved["param_groups"]) == 1
    if not are_joined or sum(sizes) != sum(each["exp_avg"].numel() for each in moments):
        return saved
    others = {name: value for name, value in moments[0].items() if name not in MOMENTS}
    if "step" in others:
        others["step"] = torch.tensor(float(_same_for_all(int(each["step"]) for each in moments)))
    state = [copy.deepcopy(others) for _ in weights]  # torch counts each tensor's updates in place
    for name in MOMENTS:
        vector = torch.cat([each[name].flatten() for each in moments])
        for own_state, weight, part in zip(state, weights, vector.split(sizes), strict=True):
            own_state[name] = part.view(weight.shape)
    group = {**saved["param_groups"][0], "params": list(range(len(weights)))}
    return {**saved, "state": dict(enumerate(state)), "param_groups": [group]}


def _is_torchs(saved: dict[str, Any]) -> bool:
    if saved["state"]:
        return any("step" in moments for moments in saved["state"].values())
    return "bias_correction" not in saved["param_groups"][0]  # before the first update


def _same_for_all(updates: Iterable[int]) -> int:
    """apex counts the updates of a group, as one vector does; torch those of a weight that had a gradient."""
    counts = sorted(set(updates))
    if len(counts) > 1:
        logger.warning(
            "optimizer: some weights had %d updates and some %d; %d are counted for all",
            counts[0], counts[-1], counts[-1],
        )  # fmt: skip
    return counts[-1]


def _without_step(moments: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in moments.items() if name != "step"}
