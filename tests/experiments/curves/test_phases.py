"""``lazyformer curves`` of runs with several phases, each a folder with its own log, its updates counted from zero."""

import csv

import pytest
from click.testing import CliRunner
from matplotlib.image import imread
from training_logs import BERT, writing

from lazyformer_fairseq.cli import main
from lazyformer_fairseq.experiments.curves.report import read_history

LONGER = BERT.replace("'tokens_per_sample': 16", "'tokens_per_sample': 32")


def write_phases(folder, later: float = 7.0):
    """Two phases: 20 updates of 100 tokens in 0.2 hours; 10 updates of 400 tokens in 0.3, stopped and gone on with."""
    for phase in ("phase1", "phase2"):
        (folder / phase).mkdir(parents=True)
    with writing(folder / "phase1" / "train.log") as log:
        log.start(BERT)
        for updates in (10, 20):
            log.train(updates, 36 * updates)
            log.valid(updates, 9 - updates / 20)
    with writing(folder / "phase2" / "train.log") as log:
        log.start(LONGER)
        log.loaded(0)
        log.valid(0, 99.0)  # the weights that phase 1 ended with
        log.train(5, 540, tokens=400)
        log.valid(5, 7.5)
        log.start(LONGER)
        log.loaded(5)
        log.train(10, 540, tokens=400)
        log.valid(10, later)
    return folder


@pytest.fixture
def history(tmp_path):
    write_phases(tmp_path)
    return read_history([tmp_path / "phase2" / "train.log", tmp_path / "phase1" / "train.log"])


def test_the_second_phase_goes_on_where_the_first_ends(history):
    assert history.losses == {10: 8.5, 20: 8.0, 25: 7.5, 30: 7.0}
    assert history.training == {10: 9.5, 20: 9.5, 25: 9.5, 30: 9.5}
    assert (history.starts, history.last_update) == ([0, 20], 30)
    assert history.at("hours", [0, 10, 20, 25, 30]) == pytest.approx([0, 0.1, 0.2, 0.35, 0.5])
    assert history.at("tokens", [0, 10, 20, 25, 30]) == pytest.approx([0, 1000, 2000, 4000, 6000])


def test_each_phase_has_the_flops_of_its_own_length(history):
    first, second = history.parts
    assert second.flops_of_token > first.flops_of_token  # attention to 32 tokens costs more than to 16
    expected = 2000 * first.flops_of_token + 4000 * second.flops_of_token
    assert history.at("flops", [30]) == pytest.approx([expected])


def test_a_run_in_its_first_phase_is_an_ordinary_run(tmp_path):
    log = write_phases(tmp_path) / "phase1" / "train.log"
    history = read_history([log])
    assert (history.losses, history.starts) == ({10: 8.5, 20: 8.0}, [0])


def test_what_a_log_does_not_tell_of_a_phase_is_unknown_from_there_on(tmp_path):
    write_phases(tmp_path)
    log = tmp_path / "phase2" / "train.log"
    log.write_text("".join(line for line in log.read_text().splitlines(keepends=True) if "dictionary" not in line))
    history = read_history([tmp_path / "phase1" / "train.log", log])
    assert history.why_no_flops == "the log does not tell the size of the dictionary"
    at_border, later = history.at("flops", [20, 25])
    assert at_border > 0 and later != later


def test_folders_of_phases_in_one_picture_with_their_training_loss(tmp_path):
    for name, later in (("bert", 7.0), ("par", 6.5)):
        write_phases(tmp_path / name, later)
    output = tmp_path / "figure4.png"
    words = ["curves", str(tmp_path / "bert"), str(tmp_path / "par"), "--against", "updates,hours", "--training"]
    done = CliRunner().invoke(main, [*words, "--output", str(output)], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    lines = [[cell.strip() for cell in line.split("|")[1:-1]] for line in done.output.splitlines() if "|" in line]
    assert [(line[0], line[3], line[5], line[7]) for line in lines[2:]] == [
        ("bert", "30", "0.500", "7.000"),
        ("par", "30", "0.500", "6.500"),
    ]
    assert imread(output).shape[0] > 100
    with output.with_suffix(".csv").open() as file:
        rows = [(row["run"], row["split"], row["updates"]) for row in csv.DictReader(file)]
    assert rows[:8] == [
        ("bert", split, updates) for split in ("train", "valid") for updates in ("10", "20", "25", "30")
    ]
