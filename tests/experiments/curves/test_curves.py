"""``lazyformer curves``, on logs that fairseq's own progress bars write, of one phase and of several."""

import csv
import json
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from in_process import invoke, refusal
from matplotlib.image import imread
from training_logs import BERT, CAUSAL, LAZY, STAMPED, write_run, writing

from lazyformer_fairseq.experiments.curves.report import History, read_history


def write_log(path: Path, steps: str, config: str = BERT) -> Path:
    """Of a process that starts and then "train UPDATES SECONDS, valid UPDATES LOSS" and so on, as `Log` has them."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with writing(path) as log:
        for step in f"start, {steps}".split(", "):
            name, *numbers = step.split()
            numbers = [int(number) if number.isdigit() else float(number) for number in numbers]
            log.start(config) if name == "start" else getattr(log, name)(*numbers)
    return path


def rows_of(path: Path, *columns: str) -> list[tuple[str, ...]]:
    with path.open() as file:
        return [tuple(row[column] for column in columns) for row in csv.DictReader(file)]


def table_in(output: str) -> list[list[str]]:
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in output.splitlines() if "|" in line]


@pytest.mark.parametrize("pattern", [STAMPED, "%(message)s"])
@pytest.mark.parametrize("kind", ["simple", "json"])
def test_both_formats_tell_the_same_with_and_without_time_stamps(tmp_path, kind, pattern):
    history = read_history([write_run(tmp_path / "a.log", [9.0, 8.5, 8.25], kind=kind, pattern=pattern)])
    assert history.losses == {10: 9.0, 20: 8.5, 30: 8.25}
    assert (history.arch, history.pattern) == ("bert_tiny", "M1x2") and "per masked token" in history.measure
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


@pytest.mark.parametrize(
    ("logs", "losses", "axes"),
    [
        pytest.param(
            [
                # The last validation is lost: the process is killed, update 20 was saved.
                "train 10 360, valid 10 9, train 20 720, valid 20 8, train 30 1080, valid 30 1",
                # On a machine of twice the speed.
                "loaded 20, train 30 180, valid 30 7.5, train 40 360, valid 40 7",
            ],
            {10: 9.0, 20: 8.0, 30: 7.5, 40: 7.0},
            {"hours": [0.1, 0.2, 0.25, 0.3], "tokens": [1000, 2000, 3000, 4000]},
            id="a run that resumed is one curve",
        ),
        pytest.param(
            ["train 10 360, valid 10 9, train 20 720, valid 15 8", "loaded 10, train 20 360, valid 20 7.5"],
            {10: 9.0, 20: 7.5},
            {},
            id="what was validated after the checkpoint and not again is gone",
        ),
        pytest.param(
            ["train 10 360, valid 10 9, train 20 720, valid 20 8", "train 10 360, valid 10 9.5"],
            {10: 9.5},
            {"hours": [0.1]},
            id="a run that began anew forgets what stood before",
        ),
        pytest.param(
            ["train 10 360, valid 10 9, train 20 720, train 30 1080, valid 30 7, train 20 1440, valid 20 6"],
            {10: 9.0, 20: 6.0},
            {"hours": [0.1, 0.4]},
            id="a rollback within a process takes the updates back but not the hours",
        ),
        pytest.param(
            ["valid 0 12, train 10 360, valid 15 9, train 20 720, valid 25 8"],
            {0: 12.0, 15: 9.0, 25: 8.0},
            {"tokens": [0, 1500, 2500]},
            id="validation between and beyond the lines of training",
        ),
        pytest.param(
            ["valid 40 9, end 40 1440 50"],
            {40: 9.0},
            {"tokens": [2000], "hours": [0.4]},
            id="where a bar of tqdm logs no intervals the summary of an epoch tells tokens and time",
        ),
    ],
)
def test_a_log_is_replayed(tmp_path, logs, losses, axes):
    """In one file, or in one a process."""
    apart = [write_log(tmp_path / f"{number}.log", steps) for number, steps in enumerate(logs)]
    together = write_log(tmp_path / "all.log", ", start, ".join(logs))
    for history in (read_history(apart), read_history([together])):
        assert history.losses == losses
        for axis, values in axes.items():
            assert history.at(axis, losses) == pytest.approx(values), axis


def test_runs_in_one_picture_with_their_numbers_beside(tmp_path):
    write_run(tmp_path / "bert" / "train.log", [9.0, 8.0])
    write_run(tmp_path / "lazy" / "train.log", [9.0, 7.75], LAZY, "json")
    output = tmp_path / "results" / "loss.png"
    axes = "updates,tokens,hours,flops"
    lines = table_in(invoke("curves", tmp_path / "bert", tmp_path / "lazy", "--against", axes, "--output", output))
    assert [line[0] for line in lines[2:]] == ["bert_tiny", "lazyformer_m2x6_s_tiny"]
    assert lines[3][1:6] == ["M2x1", "2", "20", "2,000", "0.200"]
    assert output.read_bytes().startswith(b"\x89PNG")
    assert rows_of(output.with_suffix(".csv"), "run", "updates", "loss") == [
        *(("bert", "10", "9.0"), ("bert", "20", "8.0")),
        *(("lazy", "10", "9.0"), ("lazy", "20", "7.75")),
    ]
    flops = [float(each) for (each,) in rows_of(output.with_suffix(".csv"), "flops")]
    assert flops[3] < flops[1]  # the lazy one has no second product of queries and keys


def test_logs_of_one_name_are_one_run_in_the_order_of_time(tmp_path):
    first = write_run(tmp_path / "z.log", [9.0, 8.0])
    first.write_text(first.read_text().replace("20", "19", 1))  # a century before the other
    second = write_log(tmp_path / "a.log", "loaded 20, train 30 360, valid 30 7.0")
    invoke("curves", f"bert={second}", f"bert={first}", "--output", tmp_path / "c.png")
    assert rows_of(tmp_path / "c.csv", "loss") == [("9.0",), ("8.0",), ("7.0",)]


def test_a_second_split_goes_to_the_table_and_a_run_without_validation_is_named(tmp_path):
    with writing(tmp_path / "a.log") as log:
        log.start(BERT)
        log.train(10, 360)
        log.valid(10, 9.0)
        log.valid(10, 5.0, split="books")
    assert read_history([tmp_path / "a.log"]).losses == {10: 9.0}
    silent = write_log(tmp_path / "silent.log", "train 10 360", LAZY)
    said = invoke("curves", tmp_path / "a.log", silent, "--output", tmp_path / "c.png")
    assert rows_of(tmp_path / "c.csv", "split", "loss") == [("valid", "9.0"), ("books", "5.0")]
    assert f"silent: no validation in {silent} after 10 updates" in said


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("nowhere", "nowhere: no such file or folder"),
        ("empty", "log; our runs write train.log there"),
        ("silent.log", "nothing to draw: silent: no validation in silent.log, and no update"),
        (
            "bert.log causal.log",
            "do not compare (bert: validation loss, bits per masked token; causal: validation loss, bits per token)",
        ),
        ("bert.log copy/bert.log", "a run is called bert already; give NAME=copy/bert.log"),
        ("bert.log --against miles", "--against miles: give one or more of updates, tokens, hours, flops"),
        ("bert.log --against=", "--against : give one or more of updates"),
        ("bert.log --output c.pdf", "--output c.pdf: give a name that ends in .png"),
    ],
)
def test_mistakes_are_named(tmp_path, monkeypatch, words, message):
    monkeypatch.chdir(tmp_path)
    Path("empty").mkdir()
    Path("silent.log").touch()
    for name, config in (("bert.log", BERT), ("copy/bert.log", BERT), ("causal.log", CAUSAL)):
        write_run(Path(name), [9.0], config)
    assert message in refusal("curves", *words.split())


NO_NUMBERS = st.text(st.characters(exclude_categories=["N", "Cs"]))


@given(words=st.lists(NO_NUMBERS | st.sampled_from(["Infinity", "nan", "true", "{}", "1e999", "7"]), max_size=5))
def test_a_line_without_a_number_of_updates_is_passed_over(words):
    shapes = (
        '{{"epoch": 1, "valid_loss": {0}, "valid_num_updates": {0}}}',
        "epoch 001 | valid on 'valid' subset | loss {0} | num_updates {0}",
        "epoch 001: 7 / 9 loss={0}, wpb={0}, num_updates={0}",
        "Loaded checkpoint x (epoch 1 @ " + 5000 * "9" + " updates)",
        '{{"epoch": ' + 100_000 * "[" + "}}",
        '{{"epoch": 1, "valid_num_updates": 20, "valid_loss": 1' + 400 * "0" + "}}",
    )
    history = History()
    for word in words:
        for shape in shapes:
            history.hear(shape.format(word))
    assert set(history.splits.get("valid", ())) <= {7, 20} and history.starts == [0]
    assert (7 in history.splits.get("valid", ())) == ("7" in words)


# --- Phases, each a folder with its own log, its updates counted from zero

LONGER = BERT.replace("'tokens_per_sample': 16", "'tokens_per_sample': 32")


def write_phases(folder: Path, later: float = 7.0) -> list[Path]:
    """Two phases: 20 updates of 100 tokens in 0.2 hours; 10 updates of 400 tokens in 0.3, stopped and gone on with."""
    first = "train 10 360, valid 10 8.5, train 20 720, valid 20 8"
    second = "loaded 0, valid 0 99, train 5 540 400, valid 5 7.5"  # at 0 the weights that phase 1 ended with
    second += f", start, loaded 5, train 10 540 400, valid 10 {later}"
    return [
        write_log(folder / "phase1" / "train.log", first),
        write_log(folder / "phase2" / "train.log", second, LONGER),
    ]


def test_the_second_phase_goes_on_where_the_first_ends(tmp_path):
    log, later = write_phases(tmp_path)
    history = read_history([later, log])
    assert history.losses == {10: 8.5, 20: 8.0, 25: 7.5, 30: 7.0}
    assert history.training == {10: 9.5, 20: 9.5, 25: 9.5, 30: 9.5}
    assert (history.starts, history.last_update) == ([0, 20], 30)
    assert history.at("hours", [0, 10, 20, 25, 30]) == pytest.approx([0, 0.1, 0.2, 0.35, 0.5])
    assert history.at("tokens", [0, 10, 20, 25, 30]) == pytest.approx([0, 1000, 2000, 4000, 6000])
    first, second = history.phases
    assert second.flops_of_token > first.flops_of_token  # attention to 32 tokens costs more than to 16
    expected = 2000 * first.flops_of_token + 4000 * second.flops_of_token
    assert history.at("flops", [30]) == pytest.approx([expected])
    alone = read_history([log])
    assert (alone.losses, alone.starts) == ({10: 8.5, 20: 8.0}, [0])


def test_what_a_log_does_not_tell_of_a_phase_is_unknown_from_there_on(tmp_path):
    first, log = write_phases(tmp_path)
    log.write_text("".join(line for line in log.read_text().splitlines(keepends=True) if "dictionary" not in line))
    at_border, later = read_history([first, log]).at("flops", [20, 25])
    assert at_border > 0 and later != later
    said = invoke("curves", f"a={log}", "--against", "flops", "--output", tmp_path / "c.png")
    assert "a: no curve against flops: the log does not tell the size of the dictionary" in said


def test_folders_of_phases_in_one_picture_with_their_training_loss(tmp_path):
    for name, later in (("bert", 7.0), ("par", 6.5)):
        write_phases(tmp_path / name, later)
    output = tmp_path / "figure4.png"
    words = ("--against", "updates,hours", "--training", "--output", output)
    lines = table_in(invoke("curves", tmp_path / "bert", tmp_path / "par", *words))
    assert [(line[0], line[3], line[5], line[7]) for line in lines[2:]] == [
        ("bert", "30", "0.500", "7.000"),
        ("par", "30", "0.500", "6.500"),
    ]
    assert imread(output).shape[0] > 100
    rows = rows_of(output.with_suffix(".csv"), "run", "split", "updates")[:8]
    assert rows == [("bert", split, updates) for split in ("train", "valid") for updates in ("10", "20", "25", "30")]


# What a line may hold again and again; parts that begin what the reader looks for and do not end it.
REPEATED = [
    "Loaded checkpoint ",
    " (epoch 1 @ ",
    '{"epoch": ',
    '{"epoch": 1} ',
    "epoch 1: ",
    "epoch 1:   ",
    "epoch 1: 1 / 1 ",
    "epoch 1 | valid on '",
    "epoch 1 | loss ",
    "dictionary: 1",
    "'a': {",
    "'a': '",
    "'",
    "1",
    " ",
    "} ",
]
BEGINNINGS = [
    "",
    "Loaded checkpoint ",
    '{"epoch": 1, ',
    "{'_name': None, 'common': {",
    "epoch 1: 1 / 1 a=",
    "epoch 1 | loss 1",
]


def seconds_of(read) -> float:
    """The least processor time of three tries."""
    found = []
    for _ in range(3):
        began = time.process_time()
        read()
        found.append(time.process_time() - began)
    return min(found)


def assert_linear(read) -> None:
    """`read(size)` takes about as long for each part: eight times as much may take 24 times as long, not 64 times."""
    small = max(seconds_of(lambda: read(1)), 1e-3)  # less is below what a clock can tell
    assert seconds_of(lambda: read(8)) < 24 * small


@pytest.mark.parametrize("beginning", BEGINNINGS)
def test_one_long_line_takes_time_in_proportion_to_its_length(beginning):
    def read(size: int) -> None:
        for part in REPEATED:
            History().hear(beginning + part * (5000 * size // len(part)))

    assert_linear(read)


def test_many_splits_in_one_line_and_many_lines_take_time_in_proportion():
    def one_line(size: int) -> None:
        names = [f"s{split}_{name}" for split in range(100 * size) for name in ("num_updates", "loss")]
        numbers = {"epoch": 1, **dict.fromkeys(names, 1)}
        History().hear(json.dumps(numbers))

    def many_lines(size: int) -> None:
        history = History()
        for update in range(1, 100 * size):
            history.hear(f"epoch 1: {update} / 9 loss=1, num_updates={update}, wpb=2, wall=3")
        assert len(history.training) == 100 * size - 1

    assert_linear(one_line)
    assert_linear(many_lines)
