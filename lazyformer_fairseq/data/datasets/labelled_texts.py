"""Examples of known size in batches that leave none out, and encoded texts with a class or a score each."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Optional

import numpy as np
import torch
from torch.utils.data import Dataset

from lazyformer_fairseq.data.batches import batch_by_size, pad_right
from lazyformer_fairseq.errors import UserError

# The texts in a training batch differ in length by about this share. Without jitter, long texts would meet in nearly
# the same batches in every epoch. With it, batches of 32 texts of CoLA, RTE, STS-B, SST-2 and MRPC have 7 to 10%
# padding; in random order they would have 33 to 66%.
LENGTH_JITTER = 0.1


class SizedDataset(Dataset):
    """A dataset that knows the size of each example before it reads it.

    Attributes:
        sizes: number of tokens per example, (examples,).
        epoch: the epoch that was begun; everything random depends only on it and a seed.
    """

    sizes: np.ndarray
    epoch: int = 1

    def __len__(self) -> int:
        return len(self.sizes)

    def num_tokens(self, index: int) -> int:
        """Return the number of tokens in an example."""
        return int(self.sizes[index])

    def num_tokens_vec(self, indices: np.ndarray) -> np.ndarray:
        """Return the number of tokens in each of the examples."""
        return self.sizes[indices]

    size = num_tokens

    def set_epoch(self, epoch: int) -> None:
        """Begin an epoch."""
        self.epoch = epoch

    def filter_indices_by_size(self, indices: np.ndarray, max_sizes: int) -> tuple[np.ndarray, list[int]]:
        """Return all `indices`, and an empty list of those that are left out.

        Tasks cut their examples, so an example that is too long for the model or a batch means that options conflict.
        fairseq would train without it, and stop at the first validation.

        Raises:
            UserError: an example has more than `max_sizes` tokens.
        """
        too_long = int((self.sizes[indices] > max_sizes).sum())
        if too_long:
            raise UserError(
                f"{too_long} of {len(indices)} examples have more than {max_sizes} tokens, the longest "
                f"{self.sizes.max()}; raise --max-positions (of the model) and --max-tokens (of a batch) to this "
                "length or, in pre-training, lower --tokens-per-sample"
            )
        return indices, []

    def batch_by_size(
        self,
        indices: np.ndarray,
        max_tokens: Optional[int] = None,
        max_sentences: Optional[int] = None,
        required_batch_size_multiple: int = 1,  # noqa: ARG002  fairseq passes it
    ) -> list[np.ndarray]:
        """Return batches that include every example, whatever `required_batch_size_multiple` is.

        fairseq drops up to seven examples at the end if they do not fill a multiple of it (8 by default). That would
        waste training text, and a metric over the whole split must not miss them.
        """
        return batch_by_size(indices, self.num_tokens_vec(indices), max_tokens, max_sentences)


def by_jittered_length(sizes: np.ndarray, seed: Optional[tuple[int, ...]]) -> np.ndarray:
    """Return the order of examples by length, which random factors may change slightly.

    Args:
        sizes: number of tokens per example, (examples,).
        seed: determines the factors; None for no factors.
    """
    lengths = sizes.astype(np.float64)
    if seed is not None:
        lengths *= np.random.default_rng(seed).uniform(1 - LENGTH_JITTER, 1 + LENGTH_JITTER, size=len(sizes))
    return np.argsort(lengths, kind="stable")


def collate_sources(samples: list[dict[str, Any]], pad: int, width: int = 0) -> dict[str, Any]:
    """Collate samples into a batch without targets.

    It has `id` (B,) and `net_input` with `src_tokens` (B, T), padded on the right.

    Args:
        samples: samples with an `id` and a `source`, ids (T,).
        pad: id of ``<pad>``.
        width: T; by default the length of the longest sample.
    """
    tokens = pad_right([sample["source"] for sample in samples], pad, width)
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


def sizes_of(inputs: Sequence[np.ndarray]) -> np.ndarray:
    """Return the number of ids of each input, int64 (N,), without reading inputs on disk."""
    if (sizes := getattr(inputs, "sizes", None)) is not None:
        return sizes
    return np.array([len(ids) for ids in inputs], np.int64)


@dataclass(eq=False, repr=False)
class LabelledTextsDataset(SizedDataset):
    """A dataset of texts or pairs as ids, ready for the model, and their targets.

    Args:
        inputs: ids of each example, integer arrays (T,); a sequence on disk has `sizes`.
        targets: a class (int64) or a score (float64) per example, (N,), or 0 or 1 per label, (N, L); None if there are
            none.
        pad: id of ``<pad>``.
        shuffle: whether to compose batches anew in each epoch; otherwise they are always the same, ordered by length.
        seed: the composition depends only on it and the epoch.
        types_after: id of ``</s>`` for models with token types; None for others.
        marks_before: id of ``</s>`` for models that are told which tokens all others see; None for others.
        in_a_row: whether models compute a batch as one row of texts, without padding.
    """

    inputs: Sequence[np.ndarray]
    targets: Optional[np.ndarray]
    pad: int
    shuffle: bool
    seed: int = 1
    types_after: Optional[int] = None
    marks_before: Optional[int] = None
    in_a_row: bool = False

    def __post_init__(self) -> None:
        self.sizes = sizes_of(self.inputs)

    def __getitem__(self, index: int) -> dict:
        example = {
            "id": int(index),
            "source": torch.from_numpy(np.asarray(self.inputs[index], dtype=np.int64)),
        }
        if self.targets is not None:
            example["target"] = torch.tensor(self.targets[index])
        return example

    def collater(self, samples: list[dict]) -> dict:
        """Collate samples into a batch.

        It has `id` (B,), `net_input` with `src_tokens` (B, T), padded on the right, and `target` (B,) if known. For
        models with token types, `net_input` also has `token_types` (B, T); for models that are told which tokens all
        others see, it has `global_positions` (B, T).
        """
        if not samples:
            return {}
        batch = collate_sources(samples, self.pad)
        net_input = batch["net_input"]
        if self.types_after is not None:
            net_input["token_types"] = token_types_of(net_input["src_tokens"], self.types_after, self.pad)
        if self.marks_before is not None:
            net_input["global_positions"] = first_text_of(net_input["src_tokens"], self.marks_before)
        if self.in_a_row:
            net_input["documents"] = [[len(sample["source"])] for sample in samples]
        if self.targets is not None:
            batch |= self.collate_targets(samples, net_input["src_tokens"].size(1))
        return batch

    def collate_targets(self, samples: list[dict], width: int) -> dict[str, Any]:  # noqa: ARG002  other targets need it
        """Return the targets of a batch whose inputs have `width` ids each, padding included."""
        return {"target": torch.stack([sample["target"] for sample in samples])}

    def ordered_indices(self) -> np.ndarray:
        """Return the order by length, which a random factor changes slightly in each epoch if `shuffle` is set.

        fairseq cuts batches from this order and, in training, shuffles the batches itself.
        """
        return by_jittered_length(self.sizes, (self.seed, self.epoch) if self.shuffle else None)

    @property
    def can_reuse_epoch_itr_across_epochs(self) -> bool:
        """False if the composition of batches depends on the epoch."""
        return not self.shuffle


def first_text_of(tokens_BT: torch.Tensor, eos: int) -> torch.Tensor:
    """Return a mask (B, T) of the tokens that all others see: the first text of a pair with its ``<s>``, else ``<s>``.

    Longformer marks questions in this way and, for classification, the first token (Beltagy et al., 2020, section 5).
    """
    is_end = tokens_BT.eq(eos)
    is_pair = is_end.sum(-1, keepdim=True) > 1
    is_first = torch.arange(tokens_BT.size(1), device=tokens_BT.device) == 0
    return torch.where(is_pair, is_end.cumsum(-1) == 0, is_first)


def token_types_of(tokens_BT: torch.Tensor, eos: int, pad: int) -> torch.Tensor:
    """Return the type of each token, int64 (B, T): 1 after the first ``</s>``, else 0; padding has type 0.

    BERT was trained in this way: ``[CLS] a [SEP]`` has type 0, and ``b [SEP]`` type 1 (Devlin et al., 2019, figure 2).
    """
    is_end = tokens_BT.eq(eos).long()
    is_second = (is_end.cumsum(-1) - is_end).gt(0)
    return (is_second & tokens_BT.ne(pad)).long()
