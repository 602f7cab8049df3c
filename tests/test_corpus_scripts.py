"""The scripts that download and prepare texts (from a server of ours), and the launcher of ``lazyformer corpus``."""

import base64
import hashlib
import io
import json
import os
import re
import shlex
import shutil
import stat
import threading
import zipfile
from collections.abc import Iterator
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import pytest
from helpers import ROOT, run_script, write_program, write_toy_wikitext

from lazyformer_fairseq.corpus.commands import corpus
from lazyformer_fairseq.data.glue import find_task
from lazyformer_fairseq.data.labelled_files import read_split
from lazyformer_fairseq.language_modeling.prepare import read_manifest

DUMP = bytes(range(256)) * 400
NAME = "enwiki-20261101-pages-articles-multistream.xml.bz2"
SHA1 = hashlib.sha1(DUMP).hexdigest()
FETCH = ("download_wikipedia.sh", "download_books.sh", "download_glue.sh", "download_squad.sh")
pytestmark = pytest.mark.usefixtures("without_gpus")  # and in an empty folder


class Mirror:
    """A server of ``files`` (path -> content) that knows ranges, remembers its requests, and may break off."""

    def __init__(self):
        self.files: dict[str, bytes] = {}
        self.requests: list[tuple[str, str, str, str]] = []  # method, path, range, user agent
        self.breaks_after = 0  # bytes of its next answer of a file's content
        self.pages: list[object] = []  # of the listing, in place of the one that is made from the files

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
            end = len(content)
            if self.breaks_after and handler.path.endswith((".bz2", ".zip", ".json")):
                end, self.breaks_after, handler.close_connection = start + self.breaks_after, 0, True
            handler.wfile.write(content[start:end])

    def listing(self, path: str) -> bytes:
        """As Google's storage lists: here five files a page, some of them not books."""
        if self.pages:
            return json.dumps(self.pages.pop(0)).encode()
        start = int(parse_qs(urlsplit(path).query).get("pageToken", ["0"])[0])
        files = sorted(self.files.items())
        items = []
        for name, content in files[start : start + 5]:
            md5 = base64.b64encode(hashlib.md5(content).digest()).decode()
            items.append({"name": name.removeprefix("/bucket/"), "size": str(len(content)), "md5Hash": md5})
        more = {"nextPageToken": str(start + 5)} if start + 5 < len(files) else {}
        return json.dumps({"items": items, **more}).encode()

    def paths(self, method: str = "GET") -> list[str]:
        return [path for asked, path, *_ in self.requests if asked == method]


@pytest.fixture
def mirror() -> Iterator[Mirror]:
    mirror = Mirror()
    yield mirror
    mirror.server.shutdown()
    mirror.server.server_close()


@pytest.fixture
def wikipedia(mirror):
    """A mirror with a dump; an older one is listed too, and files of other types."""
    sums = f"{'0' * 40}  enwiki-20261101-pages-articles.xml.bz2\n{SHA1}  {NAME}\n"
    mirror.files = {
        "/enwiki/latest/enwiki-latest-sha1sums.txt": sums.encode(),
        "/enwiki/20261101/enwiki-20261101-sha1sums.txt": sums.encode(),
        f"/enwiki/20261101/{NAME}": DUMP,
    }
    return mirror


@pytest.fixture
def download_dump(wikipedia):
    """``download_dump(folder, "--option", VARIABLE=value)``"""
    return lambda folder, *options, **environment: run_script(
        "download_wikipedia.sh", folder, "--mirror", wikipedia.url, *options, env=os.environ | environment
    )


def path_with(folder: Path, program: str, text: str = "") -> str:
    """A PATH on which this shell script comes first."""
    write_program(folder / "bin" / program, text)
    return f"{folder / 'bin'}{os.pathsep}{os.environ['PATH']}"


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
    assert again.returncode == 0 and "The file already exists" in again.stderr
    assert wikipedia.paths().count(f"/enwiki/20261101/{NAME}") == 1


def test_a_broken_connection_is_taken_up_again(wikipedia, download_dump, tmp_path):
    wikipedia.breaks_after = 30_000
    run = download_dump(tmp_path, PATH=path_with(tmp_path, "sleep"))
    assert run.returncode == 0, run.stderr
    assert "The connection broke" in run.stderr
    assert (tmp_path / NAME).read_bytes() == DUMP
    asked = [(method, wanted) for method, path, wanted, _ in wikipedia.requests if path.endswith(".bz2")]
    assert [wanted for method, wanted in asked if method == "GET"] == ["", "bytes=30000-"]


