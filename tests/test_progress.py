"""Bars in a terminal, lines elsewhere."""

import io
import re
from pathlib import Path

import pytest
from helpers import ROOT

from lazyformer_fairseq import progress
from lazyformer_fairseq.progress import Progress


@pytest.fixture
def clock(monkeypatch) -> list[float]:
    """Its one number is the time, in seconds."""
    now = [0.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    return now


def test_without_a_terminal_it_is_a_line_a_minute(clock):
    output = io.StringIO()
    with Progress(total=400, desc="train", unit=" updates", file=output) as bar:
        for _ in range(400):
            clock[0] += 1
            bar.update()
            bar.set_postfix_str("loss 2")
            Progress.write("a result", file=output)
    lines = [line for line in output.getvalue().splitlines() if line != "a result"]
    assert len(lines) == 7 and "\r" not in output.getvalue()
    assert lines[0] == "train: 15%, 60 of 400 updates, 01:00 so far, 05:40 left, loss 2", (
        "by the clock that never jumps"
    )
    assert lines[-1].startswith("train: 100%, 400 of 400 updates")


def test_time_in_which_nothing_is_done_counts(clock):
    output = io.StringIO()
    bar = Progress(total=10, miniters=0, file=output)
    for _ in range(4):
        for _ in range(100):  # looks at what others do
            clock[0] += 1
            bar.update(0)
        bar.update(1)
    ((minutes, seconds),) = re.findall(r"4 of 10it, 06:40 so far, (\d+):(\d+) left", str(bar))
    assert 60 * int(minutes) + int(seconds) == pytest.approx(600, rel=0.02)


def test_what_takes_less_than_a_minute_leaves_none_and_unknown_lengths_have_no_share(clock):
    output = io.StringIO()
    assert list(Progress(iter("abc"), desc="short", file=output)) == ["a", "b", "c"]
    assert output.getvalue() == ""
    for letter in Progress(iter("abc"), desc="long", unit=" letters", mininterval=0, file=output):
        clock[0] += 60 * (letter == "a")
    assert output.getvalue().splitlines()[0].startswith("long: 1 letters, ")


def test_a_terminal_has_a_bar():
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    output = Terminal()
    list(Progress(range(3), file=output))
    assert "\r" in output.getvalue() and "100%|" in output.getvalue()


def test_nobody_makes_bars_of_their_own():
    files = [path for path in (ROOT / "lazyformer_fairseq").rglob("*.py") if "import tqdm" in path.read_text()]
    assert files == [Path(progress.__file__)]
