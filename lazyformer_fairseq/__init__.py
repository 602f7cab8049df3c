"""LazyFormer and PAR encoders: what ``fairseq-train --user-dir lazyformer_fairseq`` loads, and use without fairseq.

``load(folder)`` is a trained model with its tokenizer, ``build("bert_base", vocab_size=32768)`` one with fresh weights;
``LazyFormerForMaskedLM(LazyFormerConfig(...))`` and its like are models of transformers. `LazyFormerModel` is
fairseq's, whose ``from_pretrained`` is ``load``; transformers' bare encoder is ``huggingface.LazyFormerModel``.

Importing the package is light. It registers its models, tasks, criterions, optimizer and schedule where fairseq is
loaded already, as it is under ``--user-dir``, and else as soon as fairseq is; :func:`register` loads it, as do the
public names of fairseq's models.
"""

import importlib
from pathlib import Path
from typing import Any

from lazyformer_fairseq.extras import needs_fairseq, needs_transformers
from lazyformer_fairseq.fairseq_plugin import registration
from lazyformer_fairseq.fairseq_plugin.registration import register

__version__ = "1.0.0.dev0"

# For --user-dir. Not resolved: fairseq compares it with the path, links and all, that the package was imported by.
USER_DIR = Path(__file__).absolute().parent

_OF_TRANSFORMERS = (
    "LazyFormerCausalConfig",
    "LazyFormerConfig",
    "LazyFormerForCausalLM",
    "LazyFormerForMaskedLM",
    "LazyFormerForQuestionAnswering",
    "LazyFormerForSequenceClassification",
    "LazyFormerForTokenClassification",
)
# Public names, and the modules that have them, which are loaded when they are asked for.
_PUBLIC = {
    "CausalLanguageModel": "fairseq_plugin.models",
    "LazyFormerModel": "fairseq_plugin.models",
    "build": "modules.networks.named",
    "load": "evaluation.loading",
    "open_masked_text": "data.masked_text",
    "save": "evaluation.export",
    **dict.fromkeys(_OF_TRANSFORMERS, "huggingface"),
}
__all__ = ["USER_DIR", "register", *_PUBLIC]


def __getattr__(name: str) -> Any:
    """Return a public name, which loads what it needs.

    Raises:
        UserError: what it needs is not installed.
        AttributeError: there is no such name.
    """
    if name not in _PUBLIC:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if _PUBLIC[name].startswith("fairseq_plugin."):
        needs_fairseq(name, without=f"{__name__}.load and {__name__}.build")
        register()
    if name in _OF_TRANSFORMERS:
        needs_transformers(f"{__name__}.{name}")
    return getattr(importlib.import_module(f"{__name__}.{_PUBLIC[name]}"), name)


def __dir__() -> list[str]:
    """Return the public names too, which are loaded when they are asked for."""
    return sorted({*globals(), *__all__})


registration.register_when_fairseq_is_loaded()
