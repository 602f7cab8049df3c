"""Permuted language modelling: tokens in any order, with explicit positions and rules for which tokens see each other.

MPNet (Song et al., 2020, 2004.09297, section 2) and XLNet predict tokens one after the other in a random order of their
positions. Their two streams of attention are parts of one sequence here, so they share all weights. Content tokens are
seen by others; query tokens make predictions and are seen by no other token.

Each token has three integers, its turns. It is computed at turn `at`, and it is visible from turn `from` until before
turn `until`. Token i sees token j if from_j <= at_i < until_j. Padding is never visible.
"""

from typing import Optional

import torch
from torch import Tensor, nn

from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.modules.networks.stack import Stack
from lazyformer_fairseq.modules.processor import has_numbers


def sees(turns_B3T: Tensor) -> Tensor:
    """Return which tokens see which (B, T, T), rows seeing columns, from their turns (at, from, until)."""
    at, first, end = turns_B3T.unbind(1)
    return (first[:, None, :] <= at[..., None]) & (at[..., None] < end[:, None, :])


def check_takes_permuted(model: nn.Module, option: str) -> None:
    """Raise a UserError for a model in which tokens would see more than their turns allow.

    Args:
        model: the model.
        option: what asks for permuted tokens, for the message.
    """
    network = next((each for each in model.modules() if isinstance(each, Stack)), None)
    if network is None or not getattr(model, "takes_permuted", False):
        raise UserError(f"{option}: works only with the encoders of this package; use one, or leave the option out")
    for planned, sublayer in zip(network.plan, network.sublayers, strict=True):
        if not getattr(sublayer, "inner", sublayer).takes_permuted:
            raise UserError(
                f"{option}: tokens are permuted, but {planned.text} depends on their order in the sequence; use only "
                "s, l, k and f, and for s only the settings rope, qk_norm, persistent and entmax"
            )


def check_turns(turns_B3T: Tensor, positions_BT: Optional[Tensor], shape: torch.Size, most: int) -> None:
    """Raise a UserError if turns or positions have the wrong shape or, on a CPU, if positions are too large.

    Args:
        turns_B3T: the turns.
        positions_BT: the positions; missing positions are an error.
        shape: (B, T).
        most: the number of positions that the model has.
    """
    if positions_BT is None or positions_BT.shape != shape or turns_B3T.shape != (shape[0], 3, shape[1]):
        found = [None if each is None else tuple(each.shape) for each in (positions_BT, turns_B3T)]
        raise UserError(
            f"positions and turns must have the shapes {tuple(shape)} and {(shape[0], 3, shape[1])}, not {found[0]} "
            f"and {found[1]}"
        )
    is_readable = positions_BT.device.type == "cpu" and has_numbers(positions_BT)
    if is_readable and positions_BT.numel() and int(positions_BT.max()) >= most:
        raise UserError(f"a position is {int(positions_BT.max())}, but the model has {most} positions, counted from 0")
