"""Tokenizers from other models: WordPiece or byte-level BPE, run by the `tokenizers` library.

    TOKENIZER/pieces.json      the tokenizer in the library's format: vocabulary, normalization, pre-tokenization
    TOKENIZER/dict.txt         its symbols, in the order of the model's embedding rows (``dictionary_file.py``)
    TOKENIZER/tokenizer.json   format version 2, special symbols, pair format, sha256 of the two files above

:func:`adopt_tokenizer` creates such a folder from the JSON files of a BERT or RoBERTa model. The roles of the special
symbols are read from tokenizer_config.json or special_tokens_map.json, and the text processing from tokenizer.json.
Options in tokenizer_config.json take precedence, as in transformers.
"""

import itertools
import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, Optional, Union, get_args

import numpy as np
from tokenizers.processors import Sequence, TemplateProcessing

from lazyformer_fairseq.data.text import interface, library_recipe
from lazyformer_fairseq.data.text.interface import (
    DICTIONARY_FILE,
    SETTINGS_FILE,
    FolderName,
    SpecialIds,
    refuse_surrogates,
)
from lazyformer_fairseq.data.text.library_recipe import check_recipe, ids_of, library_errors
from lazyformer_fairseq.data.text.normalisation import COPY_AGAIN
from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.storage.atomic import refuse_filled_folder
from lazyformer_fairseq.storage.json_files import read_json, write_json

LIBRARY = "tokenizers"
PIECES_FILE = "pieces.json"
SPACE = "Ġ"  # represents the space before a word in a byte-level piece
INSIDE_WORD = "##"  # prefix of WordPiece pieces that do not begin a word

MOST_FREE_ROWS = 1 << 16  # maximum number of embedding rows without a symbol, which get placeholder symbols

Role = Literal["bos", "pad", "eos", "unk", "mask"]
SILENT: tuple[Role, ...] = ("bos", "pad", "eos")  # roles with symbols that are treated as ordinary text
# Names of the roles in a model's files.
NAMES_OF_ROLES: dict[Role, str] = {
    "bos": "cls_token",
    "pad": "pad_token",
    "eos": "sep_token",
    "unk": "unk_token",
    "mask": "mask_token",
}


@dataclass(frozen=True)
class Description:
    """The contents of tokenizer.json.

    Attributes:
        special: special symbols by role.
        rows: number of rows in the model's embedding.
        separators: number of ``</s>`` between the texts of a pair.
        second_type: token type of the second text of a pair.
        sha256: hashes of the other files, by file name.
    """

    special: dict[Role, str]
    rows: int
    separators: Literal[1, 2]
    second_type: Literal[0, 1]
    sha256: dict[str, str] = field(default_factory=dict)


