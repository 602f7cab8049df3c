"""Finding the input files and their formats."""

import bz2
import errno
import gzip
import io
import os
import zipfile

import pytest

from lazyformer_fairseq.corpus.readers.inputs import find_inputs
from lazyformer_fairseq.errors import UserError


def formats(*specs, **options):
    return [
        (file.path.rpartition("/")[2], file.format) for file in find_inputs([str(spec) for spec in specs], **options)
    ]


def zip_of(name, content):
    data = io.BytesIO()
    with zipfile.ZipFile(data, "w") as archive:
        archive.writestr(zipfile.ZipInfo(name), content)  # of no date: it is in the name of a test
    return data.getvalue()


FILES = {
    "a.txt": ("Words.\n\nMore = words.\n", "text"),
    "b.tokens": (" \n = Title = \n \n Words . \n", "wikitext"),
    "c.txt": ("\ufeffThe Project Gutenberg EBook\n\n*** START OF THE PROJECT GUTENBERG EBOOK X ***\nWords.", "book"),
    "d.epub": (zip_of("mimetype", "application/epub+zip"), "book"),
    "e.json": ('\n{"text": "x"}\n', "jsonl"),
    "f.jsonl.gz": (gzip.compress(b'{ "title": 1}', mtime=0), "jsonl"),
    "g.xml.bz2": (bz2.compress(b'<?xml version="1.0"?>\n<mediawiki xmlns="x">\n'), "mediawiki"),
    "h.xml-p1p30302-shortened.bz2": (bz2.compress(b"  <page>\n"), "mediawiki"),
    "i/AA/wiki_00": ('<doc id="1" title="T">\nT\n</doc>\n', "wikiextractor"),
    "i/AA/wiki_01": ('{"text": "x"}\n', "jsonl"),
    "i/AB/wiki_00.bz2": (bz2.compress(b'<doc id="1" title="T">\n'), "wikiextractor"),
}


@pytest.fixture
def folder(tmp_path):
    for name, (content, _) in FILES.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return tmp_path


def test_formats_are_found_in_the_order_of_names(folder):
    found = find_inputs([str(folder)])
    assert [(file.path.removeprefix(f"{folder}/"), file.format) for file in found] == [
        (name, format) for name, (_, format) in FILES.items()
    ]
    assert [file.size for file in found] == [(folder / name).stat().st_size for name in FILES]


def test_what_is_no_text_is_left_out_of_a_folder_and_told(folder):
    for name in ["README.txt", "LICENSE", "picture.png", ".hidden.txt", ".git/x.txt"]:
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(b"\x89PNG")
    left_out = []
    assert len(formats(folder, left_out=left_out)) == len(FILES)
    assert [line.removeprefix(f"{folder}/").partition(":")[0] for line in left_out] == [
        "LICENSE",
        "README.txt",
        "picture.png",
    ]


def test_a_folder_that_cannot_be_read_is_named(folder, monkeypatch):
    def refuse(path, listdir=os.listdir):  # modes mean nothing to root
        if str(path).endswith("/i/AB"):
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return listdir(path)

    monkeypatch.setattr(os, "listdir", refuse)
    with pytest.raises(UserError, match=r"/i/AB: this folder cannot be read \(Permission denied\).*--bad-files skip"):
        formats(folder)
    left_out = []
    assert len(formats(folder, bad_files="skip", left_out=left_out)) == len(FILES) - 1
    assert left_out == [f"{folder}/i/AB: this folder cannot be read (Permission denied)"]


def test_linked_folders_are_followed_once_and_what_is_no_file_is_named(folder, tmp_path_factory):
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    (elsewhere / "z.txt").write_text("Words.")
    (elsewhere / "back").symlink_to(folder)
    (folder / "A").symlink_to(folder / "i" / "AA")
    (folder / "linked").symlink_to(elsewhere)
    (folder / "linked too").symlink_to(elsewhere)
    (folder / "gone.txt").symlink_to(folder / "no such")
    os.mkfifo(folder / "pipe.txt")
    left_out = []
    found = [file.path.removeprefix(f"{folder}/") for file in find_inputs([str(folder)], left_out=left_out)]
    assert found == [*FILES, "linked/z.txt"]
    assert sorted(line.removeprefix(f"{folder}/") for line in left_out) == [
        f"A: is a link to {folder}/i/AA, which is read already",
        "gone.txt: is a link to what is not there, or cannot be read",
        f"linked too: is a link to {folder}/linked, which is read already",
        f"linked/back: is a link to {folder}, which is read already",
        "pipe.txt: is neither a file nor a folder, but a device or a pipe",
    ]


