"""Which back end is chosen, and the files of what was measured: what is shipped, and the user's own."""

import json
import logging
from pathlib import Path

import pytest
import torch

from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.modules.attention import back_ends, choice
from lazyformer_fairseq.modules.attention.choice import (
    BACKENDS,
    SHIPPED,
    BackEndNotHereError,
    Block,
    Table,
    Workload,
    add_rows,
    choose,
    choose_automatically,
    read_table,
    table_of,
)

CPU = Workload(
    device="cpu", precision=torch.float32, batch=1, heads=12, time=512, keys=512, head_size=64, is_training=True,
    features=frozenset(), has_dropout=False, blocks=6,
)  # fmt: skip


def row(time, layers, fastest, training=True, learned="nothing", padded=False, batch=1, precision="float32"):
    block = Block(training, learned, padded, precision, layers, batch, time, heads=12, head_size=64)
    return block, {name: 1.0 if name == fastest else 2.0 for name in BACKENDS}


@pytest.fixture
def measured(monkeypatch):
    """What was measured on processors; nothing was on GPUs. Clear it, or add to it."""
    rows = dict([
        row(128, 1, "recompute"), row(128, 2, "materialize"), row(4096, 2, "fused"),
        row(512, 2, "eager", learned="bias"),
        row(512, 2, "recompute", training=False), row(512, 2, "eager", batch=32), row(128, 2, "eager", padded=True),
        row(512, 2, "eager", precision="bfloat16"),
    ])  # fmt: skip
    kinds = {"kind of cpu": Table(Path("measured.json"), {}, rows)}
    choice.choose_automatically.cache_clear()
    choice._say_that_nothing_was_measured.cache_clear()
    monkeypatch.setattr(choice, "device_kind", lambda device: f"kind of {device}")
    monkeypatch.setattr(choice, "table_of", kinds.get)
    monkeypatch.setattr(choice, "memory_of", lambda device: 2**36)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 0))
    yield rows
    choice.choose_automatically.cache_clear()


@pytest.mark.parametrize(
    ("changes", "consumers", "expected"),
    [
        ({}, 1, "materialize"),  # 512 is nearer to 128 than to 4096, in octaves
        ({}, 0, "recompute"),
        ({"time": 2048}, 1, "fused"),
        ({"features": frozenset({"bias"})}, 1, "eager"),
        ({"is_training": False}, 1, "recompute"),
        ({"batch": 8}, 1, "eager"),
        ({"features": frozenset({"padding"})}, 1, "eager"),
        ({"precision": torch.bfloat16}, 1, "eager"),
        ({"precision": torch.float16}, 1, "eager"),  # the sizes decide where a precision was not measured
        ({"has_dropout": True}, 1, "eager"),  # nothing fused has it on a processor
        ({"has_dropout": True}, 0, "recompute"),
        ({"device": "cuda", "has_dropout": True}, 1, "recompute"),
        ({"device": "cuda", "has_dropout": True, "features": frozenset({"bias"})}, 1, "recompute"),
    ],
)
def test_the_nearest_measured_row_decides(measured, changes, consumers, expected):
    workload = CPU._replace(**{"keys": changes.get("time", CPU.keys), **changes})
    assert choose("auto", workload, consumers) == expected
    assert choose("eager", workload, consumers) == "eager"


def test_what_does_not_fit_into_memory_is_not_chosen(measured):
    measured.clear()
    measured.update([row(128, 2, "materialize")])
    assert choose_automatically(CPU, 1) == "materialize"
    assert choose_automatically(CPU._replace(batch=10_000), 1) in {"recompute", "fused"}
    # At inference a block's distribution is gone when the next one comes.
    batch = int(choice.SHARE_OF_MEMORY * 2**36 / (12 * 512 * 512 * 4) / 2)
    measured.update([row(128, 2, "materialize", training=False)])
    assert choose_automatically(CPU._replace(batch=batch), 1) != "materialize"
    assert choose_automatically(CPU._replace(batch=batch, is_training=False), 1) == "materialize"


def test_a_device_that_was_not_measured_gets_torchs_own_and_says_so_once(measured, caplog):
    cuda = CPU._replace(device="cuda")
    for features in ({}, {"bias"}, {"bias", "padding"}, {"learned"}):
        assert choose_automatically(cuda._replace(features=frozenset(features)), 1) == "recompute"
    assert choose_automatically(cuda._replace(features=frozenset({"bias"}), is_training=False), 1) == "recompute"
    warnings = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert len(warnings) == 1 and "on kind of cuda" in warnings[0] and "lazyformer bench backends" in warnings[0]


@pytest.mark.parametrize(
    ("capability", "changes", "expected"),
    [
        ((7, 0), {}, "recompute"),
        ((7, 0), {"head_size": 60}, "eager"),  # the memory-efficient kernel wants 16 bytes
        ((7, 0), {"precision": torch.float32, "head_size": 60}, "recompute"),
        ((7, 0), {"precision": torch.bfloat16}, "eager"),
        ((8, 0), {"precision": torch.bfloat16}, "recompute"),
        ((8, 0), {"precision": torch.float64}, "eager"),
        ((8, 0), {"batch": 2048, "features": frozenset({"bias"})}, "recompute"),  # the bias is that of one sequence
        ((8, 0), {"batch": 2048, "features": frozenset({"bias", "padding"})}, "fused"),
        ((7, 0), {"batch": 2048, "features": frozenset({"bias", "padding"})}, "tiles"),
        ((7, 0), {"has_dropout": True}, "recompute"),
        ((7, 0), {"has_dropout": True, "head_size": 60}, "eager"),
    ],
)
def test_on_a_gpu_a_bias_that_learns_goes_through_torchs_kernel_where_that_runs_and_fits(
    measured, monkeypatch, capability, changes, expected
):
    measured.clear()
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    monkeypatch.setattr(choice, "memory_of", lambda device: 2**34)
    monkeypatch.setattr(back_ends, "has_triton", lambda: True)
    cuda = CPU._replace(device="cuda", precision=torch.float16, features=frozenset({"bias"}))
    assert choose_automatically(cuda._replace(**changes), 1) == expected


