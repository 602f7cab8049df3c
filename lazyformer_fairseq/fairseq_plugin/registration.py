"""When the package registers with fairseq: as soon as fairseq is loaded, without loading it itself."""

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
    """Register now, or when fairseq is imported."""
    if "fairseq" in sys.modules:
        register()
    else:
        sys.meta_path.insert(0, _watcher)


def register() -> None:
    """Register with fairseq, which is loaded if need be. A second call does nothing."""
    if _watcher.is_done:
        return
    _watcher.is_done = True  # what is imported here asks again
    try:
        with _logging_left_alone():
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
    """Call `follow` when the package has registered: now, or then."""
    if _watcher.is_done:
        follow()
    else:
        _watcher.followers.append(follow)


class ImportWatcher:
    """Finder on ``sys.meta_path`` that notices when watched modules have been loaded and none is half loaded.

    Args:
        watches: returns whether the module of a name is watched.
        heard: called then.
    """

    def __init__(self, watches: Callable[[str], bool], heard: Callable[[], Any]):
        self.watches = watches
        self.heard = heard
        self.loading = 0

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Optional[ModuleSpec]:
        """Find a watched module as all the other finders do, with an end that we hear of."""
        if not self.watches(name):
            return None
        others = (finder.find_spec(name, path, target) for finder in sys.meta_path if finder is not self)
        spec = next((spec for spec in others if spec is not None), None)
        if spec is not None and spec.loader is not None:
            spec.loader.exec_module = functools.partial(self._execute, spec.loader)
        return spec

    def _execute(self, loader: Any, module: ModuleType) -> None:
        del loader.exec_module  # the class's own shows again
        with self.around(module.__name__):
            self.loading += 1
            try:
                loader.exec_module(module)
            finally:
                self.loading -= 1
        if not self.loading:
            self.heard()

    def around(self, name: str) -> AbstractContextManager[Any]:
        """Return the context in which a module is loaded."""
        return nullcontext()


class _Watcher(ImportWatcher):
    """Watcher that registers when fairseq has been loaded and no module of ours is half loaded.

    A module of ours may be what imports fairseq. Others that registering imports would then find it without its names,
    so that it is to be whole first.
    """

    is_done = False

    def __init__(self):
        ours = f"{PACKAGE}."
        super().__init__(lambda name: name == "fairseq" or name.startswith(ours), self._register)
        self.followers: list[Callable[[], Any]] = []

    def _register(self) -> None:
        if "fairseq" in sys.modules:
            register()

    def around(self, name: str) -> AbstractContextManager[Any]:
        """Leave logging alone where it is our doing that fairseq is loaded."""
        if name == "fairseq" and self.loading:
            return _logging_left_alone()
        return nullcontext()


@contextmanager
def _logging_left_alone() -> Iterator[None]:
    """Undo what fairseq's import does to logging: it has every library log everything, and asks for tensorboardX."""
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
