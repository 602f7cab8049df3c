"""BERT's masking: 15% of the tokens are to be predicted; 80% of these become <mask>, 10% another word, 10% stay."""

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from lazyformer_fairseq.errors import UserError


@dataclass(frozen=True)
class Masking:
    """Chooses what to mask and how; UserError for impossible shares.

    Attributes:
        vocab_size: V; replacements are drawn from all of it but `special`.
        mask_index, pad_index: ids of ``<mask>`` and ``<pad>``.
        special: ids never masked and never drawn: ``<s> <pad> </s> <unk> <mask>``.
        probability: share of the other tokens to predict.
        keep: share of these that stay as they are.
        random: share of these that become another word; the rest becomes ``<mask>``.
    """

    vocab_size: int
    mask_index: int
    pad_index: int
    special: tuple[int, ...]
    probability: float = 0.15
    keep: float = 0.1
    random: float = 0.1

    def __post_init__(self):
        if not 0 < self.probability <= 1 or self.keep < 0 or self.random < 0 or self.keep + self.random > 1:
            raise UserError(
                f"masking: mask_prob {self.probability} must lie in (0, 1], leave_unmasked_prob {self.keep} and "
                f"random_token_prob {self.random} must be shares of at most 1 together"
            )

    @cached_property
    def _is_maskable(self) -> np.ndarray:
        """For each id (V,). A table, because `np.isin` would take a sixth of all the time spent on a block."""
        is_maskable = np.ones(self.vocab_size, dtype=bool)
        is_maskable[list(self.special)] = False
        return is_maskable

    def apply(self, tokens: np.ndarray, seed: int, epoch: int, index: int) -> tuple[np.ndarray, np.ndarray]:
        """Masks one block; the result depends on the arguments alone.

        The number of masked tokens is `probability` of the maskable ones, rounded up or down at random so that the
        expected share is exact, and at least one where any is maskable.

        Args:
            tokens: ids (T,).

        Returns:
            Input ids (T,), and targets (T,): the id at positions to predict, `pad_index` elsewhere.
        """
        rng = np.random.default_rng((seed, epoch, index))
        maskable = np.flatnonzero(self._is_maskable[tokens])
        count = min(len(maskable), max(1, int(len(maskable) * self.probability + rng.random())))
        chosen = rng.choice(maskable, count, replace=False) if count else maskable
        targets = np.full_like(tokens, self.pad_index)
        targets[chosen] = tokens[chosen]
        masked = tokens.copy()
        draw = rng.random(count)
        masked[chosen[draw >= self.keep + self.random]] = self.mask_index
        replaced = chosen[(draw >= self.keep) & (draw < self.keep + self.random)]
        masked[replaced] = self._random_words(rng, len(replaced))
        return masked, targets

    def _random_words(self, rng: np.random.Generator, count: int) -> np.ndarray:
        """Uniform among the ids that are not special, found by stepping over the special ones in order."""
        words = rng.integers(0, self.vocab_size - len(self.special), count)
        for special in sorted(self.special):
            words += words >= special
        return words