class LibraryTokenizer(interface.TextTokenizer):
    """A tokenizer with another model's vocabulary; it produces the same ids as the library with that model's files.

    Only ``[MASK]``, ``[UNK]`` and added tokens in a text are encoded as symbols with one id each. ``[CLS]`` and
    ``[SEP]`` are treated as ordinary text, which prevents a text from containing the end of the input.

    Args:
        folder: the tokenizer folder.
        recipe: result of :func:`~lazyformer_fairseq.data.text.library_recipe.check_recipe`.
        description: validated contents of tokenizer.json.

    Raises:
        UserError: the library rejects the recipe, or the recipe and the description are inconsistent.
    """

    files = (SETTINGS_FILE, PIECES_FILE, DICTIONARY_FILE)
    FORMAT_VERSION = 2  # 1 is the format of a SentencePiece model's folder
    DESCRIPTION = Description

    def __init__(self, folder: Path, recipe: Mapping[str, Any], description: Description):
        super().__init__(folder)
        self._recipe = recipe
        self._names = description.special
        self.separators = description.separators
        self.second_type = description.second_type

        ids = ids_of(recipe)
        most = 2 * len(ids) + MOST_FREE_ROWS
        if not 0 < description.rows <= most:
            raise UserError(f"the embedding has {description.rows} rows; {len(ids)} symbols require 1 to {most} rows")
        if nameless := [role for role in get_args(Role) if role not in self._names]:
            raise UserError(f"there is no special symbol for {nameless[0]!r}")
        if lacking := sorted(set(self._names.values()) - ids.keys()):
            raise UserError(f"the special symbol {lacking[0]!r} is not in the vocabulary")
        if recipe["model"].get("unk_token") not in (None, self._names["unk"]):
            raise UserError(
                f"the model's unknown symbol is {recipe['model']['unk_token']!r}, but the settings have "
                f"{self._names['unk']!r}"
            )
        if max(ids.values()) >= description.rows:
            raise UserError(
                f"the ids go up to {max(ids.values())}, but the model's embedding has {description.rows} rows; is this "
                "the model's own tokenizer?"
            )

        special = {role: ids[symbol] for role, symbol in self._names.items()}
        self.special = SpecialIds(**special)
        symbol_of = {index: symbol for symbol, index in ids.items()}
        self.symbols = [symbol_of.get(row, f"<row {row}>") for row in range(description.rows)]

        silent = tuple(self._names[role] for role in SILENT)
        self._library = library_recipe.build_library(recipe, silent)
        self._model = self._library.model
        for symbol in silent:
            if ids[symbol] in self.encode(symbol):
                raise UserError(
                    f"a text that contains the word {symbol!r} would end there; this tokenizer is not supported"
                )
        self.settings = library_recipe.LibrarySettings(
            json.dumps(recipe["normalizer"]),
            json.dumps(recipe["pre_tokenizer"]),
            self._names["unk"],
        )
        self.normalise = library_recipe.LibraryNormaliser(self.settings)

    @classmethod
    def _of(cls, folder: Path, description: Description, model: bytes) -> "LibraryTokenizer":  # noqa: ARG003
        return cls(folder, check_recipe(read_json(folder / PIECES_FILE, COPY_AGAIN)), description)

    def encode(self, text: str) -> list[int]:
        """Encode raw text without adding ``<s>`` and ``</s>``."""
        refuse_surrogates(text)
        return self._library.encode(text, add_special_tokens=False).ids

    def encode_with_offsets(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        """Encode raw text like :meth:`encode`, and return the ids with their character spans in ``text``.

        A span consists of a start and an exclusive end.
        """
        refuse_surrogates(text)
        encoding = self._library.encode(text, add_special_tokens=False)
        return encoding.ids, encoding.offsets

    def encode_normalised(self, words: str) -> list[int]:
        """Encode words separated by spaces."""
        if not words:
            return []
        return list(itertools.chain.from_iterable(self._ids_of(words.split(" "))))

    def _ids_of(self, words: list[str]) -> list[list[int]]:
        unknown = self._names["unk"]
        tokenize = self._model.tokenize
        ids = []
        for word in words:
            if word == unknown:
                ids.append([self.special.unk])
            else:
                ids.append([piece.id for piece in tokenize(word)])
        return ids

    def starts_of_words(self, ids: np.ndarray) -> np.ndarray:
        """Return a mask of the ids (T,) that begin a word in one or more concatenated inputs, bool (T,).

        WordPiece marks pieces that continue a word. Byte-level BPE marks pieces that follow a space, so a punctuation
        mark such as a comma belongs to the preceding word. The first piece of a text always begins a word.
        """
        is_end = np.isin(ids, self.special[:3])  # <s>, <pad>, </s>
        after_end = is_end
        if len(ids):
            after_end = np.append(True, is_end[:-1])
        return ~is_end & (self.begins_word[ids] | after_end)

    @cached_property
    def begins_word(self) -> np.ndarray:
        """Mask of the ids that begin a word, bool (V,)."""
        if self._recipe["model"]["type"] == "WordPiece":
            return np.array([not symbol.startswith(INSIDE_WORD) for symbol in self.symbols])
        whole = {token["content"] for token in self._recipe["added_tokens"]}
        return np.array([symbol.startswith(SPACE) or symbol in whole for symbol in self.symbols])

    def decode(self, ids: Iterable[int]) -> str:
        """Decode ids to readable text, omitting ``<s>``, ``</s>`` and ``<pad>``."""
        kept = [index for index in map(int, ids) if index not in self.special[:3]]
        return self._library.decode(kept, skip_special_tokens=False).strip()

    def write_for_transformers(self, folder: FolderName, token_types: bool = False) -> None:
        """Write ``tokenizer.json`` and ``tokenizer_config.json`` for transformers' AutoTokenizer.

        Args:
            folder: the folder to write into.
            token_types: whether the model has token types.
        """
        folder = Path(folder)
        bos = self._names["bos"]
        eos = self._names["eos"]
        library = library_recipe.build_library(self._recipe)
        with library_errors():  # the library rejects symbols that contain a colon, for example
            around = TemplateProcessing(
                single=[bos, "$A", eos],
                pair=[bos, "$A", *[eos] * self.separators, f"$B:{self.second_type}", f"{eos}:{self.second_type}"],
                special_tokens=[(bos, self.special.bos), (eos, self.special.eos)],
            )
        trimming = library.post_processor
        library.post_processor = around
        if trimming is not None:
            library.post_processor = Sequence([trimming, around])
        (folder / "tokenizer.json").write_text(library.to_str() + "\n", encoding="utf-8")
        inputs = ["input_ids", "attention_mask"]
        if token_types:
            inputs.insert(1, "token_type_ids")
        config = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            **{name: self._names[role] for role, name in NAMES_OF_ROLES.items()},
            "model_input_names": inputs,
            "clean_up_tokenization_spaces": False,
        }
        write_json(folder / "tokenizer_config.json", config, durable=False)


