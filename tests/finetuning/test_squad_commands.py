"""``lazyformer finetune --task squad`` as a user gives it: the whole way, stopped, resumed, and refused."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from squad_grids import SIZES, START, write_articles

from lazyformer_fairseq.cli import main
from lazyformer_fairseq.data.squad import read_squad, score
from lazyformer_fairseq.errors import UserError


def invoke(*arguments, code: int = 0) -> str:
    """What a command prints; an error of the user's is raised."""
    result = CliRunner().invoke(main, list(map(str, arguments)), catch_exceptions=False)
    assert result.exit_code == code, result.output
    return result.output


def options(data: Path, output: Path, *more) -> list:
    return [
        *("finetune", f"m={START}", "--task", "squad", "--data", data, "--output", output, *SIZES),
        *("--lrs", "1e-3", "--seeds", "1", "2", "--epochs", "1", "--gpus", "none", "--workers", "1", *more),
    ]


@pytest.fixture(scope="module")
def done(tmp_path_factory) -> Path:
    """A folder with the toy files, and a grid of two runs on them in ``out``."""
    folder = tmp_path_factory.mktemp("grid")
    write_articles(folder / "squad", train=4, dev=2)
    output = invoke(*options(folder / "squad", folder / "out"))
    assert "2 of 2 runs are finished" in output
    assert (folder / "out" / "report" / "squad.md").read_text().partition("![")[0] in output
    return folder


def results(folder: Path) -> dict[str, dict]:
    return {path.parent.name: json.loads(path.read_text()) for path in folder.glob("out/runs/m/SQuAD/*/result.json")}


def test_a_grid_leaves_results_a_report_and_the_best_checkpoint(done):
    found = results(done)
    assert sorted(found) == ["lr0.001_seed1", "lr0.001_seed2"]
    for result in found.values():
        assert set(result["metrics"]["dev-v1.1"]) == {"f1", "exact_match"}
        strongest = max(result["baselines"].values(), key=lambda marks: marks["dev-v1.1"]["f1"])
        assert result["baseline"] == strongest
        assert (result["train_rows"], result["settings"]["stride"]) == (24, 32)
    best = max(found, key=lambda name: found[name]["metrics"]["dev-v1.1"]["f1"])
    runs = done / "out" / "runs" / "m" / "SQuAD"
    assert [path.parent.name for path in runs.glob("*/checkpoint_best.pt")] == [best]
    state = torch.load(runs / best / "checkpoint_best.pt")
    assert state["extra_state"]["best"] == pytest.approx(found[best]["metrics"]["dev-v1.1"]["f1"], abs=1e-6)


def test_rerun_it_repeats_nothing(done):
    before = {path: path.stat().st_mtime_ns for path in done.glob("out/runs/*/*/*/*.json")}
    assert "2 of 2 runs are finished" in invoke(*options(done / "squad", done / "out"))
    assert {path: path.stat().st_mtime_ns for path in done.glob("out/runs/*/*/*/*.json")} == before
    with pytest.raises(UserError, match="epochs is 1 there, 3 here"):
        invoke(*options(done / "squad", done / "out", "--epochs", "3"))


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
    assert f"{len(texts)} answers" in output
    assert f"f1 {100 * marked:.2f}" in output


def test_a_checkpoint_alone_answers_a_file_without_answers(done, tmp_path):
    content = json.loads((done / "squad" / "dev-v1.1.json").read_text())
    for article in content["data"]:
        for paragraph in article["paragraphs"]:
            for question in paragraph["qas"]:
                del question["answers"]
    (tmp_path / "questions.json").write_text(json.dumps(content))
    (run,) = [path.parent for path in done.glob("out/runs/m/SQuAD/*/checkpoint_best.pt")]
    shutil.copytree(run, tmp_path / "run")  # without its grid
    arguments = ["predict", tmp_path / "run", "--data", tmp_path / "questions.json"]
    assert invoke(*arguments, "--output", tmp_path / "one").endswith("one: 12 answers\n")
    invoke("predict", done / "out", "--output", tmp_path / "two")
    one, two = (json.loads((tmp_path / name / "predictions.json").read_text()) for name in ("one", "two/m"))
    assert one == two


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([START], "give the questions too, by --data"),
        ([START, "--data", "squad/dev-v1.1.json"], "has no span head 'squad'"),
        (["nowhere.pt", "--data", "squad/dev-v1.1.json"], "nowhere.pt: no such file or folder"),
        (["out", "--data", "out/runs/grid.json"], "not in SQuAD's official layout"),
        (["squad"], "squad: holds no checkpoint_best.pt"),
    ],
)
def test_what_cannot_be_predicted_is_refused(done, tmp_path, monkeypatch, arguments, words):
    monkeypatch.chdir(done)
    with pytest.raises(UserError, match=words):
        invoke("predict", *arguments, "--output", tmp_path / "answers")
    assert not (tmp_path / "answers").exists()


def test_a_filled_folder_is_not_overwritten(done, tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="exists already"):
        invoke("predict", done / "out", "--output", tmp_path)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (["--checkpoint", "x=broken.pt"], "broken.pt: truncated, damaged or no checkpoint"),
        (["--data", "."], "train-v1.1.json: no such file"),
        (["--max-length", "384"], "has 64 positions, but inputs have up to 384 tokens"),
        (["--tokenizer", "."], "no tokenizer there"),
    ],
)
def test_what_cannot_be_run_is_refused_before_anything_is_done(toy_squad, tmp_path, monkeypatch, change, words):
    monkeypatch.chdir(tmp_path)
    Path("broken.pt").write_text("junk\n")
    with pytest.raises(UserError, match=words):
        invoke(*options(toy_squad, tmp_path / "out", *change))
    assert not (tmp_path / "out").exists()


def test_sizes_belong_to_files_and_data_must_be_there(done, tmp_path):
    without_data = ["finetune", START, "--task", "squad", "--output", tmp_path]
    with pytest.raises(UserError, match="data: not prepared; give the official files by --data"):
        invoke(*without_data)
    with pytest.raises(UserError, match="--max-length: means something where --data has official files, alone"):
        invoke(*without_data, "--data", done / "out" / "data", "--max-length", "64")


def test_a_grid_of_other_tasks_stays_alone(toy_squad, tmp_path):
    (tmp_path / "out" / "runs").mkdir(parents=True)
    (tmp_path / "out" / "runs" / "grid.json").write_text('{"tasks": ["CoLA"]}')
    with pytest.raises(UserError, match="is a grid of CoLA, not of SQuAD; give another --output"):
        invoke(*options(toy_squad, tmp_path / "out"))
