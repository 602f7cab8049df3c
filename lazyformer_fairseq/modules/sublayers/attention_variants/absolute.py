"""``s[positions=absolute]``: a table of learned positions at the embedding of a causal model (Radford et al., 2018)."""

import torch
from torch import nn

from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.modules.sublayers.attention_variants.interface import VariantModule
from lazyformer_fairseq.modules.sublayers.interface import SublayerOptions

TABLE = "absolute positions"  # among what sublayers of one network share


class Absolute(VariantModule):
    """Plain products of queries and keys. The network adds the table, (length, C), once for all sublayers.

    Others of the network keep Transformer-XL's positions beside it, or turns. Keys that a text remembers have their
    places in them, so that a cache of the whole text serves; segments of a stream have none in the table.

    Raises:
        UserError: two sublayers of one network have tables of different lengths.
    """

    def __init__(self, options: SublayerOptions):
        super().__init__(options)
        length = options.values["length"]
        fresh = torch.empty(0, options.embed_dim)
        table = options.common.setdefault(TABLE, nn.Parameter(fresh.new_zeros(length, options.embed_dim)))
        if table.size(0) != length:
            raise UserError(
                f"s[positions=absolute,length={length}]: another s has length={table.size(0)}, and there is one table "
                "for all: give all the same length"
            )