USUAL_NAMES = (
    ("[CLS]", "[PAD]", "[SEP]", "[UNK]", "[MASK]"),
    ("<s>", "<pad>", "</s>", "<unk>", "<mask>"),
)
OPTIONS_OF_BERT = {  # option in tokenizer_config.json -> option of the library's normalizer, and its types
    "do_lower_case": ("lowercase", (bool,)),
    "strip_accents": ("strip_accents", (bool, type(None))),
    "tokenize_chinese_chars": ("handle_chinese_chars", (bool,)),
}
ADVICE = "download the model's folder again"


def adopt_tokenizer(source: Union[str, Path], out: Union[str, Path], rows: Optional[int] = None) -> LibraryTokenizer:
    """Convert another model's tokenizer to a tokenizer folder with the same ids, which is written atomically.

    Args:
        source: folder with ``tokenizer.json`` and, optionally, ``tokenizer_config.json``, ``special_tokens_map.json``
            and ``config.json``.
        out: folder to write, which must not exist or must be empty.
        rows: number of rows in the model's word embedding. By default, it is read from ``config.json`` or, if missing
            there, derived from the largest id. Rows without a symbol get placeholder symbols.

    Raises:
        UserError: `source` has no tokenizer; the tokenizer is damaged, has an unsupported type such as SentencePiece,
            lacks one of the five special symbols or has more ids than rows; or `out` is not empty.
    """
    source = Path(source)
    out = Path(out)
    refuse_filled_folder(out)
    options = _optional_json(source / "tokenizer_config.json")
    path = source / "tokenizer.json"
    try:
        values = _values(source, path, options)
        recipe = check_recipe(values)
        ids = ids_of(recipe)
        special = _special_symbols(source, options, ids)
        recipe = _with_added(recipe, special, options)

        joining = library_recipe.ROBERTA
        if recipe["model"]["type"] == "WordPiece":
            joining = library_recipe.BERT
        if values.get("post_processor") is not None:
            joining = library_recipe.parse_pair_format(values["post_processor"], special["bos"], special["eos"], ids)

        if rows is None:
            rows = _optional_json(source / "config.json").get("vocab_size")
        if type(rows) is not int:
            rows = 1 + max(ids.values())
        description = Description(special, rows, joining.separators, joining.second_type)
        dictionary = LibraryTokenizer(out, recipe, description).dictionary
        model = (json.dumps(recipe, indent=1) + "\n").encode()
        described = {"library": LIBRARY, **asdict(description)}
        return LibraryTokenizer._write(out, described, model, dictionary)
    except UserError as error:
        message = str(error)
        if str(source) not in message:
            message = f"{path}: {message}"
        raise UserError(message) from None


