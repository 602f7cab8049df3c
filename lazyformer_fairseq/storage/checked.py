"""Parses and validates JSON and YAML files that contain settings or results.

These files may be damaged or come from an untrusted source. :func:`as_type` validates their contents against the field
types of a dataclass. Size and depth limits prevent small files from exhausting the memory or the stack.
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
DEEPEST = 100  # maximum nesting depth of lists and objects
LARGEST_NUMBER = 2**332  # 100 digits: much larger than any count here, but still within the range of floats
SHOWN = 80  # maximum number of characters of an invalid value shown in a message

# Types for bounded numbers; none of them accepts NaN.
Count = Annotated[int, Ge(0), Lt(2**63)]
PositiveCount = Annotated[int, Gt(0), Lt(2**63)]
Finite = Annotated[float, Gt(float("-inf")), Lt(float("inf"))]
Amount = Annotated[float, Ge(0), Lt(float("inf"))]
PositiveAmount = Annotated[float, Gt(0), Lt(float("inf"))]


def read_limited(path: Path, largest: int) -> str:
    """Read a UTF-8 file of at most `largest` bytes.

    Raises:
        OSError: the file cannot be read.
        ValueError: the file is too large, is not a regular file, or is not UTF-8.
    """
    if path.exists() and not path.is_file() and not path.is_dir():
        raise ValueError("it is a pipe or a device, not a regular file")  # opening a pipe would wait for a writer
    with path.open("rb") as file:
        content = file.read(largest + 1)
    if len(content) > largest:
        raise ValueError(f"it is larger than {largest:,} bytes")
    return content.decode("utf-8")


def parse_json(text: str) -> Any:
    """Parse JSON subject to this module's limits.

    Raises:
        ValueError: the text is not JSON, has a duplicate key, or exceeds a limit, including the nesting limit.
        RecursionError: the text is nested too deeply for Python's JSON parser.
    """
    content = json.loads(text, object_pairs_hook=_without_doubles)
    _refuse_beyond_limits(content)
    return content


def _without_doubles(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    _refuse_doubles(key for key, _ in pairs)
    return dict(pairs)


def _refuse_doubles(keys: Iterable[str]) -> None:
    """Raise a ValueError for a duplicate key, because JSON and YAML parsers differ in which value they use."""
    seen: set[str] = set()
    for key in keys:
        if key in seen:
            raise ValueError(f"the key {key[:SHOWN]!r} occurs twice")
        seen.add(key)


def _refuse_beyond_limits(content: Any) -> None:
    """Raise a ValueError for excessive nesting, a number with too many digits, or a value not supported by JSON."""
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
                    raise ValueError(f"the key {str(wrong)[:SHOWN]} is not a string; put it in quotes")
                below.extend(value.values())
            elif isinstance(value, list):
                below.extend(value)
            elif isinstance(value, int) and abs(value) >= LARGEST_NUMBER:
                raise ValueError("it contains a number with more than 100 digits")
            elif not isinstance(value, (str, int, float, type(None))):
                raise ValueError(f"{str(value)[:SHOWN]} is a {type(value).__name__}; put text in quotes")
        level = below


def read_yaml(path: Path, remedy: str) -> dict[str, Any]:
    """Read a mapping of plain values from a YAML file; aliases are rejected because they can expand to a huge size.

    Args:
        path: the file.
        remedy: advice at the end of the error message.

    Raises:
        UserError: the file contains anything else; the message ends with the remedy.
    """
    import yaml

    class Plain(yaml.SafeLoader):
        def compose_node(self, parent: Any, index: Any) -> Any:
            if self.check_event(yaml.AliasEvent):
                raise ValueError(f"it contains the alias *{self.peek_event().anchor}; write out its value instead")
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
        raise UserError(f"{path}: not a valid YAML settings file, because it is nested too deeply; {remedy}") from None
    except Exception as error:  # PyYAML does not catch Python's own errors, such as for the date 2020-99-99
        said = " ".join(str(error).split())[:200]
        raise UserError(f"{path}: not a valid YAML settings file ({said}); {remedy}") from None
    if not isinstance(content, dict):
        raise UserError(f"{path}: found {type(content).__name__}, not lines such as `name: value`; {remedy}")
    return content


def as_type(expected: type[T], content: Any, where: object, remedy: str) -> T:
    """Validate JSON values and convert them to a dataclass or another type that pydantic supports.

    Validation is strict: neither the string "1" nor true counts as a number. Unknown keys are ignored, unless the
    dataclass's `__pydantic_config__` has ``"extra": "forbid"``.

    Args:
        expected: the dataclass or type, such as dict[str, int].
        content: JSON values.
        where: the file, for the error message.
        remedy: advice at the end of the error message.

    Raises:
        UserError: a field is invalid; the message names the file, the first invalid field, its value and the
            requirement, and ends with the remedy.
    """
    from pydantic import ValidationError  # this import takes a tenth of a second

    try:
        text = json.dumps(content)
    except (
        TypeError,
        ValueError,
        RecursionError,
    ) as error:  # checkpoints may contain anything
        raise UserError(f"{where}: it contains values that JSON does not support ({error}); {remedy}") from None
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
    location = [str(part) for part in first["loc"]]
    # pydantic inserts union members, such as `list[str]`, between the field names.
    names = [part for part in location if not re.search(r"[\[(]", part)]
    place = ".".join(names)[:SHOWN]
    if first["type"] == "json_invalid":
        return "it contains an unpaired surrogate, which is not valid text"
    if first["type"] == "value_error":  # raised by the dataclass itself
        return str(first["ctx"]["error"])
    if first["type"] == "missing":
        return f"field {place!r} is missing"
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
        return f"found {shown}, but it {must}"
    return f"field {place!r} is {shown}, but {must}"
