"""One file of code for an exported model: the package's own modules, as far as a plan's sublayers reach them.

We start from the classes of a plan's kinds and from ``exported``, and follow names: from each definition to those that
it mentions, through the imports of its module. Of a class the methods stay that something mentions; so what counts
costs, chooses back ends or reads a causal model's memory stays out by itself. Nothing is written twice, and a new kind
is exported without a line of its own.
"""

import ast
import functools
import importlib.util
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Optional

import torch
from torch import nn

from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.patterns.attention_kinds import ATTENTION_KINDS, SETTINGS, chosen_kinds
from lazyformer_fairseq.patterns.grammar import places_read
from lazyformer_fairseq.patterns.grammar import plan as plan_of
from lazyformer_fairseq.patterns.kinds import ENCODER, find_kind

PACKAGE = "lazyformer_fairseq"
EXPORTED = f"{PACKAGE}.huggingface.exported"
PLAIN = f"{EXPORTED}.plain"
ROOTS = tuple(f"{EXPORTED}.{name}" for name in ("modelling", "heads"))  # all of these
OTHERS = frozenset({"torch", "transformers"})  # that an exported file may import, beside the standard library
WIDTH = 120  # of a line
# Methods that torch and python call.
CALLED = frozenset({*dir(nn.Module), *dir(torch.autograd.Function), "forward", "backward", "setup_context"})
HEADER = '''"""A model made by lazyformer_fairseq, for transformers 4.57 and 5. It needs torch besides, no more.

`lazyformer export --to huggingface` merged this file from the package's modules, as far as the model's pattern needs
them. MIT license.
"""
'''


def plan_as_json(pattern: str) -> list[dict[str, Any]]:
    """Of an encoder's pattern: what :func:`~lazyformer_fairseq.huggingface.exported.modelling.read_plan` reads.

    `kinds` of attention are the outermost first, `settings` all of theirs, or those of another letter. `giver` is a
    number of a sublayer.

    Raises:
        UserError: as :func:`~lazyformer_fairseq.patterns.grammar.plan` does.
    """
    found, sublayers = [], plan_of(pattern, ENCODER)
    for planned, giver in zip(sublayers, places_read(sublayers), strict=True):
        rows = chosen_kinds(planned.values)
        own = [setting for setting in planned.kind.settings if setting not in SETTINGS]
        names = [setting.name for settings in (*(row.settings for row in rows), own) for setting in settings]
        found.append(
            {
                "letter": planned.kind.letter,
                "kinds": [row.name for row in rows],
                "settings": {name: planned.values[name] for name in names},
                "readers": list(planned.consumers),
                "giver": giver,
            }
        )
    return found


def merged_code(plan: Iterable[Mapping[str, Any]]) -> str:
    """The code of a model of this plan, the same for the same kinds.

    Raises:
        UserError: the class of a kind is not at the top of a module that can be read, or needs another library.
    """
    sublayers, variants = classes_of(plan)
    return merge(tuple(sublayers.items()), tuple(variants.items()))


def classes_of(plan: Iterable[Mapping[str, Any]]) -> tuple[dict[str, type], dict[str, type]]:
    """The classes of a plan's sublayers by letter, and of its kinds of attention by name, in the table's order.

    Raises:
        UserError: a class is not at the top of a module.
    """
    places = list(plan)
    letters, names = ({each for place in places for each in place[key]} for key in ("letter", "kinds"))
    sublayers = {letter: find_kind(letter).module(ENCODER) for letter in sorted(letters)}
    variants = {row.name: row.load() for row in ATTENTION_KINDS if row.name in names}
    for name, found in {**sublayers, **variants}.items():
        if "<locals>" in found.__qualname__:
            kind = find_kind(name)
            of = f"s[{name}=...]" if kind is None else f"{kind.name} ({kind.letter})"
            raise UserError(
                f"{of} cannot be exported to Hugging Face: its class {found.__qualname__} is not at the top of a "
                "module; put it there, or take lazyformer export --to safetensors"
            )
    return sublayers, variants


@functools.lru_cache(maxsize=64)
def merge(sublayers: tuple[tuple[str, type], ...], variants: tuple[tuple[str, type], ...]) -> str:
    """One file with these classes in its tables.

    Raises:
        UserError: it would need another library than torch and transformers.
    """
    tables = {"SUBLAYERS": dict(sublayers), "VARIANTS": dict(variants)}
    reader = _Reader({cls.__module__.partition(".")[0] for table in tables.values() for cls in table.values()})
    for root in ROOTS:
        for name in reader.module(root).definitions:
            reader.reach(Name(root, name))
    for table in tables.values():
        for cls in table.values():
            reader.reach(Name(cls.__module__, cls.__name__))
    reader.follow()
    writer = _Writer(reader)
    bodies = writer.bodies()
    rows = [f'{name}["{key}"] = {writer.name(cls)}' for name, table in tables.items() for key, cls in table.items()]
    end = "\n".join(rows)
    return f"{HEADER}\n{_import_lines(writer.imports)}\n\n{bodies}\n\n\n{end}\n"


