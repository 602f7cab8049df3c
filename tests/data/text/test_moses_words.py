"""The fast way to Moses' words is equal to sacremoses, to the character."""

import bz2
import pickle
import random
import tracemalloc
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sacremoses import MosesPunctNormalizer, MosesTokenizer

from lazyformer_fairseq.data.text.moses_words import moses_words
from lazyformer_fairseq.data.text.normalisation import KNOWN_LANGUAGES

WAYS = [(True, True), (True, False), (False, True), (False, False)]  # normalise punctuation, tokenise
WORDS = (
    "a b c d e f g i m n p s t u v x z A B C D I M S T U 5 42 1 x5 5x word Word s's the don ll re DOT MULTI DOTMULTI "
    "Mr St No Nr pp Art Prof Mme av ca bzw etc vol é ß ñ nº Ж слово Σ ΟΔΟΣ ½ ² ٣ 三 猫 à_b THISISPROTECTED000"
).split()
MARKS = [
    *".,'\"`()[]{}<>%:;!?-_/\\@#&*|~^$=+…‘’‚„“”«»–—´€£°º·،。\u0301",
    *'... .. \'\' `` ´´ @-@ .\' ." ," ". "...'.split(),
]
SPACES = [*[" "] * 12, "  ", "\u00a0", "\u00a0", "\u2009", "\t", "\n", "\r", "\x01", "\x1f", "\u200b", "\xad", "\u3000"]
texts = st.lists(
    st.sampled_from(WORDS) | st.sampled_from(MARKS) | st.sampled_from(SPACES[:13]) | st.sampled_from(MARKS + SPACES),
    max_size=16,
).map("".join)


@cache
def rules(language: str) -> tuple[MosesPunctNormalizer, MosesTokenizer]:
    return MosesPunctNormalizer(language), MosesTokenizer(language)


def by_sacremoses(text: str, language: str = "en", normalise: bool = True, tokenise: bool = True) -> str:
    if normalise:
        text = rules(language)[0].normalize(text)
    if tokenise:
        text = rules(language)[1].tokenize(text, escape=False, return_str=True)
    return " ".join(text.split())


# What a rule sees beyond a word or a space, found by reading the rules.
TELLING = [
    "5' '6 and 5'6'7, rock'n'roll, o'n'e ' ' x '' '5.",  # a match takes the letter or space of the next one with it
    ",5 and ,5 a,b,c,5,6, 5,",  # a comma where the text starts
    "He said ( this ) ; that : 5 % ) . ( a ) , (b)",  # spaces that go
    "nº\u00a0? ”nº\u00a0; x\u00a0ºC 5\u00a0cm\u00a0! « x »\u00a0:",  # two letters and a space that goes
    "x5.1. X x5.1. x 5.1. 5a5.². 3.11.7. 1\u00a0234abc. 1\u00a02\u00a03.",  # a letter and a stop inside a token
    "Mr. Smith No. 5 no. Five pp. 7 p.m. U.S. \"St. Paul\" Mc-St. 'Dr. Who' 5' 'Nr. 5. (Mr. X) St.",
    "I saw J. R. R. Tolkien vs. A. B. C. today. etc. and etc. And",
    'Und ,das", sagte er." Der 3. Mai, z.B. bzw. "so..." \u00abja\u00bb." ',
    "www.foo.com. U.S.-based.\" end.' end. ' ... .. .... a…b….c …",
    "he ‘n‘e’ „x‚ “‘a’”",
    "DOTMULTI .. DOTDOTMULTI",
    "THISISPROTECTED000 <b> </b> \x01 S\x01t. x",
    " leading and trailing. ",
    " ( ",
    "",
    " ",
]


@pytest.mark.parametrize("text", TELLING)
def test_telling_texts(text):
    for language in ("en", "de", "fr", "it", "cs"):
        for way in WAYS:
            assert moses_words(language, *way)(text) == by_sacremoses(text, language, *way)


@settings(max_examples=1200)
@given(texts)
def test_english_is_equal_to_sacremoses(text):
    assert moses_words("en", True, True)(text) == by_sacremoses(text)


@settings(max_examples=400)
@given(texts, st.sampled_from(["en", "de", "fr"]), st.sampled_from(WAYS))
def test_any_setting_is_equal_to_sacremoses(text, language, way):
    assert moses_words(language, *way)(text) == by_sacremoses(text, language, *way)


@pytest.mark.slow
@settings(max_examples=20_000)
@given(texts, st.sampled_from(["en", "de", "fr"]) | st.sampled_from(sorted(KNOWN_LANGUAGES)), st.sampled_from(WAYS))
def test_many_texts_of_any_language(text, language, way):
    assert moses_words(language, *way)(text) == by_sacremoses(text, language, *way)


@settings(max_examples=300)
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


def test_every_single_character_between_words():
    """Whatever sacremoses holds of a character, as a letter, a mark or a space."""
    words = moses_words("en", True, True)
    for character in map(chr, [*range(0x250), *range(0x250, 0x3000, 7)]):
        text = f"ab{character}cd. {character}5 'x{character} 5'{character}s"
        assert words(text) == by_sacremoses(text)


def test_a_pickle_shares_its_tables():
    words = moses_words("en", True, True)
    assert pickle.loads(pickle.dumps(words)) is words


def lines_of(folder: Path) -> Iterator[str]:
    for pattern in ("raw/**/*", "lm/**/*", "glue/**/*.tsv"):
        for file in sorted(filter(Path.is_file, folder.glob(pattern))):
            content = file.read_bytes()
            if file.suffix == ".bz2":
                content = bz2.decompress(content)
            yield from content.decode("utf-8", errors="replace").split("\n")


def differences(lines: list[str], language: str) -> list[str]:
    words = moses_words(language, True, True)
    return [line for line in lines if words(line) != by_sacremoses(line, language)]


def test_a_sample_of_real_lines(real_data):
    lines = random.Random(1).sample(list(lines_of(real_data)), 4000)
    fields = [field for line in lines for field in line.split("\t")]  # of GLUE's tables
    assert differences(fields[:3000], "en") == []
    assert differences(fields[3000:3500], "de") == []
    assert differences(fields[3500:4000], "fr") == []


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
