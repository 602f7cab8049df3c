"""ListOps: nested operations on lists of digits (Nangia and Bowman, 2018; Long Range Arena, Tay et al., 2020).

An input is ``[CLS] MAX 2 9 MIN 4 7 ] 0 ] [SEP]``: Nangia and Bowman's parentheses around every pair of neighbours are
left out, as Long Range Arena's own input pipeline does before it makes ids. They say nothing that the operators' ends
do not say, and would triple the length.

Expressions are drawn and evaluated thousands at a time. A node is a digit, or an operator with its arguments. With
probability 1/4 a node is an operator, except on the last level; it has 2 to `max_arguments` arguments, each number as
likely. So are operators and digits. The outermost node is an operator. That is the distribution of Long Range Arena's
generator (section 2.1) once lengths outside the bounds are thrown away.

A batch of trees is a list of levels, the outermost first. The arguments of an operator stand side by side on the next
level, in the order of their operators.
"""

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import numpy as np

from lazyformer_fairseq.data.prepared_folder import EncodedExamples
from lazyformer_fairseq.data.text.interface import TextTokenizer
from lazyformer_fairseq.data.text.library_tokenizer import adopt_tokenizer
from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.finetuning import made
from lazyformer_fairseq.progress import Progress
from lazyformer_fairseq.storage.atomic import atomic_folder

OPERATORS = ("MAX", "MIN", "MED", "SM")
SHORTEST = 4  # an operator, two digits, the end


@dataclass(frozen=True)
class ListOpsSettings:
    """All that decides the data (Tay et al., 2020, section 2.1; Nangia and Bowman, 2018).

    Attributes:
        rows: examples by split.
        min_length, max_length: tokens of an expression, both included: each digit, operator and end is one.
        max_depth: levels of an expression, the outermost operator's is the first; the last one has digits alone.
        max_arguments: of an operator, which has at least two.
        operators: of OPERATORS.
        seed: of everything.

    Raises:
        UserError: no expression is like that.
    """

    rows: Mapping[str, int] = field(default_factory=lambda: {"train": 96_000, "valid": 2_000, "test": 2_000})
    min_length: int = 500
    max_length: int = 2_000
    max_depth: int = 10
    max_arguments: int = 10
    operators: tuple[str, ...] = OPERATORS
    seed: int = 1

    def __post_init__(self):
        if unknown := [name for name in self.operators if name not in OPERATORS]:
            raise UserError(f"--operators: {unknown[0]!r} is none of {', '.join(OPERATORS)}")
        if not self.operators or len(set(self.operators)) < len(self.operators):
            raise UserError(f"--operators {','.join(self.operators)}: give one or more, each once")
        if self.max_depth < 2 or self.max_arguments < 2:
            raise UserError(
                f"--max-depth {self.max_depth}, --max-arguments {self.max_arguments}: an operator and its digits are "
                "two levels, and it has at least two arguments; give 2 or more of both"
            )
        if self.max_length < max(SHORTEST, self.min_length):
            raise UserError(
                f"--min-length {self.min_length}, --max-length {self.max_length}: the shortest expression has "
                f"{SHORTEST} tokens, and no length may be below the minimum"
            )
        if self.min_length > self.longest:
            raise UserError(
                f"--min-length {self.min_length}: with --max-depth {self.max_depth} and --max-arguments "
                f"{self.max_arguments} no expression has more than {self.longest} tokens; give more of these, or less "
                "length"
            )
        if min(self.rows.values()) < 1:
            raise UserError("every split needs an example")

    @property
    def longest(self) -> int:
        """Tokens of the largest expression there is."""
        tokens = 1
        for _ in range(self.max_depth - 1):
            tokens = 2 + self.max_arguments * tokens
        return tokens

    def as_json(self) -> dict[str, Any]:
        return {**asdict(self), "operators": list(self.operators)}


DIGITS = 10
END = DIGITS + len(OPERATORS)  # symbols: the digits, then OPERATORS, then this
SYMBOLS = (*map(str, range(DIGITS)), *OPERATORS, "]")
ONE_IN = 4  # nodes that may be operators is one
TREES = 4096  # drawn at once


class Level(NamedTuple):
    """Nodes of all trees at one depth.

    Attributes:
        tree: which tree each node is of, (nodes,).
        arguments: how many each has, 0 for a digit, (nodes,).
    """

    tree: np.ndarray
    arguments: np.ndarray


def draw_expressions(draws: made.Draws, settings: ListOpsSettings) -> Iterator[tuple[np.ndarray, int]]:
    """The expressions with a length within the bounds among TREES that are drawn; perhaps none.

    Yields:
        Places in SYMBOLS, uint8 (tokens,), and what the expression comes to, 0 to 9.
    """
    levels = _draw_levels(draws, settings)
    operators = [np.full(len(level.tree), -1) for level in levels]
    digits = [draws.below(DIGITS, len(level.tree)) for level in levels]
    for level, chosen in zip(levels, operators, strict=True):
        is_operator, names = level.arguments > 0, np.array(list(map(OPERATORS.index, settings.operators)))
        chosen[is_operator] = names[draws.below(len(names), int(is_operator.sum()))]
    sizes = _sizes(levels)
    values = _values(levels, operators, digits).tolist()
    parts = np.split(_write(levels, operators, digits, sizes), np.cumsum(sizes[0])[:-1]) if values else []
    yield from zip(parts, values, strict=True)


