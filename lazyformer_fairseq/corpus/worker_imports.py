"""Imports made once in the fork server, on behalf of all workers that are forked from it."""

import gc

from lazyformer_fairseq.corpus import stages  # noqa: F401

gc.freeze()  # keeps the garbage collector from touching these objects, so that workers keep sharing their memory
