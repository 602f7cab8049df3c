"""``s[positions=absolute]``: learned positions, added to the embeddings of a causal model (Radford et al., 2018)."""

import torch
from torch import nn

from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.modules.sublayers.attention_variants.interface import VariantModule
from lazyformer_fairseq.modules.sublayers.interface import SublayerOptions

TABLE = "absolute positions"  # the key of the position embeddings in the network's `common` options


class Absolute(VariantModule):
    """Dot-product attention in a network that adds learned position embeddings to its token embeddings.

    The position embeddings (length, C) are shared by all sublayers of the network. Other sublayers of the network may
    still use Transformer-XL's positions or rotary positions. Since keys include the positions of their tokens,
    generation can continue from a memory of the whole text. Training on streams cannot use a memory, because the
    segments of a stream have no absolute positions.

    Raises:
        UserError: two sublayers of a network request tables of different lengths.
    """

    def __init__(self, options: SublayerOptions):
        super().__init__(options)
        length = options.values["length"]
        fresh = torch.empty(0, options.embed_dim)
        table = options.common.setdefault(TABLE, nn.Parameter(fresh.new_zeros(length, options.embed_dim)))
        if table.size(0) != length:
            raise UserError(
                f"s[positions=absolute,length={length}]: another s has length={table.size(0)}, but all s share one "
                "table of position embeddings; set the same length for every s"
            )
