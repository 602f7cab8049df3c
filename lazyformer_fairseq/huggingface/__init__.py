"""To and from Hugging Face. Importing it registers the exported models' classes with transformers, where that is there.

``AutoModel.from_pretrained`` then loads what ``lazyformer export --to huggingface`` wrote without trusting the code in
its folder: the same classes come from here. It waits until transformers is loaded, without loading it itself.
"""

import importlib.util
import sys
from pathlib import Path
from typing import Any

from lazyformer_fairseq.extras import needs_transformers, refuse_without_extra
from lazyformer_fairseq.fairseq_plugin.registration import ImportWatcher

LIBRARY = "transformers"
AUTO_CLASSES = "transformers.models.auto.configuration_auto"
# Public names, and the modules that have them.
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
    """Return a public name, which loads what it needs.

    Raises:
        UserError: what it needs is not installed.
        AttributeError: there is no such name.
    """
    if name not in PARTS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    needs_transformers(f"{__name__}.{name}")
    if PARTS[name] == "trainer":
        refuse_without_extra("huggingface", f"{__name__}.{name}")
    return getattr(importlib.import_module(f"{__name__}.{PARTS[name]}"), name)


def __dir__() -> list[str]:
    """Return the public names too, which are loaded when they are asked for."""
    return sorted({*globals(), *__all__})


def register_when_transformers_is_loaded() -> None:
    """Register now where transformers' auto classes are there, or when they are."""
    if AUTO_CLASSES in sys.modules:
        register()
    elif importlib.util.find_spec(LIBRARY) is not None:
        sys.meta_path.insert(0, _watcher)


def register() -> None:
    """Make the auto classes of transformers find ours; a second time it does nothing."""
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
    """Register when no module of transformers is half loaded."""
    if AUTO_CLASSES in sys.modules and _watcher in sys.meta_path:
        sys.meta_path.remove(_watcher)
        register()


_watcher = ImportWatcher(lambda name: name.partition(".")[0] == LIBRARY, _register_if_there)
register_when_transformers_is_loaded()
