"""From pieces back to readable text: Moses' way back (MosesDetokenizer), as replacements in the text of all pieces.

A word that Moses joins to the one before gets a mark in front, one that it joins to the next a mark behind; then the
marks and their spaces go. The first rule that fits a word decides, as in sacremoses; a word with a mark fits none.
"""

from sacremoses import MosesDetokenizer
from sacremoses.util import CJKChars
from tokenizers import Regex, decoders

from lazyformer_fairseq.data.text.moses import Rule, character_class
from lazyformer_fairseq.data.text.normalisation import MASK, UNKNOWN, TextSettings
from lazyformer_fairseq.data.text.tokenizer import SPACE

TO_THE_LEFT, TO_THE_RIGHT, CLOSES = "\U0010ff00", "\U0010ff01", "\U0010ff02"
START, END = "(?<![^ ])", "(?![^ ])"  # of a word


def decoder(settings: TextSettings) -> decoders.Decoder:
    """Words divided by spaces, without spaces that Moses put there."""
    steps = [
        *(_replace(Rule(rf"\A{symbol}\z", f" {symbol} ")) for symbol in (*settings.special_tokens, MASK, UNKNOWN)),
        decoders.Replace(SPACE, " "),
        decoders.ByteFallback(),
        decoders.Fuse(),
        *map(_replace, [Rule(" +", " "), Rule(r"\A | \z", "")]),
    ]
    if settings.moses_tokenise:
        steps += map(_replace, _joining_rules(settings.language))
    return decoders.Sequence(steps)


def _replace(rule: Rule) -> decoders.Replace:
    return decoders.Replace(Regex(rule.pattern), rule.content)


def _joining_rules(language: str) -> list[Rule]:
    letters = character_class(MosesDetokenizer.IsAlpha)
    opening = rf"[{character_class(MosesDetokenizer.IsSc)}(\[{{¿¡]+"
    cjk = "".join(f"{chr(first)}-{chr(last)}" for first, last in CJKChars.ranges)
    rules = [
        *([] if language == "ko" else [Rule(f"(?<=[{cjk}]) (?=[{cjk}])", "")]),
        Rule(rf"{START}{opening}\K{END}", TO_THE_RIGHT),
        Rule(rf"{START}(?=[,.?!:;\\%}}\])]+{END})", TO_THE_LEFT),
    ]
    if language == "en":
        rules.append(Rule(rf"(?<= )(?='[{letters}])", TO_THE_LEFT))
    if language in ("fr", "it", "ga"):
        rules.append(Rule(rf"[{letters}]'\K(?= [{letters}])", TO_THE_RIGHT))
    return [*rules, *_quote_rules('"'), *_quote_rules("'", "(?<!s )" if language == "en" else ""), *_joined()]


def _quote_rules(quote: str, opens: str = "") -> list[Rule]:
    """The first of two opens, the second closes. ``opens``: a condition for the first; else the word before owns it."""
    word = f"{START}{quote}{END}"
    return [
        Rule(rf"{opens}{word}(?:(?!{word}).)*{word}\K", CLOSES),
        Rule(rf"{START}(?={quote}{CLOSES})", TO_THE_LEFT),
        Rule(CLOSES, ""),
        Rule(rf"{opens}{START}{quote}\K{END}", TO_THE_RIGHT),
        Rule(rf"{START}(?={quote}{END})", TO_THE_LEFT),
    ]


def _joined() -> list[Rule]:
    return [Rule(f" ?{TO_THE_LEFT}", ""), Rule(f"{TO_THE_RIGHT} ?", "")]
