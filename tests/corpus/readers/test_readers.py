"""Input files and their formats, in every compression; units of work: every document once, wherever the cuts fall."""

import bz2
import errno
import gzip
import itertools
import os
import random
import re
from functools import partial

import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from lazyformer_fairseq.corpus.readers import inputs
from lazyformer_fairseq.corpus.readers.files import BadInputError, Piece, Watch, bytes_of, compression
from lazyformer_fairseq.corpus.readers.formats import FORMATS, read_piece
from lazyformer_fairseq.corpus.readers.inputs import InputFile, cut_file, find_inputs, must_be_cut, plan_units
from lazyformer_fairseq.corpus.steps import ReadDocuments
from lazyformer_fairseq.corpus.wiki_markup import ExtractWikiMarkup
from lazyformer_fairseq.errors import UserError

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
    "babylm": (
        "*CHI: no é .\n*MOT: [laughs]  yes .\n \n\n= a title =\nA line.\n",
        ["*CHI: no é .\n*MOT: [laughs] yes .", "= a title =\nA line."],
    ),
    "book": (
        "CHAPTER I\n\n  It was\r\na dark é\n\t\nnight.  A self-\nmade man-\nBut no.\n",
        ["CHAPTER I\nIt was a dark é\nnight. A self-made man- But no."],
    ),
}


COMPRESSED = pytest.mark.parametrize("suffix", [".gz", ".bz2", ".zst"])


def texts_of(pieces):
    return [document.text for piece in pieces for document in read_piece(piece)]


def texts(path, format, **piece):
    return texts_of([Piece(str(path), format, **piece)])


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
    with pytest.raises(BadInputError, match=r"byte 26: the gz data is damaged"):
        texts(path, "text")


def test_the_line_is_that_of_the_file_in_a_later_piece_too_and_documents_before_it_are_given(tmp_path):
    path = tmp_path / "bad"
    path.write_text('{"text": "fine"}\n' * 5 + '{"text": 1}\n')
    for start in (1, 16, 17, 18, 70):
        with pytest.raises(BadInputError, match=r"bad, line 6: no string field"):
            texts(path, "jsonl", start=start, end=path.stat().st_size)
    packed = tmp_path / "bad.gz"
    packed.write_bytes(gzip.compress(path.read_bytes()))
    *_, last = cut_file(file_of(packed, "jsonl"), tmp_path / "parts", 40)
    with pytest.raises(BadInputError, match=r", line 6: no string field"):
        texts(last, "jsonl", first_line=int(last.name.split(".")[1]))
    documents = read_piece(Piece(str(path), "jsonl"))
    assert [next(documents).text for _ in range(5)] == ["fine"] * 5
    with pytest.raises(BadInputError):
        next(documents)


# format: (a record with its text; broken ones, and what is said of each). Three formats have none that can be broken.
RECORDS = {
    "jsonl": (
        '{{"text": "{0}"}}\n',
        {
            '{"text": "half a pair \\ud83d"}\n': "not valid JSON",
            '{"id": 1, "body": "no text"}\n': 'no string field "text".*fields found: body, id',
            '{"text": null}\n': 'no string field "text"',
            '["text"]\n': "a line must be a JSON object",
            '{"text": "cut': "not valid JSON",
            "{" * 100_000: "not valid JSON",
        },
    ),
    "wikiextractor": (
        '<doc id="1" title="T">\nT\n\n{0}\n</doc>\n',
        {'<doc id="2" title="B">\nB\n\nnot closed\n': "is not closed", '<doc id="2" title="cut': "is not closed"},
    ),
    "mediawiki": (
        "<page>\n<title>T</title><ns>0</ns>\n<revision><text>{0}</text></revision>\n</page>\n",
        {
            "<page>\n<title>A & B</title><revision><text>x</text></revision>\n</page>\n": "malformed XML",
            "<page>\n<title>B</title>\n<revision><text>x</text></revision>\n": "malformed XML in page 'B'",
            "<page>\n<title>B</title>\n<revision><text>a \x01 b</text></revision>\n</page>\n": "malformed XML",
            "<pag>\n<title>B</title>\n<revision><text>x</text></revision>\n</page>\n": "malformed XML",
            "<page>\n<title>B</title><revision><text>x</page>\n": "malformed XML",
        },
    ),
    "text": ("{0}\n\n", {}),
    "babylm": ("{0}\n\n", {}),
    "wikitext": (" = T = \n\n{0}\n\n", {}),
    "book": ("{0}\n\n", {}),
}
UNDECODABLE = "caf\udce9 \udc81"  # bytes that are not UTF-8
PLACES = (0, 3, 6)  # among six records