@pytest.mark.parametrize(
    ("ending", "there", "message"),
    [
        (".part", b"x" * len(DUMP), f" has the SHA-1 .*{SHA1}.*remove"),
        (".part", DUMP + b"x", "has 102401 bytes, but the published size is 102400"),
        ("", DUMP[:-1], " is not the published file; remove it and run this again"),
    ],
)
def test_a_file_that_is_another_is_named_and_stays(download_dump, tmp_path, ending, there, message):
    path = tmp_path / "raw" / f"{NAME}{ending}"
    path.parent.mkdir()
    path.write_bytes(there)
    run = download_dump(path.parent)
    assert run.returncode == 1
    assert re.search(message, run.stderr.splitlines()[-1]) and str(path) in run.stderr
    assert path.exists() and [path.name] == os.listdir(path.parent)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("", "0.10 MB must still be downloaded, but only 0.01 MB is free"),
        ("--date 20250101", "enwiki-20250101-sha1sums.txt: cannot be read; check --language, --date and --mirror"),
        ("--language zh-min-nan", "/zh_min_nanwiki/latest/zh_min_nanwiki-latest-sha1sums.txt: cannot be read"),
        ("--language simple", "lists no finished pages-articles-multistream.xml.bz2; use an earlier --date"),
    ],
)
def test_what_keeps_a_dump_from_arriving_is_said(wikipedia, download_dump, tmp_path, options, message):
    wikipedia.files["/simplewiki/latest/simplewiki-latest-sha1sums.txt"] = f"{SHA1}  simplewiki-1-stub.gz\n".encode()
    small_disk = path_with(tmp_path, "df", "echo header\necho disk 100 90 10 90% /")
    run = download_dump(tmp_path, *options.split(), PATH=small_disk)
    assert run.returncode == 1
    assert run.stderr.splitlines()[-1].startswith("error: ") and message in run.stderr


@pytest.fixture
def books(mirror):
    """A mirror of seven books and of files that are none."""
    numbers = "train/1 train/2 train/3 train/4 train/5 validation/7 test/8 train/../../x".split()
    names = [*(f"{number}.txt" for number in numbers), "train/x.csv"]
    mirror.files = {f"/bucket/{name}": f"The book {name}.\n".encode() * 9 for name in names}
    return mirror


@pytest.fixture
def download_books(books):
    place = ("--bucket", f"{books.url}/bucket", "--list", f"{books.url}/list")
    return lambda folder, *options: run_script("download_books.sh", folder, *place, *options)


def test_books_arrive_checked_and_then_only_half_and_missing_ones(books, download_books, tmp_path):
    folder = tmp_path / "my books"
    dry = download_books(folder, "--dry-run", "--splits", "train test")
    assert dry.returncode == 0 and dry.stderr.startswith("6 books, 0.00 GB, from ") and "6 of them" in dry.stderr
    assert not folder.exists()

    run = download_books(folder)
    assert run.returncode == 0, run.stderr
    found = {path.relative_to(folder).as_posix() for path in folder.rglob("*.*")}
    assert found == {*(f"train/{n}.txt" for n in range(1, 6)), "validation/7.txt", "test/8.txt"}
    assert "7 books in " in run.stdout and "7 of them must be downloaded" in run.stderr
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
    assert "error: 1 book(s) differ from the originals: train/3.txt ...; run this again" in run.stderr
    assert download_books(tmp_path, "--splits", "train").returncode == 0
    assert (tmp_path / "train" / "3.txt").read_bytes() == good


MD5 = base64.b64encode(hashlib.md5(b"x").digest()).decode()
ITEM = {"name": "train/1.txt", "size": "1", "md5Hash": MD5}
SECOND_BOOK = f"1 {'0' * 32}\n../user.txt 1 {'0' * 32}"


