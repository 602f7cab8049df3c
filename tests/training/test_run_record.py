"""run.json and metrics.jsonl: written whole, read with their types, and cut where a run goes back."""

import math
from dataclasses import replace

import pytest

from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.training.run_record import (
    METRICS,
    RUN,
    MetricsLine,
    MetricsLog,
    RunRecord,
    describe_here,
    finite_values,
    hash_data,
    read_metrics,
    read_run,
    write_run,
)

RECORD = RunRecord(
    command=("lazyformer", "pretrain"),
    model={"name": "lazyformer", "sublayer_pattern": "M2x6"},
    parameters=7,
    task={"name": "full_sentences_masked_lm", "data": "data", "seed": 1},
    criterion={"name": "masked_lm_accuracy"},
    data={"dict.txt": "0" * 64},
    optimizer={"name": "fused_adam", "adam_betas": "(0.9, 0.98)"},
    schedule={"name": "wsd", "lr": 1e-3, "max_update": 100, "patience": math.inf},
    batch={"batch_size": 4, "update_freq": 1, "clip_norm": 0.0},
    precision="fp32",
    seed=1,
    processes=1,
    **describe_here("cpu"),
)


def line(updates: int, **values: float) -> MetricsLine:
    return MetricsLine(updates, "train", seconds=updates / 2, values=finite_values(values))


def test_a_record_comes_back_from_its_file_and_a_change_is_named(tmp_path, caplog):
    write_run(tmp_path, RECORD)
    found = read_run(tmp_path)
    assert replace(found, schedule=RECORD.schedule) == RECORD
    assert found.schedule["patience"] == "Infinity"
    write_run(tmp_path, RECORD)
    assert not caplog.records
    write_run(tmp_path, replace(RECORD, precision="bf16"))
    assert "precision is 'fp32' there, 'bf16' here" in caplog.text
    (tmp_path / RUN).write_text("{}")
    with pytest.raises(UserError, match="run.json: field 'command' is missing; remove it"):
        read_run(tmp_path)


def test_lines_are_appended_and_those_beyond_a_checkpoint_are_removed(tmp_path):
    log = MetricsLog(tmp_path)
    for updates in (10, 20, 30):
        log.append(line(updates, loss=1.5))
    log.append(replace(line(30, loss=math.nan), split="valid"))
    assert [found.values["loss"] for found in read_metrics(tmp_path)] == [1.5, 1.5, 1.5, None]
    assert [found.updates for found in read_metrics(tmp_path, "valid")] == [30]
    with (tmp_path / METRICS).open("a") as file:
        file.write('{"updates": 40, "spl')  # a kill in the middle of a line
    resumed = MetricsLog(tmp_path, updates=20)
    resumed.append(line(25))
    assert [found.updates for found in read_metrics(tmp_path)] == [10, 20, 25]


def test_a_damaged_line_is_named(tmp_path):
    log = MetricsLog(tmp_path)
    log.append(line(1))
    with (tmp_path / METRICS).open("a") as file:
        file.write('{"updates": -1, "split": "train", "seconds": 0, "values": {}}\n')
    with pytest.raises(UserError, match=r"metrics.jsonl, line 2: .*updates"):
        read_metrics(tmp_path)


def test_data_is_hashed_file_by_file(tmp_path):
    (tmp_path / "dict.txt").write_text("a 1\n")
    before = hash_data([tmp_path])
    assert list(before) == [str(tmp_path / "dict.txt")]
    (tmp_path / "dict.txt").write_text("a 2\n")
    assert hash_data([tmp_path]) != before
