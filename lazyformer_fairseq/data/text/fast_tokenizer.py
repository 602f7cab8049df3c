"""Conversion of this package's SentencePiece tokenizers to the ``tokenizers`` library.

The library provides character offsets of tokens, and exported models load their tokenizer with it. The pieces are
converted to a BPE or Unigram model that uses the ids in dict.txt. TextNormaliser is converted to a normalizer that
tracks the offsets of characters.

MosesDetokenizer is converted to a list of replacements in the decoded text. First, each word that Moses joins to the
previous word gets a mark at its start, and each word that it joins to the next word gets a mark at its end; then the
marks and the spaces next to them are deleted. As in sacremoses, only the first rule that matches a word applies,
because no rule matches a word with a mark.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import tokenizers
from sacremoses import MosesDetokenizer
from sacremoses.util import CJKChars
from sentencepiece import sentencepiece_model_pb2
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors

from lazyformer_fairseq.data.text import moses
from lazyformer_fairseq.data.text.normalisation import BOS, EOS, FIRST_SYMBOLS, MASK, SPACE, UNK, UNKNOWN, TextSettings
from lazyformer_fairseq.errors import UserError


def as_fast_tokenizer(model_file: Path, symbols: Sequence[str], settings: TextSettings) -> tokenizers.Tokenizer:
    """Convert a SentencePiece tokenizer to the ``tokenizers`` library.

    Args:
        model_file: the SentencePiece model.
        symbols: all symbols of the dictionary in id order.
        settings: the text normalization settings.

    Raises:
        UserError: the model, which may be user-provided, has pieces that the library does not support.
    """
    proto = read_model(model_file)
    fast = tokenizers.Tokenizer(model(proto, symbols))
    fast.normalizer = normaliser(settings, normalisers(proto))
    fast.pre_tokenizer = pre_tokenizers.Sequence(  # splits into words and prepends the space symbol to each
        [
            pre_tokenizers.Split(" ", "removed"),
            pre_tokenizers.Metaspace(SPACE, prepend_scheme="always", split=False),
            pre_tokenizers.Split(moses.BREAK, "removed"),
        ]
    )
    start = FIRST_SYMBOLS[BOS]
    end = FIRST_SYMBOLS[EOS]
    fast.post_processor = processors.TemplateProcessing(
        single=f"{start} $A {end}",
        pair=f"{start} $A {end} {end} $B {end}",
        special_tokens=[(start, BOS), (end, EOS)],
    )
    fast.decoder = decoder(settings)
    # Added tokens are matched after normalization, so that <MASK> in upper case is also found.
    added = [AddedToken(symbol, normalized=True, special=True) for symbol in (*FIRST_SYMBOLS, MASK)]
    fast.add_special_tokens(added)
    fast.add_tokens([AddedToken(symbol, normalized=True) for symbol in settings.special_tokens])
    return fast


MESSAGES: Any = sentencepiece_model_pb2  # its classes are created at runtime and unknown to mypy
Proto = MESSAGES.ModelProto
TrainerSpec = MESSAGES.TrainerSpec
Piece = Proto.SentencePiece
NOT_THERE = "Hugging Face's tokenizers do not support this"
WITHOUT_TEXT = (Piece.UNKNOWN, Piece.CONTROL)


def read_model(path: Path) -> Any:
    """Parse a file known to be a SentencePiece model.

    Raises:
        UserError: the model's type or pieces are supported only by SentencePiece.
    """
    proto = Proto()
    proto.ParseFromString(path.read_bytes())
    model_type = TrainerSpec.ModelType.Name(proto.trainer_spec.model_type)
    if model_type not in ("BPE", "UNIGRAM"):
        raise UserError(f"{path}: SentencePiece model of type {model_type}; {NOT_THERE}, only BPE and UNIGRAM")
    if proto.trainer_spec.treat_whitespace_as_suffix:
        raise UserError(f"{path}: the pieces end with a space (treat_whitespace_as_suffix); {NOT_THERE}")
    texts = {piece.piece for piece in proto.pieces}
    for piece in proto.pieces:
        if piece.type in (Piece.USER_DEFINED, Piece.UNUSED):
            raise UserError(f"{path}: piece {piece.piece!r} is of type {Piece.Type.Name(piece.type)}; {NOT_THERE}")
        if model_type == "BPE" and piece.type == Piece.NORMAL and not texts.issuperset(piece.piece):
            raise UserError(f"{path}: piece {piece.piece!r} has a character that is not itself a piece; {NOT_THERE}")
    return proto


def model(proto: Any, symbols: Sequence[str]) -> models.Model:
    """Build the library's model that splits words into the same pieces as the SentencePiece model.

    Words must start with SentencePiece's space symbol.

    Args:
        proto: the SentencePiece model.
        symbols: all symbols of the dictionary in id order.
    """
    byte_fallback = proto.trainer_spec.byte_fallback
    if proto.trainer_spec.model_type == TrainerSpec.UNIGRAM:
        scores = {piece.piece: piece.score for piece in proto.pieces if piece.type not in WITHOUT_TEXT}
        rarest = min(scores.values())  # also used for symbols that are not pieces
        scores_of_symbols = [(symbol, scores.get(symbol, rarest)) for symbol in symbols]
        return models.Unigram(scores_of_symbols, UNK, byte_fallback)
    ids = {symbol: index for index, symbol in enumerate(symbols)}
    return models.BPE(ids, _merges(proto), unk_token=UNKNOWN, fuse_unk=True, byte_fallback=byte_fallback)


def normalisers(proto: Any) -> list[normalizers.Normalizer]:
    """Return the normalizers that SentencePiece applies to words before splitting them into pieces."""
    charsmap = proto.normalizer_spec.precompiled_charsmap
    if charsmap:
        of_the_model = [normalizers.Precompiled(charsmap)]
    else:
        of_the_model = []
    # SentencePiece removes its space symbol at the end of the text and prepends one to every word; the library does not
    # prepend another to a word that already starts with one.
    at_the_end = normalizers.Replace(Regex(f"[ {SPACE}]+(?![^{moses.SIGNS}])"), "")
    before_one = normalizers.Replace(Regex(f"(?<![^ {moses.SIGNS}]){SPACE}"), 2 * SPACE)
    return [*of_the_model, at_the_end, before_one]


def _merges(proto: Any) -> list[tuple[str, str]]:
    """Return BPE's merges as pairs of pieces in descending order of score (Sennrich et al., 2016)."""
    texts = {piece.piece: piece.score for piece in proto.pieces if piece.type == Piece.NORMAL}
    merges = []
    for text in sorted(texts, key=lambda text: -texts[text]):  # stable: ties keep their order
        pairs = [(text[:place], text[place:]) for place in range(1, len(text))]
        merges += [(left, right) for left, right in pairs if left in texts and right in texts]
    return merges


