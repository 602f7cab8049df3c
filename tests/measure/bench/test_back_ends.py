"""`lazyformer bench backends`: the table that `--attention-backend auto` reads."""

import math

import pytest
import torch
from in_process import invoke

from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.measure.bench import back_ends
from lazyformer_fairseq.measure.bench.settings import BackEndSettings
from lazyformer_fairseq.measure.costs import latency
from lazyformer_fairseq.modules.attention import choice
from lazyformer_fairseq.modules.attention.choice import Block, add_rows, back_ends_of, read_table, table_of, user_file
from lazyformer_fairseq.modules.processor import device_kind


@pytest.fixture(autouse=True)
def own_file(tmp_path, monkeypatch):
    """Where the command writes if it is not told; nothing is known of any device."""
    monkeypatch.setenv("LAZYFORMER_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(choice, "SHIPPED", tmp_path / "shipped.json")
    table_of.cache_clear()
    yield user_file()
    table_of.cache_clear()


def run(*options: object, sizes: str = "--lengths 8 --layers 1,2 --windows 0", code: int = 0) -> str:
    small = f"bench backends {sizes} --batches 2 --heads 2x4 --rounds 2 --device cpu"
    return invoke(*small.split(), *options, code=code)


def blocks(*layers: int, precision: str = "fp32", **more: object) -> list[Block]:
    sizes = {"lengths": (8,), "batches": (2,), "heads": ((2, 4),), "windows": (0,), **more}
    return back_ends.blocks_to_measure(BackEndSettings(layers=layers, precision=precision, **sizes))


@pytest.fixture
def interrupt(monkeypatch):
    """``interrupt(when)``: Ctrl-C at a measurement, by how many went before it and its description."""

    def when(is_now):
        right, begun = latency.measure, []

        def measure(*arguments, **more):
            if is_now(len(begun), more["description"]):
                raise KeyboardInterrupt
            begun.append(more)
            return right(*arguments, **more)

        monkeypatch.setattr(latency, "measure", measure)

    return when


def test_too_little_time_for_a_median_is_said_and_batches_are_no_larger_than_memory_allows(monkeypatch, caplog):
    back_ends.measure_back_ends(blocks(1), "cpu", rounds=10, budget=1e-9)
    (said,) = (record.message for record in caplog.records if "--budget" in record.message)
    assert said.startswith(f"{len(blocks(1))} of {len(blocks(1))} blocks had time for fewer than 3 rounds")
    monkeypatch.setattr(back_ends, "MOST_TOKENS", 32)
    found = blocks(1, lengths=(8, 64), batches=(1, 4))
    assert {(block.batch, block.time) for block in found} == {(1, 8), (4, 8), (1, 64)}
    assert {block.batch for block in found if block.padded} == {4}


def test_each_block_is_measured_on_each_back_end(own_file):
    printed = run()
    table = read_table(own_file, device_kind("cpu"))
    assert list(table.rows) == sorted(blocks(1, 2)) and len(table.rows) == 2 * 5 * 2
    assert all(set(row) == set(back_ends_of("cpu")) and min(row.values()) > 0 for row in table.rows.values())
    assert {"threads", "torch"} <= table.origin.keys()
    assert printed.count(" *") >= len(table.rows) and str(own_file) in printed


def test_it_shows_which_measurement_decides(own_file):
    before = run("--show")
    assert "not measured yet" in before and "torch's own" in before and not own_file.exists()
    fastest = {block: {"eager": 2.0, "fused": 1.0 if block.layers == 1 else 3.0} for block in blocks(1, 2)}
    add_rows(own_file, device_kind("cpu"), {}, fastest)
    table_of.cache_clear()
    after = run("--show", sizes="--lengths 16 --layers 1,3 --windows 0")
    assert f"{device_kind('cpu')}: as {own_file} has it" in after
    lines = [line for line in after.splitlines() if "2 x 16" in line]
    assert len(lines) == 2 * 5 * 2
    for line in lines:
        if "single layers" in line:
            assert "| fused" in line and "single layers, 2 x 8 tokens, 2 heads of 4: fused 1, eager 2 ms" in line
        else:
            assert "| eager" in line and "blocks of 2, 2 x 8 tokens, 2 heads of 4: eager 2, fused 3 ms" in line


def test_masks_are_measured_on_back_ends_that_have_them(own_file):
    printed = run(sizes="--lengths 8 --layers 1 --windows 2,100,200")
    rows = read_table(own_file, device_kind("cpu")).rows
    # Of 8 x 8 pairs 34 are at most 2 apart; of 8 x 16 with a memory each query sees 3, or all of the past.
    shares = {"nothing": {0.531, 1}, "bias": {0.531, 1}, "positions": {0.188, 0.781}}
    assert {(block.learned, block.share) for block in rows} == {
        (learned, float(f"{share:.3g}")) for learned, of_it in shares.items() for share in of_it
    }
    assert len(rows) == 2 * 3 * 2 and not any(block.padded for block in rows)
    assert all(set(row) == {"eager", "recompute", "tiles"} and min(row.values()) > 0 for row in rows.values())
    table_of.cache_clear()
    shown = run("--show", sizes="--lengths 8 --layers 1 --windows 2")
    assert "not measured" not in printed and "0.531" in printed
    assert shown.count("0.531 of all pairs shown") == 4 and shown.count("0.188 of all pairs shown") == 2


@pytest.mark.parametrize("done", [3, 0])
def test_stopped_it_writes_what_it_has(own_file, interrupt, done):
    interrupt(lambda begun, _: begun == done)
    assert ("stopped after 3 of 20 blocks" if done else "nothing was written") in run(code=130)
    assert len(read_table(own_file, device_kind("cpu")).rows) == 3 if done else not own_file.exists()


def raising(error: Exception):
    raise error


@pytest.mark.parametrize(
    ("changed", "precision", "said"),
    [
        ({"eager": lambda output: raising(torch.OutOfMemoryError())}, "fp32", ""),
        ({"fused": lambda output: raising(ValueError("no"))}, "fp32", "fused fails, left out (ValueError: no)"),
        ({"fused": lambda output: output * 1.01}, "fp32", "fused is off by 0.01 of its size: left out"),
        ({"recompute": lambda output: output * math.nan}, "fp32", "recompute is off by inf of its size: left out"),
        # Half precision is compared with single.
        ({}, "bf16", ""),
        ({"eager": lambda output: output * (1.5 if output.dtype == torch.bfloat16 else 1)}, "bf16", "eager is off by"),
    ],
)
def test_what_does_not_fit_fails_or_computes_something_else_is_left_out(monkeypatch, caplog, changed, precision, said):
    right = back_ends.attend

    def attend(*arguments):
        output, reusable = right(*arguments)
        return changed.get(arguments[-1], lambda output: output)(output), reusable

    monkeypatch.setattr(back_ends, "attend", attend)
    rows = back_ends.measure_back_ends(blocks(1, precision=precision), "cpu", rounds=1)
    assert all(set(row) == set(back_ends_of("cpu")) - set(changed) for row in rows.values())
    assert back_ends.table(rows, "cpu").count("left out") == 10 * len(changed) and said in caplog.text


def test_a_damaged_file_is_named_before_anything_is_measured(own_file, monkeypatch):
    own_file.parent.mkdir()
    own_file.write_text("{")
    monkeypatch.setattr(back_ends, "measure_back_ends", lambda *_: pytest.fail("measured"))
    with pytest.raises(UserError, match="backends.json"):
        run()


def test_each_kind_and_length_has_a_line_and_ctrl_c_keeps_what_was_measured(interrupt):
    interrupt(lambda _, description: "48" in description)
    options = "--heads 2x4 --rounds 2 --device cpu --kinds s[window=2],s[linformer=4,share=kv] --kinds sl"
    printed = invoke(*f"bench backends {options} --lengths 16,24 --lengths 48".split(), code=130)
    assert "stopped early" in printed
    cells = [[cell.strip() for cell in line.split("|")[1:]] for line in printed.splitlines() if line[:1] == "|"]
    kinds = [back_ends.FULL, "s[window=2]", "s[linformer=4,share=kv]", "sl"]
    assert [cell[:2] for cell in cells[2:]] == [[kind, length] for length in ("16", "24") for kind in kinds]
    assert sum("1.00x" in cell for cell in cells) >= 2


def test_what_does_not_fit_into_memory_has_no_speed_up(monkeypatch):
    of_all = {"s": lambda: raising(torch.OutOfMemoryError())}
    monkeypatch.setattr(back_ends, "_sublayers", lambda pattern, *_: of_all.get(pattern, lambda: None))
    sizes = {"kinds": ("s[window=2]",), "lengths": (8,), "rounds": 2, "device": "cpu", "precision": "fp32"}
    table, is_whole = back_ends.measure_kinds(BackEndSettings(**sizes, budget=None), (2, 4))
    assert is_whole and [cell.strip() for cell in table.splitlines()[-1].split("|")[4:6]] == ["", "0.0"]
