"""Tokens in any order, which bring their places and say when they see each other: permuted language models.

MPNet (Song et al., 2020, 2004.09297, section 2) and XLNet predict tokens one after the other, in a random order of the
text's places. Their two streams of attention are here rows of one sequence, so they share all weights: content rows,
which others see, and query rows, which predict and nobody sees. Each token has three numbers, its turns: it is
computed `at` one, and is seen `from` one on `until` another, which no longer sees it. Token i sees token j where
from_j <= at_i < until_j. Padding is seen at no turn.
"""

from typing import Optional

import torch
from torch import Tensor, nn

from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.modules.networks.stack import Stack
from lazyformer_fairseq.modules.processor import has_numbers


def sees(turns_B3T: Tensor) -> Tensor:
    """Return (B, T, T): whether the token of a row sees that of a column, from their turns (at, from, until)."""
    at, first, end = turns_B3T.unbind(1)
    return (first[:, None, :] <= at[..., None]) & (at[..., None] < end[:, None, :])


def check_takes_permuted(model: nn.Module, option: str) -> None:
    """Raise a UserError for a model in which tokens would see more than their turns let them."""
    network = next((each for each in model.modules() if isinstance(each, Stack)), None)
    if network is None or not getattr(model, "takes_permuted", False):
        raise UserError(f"{option}: is for encoders of this package; leave it out")
    for planned, sublayer in zip(network.plan, network.sublayers, strict=True):
        if not getattr(sublayer, "inner", sublayer).takes_permuted:
            raise UserError(
                f"{option}: {planned.text} goes by the order of tokens in a row, and here they are permuted; it can "
                "stand with s, l, k and f, of an s with rope, qk_norm, persistent and entmax"
            )


def check_turns(turns_B3T: Tensor, positions_BT: Optional[Tensor], shape: torch.Size, most: int) -> None:
    """Raise a UserError for turns or positions of other shapes, or (on a processor) positions beyond `most`."""
    if positions_BT is None or positions_BT.shape != shape or turns_B3T.shape != (shape[0], 3, shape[1]):
        found = [None if each is None else tuple(each.shape) for each in (positions_BT, turns_B3T)]
        raise UserError(
            f"positions and turns are {found[0]} and {found[1]}, must be {tuple(shape)} and {(shape[0], 3, shape[1])}"
        )
    is_readable = positions_BT.device.type == "cpu" and has_numbers(positions_BT)
    if is_readable and positions_BT.numel() and int(positions_BT.max()) >= most:
        raise UserError(f"a position of {int(positions_BT.max())}: the model has {most}, counted from 0")
