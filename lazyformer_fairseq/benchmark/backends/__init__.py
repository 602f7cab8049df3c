"""``lazyformer bench backends``: the back ends of attention."""
