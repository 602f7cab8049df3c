"""`lazyformer bench backends`: the table that `--lazy-backend auto` reads."""

import json
import math

import pytest
import torch
from click.testing import CliRunner

from lazyformer_fairseq.benchmark.backends import speed as backend_speed
from lazyformer_fairseq.cli import main
from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.modules.attention.choice import BACKENDS


def run(output, options: str = "--lengths 8 --layers 1,2 --tokens 8 --rounds 2 --device cpu"):
    command = ["bench", "backends", *options.split(), "--output", str(output)]
    return CliRunner().invoke(main, command, catch_exceptions=False)


def test_each_block_is_measured_on_each_back_end(tmp_path):
    path = tmp_path / "new" / "measured.json"
    printed = run(path).output
    table = json.loads(path.read_text())
    blocks = [(row["training"], row["biased"], row["layers"], row["time"]) for row in table["rows"]]
    assert sorted(blocks) == sorted((t, b, m, 8) for t in (True, False) for b in (True, False) for m in (1, 2))
    for row in table["rows"]:
        assert row["device"] == "cpu" and set(row["milliseconds"]) == set(BACKENDS)
        assert min(row["milliseconds"].values()) > 0
    assert {"machine", "versions", "precision"} <= table["measured_on"]["cpu"].keys()
    assert printed.count(" *") >= len(blocks) and str(path) in printed


def test_rows_of_another_device_stay(tmp_path):
    path = tmp_path / "measured.json"
    gpu = {"device": "cuda", "training": True, "biased": True, "layers": 2, "time": 8, "milliseconds": {"fused": 1.0}}
    path.write_text(json.dumps({"measured_on": {"cuda": {"machine": "a GPU"}}, "rows": [gpu]}))
    for _ in range(2):
        run(path)
    table = json.loads(path.read_text())
    assert table["rows"][0] == gpu and len(table["rows"]) == 1 + 8
    assert set(table["measured_on"]) == {"cuda", "cpu"}


def test_blocks_measured_before_on_this_machine_stay(tmp_path):
    path = tmp_path / "measured.json"
    run(path, "--lengths 8 --layers 1 --tokens 8 --rounds 2 --device cpu")
    run(path, "--lengths 16,8 --layers 1 --tokens 8 --rounds 2 --device cpu")
    table = json.loads(path.read_text())
    assert sorted(row["time"] for row in table["rows"]) == 4 * [8] + 4 * [16]
    table["measured_on"]["cpu"]["machine"] = {"device": "another processor"}
    path.write_text(json.dumps(table))
    run(path, "--lengths 8 --layers 2 --tokens 8 --rounds 2 --device cpu")
    assert {(row["layers"], row["time"]) for row in json.loads(path.read_text())["rows"]} == {(2, 8)}


def test_stopped_it_writes_what_it_has(tmp_path, monkeypatch):
    right, blocks = backend_speed.measure, []

    def measure(*arguments, **more):
        blocks.append(more["description"])
        if len(blocks) == 4:
            raise KeyboardInterrupt
        return right(*arguments, **more)

    monkeypatch.setattr(backend_speed, "measure", measure)
    stopped = run(tmp_path / "measured.json")
    assert stopped.exit_code == 130 and "stopped after 3 of 8 blocks" in stopped.output
    assert len(json.loads((tmp_path / "measured.json").read_text())["rows"]) == 3


def test_stopped_in_the_first_block_it_writes_nothing(tmp_path, monkeypatch):
    def measure(*arguments, **more):
        raise KeyboardInterrupt

    monkeypatch.setattr(backend_speed, "measure", measure)
    stopped = run(tmp_path / "measured.json")
    assert stopped.exit_code == 130 and "nothing was written" in stopped.output
    assert not (tmp_path / "measured.json").exists()


def test_what_does_not_fit_is_said(monkeypatch):
    right = backend_speed.attend

    def attend(q, k, v, bias, dropout, readers, name):
        if name == "eager":
            raise torch.OutOfMemoryError
        return right(q, k, v, bias, dropout, readers, name)

    monkeypatch.setattr(backend_speed, "attend", attend)
    measured = backend_speed.measure_back_ends([8], [1], "cpu", torch.float32, 8, rounds=1)
    assert all(set(row["milliseconds"]) == set(BACKENDS) - {"eager"} for row in measured["rows"])
    assert backend_speed.table(measured["rows"]).count("left out") == 4


def test_what_computes_something_else_is_left_out(monkeypatch, caplog):
    right = backend_speed.attend

    def attend(q, k, v, bias, dropout, readers, name):
        output, reusable = right(q, k, v, bias, dropout, readers, name)
        return output * {"fused": 1.01, "recompute": math.nan}.get(name, 1.0), reusable

    monkeypatch.setattr(backend_speed, "attend", attend)
    measured = backend_speed.measure_back_ends([8], [2], "cpu", torch.float32, 8, rounds=1)
    assert all(set(row["milliseconds"]) == {"eager", "materialize"} for row in measured["rows"])
    assert "fused is off by 0.01 of its size: left out" in caplog.text


def test_what_fails_is_left_out(monkeypatch, caplog):
    right = backend_speed.attend

    def attend(q, k, v, bias, dropout, readers, name):
        if name == "fused":
            raise ValueError("no kernel image is available")
        return right(q, k, v, bias, dropout, readers, name)

    monkeypatch.setattr(backend_speed, "attend", attend)
    measured = backend_speed.measure_back_ends([8], [1], "cpu", torch.float32, 8, rounds=1)
    assert all(set(row["milliseconds"]) == set(BACKENDS) - {"fused"} for row in measured["rows"])
    assert "fused fails, left out (ValueError: no kernel image is available)" in caplog.text


def test_half_precision_is_compared_with_single(monkeypatch):
    right = backend_speed.attend

    def attend(q, k, v, bias, dropout, readers, name):
        output, reusable = right(q, k, v, bias, dropout, readers, name)
        return output * (1.5 if q.dtype == torch.bfloat16 and name == "eager" else 1.0), reusable

    measured = backend_speed.measure_back_ends([8], [2], "cpu", torch.bfloat16, 8, rounds=1)
    assert all(set(row["milliseconds"]) == set(BACKENDS) for row in measured["rows"])
    monkeypatch.setattr(backend_speed, "attend", attend)
    measured = backend_speed.measure_back_ends([8], [2], "cpu", torch.bfloat16, 8, rounds=1)
    assert all(set(row["milliseconds"]) == set(BACKENDS) - {"eager"} for row in measured["rows"])


def test_a_damaged_file_is_named(tmp_path):
    path = tmp_path / "measured.json"
    path.write_text("{")
    with pytest.raises(UserError, match="measured.json"):
        run(path)
