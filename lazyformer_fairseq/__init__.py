"""LazyFormer and PAR encoders for fairseq: what ``fairseq-train --user-dir lazyformer_fairseq`` loads.

Importing the package is light. It registers its models, tasks, criterions, optimizer and schedule where fairseq is
loaded already, as it is under ``--user-dir``, and else as soon as fairseq is; :func:`register` and the public names
load it.
"""

import importlib
from pathlib import Path
from typing import Any

from lazyformer_fairseq.fairseq_plugin import registration
from lazyformer_fairseq.fairseq_plugin.registration import register

__version__ = "0.1.0"

# For --user-dir. Not resolved: fairseq compares it with the path, links and all, that the package was imported by.
USER_DIR = Path(__file__).absolute().parent

_PUBLIC = ("CausalLanguageModel", "LazyFormerModel")
__all__ = ["USER_DIR", "register", *_PUBLIC]


def __getattr__(name: str) -> Any:
    """A public name, which loads fairseq. Raises AttributeError for any other."""
    if name not in _PUBLIC:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    register()
    return getattr(importlib.import_module(f"{__name__}.fairseq_plugin.models"), name)


registration.register_when_fairseq_is_loaded()
