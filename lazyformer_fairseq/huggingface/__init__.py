"""Conversion to and from Hugging Face.

If transformers is installed, importing this package registers the classes of exported models with transformers.
``AutoModel.from_pretrained`` then uses these classes to load folders written by ``lazyformer export --to huggingface``,
so ``trust_remote_code`` is not needed. The registration does not import transformers, but waits until other code does.
"""

import importlib.util
import sys
from pathlib import Path
from typing import Any

from lazyformer_fairseq.extras import needs_transformers, refuse_without_extra
from lazyformer_fairseq.fairseq_plugin.registration import ImportWatcher

LIBRARY = "transformers"
AUTO_CLASSES = "transformers.models.auto.configuration_auto"
# Public names and the modules that define them.
PARTS = {
    "LazyFormerCausalConfig": "models.causal",
    "LazyFormerConfig": "models.configuration",
    "LazyFormerForCausalLM": "models.causal",
    "LazyFormerForMaskedLM": "models.heads",
    "LazyFormerForQuestionAnswering": "models.heads",
    "LazyFormerForSequenceClassification": "models.heads",
    "LazyFormerForTokenClassification": "models.heads",
    "LazyFormerMemory": "models.causal",
    "LazyFormerModel": "models.encoder",
    "MaskedTextCollator": "trainer",
    "ShardTrainer": "trainer",
    "tokenizer_for_transformers": "trainer",
}
__all__ = ["register", *PARTS]  # noqa: PLE0604


def __getattr__(name: str) -> Any:
    """Import and return a public object by its name.

    Raises:
        UserError: A library that the object requires is not installed.
        AttributeError: The name is not a public name.
    """
    if name not in PARTS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    needs_transformers(f"{__name__}.{name}")
    if PARTS[name] == "trainer":
        refuse_without_extra("huggingface", f"{__name__}.{name}")
    return getattr(importlib.import_module(f"{__name__}.{PARTS[name]}"), name)


def __dir__() -> list[str]:
    """Return all names, including the public ones, which are imported lazily."""
    return sorted({*globals(), *__all__})


def register_when_transformers_is_loaded() -> None:
    """Register the models now if transformers' auto classes have been imported, else as soon as they have been."""
    if AUTO_CLASSES in sys.modules:
        register()
    elif importlib.util.find_spec(LIBRARY) is not None:
        sys.meta_path.insert(0, _watcher)


def register() -> None:
    """Register our classes with transformers' auto classes. Repeated calls have no effect."""
    import transformers

    from lazyformer_fairseq.huggingface.models import causal, encoder, heads
    from lazyformer_fairseq.huggingface.models.configuration import LazyFormerConfig
    from lazyformer_fairseq.huggingface.models.named import config_of_arch

    encoder.LazyFormerPreTrainedModel.write_code = staticmethod(_write_code)
    LazyFormerConfig.from_arch = staticmethod(config_of_arch)
    transformers.AutoConfig.register(LazyFormerConfig.model_type, LazyFormerConfig, exist_ok=True)
    for auto, name in encoder.AUTO_CLASSES.items():
        if auto != "AutoConfig":
            getattr(transformers, auto).register(LazyFormerConfig, getattr(heads, name), exist_ok=True)
    transformers.AutoConfig.register("lazyformer_lm", causal.LazyFormerCausalConfig, exist_ok=True)
    for auto_class in (transformers.AutoModel, transformers.AutoModelForCausalLM):
        auto_class.register(causal.LazyFormerCausalConfig, causal.LazyFormerForCausalLM, exist_ok=True)


def _write_code(config: Any, folder: Path) -> None:
    from lazyformer_fairseq.huggingface.code import write_code

    write_code(config.sublayer_pattern, folder)


def _register_if_there() -> None:
    """Register the models once transformers is fully imported."""
    if AUTO_CLASSES in sys.modules and _watcher in sys.meta_path:
        sys.meta_path.remove(_watcher)
        register()


_watcher = ImportWatcher(lambda name: name.partition(".")[0] == LIBRARY, _register_if_there)
register_when_transformers_is_loaded()
