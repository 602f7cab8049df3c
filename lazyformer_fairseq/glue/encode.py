"""Examples of a task as ids, with the counts that say how well the tokenizer fits them."""

from dataclasses import dataclass
from typing import Optional

import numpy as np
from tqdm import tqdm

from lazyformer_fairseq.data.tokenizer import Tokenizer
from lazyformer_fairseq.glue.tsv import SplitFile


@dataclass(frozen=True)
class EncodedSplit:
    """Inputs of the model (int32 arrays), how many had to be cut, and which share of their tokens is ``<unk>``."""

    inputs: list[np.ndarray]
    truncated: int
    unknown_share: float


def encode_split(tokenizer: Tokenizer, split: SplitFile, max_length: Optional[int]) -> EncodedSplit:
    """Encodes the examples of a file in their order as ``<s> a </s>`` or ``<s> a </s> </s> b </s>``.

    Args:
        max_length: of an input, all ids counted; longer ones are cut, the longer text first; None cuts none.
    """
    inputs = []
    truncated = tokens = unknown = 0
    for example in tqdm(split.examples, desc=f"encode {split.path}", delay=2, disable=None, leave=False):
        ids = tokenizer.build_input(*example.texts)
        tokens += len(ids)
        unknown += ids.count(tokenizer.dictionary.unk())
        if max_length is not None and len(ids) > max_length:
            truncated += 1
            ids = tokenizer.build_input(*example.texts, max_length=max_length)
        inputs.append(np.array(ids, dtype=np.int32))
    return EncodedSplit(inputs, truncated, unknown / max(tokens, 1))
