"""Files of settings and results, in JSON or YAML, parsed within limits and checked field by field.

Such a file may be damaged or come from somebody else. All comparisons of its content with what a reader needs, given by
the field types of a dataclass, are made by :func:`as_type`. Limits keep a small file from filling the memory or the
stack.
"""

import json
import re
from collections.abc import Iterable
from dataclasses import fields, is_dataclass
from functools import cache
from pathlib import Path
from typing import Annotated, Any, TypeVar

from annotated_types import Ge, Gt, Lt

from lazyformer_fairseq.errors import UserError, nearest

T = TypeVar("T")
LARGEST_JSON = 1 << 28  # bytes; a million training updates take 26 MB
LARGEST_YAML = 100_000  # bytes; these files are written by hand, and the parser is slow
DEEPEST = 100  # levels of nested lists and objects
LARGEST_NUMBER = 2**332  # 100 digits: far more than any count here, but still within the range of floats
SHOWN = 80  # characters of a wrong value that a message shows

# Types of fields with bounded numbers, none of which accepts NaN.
Count = Annotated[int, Ge(0), Lt(2**63)]
PositiveCount = Annotated[int, Gt(0), Lt(2**63)]
Finite = Annotated[float, Gt(float("-inf")), Lt(float("inf"))]
Amount = Annotated[float, Ge(0), Lt(float("inf"))]
PositiveAmount = Annotated[float, Gt(0), Lt(float("inf"))]


def read_limited(path: Path, largest: int) -> str:
    """Return the text of a UTF-8 file.

    Raises:
        OSError: the file cannot be read.
        ValueError: the file is larger than `largest` bytes, or is not UTF-8.
    """
    if path.exists() and not path.is_file() and not path.is_dir():
        raise ValueError("it is a pipe or a device, not a regular file")  # opening a pipe would wait for a writer
    with path.open("rb") as file:
        content = file.read(largest + 1)
    if len(content) > largest:
        raise ValueError(f"it has more than {largest:,} bytes")
    return content.decode("utf-8")


def parse_json(text: str) -> Any:
    """Parse JSON within the limits of this module.

    Raises:
        ValueError: the text is not JSON, has a duplicate key, or exceeds the limits.
        RecursionError: the text is nested very deeply.
    """
    content = json.loads(text, object_pairs_hook=_without_doubles)
    _refuse_beyond_limits(content)
    return content


def _without_doubles(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    _refuse_doubles(key for key, _ in pairs)
    return dict(pairs)


def _refuse_doubles(keys: Iterable[str]) -> None:
    """Raise a ValueError for a duplicate key, because readers of JSON and YAML differ in which value they take."""
    seen: set[str] = set()
    for key in keys:
        if key in seen:
            raise ValueError(f"the key {key[:SHOWN]!r} occurs twice")
        seen.add(key)


def _refuse_beyond_limits(content: Any) -> None:
    """Raise a ValueError for too deep nesting, a number with too many digits, or a value that JSON does not have."""
    depth = 0
    level = [content]
    while level:
        depth += 1
        if depth > DEEPEST:
            raise ValueError(f"it is nested more than {DEEPEST} levels deep")
        below: list[Any] = []
        for value in level:
            if isinstance(value, dict):
                if wrong := next((key for key in value if not isinstance(key, str)), None):
                    raise ValueError(f"the key {str(wrong)[:SHOWN]} is not text; write it in quotes")
                below.extend(value.values())
            elif isinstance(value, list):
                below.extend(value)
            elif isinstance(value, int) and abs(value) >= LARGEST_NUMBER:
                raise ValueError("it has a number with more than 100 digits")
            elif not isinstance(value, (str, int, float, type(None))):
                raise ValueError(f"{str(value)[:SHOWN]} is a {type(value).__name__}; write text in quotes")
        level = below


def read_yaml(path: Path, remedy: str) -> dict[str, Any]:
    """Read a mapping of plain values from a YAML file; aliases are rejected, because they can expand a small file.

    Args:
        path: the file.
        remedy: the end of the error message.

    Raises:
        UserError: the file contains anything else; the message ends in the remedy.
    """
    import yaml

    class Plain(yaml.SafeLoader):
        def compose_node(self, parent: Any, index: Any) -> Any:
            if self.check_event(yaml.AliasEvent):
                raise ValueError(f"it has the alias *{self.peek_event().anchor}; write out its value")
            return super().compose_node(parent, index)

        def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
            _refuse_doubles(key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode))
            return super().construct_mapping(node, deep)

    try:
        content = Plain(read_limited(path, LARGEST_YAML)).get_single_data()
        _refuse_beyond_limits(content)
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror}); {remedy}") from None
    except RecursionError:
        raise UserError(f"{path}: not a YAML file of settings: it is nested too deeply; {remedy}") from None
    except Exception as error:  # PyYAML lets Python's errors through, as for 2020-99-99
        said = " ".join(str(error).split())[:200]
        raise UserError(f"{path}: not a YAML file of settings ({said}); {remedy}") from None
    if not isinstance(content, dict):
        raise UserError(f"{path}: contains {type(content).__name__}, not lines such as `name: value`; {remedy}")
    return content


def as_type(expected: type[T], content: Any, where: object, remedy: str) -> T:
    """Convert JSON content to a dataclass, or to another type that pydantic knows, such as dict[str, int].

    Types are strict: neither the text "1" nor true is a number. Keys that a dataclass does not have are ignored, unless
    its `__pydantic_config__` has ``"extra": "forbid"``.

    Args:
        expected: the dataclass or type.
        content: JSON values.
        where: the file, for the error message.
        remedy: the end of the error message.

    Raises:
        UserError: a field is wrong; the message names the file, the first such field, its value and what it must be,
            and ends in the remedy.
    """
    from pydantic import ValidationError  # takes a tenth of a second

    try:
        text = json.dumps(content)
    except (
        TypeError,
        ValueError,
        RecursionError,
    ) as error:  # checkpoints may contain anything
        raise UserError(f"{where}: contains values that JSON does not have ({error}); {remedy}") from None
    try:
        return _adapter(expected).validate_json(text, strict=True)  # type: ignore[arg-type] # classes are hashable
    except ValidationError as error:
        raise UserError(f"{where}: {_in_words(error, expected)}; {remedy}") from None


@cache
def _adapter(expected: Any) -> Any:
    from pydantic import TypeAdapter

    return TypeAdapter(expected)


def _in_words(error: Any, expected: Any) -> str:
    first = error.errors(include_url=False)[0]
    # pydantic inserts the members of a union, such as `list[str]`, between the names of fields.
    place = ".".join(str(part) for part in first["loc"] if not re.search(r"[\[(]", str(part)))[:SHOWN]
    if first["type"] == "json_invalid":
        return "contains half of a surrogate pair, which is not text"
    if first["type"] == "value_error":  # raised by the dataclass itself
        return str(first["ctx"]["error"])
    if first["type"] == "missing":
        return f"has no field {place!r}"
    if first["type"] == "unexpected_keyword_argument":
        known = []
        if is_dataclass(expected):
            known = [each.name for each in fields(expected)]
        return f"unknown key {place!r}{nearest(place, known)}"
    shown = repr(first["input"])
    if len(shown) > SHOWN:
        shown = f"{shown[:SHOWN]}..."
    must = first["msg"].replace("Input should be", "must be").replace("dictionary", "object")
    if not place:
        return f"is {shown}, {must}"
    return f"field {place!r} is {shown}, {must}"
