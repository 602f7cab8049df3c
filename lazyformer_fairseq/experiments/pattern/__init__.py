"""``lazyformer pattern``: what a pattern builds, what it costs, and what each of its sublayers looks at."""
