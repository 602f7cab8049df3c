"""``lazyformer curves``, on logs that fairseq's own progress bars write."""

import csv
from pathlib import Path

import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st
from training_logs import BERT, CAUSAL, LAZY, STAMPED, write_run, writing

from lazyformer_fairseq.cli import main
from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.experiments.curves.report import Phase, read_history


def curves(*words: object):
    return CliRunner().invoke(main, ["curves", *map(str, words)])


def rows_of(path: Path) -> list[dict[str, str]]:
    with path.open() as file:
        return list(csv.DictReader(file))


@pytest.mark.parametrize("pattern", [STAMPED, "%(message)s"])
@pytest.mark.parametrize("kind", ["simple", "json"])
def test_both_formats_tell_the_same_with_and_without_time_stamps(tmp_path, kind, pattern):
    history = read_history([write_run(tmp_path / "a.log", [9.0, 8.5, 8.25], kind=kind, pattern=pattern)])
    assert history.losses == {10: 9.0, 20: 8.5, 30: 8.25}
    assert (history.arch, history.pattern) == ("bert_tiny", "M1x2") and "a masked token" in history.measure
    assert history.at("tokens", history.losses) == pytest.approx([1000, 2000, 3000])
    assert history.at("hours", history.losses) == pytest.approx([0.1, 0.2, 0.3])


def test_flops_are_three_forward_passes_counted_by_hand(tmp_path):
    history = read_history([write_run(tmp_path / "a.log", [9.0])])
    width, inner, length, symbols = 8, 16, 16, 50
    linear = length * (4 * width * width + 2 * width * inner)
    scores = 2 * length * length * width
    head = 4 * (width * width + width * symbols)  # a quarter of 16 tokens is masked
    forward = 2 * (2 * (linear + scores) + head)
    assert history.at("flops", [10])[0] == pytest.approx(3 * forward / length * 1000)


def test_flops_of_a_causal_model_reread_its_memory(tmp_path):
    history = read_history([write_run(tmp_path / "a.log", [9.0], CAUSAL)])
    width, inner, length, memory, symbols = 8, 16, 8, 4, 50
    projections = 2 * length * width * width + 2 * (length + memory) * width * width
    without_positions = projections + 2 * length * (length + memory) * width + 2 * 2 * length * width * inner
    forward = 2 * (without_positions + length * width * symbols)
    counted = history.at("flops", [10])[0] / 1000 * length / 3
    assert forward < counted < 1.5 * forward  # Transformer-XL's positions come on top
    assert history.measure == "validation loss, bits a token"


def test_a_run_that_resumed_is_one_curve(tmp_path):
    with writing(tmp_path / "first.log") as log:
        log.start(BERT)
        log.train(10, 360)
        log.valid(10, 9.0)
        log.train(20, 720)
        log.valid(20, 8.0)
        log.train(30, 1080)
        log.valid(30, 1.0)  # lost: the process is killed, update 20 was saved
    with writing(tmp_path / "resumed.log") as log:
        log.start(BERT)
        log.loaded(20)
        log.train(30, 180)  # on a machine of twice the speed
        log.valid(30, 7.5)
        log.train(40, 360)
        log.valid(40, 7.0)
    history = read_history([tmp_path / "first.log", tmp_path / "resumed.log"])
    assert history.losses == {10: 9.0, 20: 8.0, 30: 7.5, 40: 7.0}
    assert history.at("hours", history.losses) == pytest.approx([0.1, 0.2, 0.25, 0.3])
    assert history.at("tokens", history.losses) == pytest.approx([1000, 2000, 3000, 4000])


def test_what_was_validated_after_the_checkpoint_and_not_again_is_gone(tmp_path):
    with writing(tmp_path / "a.log") as log:
        log.start(BERT)
        log.train(10, 360)
        log.valid(10, 9.0)
        log.train(20, 720)
        log.valid(15, 8.0)
        log.start(BERT)
        log.loaded(10)
        log.train(20, 360)
        log.valid(20, 7.5)
    assert read_history([tmp_path / "a.log"]).losses == {10: 9.0, 20: 7.5}


def test_a_run_that_began_anew_forgets_what_stood_before(tmp_path):
    write_run(tmp_path / "a.log", [9.0, 8.0, 7.0])
    write_run(tmp_path / "a.log", [9.5])
    history = read_history([tmp_path / "a.log"])
    assert history.losses == {10: 9.5}
    assert history.at("hours", [10]) == pytest.approx([0.1])


def test_a_rollback_within_a_process_takes_the_updates_back_but_not_the_hours(tmp_path):
    with writing(tmp_path / "a.log") as log:
        log.start(BERT)
        for updates, wall in ((10, 360), (20, 720), (30, 1080), (20, 1440)):
            log.train(updates, wall)
            log.valid(updates, 9 - wall / 1000)
    history = read_history([tmp_path / "a.log"])
    assert history.losses == {10: 8.64, 20: 7.56}
    assert history.at("hours", history.losses) == pytest.approx([0.1, 0.4])


def test_validation_between_and_beyond_the_lines_of_training(tmp_path):
    with writing(tmp_path / "a.log") as log:
        log.start(BERT)
        log.valid(0, 12.0)
        log.train(10, 360)
        log.valid(15, 9.0)
        log.train(20, 720)
        log.valid(25, 8.0)
    assert read_history([tmp_path / "a.log"]).at("tokens", [0, 15, 25]) == pytest.approx([0, 1500, 2500])


def test_the_summary_of_an_epoch_tells_tokens_and_time_where_nothing_else_does(tmp_path):
    with writing(tmp_path / "a.log") as log:  # a bar of tqdm logs no intervals
        log.start(BERT)
        log.valid(40, 9.0)
        log.end(40, 1440, tokens=50)
    history = read_history([tmp_path / "a.log"])
    assert [history.at(axis, [40])[0] for axis in ("tokens", "hours")] == pytest.approx([2000, 0.4])