def test_every_format_says_what_is_a_broken_record():
    assert RECORDS.keys() == FORMATS.keys() - {"parquet"}  # which is no text: test_parquet.py


@pytest.mark.parametrize("suffix", COMPRESS)
@pytest.mark.parametrize("format", RECORDS)
def test_a_broken_record_is_named_and_the_rest_stays(tmp_path, format, suffix):
    record, broken = RECORDS[format]
    good = [f"Text number {number}." for number in range(6)]
    lines = [record.format(text) for text in good]
    path = tmp_path / f"records{suffix}"
    for (bad, message), place in itertools.product(broken.items(), PLACES):
        newline = "\n" * (not bad.endswith("\n") and place != PLACES[-1])
        content = "".join([*lines[:place], bad + newline, *lines[place:]])
        path.write_bytes(COMPRESS[suffix](content.encode()))
        remarks = []
        documents = list(read_piece(Piece(str(path), format), skip=remarks.append))
        assert [document.text for document in documents] == good, bad
        [remark] = remarks
        line = int(re.match(rf"{path}, line (\d+): .*{message}", str(remark))[1])
        first = 1 + "".join(lines[:place]).count("\n")
        assert first <= line < first + 1 + bad.count("\n"), "the line lies in the broken record"
        with pytest.raises(BadInputError, match=re.escape(str(remark))):
            texts(path, format)
    for place in PLACES:  # lines that are no UTF-8 are read and counted
        texts_given = [*good[:place], UNDECODABLE, *good[place:]]
        content = "".join(record.format(text) for text in texts_given)
        path.write_bytes(COMPRESS[suffix](content.encode(errors="surrogateescape")))
        watch = Watch()
        found = [document.text for document in read_piece(Piece(str(path), format), watch)]
        texts_read = [text.replace(UNDECODABLE, "café \ufffd") for text in texts_given]
        assert found == (["\n".join(texts_read)] if format == "book" else texts_read) and watch.lines_not_utf8 == 1


@pytest.mark.parametrize(
    ("format", "content"), [("wikiextractor", "words\n<doc >\n</doc>\n"), ("mediawiki", "</page>\n" + PAGES)]
)
def test_text_outside_of_all_records_is_named(tmp_path, format, content):
    (tmp_path / "bad").write_text(content)
    with pytest.raises(BadInputError, match=rf"{tmp_path}/bad, line 1: .*outside of"):
        texts(tmp_path / "bad", format)


@pytest.mark.parametrize("damage", ["cut", "overwritten"])
@COMPRESSED
@pytest.mark.parametrize("format", ["jsonl", "book"])
def test_of_a_damaged_container_what_came_before_stays(tmp_path, format, suffix, damage):
    chance = random.Random(1)
    good = [f"Text {number} {chance.getrandbits(800):x}." for number in range(1500)]
    content = "".join(RECORDS[format][0].format(text) for text in good).encode()
    compress = {
        ".gz": gzip.compress,
        ".bz2": partial(bz2.compress, compresslevel=1),
        ".zst": zstandard.ZstdCompressor(write_checksum=True).compress,  # as the program zstd does
    }
    packed = bytearray(compress[suffix](content))
    at = int(len(packed) * 0.8)
    if damage == "cut":
        del packed[at:]
    else:
        packed[at : at + 40] = b"\xa5" * 40
    path = tmp_path / f"records{suffix}"
    path.write_bytes(packed)
    found = []
    documents = read_piece(Piece(str(path), format), skip=lambda _: None)  # of gz and zst some nonsense comes before it
    with pytest.raises(BadInputError, match=rf"{path}, byte \d+: the {suffix[1:]} data is (truncated|damaged)"):
        for document in documents:
            found += document.text.split("\n")
    whole = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(found, good, strict=False)))
    assert whole > 0.4 * len(good), "but for the block of bz2 or zst in which it lies"
    if damage == "cut":
        assert len(found) - whole == (format == "book"), "of a book the last paragraph may be half of one"


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


