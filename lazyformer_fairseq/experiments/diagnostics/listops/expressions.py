"""Draws expressions of ListOps, thousands at a time, and evaluates them.

A node is a digit, or an operator with its arguments. With probability 1/4 a node is an operator, except on the last
level; it has 2 to `max_arguments` arguments, each number as likely. So are operators and digits. The outermost node is
an operator. That is the distribution of Long Range Arena's generator (Tay et al., 2020, section 2.1) once lengths
outside the bounds are thrown away.

A batch of trees is a list of levels, the outermost first. The arguments of an operator stand side by side on the next
level, in the order of their operators.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from lazyformer_fairseq.experiments.diagnostics.draws import Draws
from lazyformer_fairseq.experiments.diagnostics.listops.settings import OPERATORS, ListOpsSettings

DIGITS = 10
END = DIGITS + len(OPERATORS)  # symbols: the digits, then OPERATORS, then this
SYMBOLS = (*map(str, range(DIGITS)), *OPERATORS, "]")
ONE_IN = 4  # nodes that may be operators is one
TREES = 4096  # drawn at once


@dataclass(frozen=True)
class Level:
    """Nodes of all trees at one depth.

    Attributes:
        tree: which tree each node is of, (nodes,).
        arguments: how many each has, 0 for a digit, (nodes,).
    """

    tree: np.ndarray
    arguments: np.ndarray

    def of(self, is_kept: np.ndarray, number: np.ndarray) -> "Level":
        """The nodes of the trees that are kept, which are renumbered."""
        mask = is_kept[self.tree]
        return Level(number[self.tree[mask]], self.arguments[mask])


@dataclass(frozen=True)
class Expressions:
    """Expressions one after the other.

    Attributes:
        symbols: places in SYMBOLS, uint8 (tokens of all,).
        sizes: tokens of each, (expressions,).
        values: what each comes to, 0 to 9, (expressions,).
    """

    symbols: np.ndarray
    sizes: np.ndarray
    values: np.ndarray

    def __len__(self) -> int:
        return len(self.sizes)

    def __iter__(self) -> Iterator[tuple[np.ndarray, int]]:
        """Symbols and value of each."""
        parts = np.split(self.symbols, np.cumsum(self.sizes)[:-1]) if len(self) else []
        return zip(parts, self.values.tolist(), strict=True)


def draw_expressions(draws: Draws, settings: ListOpsSettings) -> Expressions:
    """The expressions with a length within the bounds among TREES that are drawn; perhaps none."""
    levels = _draw_levels(draws, settings)
    operators = [np.full(len(level.tree), -1) for level in levels]
    digits = [draws.below(DIGITS, len(level.tree)) for level in levels]
    for level, chosen in zip(levels, operators, strict=True):
        is_operator = level.arguments > 0
        names = np.array([OPERATORS.index(name) for name in settings.operators])
        chosen[is_operator] = names[draws.below(len(names), int(is_operator.sum()))]
    sizes = _sizes(levels)
    return Expressions(_write(levels, operators, digits, sizes), sizes[0], _values(levels, operators, digits))


def _draw_levels(draws: Draws, settings: ListOpsSettings) -> list[Level]:
    """The shapes of trees whose lengths are within the bounds. A tree that is too long is not drawn to its end."""
    nodes, levels = np.arange(TREES), []
    written = np.zeros(TREES, np.int64)  # tokens of the levels above
    for depth in range(1, settings.max_depth + 1):
        is_operator = np.full(len(nodes), depth == 1)
        if 1 < depth < settings.max_depth:
            is_operator = draws.below(ONE_IN, len(nodes)) == 0
        arguments = np.zeros(len(nodes), np.int64)
        arguments[is_operator] = 2 + draws.below(settings.max_arguments - 1, int(is_operator.sum()))
        levels.append(Level(nodes, arguments))
        written += np.bincount(nodes, minlength=TREES) + np.bincount(nodes[is_operator], minlength=TREES)
        nodes = np.repeat(nodes, arguments)
        fits = written + np.bincount(nodes, minlength=TREES) <= settings.max_length
        nodes_fit = fits[nodes]
        written[~fits] = settings.max_length + 1
        # Arguments of trees that are too long are left out; the trees themselves go below.
        nodes = nodes[nodes_fit]
        if not len(nodes):
            break
    is_kept = (written >= settings.min_length) & (written <= settings.max_length)
    number = np.cumsum(is_kept) - 1
    return [level.of(is_kept, number) for level in levels]


def _starts(level: Level) -> np.ndarray:
    """For each operator of a level, the place of its first argument on the next."""
    counts = level.arguments[level.arguments > 0]
    return np.cumsum(counts) - counts


def _sizes(levels: list[Level]) -> list[np.ndarray]:
    """Tokens of each node with all that it holds, by level."""
    sizes: list[np.ndarray] = []
    for level in reversed(levels):
        own = np.ones(len(level.tree), np.int64)
        is_operator = level.arguments > 0
        if is_operator.any():
            own[is_operator] = 2 + np.add.reduceat(sizes[-1], _starts(level))
        sizes.append(own)
    return sizes[::-1]


def _values(levels: list[Level], operators: list[np.ndarray], digits: list[np.ndarray]) -> np.ndarray:
    """What each node of the first level comes to."""
    below = np.empty(0, np.int64)
    for level, chosen, own in zip(reversed(levels), reversed(operators), reversed(digits), strict=True):
        is_operator = level.arguments > 0
        values = own.copy()
        if is_operator.any():
            starts, counts = _starts(level), level.arguments[is_operator]
            owner = DIGITS * np.repeat(np.arange(len(counts)), counts)
            in_order = np.sort(owner + below) - owner  # the arguments of each operator by value
            by_operator = {
                "MAX": in_order[starts + counts - 1],
                "MIN": in_order[starts],
                # Of an even number the mean of the middle two, rounded down, as int(numpy.median) does.
                "MED": (in_order[starts + (counts - 1) // 2] + in_order[starts + counts // 2]) // 2,
                "SM": np.add.reduceat(below, starts) % DIGITS,
            }
            table = np.stack([by_operator[name] for name in OPERATORS])
            values[is_operator] = table[chosen[is_operator], np.arange(len(counts))]
        below = values
    return below


def _write(
    levels: list[Level], operators: list[np.ndarray], digits: list[np.ndarray], sizes: list[np.ndarray]
) -> np.ndarray:
    """All expressions as symbols, from the outside in: where a node stands follows from its operator's place."""
    symbols = np.empty(int(sizes[0].sum()), np.uint8)
    places = np.cumsum(sizes[0]) - sizes[0]
    for depth, level in enumerate(levels):
        is_operator = level.arguments > 0
        symbols[places] = np.where(is_operator, DIGITS + operators[depth], digits[depth])
        symbols[places[is_operator] + sizes[depth][is_operator] - 1] = END
        if depth + 1 < len(levels):
            following, starts = sizes[depth + 1], _starts(level)
            before = np.cumsum(following) - following
            counts = level.arguments[is_operator]
            places = before + np.repeat(places[is_operator] + 1 - before[starts], counts)
    return symbols