def test_runs_in_one_picture_with_their_numbers_beside(tmp_path):
    write_run(tmp_path / "bert" / "train.log", [9.0, 8.0])
    write_run(tmp_path / "lazy" / "train.log", [9.0, 7.75], LAZY, "json")
    output = tmp_path / "results" / "loss.png"
    done = curves(tmp_path / "bert", tmp_path / "lazy", "--against", "updates,tokens,hours,flops", "--output", output)
    assert done.exit_code == 0, done.output
    lines = [[cell.strip() for cell in line.split("|")[1:-1]] for line in done.output.splitlines() if "|" in line]
    assert [line[0] for line in lines[2:]] == ["bert_tiny", "lazyformer_m2x6_s_tiny"]
    assert lines[3][1:6] == ["M2x1", "2", "20", "2,000", "0.200"]
    assert output.read_bytes().startswith(b"\x89PNG")
    rows = rows_of(output.with_suffix(".csv"))
    assert [(row["run"], row["updates"], row["loss"]) for row in rows] == [
        *(("bert", "10", "9.0"), ("bert", "20", "8.0")),
        *(("lazy", "10", "9.0"), ("lazy", "20", "7.75")),
    ]
    assert float(rows[3]["flops"]) < float(rows[1]["flops"])  # the lazy one has no second product of queries and keys


def test_logs_of_one_name_are_one_run_in_the_order_of_time(tmp_path):
    first, second = tmp_path / "z.log", tmp_path / "a.log"
    write_run(first, [9.0, 8.0])
    first.write_text(first.read_text().replace("20", "19", 1))  # a century before the other
    with writing(second) as log:
        log.start(BERT)
        log.loaded(20)
        log.train(30, 360)
        log.valid(30, 7.0)
    done = curves(f"bert={second}", f"bert={first}", "--output", tmp_path / "c.png")
    assert done.exit_code == 0, done.output
    assert [row["loss"] for row in rows_of(tmp_path / "c.csv")] == ["9.0", "8.0", "7.0"]


def test_a_second_split_goes_to_the_table_of_numbers_alone(tmp_path):
    with writing(tmp_path / "a.log") as log:
        log.start(BERT)
        log.train(10, 360)
        log.valid(10, 9.0)
        log.valid(10, 5.0, split="books")
    assert read_history([tmp_path / "a.log"]).losses == {10: 9.0}
    assert curves(tmp_path / "a.log", "--output", tmp_path / "c.png").exit_code == 0
    assert [(row["split"], row["loss"]) for row in rows_of(tmp_path / "c.csv")] == [("valid", "9.0"), ("books", "5.0")]


def test_a_run_without_validation_is_named_and_the_others_are_drawn(tmp_path):
    write_run(tmp_path / "good.log", [9.0])
    with writing(tmp_path / "silent.log") as log:
        log.start(LAZY)
        log.train(10, 360)
    done = curves(tmp_path / "good.log", tmp_path / "silent.log", "--output", tmp_path / "c.png")
    assert done.exit_code == 0
    assert f"silent: no validation in {tmp_path / 'silent.log'} after 10 updates" in done.output


def test_what_the_log_does_not_tell_is_said(tmp_path):
    text = write_run(tmp_path / "a.log", [9.0]).read_text()
    (tmp_path / "a.log").write_text("\n".join(line for line in text.splitlines() if "dictionary" not in line))
    done = curves(tmp_path / "a.log", "--against", "flops", "--output", tmp_path / "c.png")
    assert done.exit_code == 0
    assert "a: no curve against flops: the log does not tell the size of the dictionary" in done.output


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["nowhere"], "nowhere: no such file or folder"),
        (["empty"], "holds no .*log; our runs write train.log there"),
        (["silent.log"], "nothing to draw: silent: no validation in silent.log, and no update"),
        (["bert.log", "causal.log"], "do not compare .bert: .*masked token; causal: .*a token"),
        (["bert.log", "copy/bert.log"], "a run is called bert already; give NAME=copy/bert.log"),
        (["bert.log", "--against", "miles"], "--against miles: there is no such axis"),
        (["bert.log", "--output", "c.pdf"], "--output c.pdf: give a name that ends in .png"),
    ],
)
def test_mistakes_are_named(tmp_path, monkeypatch, words, message):
    monkeypatch.chdir(tmp_path)
    Path("empty").mkdir()
    Path("silent.log").touch()
    write_run(Path("bert.log"), [9.0])
    write_run(Path("copy/bert.log"), [9.0])
    write_run(Path("causal.log"), [9.0], CAUSAL)
    done = curves(*words)
    assert isinstance(done.exception, UserError)
    with pytest.raises(UserError, match=message):
        raise done.exception


NO_NUMBERS = st.text(st.characters(exclude_categories=["N", "Cs"]))


@given(words=st.lists(NO_NUMBERS | st.sampled_from(["Infinity", "nan", "{}", "1e999", "7"]), max_size=5))
def test_a_line_without_a_number_of_updates_is_passed_over(words):
    shapes = (
        '{{"epoch": 1, "valid_loss": {0}, "valid_num_updates": {0}}}',
        "epoch 001 | valid on 'valid' subset | loss {0} | num_updates {0}",
        "epoch 001: 7 / 9 loss={0}, wpb={0}, num_updates={0}",
    )
    phase = Phase()
    for word in words:
        for shape in shapes:
            phase.hear(shape.format(word))
    assert set(phase.splits.get("valid", ())) <= {7}
    assert (7 in phase.splits.get("valid", ())) == ("7" in words)