@pytest.mark.parametrize(
    ("page", "message"),
    [
        ({"items": [{**ITEM, "size": SECOND_BOOK}]}, "has an invalid size of train/1.txt"),
        ({"items": [{**ITEM, "size": "-1"}]}, "has an invalid size of train/1.txt: '-1'"),
        ({"items": [{**ITEM, "size": None}]}, "has an invalid size of train/1.txt: 'None'"),
        ({"items": [{**ITEM, "size": "9" * 40}]}, "has an invalid size of train/1.txt"),
        ({"items": [{**ITEM, "md5Hash": f"{MD5}\n../user.txt"}]}, "has an invalid MD5 of train/1.txt"),
        ({"items": [{**ITEM, "md5Hash": "AAAA"}]}, "has an invalid MD5 of train/1.txt: 'AAAA'"),
        ({"items": [ITEM], "nextPageToken": f"\n../user.txt {SECOND_BOOK}"}, "has an invalid token for the next page"),
        ({"items": [ITEM], "nextPageToken": 7}, "has an invalid token for the next page"),
        ({"items": [{"name": "train/1.txt"}]}, "does not have the format of Google Cloud Storage (KeyError)"),
        ({"items": [7]}, "does not have the format of Google Cloud Storage (TypeError)"),
        ([], "does not have the format of Google Cloud Storage (AttributeError)"),
        ({"items": [{**ITEM, "name": "train/1.txt\n"}, {**ITEM, "name": "../user.txt"}]}, "lists no books"),
    ],
)
def test_no_value_of_the_listing_becomes_a_name_or_a_line(books, download_books, tmp_path, page, message):
    (tmp_path / "user.txt").write_text("mine")
    books.files["/bucket/../user.txt"] = books.files["/user.txt"] = b"theirs"
    books.pages = [page]
    run = download_books(tmp_path / "books")
    assert (run.returncode, run.stdout) == (1, "") and message in run.stderr and "Traceback" not in run.stderr
    assert run.stderr.splitlines()[-1].startswith("error: ")
    assert (tmp_path / "user.txt").read_text() == "mine" and not (tmp_path / "books").exists()


def test_a_listing_without_an_end_is_refused(books, download_books, tmp_path):
    again = {"items": [ITEM], "nextPageToken": "again"}
    books.pages = [again] * 3
    run = download_books(tmp_path / "books")
    assert run.returncode == 1 and "the listing does not end: after 2 pages, it refers to the page again" in run.stderr
    assert len(books.paths()) == 2


def preprocess(*arguments: object) -> list[str]:
    run = run_script("preprocess_wiki_books.sh", *arguments, "--dry-run")
    assert run.returncode == 0, run.stderr
    command = shlex.split(run.stdout)
    assert Path(command[1]) == ROOT / "scripts" / "lazyformer.sh"
    return command[2:]


def test_the_launcher_is_lazyformer_corpus_with_our_options_last():
    arguments = preprocess("data", "wiki dump.bz2", "my books", "--workers", 3)
    assert arguments == ["corpus", "wiki dump.bz2", "book:my books", "data", *"--vocab-size 32768 --workers 3".split()]
    assert preprocess("data", "wiki", "jsonl:books.zst")[1:4] == ["wiki", "jsonl:books.zst", "data"]


@pytest.mark.parametrize(
    ("script", "words"),
    [
        ("preprocess_wiki_books.sh|o|w|b c|--vocab-size|99", "corpus|w|book:b c|o|--vocab-size|32768|--vocab-size|99"),
        ("prepare_enwik8.sh|o|--from|.", "lm|prepare|enwik8|.|o|--official|enwik8"),
        ("pretrain.sh|bert_base|some data", "pretrain|bert_base|some data"),
        ("train_language_model.sh|par_transformer_base|data", "pretrain|par_transformer_base|data"),
    ],
)
def test_lazyformer_is_that_of_the_checkout_by_its_environment(script, words, tmp_path):
    shutil.copytree(ROOT / "scripts", tmp_path / "scripts")
    write_program(tmp_path / ".venv" / "bin" / "python", 'printf "%s|" "${PYTHONPATH%%:*}" "$@"; exit 7')
    run = run_script(tmp_path / "scripts" / script.partition("|")[0], *script.split("|")[1:])
    assert (run.returncode, run.stdout) == (7, f"{tmp_path}|-m|lazyformer_fairseq.cli|{words}|")


