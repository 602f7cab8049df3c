"""The code in an exported folder: this package's modules, converted to relative imports.

The modules are found by following imports, starting from the models and the classes of the pattern's sublayers. The
folder is flat, because transformers finds files by relative imports and does not support subfolders:
``modules/linear.py`` becomes ``modules_linear.py``. ``modeling_lazyformer.py`` contains the classes named in the
config. It imports all other files, because transformers copies only the files that it imports.
"""

import ast
import importlib.util
import sys
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Union

from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.huggingface.models.encoder import CODE_FILE
from lazyformer_fairseq.modules.timing import SELECTOR
from lazyformer_fairseq.patterns.attention_variants import chosen_variants
from lazyformer_fairseq.patterns.grammar import plan
from lazyformer_fairseq.patterns.kinds import ENCODER, Kind

PACKAGE = "lazyformer_fairseq"
MODELS = f"{PACKAGE}.huggingface.models.heads"
# torch depends on typing_extensions and transformers depends on numpy, so every user of an export has both.
LIBRARIES = {"torch", "transformers", "numpy", "typing_extensions"}
MODELING = '''"""A model exported by lazyformer_fairseq, for transformers 4.57 and 5. It also requires torch and numpy.

The other files are modules of that package, unchanged except for relative imports. MIT license.
"""

# ruff: noqa: F401
from . import modules_attention_interface, patterns_kinds
from .huggingface_models_configuration import LazyFormerConfig
from .huggingface_models_encoder import LazyFormerModel, LazyFormerPreTrainedModel
from .huggingface_models_heads import (
    LazyFormerForMaskedLM,
    LazyFormerForQuestionAnswering,
    LazyFormerForSequenceClassification,
    LazyFormerForTokenClassification,
)
from .patterns_attention_variants import CLASSES
{imports}

# Only this model's sublayers are needed, so packages that register others are not imported.
patterns_kinds._mistakes = []
{rows}

# An exported model does not include the Triton kernels.
modules_attention_interface.USES_TRITON = False

# An exported model does not time back ends or store measurements on this machine.
SELECTOR.measures = False
LazyFormerPreTrainedModel.selects_back_ends = False

# transformers saves the file that defines a class and the files that it imports.
for model in (
    LazyFormerConfig,
    LazyFormerModel,
    LazyFormerForMaskedLM,
    LazyFormerForQuestionAnswering,
    LazyFormerForSequenceClassification,
    LazyFormerForTokenClassification,
):
    model.__module__ = __name__
'''
# This text replaces modules that require another library or register torch operators. Only the installed package uses
# such modules, for example to store measurements.
STAND_IN = '''"""A stand-in for {module}, which an exported model does not need."""


def __getattr__(name):
    if name.startswith("__"):
        raise AttributeError(name)

    def absent(*args, **kwargs):
        raise NotImplementedError(f"{module}.{{name}} requires lazyformer_fairseq")

    return absent
'''

# Functions that the package registers as torch operators stay plain functions in an export. Several exports can then be
# loaded at once, and graph compilers can trace into the functions.
OPERATORS = '''"""A replacement for torch.library.custom_op that leaves functions unchanged."""


class PlainFunction:
    def __init__(self, function):
        self.function = function

    def __call__(self, *args):
        return self.function(*args)

    def register_fake(self, fake):
        return fake


def custom_op(name, function=None, **options):
    return PlainFunction if function is None else PlainFunction(function)
'''


def write_code(pattern: str, folder: Path) -> None:
    """Write the code of an encoder with this pattern to an existing folder.

    Raises:
        UserError: The code cannot be exported; see :func:`code_files`.
    """
    for name, text in code_files(pattern).items():
        (folder / name).write_text(text, encoding="utf-8")


def code_files(pattern: str) -> dict[str, str]:
    """Return the code of an encoder with this pattern, by file name.

    Patterns with the same kinds of sublayers have the same code.

    Raises:
        UserError: A sublayer's class cannot be imported by name, or its module requires another library.
    """
    modules = [MODELS]
    classes: dict[str, type] = {}
    for planned in plan(pattern, ENCODER):
        row = planned.kind
        cls = row.module(ENCODER)
        if "<locals>" in cls.__qualname__:
            raise UserError(
                f"{row.name} ({row.letter}) cannot be exported to Hugging Face: its class {cls.__qualname__} is not at "
                "the top level of a module; move the class there, or use lazyformer export --to safetensors"
            )
        if not cls.__module__.startswith(f"{PACKAGE}."):
            modules.append(_registering_module(row, cls))
        if isinstance(row.modules[ENCODER], str):
            classes[row.modules[ENCODER]] = cls
        classes |= {attention.place: attention.load() for attention in chosen_variants(planned.values)}
    modules += [cls.__module__ for cls in classes.values()]
    files = follow_imports(modules)

    imports = [f"from .{Path(file).stem} import __name__ as _" for file in sorted(files)]
    rows = []
    for place, cls in sorted(classes.items()):
        imports.append(f"from .{_flat(cls.__module__)} import {cls.__name__} as {cls.__name__}")
        rows.append(f'CLASSES["{place}"] = {cls.__name__}')
    imports.append(f"from .{_flat(type(SELECTOR).__module__)} import SELECTOR")
    files[CODE_FILE] = MODELING.format(imports="\n".join(imports), rows="\n".join(rows))
    return files


