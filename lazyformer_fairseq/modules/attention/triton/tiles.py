"""Which tiles the Triton kernels may take. A GPU tries them once for each kind of input and keeps the fastest.

Lists are short and hold what fits: ``tests/modules/attention/triton/kernels_in_compiler.py`` has the compiler say how
many registers and how much shared memory each takes. A GPU passes over tiles too large for it; the first of each
list fits an A100.
"""

import os
from typing import NamedTuple

import triton
from torch import Tensor


class Tiles(NamedTuple):
    """Queries and keys of a tile, the warps that share it, and how many tiles load from memory at once."""

    queries: int
    keys: int
    warps: int
    stages: int

    @property
    def config(self) -> triton.Config:
        """The same as Triton's config."""
        sizes = {"BLOCK_Q": self.queries, "BLOCK_K": self.keys}
        return triton.Config(sizes, num_warps=self.warps, num_stages=self.stages)


FEWEST_KEYS = 32  # of all tiles here
MOST_LAYERS = 6  # whose values fit side by side
_ANYWHERE = (Tiles(32, 32, 8, 1),)  # in the interpreter, in single precision
# {kernel: {largest D, as a power of two: {largest m: tiles}}}
_TILES = {
    "attend": {
        64: {1: (Tiles(128, 64, 8, 3), Tiles(128, 64, 4, 3), Tiles(64, 64, 4, 3))},
        128: {1: (Tiles(128, 64, 8, 2), Tiles(128, 128, 8, 2), Tiles(64, 64, 8, 2))},
    },
    "reuse": {
        64: {1: (Tiles(128, 64, 4, 3), Tiles(128, 128, 8, 2), Tiles(64, 64, 4, 3))},
        128: {1: (Tiles(128, 64, 8, 3), Tiles(128, 128, 8, 2), Tiles(64, 64, 4, 3))},
    },
    "value_gradient": {
        64: {1: (Tiles(64, 128, 8, 3), Tiles(128, 128, 8, 2), Tiles(64, 64, 4, 3))},
        128: {1: (Tiles(64, 128, 8, 3), Tiles(128, 64, 8, 2), Tiles(64, 64, 4, 3))},
    },
    "key_side": {
        64: {
            3: (Tiles(64, 64, 8, 2), Tiles(64, 128, 8, 2), Tiles(32, 64, 8, 2)),
            6: (Tiles(32, 64, 8, 2), Tiles(64, 64, 8, 2)),
        },
        128: {
            2: (Tiles(32, 64, 8, 2), Tiles(64, 64, 8, 2)),
            6: (Tiles(32, 32, 4, 2),),
        },
    },
    "query_side": {  # of deterministic runs, which take the first: no trial
        64: {3: (Tiles(128, 64, 8, 2),), 6: (Tiles(64, 32, 4, 2),)},
        128: {1: (Tiles(64, 64, 8, 2),), 6: (Tiles(64, 32, 4, 1),)},
    },
}


def tiles_for(kernel: str, q: Tensor, layers: int = 1) -> tuple[Tiles, ...]:
    """Tiles to choose from, most promising first.

    Args:
        kernel: a key of the table above.
        q: queries (B, N, T, D), for D and the precision.
        layers: m, of a kernel that goes over all values of a block.
    """
    if os.environ.get("TRITON_INTERPRET") == "1" or q.element_size() > 2:
        return _ANYWHERE
    by_layers = _TILES[kernel][64 if q.size(-1) <= 64 else 128]
    return next(tiles for most, tiles in by_layers.items() if layers <= most)
