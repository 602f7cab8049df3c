"""Options that take several values, as in ``--seeds 1 2 3`` or ``--seeds 1,2,3``."""

from typing import Any

import click


class CommandWithSeveralValues(click.Command):
    """A command without positional arguments, whose options with ``multiple=True`` take all values that follow."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        several = {name for option in self.params if getattr(option, "multiple", False) for name in (*option.opts,)}
        expanded: list[str] = []
        current = None
        for arg in args:
            if arg.startswith("--"):
                current = arg if arg in several else None
                if current is None:
                    expanded.append(arg)
            elif current is None:
                expanded.append(arg)
            else:
                expanded += [current, arg]
        return super().parse_args(ctx, expanded)


def divided(ctx: click.Context, option: click.Parameter, values: tuple[str, ...]) -> tuple[str, ...]:
    """Callback: values that hold commas are several."""
    return tuple(part.strip() for value in values for part in value.split(",") if part.strip())


def numbers(kind: type) -> Any:
    """Callback: as :func:`divided`, then numbers of a kind, each once."""

    def convert(ctx: click.Context, option: click.Parameter, values: tuple[str, ...]) -> tuple:
        found = []
        for word in divided(ctx, option, values):
            try:
                number = kind(word)
            except ValueError:
                raise click.BadParameter(f"{word!r} is no {'whole ' * (kind is int)}number") from None
            if number < 0 or (kind is float and not 0 < number < 1):
                raise click.BadParameter(f"{word} is out of range")
            if number in found:
                raise click.BadParameter(f"{word} is there twice")
            found.append(number)
        return tuple(found)

    return convert


def products(ctx: click.Context, option: click.Parameter, values: tuple[str, ...]) -> tuple[tuple[int, int], ...]:
    """Callback: as :func:`divided`, then pairs of numbers, as in 12x64."""
    found = []
    for word in divided(ctx, option, values):
        left, _, right = word.partition("x")
        if not (left.isdecimal() and right.isdecimal() and int(left) and int(right)):
            raise click.BadParameter(f"{word!r} is no product of two whole numbers, such as 12x64")
        found.append((int(left), int(right)))
    return tuple(found)


def named_patterns(ctx: click.Context, option: click.Parameter, values: tuple[str, ...]) -> dict[str, str]:
    """Callback: NAME=PATTERN."""
    found = {}
    for value in values:
        name, equals, pattern = value.partition("=")
        if not equals or not name or not pattern or "/" in name:
            raise click.BadParameter(f"{value!r} is no NAME=PATTERN, such as 'mine=(sff)x4 (f)x4'")
        if name in found:
            raise click.BadParameter(f"{name} is there twice")
        found[name] = pattern
    return found
