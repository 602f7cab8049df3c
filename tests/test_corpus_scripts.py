"""The scripts that download raw text (from a server of ours) and the launcher of ``lazyformer corpus``."""

import hashlib
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from helpers import ROOT, run_script
from mirrors import mirror  # noqa: F401 (a fixture)

from lazyformer_fairseq.corpus.commands import corpus

DUMP = bytes(range(256)) * 400
NAME = "enwiki-20261101-pages-articles-multistream.xml.bz2"
SHA1 = hashlib.sha1(DUMP).hexdigest()


@pytest.fixture
def wikipedia(mirror):  # noqa: F811
    """A mirror with a dump; an older one is listed too, and files of other kinds."""
    sums = f"{'0' * 40}  enwiki-20261101-pages-articles.xml.bz2\n{SHA1}  {NAME}\n"
    mirror.files = {
        "/enwiki/latest/enwiki-latest-sha1sums.txt": sums.encode(),
        "/enwiki/20261101/enwiki-20261101-sha1sums.txt": sums.encode(),
        f"/enwiki/20261101/{NAME}": DUMP,
    }
    return mirror


def script(name: str, *arguments: object, **environment: str) -> subprocess.CompletedProcess:
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    return run_script(name, *arguments, env=os.environ | {"PATH": path} | environment)


@pytest.fixture
def download_dump(wikipedia):
    """``download_dump(folder, "--option", VARIABLE=value)``"""
    return lambda folder, *options, **environment: script(
        "download_wikipedia.sh", folder, "--mirror", wikipedia.url, *options, **environment
    )


@pytest.fixture
def programs(tmp_path):
    """``programs(sleep="...")``: a PATH on which these shell scripts come first."""

    def path_with(**scripts: str) -> str:
        folder = tmp_path / "bin"
        folder.mkdir()
        for name, text in scripts.items():
            (folder / name).write_text(f"#!/bin/sh\n{text}\n")
            (folder / name).chmod(0o755)
        return f"{folder}{os.pathsep}{os.environ['PATH']}"

    return path_with


def test_the_newest_dump_arrives_checked(wikipedia, download_dump, tmp_path):
    dry = download_dump(tmp_path / "raw", "--dry-run")
    assert dry.returncode == 0 and f"{wikipedia.url}/enwiki/20261101/{NAME}" in dry.stderr
    assert f"(102400 bytes), sha1 {SHA1}" in dry.stderr and not (tmp_path / "raw").exists()
    assert wikipedia.paths() == ["/enwiki/latest/enwiki-latest-sha1sums.txt"]
    wikipedia.requests.clear()

    run = download_dump(tmp_path / "my raw", "--contact", "me@example.org")
    assert run.returncode == 0, run.stderr
    assert (tmp_path / "my raw" / NAME).read_bytes() == DUMP
    assert os.listdir(tmp_path / "my raw") == [NAME]
    assert f"lazyformer corpus {tmp_path}/my\\ raw/{NAME} OUT" in run.stdout
    assert {agent for *_, agent in wikipedia.requests} == {"lazyformer-corpus-script (me@example.org) curl"}
    again = download_dump(tmp_path / "my raw", "--date", "20261101")
    assert again.returncode == 0 and "The file is there" in again.stderr
    assert wikipedia.paths().count(f"/enwiki/20261101/{NAME}") == 1


def test_a_broken_connection_is_taken_up_again(wikipedia, download_dump, programs, tmp_path):
    wikipedia.breaks_after = 30_000
    run = download_dump(tmp_path, PATH=programs(sleep=""))
    assert run.returncode == 0, run.stderr
    assert "The connection broke" in run.stderr
    assert (tmp_path / NAME).read_bytes() == DUMP
    asked = [(method, wanted) for method, path, wanted, _ in wikipedia.requests if path.endswith(".bz2")]
    assert [wanted for method, wanted in asked if method == "GET"] == ["", "bytes=30000-"]


