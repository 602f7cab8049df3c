"""Language models from the command line: ``lazyformer lm prepare``, ``lazyformer lm evaluate``."""
