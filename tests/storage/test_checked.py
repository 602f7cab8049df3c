"""Settings and results that are damaged, or were written to harm: each is refused by file and field, within limits."""

import json
import os
import shutil
from dataclasses import dataclass, field
from typing import Any, Optional

import pytest
from helpers import ROOT

from lazyformer_fairseq.data.text.tokenizer import load_tokenizer
from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.storage.checked import Amount, Count, as_type, read_yaml
from lazyformer_fairseq.storage.json_files import read_as, read_json

REMEDY = "write it again"


@dataclass(frozen=True)
class Part:
    rows: Count


@dataclass(frozen=True)
class Whole:
    name: str
    price: Amount = 0.0
    texts: tuple[str, ...] = ()
    longest: Optional[int] = None
    parts: dict[str, Part] = field(default_factory=dict)


@dataclass(frozen=True)
class Closed:
    __pydantic_config__ = {"extra": "forbid"}  # noqa: RUF012
    data: str = ""


def test_content_becomes_an_instance(tmp_path):
    content = {"name": "x", "price": 2, "texts": ["a", "b"], "parts": {"train": {"rows": 3}}, "passed over": 1}
    (tmp_path / "file.json").write_text(json.dumps(content))
    assert read_as(Whole, tmp_path / "file.json") == Whole("x", 2.0, ("a", "b"), None, {"train": Part(3)})


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ({}, "field 'name' is missing"),
        ({"name": 5}, "field 'name' is 5, but must be a valid string"),
        ({"name": "x", "price": True}, "field 'price' is True, but must be a valid number"),
        ({"name": "x", "price": "1"}, "field 'price' is '1', but must be a valid number"),
        ({"name": "x", "price": -1}, "field 'price' is -1, but must be greater than or equal to 0"),
        ({"name": "x", "price": float("nan")}, "field 'price' is nan, but must be less than inf"),
        ({"name": "x", "price": float("inf")}, "field 'price' is inf, but must be less than inf"),
        ({"name": "x", "longest": 1.5}, "field 'longest' is 1.5, but must be a valid integer"),
        ({"name": "x", "parts": {"train": {"rows": 2**70}}}, "field 'parts.train.rows' is 1180591620717411303424"),
        ({"name": "x", "parts": {"train": 3}}, "field 'parts.train' is 3, but must be an object"),
        ({"name": "x" * 999, "price": "y" * 999}, "field 'price' is 'yyy"),
        ({"name": "\ud800"}, "it contains an unpaired surrogate"),
        ({"name": b"x"}, "it contains values that JSON does not support"),
        ([], r"found \[\], but it must be an object"),
    ],
)
def test_a_wrong_field_is_named(content, words):
    with pytest.raises(UserError, match=f"^file: {words}.*; write it again$") as caught:
        as_type(Whole, content, "file", REMEDY)
    assert len(str(caught.value)) < 300


def test_an_unknown_key_has_a_neighbour():
    with pytest.raises(UserError, match=r"^file: unknown key 'dta'; did you mean data\?; write it again$"):
        as_type(Closed, {"dta": ""}, "file", REMEDY)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[" * 100_000 + "]" * 100_000, ""),
        ('{"a": ' * 101 + "1" + "}" * 101, "nested more than 100 levels deep"),
        ('{"a": ' + "9" * 5000 + "}", ""),
        ('{"a": ' + "9" * 200 + "}", "a number with more than 100 digits"),
        ('{"a": 1, "a": 2}', "the key 'a' occurs twice"),
        ('{"a": "\xff"}', "utf-8"),
    ],
)
def test_json_beyond_the_limits_is_refused(tmp_path, text, words):
    (tmp_path / "file.json").write_text(text, encoding="latin-1")
    with pytest.raises(UserError, match=f"file.json: cannot be read as JSON .*{words}.*; write it again"):
        read_json(tmp_path / "file.json", REMEDY)


def laughs(levels: int) -> str:
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{level}: &a{level} [{', '.join([f'*a{level - 1}'] * 10)}]" for level in range(1, levels)]
    return "\n".join(lines)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (laughs(12), r"it contains the alias \*a0"),
        ("a: &a [*a]", r"it contains the alias \*a"),
        ("[" * 5000, "nested too deeply"),
        ("a: " + "[" * 150 + "]" * 150, "nested more than 100 levels deep"),
        ("a: 1\na: 2", "the key 'a' occurs twice"),
        ("a: " + "9" * 5000, "digits"),
        ("a: 0x" + "9" * 5000, "a number with more than 100 digits"),
        ("a: 2026-99-99", "not a valid YAML"),
        ("a: 2026-01-01", "is a date; put text in quotes"),
        ("1: a", "the key 1 is not a string"),
        ("? [a]\n: b", "not a valid YAML"),
        ("a: !!python/object/apply:os.system [echo]", "not a valid YAML"),
        ("- a", "found list"),
        ("", "found NoneType"),
        ("a: [", "not a valid YAML"),
        ("a: " + "x" * 100_000, "larger than 100,000 bytes"),
    ],
)
def test_yaml_beyond_the_limits_is_refused(tmp_path, text, words):
    (tmp_path / "file.yaml").write_text(text)
    with pytest.raises(UserError, match=f"file.yaml: .*{words}.*; write it again") as caught:
        read_yaml(tmp_path / "file.yaml", REMEDY)
    assert len(str(caught.value)) < 500


def test_yaml_of_plain_values_is_read(tmp_path):
    (tmp_path / "file.yaml").write_text("a: [1, x]\nb: {c: true}\nd: 1.5\n")
    expected: dict[str, Any] = {"a": [1, "x"], "b": {"c": True}, "d": 1.5}
    assert read_yaml(tmp_path / "file.yaml", REMEDY) == expected
    with pytest.raises(UserError, match="file.yml: cannot be read"):
        read_yaml(tmp_path / "file.yml", REMEDY)


@pytest.mark.parametrize("name", ["tokenizer.json", "dict.txt", "sentencepiece.model"])
def test_a_pipe_in_place_of_a_tokenizers_file_is_refused_and_nobody_waits(name, tmp_path):
    folder = shutil.copytree(ROOT / "tests/fixtures/checkpoints/m2x2/tokenizer", tmp_path / "tokenizer")
    (folder / name).unlink()
    os.mkfifo(folder / name)
    with pytest.raises(UserError, match=f"{name}: cannot be read.*(not a regular|no such) file"):
        load_tokenizer(folder)
