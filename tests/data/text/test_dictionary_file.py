"""A dictionary of odd lines is refused with file and line; one of fairseq's is read as fairseq reads it."""

import pytest
from fairseq.data import Dictionary

from lazyformer_fairseq.data.text.dictionary_file import load_dictionary
from lazyformer_fairseq.errors import UserError


@pytest.mark.parametrize(
    "content",
    ["the 5\nof 4\n", "a b 3\r\nc 1\r\n", "the 5\nthe 4 #fairseq:overwrite\n", "ü 1\n▁a 0\n#fairseq -1", " 7\n"],
)
def test_read_as_fairseq_does(content, tmp_path):
    path = tmp_path / "dict.txt"
    path.write_bytes(content.encode())
    ours, theirs = load_dictionary(path), Dictionary.load(str(path))
    assert ours == theirs and ours.count == theirs.count


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "dict.txt: not a dictionary, it holds no symbol"),
        (b"the 5\nof\n", "dict.txt, line 2: not a dictionary of lines 'symbol count'"),
        (b"the 5\n\nof 4\n", "dict.txt, line 2: not a dictionary"),
        (b"the five\n", "dict.txt, line 1: not a dictionary"),
        (b"the 5 #fairseq:overwrite\nof #fairseq:overwrite\n", "dict.txt, line 2"),
        (b"the 5\nof 4\nthe 3\n", "dict.txt, line 3: .*Duplicate word found.*'the'$"),
        (b"<pad> 5\n", "dict.txt, line 1: .*Duplicate"),
        (b"the 5\n\xff\xfe 3\n", "dict.txt: not a dictionary, no UTF-8 text"),
        (b"the " + b"9" * 5000 + b"\n", "dict.txt, line 1"),
    ],
)
def test_odd_lines_and_what_cannot_be_read_are_named(content, words, tmp_path):
    path = tmp_path / "dict.txt"
    path.write_bytes(content)
    with pytest.raises(UserError, match=words):
        load_dictionary(path)
    for other, message in (("none.txt", "no such file"), ("", "cannot be read")):
        with pytest.raises(UserError, match=message):
            load_dictionary(tmp_path / other)
