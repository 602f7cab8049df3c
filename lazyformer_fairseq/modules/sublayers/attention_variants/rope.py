"""``s[rope=b]``: rotary position embeddings for queries and keys (RoFormer: Su et al., 2021)."""

import math
import os
from functools import partial
from typing import Optional

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from typing_extensions import override

from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.modules.attention.interface import has_triton, why_no_triton
from lazyformer_fairseq.modules.attention.scores import Scores
from lazyformer_fairseq.modules.sublayers.attention_variants.interface import VariantModule
from lazyformer_fairseq.modules.sublayers.interface import SublayerOptions


class Rope(VariantModule):
    """Rotary position embeddings with base b.

    Dimensions i and i + D / 2 of a query or key at position t are rotated as a pair by the angle t b^(-2 i / D)
    (section 3.2.2). The dot product of a query and a key then depends on their distance, not on their absolute
    positions. The paper pairs dimensions 2 i and 2 i + 1; we pair the two halves, like GPT-NeoX, Llama and ModernBERT.
    The two conventions differ only in the order of the weights.

    In a causal model the rotation replaces Transformer-XL's positions, so u, v and projected distances are not used.
    Positions are counted from the first key of the memory. T5's bias can be used in addition.

    Persistent keys have no position, so their dot products use the unrotated queries. Reformer hashes unrotated
    vectors. In both cases a :class:`Rotation` appends the unrotated vectors to the rotated ones.

    Raises:
        UserError: the head size is odd.
    """

    def __init__(self, options: SublayerOptions):
        super().__init__(options)
        if options.head_size % 2:
            raise UserError(
                f"s[rope={options.values['rope']}] rotates pairs of dimensions, so the head size must be even, but "
                f"{options.num_heads} heads with an embedding dimension of {options.embed_dim} have size "
                f"{options.head_size}; choose a different number of heads"
            )

    @classmethod
    @override
    def build_vectors(cls, options: SublayerOptions, are_keys: bool) -> "Rotation":
        """Build the rotation for queries or keys."""
        values = options.values
        behind = NOTHING
        if values.get("buckets"):
            behind = UNTURNED
        elif values.get("persistent") and are_keys:
            behind = ZEROS
        elif values.get("persistent"):
            behind = UNTURNED
        return Rotation(values["rope"], behind)


# Values appended to the D rotated dimensions of a vector. The dot product of a query (R q, q) with a token's key
# (R k, 0) depends on positions; its dot product with (0, k), a key without a position, does not.
NOTHING = "nothing"
UNTURNED = "the vector before the turn"
ZEROS = "zeros"


class Rotation(nn.Module):
    """The rotation of queries or keys by their positions; angles are computed in single precision or better.

    Args:
        base: b.
        behind: the values appended to the rotated dimensions: NOTHING, UNTURNED or ZEROS. With ZEROS, keys are
            multiplied by sqrt(2), because back ends divide scores by the square root of the query size, which is 2 D.
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
        """Return the rotated vectors, extended by the dimensions needed for persistent keys or hashing.

        For the arguments see
        :func:`~lazyformer_fairseq.modules.sublayers.attention_variants.interface.make_vectors`.
        """
        turned_BNTD = self._turn(x_BNTD, scores, keys, places_AG)
        if self.behind == UNTURNED:
            return torch.cat([turned_BNTD, x_BNTD], -1)
        if self.behind == ZEROS:
            return F.pad(turned_BNTD * math.sqrt(2), (0, x_BNTD.size(-1)))
        return turned_BNTD

    def without_position(self, x_NMD: Tensor) -> Tensor:
        """Pad keys without a token so that their dot products use the unrotated queries."""
        return F.pad(x_NMD * math.sqrt(2), (x_NMD.size(-1), 0))

    def _turn(
        self,
        x_BNTD: Tensor,
        scores: Scores,
        keys: int,
        places_AG: Optional[Tensor],
    ) -> Tensor:
        if x_BNTD.is_meta:  # FLOPs are being counted, which exclude elementwise operations
            return x_BNTD
        places = places_AG
        if places is None:
            places = scores.places_BT
        make = partial(_cosines_and_sines, self.base, keys, places, x_BNTD)
        # Compilers share the result among sublayers themselves; with a cached result they would compile one graph per
        # number of keys.
        is_shared = places_AG is None and not torch.compiler.is_compiling()
        if is_shared:
            turns = scores.cached((self.base, keys, x_BNTD.dtype), make)
        else:
            turns = make()
        time, size = x_BNTD.shape[-2:]
        cos, sin = (each[..., -time:, :] for each in turns)
        if _has_kernel(x_BNTD):
            from lazyformer_fairseq.modules.sublayers.attention_variants.triton_rope import rotate

            return rotate(x_BNTD, cos.expand_as(x_BNTD), sin.expand_as(x_BNTD))
        along = x_BNTD * cos
        across = x_BNTD.roll(size // 2, -1)
        turned = torch.addcmul(along, across, sin)
        return turned.to(x_BNTD.dtype)


def _has_kernel(x: Tensor) -> bool:
    """Return whether the Triton kernel rotates a tensor; in a compiled model, the compiler fuses torch's operations."""
    if torch.compiler.is_compiling() or x.dtype == torch.float64 or not has_triton():
        return False
    if os.environ.get("TRITON_INTERPRET") == "1":
        return True
    return x.is_cuda and why_no_triton() is None


def _cosines_and_sines(
    base: int,
    keys: int,
    places_BT: Optional[Tensor],
    like: Tensor,
) -> tuple[Tensor, Tensor]:
    """Return the cosines and sines of the rotation angles.

    The sines of the first half are negated, as in the rotation.

    Args:
        base: b.
        keys: K.
        places_BT: the position of each token; None for the positions 0 to K - 1.
        like: a tensor that determines D, the device and the dtype (at least single precision).

    Returns:
        Two tensors (K, D), or (B, 1, T, D) with `places_BT`.
    """
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