def _registering_module(row: Kind, cls: type) -> str:
    """Return the name of the module in another package that registers a kind of sublayer.

    Raises:
        UserError: The package that defines the sublayer's class has no module with the kind as a global variable.
    """
    package = cls.__module__.partition(".")[0]
    for name, module in sorted(sys.modules.items()):
        if name.partition(".")[0] != package:
            continue
        if any(value is row for value in vars(module).values()):
            return name
    raise UserError(
        f"{row.name} ({row.letter}) cannot be exported to Hugging Face: no module in {package} assigns its Kind to a "
        f"global variable, as in ROW = register(Kind(...))"
    )


def _flat(module: str) -> str:
    """Return a module's name in an export, which has no subfolders."""
    return module.removeprefix(f"{PACKAGE}.").replace(".", "_")


def follow_imports(modules: list[str], libraries: Collection[str] = LIBRARIES) -> dict[str, str]:
    """Return the source code of these modules and of all modules that they import, by file name.

    Args:
        modules: The names of the modules.
        libraries: The libraries that the code may import.

    Raises:
        UserError: A module from another package imports an unsupported library or uses relative imports.
    """
    packages = {name.partition(".")[0] for name in modules}
    files: dict[str, str] = {}
    todo = list(modules)
    while todo:
        name = todo.pop()
        if f"{_flat(name)}.py" in files:
            continue
        source = Path(importlib.util.find_spec(name).origin).read_text(encoding="utf-8")
        imports = list(_imports(ast.parse(source)))
        imported = {module.partition(".")[0] for node in imports for module in _imported_modules(node)}
        lacking = imported - packages - set(libraries) - sys.stdlib_module_names
        if "torch.library.Library(" in source or (lacking and name.startswith(f"{PACKAGE}.")):
            files[f"{_flat(name)}.py"] = STAND_IN.format(module=name)
            continue
        if lacking:
            what = "a relative import" if "" in lacking else min(lacking)
            raise UserError(
                f"{name} cannot be exported to Hugging Face: it uses {what}, but may only use torch, transformers, "
                "numpy and absolute imports from its own package"
            )

        lines = source.splitlines(keepends=True)
        for node in imports:
            if not isinstance(node, ast.ImportFrom) or node.module.partition(".")[0] not in packages:
                continue
            indent = " " * node.col_offset
            statements = []
            for alias in node.names:
                submodule = f"{node.module}.{alias.name}"
                if _is_module(submodule):
                    todo.append(submodule)
                    statements.append(f"{indent}from . import {_flat(submodule)} as {alias.asname or alias.name}\n")
                else:
                    todo.append(node.module)
                    as_name = f" as {alias.asname}" if alias.asname else ""
                    statements.append(f"{indent}from .{_flat(node.module)} import {alias.name}{as_name}\n")
            lines[node.lineno - 1] = "".join(statements)
            for number in range(node.lineno, node.end_lineno):
                lines[number] = ""
        text = "".join(lines)
        if "torch.library.custom_op" in source:
            text = text.replace("torch.library.custom_op", "custom_op")
            text = text.replace("\nimport torch\n", "\nimport torch\nfrom .operators import custom_op\n", 1)
        files[f"{_flat(name)}.py"] = text
    files["operators.py"] = OPERATORS
    return files


def _imports(tree: ast.AST) -> Iterator[Union[ast.Import, ast.ImportFrom]]:
    """Yield all import statements except those in a ``try``, which are optional."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            yield node
        elif not isinstance(node, ast.Try):
            yield from _imports(node)


def _imported_modules(node: Union[ast.Import, ast.ImportFrom]) -> list[str]:
    """Return the modules named in an import statement; "" for a relative import."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    return [node.module if not node.level else ""]


def _is_module(name: str) -> bool:
    parent, _, _ = name.rpartition(".")
    is_package = importlib.util.find_spec(parent).submodule_search_locations is not None
    return is_package and importlib.util.find_spec(name) is not None
