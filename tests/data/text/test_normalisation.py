"""A text's words by every combination of the settings, equal to Moses' own."""

from itertools import product

from hypothesis import given, settings
from hypothesis import strategies as st
from sacremoses import MosesPunctNormalizer, MosesTokenizer

from lazyformer_fairseq.data.text.normalisation import TextNormaliser, TextSettings, symbol_pattern

PIECES = [*"aIs5éΣ.,'\"()<>:;%’“…- ", "  ", "\u00a0", *"<url> <URL> <mask> <unk> <s> Mr. U.S. don't the".split()]
PUNCTUATION = {language: MosesPunctNormalizer(language) for language in ("en", "de", "fr")}
MOSES = {language: MosesTokenizer(language) for language in ("en", "de", "fr")}
COMBINATIONS = [
    TextSettings(lower_case=lower_case, normalise_punctuation=normalise, moses_tokenise=tokenise, language=language)
    for lower_case, normalise, tokenise, language in product([True, False], [True, False], [True, False], MOSES)
]


def plainly(text: str, settings: TextSettings) -> str:
    """What the settings say, step by step, by sacremoses alone."""
    parts = symbol_pattern(settings).split(text)
    for place, part in enumerate(parts):
        if place % 2:
            parts[place] = part.lower()
            continue
        if settings.normalise_punctuation:
            part = PUNCTUATION[settings.language].normalize(part)
        if settings.moses_tokenise:
            part = MOSES[settings.language].tokenize(part, escape=False, return_str=True)
        parts[place] = part.lower() if settings.lower_case else part
    return " ".join(" ".join(parts).split())


@settings(max_examples=120)
@given(st.lists(st.sampled_from(PIECES), max_size=20).map("".join), st.sampled_from(COMBINATIONS))
def test_equal_to_sacremoses(text, settings):
    assert TextNormaliser(settings)(text) == plainly(text, settings)


def test_words_of_a_sentence():
    words = TextNormaliser(TextSettings())("“Don't,” he said to Mr. Smith (at 5 p.m.) — see <URL>.")
    assert words == '" don \'t , " he said to mr. smith ( at 5 p.m. ) - see <url> .'
