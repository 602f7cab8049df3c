"""Registration with fairseq as soon as fairseq is imported, without importing it here."""

import functools
import importlib
import logging
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, Optional

from lazyformer_fairseq.fairseq_plugin.replacements import PACKAGE, Stage, install

REGISTERED = (
    "fairseq_plugin.criterions.finetuning",
    "fairseq_plugin.criterions.language_modeling",
    "fairseq_plugin.models.huggingface_bert",
    "fairseq_plugin.models.lazyformer",
    "fairseq_plugin.optim.optimizers",
    "fairseq_plugin.optim.schedules",
    "fairseq_plugin.tasks.finetuning",
    "fairseq_plugin.tasks.full_sentences_masked_lm",
    "fairseq_plugin.tasks.stream_language_modeling",
)


def register_when_fairseq_is_loaded() -> None:
    """Register with fairseq now if it has been imported, otherwise as soon as it is imported."""
    if "fairseq" in sys.modules:
        register()
    else:
        sys.meta_path.insert(0, _watcher)


def register() -> None:
    """Register with fairseq, importing it if necessary. Repeated calls have no effect."""
    if _watcher.is_done:
        return
    _watcher.is_done = True  # set first, because the modules imported below call this function again
    try:
        with _preserved_logging():
            importlib.import_module("fairseq")
            for name in REGISTERED:
                importlib.import_module(f"{PACKAGE}.{name}")
            install(Stage.REGISTRATION, Stage.LOADING)
            from lazyformer_fairseq.storage.checkpoint_file import forbid_unsafe_loads  # imports torch

            forbid_unsafe_loads(os.environ)
    except BaseException:
        _watcher.is_done = False
        raise
    if _watcher in sys.meta_path:
        sys.meta_path.remove(_watcher)
    for follow in _watcher.followers:
        follow()


def after_registration(follow: Callable[[], Any]) -> None:
    """Call `follow` as soon as the package is registered, or immediately if it already is."""
    if _watcher.is_done:
        follow()
    else:
        _watcher.followers.append(follow)


class ImportWatcher:
    """A finder on ``sys.meta_path`` that runs a callback once watched modules are imported and no import is running.

    Args:
        watches: returns whether to watch the module with a given name.
        on_import: the callback, which runs whenever a watched module has been imported and no other is being imported.
    """

    def __init__(self, watches: Callable[[str], bool], on_import: Callable[[], Any]):
        self.watches = watches
        self.on_import = on_import
        self.loading = 0

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Optional[ModuleSpec]:
        """Find a watched module through the other finders and wrap its execution; return None if it is not watched."""
        if not self.watches(name):
            return None
        others = (finder.find_spec(name, path, target) for finder in sys.meta_path if finder is not self)
        spec = next((spec for spec in others if spec is not None), None)
        if spec is not None and spec.loader is not None:
            spec.loader.exec_module = functools.partial(self._execute, spec.loader)
        return spec

    def _execute(self, loader: Any, module: ModuleType) -> None:
        del loader.exec_module  # restores the method of the loader's class
        with self.execution_context(module.__name__):
            self.loading += 1
            try:
                loader.exec_module(module)
            finally:
                self.loading -= 1
        if not self.loading:
            self.on_import()

    def execution_context(self, name: str) -> AbstractContextManager[Any]:
        """Return the context manager that wraps a module's execution."""
        return nullcontext()


class _Watcher(ImportWatcher):
    """A watcher that registers this package once fairseq is imported and none of our modules is still being imported.

    If one of our modules imports fairseq, registration must wait until that module is complete. Otherwise, the modules
    that registration imports would find it only partially initialized.
    """

    is_done = False

    def __init__(self):
        ours = f"{PACKAGE}."
        super().__init__(lambda name: name == "fairseq" or name.startswith(ours), self._register)
        self.followers: list[Callable[[], Any]] = []

    def _register(self) -> None:
        if "fairseq" in sys.modules:
            register()

    def execution_context(self, name: str) -> AbstractContextManager[Any]:
        """Return a context manager that preserves the logging configuration if one of our modules imports fairseq."""
        if name == "fairseq" and self.loading:
            return _preserved_logging()
        return nullcontext()


@contextmanager
def _preserved_logging() -> Iterator[None]:
    """Undo what importing fairseq does to logging: it lowers every library's log level and asks for tensorboardX."""
    root = logging.getLogger()
    speech = logging.getLogger("fairseq.tasks.text_to_speech")
    levels = (root.level, speech.level)
    handlers = root.handlers[:]
    speech.setLevel(logging.WARNING)
    try:
        yield
    finally:
        root.handlers[:] = handlers
        root.setLevel(levels[0])
        speech.setLevel(levels[1])


_watcher = _Watcher()