def _draw_levels(draws: made.Draws, settings: ListOpsSettings) -> list[Level]:
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
        written[~fits] = settings.max_length + 1
        # Arguments of trees that are too long are left out; the trees themselves go below.
        if not len(nodes := nodes[fits[nodes]]):
            break
    is_kept = (written >= settings.min_length) & (written <= settings.max_length)
    number = np.cumsum(is_kept) - 1
    kept = [is_kept[level.tree] for level in levels]
    return [Level(number[tree[at]], arguments[at]) for (tree, arguments), at in zip(levels, kept, strict=True)]


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


SPECIAL = ("[CLS]", "[PAD]", "[SEP]", "[UNK]", "[MASK]")
FIRST_SYMBOL = len(SPECIAL)
VAIN_BATCHES = 30  # in a row without a new expression: there are no more, or hardly any


def prepare_listops(settings: ListOpsSettings, out: Path) -> dict[str, Any]:
    """Draws the examples and writes `out`, whole or not at all; returns the manifest.

    The data is the same for the same settings, on every machine.

    Raises:
        UserError: there are not as many different expressions; or `out` holds something.
    """
    with atomic_folder(out) as folder, TemporaryDirectory() as scratch:
        tokenizer = listops_tokenizer(Path(scratch))
        splits, drawn = {}, distinct_expressions(settings)
        with Progress(total=sum(settings.rows.values()), desc="draw", unit=" expressions") as progress:
            for split, rows in settings.rows.items():
                splits[split] = _encoded(drawn, rows, progress)
        rules = simple_rules(splits["train"], splits["test"])
        return made.write_prepared(folder, "ListOps", settings.as_json(), tokenizer, splits, rules)


def listops_tokenizer(scratch: Path) -> TextTokenizer:
    """The tokenizer of the expressions as text, ``MAX 2 9 ]``: each word is one id."""
    source = scratch / "vocabulary"
    source.mkdir()
    (source / "vocab.txt").write_text("".join(f"{symbol}\n" for symbol in (*SPECIAL, *SYMBOLS)))
    return adopt_tokenizer(source, scratch / "tokenizer")


def distinct_expressions(settings: ListOpsSettings) -> Iterator[tuple[np.ndarray, int]]:
    """Symbols and value of one new expression after the other.

    Raises:
        UserError: no new one is found.
    """
    draws, seen, vain = made.Draws(settings.seed), set(), 0
    while vain < VAIN_BATCHES:
        vain += 1
        for symbols, value in draw_expressions(draws, settings):
            if (key := symbols.tobytes()) not in seen:
                seen.add(key)
                vain = 0
                yield symbols, value
    raise UserError(
        f"found only {len(seen):,} different expressions of {settings.min_length} to {settings.max_length} tokens, "
        f"{sum(settings.rows.values()):,} are wanted; give more --max-depth, --max-arguments or --operators, a wider "
        "range of lengths, or fewer examples"
    )


def _encoded(drawn: Iterator[tuple[np.ndarray, int]], rows: int, progress: Progress) -> EncodedExamples:
    bos, eos = SPECIAL.index("[CLS]"), SPECIAL.index("[SEP]")
    inputs, targets = [], []
    for _ in range(rows):
        symbols, value = next(drawn)
        inputs.append(np.concatenate([[bos], FIRST_SYMBOL + symbols.astype(np.int32), [eos]]).astype(np.int32))
        targets.append(value)
        progress.update()
    return EncodedExamples(inputs, np.array(targets, dtype=np.int64))


def simple_rules(train: EncodedExamples, test: EncodedExamples) -> dict[str, float]:
    """Accuracy on test of what needs no nested operation, by rule."""
    outer = [[int(ids[1]) for ids in examples.inputs] for examples in (train, test)]
    by_operator = made.frequent_by_group(outer[0], train.targets, outer[1], test.targets)
    usual, symbols = np.bincount(train.targets).argmax(), FIRST_SYMBOL + len(SYMBOLS)
    shallow = [outermost_alone(ids, usual) for ids in test.inputs]
    return {
        made.CONSTANT: made.constant_answer(train.targets, test.targets),
        "the most frequent class of the first operator": by_operator,
        "the first operator on those of its arguments that are digits": float(np.mean(test.targets == shallow)),
        "how often each symbol occurs (logistic regression)": made.bag_of_words(train, test, symbols),
    }


def outermost_alone(ids: np.ndarray, otherwise: int) -> int:
    """The first operator's value on its own digits, as if nothing else stood there; `otherwise` where it has none."""
    symbols = ids[1:-1] - FIRST_SYMBOL
    opens, ends = (symbols >= DIGITS) & (symbols < END), symbols == END
    depth = np.cumsum(opens) - np.cumsum(ends)
    digits = symbols[(symbols < DIGITS) & (depth == 1)]
    if not len(digits):
        return int(otherwise)
    apply = {"MAX": np.max, "MIN": np.min, "MED": np.median, "SM": lambda values: values.sum() % DIGITS}
    return int(apply[OPERATORS[symbols[0] - DIGITS]](digits))


class ListOps(made.MadeBenchmark):
    """ListOps alone."""

    name, key = "ListOps", "listops"


BENCHMARK = ListOps()
