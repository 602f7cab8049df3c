"""Validation of the `tokenizers` library's JSON format, and pre-tokenization of text with its tokenizers.

Only tokenizers that encode each word independently are supported: WordPiece with BERT's pre-tokenization, and
byte-level BPE with GPT-2's. All others are rejected with an error message. Every field of a file is validated before it
is passed to the library, so files from untrusted sources cannot inject regular expressions, file names or code.

These tokenizers first split a text into words ("pre-tokens") and then split each word into pieces. BERT's words are
ordinary words and punctuation marks. RoBERTa's words are bytes written as letters, with ``Ġ`` for the space before a
word. The space is therefore part of the word, and the word alone determines its pieces.
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

# The bound is sixty times the size of the largest known vocabulary; larger ids indicate a damaged file.
Id = Annotated[int, Ge(0), Lt(1 << 24)]


class Strict:
    """The base class of dataclasses that reject unknown fields in JSON objects."""

    __pydantic_config__: ClassVar = {"extra": "forbid"}


@dataclass(frozen=True)
class WordPiece(Strict):
    """The model of a BERT tokenizer."""

    type: str
    vocab: dict[str, Id]
    unk_token: Optional[str] = None
    continuing_subword_prefix: Literal["##"] = "##"
    max_input_chars_per_word: Annotated[int, Ge(1)] = 100


@dataclass(frozen=True)
class ByteLevelBPE(Strict):
    """The model of a RoBERTa tokenizer. `dropout`, which splits words at random, must be zero or absent."""

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
    """BERT's normalizer."""

    type: str
    clean_text: bool = True
    handle_chinese_chars: bool = True
    lowercase: bool = True
    strip_accents: Optional[bool] = None


@dataclass(frozen=True)
class ByteLevel(Strict):
    """GPT-2's pre-tokenizer."""

    type: str
    add_prefix_space: bool = True
    trim_offsets: bool = True
    use_regex: Literal[True] = True


@dataclass(frozen=True)
class Plain(Strict):
    """A component without options."""

    type: str


@dataclass(frozen=True)
class AddedToken(Strict):
    """A symbol that is never split when it occurs in a text."""

    id: Id
    content: str
    single_word: bool = False
    lstrip: bool = False
    rstrip: bool = False
    normalized: Optional[bool] = None
    special: bool = False

    def as_json(self) -> dict[str, Any]:
        """Return the token as a JSON object with all fields."""
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
MOST_SHOWN = 8  # maximum number of template parts shown in a message
AROUND = "only [CLS] a [SEP] b [SEP] and <s> a </s></s> b </s> are supported"
ACCEPTED = "only WordPiece (BERT) and byte-level BPE (RoBERTa) are supported"


def check_recipe(values: Mapping[str, Any]) -> dict[str, Any]:
    """Validate the contents of a ``tokenizer.json`` file and return the parts that determine the ids of a text.

    Raises:
        UserError: the tokenizer is damaged or has an unsupported type or component.
    """
    model = values.get("model")
    if not isinstance(model, dict):
        raise UserError(f"no tokenizer model found; {ACCEPTED}")
    if model.get("type") == "Unigram":
        raise UserError(f"the model is Unigram (SentencePiece, as in ALBERT, DeBERTa and XLM-R); {ACCEPTED}")
    model_type = "WordPiece"
    if "merges" in model:
        model_type = "BPE"
    model = _checked({"type": model_type, **model}, "model", MODELS)  # older files have no type
    model_type = model["type"]

    normaliser = values.get("normalizer")
    if normaliser is not None:
        normaliser = _checked(normaliser, "normalizer", NORMALISERS)
    division = _checked(values.get("pre_tokenizer"), "pre_tokenizer", DIVISIONS)
    if division["type"] != DIVISION_OF_MODEL[model_type]:
        raise UserError(f"the pre_tokenizer {division['type']} does not match the {model_type} model; {ACCEPTED}")

    added = as_type(list[AddedToken], values.get("added_tokens", []), "the added_tokens", ACCEPTED)
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
            raise UserError(f"the symbol {symbol[:40]!r} contains a line break, which dict.txt cannot store")
    return recipe