@pytest.mark.parametrize("name", [*FETCH, "preprocess_wiki_books.sh"])
def test_help(name):
    for arguments in ((), ("--help",), ("a", "b", "c", "--help")):
        run = run_script(name, *arguments)
        assert (run.returncode, run.stderr) == (0, "") and run.stdout.startswith(f"usage: scripts/{name} ")


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("download_wikipedia.sh --date 20261101", "pass FOLDER first; see scripts/download_wikipedia.sh --help"),
        ("download_wikipedia.sh raw --date", "--date needs a value"),
        ("download_wikipedia.sh raw --date today", "--date today: use the format YYYYMMDD"),
        ("download_wikipedia.sh raw --language ../x", "--language ../x: use a code such as en"),
        ("download_wikipedia.sh raw --mirror ftp://x", "--mirror ftp://x: use a URL that begins with"),
        ("download_wikipedia.sh raw --dates 1", "--dates: no such option"),
        ("download_books.sh --dry-run", "pass FOLDER first"),
        ("download_books.sh raw --splits dev", "--splits dev: use one or more of train, validation and test"),
        ("download_books.sh raw --split train", "--split: no such option"),
        ("preprocess_wiki_books.sh out wiki", "pass OUT, WIKI and BOOKS first"),
        ("download_glue.sh --tasks RTE", "pass FOLDER first"),
        ("download_glue.sh glue --tasks SST2", "--tasks SST2: use one or more of CoLA SST-2"),
        ("download_squad.sh squad --version 2", "--version: no such option"),
    ],
)
def test_a_wrong_command_line_is_one_line(command, message):
    name, *arguments = command.split()
    run = run_script(name, *arguments)
    assert (run.returncode, run.stdout) == (2, "")
    assert run.stderr.count("\n") == 1 and run.stderr.startswith("error: ") and message in run.stderr


def test_the_page_about_data_names_scripts_and_options_that_there_are():
    page = (ROOT / "docs" / "data.md").read_text(encoding="utf-8")
    scripts = set(re.findall(r"scripts/(\w+\.sh)", page))
    assert {"download_wikipedia.sh", "download_books.sh", "preprocess_wiki_books.sh"} <= scripts
    known = {option for found in corpus.params for option in found.opts}
    # Of rsync and WikiExtractor, and of fairseq-train.
    known |= {"--del", "--include", "--exclude", "--json", "--save-dir", "--disable-validation"}
    for name in scripts:
        known |= set(re.findall(r"--[a-z-]+", (ROOT / "scripts" / name).read_text(encoding="utf-8")))
    assert set(re.findall(r"(?<![\w-])--[a-z][a-z-]*", page)) <= known


# --- GLUE and SQuAD


def packed(files: dict[str, str]) -> bytes:
    with zipfile.ZipFile(buffer := io.BytesIO(), "w") as archive:
        for name, content in files.items():
            archive.writestr(name, content)
    return buffer.getvalue()


def test_glue_arrives_as_finetune_reads_it_and_is_told(mirror, tmp_path):
    folder, of_mrpc = tmp_path / "glue", "Quality\t#1 ID\t#2 ID\t#1 String\t#2 String\n"
    rows = [f"1\t{number}\t{number + 10}\tone {number}\tanother {number}\n" for number in range(3)]
    mirror.files = {
        "/glue/data/CoLA.zip": packed({"CoLA/train.tsv": "a\t1\t\tYes.\n" * 9, "CoLA/original/raw.tsv": "no\n"}),
        "/glue/data/QNLIv2.zip": packed({"QNLI/dev.tsv": "index\tquestion\n0\tWho?\n", "../evil.tsv": "no\n"}),
        "/glue/data/AX.tsv": b"index\tsentence1\n0\tNo.\n",
        "/senteval/senteval_data/msr_paraphrase_train.txt": ("\ufeff" + of_mrpc + "".join(rows)).encode(),
        "/senteval/senteval_data/msr_paraphrase_test.txt": (of_mrpc + rows[0]).encode(),
        "/glue/data/mrpc_dev_ids.tsv": b"1\t11\n",
    }  # fmt: skip
    mirror.breaks_after = 50
    options = ("--url", mirror.url, "--tasks", "CoLA QNLI AX MRPC")
    dry = run_script("download_glue.sh", folder, *options, "--dry-run")
    assert dry.returncode == 0 and dry.stderr.count("would download") == 6 and not folder.exists()
    run = run_script("download_glue.sh", folder, *options, env=os.environ | {"PATH": path_with(tmp_path, "sleep")})
    assert run.returncode == 0, run.stderr
    assert "bytes=50-" in {wanted for _, _, wanted, _ in mirror.requests}
    found = {path.relative_to(folder).as_posix(): path.read_text() for path in folder.rglob("*.*")}
    assert found == {
        "CoLA/train.tsv": "a\t1\t\tYes.\n" * 9,
        "QNLI/dev.tsv": "index\tquestion\n0\tWho?\n",
        "diagnostic/diagnostic.tsv": "index\tsentence1\n0\tNo.\n",
        "MRPC/train.tsv": of_mrpc + rows[0] + rows[2],
        "MRPC/dev.tsv": of_mrpc + rows[1],
        "MRPC/test.tsv": of_mrpc.replace("Quality", "index") + "0" + rows[0][1:],
    }
    [example] = read_split(find_task("MRPC"), folder / "MRPC", "valid").examples
    assert example.texts == ("one 1", "another 1")
    for name, count in (("CoLA/train.tsv", 9), ("MRPC/train.tsv", 2)):
        content = found[name].encode()
        sha256 = hashlib.sha256(content).hexdigest()
        assert f"{name}: {len(content)} bytes, {count} rows, SHA-256 {sha256}\n" in run.stdout
    mirror.requests.clear()
    assert run_script("download_glue.sh", folder, *options).stdout == run.stdout and not mirror.requests
    mirror.files["/glue/data/RTE.zip"] = b"no archive"
    run = run_script("download_glue.sh", folder, "--url", mirror.url, "--tasks", "RTE")
    assert run.returncode == 1 and "RTE cannot be unpacked; remove its files from this folder" in run.stderr
    assert not (folder / "RTE").exists() and "Traceback" not in run.stderr


