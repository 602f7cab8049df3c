"""Reading the formats of documents, in every compression; the step that reads a unit's documents."""

import bz2
import gzip
from pathlib import Path

import pytest
import zstandard

from lazyformer_fairseq.corpus.readers.files import BadInput, Piece, Watch, compression
from lazyformer_fairseq.corpus.readers.formats import read_piece
from lazyformer_fairseq.corpus.steps import ReadDocuments

COMPRESS = {
    "": lambda content: content,
    ".gz": gzip.compress,
    ".bz2": bz2.compress,
    ".zst": zstandard.ZstdCompressor().compress,
}

PAGES = """<mediawiki xmlns="http://www.mediawiki.org/xml/export-0.10/">
  <siteinfo><sitename>Wikipedia</sitename></siteinfo>
  <page>
    <title>A &amp; B</title><ns>0</ns>
    <revision><text>older</text></revision>
    <revision><model>wikitext</model><text xml:space="preserve">x &lt; y &amp;nbsp;

''é''</text></revision>
  </page>
  <page>
    <title>Old name</title><ns>4</ns><redirect title="A &amp; B" />
    <revision><text>#REDIRECT [[A &amp; B]]</text></revision>
  </page>
  <page><title>Nothing</title><ns>0</ns><revision><text /></revision></page>
</mediawiki>
"""

# format: (content, its documents)
SAMPLES = {
    "text": (
        "\n\nOne well-\nknown\tline\r\nand another.\r\n \t\r\nSecond é.\n\n\n",
        ["One well-known line and another.", "Second é."],
    ),
    "wikitext": (
        " \n = First = \n \n A load of 3 @.@ 5 @-@ ton <unk> . \n \n = = Part = = \n \n Games ; G \n = Goals = \n"
        " More . \n \n = Second = \n \n X . \n",
        ["A load of 3.5-ton <unk> .\nGames ; G\nMore .", "X ."],
    ),
    "wikiextractor": (
        '<doc id="1" url="u" title="A &amp; B">\nA &amp; B\n\nFirst &lt;x&gt; é.\nMore.\n\n</doc>\n\n'
        '<doc id="2" url="u" title="C">\nC\n\n</doc>\n',
        ["First <x> é.\nMore.", ""],
    ),
    "jsonl": (
        '{"text": "T\\n\\nOne é.\\r\\nTwo.", "title": "T"}\n\n{"id": 7, "text": ""}\n{"text": "T"}',
        ["One é.\nTwo.", "", "T"],
    ),
    "mediawiki": (PAGES, ["x < y &nbsp;\n\n''é''", "#REDIRECT [[A & B]]", ""]),
    "book": (
        "CHAPTER I\n\n  It was\r\na dark é\n\t\nnight.  A self-\nmade man-\nBut no.\n",
        ["CHAPTER I\nIt was a dark é\nnight. A self-made man- But no."],
    ),
}


COMPRESSED = pytest.mark.parametrize("suffix", [".gz", ".bz2", ".zst"])


def texts(path, format, **piece):
    return [document.text for document in read_piece(Piece(str(path), format, **piece))]


@pytest.mark.parametrize("suffix", COMPRESS)
@pytest.mark.parametrize("format", SAMPLES)
def test_every_format_in_every_compression(tmp_path, format, suffix):
    content, documents = SAMPLES[format]
    path = tmp_path / "sample"  # what it is is found in its bytes, whatever its name
    path.write_bytes(COMPRESS[suffix](b"\xef\xbb\xbf" + content.encode()))
    watch = Watch()
    found = list(read_piece(Piece(str(path), format), watch))
    assert [document.text for document in found] == documents
    assert [document.number for document in found] == list(range(1, len(documents) + 1))
    assert watch == Watch()
    assert compression(path) == (suffix[1:] or None)


def test_pages_bring_what_decides_their_fate_also_several_in_one_line(tmp_path):
    path = tmp_path / "dump.xml"
    for content in (PAGES, PAGES.replace("\n", " ")):
        path.write_text(content)
        metadata = [document.metadata for document in read_piece(Piece(str(path), "mediawiki"))]
        assert len(metadata) == 3
        assert metadata[:2] == [
            {"title": "A & B", "namespace": "0", "model": "wikitext", "is_redirect": False},
            {"title": "Old name", "namespace": "4", "model": "wikitext", "is_redirect": True},
        ]


@COMPRESSED
def test_several_streams_and_zeros_after_them_but_no_text(tmp_path, suffix):
    path = tmp_path / "text"
    path.write_bytes(COMPRESS[suffix](b"One.\n\nTw") + COMPRESS[suffix](b"") + COMPRESS[suffix](b"o.\n") + bytes(5000))
    assert texts(path, "text") == ["One.", "Two."]
    path.write_bytes(gzip.compress(b"One.\n\n") + b"plain text")
    with pytest.raises(BadInput, match=r"byte 26: its gz data are damaged"):
        texts(path, "text")


