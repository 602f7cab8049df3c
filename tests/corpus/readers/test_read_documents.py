"""The step that reads a unit's documents."""

import pickle
from pathlib import Path

import pytest

from lazyformer_fairseq.corpus.readers.blocks import Piece
from lazyformer_fairseq.corpus.readers.compressed import BadInput
from lazyformer_fairseq.corpus.readers.read_documents import ReadDocuments
from lazyformer_fairseq.corpus.step import TaskNotes


@pytest.fixture
def units(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"One.\n\ncaf\xe9\n")
    (tmp_path / "bad.jsonl").write_text('{"text": "kept"}\n{"text"\n{"text": "lost"}\n')
    (tmp_path / "c.txt").write_text("Last.")
    files = [
        Piece(str(tmp_path / name), format)
        for name, format in [("a.txt", "text"), ("bad.jsonl", "jsonl"), ("c.txt", "text")]
    ]
    return [(files[2],), tuple(files)]


def totals(step):
    return {label: stat.total for label, stat in step.stats.stats.items() if label != "core seconds"}


def test_reads_the_unit_of_its_rank(units, tmp_path):
    step = pickle.loads(pickle.dumps(ReadDocuments(units)))
    (document,) = step.run(None, rank=0, world_size=2)
    assert (document.id, document.text, document.metadata) == (f"{tmp_path}/c.txt:1", "Last.", {"format": "text"})
    assert totals(step) == {"documents out": 1, "characters out": 5, "pieces of files": 1, "bytes": 5}


def test_stops_at_a_bad_file(units):
    with pytest.raises(BadInput, match=r"bad.jsonl, line 2: no valid JSON"):
        list(ReadDocuments(units).run(None, rank=1, world_size=2))


def test_skips_the_rest_of_a_bad_file_and_says_so(units):
    notes, seen = TaskNotes(), []
    step = ReadDocuments(units, bad_files="skip", progress=lambda *call: seen.append(call))
    step.notes = notes
    assert [document.text for document in step.run(None, rank=1, world_size=2)] == ["One.", "café", "kept", "Last."]
    counts = totals(step)
    assert (counts["documents out"], counts["pieces of files"], counts["files skipped"]) == (4, 2, 1)
    assert counts["lines not UTF-8"] == 1
    assert "bad.jsonl, line 2" in notes.dropped["bad file"][0]
    assert seen == sorted(seen)
    assert seen[-1] == (1, counts["bytes"])
    assert counts["bytes"] == sum(Path(piece.path).stat().st_size for piece in units[1])


def test_progress_of_a_long_file(tmp_path):
    path = tmp_path / "long.txt"
    path.write_text("A line of a text.\n\n" * 100_000)
    seen = []
    step = ReadDocuments([(Piece(str(path), "text"),)], progress=lambda *call: seen.append(call))
    assert sum(1 for _ in step.run(None)) == 100_000
    assert 4 < len(seen) < 20
    assert seen == sorted(seen)
    assert seen[-1] == (0, path.stat().st_size)
