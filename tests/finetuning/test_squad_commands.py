"""``lazyformer squad`` as a user gives it: the whole way, stopped, resumed, and refused."""

import json
import re
import shutil
from collections import Counter
from pathlib import Path

import fairseq_cli.train
import pytest
import torch
from click.testing import CliRunner
from squad_grids import SIZES, START, write_articles

from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.finetuning.checkpoints import load_start_models
from lazyformer_fairseq.finetuning.commands import squad
from lazyformer_fairseq.finetuning.grid import Grid
from lazyformer_fairseq.finetuning.one_run import fine_tune
from lazyformer_fairseq.finetuning.squad_data import Preparation, prepare
from lazyformer_fairseq.finetuning.tasks.squad import BENCHMARK as SQUAD


def invoke(*arguments, code: int = 0) -> str:
    """What a command prints; an error of the user's is raised."""
    result = CliRunner().invoke(squad, list(map(str, arguments)), catch_exceptions=False)
    assert result.exit_code == code, result.output
    return result.output


def options(data: Path, output: Path, *more) -> list:
    return [
        *("run", "--checkpoint", f"m={START}", "--data", data, "--output", output, *SIZES),
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


def overlap(answer: str, prediction: str) -> float:
    """F1 as the official evaluation has it, for texts without punctuation inside words."""
    bags = [Counter(set_free(text)) for text in (answer, prediction)]
    shared = sum(min(bags[0][word], bags[1][word]) for word in bags[0])
    return 2 * shared / sum(map(len, map(set_free, (answer, prediction)))) if shared else 0.0


def set_free(text: str) -> list[str]:
    words = re.findall(r"\w+", text.lower())
    return [word for word in words if word not in ("a", "an", "the")]


def results(folder: Path) -> dict[str, dict]:
    return {path.parent.name: json.loads(path.read_text()) for path in folder.glob("out/runs/m/SQuAD/*/result.json")}


def test_a_grid_leaves_results_a_report_and_the_best_checkpoint(done):
    found = results(done)
    assert sorted(found) == ["lr0.001_seed1", "lr0.001_seed2"]
    for result in found.values():
        assert set(result["metrics"]["dev-v1.1"]) == {"f1", "exact_match"}
        strongest = max(result["baselines"].values(), key=lambda marks: marks["dev-v1.1"]["f1"])
        assert result["baseline"] == strongest
        assert (result["train_rows"], result["settings"]["stride"]) == (24, 16)
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
    output = invoke("predict", "--output", done / "out", "--to", tmp_path / "answers", "--n-best", "3")
    texts = json.loads((tmp_path / "answers" / "m" / "predictions.json").read_text())
    n_best = json.loads((tmp_path / "answers" / "m" / "nbest_predictions.json").read_text())
    articles = json.loads((done / "squad" / "dev-v1.1.json").read_text())["data"]
    asked = [
        (question, paragraph["context"])
        for article in articles
        for paragraph in article["paragraphs"]
        for question in paragraph["qas"]
    ]
    assert list(texts) == list(n_best) == [question["id"] for question, _ in asked]
    total = 0.0
    for question, context in asked:
        answers = n_best[question["id"]]
        assert texts[question["id"]] == answers[0]["text"]
        assert all(answer["text"] == context[answer["start"] : answer["end"]] for answer in answers)
        assert 1 <= len(answers) <= 3
        assert sum(answer["probability"] for answer in answers) == pytest.approx(1)
        total += max(overlap(answer["text"], texts[question["id"]]) for answer in question["answers"])
    marked = max(result["metrics"]["dev-v1.1"]["f1"] for result in results(done).values())
    assert marked == pytest.approx(total / len(asked))
    assert f"{len(asked)} answers" in output
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
    arguments = ["predict", "--checkpoint", tmp_path / "run", "--file", tmp_path / "questions.json"]
    assert invoke(*arguments, "--to", tmp_path / "one").endswith("one: 12 answers\n")
    invoke("predict", "--output", done / "out", "--to", tmp_path / "two")
    one, two = (json.loads((tmp_path / name / "predictions.json").read_text()) for name in ("one", "two/m"))
    assert one == two


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--checkpoint", START], "give the questions too, by --file"),
        (["--checkpoint", START, "--file", "squad/dev-v1.1.json"], "has no span head 'squad'"),
        (["--checkpoint", "nowhere.pt", "--file", "squad/dev-v1.1.json"], "nowhere.pt: no such file or folder"),
        (["--output", "out", "--max-length", "80", "--max-question-length", "9"], "the model has 64 positions"),
        (["--output", "out", "--file", "out/runs/grid.json"], "not in SQuAD's official layout"),
        (["--output", "squad"], "grid.json: no such file; give the folder that `lazyformer squad run` wrote"),
    ],
)
def test_what_cannot_be_predicted_is_refused(done, tmp_path, monkeypatch, arguments, words):
    monkeypatch.chdir(done)
    with pytest.raises(UserError, match=words):
        invoke("predict", "--to", tmp_path / "answers", *arguments)
    assert not (tmp_path / "answers").exists()


