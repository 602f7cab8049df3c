"""Blocks of sentences with their tokens in a random order, of which the last ones are predicted one after the other.

This is masked and permuted language modelling (MPNet: Song et al., 2020, arXiv 2004.09297, section 2.3). For a permuted
text x whose last p tokens are to be predicted, the model reads [x; M; M], where M are masks at the places of these p
tokens. The first group of masks stands for what is not predicted yet, so that every prediction knows all places of the
text; the second group makes the predictions. As in the published code (github.com/microsoft/MPNet,
``masked_permutation_lm.py``), both groups consist of 80% <mask>, 10% other tokens and 10% the tokens themselves, and
the order of the predicted tokens does not keep words together. The published code may also predict symbols such as <s>
and padding, as well as parts of a word; here this does not happen.
"""

from dataclasses import dataclass
from typing import Any, Optional

import numpy as np
import torch

from lazyformer_fairseq.data.batches import pad_right
from lazyformer_fairseq.data.datasets.masked_blocks import FullSentencesDataset

ALWAYS = 2**30  # later than every turn


def permute(
    tokens: np.ndarray,
    inputs: np.ndarray,
    order: np.ndarray,
    predicted: int,
    only: Optional[int] = None,
) -> dict[str, np.ndarray]:
    """Return the input for one text (T,) of which the last P places in `order` are predicted; S = T + 2 P, or T + P.

    Args:
        tokens: ids (T,).
        inputs: the same ids, with replacements at the places to predict.
        order: the places in their new order, (T,).
        predicted: P, the number of places to predict.
        only: id of ``<mask>``, which then stands at every prediction, and there are no masks for what is not predicted
            yet (XLNet: Yang et al., 2019, section 2.2). None for MPNet's input.

    Returns:
        `source` (S,), the ids; `positions` (S,), the place of each id; `turns` (3, S), see
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
    """A dataset of full sentences that are permuted anew in each epoch.

    The arguments are those of :class:`~.masked_blocks.FullSentencesDataset`; `sizes` are those of the text. A sample
    has its targets at its last places, which make the predictions.

    Args:
        permuted_only: see :func:`permute`.
    """

    permuted_only: bool = False

    @property
    def most(self) -> int:
        """Largest number of tokens in a row, with the text and both groups of masks."""
        return 3 * self.tokens_per_sample

    def __getitem__(self, index: int) -> dict[str, Any]:
        tokens = self.block(index)
        pad = self.masking.pad_index
        inputs, targets, _ = self.masking.apply(tokens, self.seed, self.epoch, index)
        rng = np.random.default_rng((self.seed, self.epoch, index, 1))
        is_predicted = targets != pad
        order = np.concatenate([rng.permutation(np.flatnonzero(each)) for each in (~is_predicted, is_predicted)])
        predicted = int(is_predicted.sum())
        only = None
        if self.permuted_only:
            only = self.masking.mask_index
        sample = permute(tokens, inputs, order, predicted, only)
        target = np.full_like(sample["source"], pad)
        target[len(target) - predicted :] = tokens[order[len(order) - predicted :]]
        arrays = {name: torch.from_numpy(array) for name, array in {**sample, "target": target}.items()}
        return {"id": index, **arrays, "tokens": len(tokens)}

    def collater(self, samples: list[dict[str, Any]]) -> dict[str, Any]:
        """Collate samples into a batch of masked blocks, with `positions` and `turns` in `net_input`."""
        batch = super().collater(samples)
        if samples:
            time = batch["target"].size(1)
            positions = pad_right([sample["positions"] for sample in samples], 0, time)
            turns = [pad_right([sample["turns"][row] for sample in samples], 0, time) for row in range(3)]
            batch["net_input"] |= {
                "positions": positions,
                "turns": torch.stack(turns, 1),
            }
            batch["ntokens"] = sum(sample["tokens"] for sample in samples)
        return batch