def formats(*specs, **options):
    files = find_inputs([str(spec) for spec in specs], **options)
    return [(file.path.rpartition("/")[2], file.format) for file in files]


FILES = {
    "a.txt": ("Words.\n\nMore = words.\n", "text"),
    "a_too.txt": ("PKs are words too.\n", "text"),
    "b.tokens": (" \n = Title = \n \n Words . \n", "wikitext"),
    "c.txt": ("\ufeffThe Project Gutenberg EBook\n\n*** START OF THE PROJECT GUTENBERG EBOOK X ***\nWords.", "book"),
    "e.json": ('\n{"text": "x"}\n', "jsonl"),
    "f.jsonl.gz": (gzip.compress(b'{ "title": 1}', mtime=0), "jsonl"),
    "g.xml.bz2": (bz2.compress(b'<?xml version="1.0"?>\n<mediawiki xmlns="x">\n'), "mediawiki"),
    "h.xml-p1p30302-shortened.bz2": (bz2.compress(b"  <page>\n"), "mediawiki"),
    "i/AA/wiki_00": ('<doc id="1" title="T">\nT\n</doc>\n', "wikiextractor"),
    "i/AA/wiki_01": ('{"text": "x"}\n', "jsonl"),
    "i/AB/wiki_00.bz2": (bz2.compress(b'<doc id="1" title="T">\n'), "wikiextractor"),
    **{f"j.{ending}": ("Words.\n", "text") for ending in "dev md raw rst text train valid".split()},
    "k.ndjson": ('{"text": "x"}\n', "jsonl"),
}


@pytest.fixture
def folder(tmp_path):
    for name, (content, _) in FILES.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return tmp_path


def found_in(folder, **options):
    """What is found in the folder, and what is left out: each as the path in the folder and what is said of it."""
    left_out = []
    files = find_inputs([str(folder)], left_out=left_out, **options)
    told = dict(line.removeprefix(f"{folder}/").split(": ", 1) for line in left_out)
    return {file.path.removeprefix(f"{folder}/"): (file.format, file.size) for file in files}, told


def test_formats_are_found_in_the_order_of_names_and_what_is_left_out_is_told(folder, tmp_path_factory):
    """What is no text, or no file; and linked folders are followed once."""
    for name in ["README.txt", "LICENSE", "picture.png", ".hidden.txt", ".git/x.txt"]:
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(b"\x89PNG")
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    (elsewhere / "z.txt").write_text("Words.")
    (elsewhere / "back").symlink_to(folder)
    (folder / "A").symlink_to(folder / "i" / "AA")
    for name in ("linked", "linked too"):
        (folder / name).symlink_to(elsewhere)
    (folder / "gone.txt").symlink_to(folder / "no such")
    os.mkfifo(folder / "pipe.txt")
    found, told = found_in(folder)
    expected = {name: (format, (folder / name).stat().st_size) for name, (_, format) in FILES.items()}
    assert list(found.items()) == [*expected.items(), ("linked/z.txt", ("text", 6))]
    said = {
        "A": f"a link to {folder}/i/AA, which has already been read",
        "gone.txt": "a link to a target that does not exist or cannot be read",
        "linked too": f"a link to {folder}/linked, which has already been read",
        "linked/back": f"a link to {folder}, which has already been read",
        "pipe.txt": "neither a file nor a folder, but a device or a pipe",
    }
    assert told == told | said and {*told} - {*said} == {"LICENSE", "README.txt", "picture.png"}


