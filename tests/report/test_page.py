"""Tables, notes and pictures of a report; figures in one style."""

import numpy as np
import pytest

from lazyformer_fairseq.report.figures import (
    COLORS,
    MARKS,
    draw_band,
    draw_spread,
    handles,
    label_cost,
    picture,
    styles,
)
from lazyformer_fairseq.report.numbers import number, spread, with_range, with_spread
from lazyformer_fairseq.report.page import Notes, Picture, markdown, write_page
from lazyformer_fairseq.report.tables import Table

ROWS = [{"model": "bert", "of": "1%", "bits": "7.72"}, {"model": "lazy", "of": "a_b", "bits": "-"}]


def test_a_page_has_its_blocks_in_order_and_a_screen_no_pictures(tmp_path):
    blocks = ["# Results", Table("Cost", ROWS, left=["of"]), Notes(["One.", "Two."]), Picture("curves.png")]
    on_screen = write_page(blocks, tmp_path, "table")
    assert (tmp_path / "table.md").read_text() == on_screen.rstrip() + "\n\n![curves](curves.png)\n"
    assert on_screen.startswith("# Results\n\n## Cost\n\n| model   | of   |   bits |")
    assert on_screen.endswith("|\n\n- One.\n- Two.\n")
    assert markdown(["first", Notes([]), "last"]) == "first\n\nlast\n", "a block without words leaves no gap"


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        (number(7890.4), "7,890"),
        (number(0.01234), "0.0123"),
        (with_range([2.0]), "2.000"),
        (with_range([150.0, 100.0, 110.0]), "110.0 (100.0 to 150.0)"),
        (with_spread(spread([1.0, 2.0])), "1.5 (n = 2)"),
        (with_spread(spread([1.0, 2.0, 3.0]), 2), "2.00 (1.50 to 2.50)"),
    ],
)
def test_numbers_are_short_and_say_how_far_they_spread(said, expected):
    assert said == expected


def test_a_figure_is_written_when_its_block_ends_well_and_forty_two_names_look_different(tmp_path):
    style_of = styles(["bert", "lazy"])
    with picture(tmp_path / "a.png", columns=2, title="t", legend=handles(style_of), sharey=True) as axes:
        draw_band(axes[0, 0], [1, 2], np.array([[3.0, 2.0], [4.0, 1.0]]), style_of["bert"])
        draw_spread(axes[0, 1], 1, [1.0, 2.0], style_of["lazy"])
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(RuntimeError), picture(tmp_path / "b.png"):
        raise RuntimeError
    assert not (tmp_path / "b.png").exists()
    found = styles(map(str, range(len(COLORS) * len(MARKS))))
    assert len({tuple(style.values()) for style in found.values()}) == len(COLORS) * len(MARKS) == 56


@pytest.mark.parametrize(
    ("cost", "values", "ticks", "label"),
    [
        ("flops", [0, 4.2e12], "0 1T 2T 3T 4T", "training FLOPs"),
        ("hours", [0, 0.0175], "0 10 20 30 40 50 60", "training time, seconds"),
        ("hours", [0, 0.5], "0 5 10 15 20 25 30", "training time, minutes"),
        ("hours", [0, 60], "0 20 40 60", "training time, hours"),
        ("seconds", [0, 3000], "0 10 20 30 40 50", "training time, minutes"),
    ],
)
def test_ticks_of_a_cost_are_short_and_in_a_unit_that_fits(tmp_path, cost, values, ticks, label):
    with picture(tmp_path / "a.png") as ((axis,),):
        axis.plot(values, [1, 2])
        label_cost(axis, cost)
    assert axis.get_xlabel() == label
    shown = [tick.get_text() for tick in axis.get_xticklabels()]
    assert {*ticks.split()} <= {*shown} and all(len(text) < 5 for text in shown)
