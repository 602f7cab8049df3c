"""Trains the sentencepiece model of a tokenizer on words and how often they occur.

sentencepiece's BPE never merges across a space, so counted words give the pieces that the sentences would give, in a
fraction of the time and memory: the 2 million running words of WikiText-2 are 29,000 distinct ones.
"""

import io
import re
from collections.abc import Iterable, Iterator

import sentencepiece

from lazyformer_fairseq.data.text.normalisation import FIRST_SYMBOLS, TextSettings, symbol_pattern
from lazyformer_fairseq.errors import UserError

# Characters. Versions of sentencepiece number the characters of a word with 16 bits and refuse a longer one. Training
# uses the beginning of such a word (a text in a script without spaces, say).
LONGEST_TRAINING_WORD = 60_000
LONGEST_TRAINING_LINE = 1 << 20  # bytes; sentencepiece skips what is longer, by default 4192
THREADS = 1  # their number is recorded in the model, whose bytes must be the same on every machine


def train_model(word_counts: Iterable[tuple[str, int]], vocab_size: int, settings: TextSettings) -> bytes:
    """The bytes of a sentencepiece BPE model. Same counts, same bytes, whatever their order.

    Args:
        word_counts: normalised words, each once; symbols in them are left out.
        vocab_size: size of the dictionary, all symbols included.

    Raises:
        UserError: no word, or a vocabulary too large or too small for them.
    """
    symbols_beside_pieces = len(FIRST_SYMBOLS) - 1 + len(settings.special_tokens) + 1  # sentencepiece counts <unk>
    if vocab_size <= symbols_beside_pieces:
        raise UserError(f"vocabulary of {vocab_size}: too small, the symbols beside the text's pieces alone are more")
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
    """``word TAB count``, without what reads like a symbol, in one order."""
    symbol = symbol_pattern(settings)
    for word, count in sorted(word_counts, key=lambda pair: (-pair[1], pair[0])):
        for part in symbol.split(word)[0::2]:
            if part:
                yield f"{part[:LONGEST_TRAINING_WORD]}\t{count}"


def _explain(error: RuntimeError, vocab_size: int, symbols_beside_pieces: int) -> Exception:
    """Puts sentencepiece's failures that the user can fix in words; returns any other unchanged."""
    message = str(error)
    if found := re.search(r"set it to a value <= (\d+)", message):
        largest = int(found[1]) + symbols_beside_pieces
        return UserError(f"vocabulary of {vocab_size}: too large for this text; give at most {largest}, or more text")
    if found := re.search(r"smaller than required_chars\. \d+ vs (\d+)", message):
        smallest = int(found[1]) + symbols_beside_pieces
        return UserError(
            f"vocabulary of {vocab_size}: too small for the characters of this text; give at least {smallest}"
        )
    if "sentences_.empty()" in message or "all_chars_count" in message:
        return UserError("no text to train the tokenizer on: every sentence is empty")
    return error
