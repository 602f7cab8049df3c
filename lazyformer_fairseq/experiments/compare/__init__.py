"""``lazyformer compare``: models side by side, equal in all that is not theirs."""
