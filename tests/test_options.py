"""Options as fields of settings: from a command line, from a file, out of bounds."""

from dataclasses import MISSING, dataclass
from pathlib import Path
from typing import Optional

import click
import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.options import Group, check, duration, option, split_at_commas, with_options_from


@dataclass(frozen=True)
class Settings:
    name: str = option(MISSING, "What it is called.")
    updates: int = option(10, "How many.", low=1, section="How long")
    budget: Optional[float] = option(None, "In their place.", parse=duration, metavar="TIME", shown="none")
    lr: tuple[float, ...] = option((1e-3,), "Rates.", low=0, is_open=True, metavar="R,R,...")
    models: Optional[tuple[str, ...]] = option(None, "Patterns.", "--model", "-m")
    way: str = option("a", "Which.", choices=("a", "b"))
    in_turn: bool = option(True, "One after the other.")
    fast: bool = option(False, "Quickly.")
    asked: Optional[bool] = option(None, "Maybe.")
    output: Path = option(Path("out"), "Folder.")


@pytest.fixture
def main():
    @click.group(cls=Group, default="run", context_settings={"show_default": True})
    def main():
        """Does it."""

    @main.command()
    @with_options_from(Settings)
    @click.option("--other", help="Beside them.")
    def run(settings, other):
        """Run all. Then stop."""
        main.given = settings
        assert other is None

    @main.group(default="one")
    def inner():
        """Has more."""

    return main


def ran(main, *words):
    return CliRunner().invoke(main, words, prog_name="lazyformer", catch_exceptions=False)


def test_settings_come_from_words_and_their_defaults_from_the_fields(main):
    words = "--name x --updates 3 --budget 2min --lr 0.1,0.2 --lr 0.5 -m s[a=1,b=2],f --way b --no-in-turn --fast"
    assert ran(main, *words.split(), "--output", "o").exit_code == 0
    models, out = ("s[a=1,b=2]", "f"), Path("o")
    assert main.given == Settings("x", 3, 120.0, (0.1, 0.2, 0.5), models, "b", False, True, None, out)
    assert ran(main, "--name", "x").exit_code == 0 and main.given == Settings("x")

    said = ran(main, "run", "--help").output
    assert said.index("Options:") < said.index("How long:") and "--other" in said
    shown = ("[required]", "[default: 10; x>=1]", "[default: (none)]", "[default: 0.001]", "--in-turn / --no-in-turn")
    assert all(part in " ".join(said.split()) for part in shown)
    assert "Run all." in ran(main, "--help").output


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--updates 0", "0 is not in the range x>=1"),
        ("--lr 1,x", "'x' is not a valid float"),
        ("--lr 0", "0.0 is not in the range x>0"),
        ("--lr 1,1.0", "1.0 is specified twice"),
        ("--budget 3", "'3' is not a duration; use, for example, 90s"),
        ("--way c", "'c' is not one of 'a', 'b'"),
    ],
)
def test_a_bad_value_is_refused(main, words, said):
    found = ran(main, "--name", "x", *words.split())
    assert found.exit_code == 2 and said in found.output


def test_what_is_required_has_to_be_given(main):
    found = ran(main, "--updates", "3")
    assert found.exit_code == 2 and "Missing option '--name'" in found.output


@pytest.mark.parametrize(
    ("kept", "said"),
    [
        ({"name": "x", "updates": -1}, "--updates -1: must be 1 or more"),
        ({"name": "x", "lr": [0.1, 0.0]}, "--lr 0.0: must be more than 0"),
        ({"name": "x", "lr": [float("nan")]}, "--lr nan: must be a number, more than 0"),
        ({"name": "x", "updates": 2**40}, "--updates 1099511627776: must be below 4,294,967,296"),
        ({"name": "x", "way": "c"}, "--way c: must be one of a, b"),
    ],
)
def test_a_bad_value_in_a_file_is_refused(kept, said):
    check(Settings("x", lr=(1.0, 2.0)))
    with pytest.raises(UserError, match=said):
        check(Settings(**kept))


def test_a_command_line_refuses_what_click_lets_through(main):
    with pytest.raises(UserError, match="--lr nan: must be a number, more than 0"):
        ran(main, "--name", "x", "--lr", "nan")
    with pytest.raises(UserError, match="--updates 1099511627776: must be below 4,294,967,296"):
        ran(main, "--name", "x", "--updates", str(2**40))


@given(st.floats(0.001, 1e6), st.sampled_from(["s", "min", "h"]), st.lists(st.text("ab=1", min_size=1), max_size=4))
def test_times_are_read_and_commas_in_brackets_divide_nothing(number, unit, parts):
    assert duration(f"{number:f}{unit}") == float(f"{number:f}") * {"s": 1, "min": 60, "h": 3600}[unit]
    words = [f"s[{part},{part}]" for part in parts]
    assert split_at_commas(", ".join(words)) == words
