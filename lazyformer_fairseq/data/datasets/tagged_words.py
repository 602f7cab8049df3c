"""Datasets for tagging tasks: alignment of words with token positions, and batching."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from lazyformer_fairseq.data.datasets.labelled_texts import LabelledTextsDataset
from lazyformer_fairseq.data.datasets.question_windows import tokens_of, without_spaces
from lazyformer_fairseq.data.text.interface import TextTokenizer

NO_TOKEN = 1 << 30  # position of words without a token, larger than any input


def first_tokens(tokenizer: TextTokenizer, words: Sequence[str]) -> np.ndarray:
    """Return the position of each word's first token in the input ``<s> words </s>``, int64 (W,)."""
    text = " ".join(words)
    spans = without_spaces(tokenizer.encode_with_offsets(text)[1], text)
    places = np.full(len(words), NO_TOKEN)
    start = 0
    for number, word in enumerate(words):
        end = start + len(word)
        tokens = tokens_of(spans, start, end)
        if tokens is not None:
            places[number] = 1 + tokens[0]  # after <s>
        start = end + 1
    return places


class TaggedWordsDataset(LabelledTextsDataset):
    """A dataset of tagged sentences; each target interleaves the positions and tags of the words, (2 W,)."""

    def collate_targets(self, samples: list[dict], width: int) -> dict[str, Any]:
        """Return the targets of a batch.

        These are `target`, the tags of all words in the batch (W,); `places`, the index of each word's first token
        among the batch's B * T tokens, or -1 for a truncated word; and `words`, the number of words per sentence.
        """
        places = []
        for row, sample in enumerate(samples):
            in_row = sample["target"][::2].long()
            is_kept = in_row < len(sample["source"]) - 1
            places.append((in_row + row * width).where(is_kept, -1))
        tags = [sample["target"][1::2].long() for sample in samples]
        return {
            "target": torch.cat(tags),
            "places": torch.cat(places),
            "words": list(map(len, places)),
        }
