"""The accepted JSON of the library `tokenizers`, field by field, and the words that it makes of a text.

Only tokenizers whose words stand alone: WordPiece over BERT's words, byte-level BPE over GPT-2's; the rest is refused
in words. Nothing of a file reaches the library before its type is known here, so no regular expression, file name or
code of a stranger does.

Such a tokenizer cuts a text into words ("pre-tokens") before it cuts the words into pieces, each by itself. BERT's are
words and marks. RoBERTa's are bytes written as letters, ``Ġ`` for the space before a word, so whether a space stands
there is part of the word, and the word alone decides its pieces.
"""

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import lru_cache
from typing import Annotated, Any, ClassVar, Literal, Optional, Union

from annotated_types import Ge, Le, Lt
from tokenizers import Tokenizer

from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.storage.checked import as_type

Id = Annotated[int, Ge(0), Lt(1 << 24)]  # more is damage: of the largest vocabularies there are, it is sixty times


class Strict:
    """Base of dataclasses whose objects of JSON have no other fields."""

    __pydantic_config__: ClassVar = {"extra": "forbid"}


@dataclass(frozen=True)
class WordPiece(Strict):
    """The model of a BERT's tokenizer."""

    type: str
    vocab: dict[str, Id]
    unk_token: Optional[str] = None
    continuing_subword_prefix: Literal["##"] = "##"
    max_input_chars_per_word: Annotated[int, Ge(1)] = 100


@dataclass(frozen=True)
class ByteLevelBPE(Strict):
    """The model of a RoBERTa's tokenizer; `dropout` would cut words at random."""

    type: str
    vocab: dict[str, Id]
    merges: list[Union[str, tuple[str, str]]]
    unk_token: Optional[str] = None
    continuing_subword_prefix: Literal["", None] = None
    end_of_word_suffix: Literal["", None] = None
    fuse_unk: bool = False
    byte_fallback: bool = False
    ignore_merges: bool = False
    dropout: Optional[Annotated[float, Ge(0), Le(0)]] = None


@dataclass(frozen=True)
class BertNormalizer(Strict):
    """BERT's own normalisation."""

    type: str
    clean_text: bool = True
    handle_chinese_chars: bool = True
    lowercase: bool = True
    strip_accents: Optional[bool] = None


@dataclass(frozen=True)
class ByteLevel(Strict):
    """GPT-2's division into words."""

    type: str
    add_prefix_space: bool = True
    trim_offsets: bool = True
    use_regex: Literal[True] = True


@dataclass(frozen=True)
class Plain(Strict):
    """A part without options."""

    type: str


@dataclass(frozen=True)
class AddedToken(Strict):
    """A symbol that a text may hold whole."""

    id: Id
    content: str
    single_word: bool = False
    lstrip: bool = False
    rstrip: bool = False
    normalized: Optional[bool] = None
    special: bool = False

    def as_json(self) -> dict[str, Any]:
        """Return the token with all its fields."""
        normalized = self.normalized
        if normalized is None:
            normalized = not self.special
        return {**asdict(self), "normalized": normalized}


MODELS = {"WordPiece": WordPiece, "BPE": ByteLevelBPE}
PLAIN_NORMALISERS = ("NFC", "NFD", "NFKC", "NFKD", "Lowercase", "StripAccents")
NORMALISERS = {"BertNormalizer": BertNormalizer, **dict.fromkeys(PLAIN_NORMALISERS, Plain)}
DIVISION_OF_MODEL = {"WordPiece": "BertPreTokenizer", "BPE": "ByteLevel"}
DIVISIONS = {"BertPreTokenizer": Plain, "ByteLevel": ByteLevel}
DECODERS = {
    "WordPiece": {"type": "WordPiece", "prefix": "##", "cleanup": True},
    "BPE": {
        "type": "ByteLevel",
        "add_prefix_space": True,
        "trim_offsets": True,
        "use_regex": True,
    },
}
POST_PROCESSORS = (
    "BertProcessing",
    "RobertaProcessing",
    "TemplateProcessing",
    "ByteLevel",
)
MOST_SHOWN = 8  # parts of a template in a message
AROUND = "this program knows [CLS] a [SEP] b [SEP] and <s> a </s></s> b </s>"
ACCEPTED = "this program takes WordPiece (BERT) and byte-level BPE (RoBERTa)"


