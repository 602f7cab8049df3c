"""The scripts that download raw text (from a server of ours) and the launcher of ``lazyformer corpus``."""

import base64
import hashlib
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import pytest
from helpers import ROOT

from lazyformer_fairseq.corpus.commands import corpus

DUMP = bytes(range(256)) * 400
NAME = "enwiki-20261101-pages-articles-multistream.xml.bz2"
SHA1 = hashlib.sha1(DUMP).hexdigest()
ENVIRONMENT = os.environ | {"PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}


class Mirror:
    """A server of ``files`` (path -> content) that knows ranges, remembers its requests, and may break off."""

    def __init__(self):
        self.files: dict[str, bytes] = {}
        self.requests: list[tuple[str, str, str, str]] = []  # method, path, range, user agent
        self.breaks_after = 0  # bytes of its next answer

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            do_GET = do_HEAD = lambda handler: self.answer(handler)
            log_message = lambda *_: None  # noqa: E731

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, args=(0.02,), daemon=True).start()

    def answer(self, handler: BaseHTTPRequestHandler) -> None:
        wanted = handler.headers.get("Range", "")
        self.requests.append((handler.command, handler.path, wanted, handler.headers["User-Agent"]))
        content = self.listing(handler.path) if handler.path.startswith("/list?") else self.files.get(handler.path)
        if content is None:
            handler.send_response(404)
            handler.send_header("Content-Length", "0")
            handler.end_headers()
            return
        start = int(wanted.removeprefix("bytes=").removesuffix("-") or 0)
        handler.send_response(206 if wanted else 200)
        handler.send_header("Content-Length", str(len(content) - start))
        if wanted:
            handler.send_header("Content-Range", f"bytes {start}-{len(content) - 1}/{len(content)}")
        handler.end_headers()
        if handler.command == "GET":
            end = start + self.breaks_after if self.breaks_after else len(content)
            handler.wfile.write(content[start:end])
            handler.close_connection = bool(self.breaks_after)
            self.breaks_after = 0

    def listing(self, path: str) -> bytes:
        """As Google's storage lists: here five files a page, some of them not books."""
        query = {key: values[0] for key, values in parse_qs(urlsplit(path).query).items()}
        names = [path.removeprefix("/bucket/") for path in sorted(self.files)]
        start = int(query.get("pageToken", 0))
        items = [
            {
                "name": name,
                "size": str(len(content)),
                "md5Hash": base64.b64encode(hashlib.md5(content).digest()).decode(),
            }
            for name in names[start : start + 5]
            for content in [self.files[f"/bucket/{name}"]]
        ]
        more = {"nextPageToken": str(start + 5)} if start + 5 < len(names) else {}
        return json.dumps({"items": items, **more}).encode()

    def paths(self, method: str = "GET") -> list[str]:
        return [path for asked, path, *_ in self.requests if asked == method]


@pytest.fixture
def mirror():
    mirror = Mirror()
    yield mirror
    mirror.server.shutdown()
    mirror.server.server_close()


@pytest.fixture
def wikipedia(mirror):
    """A mirror with a dump; an older one is listed too, and files of other kinds."""
    sums = f"{'0' * 40}  enwiki-20261101-pages-articles.xml.bz2\n{SHA1}  {NAME}\n"
    mirror.files = {
        "/enwiki/latest/enwiki-latest-sha1sums.txt": sums.encode(),
        "/enwiki/20261101/enwiki-20261101-sha1sums.txt": sums.encode(),
        f"/enwiki/20261101/{NAME}": DUMP,
    }
    return mirror


def script(name: str, *arguments: object, **environment: str) -> subprocess.CompletedProcess:
    command = ["bash", str(ROOT / "scripts" / name), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, env=ENVIRONMENT | environment)


def download_dump(mirror: Mirror, folder: Path, *options: str) -> subprocess.CompletedProcess:
    return script("download_wikipedia.sh", folder, "--mirror", mirror.url, *options)


def test_the_newest_dump_arrives_checked(wikipedia, tmp_path):
    run = download_dump(wikipedia, tmp_path / "my raw", "--contact", "me@example.org")
    assert run.returncode == 0, run.stderr
    assert (tmp_path / "my raw" / NAME).read_bytes() == DUMP
    assert os.listdir(tmp_path / "my raw") == [NAME]
    assert f"lazyformer corpus {tmp_path}/my\\ raw/{NAME} OUT" in run.stdout
    assert {agent for *_, agent in wikipedia.requests} == {"lazyformer-corpus-script (me@example.org) curl"}
    again = download_dump(wikipedia, tmp_path / "my raw", "--date", "20261101")
    assert again.returncode == 0 and "The file is there" in again.stderr
    assert wikipedia.paths().count(f"/enwiki/20261101/{NAME}") == 1


