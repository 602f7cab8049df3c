"""The bench builds real corpora and prints what they cost."""

import csv

from click.testing import CliRunner
from helpers import toy_texts

from lazyformer_fairseq.cli import main


def test_bench_prints_steps_and_wholes(tmp_path):
    text = tmp_path / "toy.txt"
    text.write_text("\n\n".join(toy_texts(200)))
    table = tmp_path / "bench.csv"
    options = "--vocab-size 160 --min-word-count 1 --workers 1 --repeats 2 --valid-share 0.1".split()
    command = ["corpus", "bench", str(text), *options, "--csv", str(table)]
    result = CliRunner().invoke(main, command, catch_exceptions=False)
    assert result.exit_code == 0
    for step in ("read", "clean", "sentences", "words", "tokenizer", "ids", "shards"):
        assert f"| {step} " in result.output
    with table.open(newline="") as file:
        rows = list(csv.reader(file))
    whole = dict(zip(*rows[:2], strict=True))
    assert whole["workers"] == "1" and whole["scaling"] == "100%"
    assert float(whole["MB of text"]) * 1e6 <= text.stat().st_size
    assert float(whole["core-seconds"]) > 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bench.csv", "toy.txt"]
