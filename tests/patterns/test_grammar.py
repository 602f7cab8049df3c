import pytest
from hypothesis import given
from hypothesis import strategies as st

from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.patterns.grammar import expand, plan
from lazyformer_fairseq.patterns.kinds import DISTRIBUTION


@pytest.mark.parametrize(
    ("pattern", "letters"),
    [
        ("M1x12", "sf" * 12),
        ("M2x6", "sflf" * 6),
        ("(sflf)x6", "sflf" * 6),
        ("M5M3M2M2", "sf" + "lf" * 4 + "sf" + "lf" * 2 + "sflf" + "sflf"),
        ("sf(lf)x4 sf(lf)x2 sflf sflf", "sflflflflfsflflfsflfsflf"),
        ("(sff)x5(f)x9", "sff" * 5 + "f" * 9),
        ("(s)x6 (sf)x6 (f)x6", "ssssss" + "sf" * 6 + "ffffff"),
        ("((sf)x2 fx3)x2", "sfsffffsfsffff"),
        ("s f\tl", "sfl"),
    ],
)
def test_expands(pattern, letters):
    assert expand(pattern) == letters


@pytest.mark.parametrize(
    ("pattern", "character", "why"),
    [
        ("sqf", 2, "unknown letter 'q'"),
        ("lf", 1, "no s below"),
        ("(lf s)x2", 2, "no s below"),
        ("(sf)x0", 6, "must be 1 or more"),
        ("M2x0", 4, "must be 1 or more"),
        ("s(f(f)", 2, "never closed"),
        ("sf)x2", 3, "no matching opening bracket"),
        ("s()f", 2, "brackets are empty"),
        ("(sf)x", 5, "number of repeats"),
        ("Mx6", 1, "number of layers"),
        ("(((s)x1999)x1999)x1999", 12, "more than"),
        ("(sf)x99999999999999999999", 6, "more than"),
        ("sf٣", 3, "unknown letter"),
    ],
)
def test_errors_name_the_character(pattern, character, why):
    with pytest.raises(UserError) as caught:
        expand(pattern)
    message = str(caught.value)
    assert f"character {character}:" in message and why in message
    # The caret of the last line stands under that character of the pattern above it.
    *_, shown, caret = message.splitlines()
    assert shown.strip() == pattern and caret.index("^") - shown.index(pattern[0]) == character - 1


def test_a_long_pattern_is_shown_around_the_character():
    for before, after in ((0, 400), (200, 200), (400, 0)):
        with pytest.raises(UserError) as refusal:
            expand("s" * before + "q" + "f" * after)
        first, shown, caret = str(refusal.value).split("\n")
        assert max(map(len, (shown, caret))) < 120 and len(first) < 340 and shown[caret.index("^")] == "q"
    for pattern, why in (
        ("(" * 500 + "s" + ")" * 500, "character 101: .*nested"),
        (f"s[window=1{'0' * 320}]", "not 10{19}[.]{3}\n"),
    ):
        with pytest.raises(UserError, match=why):
            expand(pattern)


def test_an_empty_pattern_is_an_error():
    for pattern in ("", "   "):
        with pytest.raises(UserError, match="empty"):
            expand(pattern)


@given(st.text(alphabet="slfM()x 0123q^", max_size=30))
def test_any_text_gives_letters_or_a_user_error(text):
    try:
        letters = expand(text)
    except UserError:
        return
    assert letters and set(letters) <= set("slf-")


@given(st.text(alphabet="slf", max_size=20).map(lambda rest: "s" + rest))
def test_a_plan_says_who_reads_whom(letters):
    planned = plan(letters)
    assert "".join(sublayer.text for sublayer in planned) == letters
    for index, sublayer in enumerate(planned):
        above = letters[index + 1 :].partition("s")[0]
        assert sublayer.consumers == (DISTRIBUTION,) * (above.count("l") if sublayer.text == "s" else 0)
