"""The package's imports point one way: down the table below, and in no circle, wherever in a file an import stands.

The files are parsed, not imported. A string that is the full name of a file's module, alone or before ":function",
counts as an import too: tables load such modules when they are needed.
"""

import ast
from collections.abc import Mapping
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

from helpers import ROOMS_WITH_FAIRSEQ, syntax_tree

import lazyformer_fairseq

# A folder imports from rows below its own, and from itself; neighbours in a row do not know each other.
LAYERS = (
    ("cli",),
    ("experiments",),
    ("finetuning", "zero_shot"),
    ("corpus", "huggingface", "language_modeling"),
    ("lazyformer_fairseq",),  # its __init__.py
    ("fairseq_plugin",),
    ("training",),
    ("evaluation",),
    ("data", "modules"),
    ("arguments",),
    ("executors",),
    ("extras", "options", "patterns", "report"),
    ("child_process",),
    ("storage",),
    ("errors", "progress"),
)

# Modules outside of ROOMS_WITH_FAIRSEQ that import fairseq anywhere in them.
FAIRSEQ = {"fairseq", "fairseq_cli"}
WHERE_IT_IS_THERE = {"evaluation/bench/models.py"}  # they leave something of fairseq's out elsewhere
# Modules that are named because a new process runs or loads them.
STARTED = {"lazyformer_fairseq.cli", "lazyformer_fairseq.corpus.worker_imports"}
Imports = Mapping[str, set[str]]


def imports_of_package(package: Path) -> dict[str, set[str]]:
    """For each module of a package, by its full name, those of the same package that it imports or names."""
    names = {path: ".".join(path.relative_to(package.parent).with_suffix("").parts) for path in package.rglob("*.py")}
    files = {name.removesuffix(".__init__"): path for path, name in names.items()}
    return {name: imported_modules(path, package, files) - {name} for name, path in files.items()}


def imported_modules(file: Path, package: Path, modules: Mapping[str, Path]) -> set[str]:
    names = set()
    for node in ast.walk(syntax_tree(file)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            source = node.module or ""
            if node.level:
                folder = ".".join(file.relative_to(package.parent).parts[: -node.level])
                source = f"{folder}.{source}".rstrip(".")
            for alias in node.names:  # a module of a package, or a name in a module
                inner = f"{source}.{alias.name}"
                names.add(inner if inner in modules else source)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            named = node.value.partition(":")[0]
            is_file = named in modules and modules[named].name != "__init__.py"
            if is_file and named not in STARTED:
                names.add(named)
    return {name for name in names if name.split(".")[0] == package.name}


def imports_fairseq(file: Path) -> bool:
    nodes = [*ast.walk(syntax_tree(file))]
    names = [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
    names += [node.module or "" for node in nodes if isinstance(node, ast.ImportFrom)]
    return bool({name.partition(".")[0] for name in names} & FAIRSEQ)


def circle(imports: Imports) -> list[str]:
    """Modules that import each other, the first one again at the end; none where there is no circle."""
    try:
        TopologicalSorter(imports).prepare()
    except CycleError as error:
        return error.args[1][::-1]
    return []


def folder_of(module: str) -> str:
    package, *rest = module.split(".")
    return rest[0] if rest else package


def arrows_that_run_up(imports: Imports) -> list[str]:
    """``A -> B`` for each module that imports from a folder that is not below its own."""
    row_of = {folder: row for row, folders in enumerate(LAYERS) for folder in folders}
    if unknown := {folder_of(module) for module in imports} - row_of.keys():
        raise AssertionError(f"give {sorted(unknown)} a place in LAYERS")
    return sorted(
        f"{module} -> {other}"
        for module, others in imports.items()
        for other in others
        if folder_of(module) != folder_of(other) and row_of[folder_of(module)] >= row_of[folder_of(other)]
    )


def subfolders(imports: Imports, depth: int) -> dict[str, set[str]]:
    """The same graph between folders at a depth (the package's is 1); what lies beside them has no row."""

    def subfolder_of(module: str) -> str:
        parts = module.split(".")
        return ".".join(parts[:depth]) if len(parts) > depth else ""

    folders: dict[str, set[str]] = {}
    for module, others in imports.items():
        if own := subfolder_of(module):
            folders.setdefault(own, set()).update({subfolder_of(other) for other in others} - {own, ""})
    return folders


def test_imports_lead_to_modules_that_are_there_below_and_in_no_circle():
    imports = imports_of_package(Path(lazyformer_fairseq.__file__).parent)
    assert len(imports) > 200
    assert {other for others in imports.values() for other in others} <= imports.keys()
    assert arrows_that_run_up(imports) == []
    assert circle(imports) == []
    for depth in (3, 4):
        assert circle(subfolders(imports, depth)) == [], "between subfolders"


def test_fairseq_stays_in_its_rooms():
    package = Path(lazyformer_fairseq.__file__).parent
    with_fairseq = {path.relative_to(package).as_posix() for path in package.rglob("*.py") if imports_fairseq(path)}
    outside = {path for path in with_fairseq if path.partition("/")[0] not in ROOMS_WITH_FAIRSEQ}
    assert len(with_fairseq - outside) > 10 and outside == WHERE_IT_IS_THERE


def test_imports_in_functions_and_in_strings_are_seen(tmp_path):
    package = tmp_path / "pack"
    (package / "upper").mkdir(parents=True)
    for name, text in {
        "upper/table.py": 'ROWS = {"a": "pack.lower", "b": "pack.upper.other:run", "c": "pack is a word"}\n',
        "upper/other.py": "def run():\n    from pack.lower import name\n    return name\n",
        "lower.py": 'name = "pack.upper"  # a folder\n',
        "upper/__init__.py": "",
        "__init__.py": "",
    }.items():
        (package / name).write_text(text)
    imports = imports_of_package(package)
    assert imports["pack.upper.table"] == {"pack.lower", "pack.upper.other"}
    assert imports["pack.upper.other"] == {"pack.lower"}
    assert imports["pack.lower"] == set()
