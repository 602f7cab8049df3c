"""One file of modelling code from the parts that a plan needs."""

import ast
import sys
from collections.abc import Iterable, Mapping
from graphlib import TopologicalSorter
from typing import Any, NamedTuple

from lazyformer_fairseq.huggingface.export.plan import MODELLING, parts_of

ROOTS = ("heads",)  # and what they import
WIDTH = 120  # of a line
HEADER = '''"""A model made by lazyformer_fairseq, for transformers 4.57 and 5. It needs torch besides, no more.

`lazyformer export --to huggingface` merged this file from the parts that the model's pattern needs. MIT license.
"""
'''


class Part(NamedTuple):
    """A file of ``modelling``.

    Attributes:
        needs: other parts that it imports.
        imports: (module, name in it, or "" for the module itself).
        body: all that follows the imports.
    """

    needs: list[str]
    imports: set[tuple[str, str]]
    body: str


def merged_code(plan: Iterable[Mapping[str, Any]]) -> str:
    """The code of a model of this plan.

    Raises:
        UserError: it has a kind that nobody has written for transformers.
    """
    return merge([*parts_of(plan), *ROOTS])


def merge(roots: Iterable[str]) -> str:
    """Parts and all that they import, each after what it imports: first all imports, then each part's body."""
    parts: dict[str, Part] = {}
    waiting = list(roots)
    while waiting:
        name = waiting.pop()
        if name not in parts:
            parts[name] = read_part(name)
            waiting += parts[name].needs
    # Sorted, so that the same pattern has the same file.
    order = TopologicalSorter({name: sorted(parts[name].needs) for name in sorted(parts)}).static_order()
    imports = set().union(*(part.imports for part in parts.values()))
    bodies = "\n\n\n".join(parts[name].body for name in order)
    return f"{HEADER}\n{_import_lines(imports)}\n\n\n{bodies}\n"


def read_part(name: str) -> Part:
    """By its path within ``modelling``, with dots."""
    text = (MODELLING / f"{name.replace('.', '/')}.py").read_text(encoding="utf-8")
    needs, imports, end = [], set(), 0
    for node in ast.parse(text).body:
        is_docstring = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        if isinstance(node, ast.ImportFrom) and node.level:
            package = name.split(".")[: -node.level]
            needs.append(".".join([*package, node.module]))
        elif isinstance(node, ast.ImportFrom):
            imports |= {(node.module, _as_written(alias)) for alias in node.names}
        elif isinstance(node, ast.Import):
            imports |= {(_as_written(alias), "") for alias in node.names}
        elif not is_docstring:
            break
        end = node.end_lineno
    return Part(needs, imports, "\n".join(text.splitlines()[end:]).strip())


def _as_written(alias: ast.alias) -> str:
    return f"{alias.name} as {alias.asname}" if alias.asname else alias.name


def _import_lines(imports: Iterable[tuple[str, str]]) -> str:
    """The standard library's first, then the others'."""
    names: dict[str, list[str]] = {}
    for module, name in sorted(imports):
        names.setdefault(f"from {module} import " if name else f"import {module}", []).append(name)
    lines = {start: _wrapped(start, found) for start, found in names.items()}
    is_standard = {start: start.split()[1].partition(".")[0] in sys.stdlib_module_names for start in lines}
    groups = ([line for start, line in lines.items() if is_standard[start] == first] for first in (True, False))
    return "\n\n".join("\n".join(group) for group in groups)


def _wrapped(start: str, names: Iterable[str]) -> str:
    line = start + ", ".join(names)
    return line if len(line) <= WIDTH else f"{start}(\n" + "".join(f"    {name},\n" for name in names) + ")"
