"""Prose out of Python's own library."""

import sys
from itertools import islice

import pytest

from lazyformer_fairseq.experiments.demo.text import paragraphs_of_prose, python_prose, texts_of_module

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


@pytest.fixture(scope="module")
def prose():
    return list(python_prose())


def test_enough_of_it(prose):
    assert len(prose) > 300
    assert sum(len(paragraph) for document in prose for paragraph in document.paragraphs) > 1_000_000
    assert len({document.name for document in prose}) == len(prose)


def test_same_every_time(prose):
    assert list(islice(python_prose(), 100)) == prose[:100]


def test_nothing_is_imported(prose):
    assert any(document.name == "module:antigravity.py" for document in prose)
    assert "antigravity" not in sys.modules  # imported, it would open a browser
