"""Prose out of Python's own library, and the acceptability task made from held-out text."""

import csv
import random
import sys
from itertools import islice

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lazyformer_fairseq.corpus.duplicates import fingerprint
from lazyformer_fairseq.corpus.steps import Document
from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.experiments.demo.text import (
    held_out_sentences,
    paragraphs_of_prose,
    python_prose,
    shuffle_words,
    texts_of_module,
    write_acceptability_task,
)  # fmt: skip

DOCSTRING = """Open the file and return a stream.

    The ``mode`` is *optional*; see :class:`io.TextIOBase` for
    what the stream can do.

    - Each item of a list that is a sentence stays here.
    - name

    Heading of the section
    ======================
    >>> open("x") is the code that stays out of the prose.

    ====  =================
    mode  what it stands for in the table.
    ====  =================

    x = open(the_file) is how it is used in the code.
"""


MODULE = '''"""First."""
x = 1
# A comment
# of two lines.
class A:
    """Second."""
    def b(self):
        """Third."""
'''


def test_only_prose_of_a_module_is_kept_in_order(tmp_path):
    assert list(paragraphs_of_prose(DOCSTRING)) == [
        "Open the file and return a stream.",
        "The mode is optional; see io.TextIOBase for what the stream can do.",
        "Each item of a list that is a sentence stays here.",
    ]
    (tmp_path / "module.py").write_text(MODULE)
    assert texts_of_module(tmp_path / "module.py") == ["First.", "Second.", "Third.", "A comment\nof two lines.\n"]
    (tmp_path / "broken.py").write_text("def (")
    assert texts_of_module(tmp_path / "broken.py") == []


@pytest.mark.slow
def test_enough_of_it_the_same_every_time_and_nothing_is_imported():
    prose = list(python_prose())
    assert len(prose) > 300
    assert sum(len(paragraph) for document in prose for paragraph in document.paragraphs) > 1_000_000
    assert len({document.name for document in prose}) == len(prose)
    assert list(islice(python_prose(), 100)) == prose[:100]
    assert any(document.name == "module:antigravity.py" for document in prose)
    assert "antigravity" not in sys.modules  # imported, it would open a browser


# --- The task

COMMON = "This sentence stands in every document."


def toy_document(number):
    text = f"{COMMON}\nThe cat of house {number} sat down. Then old Anna saw (in the rain) dog {number}."
    return Document(text, f"d{number}", metadata={"fingerprint": fingerprint(text)})


DOCUMENTS = [toy_document(number) for number in range(200)]


def write(folder, documents=DOCUMENTS, valid_share=0.5, seed=1, sizes=(40, 10)):
    """The sizes that are said, and the rows of each split's file."""
    said = write_acceptability_task(documents, folder, valid_share, seed, *sizes)
    found = {}
    for split in said:
        with (folder / f"{split}.tsv").open(encoding="utf-8", newline="") as lines:
            found[split] = list(csv.reader(lines, delimiter="\t", quoting=csv.QUOTE_NONE))
    return said, found


def test_colas_layout_and_balance_and_no_sentence_twice_or_trained_on(tmp_path):
    sizes, rows = write(tmp_path / "task")
    assert sizes == {"train": 40, "dev": 10}
    for split, size in sizes.items():
        assert [len(row) for row in rows[split]] == [4] * size
        assert sum(row[1] == "1" for row in rows[split]) == size // 2
        assert all(row[1:3] in (["1", ""], ["0", "*"]) for row in rows[split])
    bags = [tuple(sorted(row[3].lower().rstrip(".").split())) for split in rows.values() for row in split]
    assert len(set(bags)) == len(bags)
    held_out = held_out_sentences(DOCUMENTS, 0.5, 1)
    assert COMMON not in held_out
    assert {row[3] for split in rows.values() for row in split if row[1] == "1"} <= set(held_out)
    for seed, same in ((1, True), (2, False)):
        assert (write(tmp_path / f"seed{seed}", seed=seed)[1]["train"] == rows["train"]) is same


def test_little_text_gives_smaller_files_and_too_little_is_refused(tmp_path):
    sizes, _ = write(tmp_path / "task", sizes=(4000, 1000))
    assert sizes["train"] + sizes["dev"] <= len(held_out_sentences(DOCUMENTS, 0.5, 1))
    assert sizes["train"] == pytest.approx(4 * sizes["dev"], abs=8)
    with pytest.raises(UserError, match="only 0 sentences"):
        write(tmp_path / "none", DOCUMENTS[:3], valid_share=0.0)
    assert not (tmp_path / "none").exists()


@given(st.lists(st.sampled_from(["Anna", "sees", "the", "USA,", "house"]), min_size=2), st.integers())
def test_shuffled_words(words, seed):
    sentence = " ".join(["The", *words, "end."])
    shuffled = shuffle_words(sentence, random.Random(seed))
    assert shuffled != sentence and shuffled[0].isupper()
    assert shuffled[-1] == "." and shuffled[-2] not in ",."
    assert sorted(shuffled.lower().strip(".").split()) == sorted(sentence.lower().strip(".").split())
    with pytest.raises(UserError, match="cannot be shuffled"):
        shuffle_words("No no no no.", random.Random(seed))
