"""Sentences with a tag for each word: the places of words among the ids, and batches."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from lazyformer_fairseq.data.datasets.labelled_texts import LabelledTextsDataset
from lazyformer_fairseq.data.datasets.question_windows import tokens_of, without_spaces
from lazyformer_fairseq.data.text.interface import TextTokenizer

NOWHERE = 1 << 30  # the place of a word without a token, beyond every input


def first_tokens(tokenizer: TextTokenizer, words: Sequence[str]) -> np.ndarray:
    """Return the place of each word's first token in the input ``<s> words </s>``, int64 (W,)."""
    text = " ".join(words)
    spans = without_spaces(tokenizer.encode_with_offsets(text)[1], text)
    places = np.full(len(words), NOWHERE)
    start = 0
    for number, word in enumerate(words):
        end = start + len(word)
        tokens = tokens_of(spans, start, end)
        if tokens is not None:
            places[number] = 1 + tokens[0]  # after <s>
        start = end + 1
    return places


class TaggedWordsDataset(LabelledTextsDataset):
    """A dataset of sentences as ids; the target of each has the place and the tag of each word in turn, (2 W,)."""

    def collate_targets(self, samples: list[dict], width: int) -> dict[str, Any]:
        """Return the targets of a batch.

        These are `target`, the tags of the batch's words (W,); `places`, the places of their first tokens among the
        B * T tokens, or -1 for a word that is cut off; and `words`, the number of words in each sentence.
        """
        places = []
        for row, sample in enumerate(samples):
            in_row = sample["target"][::2].long()
            places.append((in_row + row * width).where(in_row < len(sample["source"]) - 1, -1))
        return {
            "target": torch.cat([sample["target"][1::2].long() for sample in samples]),
            "places": torch.cat(places),
            "words": list(map(len, places)),
        }
