"""The library's own tokenizer: a folder with a sentencepiece model, a fairseq dictionary and all text settings.

    TOKENIZER/sentencepiece.model   BPE merges over normalised words (``normalisation.py``)
    TOKENIZER/dict.txt              fairseq's dictionary: pieces, special tokens, ``<mask>``
    TOKENIZER/tokenizer.json        format version, text settings, sha256 of the two files above

Pre-training, fine-tuning and ``fill_mask`` all convert text to ids here, so they cannot disagree.

sentencepiece's BPE never merges across a space. Training on words with their counts therefore gives the same pieces as
training on sentences, in a fraction of the time and memory: the 2 million words of WikiText-2 contain only 29,000
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
from lazyformer_fairseq.data.text.library_recipe import refusals_of_the_library
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

# In characters. Some versions of sentencepiece index the characters of a word with 16 bits and reject longer words,
# such as a text in a script without spaces. Training uses only the beginning of such a word.
LONGEST_TRAINING_WORD = 60_000
LONGEST_TRAINING_LINE = 1 << 20  # in bytes; sentencepiece skips longer lines, by default those above 4192
THREADS = 1  # the model records this number, and its bytes must be the same on every machine


class TooLargeVocabularyError(UserError):
    """Error for a vocabulary that is larger than the text allows; `largest` is the maximum."""

    def __init__(self, vocab_size: int, largest: int):
        super().__init__(f"vocabulary of {vocab_size}: too large for this text; give at most {largest}, or more text")
        self.largest = largest


def train_model(word_counts: Iterable[tuple[str, int]], vocab_size: int, settings: TextSettings) -> bytes:
    """Train a sentencepiece BPE model and return its bytes, which depend on the counts but not on their order.

    Args:
        word_counts: distinct normalised words and their counts; symbols inside words are left out.
        vocab_size: the size of the dictionary, all symbols included.
        settings: the text settings, which determine the special tokens and the share of characters that get a token.

    Raises:
        UserError: there are no words, or the vocabulary is too large or too small for them.
    """
    symbols_beside_pieces = len(FIRST_SYMBOLS) - 1 + len(settings.special_tokens) + 1  # sentencepiece counts <unk>
    if vocab_size <= symbols_beside_pieces:
        raise UserError(f"vocabulary of {vocab_size}: too small even for the special symbols alone")
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
            normalization_rule_name="identity",  # the text is normalised already
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
    """Yield lines ``word TAB count`` in a fixed order, without the symbols that words contain."""
    symbol = normalisation.symbol_pattern(settings)
    for word, count in sorted(word_counts, key=lambda pair: (-pair[1], pair[0])):
        for part in symbol.split(word)[0::2]:
            if part:
                yield f"{part[:LONGEST_TRAINING_WORD]}\t{count}"


def _explain(error: RuntimeError, vocab_size: int, symbols_beside_pieces: int) -> Exception:
    """Translate an error of sentencepiece that the user can fix into a UserError; return any other unchanged."""
    message = str(error)
    if found := re.search(r"set it to a value <= (\d+)", message):
        return TooLargeVocabularyError(vocab_size, int(found[1]) + symbols_beside_pieces)
    if found := re.search(r"smaller than required_chars\. \d+ vs (\d+)", message):
        smallest = int(found[1]) + symbols_beside_pieces
        return UserError(f"vocabulary of {vocab_size}: too small for this text's characters; give at least {smallest}")
    if "sentences_.empty()" in message or "all_chars_count" in message:
        return UserError("no text to train the tokenizer on: every sentence is empty")
    return error


MODEL_FILE = "sentencepiece.model"


@dataclass(frozen=True)
class Description:
    """Content of tokenizer.json: text settings, and the hash of each of the other files."""

    settings: dict[str, Any]
    sha256: dict[str, str]


class Tokenizer(interface.TextTokenizer):
    """SentencePiece tokenizer, created by :meth:`load`, :meth:`train_on_counts` or :meth:`from_model`.

    Attributes:
        settings: the :class:`TextSettings` with which the model was trained.
        symbols: ``<s> <pad> </s> <unk>``, the pieces in sentencepiece's order, the special tokens, and ``<mask>``; the
            id of a symbol is its index.
        normalise: the :class:`TextNormaliser` that turns a text into the words that BPE reads, separated by spaces.
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
        # sentencepiece's own <unk> is mapped to the id that fairseq gives it.
        self._id_of_piece = [self._index.get(piece, UNK) for piece in pieces]
        self._piece_of_id = {
            index: piece_id for piece_id, index in enumerate(self._id_of_piece) if not model.is_control(piece_id)
        }
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
        """Train BPE and write ``folder`` atomically. The same counts give the same bytes on every machine.

        Args:
            word_counts: distinct normalised words and their counts, in any order.
            folder: the folder to write, which must not exist or must be empty.
            vocab_size: the size of the dictionary, all symbols included.
            settings: the text settings, which determine how a text is normalised before BPE.

        Raises:
            UserError: there are no words, the vocabulary is too large or too small for them, or `folder` is not empty.
        """
        refuse_filled_folder(Path(folder))
        return cls._write_model(folder, settings, train_model(word_counts, vocab_size, settings), "the trained model")

    @classmethod
    def from_model(cls, model_file: FolderName, folder: FolderName, settings: TextSettings) -> "Tokenizer":
        """Create a tokenizer folder from the user's own SentencePiece model, BPE or unigram; see docs/data.md.

        Args:
            model_file: the SentencePiece model.
            folder: the folder to write, which must not exist or must be empty.
            settings: the normalisation of a text before the model reads it, which must be that of the model's training
                text.

        Raises:
            UserError: the file is not a model, the pieces of a word depend on more than the word, or the folder is not
                empty.
        """
        try:
            content = Path(model_file).read_bytes()
        except OSError as error:
            raise UserError(f"{model_file}: cannot be read ({error.strerror})") from None
        _refuse_pieces_beyond_words(_load_model(content, model_file), model_file)
        return cls._write_model(folder, settings, content, model_file)

    @classmethod
    def _write_model(cls, folder: FolderName, settings: TextSettings, model: bytes, name: FolderName) -> "Tokenizer":
        """Write the folder of a model; error messages call the model `name`."""
        tokenizer = cls(Path(folder), settings, _load_model(model, name))
        return cls._write(folder, {"settings": asdict(settings)}, model, tokenizer.dictionary)

    def encode(self, text: str) -> list[int]:
        """Return the ids of raw text, without ``<s>`` and ``</s>`` around it.

        A special token or ``<mask>`` in the text has one id.
        """
        refuse_surrogates(text)
        return self.encode_normalised(self.normalise(text))

    def encode_normalised(self, words: str) -> list[int]:
        """Return the ids of text that :attr:`normalise` has normalised."""
        ids: list[int] = []
        # Split at the symbols first, because sentencepiece would put a piece for a space before each of them.
        for place, part in enumerate(self._symbol.split(words)):
            if place % 2:
                ids.append(self._index[part.lower()])
            elif part := part.strip():
                ids += [self._id_of_piece[number] for number in self._model.encode(part)]
        return ids

    def encode_with_offsets(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        """Return the ids of raw text, as :meth:`encode`, and the span of characters in ``text`` of each id.

        A span is the index of the first character and the index after the last one. A piece that consists only of the
        space before a word has an empty span at the start of the word. A quotation mark that Moses moves behind a comma
        or a full stop has the span of that mark.

        Raises:
            UserError: the text contains half a surrogate pair, or :attr:`fast` cannot be built.
        """
        refuse_surrogates(text)
        encoding = self.fast.encode(text, add_special_tokens=False)
        spans = [
            (start, start if symbol == SPACE else end)
            for symbol, (start, end) in zip(encoding.tokens, encoding.offsets, strict=True)
        ]
        return encoding.ids, spans

    @cached_property
    def fast(self) -> "tokenizers.Tokenizer":
        """The equivalent tokenizer of the ``tokenizers`` library.

        Raises:
            UserError: the library does not support the model's pieces.
        """
        from lazyformer_fairseq.data.text.fast_tokenizer import as_fast_tokenizer

        with refusals_of_the_library():
            return as_fast_tokenizer(self.folder / MODEL_FILE, self.symbols, self.settings)

    def _ids_of(self, words: list[str]) -> list[list[int]]:
        ids = []
        for word, numbers in zip(words, self._model.encode(words, num_threads=1), strict=True):
            if "<" in word and self._symbol.search(word):
                ids.append(self.encode_normalised(word))
            else:
                ids.append([self._id_of_piece[number] for number in numbers])
        return ids

    def starts_of_words(self, ids: np.ndarray) -> np.ndarray:
        """Return which ids (T,) are pieces with SentencePiece's sign for a space, special tokens or ``<mask>``."""
        return self.begins_word[ids]

    @cached_property
    def begins_word(self) -> np.ndarray:
        """Mask of the ids that begin a word, bool (V,)."""
        single = {*self.settings.special_tokens, MASK}
        return np.array([symbol.startswith(SPACE) or symbol in single for symbol in self.symbols])

    def decode(self, ids: Iterable[int]) -> str:
        """Return the readable text of ids, without ``<s>``, ``</s>`` and ``<pad>`` but with the other symbols."""
        return self.normalise.readable(self.words(ids))

    def words(self, ids: Iterable[int]) -> str:
        """Return the normalised words of ids, separated by spaces: the inverse of :meth:`encode_normalised`."""
        parts: list[str] = []
        is_piece = lambda index: index in self._piece_of_id and index != UNK  # noqa: E731
        for are_pieces, run in itertools.groupby(map(int, ids), key=is_piece):
            if are_pieces:
                parts.append(self._model.decode([self._piece_of_id[index] for index in run]))
                continue
            said = (index for index in run if index not in (BOS, PAD, EOS))
            parts += (self.symbols[index] if index < len(self.symbols) else UNKNOWN for index in said)
        return " ".join(filter(None, (part.strip() for part in parts)))


def symbols_of(model: sentencepiece.SentencePieceProcessor, settings: TextSettings) -> list[str]:
    """Return fairseq's four symbols, the pieces in sentencepiece's order, the special tokens, and finally ``<mask>``.

    Raises:
        UserError: a piece is equal to one of the symbols, which is possible only without Moses tokenization.
    """
    numbers = [i for i in range(model.get_piece_size()) if not (model.is_unknown(i) or model.is_control(i))]
    pieces = list(map(model.id_to_piece, numbers))
    symbols = dict.fromkeys(FIRST_SYMBOLS)
    for symbol in (*pieces, *settings.special_tokens, MASK):
        if symbol in symbols:
            raise UserError(
                f"{symbol!r} would be twice in the dictionary; train with moses_tokenise or remove it from the text "
                "(your own model must not have it as a piece)"
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
        raise UserError(f"{name}: damaged, a piece is not UTF-8 text ({error})") from None
    return model


def _refuse_pieces_beyond_words(model: sentencepiece.SentencePieceProcessor, name: FolderName) -> None:
    """Reject a model in which the tokens of a word depend on its neighbours, because words are encoded separately."""
    pieces = (model.id_to_piece(piece_id) for piece_id in range(model.get_piece_size()))
    if over_spaces := next((piece for piece in pieces if SPACE in piece.strip(SPACE)), None):
        raise UserError(f"{name}: its piece {over_spaces!r} extends over a space; train with split_by_whitespace=true")
    if model.encode("a a") != 2 * model.encode("a"):
        raise UserError(
            f"{name}: a word has other pieces at the beginning of a text; train with add_dummy_prefix=true and "
            "remove_extra_whitespaces=true"
        )


def load_tokenizer(folder: FolderName) -> interface.TextTokenizer:
    """Read a tokenizer folder of either format. Nothing in it is executed or unpickled.

    Raises:
        UserError: the folder does not exist; or a file is missing, is damaged, has another format version or does not
            match the other files.
    """
    return class_of(folder).load(folder)


def class_of(folder: FolderName) -> type[Union[Tokenizer, LibraryTokenizer]]:
    """Return the class of the tokenizer in a folder, according to its tokenizer.json."""
    path = Path(folder) / SETTINGS_FILE
    description = read_json(path, f"is {path.parent} a tokenizer folder, copied whole?")
    if "format_version" not in description and isinstance(description.get("model"), dict):
        raise UserError(
            f"{path}: is a tokenizer as Hugging Face writes it; convert it to a folder for this program first, see "
            "docs/data.md, 'Use a BERT tokenizer'"
        )
    if description.get("library") == LIBRARY:
        return LibraryTokenizer
    return Tokenizer


def find_tokenizer_folder(path: Path) -> Path:
    """Return the tokenizer folder for a path to the folder itself, to a folder of checkpoints or to a checkpoint.

    Raises:
        UserError: there is no tokenizer.
    """
    folder = path
    if path.is_file():
        folder = path.parent
    for candidate in (folder, folder / "tokenizer"):
        if (candidate / SETTINGS_FILE).is_file():
            return candidate
    raise UserError(f"{path}: no tokenizer there ({SETTINGS_FILE}); give its folder, or the folder of a checkpoint")


def tokenizer_hashes(folder: FolderName) -> dict[str, str]:
    """Return the SHA-256 of each file of a tokenizer folder by the file's name."""
    return {name: sha256_of(Path(folder) / name) for name in class_of(folder).files}
