"""Blocks of sentences with their tokens in a random order, of which the last ones are predicted one after the other.

Masked and permuted language modelling (MPNet: Song et al., 2020, 2004.09297, section 2.3). Of a permuted text x, of
which the last p tokens are to be predicted, the model reads [x; M; M]: M are masks at the places of these p. The first
group stands for what is not predicted yet, so that every prediction knows all places of the text; the second group
predicts. As in the published code (github.com/microsoft/MPNet, ``masked_permutation_lm.py``), of both groups alike 80%
are <mask>, 10% another word and 10% the token itself, and the order of the predicted tokens does not keep words
together. There symbols such as <s> and padding may be predicted, and a cut word; here neither.
"""

from dataclasses import dataclass
from typing import Any, Optional

import numpy as np
import torch

from lazyformer_fairseq.data.batches import pad_right
from lazyformer_fairseq.data.datasets.masked_blocks import FullSentencesDataset

ALWAYS = 2**30  # no turn comes after it


def permute(
    tokens: np.ndarray,
    inputs: np.ndarray,
    order: np.ndarray,
    predicted: int,
    only: Optional[int] = None,
) -> dict[str, np.ndarray]:
    """Return what a model reads of one text (T,), of which it predicts the last P of `order`; S = T + 2 P, or T + P.

    Args:
        tokens: ids (T,).
        inputs: the same, with what stands in place of predicted ones.
        order: the places in their new order, (T,).
        predicted: P.
        only: id of ``<mask>``, which alone stands where something is predicted; without masks for what is not
            predicted yet (XLNet: Yang et al., 2019, section 2.2). None for MPNet's.

    Returns:
        `source` (S,); `positions` (S,), the place of each; `turns` (3, S), see
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
    """Full sentences, permuted anew in each epoch.

    Arguments as for :class:`~.masked_blocks.FullSentencesDataset`; `sizes` are those of the text. A sample's target is
    at the last rows, those that predict.

    Args:
        permuted_only: see :func:`permute`.
    """

    permuted_only: bool = False

    @property
    def most(self) -> int:
        """Most tokens of a row: the text and both groups of masks."""
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
        """Return a batch of masked blocks with `positions` and `turns` in `net_input`."""
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
