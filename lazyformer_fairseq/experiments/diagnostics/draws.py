"""Random numbers that are the same on every machine and with every version of numpy.

numpy promises this of the raw bits of its generators and of nothing that is made of them, so whole numbers are made of
the bits here.
"""

import numpy as np

HIGH_BITS = np.uint64(32)


class Draws:
    """A stream of random numbers.

    Args:
        seed: the stream depends on it alone.
    """

    def __init__(self, seed: int):
        self._bits = np.random.PCG64(seed)

    def below(self, limit: int, count: int) -> np.ndarray:
        """Whole numbers from 0 to `limit` - 1, each as likely but for one part in 2^32 / `limit`; int64 (count,)."""
        assert 0 < limit < 1 << 32
        return ((self._bits.random_raw(count) >> HIGH_BITS) * np.uint64(limit) >> HIGH_BITS).astype(np.int64)

    def permutation(self, count: int) -> np.ndarray:
        """The numbers from 0 to `count` - 1 in random order, int64 (count,)."""
        return np.argsort(self._bits.random_raw(count), kind="stable")
