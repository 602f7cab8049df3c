"""Whether what stands in for fairseq's takes the parameters that fairseq's takes."""

import inspect
from collections.abc import Callable, Iterator
from typing import Any

from lazyformer_fairseq.fairseq_plugin.replacements import _ABSENT, How, Replacement, _find, _ours


def other_parameters(row: Replacement) -> Iterator[str]:
    """In words, those of a row, or of methods that say ``@override``, that differ."""
    _, _, standing = _find(row.target)
    if standing is _ABSENT or row.how is How.MAKES or inspect.isbuiltin(standing):
        return
    ours, pairs = _ours(row), []
    if inspect.isclass(ours):
        methods = [method for method in vars(ours).values() if getattr(method, "__override__", False)]
        for method in (getattr(each, "__func__", each) for each in methods):
            pairs.append((inspect.getattr_static(standing, method.__name__), method, 0))
    else:
        pairs.append((standing, ours, 1 if row.how is How.AROUND else 0))
    for theirs, function, skip in pairs:
        expected, takes_all = _parameters(getattr(theirs, "__func__", theirs))
        names, passes_all_on = _parameters(function)
        names = names[skip:]
        if not takes_all and names != (expected[: len(names)] if passes_all_on else expected):
            yield f"{row.target} takes ({', '.join(expected)}), not ({', '.join(names)})"


def _parameters(function: Callable[..., Any]) -> tuple[list[str], bool]:
    """Names of a function's parameters, and whether it takes any others too, as one does that passes all on."""
    parameters = inspect.signature(function).parameters.values()
    any_others = {inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD}
    names = [parameter.name for parameter in parameters if parameter.kind not in any_others]
    return names, any_others <= {parameter.kind for parameter in parameters}