@COMPRESSED
def test_truncated_and_damaged_compressed_files(tmp_path, suffix):
    content = bytearray(COMPRESS[suffix]("\n\n".join(str(number**5) for number in range(50_000)).encode()))
    path = tmp_path / f"text{suffix}"
    for left in (0.3, 0.99):
        path.write_bytes(content[: int(len(content) * left)])
        with pytest.raises(BadInput, match=rf"text\{suffix}, byte \d+: its {suffix[1:]} data stop in the middle"):
            texts(path, "text")
    content[len(content) // 2 : len(content) // 2 + 40] = b"\xa5" * 40
    path.write_bytes(content)
    with pytest.raises(BadInput, match=rf"text\{suffix}, byte \d+: its {suffix[1:]} data are damaged"):
        texts(path, "text")


def test_lines_that_are_not_utf8_are_cp1252(tmp_path):
    path = tmp_path / "old.txt"
    path.write_bytes("Über\n\nmöglich\n".encode() + b"caf\xe9 \x93so\x94 \x81\n")
    watch = Watch()
    assert [d.text for d in read_piece(Piece(str(path), "book"), watch)] == ["Über\nmöglich café “so” \ufffd"]
    assert watch.lines_not_utf8 == 1


BAD = [
    ("jsonl", '{"text": "fine"}\n{"text": \n', r"line 2: no valid JSON"),
    ("jsonl", '{"text": "fine"}\n\n["text"]\n', r"line 3: a line must be a JSON object"),
    ("jsonl", '{"id": 1, "body": "x"}\n', r'line 1: has no field "text".*its fields: body, id'),
    ("jsonl", '{"text": null}\n', r'line 1: has no field "text" that is a string'),
    ("wikiextractor", '<doc id="1" title="A">\nA\n<doc id="2" title="B">\nB\n</doc>\n', r"line 1: .*not closed"),
    ("wikiextractor", '<doc id="1" title="A">\nA\n</doc>\n<doc id="2" title="B">\nB\n', r"line 4: .*not closed"),
    ("wikiextractor", '<doc id="1" title="A">\nA\n</doc>\n\nmore\n', r"line 5: text outside"),
    ("wikiextractor", "words\n<doc >\n</doc>\n", r"line 1: text outside"),
    ("mediawiki", PAGES[: PAGES.index("#RED")], r"line 10: malformed XML"),
    ("mediawiki", PAGES.replace("x &lt; y", "x &lt; <y"), r"line \d+: malformed XML"),
    ("mediawiki", PAGES.replace("A &amp; B</title>", "A & B</title>"), r"line 4: malformed XML"),
    ("mediawiki", PAGES.replace("</mediawiki>", "</page>"), r"line 1\d: malformed XML"),
]


@pytest.mark.parametrize(("format", "content", "message"), BAD)
def test_bad_content_is_named_with_its_line(tmp_path, format, content, message):
    (tmp_path / "bad").write_text(content)
    with pytest.raises(BadInput, match=rf"{tmp_path}/bad, {message}"):
        texts(tmp_path / "bad", format)


def test_the_line_is_that_of_the_file_in_a_later_piece_too_and_documents_before_it_are_given(tmp_path):
    path = tmp_path / "bad"
    path.write_text('{"text": "fine"}\n' * 5 + '{"text": 1}\n')
    for start in (1, 16, 17, 18, 70):
        with pytest.raises(BadInput, match=r"bad, line 6: has no field"):
            texts(path, "jsonl", start=start, end=path.stat().st_size)
    documents = read_piece(Piece(str(path), "jsonl"))
    assert [next(documents).text for _ in range(5)] == ["fine"] * 5
    with pytest.raises(BadInput):
        next(documents)


def test_book_of_one_long_line(tmp_path):
    path = tmp_path / "book.txt"
    path.write_text("It was a dark night. " * 200_000)
    for format in ("book", "text"):
        (text,) = texts(path, format)
        assert len(text) == 200_000 * 21 - 1


NOTICES = "*** {} OF THIS PROJECT GUTENBERG EBOOK X ***"
GUTENBERG = [
    *("The Project Gutenberg EBook of X, by Y", NOTICES.format("START"), "Produced by A. Volunteer", "CHAPTER I"),
    *("Text.", "End of the Project Gutenberg EBook of X, by Y", NOTICES.format("END"), "Licence.\n"),
]


def test_gutenberg_notices_are_cut_off(tmp_path):
    small_print = "*END*THE SMALL PRINT! FOR PUBLIC DOMAIN ETEXTS*Ver.04.29.93*END*"
    for content, text in {
        "\n\n".join(GUTENBERG): "CHAPTER I\nText.",
        f"Terms\n\n{small_print}\n\nText.\n\n*** END OF THE PROJECT GUTENBERG EBOOK X ***\n": "Text.",
        "Text without notices.": "Text without notices.",
    }.items():
        (tmp_path / "book.txt").write_text(content)
        assert texts(tmp_path / "book.txt", "book") == [text]


def test_reads_a_unit_stops_at_a_bad_file_or_skips_the_rest_of_it_and_says_so(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"One.\n\ncaf\xe9\n")
    (tmp_path / "bad.jsonl").write_text('{"text": "kept"}\n{"text"\n{"text": "lost"}\n')
    (tmp_path / "c.txt").write_text("Last.")
    formats = {"a.txt": "text", "bad.jsonl": "jsonl", "c.txt": "text"}
    unit = tuple(Piece(str(tmp_path / name), format) for name, format in formats.items())
    step = ReadDocuments(unit[2:])
    (document,) = step.run()
    assert (document.id, document.text, document.metadata) == (f"{tmp_path}/c.txt:1", "Last.", {"format": "text"})
    assert step.counts.pop("core seconds") >= 0
    assert step.counts == {"documents out": 1, "characters out": 5, "pieces of files": 1, "bytes": 5}
    with pytest.raises(BadInput, match=r"bad.jsonl, line 2: no valid JSON"):
        list(ReadDocuments(unit).run())
    step = ReadDocuments(unit, bad_files="skip")
    assert [document.text for document in step.run()] == ["One.", "café", "kept", "Last."]
    counts = step.counts
    assert (counts["documents out"], counts["pieces of files"], counts["files skipped"]) == (4, 2, 1)
    assert counts["lines not UTF-8"] == 1
    assert "bad.jsonl, line 2" in step.notes.dropped["bad file"][0]
    assert counts["bytes"] == sum(Path(piece.path).stat().st_size for piece in unit)
