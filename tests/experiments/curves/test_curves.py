"""``lazyformer curves``, on records of runs of one phase and of several."""

import math
from pathlib import Path

import pytest
from in_process import invoke, refusal
from matplotlib.image import imread
from run_records import BERT, CAUSAL, LAZY, Recorder, write_record

from lazyformer_fairseq.experiments.curves.report import read_history


def table_in(output: str) -> list[list[str]]:
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in output.splitlines() if "|" in line]


def test_flops_are_three_forward_passes_counted_by_hand(tmp_path):
    history = read_history([write_record(tmp_path, [9.0])])
    width, inner, length, symbols = 8, 16, 16, 50
    masked = 4  # a quarter; they alone go through the last feed-forward and the head
    attention = length * 4 * width * width + 2 * length * length * width
    feed_forward = 2 * width * inner
    head = width * width + width * symbols
    forward = 2 * (2 * attention + length * feed_forward + masked * (feed_forward + head))
    assert history.at("flops", [10])[0] == pytest.approx(3 * forward / length * 1000)


def test_validations_between_and_beyond_the_lines_of_training(tmp_path):
    recorder = Recorder(tmp_path)
    recorder.valid(0, 0, 12.0)
    recorder.train(10, 360)
    recorder.valid(15, 540, 9.0)
    recorder.train(20, 720)
    recorder.valid(25, 1080, math.nan)
    history = read_history([tmp_path])
    assert list(history.losses.items())[:2] == [(0, 12.0), (15, 9.0)] and math.isnan(history.losses[25])
    assert history.at("tokens", history.losses) == pytest.approx([0, 1500, 2500])
    assert history.at("hours", history.losses) == pytest.approx([0, 0.15, 0.3])


def test_a_split_that_measures_no_loss_has_no_curve(tmp_path):
    """Such as that of a supernet, which measures the entropy of its architecture."""
    recorder = Recorder(tmp_path)
    recorder.train(10, 360)
    recorder._append(10, "valid", 360, entropy=1.5)
    assert read_history([tmp_path]).splits == {}


def test_the_record_of_our_own_loop_tells_the_same(tmp_path):
    """It counts the tokens since the line before."""
    recorder = Recorder(tmp_path / "ours")
    for updates in (10, 20):
        recorder._append(updates, "train", 36 * updates, loss=9.5, tokens=1000)
        recorder.valid(updates, 36 * updates, 8.0)
    ours, fairseqs = (read_history([folder]) for folder in (tmp_path / "ours", write_record(tmp_path / "f", [8, 8])))
    assert (ours.measure, ours.losses) == (fairseqs.measure, fairseqs.losses)
    assert ours.cumulative_costs == fairseqs.cumulative_costs


def test_runs_in_one_picture_with_their_numbers_beside(tmp_path):
    recorder = Recorder(tmp_path / "bert")
    for number, loss in enumerate((9.0, 8.0), 1):
        recorder.train(10 * number, 360 * number)
        recorder.valid(10 * number, 360 * number, loss)
    recorder.valid(20, 720, 5.0, split="books")
    write_record(tmp_path / "lazy", [9.0, 7.75], LAZY)
    silent = write_record(tmp_path / "silent", [])
    output = tmp_path / "results" / "loss.png"
    axes = "updates,tokens,hours,flops"
    runs = (tmp_path / "bert", f"second={tmp_path / 'lazy'}", silent)
    said = invoke("curves", *runs, "--against", axes, "--output", output)
    lines = table_in(said)
    assert [line[0] for line in lines[2:]] == ["bert", "second"]
    assert lines[3][1:6] == ["M2x1", "2", "20", "2,000", "0.200"]
    assert "silent: not yet validated after 0 updates" in said
    assert output.read_bytes().startswith(b"\x89PNG")
    assert read_history([tmp_path / "bert"]).splits == {"valid": {10: 9.0, 20: 8.0}, "books": {20: 5.0}}
    assert float(lines[3][6]) < float(lines[2][6])  # the lazy one has no second product of queries and keys


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("nowhere", "nowhere: no such file or folder"),
        ("silent", "nothing to plot: silent: not yet validated after 0 updates"),
        (
            "bert causal",
            "be compared (bert: validation loss, bits per masked token; causal: validation loss, bits per token)",
        ),
        ("bert copy/bert", "a different run is already called bert; rename this one with NAME=copy/bert"),
        ("bert --against miles", "--against miles: choose one or more of updates, tokens, hours, flops"),
        ("bert --against=", "--against : choose one or more of updates"),
        ("bert --output c.pdf", "--output c.pdf: the file name must end in .png"),
    ],
)
def test_mistakes_are_named(tmp_path, monkeypatch, words, message):
    monkeypatch.chdir(tmp_path)
    write_record(Path("silent"), [])
    for name, settings in (("bert", BERT), ("copy/bert", BERT), ("causal", CAUSAL)):
        write_record(Path(name), [9.0], settings)
    assert message in refusal("curves", *words.split())


