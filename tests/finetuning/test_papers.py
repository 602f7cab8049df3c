"""The paper's Table 1, and its average."""

import pytest

from lazyformer_fairseq.finetuning.papers import COLUMNS, PAPER_ROWS, SCORES, average


@pytest.mark.parametrize(
    ("model", "printed"),
    [("BERT", 83.52), ("M2x6-S", 83.69), ("M2x6-SD", 83.52), ("M2x6", 84.56), ("M2x6 mid", 83.77)],
)
def test_the_average_is_that_of_table_1(model, printed):
    (row,) = [row for row in PAPER_ROWS if row.model == model]
    assert row.printed_average == printed
    assert f"{average(row.scores):.2f}" == f"{printed}"


@pytest.mark.parametrize("missing", SCORES)
def test_there_is_no_average_of_fewer_than_nine_numbers(missing):
    scores = {name: value for name, value in PAPER_ROWS[0].scores.items() if name != missing}
    assert average(scores) is None


def test_other_scores_do_not_enter_the_average():
    scores = PAPER_ROWS[0].scores
    assert average({**scores, "WNLI": 0.0}) == average(scores)


def test_each_score_has_its_place_among_the_columns():
    assert [name for names in COLUMNS.values() for name in names] == list(SCORES)
    assert {name: score.metric for name, score in SCORES.items() if score.metric != "accuracy"} == {
        "CoLA": "matthews",
        "STS": "pearson",
    }
