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
)

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


def test_only_prose_is_kept():
    assert list(paragraphs_of_prose(DOCSTRING)) == [
        "Open the file and return a stream.",
        "The mode is optional; see io.TextIOBase for what the stream can do.",
        "Each item of a list that is a sentence stays here.",
    ]


def test_texts_of_a_module_in_order(tmp_path):
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


@pytest.fixture
def rows(tmp_path):
    sizes = write_acceptability_task(DOCUMENTS, tmp_path / "task", valid_share=0.5, seed=1, train_size=40, dev_size=10)
    assert sizes == {"train": 40, "dev": 10}
    return {split: read(tmp_path / "task" / f"{split}.tsv") for split in sizes}


def read(file):
    with file.open(encoding="utf-8", newline="") as lines:
        return list(csv.reader(lines, delimiter="\t", quoting=csv.QUOTE_NONE))


def test_cola_layout_and_balance(rows):
    for split, size in (("train", 40), ("dev", 10)):
        assert [len(row) for row in rows[split]] == [4] * size
        assert sum(row[1] == "1" for row in rows[split]) == size // 2
        assert all(row[1:3] in (["1", ""], ["0", "*"]) for row in rows[split])


def test_no_sentence_twice_and_none_trained_on(rows):
    bags = [tuple(sorted(row[3].lower().rstrip(".").split())) for split in rows.values() for row in split]
    assert len(set(bags)) == len(bags)
    held_out = held_out_sentences(DOCUMENTS, 0.5, 1)
    assert COMMON not in held_out
    assert {row[3] for split in rows.values() for row in split if row[1] == "1"} <= set(held_out)


def test_same_seed_same_rows(rows, tmp_path):
    for seed, same in ((1, True), (2, False)):
        folder = tmp_path / f"seed{seed}"
        write_acceptability_task(DOCUMENTS, folder, 0.5, seed, 40, 10)
        assert (read(folder / "train.tsv") == rows["train"]) is same


def test_little_text_gives_smaller_files(tmp_path):
    sizes = write_acceptability_task(DOCUMENTS, tmp_path / "task", 0.5, 1, train_size=4000, dev_size=1000)
    assert sizes["train"] + sizes["dev"] <= len(held_out_sentences(DOCUMENTS, 0.5, 1))
    assert sizes["train"] == pytest.approx(4 * sizes["dev"], abs=8)


def test_too_little_text(tmp_path):
    with pytest.raises(UserError, match="only 0 sentences"):
        write_acceptability_task(DOCUMENTS[:3], tmp_path / "task", valid_share=0.0, seed=1)
    assert list(tmp_path.iterdir()) == []


@given(st.lists(st.sampled_from(["Anna", "sees", "the", "USA,", "house"]), min_size=2), st.integers())
def test_shuffled_words(words, seed):
    sentence = " ".join(["The", *words, "end."])
    shuffled = shuffle_words(sentence, random.Random(seed))
    assert shuffled != sentence
    assert shuffled[-1] == "." and shuffled[-2] not in ",."
    assert shuffled[0].isupper()
    assert sorted(shuffled.lower().strip(".").split()) == sorted(sentence.lower().strip(".").split())


def test_words_that_cannot_be_shuffled():
    with pytest.raises(UserError, match="cannot be shuffled"):
        shuffle_words("No no no no.", random.Random(1))