@pytest.mark.parametrize(
    ("ending", "there", "message"),
    [
        (".part", b"x" * len(DUMP), f": its SHA-1 is .*{SHA1}.*remove it"),
        (".part", b"x" * 100, f": its SHA-1 is .*{SHA1}.*remove it"),
        (".part", DUMP + b"x", "has 102401 bytes, but 102400 are published"),
        ("", DUMP[:-1], ": is not the published file; remove it and run this again"),
    ],
)
def test_a_file_that_is_another_is_named_and_stays(download_dump, tmp_path, ending, there, message):
    path = tmp_path / f"{NAME}{ending}"
    path.write_bytes(there)
    run = download_dump(tmp_path)
    assert run.returncode == 1
    assert re.search(message, run.stderr.splitlines()[-1]) and str(path) in run.stderr
    assert path.exists() and [path.name] == os.listdir(tmp_path)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("", "0.10 MB are still to come, but 0.01 MB are free there"),
        ("--date 20250101", "enwiki-20250101-sha1sums.txt: cannot be read; is --language, --date or --mirror right?"),
        ("--language zh-min-nan", "/zh_min_nanwiki/latest/zh_min_nanwiki-latest-sha1sums.txt: cannot be read"),
        ("--language simple", "lists no finished pages-articles-multistream.xml.bz2; give an earlier --date"),
    ],
)
def test_what_keeps_a_dump_from_arriving_is_said(wikipedia, download_dump, programs, tmp_path, options, message):
    wikipedia.files["/simplewiki/latest/simplewiki-latest-sha1sums.txt"] = f"{SHA1}  simplewiki-1-stub.gz\n".encode()
    small_disk = programs(df="echo header\necho disk 100 90 10 90% /")
    run = download_dump(tmp_path, *options.split(), PATH=small_disk)
    assert run.returncode == 1
    assert run.stderr.splitlines()[-1].startswith("error: ") and message in run.stderr


@pytest.fixture
def books(mirror):  # noqa: F811
    """A mirror of seven books and of files that are none."""
    numbers = "train/1 train/2 train/3 train/4 train/5 validation/7 test/8 train/../../x".split()
    names = [*(f"{number}.txt" for number in numbers), "train/x.csv"]
    mirror.files = {f"/bucket/{name}": f"The book {name}.\n".encode() * 9 for name in names}
    return mirror


@pytest.fixture
def download_books(books):
    place = ("--bucket", f"{books.url}/bucket", "--list", f"{books.url}/list")
    return lambda folder, *options: script("download_books.sh", folder, *place, *options)


def test_books_arrive_checked_and_then_only_half_and_missing_ones(books, download_books, tmp_path):
    folder = tmp_path / "my books"
    dry = download_books(folder, "--dry-run", "--splits", "train test")
    assert dry.returncode == 0 and dry.stderr.startswith("6 books, 0.00 GB, from ") and "6 of them" in dry.stderr
    assert not folder.exists()

    run = download_books(folder)
    assert run.returncode == 0, run.stderr
    found = {path.relative_to(folder).as_posix() for path in folder.rglob("*.*")}
    assert found == {*(f"train/{n}.txt" for n in range(1, 6)), "validation/7.txt", "test/8.txt"}
    assert "7 books in " in run.stdout and "7 of them still to come" in run.stderr
    assert (folder / "test" / "8.txt").read_bytes() == books.files["/bucket/test/8.txt"]

    (folder / "train" / "2.txt").write_bytes(b"The boo")
    (folder / "train" / "4.txt").unlink()
    books.requests.clear()
    assert download_books(folder).returncode == 0
    assert [path for path in books.paths() if "/bucket/" in path] == ["/bucket/train/2.txt", "/bucket/train/4.txt"]
    assert (folder / "train" / "2.txt").read_bytes() == books.files["/bucket/train/2.txt"]


def test_a_book_of_another_checksum_is_named_and_fetched_again(download_books, tmp_path):
    assert download_books(tmp_path, "--splits", "train").returncode == 0
    good = (tmp_path / "train" / "3.txt").read_bytes()
    (tmp_path / "train" / "3.txt").write_bytes(b"x" * len(good))
    run = download_books(tmp_path, "--splits", "train")
    assert run.returncode == 1
    assert "error: 1 books are not as published, the first train/3.txt; run this again" in run.stderr
    assert download_books(tmp_path, "--splits", "train").returncode == 0
    assert (tmp_path / "train" / "3.txt").read_bytes() == good


