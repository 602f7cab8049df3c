"""Token ids of labeled texts, encoded from a task's files or read from a prepared folder."""

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Optional, Union

import numpy as np

from lazyformer_fairseq.data.datasets.labelled_texts import sizes_of
from lazyformer_fairseq.data.labelled_files import SplitFile, TaskDescription, read_split
from lazyformer_fairseq.data.prepared_folder import EncodedExamples, PreparedTask, load_prepared, targets_of
from lazyformer_fairseq.data.text.interface import (
    TextTokenizer,
    cut_input,
    lacks_text,
    truncation_message,
    unknown_text_message,
)
from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.progress import Progress

logger = logging.getLogger(__name__)


def read_examples(
    task: TaskDescription,
    data: Union[str, Path],
    split: str,
    tokenizer: TextTokenizer,
    longest: Optional[int],
) -> EncodedExamples:
    """Read a task's split and log warnings about its examples.

    Args:
        task: the task's description.
        data: folder of the task's files, or a prepared folder.
        split: name of the split.
        tokenizer: the tokenizer for the task's files.
        longest: maximum number of tokens per input; longer inputs are truncated. None for no limit.
    """
    if PreparedTask.is_at(data):
        examples = load_prepared(data).read(split, longest, tokenizer.special.eos)
        most = int(sizes_of(examples.inputs).max())
        logger.info("%s/%s: %d examples of up to %d tokens", data, split, len(examples.inputs), most)
        _warn_about_truncation(examples, most, f"{data}/{split}")
        return examples
    file = read_split(task, data, split)
    for oddity in file.oddities():
        logger.warning("%s", oddity)
    inputs, counts = encode_split(tokenizer, file, longest)
    logger.info(
        "%s: %d examples, %.2f%% unknown tokens",
        file.path,
        len(inputs),
        100 * counts["unknown_token_share"],
    )
    examples = EncodedExamples(inputs, targets_of(task, file.examples), int(counts["truncated"]))
    _warn_about_truncation(examples, longest, file.path)
    return examples


def _warn_about_truncation(examples: EncodedExamples, longest: Optional[int], source: Union[str, Path]) -> None:
    """Log how many of a split's inputs were truncated to `longest` tokens, if any."""
    if examples.cut and longest is not None:
        logger.warning("%s", truncation_message(examples.cut, len(examples.inputs), longest, f"rows of {source}"))


def encode_split(
    tokenizer: TextTokenizer,
    split: SplitFile,
    max_length: Optional[int],
) -> tuple[list[np.ndarray], dict[str, float]]:
    """Encode a file's examples as model inputs, in order.

    Args:
        tokenizer: the tokenizer that builds the inputs.
        split: the file.
        max_length: maximum number of ids per input, including special tokens. Longer inputs are truncated; in a
            pair, the longer text is truncated first. None for no limit.

    Raises:
        UserError: a text of a labeled row has characters but no tokens.

    Returns:
        The inputs (one int32 array each) and the counts: the number of truncated inputs and, as counted before
        truncation, the numbers of tokens (including ``<s>`` and ``</s>``), ``<unk>`` tokens, words as split by the
        tokenizer, and words that contain ``<unk>``.
    """
    bar = Progress(split.examples, desc=f"encode {split.path}", unit=" rows", delay=2, leave=False)
    whole = [np.array(tokenizer.build_input(*example.texts), dtype=np.int32) for example in bar]
    _check_texts_have_tokens(tokenizer, split, whole)
    unknown_lines = [
        example.line
        for example, ids in zip(split.examples, whole, strict=True)
        if tokenizer.has_only_unknown_tokens(ids)
    ]
    if unknown_lines:
        message = unknown_text_message(len(unknown_lines), len(whole), unknown_lines[0])
        logger.warning("%s: %s", split.path, message)

    ids = np.concatenate(whole)
    is_unknown = ids == tokenizer.special.unk
    word = np.cumsum(tokenizer.starts_of_words(ids))
    words = int(word[-1])
    unknown_words = len(np.unique(word[is_unknown]))
    unknown = int(is_unknown.sum())
    counts = {
        "truncated": sum(max_length is not None and len(each) > max_length for each in whole),
        "tokens": len(ids),
        "unknown_tokens": unknown,
        "unknown_token_share": unknown / max(len(ids), 1),
        "words": words,
        "unknown_words": unknown_words,
        "unknown_word_share": unknown_words / max(words, 1),
    }
    if max_length is None:
        return whole, counts
    return [cut_input(each, max_length, tokenizer.special.eos) for each in whole], counts


def _check_texts_have_tokens(tokenizer: TextTokenizer, split: SplitFile, inputs: Sequence[np.ndarray]) -> None:
    for example, ids in zip(split.examples, inputs, strict=True):
        is_labelled = example.target is not None
        has_characters = all(text.strip() for text in example.texts)  # the file's reader has handled empty texts
        if is_labelled and has_characters and lacks_text(ids, tokenizer.special.eos):
            raise UserError(
                f"{split.path}, line {example.line}: a sentence contains only control characters; correct the "
                "row or remove it"
            )
