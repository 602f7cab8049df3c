"""Encodes a task's examples as ids, and counts how well the tokenizer fits them."""

import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from typing import Optional

import numpy as np
from tqdm import tqdm

from lazyformer_fairseq.child_process import end_with_parent
from lazyformer_fairseq.data.glue.tsv import SplitFile
from lazyformer_fairseq.data.text.interface import TextTokenizer, cut_input

WORTH_A_PROCESS = 2000  # examples


@dataclass(frozen=True)
class EncodedSplit:
    """Inputs of the model (int32 arrays), and counts taken before any was cut.

    Attributes:
        truncated: inputs that had to be cut.
        tokens: of all inputs, ``<s>`` and ``</s>`` included.
        unknown_tokens: those that are ``<unk>``.
        words: as the tokenizer divides the text, special tokens included.
        unknown_words: those of which at least one piece is ``<unk>``.
    """

    inputs: list[np.ndarray]
    truncated: int
    tokens: int
    unknown_tokens: int
    words: int
    unknown_words: int

    @property
    def unknown_share(self) -> float:
        """Share of the tokens."""
        return self.unknown_tokens / max(self.tokens, 1)

    @property
    def unknown_word_share(self) -> float:
        return self.unknown_words / max(self.words, 1)


def encode_split(
    tokenizer: TextTokenizer, split: SplitFile, max_length: Optional[int], processes: int = 1
) -> EncodedSplit:
    """Encodes the examples of a file in their order as the tokenizer builds inputs.

    Args:
        max_length: of an input, all ids counted; longer ones are cut, the longer text first; None cuts none.
        processes: how many encode side by side; the result does not depend on it.
    """
    texts = [example.texts for example in split.examples]
    progress = tqdm(total=len(texts), desc=f"encode {split.path}", unit=" rows", delay=2, disable=None, leave=False)
    whole = []
    with progress:
        for ids in _encoded(tokenizer, texts, min(processes, 1 + len(texts) // WORTH_A_PROCESS)):
            whole.append(ids)
            progress.update()
    words, unknown_words, unknown_tokens = _count(tokenizer, whole)
    eos = tokenizer.special.eos
    return EncodedSplit(
        whole if max_length is None else [cut_input(ids, max_length, eos) for ids in whole],
        sum(max_length is not None and len(ids) > max_length for ids in whole),
        sum(map(len, whole)),
        unknown_tokens,
        words,
        unknown_words,
    )


_tokenizer: Optional[TextTokenizer] = None  # of a worker


def _encoded(tokenizer: TextTokenizer, texts: list[tuple[str, ...]], processes: int):
    global _tokenizer
    _tokenizer = tokenizer
    if processes < 2:
        yield from map(_encode, texts)
        return
    forked = multiprocessing.get_context("fork")  # so workers have the tokenizer already
    pool = ProcessPoolExecutor(processes, forked, initializer=end_with_parent)
    try:
        yield from pool.map(_encode, texts, chunksize=200)
    finally:
        pool.shutdown(cancel_futures=True)


def _encode(texts: tuple[str, ...]) -> np.ndarray:
    return np.array(_tokenizer.build_input(*texts), dtype=np.int32)


def _count(tokenizer: TextTokenizer, inputs: list[np.ndarray]) -> tuple[int, int, int]:
    """Words, words with an unknown piece, unknown tokens."""
    ids = np.concatenate(inputs)
    unknown = ids == tokenizer.special.unk
    word = np.cumsum(tokenizer.starts_of_words(ids))
    return int(word[-1]), len(np.unique(word[unknown])), int(unknown.sum())
