"""A whole corpus from raw files: its accounts, its bytes, what stops it and its workers, what the command says."""

import bz2
import fcntl
import hashlib
import json
import math
import multiprocessing
import os
import random
import shutil
import signal
import sys
import time
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Optional
from unittest.mock import Mock

import pytest
from click.testing import CliRunner
from corpus_tasks import build_in_process, write_rank
from helpers import ROOT, toy_texts

from lazyformer_fairseq.corpus import build
from lazyformer_fairseq.corpus.build import build_corpus
from lazyformer_fairseq.corpus.commands import corpus
from lazyformer_fairseq.corpus.manifest import bad_input_messages
from lazyformer_fairseq.corpus.settings import VOCAB_SIZE, CorpusSettings
from lazyformer_fairseq.corpus.stages import WORKERS_LOCK, run_tasks, wait_for_workers
from lazyformer_fairseq.data.text.tokenizer import Tokenizer
from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.executors.local import Local
from lazyformer_fairseq.options import read_count
from lazyformer_fairseq.storage.indexed_format import MappedItems
from lazyformer_fairseq.storage.run_lock import run_lock

SETTINGS = CorpusSettings(
    vocab_size=200, valid_share=0.1, word_coverage=1.0, near_duplicates=True, shards=2, unit_megabytes=0.01
)
SMALL = CorpusSettings(vocab_size=200, valid_share=0.1)
PAGE = "  <page>\n    <title>{0}</title>\n    <ns>{1}</ns>\n    <revision><text>{2}</text></revision>\n  </page>\n"


@pytest.fixture(scope="module")
def raw(tmp_path_factory) -> Path:
    """A dump, JSON lines, plain text and a book; some documents come twice, some are not for reading."""
    folder = tmp_path_factory.mktemp("raw")
    texts = toy_texts(300)
    pages = [PAGE.format(n, 0, f"'''Page''' of [[toys]].\n\n{text}") for n, text in enumerate(texts[:80])]
    pages.append(PAGE.format(900, 0, "#REDIRECT [[Page 1]]"))
    pages.append(PAGE.format(901, 1, "Talk is no article, however long it may be."))
    (folder / "dump.xml.bz2").write_bytes(bz2.compress(f"<mediawiki>\n{''.join(pages)}</mediawiki>\n".encode()))
    lines = [json.dumps({"text": text}) for text in [*texts[80:180], texts[80], texts[81].upper(), "Short."]]
    (folder / "some.jsonl").write_text("\n".join(lines) + "\n")
    (folder / "plain.txt").write_text("\n\n".join(texts[180:260]))
    (folder / "books").mkdir()
    (folder / "books" / "one.txt").write_text("\n\n".join(texts[260:]))
    return folder


def inputs(raw: Path) -> list[str]:
    return [*(str(raw / name) for name in ("dump.xml.bz2", "some.jsonl", "plain.txt")), f"book:{raw / 'books'}"]


