"""Tiny tokenizers of other models, as their folders hold them; made by the library `tokenizers`."""

import json
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any, Optional

import pytest
from helpers import toy_texts, train_tokenizer
from tiny_berts import write_byte_level, write_word_pieces

from lazyformer_fairseq.data.text.interface import TextTokenizer
from lazyformer_fairseq.data.text.library_tokenizer import adopt_tokenizer
from lazyformer_fairseq.data.text.normalisation import TextSettings

tokenizers = pytest.importorskip("tokenizers", reason="needs the extra huggingface")
models, normalizers, pre_tokenizers, trainers = (
    getattr(tokenizers, name) for name in ("models", "normalizers", "pre_tokenizers", "trainers")
)

BERT_SYMBOLS = ["[PAD]", "[unused0]", "[unused1]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]  # at odd places, as BERT's are
ROBERTA_SYMBOLS = ["<s>", "<pad>", "</s>", "<unk>"]


@cache  # the library's trainer breaks ties by chance
def word_piece_vocabulary(
    lower_case: bool = True, size: int = 150, texts: Optional[Sequence[str]] = None
) -> dict[str, int]:
    library = tokenizers.Tokenizer(models.WordPiece(unk_token="[UNK]"))
    library.normalizer = normalizers.BertNormalizer(lowercase=lower_case)
    library.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    trainer = trainers.WordPieceTrainer(vocab_size=size, special_tokens=BERT_SYMBOLS, show_progress=False)
    library.train_from_iterator(texts or toy_texts(60), trainer)
    return library.get_vocab()


@cache
def byte_level_parts(
    size: int = 330, texts: Optional[Sequence[str]] = None
) -> tuple[dict[str, int], list[tuple[str, str]]]:
    """Vocabulary and merges, ``<mask>`` last."""
    library = tokenizers.Tokenizer(models.BPE())
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=ROBERTA_SYMBOLS,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    library.train_from_iterator(texts or toy_texts(60), trainer)
    vocabulary = library.get_vocab()
    merges = json.loads(library.to_str())["model"]["merges"]
    return {**vocabulary, "<mask>": len(vocabulary)}, [tuple(pair) for pair in merges]


def write_bert_files(folder: Path, lower_case: bool = True, vocabulary: Any = None, **options: Any) -> Path:
    """A folder with tokenizer.json and tokenizer_config.json, as BERTs have it. Returns `folder`."""
    folder.mkdir(parents=True)
    write_word_pieces(folder, vocabulary or word_piece_vocabulary(lower_case))
    options = {"do_lower_case": lower_case, **options}
    (folder / "tokenizer_config.json").write_text(json.dumps(options))
    return folder


def write_roberta_files(folder: Path, parts: Any = None, **options: Any) -> Path:
    """A folder with tokenizer.json, as RoBERTas have it. Returns `folder`."""
    folder.mkdir(parents=True)
    write_byte_level(folder, *(parts or byte_level_parts()))
    if options:
        (folder / "tokenizer_config.json").write_text(json.dumps(options))
    return folder


# Moses splits and normalises these, moves a quote, lower-cases; a letter with an accent of its own; no-break spaces.
ODD = (
    "He said “Well…” — the \"U.S.,\" isn't  A\u0301gnes' 1\u00a0000\u00a0000, (5%) Müller-Straße 12;\t«İstanbul» "
    "😀 end."
)
SIZES = {"ours": 80, "word piece": 120, "byte-level BPE": 330}


def trained_on_odd(algorithm: str, folder: Path) -> TextTokenizer:
    """A tokenizer of ours, WordPiece or byte-level BPE, trained on ODD."""
    if algorithm == "ours":
        return train_tokenizer(folder / "tokenizer", [ODD] * 3, SIZES[algorithm], TextSettings(character_coverage=1.0))
    if algorithm == "word piece":
        write_bert_files(folder / "theirs", vocabulary=word_piece_vocabulary(size=SIZES[algorithm], texts=(ODD,) * 3))
    else:
        write_roberta_files(folder / "theirs", byte_level_parts(SIZES[algorithm], (ODD,) * 3))
    return adopt_tokenizer(folder / "theirs", folder / "tokenizer")
