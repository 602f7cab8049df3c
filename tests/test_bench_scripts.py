"""What of the scripts that measure can be checked on any machine: loaders, start-up."""

import json
import re
import subprocess
import sys

import pytest
import torch
from helpers import ROOT, load_script

TINY = "--arch lazyformer_m2x6_s_tiny --sublayer-pattern M2 --tokens-per-sample 32 --batch-size 4"


def run(name: str, *words: object) -> subprocess.CompletedProcess:
    command = [sys.executable, str(ROOT / "scripts" / f"{name}.py"), *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT)


def cells(table: str) -> list[list[str]]:
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in table.splitlines()]


# By script its options, and what the rows of its tables begin with.
TABLES = {
    "bench_loader": (f"{{data}} {TINY} --workers 0 --seconds 0.1 --cpu", ["model, an update", "loader, 0 workers"]),
    "bench_start_up": (
        f"{{data}} {TINY} --processes 2 --num-workers 1",
        # The list of batches of so little data takes less than the shortest time that the table shows.
        ["start Python", "set up the task", "first batch", "processes: 2", "all"],
    ),
    "bench_trainer": (
        "--arch bert_tiny --sublayer-pattern M2x2 --vocab-size 500 --tokens-per-sample 16 --batch-size 2 --rounds 1 "
        "--device cpu",
        ["BertForMaskedLM, sdpa", "ours, (sf)xN", "M2x2"],
    ),
    "bench_muon": ("--arch bert_tiny --precision fp32 --rounds 1 --device cpu", ["bert_tiny"]),
    "time_documents": ("{text} --tokens-per-sample 32 --batch-size 2 --batches 2", []),
    "time_tail": (
        "--patterns sff --words 50 --tokens 16 --batch-size 2 --texts 2 --rounds 1",
        ["sff, update", "sff, classes"],
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", TABLES)
def test_a_script_prints_its_rows_of_numbers(name, data_folder, tmp_path):
    """Each script that measures runs at tiny size, and its rows hold numbers above zero."""
    if name == "bench_trainer":
        pytest.importorskip("accelerate", reason="Trainer needs accelerate")
    text = tmp_path / "text"
    text.write_text("\n\n".join(" ".join(["word"] * count) for count in (7, 20, 3) * 40))
    options, firsts = TABLES[name]
    done = run(name, *options.format(data=data_folder, text=text).split())
    assert done.returncode == 0, done.stderr
    rows = [row for row in cells(done.stdout) if row]
    for first in firsts:
        ((_, *found),) = [row for row in rows if row[0].startswith(first)]
        numbers = [float(cell.replace(",", "").rstrip("%")) for cell in found if re.fullmatch(r"[\d.,]+%?", cell)]
        assert numbers and max(numbers) > 0, first


def test_a_text_too_short_to_be_timed_is_named(tmp_path, monkeypatch):
    (text := tmp_path / "text").write_text("word " * 70)
    sizes = "--tokens-per-sample 32 --batch-size 2 --batches 1"
    monkeypatch.setattr(sys, "argv", ["time_documents.py", str(text), *sizes.split()])
    with pytest.raises(SystemExit, match=f"{text} fills 2 blocks of 32 tokens, but 6 are required; use a longer text"):
        load_script("time_documents").main()


def test_varlen_attn_reads_the_same_documents(tmp_path, monkeypatch):
    """On a GPU torch's function is timed; here a plain loop over the documents stands in for it."""
    varlen = pytest.importorskip("torch.nn.attention.varlen", reason="from torch 2.10 on")
    calls = []

    def loop(q, k, v, starts_of_queries, starts_of_keys, longest_query, longest_key):
        assert torch.equal(starts_of_queries, starts_of_keys) and longest_query == longest_key
        lengths = starts_of_queries.diff().tolist()
        assert max(lengths) == longest_query and sum(lengths) == len(q)
        calls.append(lengths)
        documents = zip(*(x.transpose(0, 1).split(lengths, 1) for x in (q, k, v)), strict=True)
        return torch.cat([torch.nn.functional.scaled_dot_product_attention(*qkv) for qkv in documents], 1).transpose(
            0, 1
        )

    monkeypatch.setattr(varlen, "varlen_attn", loop)
    text = tmp_path / "text"
    text.write_text("\n\n".join(" ".join(["word"] * count) for count in (7, 20, 3) * 40))
    options = ["--tokens-per-sample", "32", "--batch-size", "2", "--batches", "2", "--varlen"]
    monkeypatch.setattr(sys, "argv", ["time_documents.py", str(text), *options, "--json", str(tmp_path / "row.json")])
    load_script("time_documents").main()
    row = json.loads((tmp_path / "row.json").read_text())
    assert row["computed"] == row["visible"] < 1 and row["ms, within documents"] > 0
    assert len(calls) == 4 and all(sum(lengths) == 64 for lengths in calls)
    assert calls[0][:2] == [8, 21], "a line's words and the end of the line"
