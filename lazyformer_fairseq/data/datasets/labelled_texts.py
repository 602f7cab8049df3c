"""Datasets that are batched by size without dropping examples, such as encoded texts with labels or scores."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Optional

import numpy as np
import torch
from torch.utils.data import Dataset

from lazyformer_fairseq.data.batches import batch_by_size, pad_right
from lazyformer_fairseq.errors import UserError

# Relative noise applied to lengths before sorting. Without it, long texts would be batched with nearly the same texts
# in every epoch. With it, batches of 32 texts from CoLA, RTE, STS-B, SST-2 and MRPC contain 7 to 10% padding; in random
# order they would contain 33 to 66%.
LENGTH_JITTER = 0.1


class SizedDataset(Dataset):
    """A dataset with known example sizes, which are available without reading the examples.

    Attributes:
        sizes: number of tokens per example, (examples,).
        epoch: current epoch, which together with a seed determines all randomness.
    """

    sizes: np.ndarray
    epoch: int = 1

    def __len__(self) -> int:
        return len(self.sizes)

    def num_tokens(self, index: int) -> int:
        """Return the number of tokens in an example."""
        return int(self.sizes[index])

    def num_tokens_vec(self, indices: np.ndarray) -> np.ndarray:
        """Return the number of tokens in each example."""
        return self.sizes[indices]

    size = num_tokens

    def set_epoch(self, epoch: int) -> None:
        """Start an epoch."""
        self.epoch = epoch

    def filter_indices_by_size(self, indices: np.ndarray, max_sizes: int) -> tuple[np.ndarray, list[int]]:
        """Return all `indices` and an empty list of ignored ones.

        Tasks truncate their examples, so an example that is too long for the model or a batch indicates conflicting
        options. fairseq would skip it during training and fail at the first validation.

        Raises:
            UserError: an example has more than `max_sizes` tokens.
        """
        too_long = int((self.sizes[indices] > max_sizes).sum())
        if too_long:
            raise UserError(
                f"{too_long} of {len(indices)} examples have more than {max_sizes} tokens; the longest has "
                f"{self.sizes.max()}. Increase --max-positions (of the model) and --max-tokens (per batch) to this "
                "length or, in pre-training, decrease --tokens-per-sample"
            )
        return indices, []

    def batch_by_size(
        self,
        indices: np.ndarray,
        max_tokens: Optional[int] = None,
        max_sentences: Optional[int] = None,
        required_batch_size_multiple: int = 1,  # noqa: ARG002  fairseq passes it
    ) -> list[np.ndarray]:
        """Group all examples into batches, ignoring `required_batch_size_multiple`.

        fairseq drops up to seven examples at the end if they do not fill a multiple of this number (8 by default).
        Dropping them would waste training text and exclude examples from metrics.
        """
        return batch_by_size(indices, self.num_tokens_vec(indices), max_tokens, max_sentences)


def by_jittered_length(sizes: np.ndarray, seed: Optional[tuple[int, ...]]) -> np.ndarray:
    """Return the indices that sort examples by length, optionally with random noise.

    Args:
        sizes: number of tokens per example, (examples,).
        seed: seed of the noise; None for no noise.
    """
    lengths = sizes.astype(np.float64)
    if seed is not None:
        rng = np.random.default_rng(seed)
        lengths *= rng.uniform(1 - LENGTH_JITTER, 1 + LENGTH_JITTER, size=len(sizes))
    return np.argsort(lengths, kind="stable")


def collate_sources(samples: list[dict[str, Any]], pad: int, width: int = 0) -> dict[str, Any]:
    """Collate samples into a batch without targets.

    The batch has `id` (B,) and `net_input` with right-padded `src_tokens` (B, T).

    Args:
        samples: samples with an `id` and a `source` of ids (T,).
        pad: id of ``<pad>``.
        width: minimum of T, which is otherwise the length of the longest sample.
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
    """Return the length of each input, int64 (N,), without reading inputs from disk."""
    if (sizes := getattr(inputs, "sizes", None)) is not None:
        return sizes
    return np.array([len(ids) for ids in inputs], np.int64)


