"""To and from Hugging Face. Importing it registers the exported models' classes with transformers, where that is there.

``AutoModel.from_pretrained`` then loads what ``lazyformer export --to huggingface`` wrote without trusting the code in
its folder: the same classes come from here. It waits until transformers is loaded, without loading it itself.
"""

import functools
import importlib.util
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, Optional

LIBRARY, AUTO_CLASSES = "transformers", "transformers.models.auto.configuration_auto"


def register_when_transformers_is_loaded() -> None:
    """Now where its auto classes are there, or when they are."""
    if AUTO_CLASSES in sys.modules:
        register()
    elif importlib.util.find_spec(LIBRARY) is not None:
        sys.meta_path.insert(0, _Watcher())


def register() -> None:
    """Makes the auto classes of transformers find ours; a second time it does nothing."""
    import transformers

    from lazyformer_fairseq.huggingface.exported import heads, modelling
    from lazyformer_fairseq.huggingface.merge import merged_code

    modelling.LazyFormerPreTrainedModel.source_code = staticmethod(lambda config: merged_code(config.plan))
    config_class = modelling.LazyFormerConfig
    transformers.AutoConfig.register(config_class.model_type, config_class, exist_ok=True)
    for auto, name in modelling.AUTO_CLASSES.items():
        if auto != "AutoConfig":
            model_class = getattr(heads, name)
            getattr(transformers, auto).register(config_class, model_class, exist_ok=True)


class _Watcher:
    """On ``sys.meta_path``: registers when the auto classes are there and no module of transformers is half loaded."""

    def __init__(self):
        self.loading = 0

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Optional[ModuleSpec]:
        """A module of transformers, as all other finders find it, with an end that we hear of."""
        if name.partition(".")[0] != LIBRARY:
            return None
        others = (finder.find_spec(name, path, target) for finder in sys.meta_path if finder is not self)
        spec = next((spec for spec in others if spec is not None), None)
        if spec is not None and spec.loader is not None:
            spec.loader.exec_module = functools.partial(self._execute, spec.loader)
        return spec

    def _execute(self, loader: Any, module: ModuleType) -> None:
        del loader.exec_module  # the class's own shows again
        self.loading += 1
        try:
            loader.exec_module(module)
        finally:
            self.loading -= 1
        if not self.loading and AUTO_CLASSES in sys.modules and self in sys.meta_path:
            sys.meta_path.remove(self)
            register()


register_when_transformers_is_loaded()