def zipped(names: list[str], content: bytes = b"", mode: int = 0o644, stated: int | None = None) -> bytes:
    """An archive of files of one content; `stated`: the size that its directory gives."""
    with zipfile.ZipFile(buffer := io.BytesIO(), "w", zipfile.ZIP_DEFLATED) as archive:
        for name in names:
            member = zipfile.ZipInfo(name)
            member.external_attr = mode << 16
            archive.writestr(member, content, zipfile.ZIP_DEFLATED)
        for member in archive.filelist:
            member.file_size = len(content) if stated is None else stated
    return buffer.getvalue()


@pytest.mark.parametrize(
    ("archive", "message"),
    [
        (zipped(["enwik8"], b"/etc/passwd", stat.S_IFLNK | 0o777), "rejected, because 'enwik8' is a link"),
        (zipped(["../user.txt"]), "rejected, because '../user.txt' may lead out of the folder"),
        (zipped(["/user.txt"]), "rejected, because '/user.txt' may lead out of the folder"),
        (zipped(["a\\..\\user.txt"]), "may lead out of the folder"),
        (zipped([f"{number}" for number in range(1001)]), "contains 1,001 files"),
        (zipped(["enwik8"], b"x", stated=2 * 10**9 + 1), "2,000,000,001 bytes would be unpacked; the limits are"),
        (zipped(["enwik8"], b"x" * 10**5, stated=10), "Bad CRC-32"),
        (zipped(["enwik8"])[:-30], "not a zip file"),
    ],
    ids=["link", "above", "absolute", "backslash", "many", "large", "larger than stated", "cut"],
)
def test_an_archive_that_is_a_trap_is_refused(archive, message, tmp_path):
    work = tmp_path / "work"
    (work / "out.download").mkdir(parents=True)
    (work / "out.download" / "enwik8.zip").write_bytes(archive)
    run = run_script("prepare_enwik8.sh", work / "out", "--url", "http://127.0.0.1/enwik8.zip")
    assert run.returncode == 1 and message in run.stderr and "Traceback" not in run.stderr
    assert "enwik8.zip cannot be unpacked; remove it and run this again" in run.stderr.splitlines()[-1]
    found = {path.name: path.stat().st_size for path in work.rglob("*") if path.is_file()}
    assert found.pop("enwik8.zip") and max(found.values(), default=0) <= 10, "no more than it states"


def test_squad_arrives_and_is_told(mirror, tmp_path):
    folder = tmp_path / "squad"
    content = json.dumps({"data": [{"paragraphs": [{"qas": [{}, {}]}, {"qas": [{}]}]}]}).encode()
    mirror.files = {"/train-v1.1.json": content, "/dev-v1.1.json": b"{}"}
    mirror.breaks_after = 30
    path = {"PATH": path_with(tmp_path, "sleep")}
    run = run_script("download_squad.sh", folder, "--url", mirror.url, env=os.environ | path)
    assert (folder / "train-v1.1.json").read_bytes() == content
    told = f"{len(content)} bytes, 3 questions on 2 paragraphs of 1 articles, SHA-256"
    assert f"train-v1.1.json: {told} {hashlib.sha256(content).hexdigest()}\n" in run.stdout
    assert run.returncode == 1 and "dev-v1.1.json is not in SQuAD's format; remove it and run this again" in run.stderr