CONTROLS = [symbol for symbol in FIRST_SYMBOLS if symbol != UNKNOWN]
# Sigma is the only letter for which str.lower depends on the neighboring characters. The repetition is bounded because
# the time would otherwise grow quadratically with the length of a run of such characters.
FINAL_SIGMA = r"\p{Cased}\p{Case_Ignorable}{0,30}\KΣ(?!\p{Case_Ignorable}{0,30}\p{Cased})"


def normaliser(settings: TextSettings, of_the_model: Sequence[normalizers.Normalizer] = ()) -> normalizers.Sequence:
    """Build the normalizer that turns text into words and lowercase symbols, separated by single spaces.

    As in :class:`~.tokenizer.Tokenizer`, ``<s>`` in a text is ordinary text; it becomes ``< s >`` or gets a
    :data:`BREAK` inside. Only a text that equals ``<s>`` is left unchanged, because the library also normalizes the
    names of added tokens.

    Args:
        settings: the text normalization settings.
        of_the_model: normalizers of the SentencePiece model.
    """
    in_texts = (*settings.special_tokens, MASK, UNKNOWN)
    names_in_texts = "|".join(_in_any_case(symbol[1:-1]) for symbol in in_texts)
    whole = dict(zip(CONTROLS, moses.WHOLE, strict=True))
    rules = moses.moses_rules(settings.language, settings.normalise_punctuation, settings.moses_tokenise)
    steps: list[normalizers.Normalizer] = [
        _replace(moses.TAKEN, moses.NO_SIGN),
        # Each bracket is replaced separately, because replacing a single character preserves the offsets.
        _replace(f"<(?=(?:{names_in_texts})>)", moses.OPEN),
        _replace(rf"{moses.OPEN}[a-zA-Z]+\K>", moses.CLOSE),
        *(_replace(rf"\A{symbol}\z", sign) for symbol, sign in whole.items()),
    ]
    if not settings.moses_tokenise:
        steps += [_replace(f"<(?={symbol[1:]})", f"<{moses.BREAK}") for symbol in CONTROLS]
    steps += [_replace(rule.pattern, rule.content) for rule in rules]
    if settings.lower_case:
        steps += [_replace(FINAL_SIGMA, "ς"), normalizers.Lowercase()]
    else:
        letters = sorted(set("".join(in_texts)) - set("<>"))
        steps += (_replace(f"{letter.upper()}(?=[a-zA-Z]*{moses.CLOSE})", letter) for letter in letters)
    steps += of_the_model

    names = {moses.OPEN: "<", moses.CLOSE: ">"}
    names |= {sign: symbol for symbol, sign in whole.items()}
    steps += [normalizers.Replace(sign, name) for sign, name in names.items()]
    return normalizers.Sequence(steps)


