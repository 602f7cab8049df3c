"""Imports and objects that the process that forks the workers makes once for all of them."""

import gc

from lazyformer_fairseq.corpus import stages  # noqa: F401

gc.freeze()  # the collector leaves this memory alone, so that the workers go on sharing it
