"""Parquet files: rows once and in order wherever the cuts fall, broken ones named, damage and bombs refused."""

import gzip
import itertools
import json
from pathlib import Path

import pyarrow
import pytest
from helpers import toy_texts
from hypothesis import given, settings
from hypothesis import strategies as st
from pyarrow import parquet

from lazyformer_fairseq.corpus.build import build_corpus
from lazyformer_fairseq.corpus.readers.files import BadInputError, Piece
from lazyformer_fairseq.corpus.readers.formats import read_piece
from lazyformer_fairseq.corpus.readers.inputs import find_inputs, plan_units
from lazyformer_fairseq.corpus.settings import CorpusSettings
from lazyformer_fairseq.errors import UserError

GOOD = [f"Text number {number}.\n\nWith  more of it." for number in range(6)]
READ = [f"Text number {number}.\nWith more of it." for number in range(6)]


def write(path: Path, texts: list, rows: int = 2, **options) -> Path:
    """A file with so many rows a group, and a column before the texts."""
    table = pyarrow.table({"id": range(len(texts)), "text": pyarrow.array(texts, pyarrow.string())})
    parquet.write_table(table, path, row_group_size=rows, **options)
    return path


def texts(path: Path, *ends, **skip) -> list[str]:
    return [document.text for document in read_piece(Piece(str(path), "parquet", *ends), **skip)]


@pytest.mark.parametrize("place", [0, 3, 6])
def test_a_row_without_a_text_is_named_and_the_rest_stays(tmp_path, place):
    path = write(tmp_path / "rows.parquet", [*GOOD[:place], None, *GOOD[place:]])
    remarks: list[BadInputError] = []
    assert texts(path, skip=remarks.append) == READ
    assert [str(remark) for remark in remarks] == [f"{path}, row {place + 1}: no text"]
    with pytest.raises(BadInputError, match=rf"row {place + 1}: no text"):
        texts(path)


@settings(max_examples=30)
@given(st.lists(st.text("ab \n", max_size=5), max_size=9), st.integers(1, 4), st.data())
def test_pieces_give_the_rows_once_and_in_order(tmp_path_factory, rows, group, data):
    path = write(tmp_path_factory.mktemp("pieces") / "rows.parquet", rows, group)
    size = path.stat().st_size
    cuts = sorted(data.draw(st.sets(st.integers(1, size - 1))))
    found = [texts(path, *ends) for ends in itertools.pairwise([0, *cuts, size])]
    assert list(itertools.chain(*found)) == texts(path)
    assert len(texts(path)) == len(rows)


def test_a_file_is_known_by_its_bytes_and_a_large_one_is_divided(tmp_path):
    path = write(tmp_path / "rows.parquet", [f"{number} " * 1000 for number in range(50)], rows=5)
    write(tmp_path / "other", GOOD)
    assert [file.format for file in find_inputs([str(path), str(tmp_path / "other")])] == ["parquet"] * 2
    assert [file.path for file in find_inputs([str(tmp_path)])] == [str(path)]
    units = plan_units(find_inputs([str(path)]), path.stat().st_size // 4)
    assert len(units) >= 4 and sum(len(list(read_piece(piece))) for unit in units for piece in unit) == 50
    (tmp_path / "packed.gz").write_bytes(gzip.compress(path.read_bytes()))
    with pytest.raises(UserError, match="is a compressed parquet file"):
        find_inputs([str(tmp_path / "packed.gz")])
    (tmp_path / "no.txt").write_text("words")
    with pytest.raises(UserError, match="is not a parquet file"):
        find_inputs([f"parquet:{tmp_path / 'no.txt'}"])


def test_damage_other_columns_and_bombs_are_refused_in_words(tmp_path):
    whole = write(tmp_path / "rows.parquet", GOOD).read_bytes()
    damaged = tmp_path / "damaged.parquet"
    for content in (whole[:-20], whole[:10], whole[: len(whole) // 3] + b"\xa5" * 40 + whole[len(whole) // 3 + 40 :]):
        damaged.write_bytes(content)
        with pytest.raises(BadInputError, match=rf"{damaged}"):
            texts(damaged)
    for table in ({"body": ["x"]}, {"text": [1]}):
        parquet.write_table(pyarrow.table(table), damaged)
        with pytest.raises(BadInputError, match='no string column "text"; columns found: (body|text)'):
            texts(damaged)
    bomb = write(damaged, ["x" * (1 << 25)], compression="zstd", use_dictionary=False)
    assert bomb.stat().st_size < 1 << 16
    with pytest.raises(BadInputError, match="the rows expand to more than 50 times the size of the file"):
        texts(bomb)


def test_a_corpus_of_rows_is_that_of_the_same_json_lines(tmp_path):

    rows = toy_texts(60)
    write(tmp_path / "rows.parquet", rows, rows=7)
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in rows))
    how = CorpusSettings(vocab_size=150, valid_share=0.1)
    counts = []
    for name in ("rows.parquet", "rows.jsonl"):
        manifest = build_corpus([str(tmp_path / name)], tmp_path / f"{name}.out", how)
        counts.append((manifest["documents"], manifest["train"], manifest["valid"]))
    assert counts[0] == counts[1]
