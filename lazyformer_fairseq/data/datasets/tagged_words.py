"""Sentences with a tag for each word: the words' places among the ids, and batches."""

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
    """Ids of sentences; the target of each is the place and the tag of its first word, of its second, ...: (2 W,)."""

    def collate_targets(self, samples: list[dict], width: int) -> dict[str, Any]:
        """Return `target`, the tags of the batch's words (W,), and `places` of their first tokens among the B * T.

        A place is -1 where the word is cut off. `words` has the number of words of each sentence.
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
