"""Puts the rows of the table of hooks in place, each once, after checking that it still fits."""

import builtins
import functools
import importlib
import inspect
import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Optional

from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.fairseq_plugin.reliability.hooks import HOOKS, WRITTEN_FOR, Hook, How, Stage

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
    """What is wrong with a hook's target, in words; None where it is as the hook's wrapper expects it."""
    try:
        _, name, standing = _find(hook.target)
    except (ImportError, AttributeError) as error:
        return f"{hook.target} is not there ({error})"
    if standing is _ABSENT:  # a module may shadow a name of Python's
        return None if hasattr(builtins, name) else f"{hook.target} is not there"
    if hook.how is How.MAKES or inspect.isbuiltin(standing):
        return None
    theirs, takes_all = _parameters(getattr(standing, "__func__", standing))
    ours, passes_all_on = _parameters(_wrapper(hook))
    ours = ours[1:] if hook.how is How.AROUND else ours
    if takes_all or ours == (theirs[: len(ours)] if passes_all_on else theirs):
        return None
    return f"{hook.target} takes ({', '.join(theirs)}), not ({', '.join(ours)})"


def _parameters(function: Callable) -> tuple[list[str], bool]:
    """Names of a function's parameters, and whether it takes any others too, as a wrapper does that passes all on."""
    parameters = inspect.signature(function).parameters.values()
    any_others = {inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD}
    names = [parameter.name for parameter in parameters if parameter.kind not in any_others]
    return names, any_others <= {parameter.kind for parameter in parameters}


def _find(target: str) -> tuple[Any, str, Any]:
    """For ``module:path``: the object that has the name, the name, and what stands there, a static method as one."""
    module, _, path = target.partition(":")
    *parents, name = path.split(".")
    owner = functools.reduce(getattr, parents, importlib.import_module(module))
    return owner, name, inspect.getattr_static(owner, name, _ABSENT)


def _wrapper(hook: Hook) -> Callable:
    module, _, name = hook.wrapper.partition(":")
    return getattr(importlib.import_module(f"{PACKAGE}.fairseq_plugin.{module}"), name)


def _put(hook: Hook) -> None:
    owner, name, standing = _find(hook.target)
    ours = _wrapper(hook)
    if hook.how is How.MAKES:
        ours = ours(standing)
    elif hook.how is How.AROUND:
        ours = _around(getattr(standing, "__func__", standing), ours)
    kind = type(standing) if isinstance(standing, (staticmethod, classmethod)) else None
    _before[hook] = standing
    setattr(owner, name, kind(ours) if kind else ours)
    for copy in filter(None, map(sys.modules.get, hook.copies)):
        if vars(copy).get(name) is standing:
            setattr(copy, name, ours)


def _around(standing: Callable, wrapper: Callable) -> Callable:
    @functools.wraps(standing)
    def wrapped(*args, **kwargs):
        return wrapper(standing, *args, **kwargs)

    return wrapped


def _remove(hook: Hook) -> None:
    owner, name, _ = _find(hook.target)
    standing = _before.pop(hook)
    if standing is _ABSENT:
        delattr(owner, name)
    else:
        setattr(owner, name, standing)
