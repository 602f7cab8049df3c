"""``lazyformer finetune`` and ``predict``: the whole way, stopped, resumed, and refused."""

import fcntl
import json
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from unittest import mock

import pytest
import torch
from helpers import ROOT
from in_process import invoke, refusal
from toy_squad import SIZES, START, write_articles

from lazyformer_fairseq.data.squad import read_squad, score
from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.finetuning import launch


@pytest.fixture
def options(toy_glue, tmp_path) -> list:
    return [
        *("finetune", f"m={START}", "--data", toy_glue, "--output", tmp_path / "out"),
        *"--tasks CoLA --lrs 1e-3 --epochs 8 --workers 1 --keep-checkpoints all".split(),
    ]


def squad_options(data: Path, output: Path, *more) -> list:
    return [
        *("finetune", f"m={START}", "--task", "squad", "--data", data, "--output", output, *SIZES),
        *("--lrs", "1e-3", "--seeds", "1,2", "--epochs", "1", "--gpus", "none", "--workers", "1", *more),
    ]


def test_prepare_tells_what_it_read(toy_glue, data_folder, tmp_path):
    arguments = [
        "finetune",
        "--task",
        "glue",
        "--data",
        toy_glue,
        "--tokenizer",
        data_folder,
        "--output",
        tmp_path / "out",
    ]
    output = invoke(*arguments, "--tasks", "RTE,STS-B", "--workers", "1")
    assert sorted(path.name for path in (tmp_path / "out" / "tasks").iterdir()) == ["RTE", "STS-B"]
    assert "dev.tsv" in output
    assert "RTE/train.tsv ends at line 65 and has 64 rows, but the official file has 2,490" in output


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("--tasks AX", "AX has no training data"),
        ("x=nowhere.pt", "nowhere.pt: no such file or folder"),
        ("x=broken.pt", "broken.pt: truncated, damaged or not a checkpoint"),
        ("--tokenizer nowhere", "nowhere: no such file or folder"),
        ("--tokenizer .", ".: no tokenizer found"),
        ("--data nowhere", "nowhere: no such file or folder"),
        ("--data .", "nor a GLUE folder such as CoLA"),
        ("--epochs RTE=3", "not among --tasks"),
        ("--epochs 10 MNLI=3", "MNLI=3 is not a checkpoint; separate the values of an option by commas"),
        ("--lrs 1e-5 2e-5", "2e-5 is not a checkpoint; separate the values of an option by commas"),
        ("--lrs 2", "2.0 is not in the range"),
        ("--seeds 1,1", "1 is specified twice"),
        ("--seeds one", "'one' is not a valid int"),
        ("--task squad --data .", "train-v1.1.json: no such file"),
        ("--task squad --max-length 384", "has 64 positions, but inputs have up to 384 tokens"),
        ("--task squad --tokenizer .", "no tokenizer found"),
    ],
)
def test_what_cannot_be_run_is_refused_before_anything_is_done(
    options, toy_squad, tmp_path, monkeypatch, change, words
):
    monkeypatch.chdir(tmp_path)
    Path("broken.pt").write_text("junk\n")
    given = squad_options(toy_squad, tmp_path / "out") if "squad" in change else options
    assert words in refusal(*given, *change.split())
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("words", [["finetune", START, "--output", "out"], ["predict", START, "--output", "out"]])
def test_ctrl_c_while_it_loads_ends_in_a_sentence(tmp_path, monkeypatch, words):
    monkeypatch.chdir(tmp_path)
    for name in ("choose_benchmark", "predict"):
        monkeypatch.setattr(launch, name, mock.Mock(side_effect=KeyboardInterrupt))
    assert re.fullmatch(r"stopped[:;] nothing (has run yet; rerun to resume|was written)\n", invoke(*words, code=130))
    assert not (tmp_path / "out").exists()


def states(runs: Path) -> dict[Path, tuple[int, int]]:
    return {
        path: (path.stat().st_ino, path.stat().st_mtime_ns)
        for name in ("result.json", "checkpoint_best.pt")
        for path in runs.glob(f"*/*/*/{name}")
        if (path.parent / "result.json").exists()
    }


def wait_until_nothing_runs(runs: Path) -> None:
    """A run holds a file while it lives. One that outlives its queue would not let this end."""
    for path in runs.glob("*/*/*/.lock"):
        with path.open() as file:
            while True:
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    time.sleep(0.05)


