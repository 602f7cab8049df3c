"""A task of one's own: from files of labels to a model that labels texts, and what is said where a file is wrong."""

import csv
import json
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers import NAMES, ROOT, THINGS
from in_process import invoke, refusal
from toy_squad import START

from lazyformer_fairseq.data.labelled_files import TaskDescription
from lazyformer_fairseq.data.prepared_folder import PreparedOwnTask, PreparedTask
from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.fairseq_plugin.models import LazyFormerModel
from lazyformer_fairseq.finetuning import predict_texts
from lazyformer_fairseq.finetuning.grid import Run
from lazyformer_fairseq.finetuning.launch import choose_benchmark, grid_and_executor
from lazyformer_fairseq.finetuning.one_run import fine_tune
from lazyformer_fairseq.finetuning.settings import GridSettings
from lazyformer_fairseq.trained.hub import LazyFormerHub, tasks_of_heads

TRAINED_MODELS = ROOT / "tests" / "fixtures" / "checkpoints"
MOODS = ("calm", "glad", "sad")


def sentences(count: int) -> list[tuple[str, str]]:
    """Texts and their moods, which their first word decides."""
    first = dict(zip(MOODS, ("the", "anna", "ben"), strict=True))
    texts = [f"sees the {thing} near {name}" for thing in THINGS for name in NAMES]
    return [(f"{first[MOODS[n % 3]]} {texts[n % len(texts)]}", MOODS[n % 3]) for n in range(count)]


