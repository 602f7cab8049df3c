"""Parts joined, or written in blocks, are one dataset of fairseq's, byte by byte."""

import filecmp
from itertools import chain, product

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.storage import indexed_format
from lazyformer_fairseq.storage.indexed_format import join_parts, write_items

ITEMS = st.lists(st.lists(st.integers(0, 300), min_size=1, max_size=5), max_size=6)


def write(prefix, items, dtype=np.uint16):
    """By fairseq itself."""
    from fairseq.data.indexed_dataset import MMapIndexedDatasetBuilder

    builder = MMapIndexedDatasetBuilder(f"{prefix}.bin", dtype=dtype)
    for item in items:
        builder.add_item(torch.tensor(item))
    builder.finalize(f"{prefix}.idx")


@settings(max_examples=40)
@given(st.lists(ITEMS, min_size=1, max_size=4), st.sampled_from([np.uint16, np.uint32, np.int64]))
def test_as_written_at_once(tmp_path_factory, parts, dtype):
    folder = tmp_path_factory.mktemp("parts")
    for number, items in enumerate(parts):
        write(folder / f"{number}.train", items, dtype)
    write(folder / "expected", [item for items in parts for item in items], dtype)
    join_parts([folder / f"{number}.train" for number in range(len(parts))], folder / "shard" / "train")
    blocks = [(np.array([*chain(*items)], int), np.array([len(item) for item in items], int)) for items in parts]
    write_items(folder / "blocks", dtype, blocks)
    for made, end in product(("shard/train", "blocks"), ("bin", "idx")):
        assert filecmp.cmp(folder / f"{made}.{end}", folder / f"expected.{end}", shallow=False)
    assert sorted(file.name for file in (folder / "shard").iterdir()) == ["train.bin", "train.idx"]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("b.bin", None, "b.bin is truncated: it has 6 bytes, but should have 8 according to b.idx"),
        ("b.idx", None, "b.idx is truncated"),
        ("a.idx", b"", r"a\.idx: not an index in fairseq"),
        ("a.idx", b"x" * 200, r"a\.idx: not an index in fairseq"),
        ("c", np.int64, r"c\.idx: the ids are int64, but the ids of the other parts are uint16"),
    ],
)
def test_parts_that_are_none_are_named(tmp_path, name, content, message):
    parts = [tmp_path / "a", tmp_path / "b"]
    for part in parts:
        write(part, [[1, 2, 3], [4]])
    if name == "c":
        write(tmp_path / "c", [[1]], content)
        parts.append(tmp_path / "c")
    else:
        (tmp_path / name).write_bytes((tmp_path / name).read_bytes()[:-2] if content is None else content)
    with pytest.raises(UserError, match=message):
        join_parts(parts, tmp_path / "joined")
    assert not list(tmp_path.glob("*joined*"))


def test_the_format_is_fairseqs():
    from fairseq.data import indexed_dataset

    assert indexed_dataset._code_to_dtype == indexed_format.TYPES
    for symbols in (10, 65_499, 65_500, 10**6):
        assert indexed_format.type_of_ids(symbols) == indexed_dataset.best_fitting_int_dtype(symbols)