@pytest.mark.slow
def test_stopped_it_goes_on_with_nothing_repeated_or_lost(options, tmp_path, interruptible):
    runs, signals = tmp_path / "out" / "runs", [signal.SIGKILL, signal.SIGINT, signal.SIGTERM]
    seeds = range(1, len(signals) + 2)
    options += ["--seeds", ",".join(map(str, seeds))]
    before: dict = {}
    for count, stop in enumerate(signals, start=1):
        command = [sys.executable, "-c", "from lazyformer_fairseq.cli import main; main()", *map(str, options)]
        queue = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        while len(list(runs.glob("*/*/*/result.json"))) < count:
            assert queue.poll() is None, queue.stdout.read()
            time.sleep(0.02)
        queue.send_signal(stop)
        output, _ = queue.communicate()
        wait_until_nothing_runs(runs)
        if stop != signal.SIGKILL:
            assert queue.returncode == 130, output
            assert f"of {len(seeds)} runs are finished; rerun to resume" in output
        after = states(runs)
        assert before.items() <= after.items()
        before = after
    assert len(list(runs.glob("*/*/*/result.json"))) < len(seeds)

    done = f"{len(seeds)} of {len(seeds)} runs are finished"
    assert done in invoke(*options)
    after = states(runs)
    assert before.items() <= after.items()
    results = [json.loads(path.read_text()) for path in runs.glob("*/*/*/result.json")]
    assert sorted(result["seed"] for result in results) == list(seeds)
    assert {result["train_rows"] for result in results} == {64}
    assert not list(runs.glob("*/*/*/failed.json"))

    assert done in invoke(*options)  # nothing is left to do
    assert states(runs) == after


def test_a_report_ends_it_though_runs_have_failed(options, tmp_path):
    folder = tmp_path / "out" / "runs" / "m" / "CoLA" / "lr0.001_seed1"
    (folder / "checkpoint_best.pt" / "is a folder").mkdir(parents=True)  # no checkpoint can be written
    output = invoke(*options, "--seeds", "1,2", "--epochs", "1", code=1)
    assert "CoLA/train.tsv ends at line 64 and has 64 rows, but the official file has 8,551" in output
    assert "1 of 2 runs are finished" in output
    assert "failed: m CoLA lr0.001_seed1: IsADirectoryError: " in output
    assert json.loads((folder / "failed.json").read_text())["attempts"] == 2
    markdown = (tmp_path / "out" / "report" / "glue.md").read_text()
    assert markdown.partition("![")[0] in output and "* m on CoLA: the score is provisional" in markdown
    assert output.endswith(f"written to {tmp_path / 'out' / 'report'}\n")


# --- SQuAD


@pytest.fixture(scope="module")
def done(tmp_path_factory) -> Path:
    """A folder with the toy files, a grid of two runs on them in ``out``, and another task's grid in ``glue``."""
    folder = tmp_path_factory.mktemp("grid")
    write_articles(folder / "squad", train=4, dev=2)
    output = invoke(*squad_options(folder / "squad", folder / "out"))
    assert "2 of 2 runs are finished" in output
    assert (folder / "out" / "report" / "squad.md").read_text().partition("![")[0] in output
    (folder / "glue" / "runs").mkdir(parents=True)
    (folder / "glue" / "runs" / "grid.json").write_text('{"models": {}, "tasks": ["CoLA"], "lrs": [], "seeds": []}')
    return folder


def results(folder: Path) -> dict[str, dict]:
    return {path.parent.name: json.loads(path.read_text()) for path in folder.glob("out/runs/m/SQuAD/*/result.json")}


def test_a_grid_leaves_results_a_report_and_the_best_checkpoint(done):
    found = results(done)
    assert sorted(found) == ["lr0.001_seed1", "lr0.001_seed2"]
    for result in found.values():
        assert set(result["metrics"]["dev-v1.1"]) == {"f1", "exact_match"}
        assert set(result["baseline"]["dev-v1.1"]) == {"f1", "exact_match"}
        assert (result["train_rows"], result["settings"]["stride"]) == (24, 32)
    best = max(found, key=lambda name: found[name]["metrics"]["dev-v1.1"]["f1"])
    runs = done / "out" / "runs" / "m" / "SQuAD"
    assert [path.parent.name for path in runs.glob("*/checkpoint_best.pt")] == [best]
    state = torch.load(runs / best / "checkpoint_best.pt")
    epochs = state["extra_state"]["history"]["epochs"]
    assert epochs[-1]["metrics"] == found[best]["metrics"]