@dataclass(eq=False, repr=False)
class LabelledTextsDataset(SizedDataset):
    """A dataset of encoded texts or text pairs with optional targets.

    Args:
        inputs: token ids of each example, integer arrays (T,); a memory-mapped sequence must have `sizes`.
        targets: class indices (int64) or regression targets (float64), (N,), or a 0 or 1 per label, (N, L); None
            if there are no labels.
        pad: id of ``<pad>``.
        shuffle: whether to form new batches in each epoch. If False, the batches are always the same, sorted by length.
        seed: random seed, which together with the epoch determines the batches.
        token_type_eos: id of ``</s>`` for models with token types; None for others.
        global_attention_eos: id of ``</s>`` for models with global attention; None for others.
        concatenates_texts: whether the model concatenates the texts of a batch into one row, without padding.
    """

    inputs: Sequence[np.ndarray]
    targets: Optional[np.ndarray]
    pad: int
    shuffle: bool
    seed: int = 1
    token_type_eos: Optional[int] = None
    global_attention_eos: Optional[int] = None
    concatenates_texts: bool = False

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

        The batch has `id` (B,), `net_input` with right-padded `src_tokens` (B, T) and, if there are labels, `target`
        (B,). For models with token types, `net_input` also has `token_types` (B, T); for models with global attention,
        it has `global_positions` (B, T).
        """
        if not samples:
            return {}
        batch = collate_sources(samples, self.pad)
        net_input = batch["net_input"]
        if self.token_type_eos is not None:
            net_input["token_types"] = token_types_of(net_input["src_tokens"], self.token_type_eos, self.pad)
        if self.global_attention_eos is not None:
            net_input["global_positions"] = first_text_of(net_input["src_tokens"], self.global_attention_eos)
        if self.concatenates_texts:
            net_input["documents"] = [[len(sample["source"])] for sample in samples]
        if self.targets is not None:
            batch |= self.collate_targets(samples, net_input["src_tokens"].size(1))
        return batch

    def collate_targets(self, samples: list[dict], width: int) -> dict[str, Any]:  # noqa: ARG002  other targets need it
        """Return the targets of a batch; `width` is the padded length of its inputs."""
        return {"target": torch.stack([sample["target"] for sample in samples])}

    def ordered_indices(self) -> np.ndarray:
        """Return the sample indices sorted by length, with random noise in each epoch if `shuffle` is set.

        fairseq forms batches in this order and, during training, shuffles the batches.
        """
        return by_jittered_length(self.sizes, (self.seed, self.epoch) if self.shuffle else None)

    @property
    def can_reuse_epoch_itr_across_epochs(self) -> bool:
        """False if the batches depend on the epoch."""
        return not self.shuffle


def first_text_of(tokens_BT: torch.Tensor, eos: int) -> torch.Tensor:
    """Return a mask (B, T) of the tokens with global attention: ``<s>`` and, for a pair, its first text.

    Longformer uses global attention on the question or, for classification, on the first token (Beltagy et al., 2020,
    section 5).
    """
    is_end = tokens_BT.eq(eos)
    is_pair = is_end.sum(-1, keepdim=True) > 1
    is_first = torch.arange(tokens_BT.size(1), device=tokens_BT.device) == 0
    return torch.where(is_pair, is_end.cumsum(-1) == 0, is_first)


def token_types_of(tokens_BT: torch.Tensor, eos: int, pad: int) -> torch.Tensor:
    """Return token types, int64 (B, T): 1 after the first ``</s>``, and 0 before it and for padding.

    This matches BERT, where ``[CLS] a [SEP]`` has type 0 and ``b [SEP]`` has type 1 (Devlin et al., 2019, figure 2).
    """
    is_end = tokens_BT.eq(eos).long()
    is_second = (is_end.cumsum(-1) - is_end).gt(0)
    return (is_second & tokens_BT.ne(pad)).long()