@pytest.fixture
def fused_is_fastest(measured, monkeypatch):
    """On a GPU, too."""
    measured.clear()
    measured.update([row(512, 2, "fused")])
    monkeypatch.setattr(choice, "device_kind", lambda device: "kind of cpu")
    monkeypatch.setattr(back_ends, "has_triton", lambda: True)


@pytest.mark.parametrize("capability", [(8, 0), (9, 0), (12, 0), (7, 5), (7, 0)])
def test_what_cannot_run_is_not_chosen_and_below_8_0_not_to_be_had(fused_is_fastest, monkeypatch, capability):
    cuda = CPU._replace(device="cuda")
    assert choose_automatically(cuda._replace(head_size=256), 1) != "fused"
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    if capability >= (8, 0):
        assert choose_automatically(cuda, 1) == choose("fused", cuda, 1) == "fused"
        monkeypatch.setattr(back_ends, "has_triton", lambda: False)
        choice.choose_automatically.cache_clear()
        assert choose_automatically(cuda, 1) != "fused"
        return
    assert choose_automatically(cuda, 1) != "fused"
    with pytest.raises(BackEndNotHereError, match=f"has {capability[0]}.{capability[1]}: give auto or recompute"):
        choose("fused", cuda, 1)
    assert choose("fused", CPU, 1) == "fused"


SPARSE = CPU._replace(features=frozenset({"mask"}), share=0.125)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"time": 4096}, "tiles"),
        ({"time": 4096, "share": 0.9}, "recompute"),
        ({"time": 64}, "eager"),
        ({"time": 4096, "features": frozenset({"mask", "entmax"})}, "tiles"),
        ({"time": 4096, "features": frozenset({"mask", "learned"})}, "eager"),  # neither of the others has it
        ({"time": 4096, "has_dropout": True}, "tiles"),
        ({"time": 4096, "share": 0.9, "has_dropout": True}, "recompute"),
    ],
)
def test_a_mask_is_computed_by_the_nearest_measured(measured, changes, expected):
    for time, share, fastest in ((128, 0.2, "eager"), (2048, 0.1, "tiles"), (2048, 1.0, "recompute")):
        block, _ = row(time, 1, fastest)
        times = dict.fromkeys(("eager", "recompute", "tiles"), 2.0) | {fastest: 1.0}
        measured[block._replace(share=share)] = times
    assert choose_automatically(SPARSE._replace(**{"keys": changes.get("time", CPU.keys), **changes}), 0) == expected


CUDA = {"device": "cuda"}
LONG = {"time": 2**18, "keys": 2**18}


@pytest.mark.parametrize(
    ("changes", "consumers", "expected"),
    [
        ({}, 1, "tiles"),  # where that leaves most out
        ({"share": 0.8}, 1, "recompute"),
        ({"time": 16, "keys": 16}, 1, "recompute"),
        ({"time": 16, "keys": 16, "features": {"mask", "bias"}}, 1, "eager"),
        ({"features": {"mask", "learned"}}, 1, "eager"),
        ({"has_dropout": True}, 1, "tiles"),
        ({"has_dropout": True, "share": 0.8}, 1, "eager"),
        ({"share": 0.8, **LONG}, 1, "tiles"),  # no mask fits
        (CUDA, 0, "flex"),
        ({**CUDA, "features": {"mask", "causal", "positions"}}, 0, "flex"),
        ({**CUDA, "features": {"mask", "entmax"}}, 0, "tiles"),
        ({**CUDA, "head_size": 48}, 0, "tiles"),  # of a size that not every torch has
        ({**CUDA, "head_size": 256, "share": 0.9}, 0, "recompute"),
        ({**CUDA, "features": {"mask", "bias"}}, 0, "flex"),
        ({**CUDA, "share": 0.0, "features": {}}, 0, "recompute"),  # all keys
        ({**CUDA, "features": {"mask", "causal", "positions"}, **LONG}, 0, "tiles"),
        ({**CUDA, "has_dropout": True}, 0, "recompute"),
    ],
)
def test_a_mask_that_was_not_measured(measured, monkeypatch, caplog, changes, consumers, expected):
    monkeypatch.setattr(back_ends, "has_triton", lambda: True)
    changes = {**changes, "features": frozenset(changes.get("features", {"mask"}))}
    assert choose_automatically(SPARSE._replace(**changes), consumers) == expected
    said = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    is_said = "mask" in changes["features"] and not changes.get("has_dropout")
    assert not is_said or "attention to some of the keys" in said[0]


def test_without_triton_a_gpu_computes_masks_in_tiles(measured, monkeypatch):
    monkeypatch.setattr(back_ends, "has_triton", lambda: False)
    assert choose_automatically(SPARSE._replace(device="cuda"), 0) == "tiles"


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
