"""``s[rope=b]``: rotary positions, turns of queries and keys by their places (Su et al., 2021: RoFormer)."""

import math
from functools import partial
from typing import Optional

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from typing_extensions import override

from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.modules.attention.scores import Scores
from lazyformer_fairseq.modules.sublayers.attention_variants.interface import VariantModule
from lazyformer_fairseq.modules.sublayers.interface import SublayerOptions


class Rope(VariantModule):
    """Numbers i and i + D / 2 of a query or key at place t are a point, turned by t b^(-2 i / D) (section 3.2.2).

    The product of a query and a key then depends on their distance, not on their places. The paper pairs numbers 2 i
    and 2 i + 1; halves are what GPT-NeoX, Llama and ModernBERT have, and weights mean the same but for their order.

    In a causal model turns stand in place of Transformer-XL's positions, so with neither u, v nor projected distances;
    places count from the first key of the memory. T5's bias may stand beside them.

    Persistent keys have no place, so they meet queries as these were before the turn, and Reformer hashes vectors as
    they were: a :class:`Turn` keeps those behind the turned ones.

    Raises:
        UserError: heads of an odd size.
    """

    def __init__(self, options: SublayerOptions):
        super().__init__(options)
        if options.head_size % 2:
            raise UserError(
                f"s[rope={options.values['rope']}] turns pairs of numbers, and {options.num_heads} heads of "
                f"{options.embed_dim} have {options.head_size} each: give heads of an even size"
            )

    @classmethod
    @override
    def build_vectors(cls, options: SublayerOptions, are_keys: bool) -> "Turn":
        """Build the turn of queries, or of keys."""
        values = options.values
        behind = NOTHING
        if values.get("buckets"):
            behind = UNTURNED
        elif values.get("persistent") and are_keys:
            behind = ZEROS
        elif values.get("persistent"):
            behind = UNTURNED
        return Turn(values["rope"], behind)


# What stands behind the D turned numbers of a vector. Products of queries (R q, q) with keys of tokens (R k, 0) are
# turned, and those with keys of no place (0, k) are not.
NOTHING = "nothing"
UNTURNED = "the vector before the turn"
ZEROS = "zeros"


class Turn(nn.Module):
    """A turn of queries or keys by the places of their rows; the angles are in single precision or better.

    Args:
        base: b.
        behind: what follows the turned numbers. Keys with ZEROS are multiplied by sqrt(2), because back ends divide
            products by the root of the size of queries, which is then 2 D.
    """

    def __init__(self, base: int, behind: str = NOTHING):
        super().__init__()
        self.base = base
        self.behind = behind

    def forward(
        self,
        x_BNTD: Tensor,
        scores: Scores,
        keys: int,
        places_AG: Optional[Tensor] = None,
    ) -> Tensor:
        """Return the turned vectors, and behind them what persistent keys or hashes need."""
        turned_BNTD = self._turn(x_BNTD, scores, keys, places_AG)
        if self.behind == UNTURNED:
            return torch.cat([turned_BNTD, x_BNTD], -1)
        if self.behind == ZEROS:
            return F.pad(turned_BNTD * math.sqrt(2), (0, x_BNTD.size(-1)))
        return turned_BNTD

    def without_place(self, x_NMD: Tensor) -> Tensor:
        """Return keys that belong to no token, to meet the queries behind the turned ones."""
        return F.pad(x_NMD * math.sqrt(2), (x_NMD.size(-1), 0))

    def _turn(
        self,
        x_BNTD: Tensor,
        scores: Scores,
        keys: int,
        places_AG: Optional[Tensor],
    ) -> Tensor:
        if x_BNTD.is_meta:  # where shapes alone count, and elementwise work does not
            return x_BNTD
        places = places_AG
        if places is None:
            places = scores.places_BT
        make = partial(_cosines_and_sines, self.base, keys, places, x_BNTD)
        # A compiler finds out itself that all sublayers make the same, and would make a graph for each number of keys.
        is_shared = places_AG is None and not torch.compiler.is_compiling()
        if is_shared:
            turns = scores.once((self.base, keys, x_BNTD.dtype), make)
        else:
            turns = make()
        time, size = x_BNTD.shape[-2:]
        cos, sin = (each[..., -time:, :] for each in turns)
        along = x_BNTD * cos
        across = x_BNTD.roll(size // 2, -1)
        turned = torch.addcmul(along, across, sin)
        return turned.to(x_BNTD.dtype)


def _cosines_and_sines(
    base: int,
    keys: int,
    places_BT: Optional[Tensor],
    like: Tensor,
) -> tuple[Tensor, Tensor]:
    """Return (K, D) each, or (B, 1, T, D) at places; sines of the first half with their sign in the turn."""
    exact = torch.promote_types(like.dtype, torch.float32)
    size = like.size(-1)
    exponents = torch.arange(0, size, 2, device=like.device, dtype=exact) / size
    rates = base**-exponents
    if places_BT is None:
        places = torch.arange(keys, device=like.device)
    else:
        places = places_BT[:, None]
    angles = places[..., None] * rates
    cos = angles.cos()
    sin = angles.sin()
    return torch.cat([cos, cos], -1), torch.cat([-sin, sin], -1)
