"""The package's tokenizer: a folder with a sentencepiece model, a fairseq dictionary and all text settings.

    TOKENIZER/sentencepiece.model   BPE merges for normalized words (``normalisation.py``)
    TOKENIZER/dict.txt              fairseq's dictionary: pieces, special tokens, ``<mask>``
    TOKENIZER/tokenizer.json        format version, text settings, sha256 of the two files above

Pre-training, fine-tuning and ``fill_mask`` all use this module to encode text, which guarantees identical ids.

sentencepiece's BPE never merges across a space. Training on words with their counts therefore produces the same pieces
as training on sentences, in a fraction of the time and memory: the 2 million words of WikiText-2 contain only 29,000
distinct ones.
"""

import io
import itertools
import re
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Union

import numpy as np
import sentencepiece

from lazyformer_fairseq.data.text import interface, normalisation
from lazyformer_fairseq.data.text.interface import (
    DICTIONARY_FILE,
    SETTINGS_FILE,
    FolderName,
    SpecialIds,
    refuse_surrogates,
)
from lazyformer_fairseq.data.text.library_recipe import library_errors
from lazyformer_fairseq.data.text.library_tokenizer import LIBRARY, LibraryTokenizer
from lazyformer_fairseq.data.text.normalisation import (
    BOS,
    EOS,
    FIRST_SYMBOLS,
    MASK,
    PAD,
    SPACE,
    UNK,
    UNKNOWN,
    TextSettings,
)
from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.storage.atomic import refuse_filled_folder
from lazyformer_fairseq.storage.json_files import read_json, sha256_of

if TYPE_CHECKING:
    import tokenizers

# In characters. Longer words are truncated for training, because some versions of sentencepiece index characters with
# 16 bits and reject longer words. In a script without spaces, a whole text is one word.
LONGEST_TRAINING_WORD = 60_000
LONGEST_TRAINING_LINE = 1 << 20  # in bytes; sentencepiece skips lines above this limit (4192 by default)
THREADS = 1  # recorded in the model file, which must be identical on every machine


class TooLargeVocabularyError(UserError):
    """An error raised if the vocabulary size is too large for the text; `largest` is the maximum size."""

    def __init__(self, vocab_size: int, largest: int):
        super().__init__(f"vocabulary of {vocab_size}: too large for this text; use at most {largest}, or more text")
        self.largest = largest


def train_model(word_counts: Iterable[tuple[str, int]], vocab_size: int, settings: TextSettings) -> bytes:
    """Train a sentencepiece BPE model and return its bytes, which do not depend on the order of the counts.

    Args:
        word_counts: distinct normalized words and their counts; symbols inside words are removed.
        vocab_size: size of the dictionary, including all symbols.
        settings: text settings, which determine the special tokens and the character coverage.

    Raises:
        UserError: there are no words, or the vocabulary is too large or too small for them.
    """
    symbols_beside_pieces = len(FIRST_SYMBOLS) - 1 + len(settings.special_tokens) + 1  # sentencepiece counts <unk>
    if vocab_size <= symbols_beside_pieces:
        raise UserError(f"vocabulary of {vocab_size}: too small for the special symbols")
    model = io.BytesIO()
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=_training_lines(word_counts, settings),
            input_format="tsv",
            model_writer=model,
            model_type="bpe",
            vocab_size=vocab_size - symbols_beside_pieces,
            character_coverage=settings.character_coverage,
            byte_fallback=settings.byte_fallback,
            normalization_rule_name="identity",  # the text is already normalized
            unk_id=0,
            bos_id=-1,
            eos_id=-1,
            pad_id=-1,
            max_sentence_length=LONGEST_TRAINING_LINE,
            num_threads=THREADS,
            minloglevel=2,
        )
    except RuntimeError as error:
        raise _explain(error, vocab_size, symbols_beside_pieces) from error
    return model.getvalue()


def _training_lines(word_counts: Iterable[tuple[str, int]], settings: TextSettings) -> Iterator[str]:
    """Yield lines ``word TAB count`` in a fixed order, with symbols inside words removed."""
    symbol = normalisation.symbol_pattern(settings)
    most_frequent_first = sorted(word_counts, key=lambda pair: (-pair[1], pair[0]))
    for word, count in most_frequent_first:
        for part in symbol.split(word)[0::2]:
            if part:
                yield f"{part[:LONGEST_TRAINING_WORD]}\t{count}"


