"""Options that take several values."""

import click
from click.testing import CliRunner

from lazyformer_fairseq.arguments import CommandWithSeveralValues, divided, numbers, products


@click.command(cls=CommandWithSeveralValues)
@click.option("--names", multiple=True, callback=divided)
@click.option("--rates", multiple=True, callback=numbers(float), default=("0.1", "0.2"))
@click.option("--seeds", multiple=True, callback=numbers(int))
@click.option("--sizes", multiple=True, callback=products, default=("2x3",))
@click.option("--one")
@click.option("--flag", is_flag=True)
def command(**given):
    click.echo(repr(given))


def given(*arguments: str):
    result = CliRunner().invoke(command, arguments)
    return eval(result.output) if result.exit_code == 0 else result.output


def test_values_follow_an_option_until_the_next():
    found = given("--names", "a", "b,c", "--one", "x", "--seeds", "3", "1", "--flag", "--names=d")
    assert found == {
        "names": ("a", "b", "c", "d"), "rates": (0.1, 0.2), "seeds": (3, 1), "sizes": ((2, 3),), "one": "x",
        "flag": True,
    }  # fmt: skip


def test_products_are_pairs_of_numbers():
    assert given("--sizes", "12x64,4x16")["sizes"] == ((12, 64), (4, 16))
    for wrong in ("12", "12x", "0x64", "12x6x4", "ax2"):
        assert f"'{wrong}' is no product" in given("--sizes", wrong)


def test_what_is_no_number_or_there_twice_is_refused():
    assert "'one' is no whole number" in given("--seeds", "1", "one")
    assert "1 is there twice" in given("--seeds", "1", "1")
    assert "1.5 is out of range" in given("--rates", "1.5")
    assert "nan is out of range" in given("--rates", "nan")
    assert "unexpected extra argument" in given("stray")