def write(path: Path, *rows: tuple[str, ...]) -> Path:
    """Rows in the format of the file's ending, the first has the columns' names."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", encoding="utf-8", newline="") as file:
        if path.suffix == ".csv":
            csv.writer(file).writerows(rows)
        elif path.suffix == ".jsonl":
            file.writelines(json.dumps(dict(zip(rows[0], row, strict=True))) + "\n" for row in rows[1:])
        else:
            file.writelines("\t".join(row) + "\n" for row in rows)
    return path


def settings_of(folder: Path, data: Path, **more) -> GridSettings:
    shared = {"checkpoints": (f"m={START}",), "output": folder / "out", "data": data, "gpus": "none"}
    return GridSettings(**{**shared, "lrs": (1e-2,), "seeds": (1,), "epochs": ("12",), "batch_size": 8, **more})


def trained(given: GridSettings, task: str | None = None) -> Run:
    grid, _ = grid_and_executor(*choose_benchmark(task, given))
    (run,) = grid.runs
    grid.write()
    fine_tune(run)
    return run


@pytest.fixture(scope="module")
def moods(tmp_path_factory) -> Path:
    """A folder with ``moods``, and ``out``, what came of it."""
    folder = tmp_path_factory.mktemp("own")
    for name, rows in (("train", sentences(96)), ("dev", sentences(21))):
        write(folder / "moods" / f"{name}.tsv", ("text", "label"), *rows)
    options = "--lrs 1e-2 --seeds 1 --epochs 12 --batch-size 8 --gpus none --workers 1".split()
    said = invoke("finetune", f"m={START}", "--data", folder / "moods", "--output", folder / "out", *options)
    assert "moods: 3 classes, calm, glad, sad; accuracy selects epoch and rate" in said
    assert "macro_f1" in said and f"to use it: lazyformer predict {folder / 'out'} texts.tsv" in said
    assert (folder / "out" / "report" / "moods.md").is_file()
    return folder


@pytest.fixture(scope="module")
def run_of_moods(moods) -> Path:
    (result,) = (moods / "out").rglob("result.json")
    assert json.loads(result.read_text())["metrics"]["dev"]["accuracy"] == 1, "it learns nothing that could be tested"
    return result.parent


def test_classes_keep_their_names_to_predictions_and_exports(moods, run_of_moods, tmp_path):
    said = invoke("predict", moods / "out", moods / "moods" / "dev.tsv", "--output", tmp_path / "all.tsv")
    assert "all.tsv: 21 rows\nby the file's own labels: accuracy 100.00, macro_f1 100.00, matthews 100.00" in said
    first, *rows = [line.split("\t") for line in (tmp_path / "all.tsv").read_text().splitlines()]
    assert first == ["text", "label", "prediction", "probability"]
    assert [(row[0], row[2]) for row in rows] == sentences(21) and all(0.34 < float(row[3]) <= 1 for row in rows)

    loaded = LazyFormerModel.from_pretrained(run_of_moods)
    answers = loaded.predict([text for text, _ in sentences(21)])
    assert [answer.label for answer in answers] == [label for _, label in sentences(21)]
    assert set(answers[0].probabilities) == set(MOODS) and sum(answers[0].probabilities.values()) == pytest.approx(1)
    assert loaded.tasks["own_moods"].longest == 64  # longer texts are cut as in training
    invoke("export", moods / "out", tmp_path / "model")
    again = LazyFormerModel.from_pretrained(tmp_path / "model").predict([text for text, _ in sentences(21)])
    assert again == answers

    pytest.importorskip("transformers")
    invoke("export", run_of_moods, tmp_path / "hf", "--to", "huggingface")
    config = json.loads((tmp_path / "hf" / "config.json").read_text())
    assert config["id2label"] == {"0": "calm", "1": "glad", "2": "sad"}
    assert "own_moods: calm, glad, sad" in (tmp_path / "hf" / "README.md").read_text()


@pytest.mark.parametrize("ending", ["csv", "jsonl", "TXT"])
def test_texts_of_every_format_are_labelled_alike(moods, run_of_moods, tmp_path, monkeypatch, ending):
    monkeypatch.setattr(predict_texts, "ROWS_AT_ONCE", 4)
    rows = [(text, mood) for text, mood in sentences(9)]
    if ending == "csv":  # what only quotation marks keep together, and more than csv takes of itself
        rows[0] = ('the "river", sees\nthe garden' + " " * 140_000, "calm")
    header = [] if ending == "TXT" else [("text",)]
    write(tmp_path / f"x.{ending}", *header, *((text,) for text, _ in rows))
    objects = [{"text": text, **({"id": n, "of": [None]} if n else {})} for n, (text, _) in enumerate(rows)]
    if ending == "jsonl":
        (tmp_path / "x.jsonl").write_text("".join(f"{json.dumps(each)}\n" for each in objects))
    said = invoke("predict", run_of_moods, tmp_path / f"x.{ending}")
    assert "9 rows" in said and "labels" not in said
    path = tmp_path / f"x.predictions.{'tsv' if ending == 'TXT' else ending}"
    text = path.read_text()
    if ending == "jsonl":
        answers = [json.loads(line) for line in text.splitlines()]
        assert all(list(one) == [*own, "prediction", "probability"] for one, own in zip(answers, objects, strict=True))
        assert [{**one, **own} for one, own in zip(answers, objects, strict=True)] == answers
        found = [(one["text"], one["prediction"]) for one in answers]
    else:
        found = list(csv.reader(text.splitlines(True), delimiter="," if ending == "csv" else "\t"))[1:]
    assert [tuple(row[:2]) for row in found] == rows
    assert "exists already" in refusal("predict", run_of_moods, tmp_path / f"x.{ending}")


def test_scores_of_any_range_train_and_come_back_in_their_unit(tmp_path):
    value = {"calm": -10.0, "glad": 1000.25, "sad": 10.0}
    for name, rows in (("train", sentences(96)), ("valid", sentences(21))):
        write(tmp_path / "degrees" / f"{name}.csv", ("Text", "target"), *((t, str(value[m])) for t, m in rows))
    run = trained(settings_of(tmp_path, tmp_path / "degrees", lrs=(3e-3,), epochs=("16",)))
    assert run.result().selected_by == "spearman"
    loaded = LazyFormerModel.from_pretrained(run.folder)
    texts = [text for text, _ in sentences(21)]
    errors = [
        abs(answer.label - value[mood]) for answer, (_, mood) in zip(loaded.predict(texts), sentences(21), strict=True)
    ]
    assert max(errors) < 150 and loaded.predict(texts)[0].probability is None  # half a deviation is 237
    said = invoke("predict", run.folder, tmp_path / "degrees" / "valid.csv")
    assert float(re.search(r"mean absolute error ([\d.]+)", said)[1]) == pytest.approx(np.mean(errors), rel=1e-3)
    with (tmp_path / "degrees" / "valid.predictions.csv").open(newline="") as file:
        written = [float(row["prediction"]) for row in csv.DictReader(file)]
    assert written == pytest.approx([answer.label for answer in loaded.predict(texts)], rel=1e-7)
    assert float(loaded.predict("own_degrees", texts[0])) == pytest.approx(loaded.predict(texts[:1])[0].label)
    invoke("export", run.folder, tmp_path / "ours")  # in the unit of training: it goes on as the checkpoint does
    again = LazyFormerModel.from_pretrained(tmp_path / "ours")
    assert again.predict(texts) == loaded.predict(texts) and again.tasks == loaded.tasks
    assert torch.equal(*(each.model.classification_heads["own_degrees"].out_proj.weight for each in (again, loaded)))
    pytest.importorskip("transformers")
    from transformers import AutoModelForSequenceClassification

    invoke("export", run.folder, tmp_path / "hf", "--to", "huggingface")
    model = AutoModelForSequenceClassification.from_pretrained(tmp_path / "hf", trust_remote_code=True)
    logits = model(loaded.encode(texts[0])).logits.detach()
    assert float(logits) == pytest.approx(loaded.predict(texts[:1])[0].label, rel=1e-4)


def test_a_task_of_glue_is_a_folder_of_ones_own_too(toy_glue, prepared, tmp_path):
    """One reader, one engine: the same ids, the same classes, the same options of fairseq-train."""
    given = settings_of(tmp_path, toy_glue / "RTE", max_length=64)
    grid, _ = grid_and_executor(*choose_benchmark(None, given))
    own = PreparedOwnTask.load(tmp_path / "out" / "tasks" / "RTE")
    assert own.task.is_pair and own.task.labels == prepared["RTE"].task.labels
    for split in ("train", "valid"):
        found, wanted = (each.read(split, None, 2) for each in (own, prepared["RTE"]))
        assert [ids.tolist() for ids in found.inputs] == [ids.tolist() for ids in wanted.inputs]
        assert found.targets.tolist() == wanted.targets.tolist()
    (run,) = grid.runs
    assert "--glue-task" not in run.command(cpu=True)
    assert isinstance(choose_benchmark(None, settings_of(tmp_path, None))[0].row.labels, tuple)  # as OUTPUT has it
    assert choose_benchmark(None, settings_of(tmp_path / "new", toy_glue))[0].name == "GLUE"
    assert type(prepared["RTE"]) is PreparedTask


def test_a_yaml_file_says_what_the_files_do_not(tmp_path):
    rows = [(mood, text, text) for text, mood in sentences(12)]
    for name in ("a", "b"):
        write(tmp_path / "files" / f"{name}.tsv", *rows)
    lines = "name: Moods", "data: files", "train: a.tsv", "dev: b.tsv", "text: [2, 3]", "label: 1"
    (tmp_path / "moods.yaml").write_text("\n".join([*lines, "labels: [sad, calm, glad]", "metric: matthews"]))
    benchmark, given = choose_benchmark(str(tmp_path / "moods.yaml"), settings_of(tmp_path, None))
    assert given.data == tmp_path / "files" and benchmark.row.labels == ("sad", "calm", "glad")
    assert benchmark.row.metrics == ("matthews", "accuracy", "macro_f1") and benchmark.row.is_pair
    said = choose_benchmark(str(tmp_path / "moods.yaml"), settings_of(tmp_path, None, metric="accuracy"))[0]
    assert said.row.selecting_metric == "accuracy"
    write(tmp_path / "stars.tsv", ("text", "score"), *((text, str(n % 2)) for n, (text, _) in enumerate(sentences(4))))
    (tmp_path / "stars.yaml").write_text("train: stars.tsv\ndev: stars.tsv\nlabels: [1, 0]")
    stars = choose_benchmark(str(tmp_path / "stars.yaml"), settings_of(tmp_path, None))[0].row
    assert stars.labels == ("1", "0") and not stars.is_regression, "a score, unless labels are given"


GOOD = "text\tlabel\na b\tx\nc d\ty\n"


@pytest.mark.parametrize(
    ("train", "dev", "options", "words"),
    [
        ("a b\tx\nc d\ty\n", GOOD, "", r"train.tsv, line 1: names no column of texts, but 'a b', 'x'. Put a"),
        ("text\tmood\na\tx\n", GOOD, "", "line 1: names no column of labels, but 'text', 'mood'.*--label"),
        (GOOD, "a b\tx\n", "", r"dev.tsv, line 1: the header lacks 'text', 'label'"),
        (GOOD, "text\tlabel\na\tz\n", "", r"dev.tsv, line 2: label 'z' is none of bad's labels x, y.*mend the row"),
        ("text\tlabel\na\tx\nb\tx\n", GOOD, "", r"train.tsv: all 2 rows have the label 'x'; give rows of two classes"),
        ("text\tlabel\na\tx\nb\n", GOOD, "", "train.tsv, line 3: found 1 field, needed 2"),
        ("text\tlabel\na\tx\nb\t\n", GOOD, "", "train.tsv, line 3: the label is empty; mend the row"),
        ("text\tlabel\na\tx\n\ty\n", GOOD, "", "train.tsv, line 3: a sentence is empty"),
        ("text\tlabel\na\t1.5\nb\t2.5\nc\tn/a\n", GOOD, "", "line 4: score 'n/a' is no number.*--kind classes.*mend"),
        ("text\tscore\na\t1\nb\tinf\n", GOOD, "", "train.tsv, line 3: score 'inf' is no number"),
        ("text\tlabel\na\t2\nb\t2\n", GOOD, "--kind scores", "all 2 scores are 2, so nothing can be learnt"),
        ("", GOOD, "", "train.tsv: is empty; write a line of names"),
        ("text\tlabel\n", GOOD, "", "train.tsv: has no row of data"),
        (GOOD, "", "", "dev.tsv: is empty"),
        (GOOD, None, "", "holds no file dev or valid that ends in .tsv, .csv, .jsonl; put a tenth"),
        (GOOD, GOOD, "--metric spearman", "--metric spearman: two classes are measured by accuracy"),
        (GOOD, GOOD, "--text 3 --label 2", "names no column '3', '2', but 'text', 'label'"),
        (GOOD, GOOD, "--task gleu", "--task gleu: is none of .*; did you mean glue?"),
        (GOOD, GOOD, "--task squad --text text", "--text: means nothing for SQuAD"),
        ("".join(f"t {n}\tl {n}\n" for n in range(20)), GOOD, "--text 1 --label 2", "20 different labels in 20 rows"),
    ],
)  # fmt: skip
def test_what_is_wrong_in_files_is_said_with_file_row_and_remedy(tmp_path, train, dev, options, words):
    for name, text in (("train", train), ("dev", dev)):
        if text is not None:
            (tmp_path / "bad").mkdir(exist_ok=True)
            (tmp_path / "bad" / f"{name}.tsv").write_text(text)
    said = refusal("finetune", START, "--data", tmp_path / "bad", "--output", tmp_path / "out", *options.split())
    assert re.search(words, said) and not (tmp_path / "out").exists(), said


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("a.yaml", "labels: [no, yes]", r"labels is \[False, True\]; .*'no' in quotes"),
        ("a.yaml", "dta: x", "unknown key 'dta'; did you mean data?"),
        ("a.yaml", "[[[", "no YAML"),
        ("a.yaml", "[" * 5000, "no YAML"),
        ("a.yaml", f"data: {'x' * 300}", "write short text"),
        ("a.yaml", "- x", "describes no task"),
        ("a.yaml", "name: ../x\ntrain: x.csv", "'../x' cannot name a task's folders"),
        ("a.yaml", "train: dev.tsv\nkind: regression", "kind: 'regression' is none of classes, scores"),
        ("a.yaml", "train: dev.tsv\nkind: scores\nlabels: [x, y]", "labels: scores have none, but x, y are given"),
        ("x.csv", 'text,label\n"a b,x\nc,y\n', "x.csv, line 2: no CSV"),
        ("x.jsonl", '{"text": "a", "label": 1}\n{"text": "b\\ud800", "label": 2}\n', "x.jsonl, line 2: no JSON object"),
        ("x.jsonl", '{"text": "a", "label": 1}\n[1]\n', "x.jsonl, line 2: no JSON object"),
        ("x.jsonl", '{"text": "a", "label": 1}\n\n{"text": "b"}\n', "x.jsonl, line 3: the label is empty"),
        ("x.tsv", b"text\tlabel\n\xff\tx\n", "x.tsv, line 2: not UTF-8 text"),
    ],
)
def test_a_yaml_file_and_files_of_other_formats_are_checked(tmp_path, name, text, words):
    (tmp_path / "a.yaml").write_text(f"train: {name}")
    (tmp_path / "dev.tsv").write_text(GOOD)
    (tmp_path / name).write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(UserError, match=words):
        choose_benchmark(str(tmp_path / "a.yaml"), settings_of(tmp_path, None))


def test_texts_that_cannot_be_labelled_leave_nothing_behind(moods, run_of_moods, tmp_path, monkeypatch):
    monkeypatch.setattr(predict_texts, "ROWS_AT_ONCE", 2)
    monkeypatch.chdir(tmp_path)
    rows = [("id", "text"), *((str(n), text) for n, (text, _) in enumerate(sentences(6)))]
    for name, changed, words in (
        ("short", [*rows, ("7",)], "short.tsv, line 8: found 1 field, needed 2"),
        ("unnamed", rows[1:], "unnamed.tsv, line 1: names no column of texts"),
        ("empty", [], "empty.tsv: is empty"),
        ("none", rows[:1], "none.tsv: has no text in it"),
        ("pairs", [("premise", "hypothesis"), ("a", "b")], "the model was trained on moods, on single texts"),
        ("again", [("text", "prediction"), ("a", "b")], "again.tsv, line 1: has a field 'prediction' already"),
    ):
        write(Path(f"{name}.tsv"), *changed)
        assert words in refusal("predict", run_of_moods, f"{name}.tsv")
    Path("late.jsonl").write_text('{"text": "a"}\n{"text": "b", "probability": 1}\n')
    assert "late.jsonl, line 2: has a field 'probability' already" in refusal("predict", run_of_moods, "late.jsonl")
    assert "names no column '1', but 'text'" in refusal("predict", run_of_moods, "late.jsonl", "--text", "1")
    assert "give --output" in refusal("predict", run_of_moods)
    assert "name a file that ends in" in refusal("predict", run_of_moods, "short.tsv", "--output", "short.txt")
    for options in ("--tasks MNLI", "--n-best 3", "--max-answer-tokens 9", "--skip-mistakes", "--data ."):
        said = refusal("predict", run_of_moods, "unnamed.tsv", *options.split())
        assert f"{options.split()[0]}: means nothing for unnamed.tsv, a file of texts" in said
    assert "give the texts too" in refusal("predict", moods / "out", "--output", "folder")
    for options in ("--text text", "--head own_moods"):
        said = refusal("predict", moods / "out", "--output", "folder", *options.split())
        assert said.startswith(f"{options.split()[0]}: is for a file of texts alone")
    with monkeypatch.context() as stopped:

        def stop(*_: object, **__: object) -> None:
            raise KeyboardInterrupt

        stopped.setattr(LazyFormerHub, "predict", stop)
        assert "stopped; nothing was written" in invoke("predict", run_of_moods, "short.tsv", code=130)
    assert not list(tmp_path.glob("*predictions*"))
    write(Path("unseen.tsv"), ("text", "label"), ("anna", "angry"))
    assert "no marks: unseen.tsv, line 2: label 'angry'" in invoke("predict", run_of_moods, "unseen.tsv")


@pytest.mark.parametrize(
    "change",
    [{"name": "../x"}, {"labels": [1]}, {"labels": None}, {"splits": []}, {"standard": [0, 0]},
     {"standard": [0, "nan"]}, {"standard": 7}, {"longest": "9"}, {"metrics": {}, "splits": {"x": 1}}, None],
)  # fmt: skip
def test_what_a_checkpoint_says_of_its_labels_is_checked(change):
    row = TaskDescription("t", {}, (), ("a", "b"), is_own=True)
    weights = {f"classification_heads.{row.head_name}.out_proj.weight": torch.zeros(2, 4)}

    def found(saved: object) -> dict[str, TaskDescription]:
        return tasks_of_heads({"model": weights, "task_state": {"heads": {row.head_name: saved}}}, Path("x.pt"))

    assert found(row.as_json() | {"of a later version": 1}) == {row.head_name: row}
    with pytest.raises(UserError, match="x.pt: does not say what its labels are"):
        found(None if change is None else row.as_json() | change)


def test_a_model_predicts_or_says_that_it_was_not_fine_tuned(tmp_path):
    tuned = LazyFormerModel.from_pretrained(TRAINED_MODELS / "fine_tuned")
    assert {answer.label for answer in tuned.predict(["anna sees ben", "the garden"])} <= {"0", "1"}
    assert tuned.predict(iter(["anna sees ben"])) == tuned.predict(["anna sees ben"])  # as a column of pandas is
    assert tuned.predict([]) == [] and tuned.tasks["cola"].name == "CoLA"
    for texts, words in (
        ([("a", "b")], "was trained on texts"),
        ([3], "was trained on texts"),
        ("a", "into a list"),
        (3, "one list"),
    ):
        with pytest.raises(UserError, match=words):
            tuned.predict(texts)
    with pytest.raises(UserError, match="takes one list"):
        tuned.predict(["anna sees ben"], "the garden")
    with pytest.raises(UserError, match="not fine-tuned on labels or scores"):
        LazyFormerModel.from_pretrained(START.parent).predict(["a"])
    (tmp_path / "x.txt").write_text("anna sees ben\n")
    assert "1 rows" in invoke("predict", TRAINED_MODELS / "exported", tmp_path / "x.txt")
