"""A corpus whose input, or which itself, is at a URL: the bytes of local folders, whoever resumes it where."""

import gzip
import json
import multiprocessing
import signal
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import fsspec
import pytest
from click.testing import CliRunner
from corpus_tasks import build_until_killed
from helpers import toy_texts

from lazyformer_fairseq.corpus.build import build_corpus
from lazyformer_fairseq.corpus.commands import corpus
from lazyformer_fairseq.corpus.remote_work import READ, RemoteWork
from lazyformer_fairseq.corpus.settings import CorpusSettings
from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.storage.remote import copies
from lazyformer_fairseq.storage.run_lock import run_lock

SETTINGS = CorpusSettings(vocab_size=200, valid_share=0.1, shards=2, unit_megabytes=0.0045)
STAGES = list(READ)


@pytest.fixture(scope="module")
def raw(tmp_path_factory) -> Path:
    """Names that sort otherwise as text than as paths, a file that is cut, and files that are left out."""
    folder = tmp_path_factory.mktemp("raw")
    texts = toy_texts(200)
    (folder / "a").mkdir()
    (folder / "a" / "two.txt").write_text("\n\n".join(texts[50:100]))
    (folder / "a-one.txt").write_text("\n\n".join(texts[:60]))
    (folder / "three.txt.gz").write_bytes(gzip.compress("\n\n".join(texts[100:]).encode()))
    (folder / "README").write_text("About the files.")
    (folder / ".hidden.txt").write_text("Hidden. " * 50)
    return folder


@pytest.fixture(scope="module")
def expected(raw, tmp_path_factory) -> dict[str, bytes]:
    folder = tmp_path_factory.mktemp("local") / "out"
    build_corpus([str(raw)], folder, SETTINGS)
    return content(str(folder), str(raw))


def content(place: str, raw: str) -> dict[str, bytes]:
    """Files by name; the manifest without times, and with RAW for the place of the inputs. The report is made of it."""
    files, top = fsspec.core.url_to_fs(place, use_listings_cache=False)
    found = {name.removeprefix(f"{top}/"): files.cat_file(name) for name in files.find(top)}
    manifest = json.loads(found.pop("manifest.json"))
    assert manifest.pop("timing") and found.pop("report.html")
    return found | {"manifest": json.dumps(manifest).replace(raw, "RAW").encode()}


@pytest.fixture
def other_machine(tmp_path, monkeypatch):
    """Make the temporary folder that of a machine on which nothing was done yet."""

    def move(name: str) -> None:
        (tmp_path / name).mkdir()
        monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / name))

    move("machine")
    return move


@pytest.fixture
def memory(raw, other_machine) -> Iterator[str]:
    files = fsspec.filesystem("memory")
    files.put(str(raw), "/bucket/raw", recursive=True)
    yield "memory://bucket"
    files.rm("/bucket", recursive=True)


@pytest.fixture(scope="module")
def s3(s3_bucket, raw) -> str:
    fsspec.filesystem("s3").put(str(raw), "bucket/raw", recursive=True)
    return s3_bucket


def test_input_and_corpus_at_a_url_give_the_bytes_of_folders_and_leave_nothing_behind(memory, raw, expected, tmp_path):
    result = CliRunner().invoke(
        corpus,
        f"text:{memory}/raw/ {memory}/out/ --workers 1 --vocab-size 200 --valid-share 0.1".split(),
        catch_exceptions=False,
    )
    assert f"See {memory}/out/report.html" in result.output
    assert f"skipped: {memory}/raw/README" in result.output
    build_corpus([f"text:{memory}/raw"], f"{memory}/small_units", SETTINGS)
    assert content(f"{memory}/small_units", f"{memory}/raw") == expected
    evil = "tasks/../../../evil.json"  # a key that would be written outside of the copy
    fsspec.filesystem("memory").pipe_file(f"/bucket/.there.unfinished/{evil}", b"{}")
    build_corpus([f"{memory}/raw"], tmp_path / "here", SETTINGS)
    assert content(str(tmp_path / "here"), f"{memory}/raw") == expected
    build_corpus([str(raw)], f"{memory}/there", SETTINGS)
    assert content(f"{memory}/there", str(raw)) == expected
    assert not any(".unfinished" in name for name in fsspec.filesystem("memory").store)
    assert [path.name for path in copies().rglob("*") if path.is_file() and path.parent.name != "locks"] == []
    assert not list(tmp_path.rglob("evil.json"))
    before = fsspec.filesystem("memory").info("/bucket/there/manifest.json")
    assert build_corpus([str(raw)], f"{memory}/there", SETTINGS)["shards"] == 2  # a finished one is left alone
    assert fsspec.filesystem("memory").info("/bucket/there/manifest.json") == before


