import os
import re
from multiprocessing import active_children

import pytest
from click.testing import CliRunner

from lazyformer_fairseq.cli import main
from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.measure.bench import start_up
from lazyformer_fairseq.measure.bench.start_up import Memory, Stage, StartUp, memory_rows, stage_rows

TINY = "--arch lazyformer_m2x6_s_tiny --sublayer-pattern M2 --tokens-per-sample 32 --batch-size 4".split()


def startup(data, *options):
    return CliRunner().invoke(main, ["bench", "startup", str(data), *TINY, *options])


def cells(table):
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in table.splitlines()]


def test_two_processes_with_a_data_worker_each(data_folder):
    result = startup(data_folder, "--processes", "2", "--num-workers", "1")
    assert result.exit_code == 0, result.output
    stages, _, memory = result.stdout.partition("\n\n")
    (_, *heads), _, *rows = cells(stages)
    assert heads == ["CPU seconds, mean of a process", "most", "seconds of the slowest"]
    names = [name.partition(",")[0] for name, *_ in rows]
    assert names == ["start Python", "set up the task", "make the batches' list", "first batch"]
    assert all(float(mean) <= float(most) for _, mean, most, _ in rows)
    assert float(rows[0][1]) > 0.1  # seconds of the processor that torch and fairseq take to import
    if start_up.PROC.exists():
        _, _, ours, workers, both = cells(memory)
        assert (ours[0], workers[0], both[0]) == ("processes: 2", "their data workers: 2", "all")
        total, own, mapped = (int(cell.replace(",", "")) for cell in ours[1:])
        assert 0 < own < total and abs(own + mapped - total) <= 1
    assert not active_children()


def test_an_error_of_a_process_is_the_commands(data_folder):
    result = startup(data_folder, "--processes", "1", "--mask-prob", "1.5")
    assert isinstance(result.exception, UserError) and "mask_prob 1.5" in str(result.exception)
    assert not active_children()


def dies(theirs, *_):
    os._exit(9)


def test_a_process_that_dies_is_named(monkeypatch):
    monkeypatch.setattr(start_up, "_read_data", dies)
    with pytest.raises(UserError, match="died, exit code 9"):
        start_up.measure_start_up([], 2)


ACCOUNT = """5581-7ffd ---p 00000000 00:00 0 [rollup]
Rss:               9000 kB
Pss:               5000 kB
Pss_Dirty:         1000 kB
Pss_Anon:          3000 kB
Pss_File:          2000 kB
SwapPss:              7 kB
"""


def test_a_shared_page_counts_in_part_for_each(tmp_path, monkeypatch):
    for process in ("self", "1", "2", "3"):
        (tmp_path / process).mkdir()
        (tmp_path / process / "smaps_rollup").write_text(ACCOUNT)
    monkeypatch.setattr(start_up, "PROC", tmp_path)
    one = Memory(5000 * 1024, 3000 * 1024)
    assert start_up._memory_of(1, [2, 3]) == (one, one + one)
    rows = memory_rows([StartUp([], 2, start_up._memory_of(1, [2, 3]))])
    assert [list(row.values()) for row in rows] == [
        ["processes: 1", "5", "3", "2"],
        ["their data workers: 2", "10", "6", "4"],
        ["all", "15", "9", "6"],
    ]


def test_a_system_that_does_not_tell_gets_no_table(tmp_path, monkeypatch, data_folder):
    monkeypatch.setattr(start_up, "PROC", tmp_path)
    assert start_up._memory_of(1, [2]) is None
    measured = [StartUp([Stage("load", cpu, wall)], 1, None) for cpu, wall in ((1.0, 9.0), (2.0, 3.0))]
    assert memory_rows(measured) == []
    assert [list(row.values()) for row in stage_rows(measured)] == [["load", "1.50", "2.00", "9.00"]]
    monkeypatch.setattr(start_up, "measure_start_up", lambda command, processes: measured)
    result = startup(data_folder)
    assert re.fullmatch("\nmemory: not measured; only Linux .*\n", result.stderr)
