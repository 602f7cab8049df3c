"""`lazyformer bench table4`: PAR Transformer's Table 4 without its scores."""

import json

import pytest
import torch
from click.testing import CliRunner
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from lazyformer_fairseq.cli import main
from lazyformer_fairseq.measure.bench import table_4


def bench_table4(*arguments: str):
    return CliRunner().invoke(main, ["bench", "table4", *arguments])


@pytest.fixture
def small_baseline(monkeypatch):
    monkeypatch.setattr(table_4, "BASELINE", "bert_base_absolute_tiny")
    monkeypatch.setattr(table_4, "PAPER_LATENCY", {"bert_base_absolute_tiny": "8.6", "distilbert_tiny": "5.3+"})


def test_models_stand_beside_bert_and_the_paper(small_baseline, tmp_path):
    threads = torch.get_num_threads()
    folder = tmp_path / "new" / "table4"
    options = ["--arch", "distilbert_tiny,lazyformer_m2x6_s_tiny", "--tokens", "16", "--rounds", "3", "--threads", "1"]
    result = bench_table4(*options, "--output", str(folder))
    assert result.exit_code == 0, result.output
    found = json.loads((folder / "table4.json").read_text())
    rows = {row["arch"]: row for row in found["rows"]}
    assert list(rows) == ["distilbert_tiny", "lazyformer_m2x6_s_tiny", "bert_base_absolute_tiny"]
    assert (found["threads"], found["tokens"], torch.get_num_threads()) == (1, 16, threads)
    for row in rows.values():
        assert len(row["seconds"]["samples"]) == len(row["processor_seconds"]["samples"]) == 3
    assert rows["bert_base_absolute_tiny"]["share_of_bert"]["median"] == 1
    assert rows["distilbert_tiny"]["share_of_bert_by_flops"] == pytest.approx(0.5, abs=0.01)
    assert rows["lazyformer_m2x6_s_tiny"]["buckets"] == 32, "each model has its arch's own bias"
    lines = (folder / "table4.md").read_text().splitlines()
    distilbert = next(line for line in lines if "distilbert" in line).split("|")
    assert [cell.strip() for cell in distilbert[-3:-1]] == ["5.3+", "0.62"]
    assert "8.6" in result.output and f"written to {folder}" in result.output


@pytest.mark.parametrize("arch", ["bert_base_absolute_tiny", "par_bert_tiny", "lazy_par_bert_tiny"])
def test_flops_are_those_that_torch_counts(arch):
    thing = table_4.SpanInference(arch, 16, "cpu", torch.float32)
    thing.model.encoder.sentence_encoder.attention_backend = "eager"  # torch's counter passes over the fused one
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        assert thing().shape == (1, 16, 2)
    assert counter.get_total_flops() == table_4.cost_of(arch, 16)["flops"]


def test_par_bert_base_costs_what_its_formula_says():
    """At n = 384: 4 C^2 a token for an s and 2 C W for an f, twice; two products of n x n by C for each s."""
    n, c, w = 384, 768, 3072
    attention = 5 * 2 * 2 * n * n * c
    assert table_4.cost_of("par_bert_base", n)["attention_flops"] == attention
    linear = 2 * n * (5 * 4 * c * c + 19 * 2 * c * w + 2 * c)
    assert table_4.cost_of("par_bert_base", n)["flops"] == attention + linear


def test_an_unknown_arch_is_named(tmp_path):
    result = bench_table4("--arch", "distilbert", "--output", str(tmp_path))
    assert result.exit_code != 0 and "--arch distilbert: there is no such one" in str(result.exception or result.output)


def test_an_earlier_measurement_is_not_written_over(tmp_path):
    (tmp_path / "table4.json").write_text("{}")
    result = bench_table4("--output", str(tmp_path))
    assert result.exit_code != 0 and "exists already" in str(result.exception or result.output)
