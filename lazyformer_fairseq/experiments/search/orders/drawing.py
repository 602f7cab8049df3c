"""Orders of ``s`` and ``f``: random ones and Sandwich's (Press et al., 2019, sections 3 and 4)."""

import random
from collections.abc import Mapping, Sequence

from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.patterns.kinds import find_kind

# The letters of an order.
ATTENTION, FEED_FORWARD = LETTERS = tuple(find_kind(name).letter for name in ("self-attention", "feed-forward"))
DRAWS = 10_000  # for each order that is asked for
TOLERANCE = 0.02  # of the baseline's parameters


def sandwich(sublayers: int, k: int) -> str:
    """``s^k (sf)^(n - k) f^k`` with n of each kind: k = 0 is the interleaved order.

    Raises:
        UserError: k is not from 0 to n - 1, or the number of sublayers is odd.
    """
    half = _half(sublayers)
    if not 0 <= k < half:
        raise UserError(f"--sandwich {k}: with {sublayers} sublayers, from 0 to {half - 1}")
    return ATTENTION * k + "".join(LETTERS) * (half - k) + FEED_FORWARD * k


def random_orders(sublayers: int, count: int, seed: int, beside: Sequence[str] = ()) -> list[str]:
    """Random orders of as many ``s`` as ``f``, each once, none that is among `beside`.

    Raises:
        UserError: there are not so many.
    """
    letters, chance = LETTERS * _half(sublayers), random.Random(seed)
    return _distinct(lambda: "".join(chance.sample(letters, sublayers)), count, beside)


def random_balances(
    sublayers: int, count: int, seed: int, parameters: Mapping[str, int], beside: Sequence[str] = ()
) -> list[str]:
    """Random orders of about the baseline's parameters, however many of either kind: letters until these are spent.

    Args:
        sublayers: of the baseline.
        parameters: of a sublayer, by letter.

    Raises:
        UserError: there are not so many.
    """
    letters = tuple(parameters)
    budget = _half(sublayers) * sum(parameters.values())
    chance = random.Random(seed)

    def draw() -> str:
        order = ""
        while (spent := sum(parameters[letter] for letter in order)) < (1 - TOLERANCE) * budget:
            order += chance.choice(letters)
        return order if spent <= (1 + TOLERANCE) * budget else ""

    return _distinct(draw, count, ["", *beside])


def _half(sublayers: int) -> int:
    if sublayers < 2 or sublayers % 2:
        raise UserError(f"--sublayers {sublayers}: give an even number of 2 or more, half of them s and half f")
    return sublayers // 2


def _distinct(draw, count: int, beside: Sequence[str]) -> list[str]:
    found: dict[str, None] = {}
    for _ in range(DRAWS * max(1, count)):
        if len(found) == count:
            break
        order = draw()
        if order not in beside:
            found[order] = None
    if len(found) < count:
        raise UserError(f"--orders {count}: only {len(found)} were found; give fewer, or more --sublayers")
    return list(found)


def share_of_attention_below(order: str) -> float:
    """Of the ``s``, the share in the lower half of the order: 0.5 for the interleaved one, up to 1."""
    lower = order[: len(order) // 2]
    return lower.count(ATTENTION) / max(1, order.count(ATTENTION))