def test_a_folder_that_cannot_be_read_is_named(folder, monkeypatch):
    def refuse(path, listdir=os.listdir):  # modes mean nothing to root
        if str(path).endswith("/i/AB"):
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return listdir(path)

    monkeypatch.setattr(os, "listdir", refuse)
    with pytest.raises(UserError, match=r"/i/AB: this folder cannot be read \(Permission denied\).*--bad-input skip"):
        formats(folder)
    found, told = found_in(folder, bad_input="skip")
    assert len(found) == len(FILES) - 1 and told == {"i/AB": "this folder cannot be read (Permission denied)"}


def test_a_file_that_is_named_is_taken_and_the_order_is_that_of_the_command(folder, monkeypatch):
    (folder / "README").write_text("Read me.")
    assert formats(f"{folder}/README", f"wikitext:{folder}/a.txt", folder / "i") == [
        *(("README", "text"), ("a.txt", "wikitext")),
        *(("wiki_00", "wikiextractor"), ("wiki_01", "jsonl"), ("wiki_00.bz2", "wikiextractor")),
    ]
    books = folder / "books"  # a format of a whole folder
    books.mkdir()
    for name in ("a.txt", "my:notes.txt"):
        (books / name).write_text("Words.")
    assert formats(f"book:{books}") == [("a.txt", "book"), ("my:notes.txt", "book")]
    monkeypatch.chdir(books)
    assert formats("my:notes.txt") == formats("text:my:notes.txt") == [("my:notes.txt", "text")]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.txt", b"", "is empty"),
        ("a.txt", "words".encode("utf-16"), "looks like UTF-16 text"),
        ("a.txt", "words".encode("utf-16-le"), "contains NUL bytes"),
        ("a.txt", b"%PDF-1.7", "looks like a PDF"),
        ("a.txt.gz", gzip.compress(b"PK\x03\x04\x14", mtime=0), "looks like a zip archive or an epub"),
        ("a.xml", b"<?xml version='1.0'?><rss/>", "not a MediaWiki dump"),
        ("a.txt", b"<!doctype html><p>x", "XML or HTML"),
        ("a.json", b'[{"text": "x"}]', "is a single JSON list"),
    ],
)
def test_files_that_cannot_be_read_are_named(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    for spec in (tmp_path / name, tmp_path):
        with pytest.raises(UserError, match=rf"/{name} .*{message}"):
            formats(spec)
    (tmp_path / "z.txt").write_text("Words.")
    left_out = []
    assert formats(tmp_path, bad_input="skip", left_out=left_out) == [("z.txt", "text")]
    assert message in left_out[0]
    with pytest.raises(UserError, match=message):  # named by the user himself
        formats(tmp_path / name, bad_input="skip")


def test_what_is_not_there_or_comes_twice(folder, tmp_path_factory):
    empty = tmp_path_factory.mktemp("empty")
    (folder / "again.txt").symlink_to(folder / "a.txt")
    for specs, message in {
        (empty / "missing",): "missing: no such file or folder",
        (empty / ("x" * 300),): r"x: cannot be read \(File name too long",
        (empty,): r"contains no file that is named like a text file: \.txt",
        (): "no input",
        (f"docx:{empty}",): "unknown format 'docx'; choose from parquet, wikiextractor, mediawiki",
        (folder / "i", folder / "i" / "AA" / "wiki_00"): rf"{folder}/i/AA/wiki_00 occurs twice",
        (folder,): "again.txt occurs twice|a.txt occurs twice",
    }.items():
        with pytest.raises(UserError, match=message):
            formats(*specs)


PAGE = "  <page>\n    <title>T{0}</title>\n    <ns>0</ns>\n    <revision><text>Text {0}.</text></revision>\n  </page>\n"


def file_of(path, format):
    return InputFile(str(path), format, path.stat().st_size)


def names(pieces):
    return [document.number for piece in pieces for document in read_piece(piece)]


WORDS = st.text("ab é.\t\r", max_size=12)
TITLES = st.sampled_from([" = Title = ", "= A =", " = = Part = = ", ""])
CONTENTS = {
    "text": st.lists(WORDS),
    "babylm": st.lists(WORDS),
    "wikitext": st.lists(st.one_of(WORDS, TITLES)),
    "jsonl": st.lists(st.sampled_from(['{"text": "one"}', '{"text": "a\\nb"}', "", " "])),
    "wikiextractor": st.lists(st.sampled_from(['<doc id="1" title="T">\nT\n\nText.\n</doc>', "", " "])),
    "mediawiki": st.lists(st.integers(0, 99).map(PAGE.format)).map(
        lambda pages: [f"<mediawiki>\n  <siteinfo/>\n{''.join(pages)}</mediawiki>\n"]
    ),
}  # lines


@pytest.fixture(scope="module")
def units_folder(tmp_path_factory):
    return tmp_path_factory.mktemp("units")


@pytest.mark.parametrize("format", [*CONTENTS])
@settings(max_examples=40)
@given(data=st.data())
def test_pieces_and_parts_give_the_documents_once_and_in_order(tmp_path_factory, units_folder, format, data):
    content = data.draw(st.sampled_from(["", "\ufeff"])).encode() + "\n".join(data.draw(CONTENTS[format])).encode()
    cuts = sorted(data.draw(st.sets(st.integers(1, max(1, len(content) - 1)))))
    path = units_folder / f"content.{format}"
    path.write_bytes(content)
    pieces = [Piece(str(path), format, *ends) for ends in itertools.pairwise([0, *cuts, len(content)])]
    assert texts_of(pieces) == texts_of([Piece(str(path), format)])
    assert len(set(names(pieces))) == len(names(pieces))
    suffix = data.draw(st.sampled_from([*COMPRESS]))
    if content.strip() and suffix:  # and so do the parts of a compressed one
        folder = tmp_path_factory.mktemp("parts")
        (folder / f"big{suffix}").write_bytes(COMPRESS[suffix](content))
        file = file_of(folder / f"big{suffix}", format)
        assert must_be_cut(file, file.size - 1) and not must_be_cut(file, file.size)
        parts = cut_file(file, folder / "work" / "parts", data.draw(st.integers(1, 1 + len(content))))
        assert parts[0].name.startswith("part-00000.")
        assert texts_of(Piece(str(part), format) for part in parts) == texts_of([Piece(str(path), format)])


def test_a_blank_line_of_many_spaces_may_be_cut(units_folder):
    path = units_folder / "spaces.txt"
    path.write_bytes(b"One.\n" + b" " * 10_000 + b"\nTwo.\n" + b" " * 40 + b"x\n")
    for cut in range(170, 10_030, 170):
        pieces = [Piece(str(path), "text", *pair) for pair in itertools.pairwise([0, cut, path.stat().st_size])]
        assert texts_of(pieces) == ["One.", "Two. x"]


def test_small_files_share_a_unit_and_big_ones_are_divided(tmp_path):
    sizes = {"a": 30, "b": 60, "c": 20, "d": 250, "e": 10, "f": 100}
    for name, size in sizes.items():
        (tmp_path / f"{name}.txt").write_text("x" * size)
    units = plan_units([file_of(tmp_path / f"{name}.txt", "text") for name in sizes], 100)
    assert ["".join(piece.path[-5] for piece in unit) for unit in units] == ["ab", "c", "d", "d", "d", "e", "f"]
    assert [(unit[0].start, unit[0].end) for unit in units[2:5]] == [(0, 83), (83, 166), (166, 250)]
    assert sum(map(bytes_of, units)) == sum(sizes.values())
    assert plan_units([], 100) == []
    path = tmp_path / "book.txt.gz"  # a book is one piece and is never cut
    path.write_bytes(gzip.compress(bytes(i * i % 251 for i in range(10_000))))
    assert plan_units([file_of(path, "book")], 10) == [(Piece(str(path), "book"),)]
    assert not must_be_cut(file_of(path, "book"), 10)


SITEINFO = """<mediawiki xml:lang="is"><siteinfo><namespaces>
<namespace key="-2" case="first-letter">Miðill</namespace><namespace key="0" case="first-letter" />
<namespace key="6" case="first-letter">Mynd</namespace><namespace key="14" case="first-letter">Flokkur_x</namespace>
</namespaces></siteinfo>
"""
ICELANDIC = "<page>\n<ns>0</ns><revision><text>[[Mynd:a|þ]]Words {0}.\n\n[[flokkur x:b]]</text></revision></page>\n"


@pytest.mark.parametrize("unit_bytes", [500, 1 << 20])
@pytest.mark.parametrize("suffix", COMPRESS)
def test_a_dump_names_its_own_namespaces_for_every_part_of_it(tmp_path, suffix, unit_bytes):
    path = tmp_path / f"dump.xml{suffix}"
    content = SITEINFO + "".join(map(ICELANDIC.format, range(200))) + "</mediawiki>"
    path.write_bytes(COMPRESS[suffix](content.encode()))
    [file] = files = find_inputs([str(path)])
    assert file.left_out_namespaces == ("miðill", "mynd", "flokkur x")
    if must_be_cut(file, unit_bytes):
        parts = cut_file(file, tmp_path / "parts", unit_bytes)
        files = [InputFile(str(part), file.format, part.stat().st_size, 1, file.left_out_namespaces) for part in parts]
    units = plan_units(files, unit_bytes)
    found = [document.text for unit in units for document in ExtractWikiMarkup().run(ReadDocuments(unit).run())]
    assert found == [f"Words {number}." for number in range(200)]
    assert len(units) > 1 or unit_bytes > file.size


@pytest.mark.parametrize("unit_bytes", [300, 1000, 2500, 1 << 20])
def test_a_multistream_dump_is_divided_at_its_streams(tmp_path, unit_bytes):
    """As Wikipedia's are: the head, then so many pages a stream, then the end."""
    bodies = ["".join(map(PAGE.format, range(20 * stream, 20 * stream + 20))) for stream in range(30)]
    path = tmp_path / "dump.xml.bz2"
    path.write_bytes(b"".join(bz2.compress(text.encode()) for text in ["<mediawiki>\n", *bodies, "</mediawiki>\n"]))
    file = file_of(path, "mediawiki")
    assert not must_be_cut(file, unit_bytes)
    pieces = [piece for unit in plan_units([file], unit_bytes) for piece in unit]
    assert len(pieces) == 1 if unit_bytes > file.size else len(pieces) >= file.size // (unit_bytes + 600)
    assert texts_of(pieces) == [f"Text {i}." for i in range(600)] and len(set(names(pieces))) == 600


def test_streams_that_begin_inside_a_page_do_not_divide_a_dump(tmp_path):
    path = tmp_path / "dump.xml.bz2"
    text = ("<mediawiki>\n" + "".join(map(PAGE.format, range(500))) + "</mediawiki>\n").encode()
    path.write_bytes(b"".join(bz2.compress(text[i : i + 5000]) for i in range(0, len(text), 5000)))
    file = file_of(path, "mediawiki")
    assert len(plan_units([file], 1000)) == 1
    assert must_be_cut(file, 1000)
    parts = cut_file(file, tmp_path / "parts", 10_000)
    assert texts_of(Piece(str(part), "mediawiki") for part in parts) == texts_of([Piece(str(path), "mediawiki")])


def test_parts_are_there_whole_or_not_at_all_or_up_to_the_damage_if_asked_for(tmp_path):
    path = tmp_path / "big.txt.gz"
    content = gzip.compress(b"".join(b"Line %d\n\n" % i for i in range(9000)))
    path.write_bytes(content[:-1000])
    with pytest.raises(BadInputError, match="is truncated"):
        cut_file(file_of(path, "text"), tmp_path / "parts", 4000)
    assert not (tmp_path / "parts").exists()
    parts = cut_file(file_of(path, "text"), tmp_path / "some", 4000, bad_input="skip")
    found = texts_of([Piece(str(part), "text") for part in parts])
    assert len(found) > 5000 and found == [f"Line {i}" for i in range(len(found))]
    assert "big.txt.gz" in (tmp_path / "some" / inputs.DAMAGE_FILE).read_text()
    path.write_bytes(content)
    parts = cut_file(file_of(path, "text"), tmp_path / "parts", 4000)
    assert sum(len(texts_of([Piece(str(part), "text")])) for part in parts) == 9000 and len(parts) >= 3
    path.unlink()  # finished parts are not made again
    assert cut_file(InputFile(str(path), "text", 0), tmp_path / "parts", 4000) == parts
