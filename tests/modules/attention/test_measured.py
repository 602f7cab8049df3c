"""The files of what was measured: what is shipped, and the user's own."""

import json

import pytest

from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.modules.attention import choice
from lazyformer_fairseq.modules.attention.choice import BACKENDS, SHIPPED, Block, Table, add_rows, read_table, table_of

BLOCK = Block(True, "nothing", True, "float32", 2, 8, 128, 12, 64)


@pytest.fixture
def files(tmp_path, monkeypatch):
    """The user's file and the shipped one; neither is there yet."""
    monkeypatch.setenv("LAZYFORMER_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(choice, "SHIPPED", tmp_path / "shipped.json")
    table_of.cache_clear()
    yield choice.user_file(), tmp_path / "shipped.json"
    table_of.cache_clear()


def test_what_is_written_is_read(files):
    """A mask has a column, and older tables have none; new rows stand beside old ones."""
    rows = {BLOCK: {"eager": 1.0, "fused": 3.0}, BLOCK._replace(share=0.125, training=False): {"tiles": 0.5}}
    add_rows(files[0], "a kind", {"threads": 2}, rows)
    assert read_table(files[0], "a kind") == (files[0], {"threads": 2}, rows)
    assert read_table(files[0], "another") is None
    written = json.loads(files[0].read_text())["a kind"]["rows"]  # a line each
    assert len(written) == 2 and "1 nothing 1 float32 2 8 128 12 64 0 1.0 3.0 -" in written
    older = {"columns": " ".join([*Block._fields[:-1], "eager"]), "rows": ["1 nothing 1 float32 2 8 128 12 64 1.0"]}
    files[0].write_text(json.dumps({"a kind": {"origin": {}, **older}}))
    assert read_table(files[0], "a kind").rows == {BLOCK: {"eager": 1.0}}
    sparse = {BLOCK._replace(share=0.125): {"tiles": 0.5}}
    add_rows(files[0], "a kind", {}, sparse)
    assert read_table(files[0], "a kind").rows == {BLOCK: {"eager": 1.0}, **sparse}


def test_the_nearest_block_is_one_of_its_like(files):
    sparse = [BLOCK._replace(share=share) for share in (1 / 32, 1 / 4, 1)]
    table = Table(files[0], {}, {block: {"eager": 1.0, "tiles": 1.0} for block in (BLOCK, *sparse)})
    assert table.nearest(BLOCK._replace(time=4096), ["eager"]) == BLOCK
    for share, expected in ((1 / 100, 0), (0.09, 1), (0.4, 1), (0.6, 2), (1, 2)):
        assert table.nearest(BLOCK._replace(share=share, time=4096), ["tiles"]) == sparse[expected]
    assert Table(files[0], {}, {BLOCK: {"eager": 1.0}}).nearest(sparse[2], ["eager"]) is None


def test_the_users_own_counts(files):
    own, shipped = files
    assert table_of("a kind") is None
    add_rows(shipped, "a kind", {}, {BLOCK: {"eager": 1.0}})
    add_rows(own, "another kind", {}, {BLOCK: {"fused": 1.0}})
    table_of.cache_clear()
    assert table_of("a kind").where == shipped
    add_rows(own, "a kind", {}, {BLOCK: {"fused": 1.0}})
    table_of.cache_clear()
    assert table_of("a kind").where == own and table_of("a kind").rows == {BLOCK: {"fused": 1.0}}


def test_measuring_again_adds_on_the_same_machine_and_replaces_otherwise(files):
    file, other = files[0], BLOCK._replace(time=512)
    add_rows(file, "a kind", {"threads": 2}, {BLOCK: {"eager": 1.0}})
    add_rows(file, "a kind", {"threads": 2}, {other: {"fused": 2.0}})
    add_rows(file, "a kind", {"threads": 2}, {BLOCK: {"eager": 3.0}})
    assert read_table(file, "a kind").rows == {BLOCK: {"eager": 3.0}, other: {"fused": 2.0}}
    add_rows(file, "a kind", {"threads": 4}, {other: {"eager": 4.0}})
    assert read_table(file, "a kind") == (file, {"threads": 4}, {other: {"eager": 4.0}})


@pytest.mark.parametrize(
    "content",
    [
        *("{", "[]", '{"a kind": 7}'),
        *(f'{{"a kind": {{"columns": "training", "rows": ["{row}"], "origin": {{}}}}}}' for row in ("1", "1 2")),
    ],
)
def test_a_damaged_file_is_named(files, content):
    files[0].parent.mkdir()
    files[0].write_text(content)
    with pytest.raises(UserError, match="backends.json.*remove it"):
        table_of("a kind")


def test_what_cannot_be_written_is_a_mistake_of_the_user(files):
    files[0].parent.write_text("a file, no folder")
    with pytest.raises(UserError, match="cannot be written"):
        add_rows(files[0], "a kind", {}, {BLOCK: {"eager": 1.0}})


def test_what_is_shipped_is_whole():
    kinds = json.loads(SHIPPED.read_text())
    assert kinds
    for kind in kinds:
        rows = read_table(SHIPPED, kind).rows
        assert rows and all(set(row) <= set(BACKENDS) and len(row) >= 2 for row in rows.values())
