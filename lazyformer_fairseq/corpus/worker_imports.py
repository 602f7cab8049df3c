"""Imports that the process from which workers are forked makes once for all of them."""

import gc

from lazyformer_fairseq.corpus import stages  # noqa: F401

gc.freeze()  # the garbage collector then does not touch these objects, so the workers keep sharing their memory