def check_recipe(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the parts of a ``tokenizer.json`` of the library's that decide a text's ids, and nothing else of it.

    Raises:
        UserError: of another type, damaged, or with a part that this program does not know.
    """
    model = values.get("model")
    if not isinstance(model, dict):
        raise UserError(f"holds no model of a tokenizer; {ACCEPTED}")
    if model.get("type") == "Unigram":
        raise UserError(f"its model is Unigram (SentencePiece, as of ALBERT, DeBERTa and XLM-R); {ACCEPTED}")
    model_type = "WordPiece"
    if "merges" in model:
        model_type = "BPE"
    model = _checked({"type": model_type, **model}, "model", MODELS)  # files of old have no type
    model_type = model["type"]
    normaliser = values.get("normalizer")
    if normaliser is not None:
        normaliser = _checked(normaliser, "normalizer", NORMALISERS)
    division = _checked(values.get("pre_tokenizer"), "pre_tokenizer", DIVISIONS)
    if division["type"] != DIVISION_OF_MODEL[model_type]:
        raise UserError(f"its pre_tokenizer {division['type']} does not go with a {model_type} model here; {ACCEPTED}")
    added = as_type(list[AddedToken], values.get("added_tokens", []), "its added_tokens", ACCEPTED)
    recipe = {
        "version": "1.0",
        "added_tokens": [token.as_json() for token in added],
        "normalizer": normaliser,
        "pre_tokenizer": division,
        "decoder": DECODERS[model_type],
        "model": model,
    }
    for symbol in ids_of(recipe):
        if "\n" in symbol or "\r" in symbol:
            raise UserError(f"the symbol {symbol[:40]!r} holds a line break, which dict.txt cannot")
    return recipe


def _checked(values: Any, what: str, known: Mapping[str, type]) -> dict[str, Any]:
    """Return an object of a known type with known fields alone, its type first."""
    type_name = None
    if isinstance(values, dict):
        type_name = values.get("type")
    if not isinstance(type_name, str) or type_name not in known:
        raise UserError(f"its {what} is {str(type_name)[:40]}, known are {', '.join(known)}; {ACCEPTED}")
    as_type(known[type_name], values, f"its {what}", ACCEPTED)
    return {"type": type_name, **values}


@dataclass(frozen=True)
class Part:
    """A text or a special symbol of a template, and the token type that it gets."""

    id: str
    type_id: int


@dataclass(frozen=True)
class SpecialToken:
    """The ids that stand for a symbol of a template."""

    ids: list[int]


@dataclass(frozen=True)
class Template:
    """A post-processor that puts symbols around a text and around a pair."""

    single: list[dict[Literal["Sequence", "SpecialToken"], Part]]
    pair: list[dict[Literal["Sequence", "SpecialToken"], Part]]
    special_tokens: dict[str, SpecialToken]


@dataclass(frozen=True)
class Joining:
    """The way a model's tokenizer joins a pair of texts.

    Attributes:
        separators: how many ``</s>`` stand between the texts.
        second_type: token type of the second text.
    """

    separators: Literal[1, 2]
    second_type: Literal[0, 1]


BERT = Joining(separators=1, second_type=1)
ROBERTA = Joining(separators=2, second_type=0)


def joining_of(values: Any, bos: str, eos: str, ids: Mapping[str, int]) -> Joining:
    """Return how the post-processor of a ``tokenizer.json`` joins a pair, without running it.

    Args:
        values: the post-processor.
        bos: the symbol that begins a text.
        eos: the symbol that ends a text.
        ids: the id of each symbol.

    Raises:
        UserError: it is of another type than those that BERT and RoBERTa have, or puts something else around texts.
    """
    processors = [values]
    if isinstance(values, dict) and values.get("type") == "Sequence" and isinstance(values.get("processors"), list):
        processors = values["processors"]
    for each in processors:
        type_name = None
        if isinstance(each, dict):
            type_name = each.get("type")
        if type_name == "ByteLevel":  # which decides offsets alone
            continue
        if type_name in ("BertProcessing", "RobertaProcessing"):
            if each.get("cls") != [bos, ids[bos]] or each.get("sep") != [eos, ids[eos]]:
                raise UserError(f"puts {each.get('cls')} and {each.get('sep')} around a text; {AROUND}")
            if type_name == "BertProcessing":
                return BERT
            return ROBERTA
        if type_name != "TemplateProcessing":
            raise UserError(
                f"its post_processor is {str(type_name)[:40]}, known are {', '.join(POST_PROCESSORS)}; {ACCEPTED}"
            )
        return _joining_of_template(as_type(Template, each, "its post_processor", ACCEPTED), bos, eos, ids)
    raise UserError(f"its post_processor puts nothing around a text; {AROUND}")


def _joining_of_template(template: Template, bos: str, eos: str, ids: Mapping[str, int]) -> Joining:
    for symbol in (bos, eos):
        if template.special_tokens.get(symbol) != SpecialToken([ids[symbol]]):
            raise UserError(f"its post_processor gives {symbol!r} another id than {ids[symbol]}")
    single = [part.id for parts in template.single for part in parts.values()]
    parts_of_pair = [part for parts in template.pair for part in parts.values()]
    pair = [part.id for part in parts_of_pair]
    separators: Literal[1, 2] = 1
    if len(pair) > 5:
        separators = 2
    if single != [bos, "A", eos] or pair != [bos, "A", *[eos] * separators, "B", eos]:
        raise UserError(f"puts {single[:MOST_SHOWN]} around a text and {pair[:MOST_SHOWN]} around a pair; {AROUND}")
    if parts_of_pair[-2].type_id > 0:
        return Joining(separators, second_type=1)
    return Joining(separators, second_type=0)


def ids_of(recipe: Mapping[str, Any]) -> dict[str, int]:
    """Return the id of every symbol, added ones too.

    Raises:
        UserError: two symbols share an id, or a symbol has two.
    """
    ids = dict(recipe["model"]["vocab"])
    for token in recipe["added_tokens"]:
        if ids.setdefault(token["content"], token["id"]) != token["id"]:
            raise UserError(f"the added token {token['content']!r} has ids {ids[token['content']]} and {token['id']}")
    if len(set(ids.values())) < len(ids):
        raise UserError("two of its symbols share an id")
    return ids


def build_library(recipe: Mapping[str, Any], silent: tuple[str, ...] = ()) -> Tokenizer:
    """Return the library's tokenizer, without what it would put around a text.

    Args:
        recipe: as :func:`check_recipe` returns it.
        silent: symbols that are text where a text holds them.

    Raises:
        UserError: the library refuses it.
    """
    # The library numbers an added token that is not in the vocabulary by itself; so each special one gets its place. In
    # BPE all do, which makes no piece that its merges do not make.
    is_bpe = recipe["model"]["type"] == "BPE"
    tokens = recipe["added_tokens"]
    placed = {token["content"]: token["id"] for token in tokens if is_bpe or token["special"]}
    model = {**recipe["model"], "vocab": {**placed, **recipe["model"]["vocab"]}}
    every = sorted(recipe["added_tokens"], key=lambda token: token["id"])
    added = [token for token in every if token["content"] not in silent]
    trimming = None  # takes the space before a byte-level word out of its offsets
    if is_bpe:
        trimming = {**recipe["pre_tokenizer"], "trim_offsets": True}
    library = library_from({**recipe, "model": model, "added_tokens": added, "post_processor": trimming})
    for symbol, wanted in ids_of(recipe).items():
        if library.token_to_id(symbol) != wanted:
            raise UserError(f"its added tokens do not follow its vocabulary in order: {symbol!r} is to be id {wanted}")
    return library


def library_from(values: Mapping[str, Any]) -> Tokenizer:
    """UserError where the library does not take the JSON."""
    with refusals_of_the_library():
        return Tokenizer.from_str(json.dumps(values))


@contextmanager
def refusals_of_the_library() -> Iterator[None]:
    """Turn the library's errors, and panics of Rust's, into UserErrors."""
    try:
        yield
    except (KeyboardInterrupt, SystemExit, MemoryError, UserError):
        raise
    except BaseException as error:  # a panic of Rust's is no Exception
        raise UserError(f"the library refuses it: {error}") from None


UNKNOWN_OF_CORPUS = "<unk>"  # by which WikiText has replaced its rare words


@dataclass(frozen=True)
class LibrarySettings:
    """All that decides a text's words.

    Attributes:
        normaliser, division: as the library's JSON has its `normalizer` and `pre_tokenizer`.
        unknown: the symbol of unknown words.
    """

    normaliser: str
    division: str
    unknown: str

    special_tokens: tuple[str, ...] = ()
    """None: such a tokenizer spells ``<url>`` as it spells any text."""


class LibraryNormaliser:
    """Applies the settings to one text (best a sentence) at a time. No symbol of the model comes out of a text."""

    def __init__(self, settings: LibrarySettings):
        self.settings = settings
        self._normaliser, self._division = _components(settings.normaliser, settings.division)

    def __reduce__(self) -> tuple:
        return LibraryNormaliser, (self.settings,)

    def __call__(self, text: str, keep_unknown: bool = False) -> str:
        """Return the words of ``text``, divided by single spaces.

        Args:
            text: raw text.
            keep_unknown: ``<unk>`` in a text is an unknown word.
        """
        if not keep_unknown:
            return self._words(text)
        unknown = self.settings.unknown
        plain = text.split(UNKNOWN_OF_CORPUS)
        parts = [part for each in plain for part in (self._words(each), unknown)]
        return " ".join(filter(None, parts[:-1]))

    def _words(self, text: str) -> str:
        if self._normaliser is not None:
            text = self._normaliser.normalize_str(text)
        return " ".join(word for word, _ in self._division.pre_tokenize_str(text))


@lru_cache(maxsize=4)
def _components(normaliser: str, division: str) -> tuple:
    model = {"type": "WordLevel", "vocab": {}, "unk_token": UNKNOWN_OF_CORPUS}
    parts = {
        "normalizer": json.loads(normaliser),
        "pre_tokenizer": json.loads(division),
        "model": model,
    }
    library = library_from({"version": "1.0", "added_tokens": [], **parts})
    return library.normalizer, library.pre_tokenizer
