"""The exported model, in parts that need torch and transformers alone.

``huggingface/export/merge.py`` makes one file of them, with the sublayers and kinds of attention that a pattern has.
So parts import nothing else of this package, each other by ``from .part import name``, and their names differ. Here all
are loaded, so that a model of any pattern finds its sublayers.
"""

import importlib
import pkgutil

# First of all: where registration waits for transformers, it registers now, while no part is half loaded.
from transformers import PreTrainedModel as _PreTrainedModel  # noqa: F401

for _part in pkgutil.walk_packages(__path__, f"{__name__}."):
    importlib.import_module(_part.name)
