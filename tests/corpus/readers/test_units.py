"""Dividing the input into units: every document once, in order, wherever the cuts fall."""

import bz2
import gzip
import itertools

import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from lazyformer_fairseq.corpus.readers.blocks import Piece
from lazyformer_fairseq.corpus.readers.compressed import BadInput
from lazyformer_fairseq.corpus.readers.documents import READERS, read_piece
from lazyformer_fairseq.corpus.readers.inputs import InputFile, find_inputs
from lazyformer_fairseq.corpus.readers.units import DAMAGE_FILE, bytes_of, cut_file, must_be_cut, plan_units

PAGE = "  <page>\n    <title>T{0}</title>\n    <ns>0</ns>\n    <revision><text>Text {0}.</text></revision>\n  </page>\n"


def file_of(path, format):
    return InputFile(str(path), format, path.stat().st_size)


def texts(pieces):
    return [document.text for piece in pieces for document in read_piece(piece)]


def names(pieces):
    return [document.number for piece in pieces for document in read_piece(piece)]


WORDS = st.text("ab é.\t\r", max_size=12)
CONTENTS = {
    "text": st.lists(WORDS).map("\n".join),
    "wikitext": st.lists(st.one_of(WORDS, st.sampled_from([" = Title = ", "= A =", " = = Part = = ", ""]))).map(
        "\n".join
    ),
    "jsonl": st.lists(st.sampled_from(['{"text": "one"}', '{"text": "a\\nb"}', "", " "])).map("\n".join),
    "wikiextractor": st.lists(st.sampled_from(['<doc id="1" title="T">\nT\n\nText.\n</doc>', "", " "])).map("\n".join),
    "mediawiki": st.lists(st.integers(0, 99).map(PAGE.format)).map(
        lambda pages: f"<mediawiki>\n  <siteinfo/>\n{''.join(pages)}</mediawiki>\n"
    ),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("units")


@pytest.mark.parametrize("format", READERS)
@given(data=st.data())
def test_pieces_give_the_documents_of_the_file_once_and_in_order(folder, format, data):
    content = data.draw(st.sampled_from(["", "\ufeff"])).encode() + data.draw(CONTENTS[format]).encode()
    cuts = sorted(data.draw(st.sets(st.integers(1, max(1, len(content) - 1)))))
    path = folder / f"content.{format}"
    path.write_bytes(content)
    pieces = [Piece(str(path), format, *ends) for ends in itertools.pairwise([0, *cuts, len(content)])]
    assert texts(pieces) == texts([Piece(str(path), format)])
    assert len(set(names(pieces))) == len(names(pieces))


@pytest.mark.parametrize("cut", range(1, 60))
def test_a_blank_line_of_many_spaces_may_be_cut(folder, cut):
    path = folder / "spaces.txt"
    path.write_bytes(b"One.\n" + b" " * 10_000 + b"\nTwo.\n" + b" " * 40 + b"x\n")
    ends = [0, cut * 170, path.stat().st_size]
    pieces = [Piece(str(path), "text", *pair) for pair in itertools.pairwise(ends)]
    assert texts(pieces) == ["One.", "Two. x"]


def test_small_files_share_a_unit_and_big_ones_are_divided(tmp_path):
    sizes = {"a": 30, "b": 60, "c": 20, "d": 250, "e": 10, "f": 100}
    for name, size in sizes.items():
        (tmp_path / f"{name}.txt").write_text("x" * size)
    units = plan_units([file_of(tmp_path / f"{name}.txt", "text") for name in sizes], 100)
    assert [[piece.path[-5] for piece in unit] for unit in units] == [
        ["a", "b"],
        ["c"],
        ["d"],
        ["d"],
        ["d"],
        ["e"],
        ["f"],
    ]
    assert [(unit[0].start, unit[0].end) for unit in units[2:5]] == [(0, 83), (83, 166), (166, 250)]
    assert sum(map(bytes_of, units)) == sum(sizes.values())
    assert plan_units([], 100) == []


def test_a_book_is_one_piece_and_is_never_cut(tmp_path):
    path = tmp_path / "book.txt.gz"
    path.write_bytes(gzip.compress(bytes(i * i % 251 for i in range(10_000))))
    file = file_of(path, "book")
    assert plan_units([file], 10) == [(Piece(str(path), "book"),)]
    assert not must_be_cut(file, 10)


def multistream_dump(path, streams=30, pages=20):
    """A dump as Wikipedia's multistream ones: the head, then `pages` pages a stream, then the end."""
    number = itertools.count()
    bodies = ["".join(PAGE.format(next(number)) for _ in range(pages)) for _ in range(streams)]
    path.write_bytes(b"".join(bz2.compress(text.encode()) for text in ["<mediawiki>\n", *bodies, "</mediawiki>\n"]))
    return [f"Text {i}." for i in range(streams * pages)]


@pytest.mark.parametrize("unit_bytes", [300, 1000, 2500, 1 << 20])
def test_a_multistream_dump_is_divided_at_its_streams(tmp_path, unit_bytes):
    path = tmp_path / "dump.xml.bz2"
    expected = multistream_dump(path)
    file = file_of(path, "mediawiki")
    units = plan_units([file], unit_bytes)
    assert not must_be_cut(file, unit_bytes)
    pieces = [piece for unit in units for piece in unit]
    assert len(pieces) == 1 if unit_bytes > file.size else len(pieces) >= file.size // (unit_bytes + 600)
    assert texts(pieces) == expected
    assert len(set(names(pieces))) == len(expected)


def test_streams_that_begin_inside_a_page_do_not_divide_a_dump(tmp_path):
    path = tmp_path / "dump.xml.bz2"
    text = ("<mediawiki>\n" + "".join(map(PAGE.format, range(500))) + "</mediawiki>\n").encode()
    path.write_bytes(b"".join(bz2.compress(text[i : i + 5000]) for i in range(0, len(text), 5000)))
    file = file_of(path, "mediawiki")
    assert len(plan_units([file], 1000)) == 1
    assert must_be_cut(file, 1000)
    parts = cut_file(file, tmp_path / "parts", 10_000)
    assert texts(Piece(str(part), "mediawiki") for part in parts) == texts([Piece(str(path), "mediawiki")])


@pytest.mark.parametrize("suffix", ["gz", "bz2", "zst"])
@pytest.mark.parametrize("format", READERS)
def test_parts_of_a_compressed_file_give_its_documents(tmp_path, format, suffix):
    content = {
        "text": "".join(f"Line\n{i}\n\n" for i in range(900)),
        "wikitext": "".join(f" \n = Title = \n \n Text {i} . \n" for i in range(900)),
        "jsonl": "".join(f'{{"text": "Text {i}"}}\n' for i in range(900)),
        "wikiextractor": "".join(f'<doc id="{i}" title="T">\nT\n\nText {i}.\n</doc>\n\n' for i in range(900)),
        "mediawiki": "<mediawiki>\n" + "".join(map(PAGE.format, range(900))) + "</mediawiki>\n",
    }[format].encode()
    path = tmp_path / f"big.{suffix}"
    compress = {"gz": gzip.compress, "bz2": bz2.compress, "zst": zstandard.ZstdCompressor().compress}[suffix]
    path.write_bytes(compress(content))
    file = file_of(path, format)
    assert must_be_cut(file, file.size - 1)
    assert not must_be_cut(file, file.size)
    progress = []
    parts = cut_file(file, tmp_path / "work" / "parts", 3000, progress=progress.append)
    assert len(parts) >= 3
    assert parts[0].name.startswith("part-00000.")
    assert progress[-1] == file.size
    assert texts(Piece(str(part), format) for part in parts) == texts([Piece(str(path), format)])
    assert {found.format for found in find_inputs([str(tmp_path / "work")])} == {format}


def test_parts_are_there_whole_or_not_at_all(tmp_path):
    path = tmp_path / "big.txt.gz"
    content = gzip.compress(b"".join(b"Line %d\n\n" % i for i in range(9000)))
    path.write_bytes(content[:-1000])
    with pytest.raises(BadInput, match="stop in the middle"):
        cut_file(file_of(path, "text"), tmp_path / "parts", 4000)
    assert not (tmp_path / "parts").exists()
    path.write_bytes(content)
    parts = cut_file(file_of(path, "text"), tmp_path / "parts", 4000)
    assert sum(len(texts([Piece(str(part), "text")])) for part in parts) == 9000
    path.unlink()  # finished parts are not made again
    assert cut_file(InputFile(str(path), "text", 0), tmp_path / "parts", 4000) == parts


def test_what_comes_before_the_damage_is_kept_if_asked_for(tmp_path):
    path = tmp_path / "big.txt.gz"
    path.write_bytes(gzip.compress(b"".join(b"Line %d\n\n" % i for i in range(9000)))[:-1000])
    parts = cut_file(file_of(path, "text"), tmp_path / "parts", 4000, bad_files="skip")
    found = texts([Piece(str(part), "text") for part in parts])
    assert len(found) > 5000 and found == [f"Line {i}" for i in range(len(found))]
    assert "big.txt.gz" in (tmp_path / "parts" / DAMAGE_FILE).read_text()


def test_real_dump_in_parts(real_data, tmp_path):
    (path,) = (real_data / "raw/mediawiki").glob("*shortened.bz2")
    file = file_of(path, "mediawiki")
    assert must_be_cut(file, 1 << 20)
    parts = cut_file(file, tmp_path / "parts", 1 << 20)
    assert 4 <= len(parts) <= 7
    assert texts(Piece(str(part), "mediawiki") for part in parts) == texts([Piece(str(path), "mediawiki")])


def test_real_files_in_units(real_data):
    files = find_inputs(
        [str(real_data / "raw/wikiextractor_graykode"), str(real_data / "lm/wikitext-2/wiki.valid.tokens")]
    )
    units = plan_units(files, 200_000)
    assert max(map(bytes_of, units)) <= 200_000
    assert [text for unit in units for text in texts(unit)] == [
        text for file in files for text in texts([Piece(file.path, file.format)])
    ]