def test_a_filled_folder_is_not_overwritten(done, tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="exists already"):
        invoke("predict", "--output", done / "out", "--to", tmp_path)
    invoke("predict", "--to", tmp_path / "new", code=2)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (["--checkpoint", "x=broken.pt"], "broken.pt: truncated, damaged or no checkpoint"),
        (["--data", "."], "train-v1.1.json: no such file"),
        (["--prepared", "."], "--data and --prepared: give one of them"),
        (["--max-length", "384"], "has 64 positions, but inputs have up to 384 tokens"),
        (["--dev-articles", "20"], "has 8 articles, so that every 20th cannot be held out"),
        (["--tokenizer", "."], "no tokenizer there"),
        (["--slurm", "timeout_min=5"], "--slurm: means something with --executor slurm alone"),
    ],
)
def test_what_cannot_be_run_is_refused_before_anything_is_done(toy_squad, tmp_path, monkeypatch, change, words):
    monkeypatch.chdir(tmp_path)
    Path("broken.pt").write_text("junk\n")
    with pytest.raises(UserError, match=words):
        invoke(*options(toy_squad, tmp_path / "out", *change))
    assert not (tmp_path / "out").exists()


def test_sizes_belong_to_files_and_data_must_be_there(done, tmp_path):
    without_data = ["run", "--checkpoint", START, "--output", tmp_path]
    with pytest.raises(UserError, match="data: not prepared; run `lazyformer squad prepare`"):
        invoke(*without_data)
    with pytest.raises(UserError, match="--stride: means something with --data alone"):
        invoke(*without_data, "--prepared", done / "out" / "data", "--stride", "8")


def test_a_grid_of_other_tasks_stays_alone(toy_squad, tmp_path):
    (tmp_path / "out" / "runs").mkdir(parents=True)
    (tmp_path / "out" / "runs" / "grid.json").write_text('{"tasks": ["CoLA"]}')
    with pytest.raises(UserError, match="is a grid of CoLA, not of SQuAD; give another --output"):
        invoke(*options(toy_squad, tmp_path / "out"))


def test_interrupted_it_says_so_without_a_traceback(done, monkeypatch):
    def interrupted(queue):
        raise KeyboardInterrupt

    monkeypatch.setattr("lazyformer_fairseq.finetuning.queue.RunQueue.run", interrupted)
    output = invoke(*options(done / "squad", done / "out"), code=130)
    assert output.endswith("stopped: 0 of 2 runs are finished; rerun to resume\n")


def test_a_long_run_goes_on_from_its_last_epoch(toy_squad, tmp_path, monkeypatch):
    monkeypatch.setattr(SQUAD.__class__, "rows_worth_resuming", 1)
    sizes = {"max_length": 64, "stride": 16, "max_question_length": 16}
    prepared = prepare(Preparation(data=toy_squad, tokenizer=START.parent / "tokenizer", output=tmp_path, **sizes))
    models, tasks = load_start_models({"m": START}, prepared.tokenizer_folder), {"SQuAD": prepared}

    def run_in(output: str):
        what = {"benchmark": SQUAD, "models": models, "own": SQUAD.own_settings(None, tasks)}
        return Grid(output=tmp_path / output, tasks=tasks, lrs=[1e-3], seeds=[1], epochs={"SQuAD": 2}, **what).runs[0]

    whole, one = run_in("whole"), run_in("one")
    fine_tune(whole, START)
    original = fairseq_cli.train.validate_and_save

    def killed_in_the_second_epoch(cfg, trainer, task, epoch_itr, *rest):
        if epoch_itr.epoch == 2:
            raise KeyboardInterrupt
        return original(cfg, trainer, task, epoch_itr, *rest)

    monkeypatch.setattr(fairseq_cli.train, "validate_and_save", killed_in_the_second_epoch)
    with pytest.raises(KeyboardInterrupt):
        fine_tune(one, START)
    monkeypatch.setattr(fairseq_cli.train, "validate_and_save", original)
    assert one.result() is None
    fine_tune(one, START)
    assert "epoch 001 | valid" not in (one.folder / "train.log").read_text().rpartition("=== fairseq-train")[2]
    assert one.result()["metrics"] == whole.result()["metrics"]