def test_rerun_it_repeats_nothing(done):
    before = {path: path.stat().st_mtime_ns for path in done.glob("out/runs/*/*/*/*.json")}
    assert "2 of 2 runs are finished" in invoke(*squad_options(done / "squad", done / "out"))
    assert {path: path.stat().st_mtime_ns for path in done.glob("out/runs/*/*/*/*.json")} == before
    with pytest.raises(UserError, match="epochs is 1 there, 3 here"):
        invoke(*squad_options(done / "squad", done / "out", "--epochs", "3"))


def test_predictions_are_the_official_evaluation_s_and_marked_alike(done, tmp_path):
    output = invoke("predict", done / "out", "--output", tmp_path / "answers", "--n-best", "3")
    texts = json.loads((tmp_path / "answers" / "m" / "predictions.json").read_text())
    n_best = json.loads((tmp_path / "answers" / "m" / "nbest_predictions.json").read_text())
    file = read_squad(done / "squad" / "dev-v1.1.json")
    assert list(texts) == list(n_best) == [question.id for question in file.questions]
    for question, paragraph in zip(file.questions, file.paragraph_of, strict=True):
        answers, context = n_best[question.id], file.contexts[paragraph]
        assert texts[question.id] == answers[0]["text"]
        assert all(answer["text"] == context[answer["start"] : answer["end"]] for answer in answers)
        assert 1 <= len(answers) <= 3
        assert sum(answer["probability"] for answer in answers) == pytest.approx(1)
    marked = max(result["metrics"]["dev-v1.1"]["f1"] for result in results(done).values())
    assert marked == pytest.approx(score(file, texts)["f1"])
    assert f"{len(texts)} answers" in output and f"f1 {100 * marked:.2f}" in output

    # A checkpoint alone, without its grid, answers a file without answers.
    content = json.loads((done / "squad" / "dev-v1.1.json").read_text())
    for article in content["data"]:
        for paragraph in article["paragraphs"]:
            for question in paragraph["qas"]:
                del question["answers"]
    (tmp_path / "questions.JSON").write_text(json.dumps(content))
    (run,) = [path.parent for path in done.glob("out/runs/m/SQuAD/*/checkpoint_best.pt")]
    shutil.copytree(run, tmp_path / "run")
    arguments = ["predict", tmp_path / "run", tmp_path / "questions.JSON"]
    assert invoke(*arguments, "--output", tmp_path / "one").endswith("one: 12 answers\n")
    assert json.loads((tmp_path / "one" / "predictions.json").read_text()) == texts

    content["data"][0]["paragraphs"][0]["qas"][0]["question"] *= 9
    (tmp_path / "long.json").write_text(json.dumps(content))
    said = invoke("predict", tmp_path / "run", tmp_path / "long.json", "--output", tmp_path / "cut")
    assert "1 of 12 questions of long.json is longer than the 16 tokens that the model reads; the excess" in said


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("predict START", "pass a file of questions, as in --data"),
        ("predict START --data squad/dev-v1.1.json", "has no span head 'squad'"),
        ("predict nowhere.pt --data squad/dev-v1.1.json", "nowhere.pt: no such file or folder"),
        ("predict START squad/dev-v1.1.json --data squad", "--data: cannot be combined with squad/dev-v1.1.json"),
        ("predict out --data out/runs/grid.json", "field 'data' is missing; use an unmodified official"),
        ("predict squad", "squad contains no checkpoint_best.pt"),
        ("predict out --output squad", "already exists"),
        ("finetune START --task squad", "data contains no prepared data; pass the official files with --data"),
        (
            "finetune START --task squad --data out/data --max-length 64",
            "--max-length: applies only if --data contains official files",
        ),
        (
            "finetune START --task squad --data squad --max-length 64 --output glue",
            " is from a grid for CoLA, not for SQuAD; use a different --output",
        ),
    ],
)
def test_what_cannot_be_done_with_files_and_grids_is_refused(done, tmp_path, monkeypatch, words, message):
    monkeypatch.chdir(done)
    given = [START if word == "START" else word for word in words.split()]
    assert message in refusal(*given, *([] if "--output" in words else ["--output", tmp_path / "new"]))
    assert not (tmp_path / "new").exists()
