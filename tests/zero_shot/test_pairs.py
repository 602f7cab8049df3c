"""Files of minimal pairs: what is read, and what is refused with its file and line."""

import json
import re

import pytest

from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.zero_shot.pairs import read_paradigms, readable, sentences_of

ROW = {"sentence_good": "Anna sees Ben.", "sentence_bad": "Anna see Ben."}


def write(folder, **files):
    folder.mkdir(exist_ok=True)
    for name, rows in files.items():
        lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
        (folder / f"{name}.jsonl").write_text("\n".join(lines) + "\n")
    return folder


def test_files_become_paradigms(tmp_path):
    """The name is the file's UID, else its own; BLiMP's 13 terms are its paper's 12 phenomena."""
    named = {**ROW, "UID": "agreement_1", "linguistics_term": "s-selection", "pairID": "0"}
    folder = write(tmp_path / "pairs", b=[named, "", named], a=[ROW])
    first, second = read_paradigms(folder)
    assert (first.name, first.phenomenon, len(first.pairs)) == ("a", "", 1)
    assert (second.name, second.phenomenon, len(second.pairs)) == ("agreement_1", "argument_structure", 2)
    assert sentences_of([first, second]) == [ROW["sentence_good"], ROW["sentence_bad"]], "each once"
    assert readable("subject_verb-agreement") == "subject verb agreement"


def test_some_pairs_are_taken_from_all_over_a_file(tmp_path):
    """`--pairs` takes the first and the last pair, and others evenly between them."""
    rows = [{"sentence_good": f"good {number}", "sentence_bad": f"bad {number}"} for number in range(101)]
    (paradigm,) = read_paradigms(write(tmp_path / "pairs", a=rows), most_pairs=5)
    assert [pair.good for pair in paradigm.pairs] == ["good 0", "good 25", "good 50", "good 75", "good 100"]


@pytest.mark.parametrize(
    ("files", "says"),
    [
        ({}, "pairs contains no .jsonl file; use a folder"),
        ({"a": []}, "a.jsonl is empty"),
        ({"a": [ROW, "{"]}, "a.jsonl:2: this line is not JSON"),
        ({"a": [ROW, "[1]"]}, "a.jsonl:2: this line is not a JSON object"),
        ({"a": [ROW, ROW, {"sentence_good": "Anna."}]}, "a.jsonl:3: sentence_bad is missing or empty"),
        ({"a": [{**ROW, "sentence_good": "  "}]}, "a.jsonl:1: sentence_good is missing or empty"),
        ({"a": [{**ROW, "sentence_bad": 7}]}, "a.jsonl:1: sentence_bad is 7, which is not a string"),
        ({"a": [{**ROW, "UID": ["x"]}]}, "a.jsonl:1: UID is ['x'], which is not a string"),
        ({"a": [{**ROW, "UID": "x"}], "b": [{**ROW, "UID": "x"}]}, "b.jsonl: paradigm x also occurs in another file"),
        ({"a": ["[" * 10_000]}, "a.jsonl:1: this line is not JSON"),
    ],
)
def test_what_is_no_pair_is_named(files, says, tmp_path):
    """The message names the file and the line."""
    with pytest.raises(UserError, match=re.escape(says)):
        read_paradigms(write(tmp_path / "pairs", **files))