def _replace(pattern: str, content: str) -> normalizers.Replace:
    return normalizers.Replace(Regex(pattern), content)


def _in_any_case(name: str) -> str:
    """Return a pattern that matches the name in upper, lower or mixed case.

    It has a character class per letter, because the library's case-insensitive matching treats a long s as an s.
    """
    return "".join(f"[{letter}{letter.upper()}]" for letter in name)


TO_THE_LEFT = "\U0010ff00"
TO_THE_RIGHT = "\U0010ff01"
CLOSES = "\U0010ff02"
WORD_START, WORD_END = "(?<![^ ])", "(?![^ ])"


def decoder(settings: TextSettings) -> decoders.Decoder:
    """Build the decoder that joins pieces into text and removes the spaces inserted by Moses."""
    steps = [
        *(
            _decoded(moses.Rule(rf"\A{symbol}\z", f" {symbol} "))
            for symbol in (*settings.special_tokens, MASK, UNKNOWN)
        ),
        decoders.Replace(SPACE, " "),
        decoders.ByteFallback(),
        decoders.Fuse(),
        _decoded(moses.Rule(" +", " ")),
        _decoded(moses.Rule(r"\A | \z", "")),
    ]
    if settings.moses_tokenise:
        steps += map(_decoded, _joining_rules(settings.language))
    return decoders.Sequence(steps)


def _decoded(rule: moses.Rule) -> decoders.Replace:
    return decoders.Replace(Regex(rule.pattern), rule.content)


def _joining_rules(language: str) -> list[moses.Rule]:
    letters = moses.character_class(MosesDetokenizer.IsAlpha)
    opening = rf"[{moses.character_class(MosesDetokenizer.IsSc)}(\[{{¿¡]+"
    cjk = "".join(f"{chr(first)}-{chr(last)}" for first, last in CJKChars.ranges)
    rules = []
    if language != "ko":
        rules.append(moses.Rule(f"(?<=[{cjk}]) (?=[{cjk}])", ""))
    rules += [
        moses.Rule(rf"{WORD_START}{opening}\K{WORD_END}", TO_THE_RIGHT),
        moses.Rule(rf"{WORD_START}(?=[,.?!:;\\%}}\])]+{WORD_END})", TO_THE_LEFT),
    ]
    if language == "en":
        rules.append(moses.Rule(rf"(?<= )(?='[{letters}])", TO_THE_LEFT))
    if language in ("fr", "it", "ga"):
        rules.append(moses.Rule(rf"[{letters}]'\K(?= [{letters}])", TO_THE_RIGHT))
    opens = ""
    if language == "en":
        opens = "(?<!s )"
    joined = [moses.Rule(f" ?{TO_THE_LEFT}", ""), moses.Rule(f"{TO_THE_RIGHT} ?", "")]
    return [*rules, *_quote_rules('"'), *_quote_rules("'", opens), *joined]


def _quote_rules(quote: str, opens: str = "") -> list[moses.Rule]:
    """Return the rules for pairs of quotation marks, where the first one opens and the second one closes.

    Args:
        quote: the quotation mark.
        opens: pattern that must match before an opening mark; otherwise the mark belongs to the previous word.
    """
    word = f"{WORD_START}{quote}{WORD_END}"
    return [
        moses.Rule(rf"{opens}{word}(?:(?!{word}).)*{word}\K", CLOSES),
        moses.Rule(rf"{WORD_START}(?={quote}{CLOSES})", TO_THE_LEFT),
        moses.Rule(CLOSES, ""),
        moses.Rule(rf"{opens}{WORD_START}{quote}\K{WORD_END}", TO_THE_RIGHT),
        moses.Rule(rf"{WORD_START}(?={quote}{WORD_END})", TO_THE_LEFT),
    ]