def preprocess(*arguments: object) -> list[str]:
    run = script("preprocess_wiki_books.sh", *arguments, "--dry-run")
    assert run.returncode == 0, run.stderr
    command = shlex.split(run.stdout)
    assert Path(command[0]).name == "lazyformer"
    return command[1:]


def test_the_launcher_is_lazyformer_corpus_of_the_projects_environment_with_our_options_last(tmp_path):
    arguments = preprocess("data", "wiki dump.bz2", "my books", "--workers", 3)
    assert arguments == ["corpus", "wiki dump.bz2", "book:my books", "data", *"--vocab-size 32768 --workers 3".split()]
    assert preprocess("data", "wiki", "jsonl:books.zst")[1:4] == ["wiki", "jsonl:books.zst", "data"]
    shutil.copytree(ROOT / "scripts", tmp_path / "scripts")
    own = tmp_path / ".venv" / "bin" / "lazyformer"
    own.parent.mkdir(parents=True)
    own.write_text('#!/bin/sh\nprintf "%s|" "$@"\nexit 7\n')
    own.chmod(0o755)
    run = run_script(tmp_path / "scripts" / "preprocess_wiki_books.sh", "o", "w", "b c", "--vocab-size", "99")
    assert (run.returncode, run.stdout) == (7, "corpus|w|book:b c|o|--vocab-size|32768|--vocab-size|99|")


@pytest.mark.parametrize("name", ["download_wikipedia.sh", "download_books.sh", "preprocess_wiki_books.sh"])
@pytest.mark.parametrize("arguments", [(), ("--help",), ("a", "b", "c", "--help")])
def test_help(name, arguments):
    run = script(name, *arguments)
    assert (run.returncode, run.stderr) == (0, "")
    assert run.stdout.startswith(f"usage: scripts/{name} ")
    assert all(len(line) <= 120 for line in run.stdout.splitlines())


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("download_wikipedia.sh --date 20261101", "give FOLDER first; see scripts/download_wikipedia.sh --help"),
        ("download_wikipedia.sh raw --date", "--date needs a value"),
        ("download_wikipedia.sh raw --date today", "--date today: give YYYYMMDD"),
        ("download_wikipedia.sh raw --language ../x", "--language ../x: give a code such as en"),
        ("download_wikipedia.sh raw --mirror ftp://x", "--mirror ftp://x: give a URL that begins with"),
        ("download_wikipedia.sh raw --dates 1", "--dates: no such option"),
        ("download_wikipedia.sh raw other", "other: no such option"),
        ("download_books.sh --dry-run", "give FOLDER first"),
        ("download_books.sh raw --splits dev", "--splits dev: give some of train, validation and test"),
        ("download_books.sh raw --split train", "--split: no such option"),
        ("preprocess_wiki_books.sh out wiki", "give OUT, WIKI and BOOKS first"),
        ("preprocess_wiki_books.sh out wiki --workers 3", "give OUT, WIKI and BOOKS first"),
    ],
)
def test_a_wrong_command_line_is_one_line(command, message):
    name, *arguments = command.split()
    run = script(name, *arguments)
    assert (run.returncode, run.stdout) == (2, "")
    assert run.stderr.count("\n") == 1 and run.stderr.startswith("error: ") and message in run.stderr


def test_the_page_about_data_names_scripts_and_options_that_there_are():
    page = (ROOT / "docs" / "data.md").read_text(encoding="utf-8")
    scripts = set(re.findall(r"scripts/(\w+\.sh)", page))
    assert {"download_wikipedia.sh", "download_books.sh", "preprocess_wiki_books.sh"} <= scripts
    known = {option for command in corpus.commands.values() for found in command.params for option in found.opts}
    # Of rsync and WikiExtractor, and of fairseq-train.
    known |= {"--del", "--include", "--exclude", "--json", "--save-dir", "--disable-validation"}
    for name in scripts:
        known |= set(re.findall(r"--[a-z-]+", (ROOT / "scripts" / name).read_text(encoding="utf-8")))
    assert set(re.findall(r"(?<![\w-])--[a-z][a-z-]*", page)) <= known
