"""LazyFormer and PAR encoders for ``fairseq-train --user-dir lazyformer_fairseq`` or for use without fairseq.

``load(folder)`` returns a trained model with its tokenizer, and ``build("bert_base", vocab_size=32768)`` returns a
randomly initialized one. ``LazyFormerForMaskedLM(LazyFormerConfig(...))`` and the other ``LazyFormerFor...`` classes
are transformers models. `LazyFormerModel` is the fairseq model, whose ``from_pretrained`` works like ``load``; the bare
encoder for transformers is ``huggingface.LazyFormerModel``.

Importing the package is cheap. If fairseq is already loaded, as under ``--user-dir``, the import registers this
package's models, tasks, criterions, optimizers and schedules with fairseq. Otherwise they are registered as soon as
fairseq is loaded. Calling :func:`register`, or accessing a public name that refers to a fairseq model, loads fairseq.
"""

import importlib
from pathlib import Path
from typing import Any

from lazyformer_fairseq.extras import needs_fairseq, needs_transformers
from lazyformer_fairseq.fairseq_plugin import registration
from lazyformer_fairseq.fairseq_plugin.registration import register

__version__ = "1.0.0"

# The path for --user-dir. Symlinks are not resolved, because fairseq compares this path with the path from which the
# package was imported.
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
# Public names and the modules that define them, which are imported on first access.
PUBLIC = {
    "build": "modules.networks.named",
    "load": "evaluation.loading",
    "open_masked_text": "data.masked_text",
    "save": "evaluation.export",
    "CausalLanguageModel": "fairseq_plugin.models",
    "LazyFormerModel": "fairseq_plugin.models",
    **dict.fromkeys(_OF_TRANSFORMERS, "huggingface"),
}
__all__ = ["USER_DIR", "register", *PUBLIC]


def __getattr__(name: str) -> Any:
    """Return the object that a public name refers to, importing its module first.

    Raises:
        UserError: the object requires a package that is not installed.
        AttributeError: this package has no such name.
    """
    if name not in PUBLIC:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if PUBLIC[name].startswith("fairseq_plugin."):
        needs_fairseq(name, without=f"{__name__}.load and {__name__}.build")
        register()
    if name in _OF_TRANSFORMERS:
        needs_transformers(f"{__name__}.{name}")
    return getattr(importlib.import_module(f"{__name__}.{PUBLIC[name]}"), name)


def __dir__() -> list[str]:
    """Return the module's names, including the public ones that are imported on first access."""
    return sorted({*globals(), *__all__})


registration.register_when_fairseq_is_loaded()
