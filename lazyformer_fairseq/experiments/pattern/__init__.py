"""``lazyformer pattern``: the sublayers of a pattern, their costs, and the tokens that each of them looks at."""