# --- Phases, each a folder with its own record, its updates counted from zero

LONGER = {**BERT, "task": {**BERT["task"], "tokens_per_sample": 32}}


def write_phases(folder: Path, last: float = 7.0, second_settings: dict = LONGER) -> list[Path]:
    """Two phases: 20 updates of 100 tokens in 0.2 hours; 10 updates of 400 tokens in 0.3."""
    first = write_record(folder / "phase1", [8.5, 8.0])
    second = Recorder(folder / "phase2", second_settings)
    second.valid(0, 0, 99.0)  # the weights that phase 1 ended with
    for updates, loss in ((5, 7.5), (10, last)):
        second.train(updates, 108 * updates, 400.0)
        second.valid(updates, 108 * updates, loss)
    return [first, folder / "phase2"]


def test_the_second_phase_goes_on_where_the_first_ends(tmp_path):
    phases = write_phases(tmp_path)
    history = read_history(phases)
    assert history.losses == {10: 8.5, 20: 8.0, 25: 7.5, 30: 7.0}
    assert history.training == {10: 9.5, 20: 9.5, 25: 9.5, 30: 9.5}
    assert (history.borders, history.last_update) == ([20], 30)
    assert history.at("hours", [0, 10, 20, 25, 30]) == pytest.approx([0, 0.1, 0.2, 0.35, 0.5])
    assert history.at("tokens", [0, 10, 20, 25, 30]) == pytest.approx([0, 1000, 2000, 4000, 6000])
    of_phases = [read_history([phase]).at("flops", [10])[0] for phase in phases]
    assert of_phases[1] / 4000 > of_phases[0] / 1000  # attention to 32 tokens costs more than to 16
    assert history.at("flops", [30]) == pytest.approx([2 * of_phases[0] + of_phases[1]])


def test_flops_of_another_packages_task_are_unknown(tmp_path):
    phases = write_phases(tmp_path, second_settings={"model": {"name": "roberta"}, "task": {"name": "masked_lm"}})
    assert all(math.isnan(flops) for flops in read_history(phases).at("flops", [20, 25]))
    said = invoke("curves", f"a={phases[1]}", "--against", "flops", "--output", tmp_path / "c.png")
    assert "a has no curve against FLOPs: no formula for --task masked_lm" in said


def test_folders_of_phases_in_one_picture_with_their_training_loss(tmp_path):
    for name, last in (("bert", 7.0), ("par", 6.5)):
        write_phases(tmp_path / name, last)
    output = tmp_path / "figure4.png"
    words = ("--against", "updates,hours", "--training", "--output", output)
    lines = table_in(invoke("curves", tmp_path / "bert", tmp_path / "par", *words))
    assert [(line[0], line[3], line[5], line[7]) for line in lines[2:]] == [
        ("bert", "30", "0.500", "7.000"),
        ("par", "30", "0.500", "6.500"),
    ]
    assert imread(output).shape[0] > 100