def test_a_broken_connection_is_taken_up_again(wikipedia, tmp_path):
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "sleep").write_text("#!/bin/sh\n")
    (tmp_path / "bin" / "sleep").chmod(0o755)
    original = wikipedia.answer

    def answer(handler):
        if not wikipedia.paths() or wikipedia.paths()[-1].endswith("sums.txt"):
            wikipedia.breaks_after = 30_000 if handler.path.endswith(".bz2") and handler.command == "GET" else 0
        original(handler)

    wikipedia.answer = answer
    run = script(
        "download_wikipedia.sh",
        tmp_path,
        "--mirror",
        wikipedia.url,
        PATH=f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}",
    )
    assert run.returncode == 0, run.stderr
    assert "The connection broke" in run.stderr
    assert (tmp_path / NAME).read_bytes() == DUMP
    assert [wanted for method, path, wanted, _ in wikipedia.requests if method == "GET" and path.endswith(".bz2")] == [
        "",
        "bytes=30000-",
    ]


@pytest.mark.parametrize(
    ("ending", "there", "message"),
    [
        (".part", b"x" * len(DUMP), f": its SHA-1 is .*{SHA1}.*remove it"),
        (".part", b"x" * 100, f": its SHA-1 is .*{SHA1}.*remove it"),
        (".part", DUMP + b"x", "has 102401 bytes, but 102400 are published"),
        ("", DUMP[:-1], ": is not the published file; remove it and run this again"),
    ],
)
def test_a_file_that_is_another_is_named_and_stays(wikipedia, tmp_path, ending, there, message):
    path = tmp_path / f"{NAME}{ending}"
    path.write_bytes(there)
    run = download_dump(wikipedia, tmp_path)
    assert run.returncode == 1
    assert re.search(message, run.stderr.splitlines()[-1]) and str(path) in run.stderr
    assert path.exists() and [path.name] == os.listdir(tmp_path)


def test_too_little_space_is_said(wikipedia, tmp_path):
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "df").write_text("#!/bin/sh\necho header\necho disk 100 90 10 90% /\n")
    (tmp_path / "bin" / "df").chmod(0o755)
    path = f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}"
    run = script("download_wikipedia.sh", tmp_path / "raw", "--mirror", wikipedia.url, PATH=path)
    assert run.returncode == 1 and "0.10 MB are still to come, but 0.01 MB are free there" in run.stderr


def test_a_dry_run_says_what_it_would_fetch(wikipedia, tmp_path):
    run = download_dump(wikipedia, tmp_path / "raw", "--dry-run")
    assert run.returncode == 0
    assert f"{wikipedia.url}/enwiki/20261101/{NAME}" in run.stderr
    assert f"(102400 bytes), sha1 {SHA1}" in run.stderr
    assert not (tmp_path / "raw").exists()
    assert wikipedia.paths() == ["/enwiki/latest/enwiki-latest-sha1sums.txt"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--date 20250101", "enwiki-20250101-sha1sums.txt: cannot be read; is --language, --date or --mirror right?"),
        ("--language zh-min-nan", "/zh_min_nanwiki/latest/zh_min_nanwiki-latest-sha1sums.txt: cannot be read"),
        ("--language simple", "lists no finished pages-articles-multistream.xml.bz2; give an earlier --date"),
    ],
)
def test_a_dump_that_is_not_there_is_said(wikipedia, tmp_path, options, message):
    wikipedia.files["/simplewiki/latest/simplewiki-latest-sha1sums.txt"] = f"{SHA1}  simplewiki-1-stub.gz\n".encode()
    run = download_dump(wikipedia, tmp_path, *options.split())
    assert run.returncode == 1
    assert run.stderr.splitlines()[-1].startswith("error: ") and message in run.stderr


def download_books(mirror: Mirror, folder: Path, *options: str) -> subprocess.CompletedProcess:
    return script(
        "download_books.sh", folder, "--bucket", f"{mirror.url}/bucket", "--list", f"{mirror.url}/list", *options
    )