def _values(source: Path, path: Path, options: Mapping[str, Any]) -> dict[str, Any]:
    """Read tokenizer.json and apply the options in tokenizer_config.json."""
    if not source.is_dir():
        raise UserError(f"{source}: no such folder; use the folder with the model's config.json")
    if not path.exists():
        raise UserError(
            f"{source} contains no tokenizer.json; create it with transformers: "
            f"AutoTokenizer.from_pretrained({str(source)!r}).save_pretrained({str(source)!r})"
        )
    values = read_json(path, ADVICE)
    normaliser = values.get("normalizer")
    division = values.get("pre_tokenizer")
    if isinstance(normaliser, dict) and normaliser.get("type") == "BertNormalizer":
        for name, (field, types) in OPTIONS_OF_BERT.items():
            if name in options and type(options[name]) in types:
                normaliser[field] = options[name]
    if isinstance(division, dict) and division.get("type") == "ByteLevel":
        prefixed = options.get("add_prefix_space")
        if type(prefixed) is bool:
            division["add_prefix_space"] = prefixed
    return values


def _special_symbols(source: Path, options: Mapping[str, Any], ids: Mapping[str, int]) -> dict[Role, str]:
    """Return the special symbols by role from the model's files, falling back to BERT's or RoBERTa's names."""
    named = {**_optional_json(source / "special_tokens_map.json"), **options}
    usual = next(
        (names for names in USUAL_NAMES if all(name in ids for name in names)),
        (None,) * len(NAMES_OF_ROLES),
    )

    special: dict[Role, str] = {}
    for (role, name), default in zip(NAMES_OF_ROLES.items(), usual, strict=True):
        symbol = named.get(name)
        if isinstance(symbol, dict):
            symbol = symbol.get("content")
        if symbol is None:
            symbol = default
        if not isinstance(symbol, str) or symbol not in ids:
            raise UserError(
                f"no valid {name} ({str(symbol)[:40]!r}); a masked language model requires all of "
                f"{', '.join(NAMES_OF_ROLES.values())}"
            )
        special[role] = symbol

    if len(set(special.values())) < len(special):
        raise UserError(f"the five special symbols {special} are not all different")
    wanted = _optional_json(source / "config.json").get("pad_token_id")
    if type(wanted) is int and wanted != ids[special["pad"]]:
        raise UserError(
            f"the padding symbol {special['pad']!r} has id {ids[special['pad']]}, but config.json has {wanted}; is "
            "this the model's own tokenizer?"
        )
    return special


def _with_added(recipe: dict[str, Any], special: Mapping[Role, str], options: Mapping[str, Any]) -> dict[str, Any]:
    """Add all special symbols to the recipe's added tokens, so that the library recognizes them in a text."""
    ids = ids_of(recipe)
    there = {token["content"] for token in recipe["added_tokens"]}
    added = list(recipe["added_tokens"])
    for role, symbol in special.items():
        if symbol not in there:
            # RoBERTa's mask includes the preceding space, even in old folders that do not record this.
            takes_space = role == "mask" and recipe["model"]["type"] == "BPE"
            described = options.get(NAMES_OF_ROLES[role])
            if isinstance(described, dict) and type(described.get("lstrip")) is bool:
                takes_space = described["lstrip"]
            flags = dict.fromkeys(("single_word", "rstrip", "normalized"), False)
            added.append(
                {
                    "id": ids[symbol],
                    "content": symbol,
                    **flags,
                    "lstrip": takes_space,
                    "special": True,
                }
            )
    return {**recipe, "added_tokens": added}


def _optional_json(path: Path) -> dict[str, Any]:
    if path.is_file():
        return read_json(path, ADVICE)
    return {}
