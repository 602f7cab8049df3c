"""What decides ListOps' expressions, as in Long Range Arena unless the user chooses otherwise."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from lazyformer_fairseq.errors import UserError

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
