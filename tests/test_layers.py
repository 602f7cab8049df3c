"""The package's imports point one way: down the table below, and in no circle, wherever in a file an import stands.

The files are parsed, not imported. What a table names in a string and loads when it is needed is no import.
"""

import ast
from collections.abc import Mapping
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

import lazyformer_fairseq

# A folder imports from rows below its own, and from itself; neighbours in a row do not know each other.
LAYERS = (
    ("cli",),
    ("experiments",),
    ("finetuning",),
    ("corpus", "huggingface", "language_modeling", "pretraining"),
    ("warm_start",),
    ("measure",),
    ("lazyformer_fairseq",),  # its __init__.py
    ("fairseq_plugin",),
    ("data", "modules"),
    ("arguments", "child_process", "devices", "extras", "options", "patterns", "report"),
    ("old_names", "storage"),
    ("errors",),
)

Imports = Mapping[str, set[str]]


def imports_of_package(package: Path) -> dict[str, set[str]]:
    """For each module of a package, by its full name, those of the same package that it imports."""
    files = {name_of(path, package): path for path in package.rglob("*.py")}
    return {name: imported_modules(path, package, files) - {name} for name, path in files.items()}


def name_of(file: Path, package: Path) -> str:
    parts = file.relative_to(package.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imported_modules(file: Path, package: Path, modules: Mapping[str, Path]) -> set[str]:
    names = set()
    for node in ast.walk(ast.parse(file.read_bytes())):
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
    return {name for name in names if name.split(".")[0] == package.name}


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
    folders: dict[str, set[str]] = {}
    for module, others in imports.items():
        if own := subfolder_of(module, depth):
            folders.setdefault(own, set()).update({subfolder_of(other, depth) for other in others} - {own, ""})
    return folders


def subfolder_of(module: str, depth: int) -> str:
    parts = module.split(".")
    return ".".join(parts[:depth]) if len(parts) > depth else ""


@pytest.fixture(scope="module")
def imports() -> Imports:
    return imports_of_package(Path(lazyformer_fairseq.__file__).parent)


def test_all_imports_lead_to_modules_that_are_there(imports):
    assert len(imports) > 200
    assert {other for others in imports.values() for other in others} <= imports.keys()


def test_no_modules_import_each_other_in_a_circle(imports):
    assert circle(imports) == []


@pytest.mark.parametrize("depth", [3, 4])
def test_no_subfolders_import_each_other_in_a_circle(imports, depth):
    assert circle(subfolders(imports, depth)) == []


def test_no_import_leads_to_a_layer_above(imports):
    assert arrows_that_run_up(imports) == []


BAD_TREE = {
    "__init__": "",
    "cli": "from lazyformer_fairseq.measure.costs import flops",
    "errors": "",
    "measure/__init__": "",
    "measure/costs/flops": "from lazyformer_fairseq.storage.whole import write\nimport lazyformer_fairseq.errors",
    "storage/__init__": "",
    "storage/whole": "def write():\n    from lazyformer_fairseq.storage import json_files",
    "storage/json_files": (
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from .whole import write\n"
        "from ..measure.costs import flops"
    ),
}


def write_tree(folder: Path, files: Mapping[str, str]) -> Path:
    package = folder / "lazyformer_fairseq"
    for name, content in files.items():
        file = package / f"{name}.py"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(content)
    return package


def test_a_bad_tree_is_found_out(tmp_path):
    imports = imports_of_package(write_tree(tmp_path, BAD_TREE))
    assert imports["lazyformer_fairseq.cli"] == {"lazyformer_fairseq.measure.costs.flops"}
    found = circle({name: others for name, others in imports.items() if ".storage" in name})
    assert set(found) == {"lazyformer_fairseq.storage.whole", "lazyformer_fairseq.storage.json_files"}
    assert arrows_that_run_up(imports) == [
        "lazyformer_fairseq.storage.json_files -> lazyformer_fairseq.measure.costs.flops"
    ]


def test_circles_between_subfolders_are_found(tmp_path):
    files = {
        "finetuning/glue/run/grid": "import lazyformer_fairseq.finetuning.glue.report.rows",
        "finetuning/glue/run/queue": "",
        "finetuning/glue/report/rows": "",
    }
    files["finetuning/glue/report/tables"] = "from lazyformer_fairseq.finetuning.glue.run.queue import RunQueue"
    imports = imports_of_package(write_tree(tmp_path, files))
    assert circle(imports) == []
    assert set(circle(subfolders(imports, 4))) == {
        "lazyformer_fairseq.finetuning.glue.run",
        "lazyformer_fairseq.finetuning.glue.report",
    }


def test_neighbours_in_a_row_do_not_know_each_other(tmp_path):
    files = {"finetuning/grid": "import lazyformer_fairseq.experiments.search.run"}
    files |= {"experiments/search/run": "", "new/thing": ""}
    imports = imports_of_package(write_tree(tmp_path, files))
    with pytest.raises(AssertionError, match=r"\['new'\] a place"):
        arrows_that_run_up(imports)
    del imports["lazyformer_fairseq.new.thing"]
    assert arrows_that_run_up(imports) == [
        "lazyformer_fairseq.finetuning.grid -> lazyformer_fairseq.experiments.search.run"
    ]
