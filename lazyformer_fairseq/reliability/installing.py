"""Puts the rows of the table of hooks in place, each once, after checking that it still fits."""

import importlib
import inspect
import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import reduce
from typing import Any, Optional

from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.reliability.hooks import HOOKS, WRITTEN_FOR, Hook, Stage

logger = logging.getLogger(__name__)

PACKAGE = __name__.partition(".")[0]
_ABSENT = object()
_before: dict[Hook, Any] = {}  # what stood where a hook is in place now


def install(*stages: Stage) -> list[Hook]:
    """Puts the hooks of some stages in place, in the table's order; skips those already there.

    Warns of hooks that do not fit: stock tasks can do without them. :func:`start_run` refuses.

    Returns:
        Those that were not in place before.
    """
    misfits = _misfits(*stages)
    if misfits:
        logger.warning(_in_words(misfits))
    fresh = [hook for hook in HOOKS if hook.stage in stages and hook not in _before and hook not in misfits]
    for hook in fresh:
        _put(hook)
    return fresh


def start_run(command_line: bool = False) -> None:
    """Puts in place every hook that a run of ours needs.

    Args:
        command_line: the process is fairseq's or ours from its start, so that warnings and errors are ours to print.

    Raises:
        UserError: names every hook that does not fit; a run that only some hooks protect is not safe.
    """
    stages = set(Stage) if command_line else set(Stage) - {Stage.COMMAND_LINE}
    _refuse_misfits(*stages)
    install(*stages)


@contextmanager
def loading_safely() -> Iterator[None]:
    """Keeps files from running code while the block runs, in a process that may never start a run.

    Raises:
        UserError: as :func:`start_run`.
    """
    _refuse_misfits(Stage.LOADING)
    fresh = install(Stage.LOADING)
    try:
        yield
    finally:
        if not any(hook.stage is Stage.RUN for hook in _before):  # a run that was started meanwhile keeps them
            for hook in reversed(fresh):
                _remove(hook)


def _refuse_misfits(*stages: Stage) -> None:
    if misfits := _misfits(*stages):
        raise UserError(_in_words(misfits))


def _misfits(*stages: Stage) -> dict[Hook, str]:
    """The hooks not yet in place that do not fit, and why."""
    missing = (hook for hook in HOOKS if hook.stage in stages and hook not in _before)
    return {hook: misfit for hook in missing if (misfit := find_misfit(hook))}


def _in_words(misfits: dict[Hook, str]) -> str:
    listed = "\n  ".join(misfits.values())
    return f"the plugin's hooks are written for {WRITTEN_FOR}; install that, these do not fit\n  {listed}"


def find_misfit(hook: Hook) -> Optional[str]:
    """What is wrong with a hook's target, in words; None where it is as the hook expects it."""
    try:
        owner, name, standing = _find(hook.target)
    except (ImportError, AttributeError) as error:
        return f"{hook.target} is not there ({error})"
    if hook.signature is None:
        return None
    if standing is _ABSENT:
        return f"{hook.target} is not there"
    found = inspect.signature(getattr(owner, name))
    bare = [parameter.replace(annotation=parameter.empty) for parameter in found.parameters.values()]
    found = str(found.replace(parameters=bare, return_annotation=found.empty))
    if found == hook.signature or _passes_all_on(bare):
        return None
    return f"{hook.target} takes {found}, not {hook.signature}"


def _passes_all_on(parameters: list[inspect.Parameter]) -> bool:
    """As somebody else's wrapper does."""
    return {inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD} <= {one.kind for one in parameters}


def _find(target: str) -> tuple[Any, str, Any]:
    """For ``module:path``: the object that has the name, the name, and what stands there, a static method as one."""
    module, _, path = target.partition(":")
    *parents, name = path.split(".")
    owner = reduce(getattr, parents, importlib.import_module(module))
    return owner, name, inspect.getattr_static(owner, name, _ABSENT)


def _put(hook: Hook) -> None:
    owner, name, standing = _find(hook.target)
    module, _, wrapper = hook.wrapper.partition(":")
    wrapper = getattr(importlib.import_module(f"{PACKAGE}.{module}"), wrapper)
    kind = type(standing) if isinstance(standing, (staticmethod, classmethod)) else None
    ours = wrapper if hook.replaces else wrapper(standing.__func__ if kind else standing)
    _before[hook] = standing
    setattr(owner, name, kind(ours) if kind else ours)
    for copy in filter(None, map(sys.modules.get, hook.copies)):
        if vars(copy).get(name) is standing:
            setattr(copy, name, ours)


def _remove(hook: Hook) -> None:
    owner, name, _ = _find(hook.target)
    standing = _before.pop(hook)
    if standing is _ABSENT:
        delattr(owner, name)
    else:
        setattr(owner, name, standing)