class Name(NamedTuple):
    """Of something in a module; the module itself where `name` is empty."""

    module: str
    name: str


@dataclass(eq=False)
class Definition:
    """A statement at the top of a module.

    Attributes:
        members: of a class, those of its statements that stay.
    """

    module: str
    names: tuple[str, ...]
    node: ast.stmt
    start: int
    members: list[ast.stmt] = field(default_factory=list)


class Module:
    """A module's source.

    Attributes:
        definitions: by name.
        imported: by name here, what it is elsewhere.
    """

    def __init__(self, name: str):
        spec = importlib.util.find_spec(name)
        if spec is None or spec.origin is None:
            raise UserError(f"module {name}: its source cannot be read, so that nothing of it can be exported")
        self.name, self.lines = name, Path(spec.origin).read_text(encoding="utf-8").splitlines()
        self.definitions: dict[str, Definition] = {}
        self.imported: dict[str, Name] = {}
        end, package = 0, spec.name if spec.submodule_search_locations else spec.name.rpartition(".")[0]
        for node in ast.parse("\n".join(self.lines)).body:
            if isinstance(node, ast.Import):
                self.imported |= {alias.asname or alias.name: Name(alias.name, "") for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                parents = package.split(".")[: 1 - node.level] if node.level > 1 else package.split(".")
                module = ".".join([*parents, *filter(None, [node.module])]) if node.level else node.module
                self.imported |= {alias.asname or alias.name: Name(module, alias.name) for alias in node.names}
            elif names := _defined_by(node):
                start = min([node.lineno, *(each.lineno for each in getattr(node, "decorator_list", ()))])
                while start - 1 > end and self.lines[start - 2].startswith("#"):
                    start -= 1
                self.definitions |= dict.fromkeys(names, Definition(name, names, node, start))
            end = node.end_lineno


class _Reader:
    """What is reached: definitions of followed packages, and names that anything mentions."""

    def __init__(self, packages: Iterable[str]):
        self.packages = {PACKAGE, *packages}
        self.modules: dict[str, Module] = {}
        self.reached: list[Definition] = []
        self.mentioned: set[str] = set()
        names = ast.literal_eval(self.module(PLAIN).definitions["INSTEAD"].node.value)
        self.instead = {name.rpartition(".")[0::2]: name.rpartition(".")[2] for name in names}

    def module(self, name: str) -> Module:
        if name not in self.modules:
            self.modules[name] = Module(name)
        return self.modules[name]

    def is_followed(self, module: str) -> bool:
        return module.partition(".")[0] in self.packages

    def resolve(self, module: str, name: str) -> Optional[Name]:
        """Where a name at the top of a module comes from; None for a builtin or a local one."""
        found = Name(module, name)
        while found.name and self.is_followed(found.module):
            if found in self.instead:
                return Name(PLAIN, self.instead[found])
            source = self.module(found.module)
            if found.name in source.definitions:
                return found
            further = source.imported.get(found.name)
            if further in (None, found):  # a module of a package
                path = f"{found.module}.{found.name}"
                is_package = importlib.util.find_spec(found.module).submodule_search_locations is not None
                return Name(path, "") if is_package and importlib.util.find_spec(path) else None
            found = further
        return found

    def reach(self, name: Name) -> None:
        definition = self.module(name.module).definitions[name.name]
        if definition not in self.reached:
            self.reached.append(definition)

    def follow(self) -> None:
        """Reaches all that is mentioned by what is reached."""
        done: set[int] = set()
        before: tuple[int, ...] = ()
        while before != (len(self.reached), len(self.mentioned), len(done)):
            before = (len(self.reached), len(self.mentioned), len(done))
            for definition in list(self.reached):
                for part in self.parts(definition):
                    if id(part) not in done:
                        done.add(id(part))
                        self._follow(definition, part)

    def parts(self, definition: Definition) -> list[ast.AST]:
        """Those that stay, as far as is known now; of a class its head and some of its members."""
        node = definition.node
        if not isinstance(node, ast.ClassDef):
            return [node]
        definition.members = [each for each in node.body if self._stays(each, definition)]
        head = [*node.bases, *node.keywords, *node.decorator_list]
        return [*head, *definition.members]

    def _stays(self, member: ast.stmt, definition: Definition) -> bool:
        if definition.module in (*ROOTS, PLAIN) or isinstance(member, ast.Expr):
            return True
        if isinstance(member, ast.AnnAssign) and "ClassVar" not in ast.unparse(member.annotation):
            return True  # a field
        names = _defined_by(member)
        return any(name in self.mentioned or name in CALLED or name.startswith("__") for name in names)

    def _follow(self, definition: Definition, part: ast.AST) -> None:
        for each in ast.walk(part):
            if isinstance(each, ast.Attribute):
                self.mentioned.add(each.attr)
            elif (
                isinstance(each, ast.Call)
                and isinstance(each.func, ast.Name)
                and each.func.id in ("getattr", "hasattr")
            ):
                self.mentioned.add(str(getattr(each.args[1], "value", "")))
        for _, target in self.references(definition.module, part):
            if target.name and self.is_followed(target.module):
                self.reach(target)

    def references(self, module: str, part: ast.AST) -> Iterator[tuple[ast.expr, Name]]:
        """All expressions in a part of a definition that stand for something outside it, and for what."""
        for node in _free_names(part):
            attribute, name = (node.attr, node.value.id) if isinstance(node, ast.Attribute) else ("", node.id)
            target = self.resolve(module, name)
            if target is None:
                continue
            if attribute and not target.name and self.is_followed(target.module):  # a part of a module of ours
                yield node, self.resolve(target.module, attribute)
            else:
                yield (node.value if attribute else node), target


class _Writer:
    """Puts what was reached in order, under names of which none is there twice.

    Attributes:
        imports: (module, name in it, or "" for the module itself), as written.
    """

    def __init__(self, reader: _Reader):
        self.reader = reader
        self.imports: set[tuple[str, str]] = set()
        self.own_names: dict[Name, str] = {}
        taken: set[str] = set()
        modules = [*ROOTS, PLAIN, *sorted({each.module for each in reader.reached})]
        for module in dict.fromkeys(modules):
            stem = module.rpartition(".")[2]
            for definition in (each for each in reader.reached if each.module == module):
                for name in definition.names:
                    private = "_" if name.startswith("_") else ""
                    own = name if name not in taken else f"{private}{stem}_{name.lstrip('_')}"
                    assert own not in taken, f"{own} is there twice"
                    taken.add(own)
                    self.own_names[Name(module, name)] = own

    def name(self, cls: type) -> str:
        return self.own_names[Name(cls.__module__, cls.__name__)]

    def bodies(self) -> str:
        """All definitions, module by module, each after those whose definitions it mentions."""
        parts, before = [], None
        for module in self._in_order():
            of_module = sorted(
                (each for each in self.reader.reached if each.module == module), key=lambda one: one.start
            )
            for number, definition in enumerate(of_module):
                is_line = isinstance(definition.node, (ast.Assign, ast.AnnAssign))
                head = "" if number else f"\n\n\n# {module}"
                parts.append(head + ("\n" if is_line and (before or not number) else "\n\n\n") + self._text(definition))
                before = is_line
        return "".join(parts).strip()

    def _in_order(self) -> list[str]:
        found: list[str] = []
        under_way: set[str] = set()

        def visit(module: str) -> None:
            under_way.add(module)
            for definition in (each for each in self.reader.reached if each.module == module):
                for part in self.reader.parts(definition):
                    for _, target in self.reader.references(module, part):
                        if self.reader.is_followed(target.module) and target.module not in under_way:
                            visit(target.module)
            found.append(module)

        for module in (*sorted({each.module for each in self.reader.reached} - {*ROOTS}), *ROOTS):
            if module not in under_way:
                visit(module)
        return found

    def _text(self, definition: Definition) -> str:
        """The lines of a definition that stay, with the names of this file in them."""
        lines, node = self._renamed(definition), definition.node
        end = node.body[0].lineno - 1 if isinstance(node, ast.ClassDef) else node.end_lineno
        decorators = getattr(node, "decorator_list", ())
        # A function that is torch's operator is a plain one in an exported file: graphs look into it.
        operators = [each for each in decorators if ast.unparse(each).startswith("torch.library.")]
        dropped = {number for each in operators for number in range(each.lineno, each.end_lineno + 1)}
        kept = [lines[number - 1] for number in range(definition.start, end + 1) if number not in dropped]
        for member in node.body if isinstance(node, ast.ClassDef) else ():
            first, end = end + 1, member.end_lineno
            if member not in definition.members:
                continue
            found = lines[first - 1 : end]
            is_first = member is definition.members[0]
            if is_first and not found[0]:  # right under the head
                found = found[1:]
            elif ast.get_docstring(node) and definition.members[1:2] == [member] and found[0]:
                kept.append("")
            kept += found
        return "\n".join(kept).rstrip()

    def _renamed(self, definition: Definition) -> list[str]:
        """The lines of a definition's module, in which it and what it refers to have their names of this file."""
        module = self.reader.module(definition.module)
        lines = list(module.lines)
        references = (self.reader.references(definition.module, part) for part in self.reader.parts(definition))
        edits = [each for found in references for each in found]
        for node, target in sorted(edits, key=lambda each: (each[0].lineno, each[0].col_offset), reverse=True):
            line = lines[node.lineno - 1].encode()
            text = self._called(module, node, target).encode()
            lines[node.lineno - 1] = (line[: node.col_offset] + text + line[node.end_col_offset :]).decode()
        for name in definition.names:
            if (own := self.own_names[Name(definition.module, name)]) != name:
                number = definition.node.lineno - 1
                lines[number] = re.sub(rf"\b{name}\b", own, lines[number], count=1)
        return lines

    def _called(self, module: Module, node: ast.expr, target: Name) -> str:
        """What a reference is called in the one file; notes what has to be imported."""
        if target.name and self.reader.is_followed(target.module):
            return self.own_names[target]
        local = node.id if isinstance(node, ast.Name) else ast.unparse(node)
        top = target.module.partition(".")[0]
        if top not in OTHERS and top not in sys.stdlib_module_names:
            raise UserError(
                f"{module.name} cannot be exported to Hugging Face: it needs {top}, beside torch and transformers"
            )
        if target.name:
            self.imports.add((target.module, target.name if local == target.name else f"{target.name} as {local}"))
        else:
            self.imports.add((target.module if local == target.module else f"{target.module} as {local}", ""))
        return local


def _defined_by(node: ast.stmt) -> tuple[str, ...]:
    """The names that a statement defines."""
    if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
        return (node.name,)
    targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
    return tuple(each.id for target in targets for each in ast.walk(target) if isinstance(each, ast.Name))


_FUNCTIONS = (ast.FunctionDef, ast.Lambda, ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)


def _free_names(node: ast.AST, local: frozenset[str] = frozenset()) -> Iterator[ast.expr]:
    """Names that are read and that no function around them binds, or attributes of such names."""
    if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
        if node.value.id not in local:
            yield node
        return
    if isinstance(node, ast.Name):
        if isinstance(node.ctx, ast.Load) and node.id not in local:
            yield node
        return
    if isinstance(node, (ast.FunctionDef, ast.Lambda)):
        arguments = node.args
        outside = [*arguments.defaults, *filter(None, arguments.kw_defaults), *getattr(node, "decorator_list", ())]
        every = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs, arguments.vararg, arguments.kwarg]
        every = [each for each in every if each is not None]
        outside += [each.annotation for each in every if each.annotation is not None]
        outside += [node.returns] if getattr(node, "returns", None) is not None else []
        for each in outside:
            yield from _free_names(each, local)
        body = node.body if isinstance(node.body, list) else [node.body]
        inner = local | {each.arg for each in every} | {name for each in body for name in _bound(each)}
        for each in body:
            yield from _free_names(each, inner)
        return
    if isinstance(node, (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)):
        local = local | {name for each in node.generators for name in _bound(each.target)}
    for each in ast.iter_child_nodes(node):
        yield from _free_names(each, local)


def _bound(node: ast.AST) -> Iterator[str]:
    """Names that a statement binds where it stands, not within functions of its own."""
    if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
        yield node.id
    elif isinstance(node, (ast.FunctionDef, ast.ClassDef)):
        yield node.name
        return
    if isinstance(node, _FUNCTIONS):
        return
    for each in ast.iter_child_nodes(node):
        yield from _bound(each)


def _import_lines(imports: Iterable[tuple[str, str]]) -> str:
    """The standard library's first, then the others'."""
    names: dict[str, list[str]] = {}
    for module, name in sorted(imports):
        names.setdefault(f"from {module} import " if name else f"import {module}", []).append(name)
    lines = {}
    for start, found in names.items():
        line = start + ", ".join(found)
        lines[start] = line if len(line) <= WIDTH else f"{start}(\n" + "".join(f"    {each},\n" for each in found) + ")"
    is_standard = {start: start.split()[1].partition(".")[0] in sys.stdlib_module_names for start in lines}
    groups = ([line for start, line in lines.items() if is_standard[start] == first] for first in (True, False))
    return "\n\n".join("\n".join(group) for group in groups)