def _explain(error: RuntimeError, vocab_size: int, symbols_beside_pieces: int) -> Exception:
    """Convert a sentencepiece error that the user can fix to a UserError; return other errors unchanged."""
    message = str(error)
    if found := re.search(r"set it to a value <= (\d+)", message):
        return TooLargeVocabularyError(vocab_size, int(found[1]) + symbols_beside_pieces)
    if found := re.search(r"smaller than required_chars\. \d+ vs (\d+)", message):
        smallest = int(found[1]) + symbols_beside_pieces
        return UserError(f"vocabulary of {vocab_size}: too small for this text's characters; use at least {smallest}")
    if "sentences_.empty()" in message or "all_chars_count" in message:
        return UserError("no text to train the tokenizer on: every sentence is empty")
    return error


MODEL_FILE = "sentencepiece.model"


@dataclass(frozen=True)
class Description:
    """The contents of tokenizer.json: the text settings and the hashes of the other files."""

    settings: dict[str, Any]
    sha256: dict[str, str]


class Tokenizer(interface.TextTokenizer):
    """A SentencePiece tokenizer, created by :meth:`load`, :meth:`train_on_counts` or :meth:`from_model`.

    Attributes:
        settings: :class:`TextSettings` with which the model was trained.
        symbols: ``<s> <pad> </s> <unk>``, the pieces in sentencepiece's order, the special tokens, and ``<mask>``, in
            id order.
        normalise: :class:`TextNormaliser` that splits a text into words for BPE, separated by spaces.
    """

    files = (SETTINGS_FILE, MODEL_FILE, DICTIONARY_FILE)
    FORMAT_VERSION = 1
    DESCRIPTION = Description
    normalise: normalisation.TextNormaliser

    def __init__(
        self,
        folder: Path,
        settings: TextSettings,
        model: sentencepiece.SentencePieceProcessor,
    ):
        super().__init__(folder)
        self._model = model
        self.settings = settings
        self.normalise = normalisation.TextNormaliser(settings)
        self.symbols = symbols_of(model, settings)
        self._index = {symbol: index for index, symbol in enumerate(self.symbols)}
        self.special = SpecialIds(BOS, PAD, EOS, UNK, self._index[MASK])
        pieces = [model.id_to_piece(piece_id) for piece_id in range(model.get_piece_size())]
        # sentencepiece's <unk> is mapped to fairseq's id.
        self._id_of_piece = [self._index.get(piece, UNK) for piece in pieces]
        self._piece_of_id: dict[int, int] = {}
        for piece_id, index in enumerate(self._id_of_piece):
            if not model.is_control(piece_id):
                self._piece_of_id[index] = piece_id
        self._symbol = normalisation.symbol_pattern(settings)

    @classmethod
    def _of(cls, folder: Path, description: Description, model: bytes) -> "Tokenizer":
        settings = TextSettings.from_json(description.settings, folder / SETTINGS_FILE)
        return cls(folder, settings, _load_model(model, folder / MODEL_FILE))

    @classmethod
    def train_on_counts(
        cls,
        word_counts: Iterable[tuple[str, int]],
        folder: FolderName,
        vocab_size: int,
        settings: TextSettings = TextSettings(),  # noqa: B008 (frozen)
    ) -> "Tokenizer":
        """Train BPE and write ``folder`` atomically. The same counts produce the same bytes on every machine.

        Args:
            word_counts: distinct normalized words and their counts, in any order.
            folder: folder to write, which must not exist or must be empty.
            vocab_size: size of the dictionary, including all symbols.
            settings: text settings, which determine how a text is normalized before BPE.

        Raises:
            UserError: there are no words, the vocabulary is too large or too small for them, or `folder` is not empty.
        """
        refuse_filled_folder(Path(folder))
        model = train_model(word_counts, vocab_size, settings)
        return cls._write_model(folder, settings, model, "the trained model")

    @classmethod
    def from_model(cls, model_file: FolderName, folder: FolderName, settings: TextSettings) -> "Tokenizer":
        """Create a tokenizer folder from an existing SentencePiece model (BPE or unigram); see docs/data.md.

        Args:
            model_file: the SentencePiece model.
            folder: folder to write, which must not exist or must be empty.
            settings: text settings, which must match the normalization of the model's training text.

        Raises:
            UserError: the file is not a model, the pieces of a word depend on its context, or the folder is not empty.
        """
        try:
            content = Path(model_file).read_bytes()
        except OSError as error:
            raise UserError(f"{model_file}: cannot be read ({error.strerror})") from None
        _refuse_pieces_beyond_words(_load_model(content, model_file), model_file)
        return cls._write_model(folder, settings, content, model_file)

    @classmethod
    def _write_model(cls, folder: FolderName, settings: TextSettings, model: bytes, name: FolderName) -> "Tokenizer":
        """Write a model's tokenizer folder; `name` is the model's name in error messages."""
        tokenizer = cls(Path(folder), settings, _load_model(model, name))
        return cls._write(folder, {"settings": asdict(settings)}, model, tokenizer.dictionary)

    def encode(self, text: str) -> list[int]:
        """Encode raw text without adding ``<s>`` and ``</s>``.

        Special tokens and ``<mask>`` in the text are encoded as one id each.
        """
        refuse_surrogates(text)
        return self.encode_normalised(self.normalise(text))

    def encode_normalised(self, words: str) -> list[int]:
        """Encode text that was already normalized by :attr:`normalise`."""
        ids: list[int] = []
        # Split at the symbols first, because sentencepiece would insert a piece for a space before each of them.
        for place, part in enumerate(self._symbol.split(words)):
            if place % 2:
                ids.append(self._index[part.lower()])
            elif part := part.strip():
                ids += [self._id_of_piece[number] for number in self._model.encode(part)]
        return ids

    def encode_with_offsets(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        """Encode raw text like :meth:`encode`, and return the ids with their character spans in ``text``.

        A span consists of a start and an exclusive end. A piece that consists only of the space before a word has an
        empty span at the start of the word. A quotation mark that Moses moves after a comma or a period has the span of
        that comma or period.

        Raises:
            UserError: the text contains an unpaired surrogate, or :attr:`fast` cannot be built.
        """
        refuse_surrogates(text)
        encoding = self.fast.encode(text, add_special_tokens=False)
        spans = []
        for symbol, (start, end) in zip(encoding.tokens, encoding.offsets, strict=True):
            if symbol == SPACE:
                spans.append((start, start))
            else:
                spans.append((start, end))
        return encoding.ids, spans

    @cached_property
    def fast(self) -> "tokenizers.Tokenizer":
        """Equivalent tokenizer of the ``tokenizers`` library.

        Raises:
            UserError: the library does not support the model's pieces.
        """
        from lazyformer_fairseq.data.text.fast_tokenizer import as_fast_tokenizer

        with library_errors():
            return as_fast_tokenizer(self.folder / MODEL_FILE, self.symbols, self.settings)

    def _ids_of(self, words: list[str]) -> list[list[int]]:
        ids = []
        pieces_of_words = self._model.encode(words, num_threads=1)
        for word, numbers in zip(words, pieces_of_words, strict=True):
            if "<" in word and self._symbol.search(word):
                ids.append(self.encode_normalised(word))
            else:
                ids.append([self._id_of_piece[number] for number in numbers])
        return ids

    def starts_of_words(self, ids: np.ndarray) -> np.ndarray:
        """Return a mask of the ids (T,) that begin a word, bool (T,).

        These are special tokens, ``<mask>`` and pieces that start with SentencePiece's space symbol.
        """
        return self.begins_word[ids]

    @cached_property
    def begins_word(self) -> np.ndarray:
        """Mask of the ids that begin a word, bool (V,)."""
        single = {*self.settings.special_tokens, MASK}
        return np.array([symbol.startswith(SPACE) or symbol in single for symbol in self.symbols])

    def decode(self, ids: Iterable[int]) -> str:
        """Decode ids to readable text, omitting ``<s>``, ``</s>`` and ``<pad>`` but keeping other symbols."""
        return self.normalise.readable(self.words(ids))

    def words(self, ids: Iterable[int]) -> str:
        """Decode ids to normalized words separated by spaces, the inverse of :meth:`encode_normalised`."""

        def is_piece(index: int) -> bool:
            return index in self._piece_of_id and index != UNK

        parts: list[str] = []
        for are_pieces, run in itertools.groupby(map(int, ids), key=is_piece):
            if are_pieces:
                parts.append(self._model.decode([self._piece_of_id[index] for index in run]))
                continue
            for index in run:
                if index >= len(self.symbols):
                    parts.append(UNKNOWN)
                elif index not in (BOS, PAD, EOS):
                    parts.append(self.symbols[index])
        stripped = (part.strip() for part in parts)
        return " ".join(filter(None, stripped))


def symbols_of(model: sentencepiece.SentencePieceProcessor, settings: TextSettings) -> list[str]:
    """Return fairseq's four symbols, the pieces in sentencepiece's order, the special tokens, and finally ``<mask>``.

    Raises:
        UserError: a piece equals one of the other symbols, which can only happen without Moses tokenization.
    """
    pieces = []
    for piece_id in range(model.get_piece_size()):
        if not (model.is_unknown(piece_id) or model.is_control(piece_id)):
            pieces.append(model.id_to_piece(piece_id))
    symbols = dict.fromkeys(FIRST_SYMBOLS)
    for symbol in (*pieces, *settings.special_tokens, MASK):
        if symbol in symbols:
            raise UserError(
                f"{symbol!r} would occur twice in the dictionary; train with moses_tokenise or remove this symbol from "
                "the text (an existing model must not have it as a piece)"
            )
        symbols[symbol] = None
    return list(symbols)


def _load_model(content: bytes, name: FolderName) -> sentencepiece.SentencePieceProcessor:
    try:
        model = sentencepiece.SentencePieceProcessor(model_proto=content)
        for piece_id in range(model.get_piece_size()):
            model.id_to_piece(piece_id)
    except RuntimeError as error:
        raise UserError(f"{name}: not a sentencepiece model") from error
    except UnicodeDecodeError as error:
        raise UserError(f"{name}: the model is damaged, because a piece is not UTF-8 text ({error})") from None
    return model


def _refuse_pieces_beyond_words(model: sentencepiece.SentencePieceProcessor, name: FolderName) -> None:
    """Reject a model in which a word's tokens depend on its neighbors, because words are encoded separately."""
    pieces = (model.id_to_piece(piece_id) for piece_id in range(model.get_piece_size()))
    if over_spaces := next((piece for piece in pieces if SPACE in piece.strip(SPACE)), None):
        raise UserError(f"{name}: the piece {over_spaces!r} contains a space; train with split_by_whitespace=true")
    if model.encode("a a") != 2 * model.encode("a"):
        raise UserError(
            f"{name}: words have different pieces at the beginning of a text; train with add_dummy_prefix=true and "
            "remove_extra_whitespaces=true"
        )


def load_tokenizer(folder: FolderName) -> interface.TextTokenizer:
    """Load a tokenizer folder in either format. Nothing in it is executed or unpickled.

    Raises:
        UserError: the folder does not exist; or a file is missing or damaged, has an unsupported format version, or
            does not match the others.
    """
    return class_of(folder).load(folder)


def class_of(folder: FolderName) -> type[Union[Tokenizer, LibraryTokenizer]]:
    """Return the tokenizer class for a folder, according to its tokenizer.json."""
    path = Path(folder) / SETTINGS_FILE
    description = read_json(path, f"is {path.parent} a complete tokenizer folder?")
    if "format_version" not in description and isinstance(description.get("model"), dict):
        raise UserError(
            f"{path} is a tokenizer in Hugging Face's format, which must be converted first; see "
            "docs/data.md, 'Use a BERT tokenizer'"
        )
    if description.get("library") == LIBRARY:
        return LibraryTokenizer
    return Tokenizer


def find_tokenizer_folder(path: Path) -> Path:
    """Find the tokenizer folder for the path of a tokenizer, a checkpoint folder or a checkpoint.

    Raises:
        UserError: there is no tokenizer.
    """
    folder = path
    if path.is_file():
        folder = path.parent
    for candidate in (folder, folder / "tokenizer"):
        if (candidate / SETTINGS_FILE).is_file():
            return candidate
    raise UserError(f"{path}: no tokenizer found ({SETTINGS_FILE}); use a tokenizer or checkpoint folder")


def tokenizer_hashes(folder: FolderName) -> dict[str, str]:
    """Return the SHA-256 hashes of a tokenizer folder's files, by file name."""
    return {name: sha256_of(Path(folder) / name) for name in class_of(folder).files}