def test_folders_of_this_machine_are_copied_nowhere(raw, tmp_path, other_machine, monkeypatch):
    monkeypatch.setitem(sys.modules, "fsspec.core", None)  # it is not even imported
    build_corpus([str(raw)], tmp_path / "out", SETTINGS)
    assert list((tmp_path / "machine").iterdir()) == []


class Killed(BaseException):
    pass


@pytest.mark.parametrize("after", ["the task", "its counts"])
def test_another_machine_resumes_what_was_stopped_in_each_stage(memory, expected, other_machine, monkeypatch, after):
    """Each run has an empty TMPDIR, and is stopped one stage later, before or after a task sends its counts."""
    send = RemoteWork.send
    done: list[str] = []
    for stage in STAGES:

        def send_or_die(self, names, stage=stage):
            if after == "its counts":
                send(self, names)
            if names[0].startswith(f"tasks/{stage}/"):
                raise Killed
            send(self, names)
            done.extend(name for name in names if name.startswith("tasks/"))

        other_machine(f"killed in {stage}")
        with monkeypatch.context() as patched, pytest.raises(Killed):
            patched.setattr(RemoteWork, "send", send_or_die)
            build_corpus([f"{memory}/raw"], f"{memory}/out", SETTINGS)
    other_machine("last")
    build_corpus([f"{memory}/raw"], f"{memory}/out", SETTINGS)
    assert content(f"{memory}/out", f"{memory}/raw") == expected
    assert len(done) == len({*done})  # no task was done again


def test_a_command_that_dies_while_it_names_the_result_is_run_again(memory, expected, other_machine, monkeypatch):
    files = fsspec.filesystem("memory")
    with monkeypatch.context() as patched, pytest.raises(Killed):

        def copy(self, source, target):
            self.cp_file(source[0], target[0])
            raise Killed

        patched.setattr(type(files), "copy", copy)
        build_corpus([f"{memory}/raw"], f"{memory}/out", SETTINGS)
    assert files.exists("/bucket/out") and not files.exists("/bucket/out/manifest.json")
    other_machine("second")
    build_corpus([f"{memory}/raw"], f"{memory}/out", SETTINGS)
    assert content(f"{memory}/out", f"{memory}/raw") == expected


def test_other_settings_are_named_and_those_that_come_late_may_change(memory, raw, expected, other_machine):
    out = f"{memory}/out"
    with pytest.raises(UserError, match="vocabulary of 30000: too large for this text"):
        build_corpus(
            [f"{memory}/raw"], out, CorpusSettings(vocab_size=30_000, seed=2, valid_share=0.1, unit_megabytes=0.0045)
        )
    other_machine("second")
    with pytest.raises(UserError) as caught:
        build_corpus([f"{memory}/raw"], out, CorpusSettings(min_line_words=4, unit_megabytes=0.0045))
    assert str(caught.value).startswith(
        f"{memory}/.out.unfinished contains a corpus that was begun with different settings "
        "(min_line_words is 5 there, 4 here)"
    )
    build_corpus([f"{memory}/raw"], out, SETTINGS)
    assert content(out, f"{memory}/raw") == expected
    with pytest.raises(UserError, match=f"^{out} contains a corpus that was begun with different settings"):
        build_corpus([f"{memory}/raw"], out, CorpusSettings(min_line_words=4))


def test_an_input_that_changed_at_its_url_is_fetched_again(memory, tmp_path):
    files = fsspec.filesystem("memory")
    documents = []
    for number, size in enumerate((60, 90)):
        files.pipe_file("/bucket/one.txt", "\n\n".join(toy_texts(size)).encode())
        with pytest.raises(UserError, match="split is empty"):  # the copies of a corpus that is not finished stay
            build_corpus([f"{memory}/one.txt"], tmp_path / f"{number}", CorpusSettings(valid_share=1))
        notes = json.loads((tmp_path / f".{number}.unfinished/words/00000/notes.json").read_text())
        documents.append(notes["documents"])
    assert documents == [{f"{memory}/one.txt": 60}, {f"{memory}/one.txt": 90}]