def test_a_file_that_is_named_is_taken_and_the_order_is_that_of_the_command(folder):
    (folder / "README").write_text("Read me.")
    assert formats(f"{folder}/README", f"wikitext:{folder}/a.txt", folder / "i") == [
        ("README", "text"),
        ("a.txt", "wikitext"),
        ("wiki_00", "wikiextractor"),
        ("wiki_01", "jsonl"),
        ("wiki_00.bz2", "wikiextractor"),
    ]


def test_format_of_a_whole_folder(tmp_path):
    for name in "ab":
        (tmp_path / f"{name}.txt").write_text("Words.")
    assert formats(f"book:{tmp_path}") == [("a.txt", "book"), ("b.txt", "book")]


def test_paths_with_a_colon(tmp_path, monkeypatch):
    (tmp_path / "my:notes.txt").write_text("Words.")
    monkeypatch.chdir(tmp_path)
    assert formats("my:notes.txt") == formats("text:my:notes.txt") == [("my:notes.txt", "text")]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.txt", b"", "is empty"),
        ("a.txt", b"\xef\xbb\xbf \n\n", "is empty"),
        ("a.txt.gz", gzip.compress(b" \n", mtime=0), "is empty"),
        ("a.txt", "words".encode("utf-16"), "looks like UTF-16 text"),
        ("a.txt", "words".encode("utf-16-le"), "holds NUL bytes"),
        ("a.txt", b"%PDF-1.7", "looks like a PDF"),
        ("a.txt", zip_of("a", "words"), "looks like a zip archive"),
        ("a.txt.gz", gzip.compress(zip_of("a", "words"), mtime=0), "looks like a zip archive"),
        ("a.txt", b"\x7fELF\x00\x01", "holds NUL bytes"),
        ("a.xml", b"<?xml version='1.0'?><rss/>", "no MediaWiki dump"),
        ("a.txt", b"<!doctype html><p>x", "XML or HTML"),
        ("a.json", b'[{"text": "x"}]', "is one JSON list"),
    ],
)
def test_files_that_cannot_be_read_are_named(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=rf"/{name}: .*{message}"):
        formats(tmp_path / name)
    with pytest.raises(UserError, match=rf"/{name}: .*{message}"):
        formats(tmp_path)
    (tmp_path / "z.txt").write_text("Words.")
    left_out = []
    assert formats(tmp_path, bad_files="skip", left_out=left_out) == [("z.txt", "text")]
    assert message in left_out[0]
    with pytest.raises(UserError, match=message):  # named by the user himself
        formats(tmp_path / name, bad_files="skip")


def test_a_truncated_file_is_left_to_who_reads_it(tmp_path):
    for name in ["a.xml.bz2", "b.jsonl.bz2", "c.txt.bz2", "wiki_00.bz2"]:
        (tmp_path / name).write_bytes(bz2.compress(b"words " * 50_000)[:-20])
    assert [format for _, format in formats(tmp_path)] == ["mediawiki", "jsonl", "text", "wikiextractor"]


def test_nothing_there(tmp_path):
    with pytest.raises(UserError, match="missing: there is no such file or folder"):
        formats(tmp_path / "missing")
    with pytest.raises(UserError, match=r"x: cannot be read \(File name too long"):
        formats(tmp_path / ("x" * 300))
    with pytest.raises(UserError, match=r"holds no \.txt"):
        formats(tmp_path)
    with pytest.raises(UserError, match="no input"):
        formats()
    with pytest.raises(UserError, match="unknown format 'docx'; choose from mediawiki, wikiextractor"):
        formats(f"docx:{tmp_path}")


def test_a_file_that_comes_twice(folder):
    with pytest.raises(UserError, match=rf"{folder}/i/AA/wiki_00: comes twice"):
        formats(folder, folder / "i" / "AA" / "wiki_00")
    (folder / "again.txt").symlink_to(folder / "a.txt")
    with pytest.raises(UserError, match="again.txt: comes twice|a.txt: comes twice"):
        formats(folder)


def test_real_samples(real_data):
    found = find_inputs([str(real_data / folder) for folder in ("raw/mediawiki", "raw/wikiextractor_json", "lm")])
    assert [file.format for file in found] == ["mediawiki"] * 2 + ["jsonl"] * 10 + ["wikitext"] * 5
    assert {file.format for file in find_inputs([str(real_data / "raw/wikiextractor_ugolbck")])} == {"wikiextractor"}
    assert {file.format for file in find_inputs([f"book:{real_data / 'raw/gutenberg'}"])} == {"book"}
