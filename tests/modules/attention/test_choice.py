import json
import logging

import pytest
import torch

from lazyformer_fairseq.modules.attention import choice
from lazyformer_fairseq.modules.attention.choice import BACKENDS, Situation, choose, choose_automatically

CPU = Situation(
    device="cpu", precision=torch.float32, batch=1, heads=12, time=512, keys=512, head_size=64, is_training=True,
    features=frozenset(), has_dropout=False, blocks=6,
)  # fmt: skip


def row(time, layers, fastest, device="cpu", training=True, biased=False):
    milliseconds = {name: 1.0 if name == fastest else 2.0 for name in BACKENDS}
    return {
        "device": device, "training": training, "biased": biased, "layers": layers, "time": time,
        "milliseconds": milliseconds,
    }  # fmt: skip


@pytest.fixture
def measured(monkeypatch):
    rows = [
        row(128, 1, "recompute"), row(128, 2, "materialize"), row(4096, 2, "fused"),
        row(512, 2, "eager", biased=True),
        row(512, 2, "recompute", training=False),
    ]  # fmt: skip
    choose_automatically.cache_clear()
    monkeypatch.setattr(choice, "measured_rows", lambda: tuple(rows))
    yield rows
    choose_automatically.cache_clear()


@pytest.mark.parametrize(
    ("changes", "readers", "expected"),
    [
        ({}, 1, "materialize"),  # 512 is nearer to 128 than to 4096, in octaves
        ({}, 0, "recompute"),
        ({"time": 2048}, 1, "fused"),
        ({"time": 2048}, 5, "fused"),
        ({"features": frozenset({"bias"})}, 1, "eager"),
        ({"is_training": False}, 1, "recompute"),
        ({"has_dropout": True}, 1, "eager"),  # nothing fused has it on a processor
        ({"has_dropout": True}, 0, "recompute"),
        ({"device": "cuda", "has_dropout": True}, 1, "recompute"),
        ({"device": "cuda", "has_dropout": True, "features": frozenset({"bias"})}, 1, "eager"),
    ],
)
def test_the_nearest_measured_row_decides(measured, changes, readers, expected):
    assert choose("auto", CPU._replace(**changes), readers) == expected
    assert choose("eager", CPU._replace(**changes), readers) == "eager"


def test_what_does_not_fit_into_memory_is_not_chosen(measured):
    measured[:] = [row(128, 2, "materialize")]
    assert choose_automatically(CPU, 1) == "materialize"
    assert choose_automatically(CPU._replace(batch=10_000), 1) in {"recompute", "fused"}
    # At inference a block's distribution is gone when the next one comes.
    memory = choice._memory("cpu")
    batch = int(choice.SHARE_OF_MEMORY * memory / (12 * 512 * 512 * 4) / 2)
    measured.append(row(128, 2, "materialize", training=False))
    assert choose_automatically(CPU._replace(batch=batch), 1) != "materialize"
    assert choose_automatically(CPU._replace(batch=batch, is_training=False), 1) == "materialize"


def test_a_device_that_was_not_measured_gets_what_has_been_used_for_long(measured, monkeypatch, caplog):
    cuda = CPU._replace(device="cuda")
    monkeypatch.setattr(choice, "_memory", lambda device: 2**40)
    assert choose_automatically(cuda, 1) == "recompute"
    assert choose_automatically(cuda._replace(features=frozenset({"bias"})), 1) == "eager"
    assert choose_automatically(cuda._replace(features=frozenset({"bias"}), is_training=False), 1) == "recompute"
    long = cuda._replace(features=frozenset({"bias"}), time=2**20, keys=2**20)
    assert choose_automatically(long, 1) == "recompute"  # nothing else fits


def test_what_cannot_run_is_not_chosen(measured, monkeypatch):
    measured[:] = [row(512, 2, "fused", device="cuda")]
    cuda = CPU._replace(device="cuda")
    monkeypatch.setattr(choice, "_memory", lambda device: 2**40)
    for has_triton in (True, False):
        monkeypatch.setattr(choice, "has_triton", lambda found=has_triton: found)
        choose_automatically.cache_clear()
        assert (choose_automatically(cuda, 1) == "fused") == has_triton
        assert choose_automatically(cuda._replace(head_size=256), 1) != "fused"


def test_the_choice_is_logged_once_with_its_reason(measured, caplog):
    with caplog.at_level(logging.INFO, logger=choice.logger.name):
        for _ in range(3):
            choose_automatically(CPU, 1)
    assert [record.getMessage() for record in caplog.records] == [
        "lazy back end: materialize for blocks of 2 at 512 tokens on cpu (measured with blocks of 2 at 128 tokens)"
    ]


def test_the_shipped_measurements_are_whole():
    choice.measured_rows.cache_clear()
    rows = choice.measured_rows()
    assert any(found["device"] == "cpu" for found in rows)
    for found in rows:
        assert set(found["milliseconds"]) <= set(BACKENDS) and len(found["milliseconds"]) >= 2
        assert found["layers"] >= 1 and found["time"] >= 1
    assert json.dumps(rows)
