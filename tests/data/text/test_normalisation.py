"""A text's words by every combination of the settings: the fast way to them is sacremoses' own, to the character."""

import pickle
import random
import re
import tracemalloc
from functools import cache
from itertools import product

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from odd_texts import TELLING, lines_of, texts
from sacremoses import MosesPunctNormalizer, MosesTokenizer

from lazyformer_fairseq.data.text.moses import KNOWN_LANGUAGES, NO_SIGN, TAKEN, moses_words
from lazyformer_fairseq.data.text.normalisation import TextNormaliser, TextSettings, symbol_pattern

WAYS = list(product([True, False], repeat=2))  # normalise punctuation, tokenise
LANGUAGES = st.sampled_from(["en", "de", "fr"])
PIECES = [*"aIs5éΣ.,'\"()<>:;%’“…- ", "  ", "\u00a0", *"<url> <URL> <mask> <unk> <s> Mr. U.S. don't the".split()]
english = moses_words("en", True, True)


@cache
def rules(language: str) -> tuple[MosesPunctNormalizer, MosesTokenizer]:
    return MosesPunctNormalizer(language), MosesTokenizer(language)


def by_sacremoses(text: str, language: str = "en", normalise: bool = True, tokenise: bool = True) -> str:
    """Return sacremoses' words of a text without the eight characters of private use that our rules keep."""
    text = re.sub(TAKEN, NO_SIGN, text)
    if normalise:
        text = rules(language)[0].normalize(text)
    if tokenise:
        text = rules(language)[1].tokenize(text, escape=False, return_str=True)
    return " ".join(text.split())


@pytest.mark.parametrize("text", TELLING)
def test_telling_texts(text):
    for language in ("en", "de", "fr", "it", "cs"):
        for way in WAYS:
            assert moses_words(language, *way)(text) == by_sacremoses(text, language, *way)
    assert pickle.loads(pickle.dumps(english)) is english  # with its tables


@settings(max_examples=150)
@given(texts | st.text(max_size=60))
@example("\U0010ff00 and \U0010ff06.")
def test_english_is_equal_to_sacremoses(text):
    assert english(text) == by_sacremoses(text)


@settings(max_examples=120)
@given(texts, LANGUAGES | st.sampled_from(sorted(KNOWN_LANGUAGES)), st.sampled_from(WAYS))
def test_any_setting_is_equal_to_sacremoses(text, language, way):
    assert moses_words(language, *way)(text) == by_sacremoses(text, language, *way)


@pytest.mark.parametrize(
    "unit", ["ab.", "_", "a'", ". ", "Mr. ", "5 ' ", "a.", '"ab".', "a, ", "猫", "3\u00a0", "...", "(("]
)
def test_long_texts(unit):
    """Which take the slow way, or must not take long."""
    text = "Once " + unit * 2000 + " St. end."
    assert english(text) == by_sacremoses(text)


def plainly(text: str, settings: TextSettings) -> str:
    """What the settings say, step by step, by sacremoses alone."""
    parts = symbol_pattern(settings).split(text)
    for place, part in enumerate(parts):
        if not place % 2:
            part = by_sacremoses(part, settings.language, settings.normalise_punctuation, settings.moses_tokenise)
        parts[place] = part.lower() if settings.lower_case or place % 2 else part
    return " ".join(" ".join(parts).split())


@settings(max_examples=120)
@given(st.lists(st.sampled_from(PIECES), max_size=20).map("".join), st.booleans(), LANGUAGES, st.sampled_from(WAYS))
@example("“Don't,” he said to Mr. Smith (at 5 p.m.) — see <URL>.", True, "en", (True, True))
@example(" It’s  a <MASK>. ", False, "en", (False, False))
def test_a_normaliser_does_what_its_settings_say(text, lower_case, language, way):
    of_text = TextSettings(lower_case, *way, language=language)
    assert TextNormaliser(of_text)(text) == plainly(text, of_text)


@pytest.mark.slow
def test_every_real_line(real_data):
    lines = [field for line in lines_of(real_data) for field in (line.split("\t") if "\t" in line else [line])]
    assert len(lines) > 300_000
    some = random.Random(1).sample(lines, 30_000)
    for language, of_language in {"en": lines, "de": some, "fr": some}.items():
        words = moses_words(language, True, True)
        assert [line for line in of_language if words(line) != by_sacremoses(line, language)] == []


@pytest.mark.slow
def test_memory_is_bounded():
    """Endless new gaps of the greatest length that is kept."""
    words = moses_words("en", False, False)
    marks = [chr(code) for code in range(0x1F300, 0x1F600) if chr(code).isprintable()]
    rng = random.Random(1)
    tracemalloc.start()
    for _ in range(100_000):
        words(f"word{''.join(rng.choices(marks, k=36))}word")
    kept, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert kept < 60e6
