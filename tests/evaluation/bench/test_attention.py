"""`lazyformer bench attention`: sublayers of attention variants, on back ends."""

import pytest
import torch
from in_process import invoke

from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.evaluation.bench import attention
from lazyformer_fairseq.evaluation.bench.settings import AttentionSettings
from lazyformer_fairseq.evaluation.costs import latency

OPTIONS = "bench attention --heads 2x4 --rounds 2 --device cpu"


def cells(printed: str) -> list[list[str]]:
    """Of the table's lines below its head."""
    return [[cell.strip() for cell in line.split("|")[1:]] for line in printed.splitlines() if line[:1] == "|"][2:]


def test_each_pattern_and_length_has_a_line_and_ctrl_c_keeps_what_was_measured(monkeypatch):
    right = latency.measure

    def measure(*arguments, description, **more):
        if "48" in description:
            raise KeyboardInterrupt
        return right(*arguments, description=description, **more)

    monkeypatch.setattr(latency, "measure", measure)
    given = "--patterns s[window=2],s[linformer=4,share=kv] --patterns sl --lengths 16,24 --lengths 48"
    printed = invoke(*f"{OPTIONS} {given}".split(), code=130)
    assert "stopped early" in printed
    names = [attention.FULL, "s[window=2]", "s[linformer=4,share=kv]", "sl"]
    assert [cell[:2] for cell in cells(printed)] == [[name, length] for length in ("16", "24") for name in names]
    assert sum("1.00x" in cell for cell in cells(printed)) >= 2


def test_each_back_end_has_a_line_where_it_computes_the_pattern(caplog):
    printed = invoke(*f"{OPTIONS} --patterns sl,s[entmax=1.5] --backend auto,fused,eager --lengths 16".split())
    names = ["sl", "sl on fused", "sl on eager", "s[entmax=1.5]", "s[entmax=1.5] on eager"]
    assert [cell[0] for cell in cells(printed)] == [attention.FULL, *names]
    assert (
        "s[entmax=1.5] on fused at 16 tokens is skipped: --attention-backend fused: it supports softmax" in caplog.text
    )
    with pytest.raises(UserError, match="--attention-backend fuzed: choose from"):
        invoke(*f"{OPTIONS} --backend fuzed".split())


def test_what_does_not_fit_into_memory_has_no_speed_up(monkeypatch):
    def raising():
        raise torch.OutOfMemoryError

    monkeypatch.setattr(attention, "_sublayers", lambda pattern, *_: raising if pattern == "s" else lambda: None)
    sizes = {"patterns": ("s[window=2]",), "lengths": (8,), "rounds": 2, "device": "cpu", "precision": "fp32"}
    table, is_whole = attention.measure_attention(AttentionSettings(**sizes), (2, 4))
    assert is_whole and [cell[3:5] for cell in cells(table)] == [["", "0.0"]]
