"""Reading documents from files."""

import pytest

from lazyformer_fairseq.corpus.documents import divide, read_documents
from lazyformer_fairseq.errors import UserError


def paragraphs(text):
    return [list(document.paragraphs) for document in divide(text, "name")]


def test_blank_lines_divide_documents():
    assert paragraphs("\n\nOne line\r\nand another.\n \n\nSecond.\n") == [["One line and another."], ["Second."]]


def test_titles_divide_documents():
    text = (
        " \n = First = \n \n A load of 3 @.@ 5 @-@ ton <unk> . \n \n = = Part = = \n \n More . \n = Second = \n X . \n"
    )
    assert paragraphs(text) == [["A load of 3.5-ton <unk> .", "More ."], ["X ."]]


def test_folder_is_read_in_order_of_name(tmp_path):
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "z.txt").write_text("Last.")
    (tmp_path / "a.txt").write_text("First.\n\nSecond.")
    (tmp_path / "picture.png").write_bytes(b"\x89PNG")
    assert [document.paragraphs[0] for document in read_documents(tmp_path)] == ["First.", "Second.", "Last."]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"fine\n\xff\xfe", "line 2: not UTF-8"),
        ("words".encode("utf-16-le"), "holds NUL"),
        (b"", "is empty"),
        (b" \n\n", "is empty"),
    ],
)
def test_file_that_is_no_text(tmp_path, content, message):
    (tmp_path / "bad.txt").write_bytes(content)
    with pytest.raises(UserError, match=rf"bad\.txt.*{message}"):
        list(read_documents(tmp_path))


def test_nothing_there(tmp_path):
    with pytest.raises(UserError, match="no such file or folder"):
        list(read_documents(tmp_path / "missing"))
    with pytest.raises(UserError, match=r"holds no \.txt file"):
        list(read_documents(tmp_path))


def test_wikitext(real_data):
    documents = list(read_documents(real_data / "lm/wikitext-2/wiki.valid.tokens"))
    assert len(documents) == 60
    assert documents[0].paragraphs[0].startswith("Homarus gammarus , known as the European lobster")
    assert not any(paragraph.startswith("=") for document in documents for paragraph in document.paragraphs)


def test_gutenberg(real_data):
    documents = list(read_documents(real_data / "raw/gutenberg/carroll-alice.txt"))
    assert len(documents) > 500
    assert any(document.paragraphs[0].startswith("Alice was beginning to get very tired") for document in documents)
    with pytest.raises(UserError, match=r"chesterton-ball\.txt, line \d+: not UTF-8"):
        list(read_documents(real_data / "raw/gutenberg"))
