"""The paper's Table 1, and its average."""

import pytest

from lazyformer_fairseq.finetuning.benchmark import COLUMNS, PAPER_ROWS, SCORES, TableRow
from lazyformer_fairseq.finetuning.report import average_of
from lazyformer_fairseq.finetuning.tasks.glue import BENCHMARK as GLUE


def average(scores):
    return average_of(TableRow("model", "paper", None, scores), GLUE)


def test_the_average_is_that_of_table_1():
    found = {row.model: f"{average(row.scores):.2f}" for row in PAPER_ROWS}
    assert found == {"BERT": "83.52", "M2x6-S": "83.69", "M2x6-SD": "83.52", "M2x6": "84.56", "M2x6 mid": "83.77"}


@pytest.mark.parametrize("missing", SCORES)
def test_there_is_no_average_of_fewer_than_nine_numbers(missing):
    assert average({name: value for name, value in PAPER_ROWS[0].scores.items() if name != missing}) is None


def test_each_score_has_its_place_among_the_columns():
    assert [name for names in COLUMNS.values() for name in names] == list(SCORES)
    assert {name: score.metric for name, score in SCORES.items() if score.metric != "accuracy"} == {
        "CoLA": "matthews",
        "STS": "pearson",
    }