# --- texts of language modelling

PREPARE = {"wikitext103": "wikitext-103-v1.zip", "enwik8": "enwik8.zip", "text8": "text8.zip"}


@pytest.fixture
def archive(tmp_path) -> bytes:
    """A toy text, packed as WikiText-103 is."""
    text = write_toy_wikitext(tmp_path / "packed" / "wikitext-103")
    with zipfile.ZipFile(tmp_path / "archive.zip", "w") as file:
        for path in text.iterdir():
            file.write(path, f"wikitext-103/{path.name}")
    return (tmp_path / "archive.zip").read_bytes()


@pytest.mark.parametrize(("name", "file"), PREPARE.items())
def test_what_would_be_done_and_help(name, file):
    script = partial(run_script, f"prepare_{name}.sh")
    run = script("my data", "--dry-run")
    assert run.returncode == 0 and "would download https://" in run.stderr and file in run.stderr
    corpus, official = ("wikitext", "wikitext-103") if name == "wikitext103" else (name, name)
    command = shlex.split(run.stdout)
    at = command.index("prepare")
    assert command[at + 1 :] == [corpus, f"my data.download/{official}", "my data", "--official", official]
    run = script("out", "--from", ".", "--unofficial", "--dry-run")
    assert shlex.split(run.stdout)[-4:] == ["prepare", corpus, ".", "out"] and not run.stderr
    for arguments in ((), ("--help",), ("a", "b", "--help")):
        run = script(*arguments)
        assert (run.returncode, run.stderr) == (0, "") and run.stdout.startswith(f"usage: scripts/prepare_{name}.sh")


def test_a_download_goes_on_where_it_broke_off_and_is_checked(mirror, archive, tmp_path):
    mirror.files["/wiki.zip"] = archive
    part = tmp_path / "data.download" / "wiki.zip.part"
    part.parent.mkdir()
    part.write_bytes(archive[:1000])
    # As it comes from another place than the official one, its MD5 is not the published one.
    run = run_script("prepare_wikitext103.sh", "data/", "--url", f"{mirror.url}/wiki.zip")
    assert run.returncode == 1 and "does not have the MD5 9ddaacaf6af0710eda8c456decff7832" in run.stderr
    assert (tmp_path / "data.download" / "wiki.zip").read_bytes() == archive and not part.exists()
    assert [(method, start) for method, _, start, _ in mirror.requests] == [("HEAD", ""), ("GET", "bytes=1000-")]
    assert not (tmp_path / "data").exists()
    run = run_script("prepare_text8.sh", "out", "--url", f"{mirror.url}/text8.zip")
    assert run.returncode == 1 and "/text8.zip: cannot be read; use another URL with --url" in run.stderr


@pytest.mark.slow
def test_what_was_downloaded_is_unpacked_and_prepared_if_it_is_official_or_need_not_be(archive, tmp_path):
    text = (ROOT / "scripts" / "prepare_wikitext103.sh").read_text()
    text = text.replace("9ddaacaf6af0710eda8c456decff7832", hashlib.md5(archive).hexdigest())
    copy = tmp_path / "prepare_toy.sh"
    copy.write_text(text.replace('"$(dirname "$0")/prepare_text.sh"', f'"{ROOT}/scripts/prepare_text.sh"'))
    (tmp_path / "kept").mkdir()
    (tmp_path / "kept" / "wikitext-103-v1.zip").write_bytes(archive)
    run = run_script(copy, "data", "--downloads", "kept")
    assert run.returncode == 1 and "Traceback" not in run.stderr
    assert "error: " in run.stderr and "not wikitext-103 (the train size" in run.stderr
    assert not (tmp_path / "data").exists()
    run = run_script(copy, "data", "--downloads", "kept", "--unofficial")
    assert run.returncode == 0, run.stderr
    assert "NOT an official text" in run.stdout and read_manifest(tmp_path / "data")["official"] is None


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--from x", "pass OUT first"),
        ("out --from", "--from needs a value"),
        ("out --fast", "--fast: no such option"),
        ("out --from nowhere", "--from nowhere: no such folder"),
    ],
)
def test_what_cannot_be_prepared_is_said(arguments, message):
    run = run_script("prepare_enwik8.sh", *arguments.split())
    assert run.returncode > 0 and run.stderr.startswith("error: ") and message in run.stderr