def _checked(values: Any, what: str, known: Mapping[str, type]) -> dict[str, Any]:
    """Check that an object has a known type and only that type's fields, and return it with the type first."""
    type_name = None
    if isinstance(values, dict):
        type_name = values.get("type")
    if not isinstance(type_name, str) or type_name not in known:
        raise UserError(f"the {what} is {str(type_name)[:40]}, but must be one of {', '.join(known)}; {ACCEPTED}")
    as_type(known[type_name], values, f"the {what}", ACCEPTED)
    return {"type": type_name, **values}


@dataclass(frozen=True)
class Part:
    """A text or special symbol in a template, with its token type."""

    id: str
    type_id: int


@dataclass(frozen=True)
class SpecialToken:
    """The ids of a special symbol in a template."""

    ids: list[int]


@dataclass(frozen=True)
class Template:
    """A post-processor that adds special symbols to a text or a pair."""

    single: list[dict[Literal["Sequence", "SpecialToken"], Part]]
    pair: list[dict[Literal["Sequence", "SpecialToken"], Part]]
    special_tokens: dict[str, SpecialToken]


@dataclass(frozen=True)
class PairFormat:
    """A tokenizer's format for pairs of texts.

    Attributes:
        separators: number of ``</s>`` between the texts.
        second_type: token type of the second text.
    """

    separators: Literal[1, 2]
    second_type: Literal[0, 1]


BERT = PairFormat(separators=1, second_type=1)
ROBERTA = PairFormat(separators=2, second_type=0)


def parse_pair_format(values: Any, bos: str, eos: str, ids: Mapping[str, int]) -> PairFormat:
    """Determine the pair format of a ``tokenizer.json`` post-processor without running it.

    Args:
        values: the post-processor.
        bos: symbol at the start of a text.
        eos: symbol at the end of a text.
        ids: ids by symbol.

    Raises:
        UserError: the post-processor has a type that neither BERT nor RoBERTa uses, or adds other symbols to texts.
    """
    processors = [values]
    is_sequence = isinstance(values, dict) and values.get("type") == "Sequence"
    if is_sequence and isinstance(values.get("processors"), list):
        processors = values["processors"]

    for each in processors:
        type_name = None
        if isinstance(each, dict):
            type_name = each.get("type")
        if type_name == "ByteLevel":  # affects only offsets
            continue
        if type_name in ("BertProcessing", "RobertaProcessing"):
            start = each.get("cls")
            end = each.get("sep")
            if start != [bos, ids[bos]] or end != [eos, ids[eos]]:
                raise UserError(f"the post_processor adds {start} and {end} to a text; {AROUND}")
            if type_name == "BertProcessing":
                return BERT
            return ROBERTA
        if type_name != "TemplateProcessing":
            raise UserError(
                f"the post_processor is {str(type_name)[:40]}, but must be one of {', '.join(POST_PROCESSORS)}; "
                f"{ACCEPTED}"
            )
        template = as_type(Template, each, "the post_processor", ACCEPTED)
        return _joining_of_template(template, bos, eos, ids)
    raise UserError(f"the post_processor adds no symbols to a text; {AROUND}")


def _joining_of_template(template: Template, bos: str, eos: str, ids: Mapping[str, int]) -> PairFormat:
    for symbol in (bos, eos):
        if template.special_tokens.get(symbol) != SpecialToken([ids[symbol]]):
            raise UserError(f"the post_processor's id of {symbol!r} differs from the vocabulary's id {ids[symbol]}")

    single = [part.id for parts in template.single for part in parts.values()]
    parts_of_pair = [part for parts in template.pair for part in parts.values()]
    pair = [part.id for part in parts_of_pair]
    separators: Literal[1, 2] = 1
    if len(pair) > 5:
        separators = 2
    expected_single = [bos, "A", eos]
    expected_pair = [bos, "A", *[eos] * separators, "B", eos]
    if single != expected_single or pair != expected_pair:
        raise UserError(
            f"the post_processor formats a text as {single[:MOST_SHOWN]} and a pair as {pair[:MOST_SHOWN]}; {AROUND}"
        )
    if parts_of_pair[-2].type_id > 0:
        return PairFormat(separators, second_type=1)
    return PairFormat(separators, second_type=0)


