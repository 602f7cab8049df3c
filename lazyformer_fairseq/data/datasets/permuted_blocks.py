"""Blocks of sentences for masked and permuted language modeling.

The tokens of a block are permuted, and the last ones are predicted autoregressively (MPNet: Song et al., 2020, arXiv
2004.09297, section 2.3). For a permuted text x with p tokens to predict, the model reads [x; M; M], where each M is
a group of masks at the positions of these p tokens. The first group represents tokens that are not predicted yet, which
gives every prediction access to all positions of the text; the second group makes the predictions. As in the published
code (github.com/microsoft/MPNet, ``masked_permutation_lm.py``), both groups consist of 80% <mask>, 10% random tokens
and 10% original tokens, and the permutation does not keep words together. Unlike the published code, this one never
predicts special symbols, such as <s> and padding, and its whole-word masking never splits a word.
"""

from dataclasses import dataclass
from typing import Any, Optional

import numpy as np
import torch

from lazyformer_fairseq.data.batches import pad_right
from lazyformer_fairseq.data.datasets.masked_blocks import FullSentencesDataset

ALWAYS = 2**30  # larger than every turn


def permute(
    tokens: np.ndarray,
    inputs: np.ndarray,
    order: np.ndarray,
    predicted: int,
    only: Optional[int] = None,
) -> dict[str, np.ndarray]:
    """Build the model input for a text (T,) in which the last P positions of a permutation are predicted.

    The length S of the input is T + 2 P, or T + P if `only` is set.

    Args:
        tokens: ids (T,).
        inputs: the same ids, with replacements at the positions to predict.
        order: permutation of the positions, (T,).
        predicted: number P of positions to predict.
        only: id of ``<mask>`` for XLNet's input, which has ``<mask>`` at every prediction and no masks for tokens that
            are not predicted yet (Yang et al., 2019, section 2.2); None for MPNet's input.

    Returns:
        The ids `source` (S,); the position of each id, `positions` (S,); and `turns` (3, S), as described in
        :mod:`~lazyformer_fairseq.modules.networks.permuted`.
    """
    last = order[len(order) - predicted :]
    step = np.arange(1, predicted + 1)
    turn_of_text = np.concatenate([np.zeros(len(order) - predicted, np.int64), step])
    always = np.full_like(step, ALWAYS)
    source = [tokens[order]]
    positions = [order]
    turns = [np.stack([turn_of_text, turn_of_text, np.full(len(order), ALWAYS)])]
    if only is not None:
        asked = np.full_like(step, only)
    else:
        asked = inputs[last]
        source.append(asked)
        positions.append(last)
        turns.append(np.stack([0 * step, 0 * step, step]))
    source.append(asked)
    positions.append(last)
    turns.append(np.stack([step - 1, always, always]))
    return {
        "source": np.concatenate(source),
        "positions": np.concatenate(positions),
        "turns": np.hstack(turns),
    }


@dataclass(eq=False, repr=False)
class PermutedBlocksDataset(FullSentencesDataset):
    """A dataset of blocks of full sentences with a new permutation in each epoch.

    See :class:`~.masked_blocks.FullSentencesDataset` for the other arguments. `sizes` excludes the masks appended to
    the text. A sample's targets are at its last positions, which make the predictions.

    Args:
        permuted_only: see :func:`permute`.
    """

    permuted_only: bool = False

    @property
    def most(self) -> int:
        """Maximum number of tokens per row, including the text and both groups of masks."""
        return 3 * self.tokens_per_sample

    def __getitem__(self, index: int) -> dict[str, Any]:
        tokens = self.block(index)
        pad = self.masking.pad_index
        inputs, targets, _ = self.masking.apply(tokens, self.seed, self.epoch, index)
        rng = np.random.default_rng((self.seed, self.epoch, index, 1))
        is_predicted = targets != pad
        given = rng.permutation(np.flatnonzero(~is_predicted))
        asked = rng.permutation(np.flatnonzero(is_predicted))
        order = np.concatenate([given, asked])
        predicted = len(asked)

        only = None
        if self.permuted_only:
            only = self.masking.mask_index
        sample = permute(tokens, inputs, order, predicted, only)
        target = np.full_like(sample["source"], pad)
        target[len(target) - predicted :] = tokens[asked]
        sample["target"] = target
        arrays = {name: torch.from_numpy(array) for name, array in sample.items()}
        return {"id": index, **arrays, "tokens": len(tokens)}

    def collater(self, samples: list[dict[str, Any]]) -> dict[str, Any]:
        """Collate samples into a batch of masked blocks, with `positions` and `turns` in `net_input`."""
        batch = super().collater(samples)
        if samples:
            time = batch["target"].size(1)
            positions = pad_right([sample["positions"] for sample in samples], 0, time)
            turns = []
            for row in range(3):
                turns_of_row = [sample["turns"][row] for sample in samples]
                turns.append(pad_right(turns_of_row, 0, time))
            batch["net_input"] |= {
                "positions": positions,
                "turns": torch.stack(turns, 1),
            }
            batch["ntokens"] = sum(sample["tokens"] for sample in samples)
        return batch
