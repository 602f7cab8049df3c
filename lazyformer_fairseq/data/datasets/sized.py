"""What the datasets share: examples of known size, in batches that leave none out."""

from typing import Any, Optional

import numpy as np
import torch
from fairseq.data import FairseqDataset, data_utils

from lazyformer_fairseq.errors import UserError

# A training batch holds texts whose lengths differ by about this share: with no jitter, long texts would meet in
# nearly the same batches in every epoch. Batches of 32 of CoLA, RTE, STS-B, SST-2 and MRPC are then 7 to 10% padding;
# in random order they would be 33 to 66%.
LENGTH_JITTER = 0.1


class SizedDataset(FairseqDataset):
    """A dataset that knows the size of each example before it reads it.

    Attributes:
        sizes: tokens an example, (number of examples,).
        epoch: as fairseq set it; all that is random depends on it and a seed alone.
    """

    sizes: np.ndarray
    epoch: int = 1

    def __len__(self) -> int:
        return len(self.sizes)

    def num_tokens(self, index: int) -> int:
        return int(self.sizes[index])

    def num_tokens_vec(self, indices: np.ndarray) -> np.ndarray:
        return self.sizes[indices]

    size = num_tokens

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def filter_indices_by_size(self, indices: np.ndarray, max_sizes: int) -> tuple[np.ndarray, list[int]]:
        """All `indices`, and an empty list of those left out.

        Tasks cut their examples, so one that is too long for the model or a batch means that options do not fit
        together. fairseq would train without it, then stop at the first validation.

        Raises:
            UserError: an example has more than `max_sizes` tokens.
        """
        too_long = int((self.sizes[indices] > max_sizes).sum())
        if too_long:
            raise UserError(
                f"{too_long} of {len(indices)} examples have more than {max_sizes} tokens, "
                f"the longest {self.sizes.max()}; "
                "give as many --max-positions (of the model) and --max-tokens (of a batch), or, in pre-training, fewer "
                "--tokens-per-sample"
            )
        return indices, []

    def batch_by_size(self, indices, max_tokens=None, max_sentences=None, required_batch_size_multiple=1):
        """Batches that hold every example, whatever `required_batch_size_multiple` says.

        fairseq drops up to seven at the end where they do not fill a multiple of it (8 by default). That would waste
        training text, and a metric over the whole split must not miss them.
        """
        return super().batch_by_size(indices, max_tokens, max_sentences)


def by_jittered_length(sizes: np.ndarray, seed: Optional[tuple[int, ...]]) -> np.ndarray:
    """The order of examples by length, or by a length that a random factor changes a little.

    Args:
        sizes: tokens an example, (examples,).
        seed: the factors depend on it alone; None for none.
    """
    lengths = sizes.astype(np.float64)
    if seed is not None:
        lengths *= np.random.default_rng(seed).uniform(1 - LENGTH_JITTER, 1 + LENGTH_JITTER, size=len(sizes))
    return np.argsort(lengths, kind="stable")


def collate_sources(samples: list[dict[str, Any]], pad: int, width: Optional[int] = None) -> dict[str, Any]:
    """A batch of all but targets: `id` (B,), `net_input` with `src_tokens` (B, T), padded on the right.

    Args:
        samples: each with its `id` and `source`, ids (T,).
        pad: id of ``<pad>``.
        width: T; by default that of the longest.
    """
    tokens = data_utils.collate_tokens([sample["source"] for sample in samples], pad, pad_to_length=width)
    lengths = torch.tensor([len(sample["source"]) for sample in samples])
    return {
        "id": torch.tensor([sample["id"] for sample in samples]),
        "nsentences": len(samples),
        "ntokens": int(lengths.sum()),
        "net_input": {
            "src_tokens": tokens,
            "src_lengths": lengths,
            "has_padding": bool((lengths != tokens.size(1)).any()),
        },
    }
