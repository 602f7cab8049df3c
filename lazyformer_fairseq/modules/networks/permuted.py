"""Permuted language modeling: tokens in any order, with explicit positions and visibility rules.

MPNet (Song et al., 2020, 2004.09297, section 2) and XLNet predict tokens one by one in a random order of positions.
Here, their two attention streams are two parts of one sequence, so the streams share all weights. Content tokens are
visible to other tokens; query tokens make predictions and are visible to no other token.

Each token has three integers, called its turns. It is computed at turn `at`, and it is visible from turn `from` up to,
but not including, turn `until`. Token i sees token j if from_j <= at_i < until_j. Padding is never visible.
"""

from typing import Optional

import torch
from torch import Tensor, nn

from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.modules.networks.stack import Stack
from lazyformer_fairseq.modules.processor import has_numbers


def visibility_mask(turns_B3T: Tensor) -> Tensor:
    """Convert turns (at, from, until) to a mask (B, T, T) that is True where the row's token sees the column's."""
    at, first, end = turns_B3T.unbind(1)
    has_begun = first[:, None, :] <= at[..., None]
    is_before_end = at[..., None] < end[:, None, :]
    return has_begun & is_before_end


def check_takes_permuted(model: nn.Module, option: str) -> None:
    """Raise a UserError if the model's tokens would see more than their turns allow.

    Args:
        model: the model.
        option: the option that permutes tokens, for the error message.
    """
    network = next((each for each in model.modules() if isinstance(each, Stack)), None)
    if network is None or not getattr(model, "takes_permuted", False):
        raise UserError(f"{option} works only with this package's encoders; use one of them, or omit the option")
    for planned, sublayer in zip(network.plan, network.sublayers, strict=True):
        if not getattr(sublayer, "inner", sublayer).takes_permuted:
            raise UserError(
                f"{option}: tokens are permuted, but {planned.text} depends on their order in the sequence; use only "
                "the sublayers s, l, k and f, with no settings of s other than rope, qk_norm, persistent and entmax"
            )


def check_turns(turns_B3T: Tensor, positions_BT: Optional[Tensor], shape: torch.Size, most: int) -> None:
    """Raise a UserError if turns or positions have the wrong shape or, on a CPU, if a position is too large.

    Args:
        turns_B3T: the turns.
        positions_BT: the positions; None is an error.
        shape: (B, T).
        most: the model's number of positions.
    """
    turns_shape = (shape[0], 3, shape[1])
    if positions_BT is None or positions_BT.shape != shape or turns_B3T.shape != turns_shape:
        positions_found = None if positions_BT is None else tuple(positions_BT.shape)
        raise UserError(
            f"positions and turns must have the shapes {tuple(shape)} and {turns_shape}, not {positions_found} and "
            f"{tuple(turns_B3T.shape)}"
        )
    is_readable = positions_BT.device.type == "cpu" and has_numbers(positions_BT)
    if is_readable and positions_BT.numel() and int(positions_BT.max()) >= most:
        raise UserError(
            f"position {int(positions_BT.max())} is out of range; the model has {most} positions, counted from 0"
        )