@pytest.fixture
def books(mirror):
    names = [f"train/{n}.txt" for n in range(1, 6)] + [
        "validation/7.txt",
        "test/8.txt",
        "train/../../x.txt",
        "train/x.csv",
    ]
    mirror.files = {f"/bucket/{name}": f"The book {name}.\n".encode() * 9 for name in names}
    return mirror


def test_books_arrive_checked(books, tmp_path):
    run = download_books(books, tmp_path / "my books")
    assert run.returncode == 0, run.stderr
    found = {path.relative_to(tmp_path / "my books").as_posix() for path in (tmp_path / "my books").rglob("*.*")}
    assert found == {*(f"train/{n}.txt" for n in range(1, 6)), "validation/7.txt", "test/8.txt"}
    assert "7 books in " in run.stdout and "7 of them still to come" in run.stderr
    assert (tmp_path / "my books" / "test" / "8.txt").read_bytes() == books.files["/bucket/test/8.txt"]


def test_half_books_and_missing_ones_are_fetched_the_others_not(books, tmp_path):
    assert download_books(books, tmp_path).returncode == 0
    (tmp_path / "train" / "2.txt").write_bytes(b"The boo")
    (tmp_path / "train" / "4.txt").unlink()
    books.requests.clear()
    run = download_books(books, tmp_path)
    assert run.returncode == 0, run.stderr
    assert [path for path in books.paths() if "/bucket/" in path] == ["/bucket/train/2.txt", "/bucket/train/4.txt"]
    assert (tmp_path / "train" / "2.txt").read_bytes() == books.files["/bucket/train/2.txt"]


def test_a_book_of_another_checksum_is_named_and_fetched_again(books, tmp_path):
    assert download_books(books, tmp_path, "--splits", "train").returncode == 0
    good = (tmp_path / "train" / "3.txt").read_bytes()
    (tmp_path / "train" / "3.txt").write_bytes(b"x" * len(good))
    run = download_books(books, tmp_path, "--splits", "train")
    assert run.returncode == 1
    assert "error: 1 books are not as published, the first train/3.txt; run this again" in run.stderr
    assert download_books(books, tmp_path, "--splits", "train").returncode == 0
    assert (tmp_path / "train" / "3.txt").read_bytes() == good


def test_a_dry_run_counts_the_books(books, tmp_path):
    run = download_books(books, tmp_path / "raw", "--dry-run", "--splits", "train test")
    assert run.returncode == 0 and run.stderr.startswith("6 books, 0.00 GB, from ") and "6 of them" in run.stderr
    assert not (tmp_path / "raw").exists()


def preprocess(*arguments: object) -> list[str]:
    run = script("preprocess_wiki_books.sh", *arguments, "--dry-run")
    assert run.returncode == 0, run.stderr
    command = shlex.split(run.stdout)
    assert Path(command[0]).name == "lazyformer"
    return command[1:]


def test_the_launcher_is_lazyformer_corpus():
    arguments = preprocess("data", "wiki dump.bz2", "my books", "--workers", 3)
    assert arguments == ["corpus", "wiki dump.bz2", "book:my books", "data", *"--vocab-size 32768 --workers 3".split()]
    assert preprocess("data", "wiki", "jsonl:books.zst")[1:4] == ["wiki", "jsonl:books.zst", "data"]


def test_the_launcher_runs_the_project_s_own_environment_with_our_options_last(tmp_path):
    shutil.copytree(ROOT / "scripts", tmp_path / "scripts")
    own = tmp_path / ".venv" / "bin" / "lazyformer"
    own.parent.mkdir(parents=True)
    own.write_text('#!/bin/sh\nprintf "%s|" "$@"\nexit 7\n')
    own.chmod(0o755)
    command = ["bash", tmp_path / "scripts" / "preprocess_wiki_books.sh", "o", "w", "b c", "--vocab-size", "99"]
    run = subprocess.run(command, capture_output=True, text=True)
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
    known |= {"--del", "--include", "--exclude", "--json"}  # of rsync and WikiExtractor
    known |= {"--save-dir", "--disable-validation"}  # of fairseq-train
    for name in scripts:
        known |= set(re.findall(r"--[a-z-]+", (ROOT / "scripts" / name).read_text(encoding="utf-8")))
    assert set(re.findall(r"(?<![\w-])--[a-z][a-z-]*", page)) <= known