def ids_of(recipe: Mapping[str, Any]) -> dict[str, int]:
    """Return the ids of all symbols, including added tokens.

    Raises:
        UserError: two symbols share an id, or a symbol has two ids.
    """
    ids = dict(recipe["model"]["vocab"])
    for token in recipe["added_tokens"]:
        if ids.setdefault(token["content"], token["id"]) != token["id"]:
            raise UserError(f"the added token {token['content']!r} has ids {ids[token['content']]} and {token['id']}")
    if len(set(ids.values())) < len(ids):
        raise UserError("two symbols share an id")
    return ids


def build_library(recipe: Mapping[str, Any], silent: tuple[str, ...] = ()) -> Tokenizer:
    """Build the library's tokenizer, without a post-processor that adds special symbols.

    Args:
        recipe: result of :func:`check_recipe`.
        silent: symbols that are treated as ordinary text if they occur in a text.

    Raises:
        UserError: the library rejects the recipe.
    """
    # The library assigns a new id to an added token that is missing from the vocabulary, so special tokens are added to
    # the vocabulary. For BPE, all added tokens can safely be added, because pieces only result from merges.
    is_bpe = recipe["model"]["type"] == "BPE"
    tokens = recipe["added_tokens"]
    placed = {token["content"]: token["id"] for token in tokens if is_bpe or token["special"]}
    vocabulary = {**placed, **recipe["model"]["vocab"]}
    model = {**recipe["model"], "vocab": vocabulary}
    every = sorted(recipe["added_tokens"], key=lambda token: token["id"])
    added = [token for token in every if token["content"] not in silent]
    trimming = None  # post-processor that excludes the space before a byte-level word from the word's offsets
    if is_bpe:
        trimming = {**recipe["pre_tokenizer"], "trim_offsets": True}
    library = library_from({**recipe, "model": model, "added_tokens": added, "post_processor": trimming})
    for symbol, wanted in ids_of(recipe).items():
        if library.token_to_id(symbol) != wanted:
            raise UserError(f"the added tokens do not follow the vocabulary in order: {symbol!r} must have id {wanted}")
    return library


def library_from(values: Mapping[str, Any]) -> Tokenizer:
    """Build the library's tokenizer from JSON values.

    Raises:
        UserError: the library rejects the values.
    """
    with library_errors():
        return Tokenizer.from_str(json.dumps(values))


@contextmanager
def library_errors() -> Iterator[None]:
    """Convert the library's errors and Rust panics to UserErrors."""
    try:
        yield
    except (KeyboardInterrupt, SystemExit, MemoryError, UserError):
        raise
    except BaseException as error:  # a Rust panic is not an Exception
        raise UserError(f"the tokenizers library rejects this tokenizer: {error}") from None


UNKNOWN_OF_CORPUS = "<unk>"  # WikiText's replacement for rare words


@dataclass(frozen=True)
class LibrarySettings:
    """Settings that determine how a text is split into words.

    Attributes:
        normaliser, division: the library's `normalizer` and `pre_tokenizer` as JSON.
        unknown: symbol for unknown words.
    """

    normaliser: str
    division: str
    unknown: str

    special_tokens: tuple[str, ...] = ()
    """Always empty, because these tokenizers split ``<url>`` into pieces like any other text."""


class LibraryNormaliser:
    """A callable that splits a text, ideally a single sentence, into words.

    The model's symbols are treated as ordinary text.
    """

    def __init__(self, settings: LibrarySettings):
        self.settings = settings
        self._normaliser, self._division = _components(settings.normaliser, settings.division)

    def __reduce__(self) -> tuple:
        return LibraryNormaliser, (self.settings,)

    def __call__(self, text: str, keep_unknown: bool = False) -> str:
        """Split ``text`` into words separated by single spaces.

        Args:
            text: raw text.
            keep_unknown: whether to treat ``<unk>`` in the text as an unknown word.
        """
        if not keep_unknown:
            return self._words(text)
        unknown = self.settings.unknown
        parts = []
        for plain in text.split(UNKNOWN_OF_CORPUS):
            parts += [self._words(plain), unknown]
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
