"""Language modeling on the command line: ``lazyformer lm prepare``, ``evaluate``, ``sample`` and ``probe``."""
