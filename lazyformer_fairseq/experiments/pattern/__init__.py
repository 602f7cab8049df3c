"""``lazyformer pattern``: a pattern's sublayers, their costs, and the tokens that each sublayer attends to."""
