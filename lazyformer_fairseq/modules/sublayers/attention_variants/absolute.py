"""``s[positions=absolute]``: learned positions, added to the embeddings of a causal model (Radford et al., 2018)."""

import torch
from torch import nn

from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.modules.sublayers.attention_variants.interface import VariantModule
from lazyformer_fairseq.modules.sublayers.interface import SublayerOptions

TABLE = "absolute positions"  # the key, in the `common` options of a network, of the table of positions


class Absolute(VariantModule):
    """Attention by plain products of queries and keys, in a network that adds learned positions to the embeddings.

    The table of positions (length, C) is shared by all sublayers of the network. Other sublayers may still use
    Transformer-XL's positions or rotary positions. Keys include the positions of their tokens, so a text can be
    continued from a memory that holds all of it. Streams cannot have a memory, because the table has no positions for
    their segments.

    Raises:
        UserError: two sublayers of a network ask for tables of different lengths.
    """

    def __init__(self, options: SublayerOptions):
        super().__init__(options)
        length = options.values["length"]
        fresh = torch.empty(0, options.embed_dim)
        table = options.common.setdefault(TABLE, nn.Parameter(fresh.new_zeros(length, options.embed_dim)))
        if table.size(0) != length:
            raise UserError(
                f"s[positions=absolute,length={length}]: another s has length={table.size(0)}, but all share one table "
                "of positions; give all the same length"
            )
