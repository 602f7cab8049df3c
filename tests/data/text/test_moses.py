"""The fast way to Moses' words is equal to sacremoses, to the character."""

import pickle
import random
import tracemalloc
from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from odd_texts import TELLING, lines_of, texts
from sacremoses import MosesPunctNormalizer, MosesTokenizer

from lazyformer_fairseq.data.text.moses import KNOWN_LANGUAGES, moses_words

WAYS = [(True, True), (True, False), (False, True), (False, False)]  # normalise punctuation, tokenise


@cache
def rules(language: str) -> tuple[MosesPunctNormalizer, MosesTokenizer]:
    return MosesPunctNormalizer(language), MosesTokenizer(language)


def by_sacremoses(text: str, language: str = "en", normalise: bool = True, tokenise: bool = True) -> str:
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


@settings(max_examples=300)
@given(texts)
def test_english_is_equal_to_sacremoses(text):
    assert moses_words("en", True, True)(text) == by_sacremoses(text)


@settings(max_examples=120)
@given(texts, st.sampled_from(["en", "de", "fr"]), st.sampled_from(WAYS))
def test_any_setting_is_equal_to_sacremoses(text, language, way):
    assert moses_words(language, *way)(text) == by_sacremoses(text, language, *way)


@pytest.mark.slow
@settings(max_examples=20_000)
@given(texts, st.sampled_from(["en", "de", "fr"]) | st.sampled_from(sorted(KNOWN_LANGUAGES)), st.sampled_from(WAYS))
def test_many_texts_of_any_language(text, language, way):
    assert moses_words(language, *way)(text) == by_sacremoses(text, language, *way)


@settings(max_examples=100)
@given(st.text(max_size=60))
def test_any_characters(text):
    assert moses_words("en", True, True)(text) == by_sacremoses(text)


@pytest.mark.parametrize(
    "unit", ["ab.", "_", "a'", ". ", "Mr. ", "5 ' ", "a.", '"ab".', "a, ", "猫", "3\u00a0", "...", "(("]
)
def test_long_texts(unit):
    """Which take the slow way, or must not take long."""
    text = "Once " + unit * 2000 + " St. end."
    assert moses_words("en", True, True)(text) == by_sacremoses(text)


@pytest.mark.slow
def test_every_single_character_between_words():
    """Whatever sacremoses holds of a character, as a letter, a mark or a space."""
    words = moses_words("en", True, True)
    for character in map(chr, [*range(0x250), *range(0x250, 0x3000, 7)]):
        text = f"ab{character}cd. {character}5 'x{character} 5'{character}s"
        assert words(text) == by_sacremoses(text)


def test_a_pickle_shares_its_tables():
    words = moses_words("en", True, True)
    assert pickle.loads(pickle.dumps(words)) is words


def differences(lines: list[str], language: str) -> list[str]:
    words = moses_words(language, True, True)
    return [line for line in lines if words(line) != by_sacremoses(line, language)]


@pytest.mark.slow
def test_every_real_line(real_data):
    lines = [field for line in lines_of(real_data) for field in (line.split("\t") if "\t" in line else [line])]
    assert len(lines) > 300_000
    assert differences(lines, "en") == []
    assert differences(random.Random(1).sample(lines, 30_000), "de") == []
    assert differences(random.Random(2).sample(lines, 30_000), "fr") == []


@pytest.mark.slow
def test_memory_is_bounded():
    """Endless new gaps of the longest kind that is kept."""
    words = moses_words("en", False, False)
    marks = [chr(code) for code in range(0x1F300, 0x1F600) if chr(code).isprintable()]
    rng = random.Random(1)
    tracemalloc.start()
    for _ in range(100_000):
        words(f"word{''.join(rng.choices(marks, k=36))}word")
    kept, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert kept < 60e6