@pytest.fixture(scope="module")
def built(raw, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("built") / "out"
    build_corpus(inputs(raw), folder, SETTINGS)
    return folder


def content(folder: Path) -> dict[str, str]:
    """Digests of all files; of the manifest what is not time. The report is made from the manifest alone."""
    digests = {}
    for path in sorted(folder.rglob("*")):
        data = path.read_bytes() if path.is_file() else b""
        if path.name == "manifest.json":
            manifest = json.loads(data)
            assert manifest.pop("timing")
            data = json.dumps(manifest).encode()
        if path.name != "report.html":
            digests[str(path.relative_to(folder))] = hashlib.sha256(data).hexdigest()
    return digests


def manifest_of(folder: Path) -> dict:
    return json.loads((folder / "manifest.json").read_text())


def test_selected_text_stays_whole_and_a_budget_of_words_is_kept(tmp_path):
    """BabyLM's rules: no line is dropped for its looks, words are counted between spaces, and more is refused."""
    lines = ["*CHI: no .", "*MOT: 12 !", "= = ="]
    blocks = ["\n".join([f"*CHI: {text.splitlines()[0]}", *lines]) for text in toy_texts(40)]
    (tmp_path / "childes.train").write_text("\n\n".join(blocks))
    words = sum(len(block.split()) for block in blocks)
    settings = replace(SETTINGS, vocab_size=None, valid_share=0.1, shards=None)
    given = ([f"babylm:{tmp_path / 'childes.train'}"], tmp_path / "out", settings)
    with pytest.raises(UserError, match=f"--word-budget {words - 1:,}: the text has {words:,} words; use less text"):
        build_corpus(*given, word_budget=words - 1)
    manifest = build_corpus(*given, word_budget=words)
    assert manifest["documents"]["dropped"] == {}
    assert manifest["train"]["words"] + manifest["valid"]["words"] == words
    assert read_count("10M") == 10**7
    for wrong in ("", "ten", "-1", "0", "1e6", "²"):
        with pytest.raises(UserError, match="must be a number such as 500k, 10M or 1B"):
            read_count(wrong)


def test_what_is_written(raw, built):
    names = {"shard0", "shard1", "dict.txt", "tokenizer", "manifest.json", "report.html"}
    assert {path.name for path in built.iterdir()} == names
    dictionary = Tokenizer.load(built / "tokenizer").dictionary
    assert len(dictionary) == SETTINGS.vocab_size
    tokens = {"train": 0, "valid": 0}
    for split, shard in (("train", 0), ("train", 1), ("valid", 0)):
        items = MappedItems(built / f"shard{shard}" / split)
        assert all(item[-1] == dictionary.eos() for item in items)
        tokens[split] += sum(int((item != dictionary.eos()).sum()) for item in items)
    manifest = manifest_of(built)
    assert tokens == {split: manifest[split]["tokens"] for split in tokens}
    assert 0 < manifest["valid"]["neighbours_bits"] < manifest["valid"]["frequencies_bits"]
    assert not list(built.parent.glob(".*"))  # nothing is left of the work
    before = {path: path.stat().st_mtime_ns for path in built.rglob("*")}
    for settings in (SETTINGS, replace(SETTINGS, bad_input="skip")):  # a finished one is left alone
        assert build_corpus(inputs(raw), built, settings) == manifest
    assert {path: path.stat().st_mtime_ns for path in built.rglob("*")} == before


def test_no_document_is_lost_without_a_reason(built):
    manifest = manifest_of(built)
    documents, steps = manifest["documents"], manifest["steps"]
    assert documents["in"] == 82 + 103 + 80 + 1
    assert [entry["documents"] for entry in manifest["inputs"]] == [82, 103, 80, 1]
    assert documents["in"] == documents["train"] + documents["valid"] + sum(documents["dropped"].values())
    assert documents["dropped"] == {"redirect": 1, "not an article": 1, "too short": 1, "duplicate": 2}
    for before, after in pairwise(steps):
        assert before["documents out"] == after["documents in"]
    for step in steps[1:]:
        assert step["documents in"] == step["documents out"] + sum(step["dropped"].values())
    assert any(before != after for before, after in manifest["examples"]["wiki markup"])
    clean = next(step["counts"] for step in steps if step["name"] == "clean")
    lines_dropped = sum(count for label, count in clean.items() if label.startswith("lines dropped"))
    assert clean["lines in"] == clean["lines out"] + lines_dropped


def test_same_input_same_bytes_with_more_workers_after_a_stop_and_another_corpus(raw, built, tmp_path, capsys):
    """Stopped as it tidied up: the work folder is half removed, and the next corpus of that name starts anew."""
    build_corpus([str(raw / "plain.txt")], tmp_path / "out", SMALL)  # with a tokenizer of its own
    assert "siteinfo" not in capsys.readouterr().err
    shutil.rmtree(tmp_path / "out")
    (tmp_path / ".out.unfinished" / "tasks" / "words" / "completions").mkdir(parents=True)
    (tmp_path / ".out.unfinished" / "published").touch()
    build_corpus(inputs(raw), tmp_path / "out", SETTINGS, workers=2)
    assert content(tmp_path / "out") == content(built)
    assert f"{raw}/dump.xml.bz2: no <siteinfo> with the names of namespaces" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("workers", [1, 2])
def test_killed_at_random_moments(raw, built, tmp_path, workers):
    """SIGKILL twenty times, then once to the end: the same bytes."""
    began = time.monotonic()
    build_corpus(inputs(raw), tmp_path / "timed", SETTINGS, workers)
    seconds = time.monotonic() - began
    chance = random.Random(1)
    killed = 0
    while killed < 20:
        # Soon after the start while there is little to go on with, then anywhere.
        child = started(inputs(raw), tmp_path / "out", tmp_path / "problem", workers=workers)
        child.join(chance.random() * seconds * 0.3)
        child.kill()
        child.join()
        is_killed = child.exitcode in (-signal.SIGKILL, 255)  # 255: multiprocessing's server lost the exit code
        killed += is_killed
        if not is_killed:
            assert child.exitcode == 0
            seconds *= 0.8  # the machine was busier when it was timed
        if (tmp_path / "out").exists():  # it had finished: from the beginning again
            assert content(tmp_path / "out") == content(built)
            shutil.rmtree(tmp_path / "out")
    build_corpus(inputs(raw), tmp_path / "out", SETTINGS)
    assert content(tmp_path / "out") == content(built)


def started(given: list[str], folder: Path, problem: Path, largest_file: Optional[int] = None, workers: int = 1):
    """A process that has begun to build; forked from one that has imported everything, so it begins at once."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["lazyformer_fairseq.corpus.build"])
    ready = context.Event()
    args = (given, folder, SETTINGS, ready, problem, largest_file, workers)
    child = context.Process(target=build_in_process, args=args)
    child.start()
    assert ready.wait()
    return child


def test_a_full_disk(raw, built, tmp_path):
    child = started(inputs(raw), tmp_path / "out", tmp_path / "problem", largest_file=12_000)
    child.join()
    assert child.exitcode == 1
    assert "cannot be written" in (tmp_path / "problem").read_text()
    assert not (tmp_path / "out").exists()
    build_corpus(inputs(raw), tmp_path / "out", SETTINGS)
    assert content(tmp_path / "out") == content(built)


@pytest.mark.parametrize("finished", [True, False])
def test_other_settings_and_other_inputs_are_named(raw, tmp_path, finished):
    text = tmp_path / "plain.txt"
    text.write_bytes((raw / "plain.txt").read_bytes())
    out = tmp_path / "out"
    if finished:
        build_corpus([str(text)], out, SMALL)
    else:
        with pytest.raises(UserError, match="split is empty .documents in total: 80"):
            build_corpus([str(text)], out, replace(SMALL, valid_share=1))
    with pytest.raises(
        UserError, match=r"out.* was begun with different settings \(min_line_words is 5 there, 4 here\)"
    ):
        build_corpus([str(text)], out, replace(SMALL, min_line_words=4))
    text.write_text(text.read_text() + "One more.")
    with pytest.raises(UserError, match=r"out.* was begun with different inputs \(.*plain\.txt differs"):
        build_corpus([str(text)], out, SMALL)


def test_a_folder_of_something_else_and_two_runs_at_once(raw, tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(UserError, match="already exists"):
        build_corpus([str(raw / "plain.txt")], tmp_path, SETTINGS)
    assert (tmp_path / "notes.txt").read_text() == "mine"
    work = tmp_path / ".out.unfinished"
    work.mkdir()
    with run_lock(work), pytest.raises(UserError, match="another run is using this folder"):
        build_corpus([str(raw / "plain.txt")], tmp_path / "out", SETTINGS)


def test_a_dump_that_is_truncated_or_cut_into_parts(raw, tmp_path):
    dump = tmp_path / "dump.xml.bz2"
    dump.write_bytes((raw / "dump.xml.bz2").read_bytes()[:-100])
    given = [str(raw / "plain.txt"), str(dump)]
    with pytest.raises(UserError, match=r"dump\.xml\.bz2"):
        build_corpus(given, tmp_path / "out", SETTINGS)
    assert list((tmp_path / ".out.unfinished").iterdir())  # what was finished stays
    manifest = build_corpus(given, tmp_path / "skipped", replace(SMALL, bad_input="skip", unit_megabytes=1))
    [damaged] = manifest["dropped_names"]["damaged file"]
    assert str(dump) in damaged and manifest["documents"]["in"] >= 80
    [told] = bad_input_messages(manifest)
    assert told == f"1 damaged file, read up to the damage; the first: {damaged}"
    smaller = replace(SMALL, bad_input="skip", unit_megabytes=0.002)  # than the dump, which is cut
    of_parts = build_corpus(given, tmp_path / "cut", smaller)
    assert of_parts["dropped_names"] == manifest["dropped_names"] and [*bad_input_messages(of_parts)] == [told]
    text = bz2.decompress((raw / "dump.xml.bz2").read_bytes())
    dump.write_bytes(bz2.compress(text.replace(b"</mediawiki>", b"</page>")))
    names = build_corpus([str(dump)], tmp_path / "odd", smaller)["dropped_names"]
    assert (names["redirect"], names["not an article"]) == ([f"{dump}:81"], [f"{dump}:82"])  # its number in the dump
    last_line = text.count(b"\n")
    assert names["bad record"] == [f"{dump}, line {last_line}: malformed XML: this is outside of <page>...</page>"]


def test_what_is_not_possible_may_be_changed_and_the_words_stay(raw, built, tmp_path):
    with pytest.raises(UserError, match="the train split is empty"):
        build_corpus(inputs(raw), tmp_path / "out", replace(SETTINGS, valid_share=1))
    words = tmp_path / ".out.unfinished" / "words" / "00000"
    before = words.stat().st_ino, words.stat().st_mtime_ns
    with pytest.raises(UserError, match="vocabulary of 30000: too large for this text; use at most"):
        build_corpus(inputs(raw), tmp_path / "out", replace(SETTINGS, vocab_size=30_000, seed=2, shards=3))
    assert (words.stat().st_ino, words.stat().st_mtime_ns) == before
    build_corpus(inputs(raw), tmp_path / "out", SETTINGS)
    assert content(tmp_path / "out") == content(built)


def test_a_vocabulary_that_nobody_asked_for_shrinks_with_a_notice(raw, tmp_path, capsys, monkeypatch):
    manifest = build_corpus(inputs(raw), tmp_path / "out", replace(SETTINGS, vocab_size=None))
    size = len((tmp_path / "out" / "dict.txt").read_text().splitlines()) + 4
    assert manifest["vocabulary"]["size"] == size == 2 ** int(math.log2(size)) < 30_000
    assert f"vocabulary: {size:,} symbols, because the text is small; use --vocab-size" in capsys.readouterr().err
    assert manifest == build_corpus(inputs(raw), tmp_path / "out", replace(SETTINGS, vocab_size=None))
    with pytest.raises(
        UserError, match=f"out .* with a vocabulary of only {size} symbols, because its text is small; omit"
    ):
        build_corpus(inputs(raw), tmp_path / "out", replace(SETTINGS, vocab_size=VOCAB_SIZE))
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(build, "describe", Mock(side_effect=KeyboardInterrupt))
        build_corpus(inputs(raw), tmp_path / "stopped", replace(SETTINGS, vocab_size=None))
    with pytest.raises(UserError, match=f"vocabulary of {VOCAB_SIZE}: too large"):
        build_corpus(inputs(raw), tmp_path / "stopped", replace(SETTINGS, vocab_size=VOCAB_SIZE))


def test_a_broken_record_is_counted_and_named_last_by_a_run_that_began_without_the_option(tmp_path):
    lines = [json.dumps({"text": text}) for text in toy_texts(40)]
    lines[20] = lines[20].replace('."}', ' \\ud83d."}')
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    (tmp_path / "b.jsonl").write_text('{"body": "x"}\n{"text": "y"}\n')
    given = [str(tmp_path / "a.jsonl"), str(tmp_path / "b.jsonl"), str(tmp_path / "out")]

    def run(*options: str):
        command = [*given, "--workers", "1", "--vocab-size", "110", "--valid-share", "0.1", *options]
        return CliRunner().invoke(corpus, command, catch_exceptions=False)

    where = f"{tmp_path}/a.jsonl, line 21: not valid JSON"
    with pytest.raises(UserError, match=rf"{where}.*; or skip all broken input with --bad-input skip"):
        run()
    done = run("--bad-input", "skip")
    assert done.exit_code == 0
    assert "42 documents, 3 of them dropped (2 bad record, 1 too short)" in done.stdout
    assert done.stdout.splitlines()[-1].startswith(f"2 bad records skipped; the first: {where}")
    assert "dropped from 42 documents: 2 bad record (--bad-input skip)" in done.stderr
    manifest = manifest_of(tmp_path / "out")
    assert len(manifest["dropped_names"]["bad record"]) == 2
    assert [entry["documents"] for entry in manifest["inputs"]] == [39, 1]
    with pytest.raises(UserError, match="begun with different settings .*bad_input is 'skip' there, 'stop' here"):
        run()


SIZES = [1] * 4
ALL = {f"rank{rank}": f"{rank}\n" for rank in range(len(SIZES))}


def files_of(folder: Path) -> dict[str, str]:
    return {path.name: path.read_text() for path in folder.glob("rank*")}


def executor_of(workers: int) -> Optional[Local]:
    return Local(workers, keeps_processes=True) if workers > 1 else None


@pytest.mark.parametrize(
    ("fault", "workers", "message"),
    [
        ("user error", 1, r"book\.txt, line 3: is not text"),
        *(
            ("disk full", n, r"store\.npy: cannot be written \(No space left on device\).*free up disk space")
            for n in (1, 2)
        ),
        ("killed", 2, r"a worker died.*run the same command again"),
    ],
)
def test_a_failed_task_is_named_and_the_rest_stays(tmp_path, fault, workers, message, capsys):
    (tmp_path / "broken").touch()
    task, folder = partial(write_rank, tmp_path, fault), tmp_path / "tasks" / "words"
    with pytest.raises(UserError, match=message):
        run_tasks(task, SIZES, folder, executor_of(workers))
    assert "rank2" not in files_of(tmp_path)
    completed = {path.stem for path in folder.glob("*.json")}
    (tmp_path / "broken").unlink()
    for _ in range(2):  # the second time there is nothing left to do
        run_tasks(task, SIZES, folder, executor_of(workers))
    after = files_of(tmp_path)
    assert set(after) == set(ALL) and not capsys.readouterr().out
    assert all(after[f"rank{int(rank)}"] == ALL[f"rank{int(rank)}"] for rank in completed)  # not run again


@pytest.mark.slow
def test_workers_end_with_the_process_that_gave_them_work(tmp_path):
    command = [sys.executable, str(ROOT / "tests" / "corpus_tasks.py"), str(tmp_path)]
    parent = os.spawnv(os.P_NOWAIT, sys.executable, command)
    try:
        files = wait_for(lambda: list(tmp_path.glob("worker.*")), lambda found: len(found) == 2, parent)
        with (tmp_path / WORKERS_LOCK).open("r+") as lock, pytest.raises(BlockingIOError):
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # who goes on with their work waits for them
    finally:
        with suppress(ProcessLookupError, ChildProcessError):  # it has ended by itself
            os.kill(parent, signal.SIGKILL)
            os.waitpid(parent, 0)
    wait_for_workers(tmp_path)
    workers = [Path("/proc", file.suffix[1:]) for file in files]
    assert not wait_for(lambda: [worker for worker in workers if worker.exists()], lambda alive: not alive)


def wait_for(look, is_done, process=None):
    """What `look` finds when it is done; fails where a process that has to do it has ended."""
    while not is_done(found := look()):
        assert process is None or os.waitpid(process, os.WNOHANG) == (0, 0), "the process ended before it was done"
        time.sleep(0.1)
    return found


def run(text: Path, out: Path, options: str = "--vocab-size 110"):
    command = [str(text), str(out), "--workers", "1", *options.split()]
    return CliRunner().invoke(corpus, command, catch_exceptions=False)


@pytest.fixture
def text(tmp_path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text("\n\n".join(toy_texts(60, 1)))
    return path


def test_ctrl_c_loses_nothing(text, tmp_path, monkeypatch):
    monkeypatch.setattr(build, "plan_units", Mock(side_effect=KeyboardInterrupt))
    result = run(text, tmp_path / "out")
    assert result.exit_code == 130
    assert result.stderr.splitlines()[-1].endswith("out: stopped; rerun to resume")


@pytest.mark.parametrize(
    ("content", "options", "message"),
    [
        (toy_texts(60), "--spacy-model xx_no_such", "'xx_no_such' is not installed"),
        (toy_texts(60), "--shards 2", "--shards 2: each shard needs at least one unit of work, but .* only 1;"),
        (toy_texts(1), "", "the valid split is empty .documents in total: 1,"),
        (["A.", "B.", "no sentence"], "", r"none of the 3 documents is left. Dropped documents: 3 too short"),
    ],
)
def test_what_cannot_be_is_said(text, tmp_path, content, options, message):
    text.write_text("\n\n".join(content))
    with pytest.raises(UserError, match=message):
        run(text, tmp_path / "out", options)
    assert "--spacy" not in options or [path.name for path in tmp_path.iterdir()] == ["text.txt"]  # no work has begun


def test_a_shard_of_duplicates_alone_is_refused(text, tmp_path):
    shutil.copy(text, tmp_path / "again.txt")
    two_units = replace(SMALL, unit_megabytes=text.stat().st_size / 10**6)
    with pytest.raises(UserError, match="--shards 2: no training document is left for shard1; use fewer shards"):
        build_corpus([str(text), str(tmp_path / "again.txt")], tmp_path / "out", replace(two_units, shards=2))
    build_corpus([str(text), str(tmp_path / "again.txt")], tmp_path / "out", two_units)


def test_it_says_how_the_input_was_understood_and_short_documents_of_other_scripts_stay(text, tmp_path):
    chinese = "北京是中华人民共和国的首都，也是全国的政治和文化中心，人口超过两千万。"
    japanese = "東京は日本の首都であり、世界でも最大級の都市の一つとして知られている場所です。"
    russian = "Москва является столицей России и самым большим городом этой страны, в котором живут многие миллионы."
    text.write_text("\n\n".join([chinese, japanese, russian, "你好。", "Привет!", russian]))
    result = run(text, tmp_path / "out")
    assert result.exit_code == 0
    assert "6 documents, 3 of them dropped (2 too short, 1 duplicate); " in result.output, "each has its reason"
    assert "read as text: 1 file, 0.0 MB; a document is the text between blank lines" in result.stderr
    assert "dropped from 6 documents: 2 too short (--min-document-characters)" in result.stderr
    assert "valid 1 sentences" in result.output
    result = run(text, tmp_path / "all", "--vocab-size 110 --min-document-characters 0 --valid-share 0")
    assert "6 documents, 1 of them dropped (1 duplicate)" in result.output and "valid empty" in result.output
    assert "valid: empty" in (tmp_path / "all" / "report.html").read_text()
    text.write_bytes("\n\n".join(["Un café à Paris. " * 9, *toy_texts(20)]).encode("cp1252"))
    result = run(text, tmp_path / "latin")
    assert "lines that are not UTF-8: 1; they were decoded as Windows-1252. If the files" in result.stderr
    assert f"the first such lines are in {text}" in result.stderr


def test_a_tokenizer_of_ones_own(text, tmp_path):
    run(text, tmp_path / "first", "--valid-share 0.1 --vocab-size 160")
    mine = f"--valid-share 0.1 --tokenizer {tmp_path / 'first' / 'tokenizer'}"
    assert run(text, tmp_path / "second", mine).exit_code == 0
    for name in ("tokenizer/tokenizer.json", "dict.txt", "shard0/train.bin", "shard0/valid.bin"):
        assert (tmp_path / "first" / name).read_bytes() == (tmp_path / "second" / name).read_bytes()
    for options, message in {
        f"{mine} --cased": "--cased: the tokenizer from --tokenizer determines",
        f"--tokenizer {tmp_path / 'no'}": "is .* a complete tokenizer folder",
    }.items():
        with pytest.raises(UserError, match=message):
            run(text, tmp_path / "third", options)