def test_what_cannot_be_is_said(memory, raw, monkeypatch, tmp_path):
    """A package that is missing, names that are not there or taken, another run, a folder of somebody else's."""
    monkeypatch.setitem(sys.modules, "gcsfs", None)
    fsspec.filesystem("memory").pipe_file("/bucket/taken/mine.txt", b"mine")

    def problem(given: str, out: str) -> str:
        with pytest.raises(UserError) as caught:
            build_corpus([given], out, SETTINGS)
        return str(caught.value)

    assert problem(f"{memory}/raw", "gs://b/out") == (
        "gs://b/out requires a package that is not installed: pip install gcsfs"
    )
    assert problem("babylm:gs://b/raw", str(tmp_path / "out")).endswith("pip install gcsfs")
    assert "Protocol not known: ess3" in problem("ess3://b/raw", str(tmp_path / "out"))
    assert "unknown format 'foo'" in problem("foo:s3://b/raw", str(tmp_path / "out"))
    assert problem(f"{memory}/none", f"{memory}/out").startswith(f"{memory}/none: no such file, folder")
    assert problem(f"{memory}/raw", memory) == f"{memory} is a whole bucket; use a folder in it, such as {memory}/data"
    assert problem(f"{memory}/raw", f"{memory}/taken").startswith(f"{memory}/taken already exists")
    with run_lock(RemoteWork(f"{memory}/out", "").home):
        assert problem(f"{memory}/raw", f"{memory}/out").startswith(f"{memory}/out: another run is using this folder")
    place = copies()
    place.rename(tmp_path / "elsewhere")
    place.symlink_to(tmp_path / "elsewhere")
    assert (
        problem(f"{memory}/raw", f"{memory}/out") == f"{place} does not belong to you; set TMPDIR to a folder that does"
    )


@pytest.mark.slow
def test_a_command_that_is_killed_in_each_stage_loses_nothing_at_s3(s3, expected, tmp_path):
    """SIGKILL to a command with two workers in the middle of a stage; the next one has another TMPDIR."""
    context = multiprocessing.get_context("spawn")  # so that the workers know the server
    for stage in (*STAGES, "none"):
        (tmp_path / stage).mkdir()
        given = ([f"{s3}/raw"], f"{s3}/out", SETTINGS, stage, str(tmp_path / stage))
        child = context.Process(target=build_until_killed, args=given)
        child.start()
        child.join()
        assert child.exitcode == (0 if stage == "none" else -signal.SIGKILL)
    assert content(f"{s3}/out", f"{s3}/raw") == expected
    files, top = fsspec.core.url_to_fs(s3, use_listings_cache=False)
    assert not any(".unfinished" in name for name in files.find(top))


@pytest.mark.slow
def test_problems_of_s3_end_in_words(s3, raw, monkeypatch, tmp_path, other_machine):
    def problem(given: str, out: str) -> str:
        fsspec.filesystem("s3").clear_instance_cache()  # which keeps credentials and the address
        with pytest.raises(UserError) as caught:
            build_corpus([given], out, SETTINGS)
        return str(caught.value)

    assert problem("s3://nowhere/raw", f"{s3}/out2").startswith("s3://nowhere/raw: no such file, folder or")
    assert problem(f"{s3}/nothing", f"{s3}/out2").startswith(f"{s3}/nothing: no such file, folder or bucket")
    assert "The specified bucket does not exist" in problem(f"{s3}/raw", "s3://nowhere/out")
    with monkeypatch.context() as patched:
        patched.delenv("AWS_ACCESS_KEY_ID")
        patched.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
        patched.setenv("AWS_CONFIG_FILE", str(tmp_path / "none"))
        assert f"{s3}/out2: cannot be reached (Unable to locate credentials); check" in problem(
            f"{s3}/raw", f"{s3}/out2"
        )
    with monkeypatch.context() as patched:
        patched.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
        assert "cannot be reached (Could not connect to the endpoint URL" in problem(f"{s3}/raw", f"{s3}/out2")
