"""TextNormaliser as a normaliser of the ``tokenizers`` library: it keeps track of where each character comes from."""

from collections.abc import Sequence

from tokenizers import Regex, normalizers

from lazyformer_fairseq.data.text.moses import (
    BREAK,
    CLOSE,
    NO_SIGN,
    OPEN,
    TAKEN,
    WHOLE,
    moses_rules,
)
from lazyformer_fairseq.data.text.normalisation import FIRST_SYMBOLS, MASK, UNKNOWN, TextSettings

CONTROLS = [symbol for symbol in FIRST_SYMBOLS if symbol != UNKNOWN]
# The one letter that str.lower treats by its neighbours; a bound, because time would grow with the square of a run.
FINAL_SIGMA = r"\p{Cased}\p{Case_Ignorable}{0,30}\KΣ(?!\p{Case_Ignorable}{0,30}\p{Cased})"


def normaliser(settings: TextSettings, of_the_model: Sequence[normalizers.Normalizer] = ()) -> normalizers.Sequence:
    """Text -> words divided by single spaces, symbols in lower case between them.

    ``<s>`` in a text is text, as for our own tokenizer, and comes out as ``< s >`` or with a :data:`BREAK` in it. Only
    a text that is ``<s>`` and nothing else stays: the library normalises the names of added tokens, too.

    Args:
        of_the_model: what the SentencePiece model itself normalises.
    """
    moses = settings.language, settings.normalise_punctuation, settings.moses_tokenise
    in_texts = (*settings.special_tokens, MASK, UNKNOWN)
    whole = dict(zip(CONTROLS, WHOLE, strict=True))
    steps: list[normalizers.Normalizer] = [
        _replace(TAKEN, NO_SIGN),
        # Bracket by bracket: what replaces one character has that one's offsets.
        _replace(f"<(?=(?:{'|'.join(_in_any_case(symbol[1:-1]) for symbol in in_texts)})>)", OPEN),
        _replace(rf"{OPEN}[a-zA-Z]+\K>", CLOSE),
        *(_replace(rf"\A{symbol}\z", sign) for symbol, sign in whole.items()),
        *(_replace(f"<(?={symbol[1:]})", f"<{BREAK}") for symbol in CONTROLS if not settings.moses_tokenise),
        *(_replace(*rule) for rule in moses_rules(*moses)),
    ]
    if settings.lower_case:
        steps += [_replace(FINAL_SIGMA, "ς"), normalizers.Lowercase()]
    else:
        letters = sorted(set("".join(in_texts)) - set("<>"))
        steps += (_replace(f"{letter.upper()}(?=[a-zA-Z]*{CLOSE})", letter) for letter in letters)
    names = {OPEN: "<", CLOSE: ">", **{sign: symbol for symbol, sign in whole.items()}}
    return normalizers.Sequence([*steps, *of_the_model, *(normalizers.Replace(*name) for name in names.items())])


def _replace(pattern: str, content: str) -> normalizers.Replace:
    return normalizers.Replace(Regex(pattern), content)


def _in_any_case(name: str) -> str:
    """Letter by letter, because the library's own way takes a long s for an s."""
    return "".join(f"[{letter}{letter.upper()}]" for letter in name)
