"""A custom task: from files of labels to a model that labels texts, and what is said where a file is wrong."""

import csv
import json
import re
import shutil
import warnings
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers import NAMES, ROOT, THINGS
from hypothesis import given as for_all
from hypothesis import strategies as st
from in_process import invoke, refusal
from toy_squad import START

from lazyformer_fairseq.data.labelled_files import TaskDescription, class_name, read_rows, read_split
from lazyformer_fairseq.data.prepared_folder import PreparedCustomTask, PreparedTask
from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.evaluation.inference import TrainedModel
from lazyformer_fairseq.evaluation.loading import tasks_of_heads
from lazyformer_fairseq.fairseq_plugin.models import LazyFormerModel
from lazyformer_fairseq.finetuning import predict_texts
from lazyformer_fairseq.finetuning.grid import Run
from lazyformer_fairseq.finetuning.held_out import with_dev_file
from lazyformer_fairseq.finetuning.launch import choose_benchmark, grid_and_executor
from lazyformer_fairseq.finetuning.settings import GridSettings
from lazyformer_fairseq.finetuning.tasks.custom import describe_in_words
from lazyformer_fairseq.finetuning.training import fine_tune
from lazyformer_fairseq.storage.atomic import unfinished_name

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
    grid, _ = grid_and_executor(choose_benchmark(task, given), given)
    (run,) = grid.runs
    grid.write()
    fine_tune(run)
    return run


@pytest.fixture(scope="module")
def moods(tmp_path_factory) -> Path:
    """A folder with ``moods``, and ``out``, what came of it."""
    folder = tmp_path_factory.mktemp("custom")
    for name, rows in (("train", sentences(96)), ("dev", sentences(21))):
        write(folder / "moods" / f"{name}.tsv", ("text", "label"), *rows)
    options = "--lrs 1e-2 --seeds 1 --epochs 12 --batch-size 8 --gpus none --workers 1".split()
    said = invoke("finetune", f"m={START}", "--data", folder / "moods", "--output", folder / "out", *options)
    assert "moods: 3 classes (calm, glad, sad); accuracy selects the epoch and the learning rate" in said
    assert "macro_f1" in said and f"to use the model: lazyformer predict {folder / 'out'} texts.tsv" in said
    assert (folder / "out" / "report" / "moods.md").is_file()
    return folder


@pytest.fixture(scope="module")
def run_of_moods(moods) -> Path:
    (result,) = (moods / "out").rglob("result.json")
    assert json.loads(result.read_text())["metrics"]["dev"]["accuracy"] == 1, "it learns nothing that could be tested"
    return result.parent


def test_classes_keep_their_names_to_predictions_and_exports(moods, run_of_moods, tmp_path):
    said = invoke("predict", moods / "out", moods / "moods" / "dev.tsv", "--output", tmp_path / "all.tsv")
    assert (
        "all.tsv: 21 rows\nscores against the file's labels: accuracy 100.00, macro_f1 100.00, matthews 100.00" in said
    )
    first, *rows = [line.split("\t") for line in (tmp_path / "all.tsv").read_text().splitlines()]
    assert first == ["text", "label", "prediction", "probability"]
    assert [(row[0], row[2]) for row in rows] == sentences(21) and all(0.34 < float(row[3]) <= 1 for row in rows)

    loaded = LazyFormerModel.from_pretrained(run_of_moods)
    answers = loaded.predict([text for text, _ in sentences(21)])
    assert [answer.label for answer in answers] == [label for _, label in sentences(21)]
    assert set(answers[0].probabilities) == set(MOODS) and sum(answers[0].probabilities.values()) == pytest.approx(1)
    assert loaded.tasks["custom_moods"].longest == 64  # longer texts are cut as in training
    invoke("export", moods / "out", tmp_path / "model")
    again = LazyFormerModel.from_pretrained(tmp_path / "model").predict([text for text, _ in sentences(21)])
    assert again == answers

    pytest.importorskip("transformers")
    invoke("export", run_of_moods, tmp_path / "hf", "--to", "huggingface")
    config = json.loads((tmp_path / "hf" / "config.json").read_text())
    assert config["id2label"] == {"0": "calm", "1": "glad", "2": "sad"}
    assert "custom_moods: calm, glad, sad" in (tmp_path / "hf" / "README.md").read_text()


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
    assert [row[0] for row in found] == [text for text, _ in rows]
    assert [row[1] for row in found[1:]] == [mood for _, mood in rows[1:]]  # the first is like none that it was taught
    assert "already exists" in refusal("predict", run_of_moods, tmp_path / f"x.{ending}")


def test_scores_of_any_range_train_and_come_back_in_their_unit(tmp_path):
    value = {"calm": -10.0, "glad": 1000.25, "sad": 10.0}
    for name, rows in (("train", sentences(96)), ("valid", sentences(21))):
        write(tmp_path / "degrees" / f"{name}.csv", ("Text", "target"), *((t, str(value[m])) for t, m in rows))
    run = trained(settings_of(tmp_path, tmp_path / "degrees", lrs=(3e-3,), epochs=("16",)))
    assert run.task.selecting_metric == "spearman"
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
    invoke("export", run.folder, tmp_path / "ours")  # in the unit of training: it goes on as the checkpoint does
    again = LazyFormerModel.from_pretrained(tmp_path / "ours")
    assert again.predict(texts) == loaded.predict(texts) and again.tasks == loaded.tasks
    assert torch.equal(*(each.model.classification_heads["custom_degrees"].out_proj.weight for each in (again, loaded)))
    pytest.importorskip("transformers")
    from transformers import AutoModelForSequenceClassification

    invoke("export", run.folder, tmp_path / "hf", "--to", "huggingface")
    model = AutoModelForSequenceClassification.from_pretrained(tmp_path / "hf", trust_remote_code=True)
    logits = model(loaded.encode(texts[0])).logits.detach()
    assert float(logits) == pytest.approx(loaded.predict(texts[:1])[0].label, rel=1e-4)


def test_a_task_of_glue_is_a_folder_of_ones_own_too(toy_glue, prepared, tmp_path):
    """One reader, one engine: the same ids, the same classes, the same options of fairseq-train."""
    given = settings_of(tmp_path, toy_glue / "RTE", max_length=64)
    grid, _ = grid_and_executor(choose_benchmark(None, given), given)
    own = PreparedCustomTask.load(tmp_path / "out" / "tasks" / "RTE")
    assert own.task.is_pair and own.task.labels == prepared["RTE"].task.labels
    for split in ("train", "valid"):
        found, wanted = (each.read(split, None, 2) for each in (own, prepared["RTE"]))
        assert [ids.tolist() for ids in found.inputs] == [ids.tolist() for ids in wanted.inputs]
        assert found.targets.tolist() == wanted.targets.tolist()
    (run,) = grid.runs
    assert run.grid.benchmark.objective(run).task is None  # the folder says what it holds
    assert isinstance(choose_benchmark(None, settings_of(tmp_path, None)).row.labels, tuple)  # as OUTPUT has it
    assert choose_benchmark(None, settings_of(tmp_path / "new", toy_glue)).name == "GLUE"
    assert type(prepared["RTE"]) is PreparedTask


def test_columns_the_order_of_labels_and_the_metric_are_options(tmp_path):
    rows = [("mood", "one", "other"), *((mood, text, text) for text, mood in sentences(12))]
    for name in ("train", "dev"):
        write(tmp_path / "moods" / f"{name}.tsv", *rows)
        stars = [(text, str(n % 2)) for n, (text, _) in enumerate(sentences(4))]
        write(tmp_path / "stars" / f"{name}.tsv", ("text", "score"), *stars)
    options = {"text": ("one", "other"), "label": "mood", "labels": ("sad", "calm", "glad"), "metric": "matthews"}
    moods = choose_benchmark(None, settings_of(tmp_path, tmp_path / "moods", **options)).row
    assert moods.labels == ("sad", "calm", "glad") and moods.is_pair
    assert moods.metrics == ("matthews", "accuracy", "macro_f1")
    stars = choose_benchmark(None, settings_of(tmp_path, tmp_path / "stars", labels=("1", "0"))).row
    assert stars.labels == ("1", "0") and not stars.is_regression, "a score, unless labels are given"
    for options, words in (
        ({"labels": ("1", "2")}, "--labels: '2' is repeated, or does not occur in"),
        ({"labels": ("1", "0"), "label_type": "scores"}, "--labels: does not apply to regression"),
    ):
        with pytest.raises(UserError, match=words):
            choose_benchmark(None, settings_of(tmp_path, tmp_path / "stars", **options))


JSONL = "train.jsonl"
GOOD = "text\tlabel\na b\tx\nc d\ty\n"


@pytest.mark.parametrize(
    ("train", "dev", "options", "words"),
    [
        ("a b\tx\nc d\ty\n", GOOD, "", r"line 1: there is no column with texts; the columns are 'a b', 'x'."),
        ("text\tmood\na\tx\n", GOOD, "", "there is no column with labels; the columns are 'text', 'mood'.*--label"),
        (GOOD, "a b\tx\n", "", r"dev.tsv, line 1: the header lacks 'text', 'label'"),
        (GOOD, "text\tlabel\na\tz\n", "", r"dev.tsv, line 2: label 'z' is not one of bad's labels: x, y.*correct the"),
        ("text\tlabel\na\tx\nb\tx\n", GOOD, "", r"train.tsv: all 2 labels are 'x'; at least two classes"),
        ("text\tlabel\na\tx\nb\n", GOOD, "", "train.tsv, line 3: found 1 field, expected 2"),
        ("text\tlabel\na\tx\nb\t\n", GOOD, "", "train.tsv, line 3: the label is empty; correct the row"),
        ("text\tlabel\na\tx\n\ty\n", GOOD, "", "train.tsv, line 3: the sentence is empty"),
        ("text\tlabel\na\t1.5\nb\t2.5\nc\tn/a\n", GOOD, "", "score 'n/a' is not a number.*--label-type cla.*correct"),
        ("text\tscore\na\t1\nb\tinf\n", GOOD, "", "train.tsv, line 3: score 'inf' is not a number"),
        ("text\tlabel\na\t2\nb\t2\n", GOOD, "--label-type scores", "all 2 targets are 2, so nothing can be learned"),
        ("", GOOD, "", "train.tsv is empty; write a line that names"),
        ("text\tlabel\n", GOOD, "", "train.tsv has no data rows"),
        (GOOD, "", "", "dev.tsv is empty"),
        (GOOD, None, "", r"contains no dev or valid file \(.tsv, .csv, .jsonl, .conll\); set --dev-share 0.1"),
        (GOOD, GOOD, "--dev-share 0.1", "--dev-share 0.1: .*bad already contains dev.tsv; omit the option"),
        (GOOD, None, "--dev-share 0.5", "--dev-share 0.5: .* has too few rows; add more, or provide a dev file"),
        (GOOD, None, "--dev-share 0.9", "Invalid value for '--dev-share': 0.9 is not in the range 0.0<x<=0.5"),
        (GOOD + "e\n", None, "--dev-share 0.1", "bad/train.tsv, line 4: found 1 field"),
        (GOOD, GOOD, "--task squad --dev-share 0.1", "--dev-share: does not apply to SQuAD"),
        (GOOD, GOOD, "--metric spearman", "--metric spearman: for two classes the metric must be one of accuracy"),
        (GOOD, GOOD, "--text 3 --label 2", "there is no column '3', '2'; the columns are 'text', 'label'"),
        (GOOD, GOOD, "--text text --label text", "column 'text' is selected twice; use different columns"),
        ("text\tlabel\tlabel\na\tx\ty\n", GOOD, "", r"train.tsv, line 1: 2 columns are called 'label' \(columns 2, 3"),
        (GOOD, "text\tlabel\ttext\na\tx\tb\n", "", r"dev.tsv, line 1: 2 columns are called 'text' \(columns 1, 3\)"),
        ("text\tlabel\na\tx\nb\tNaN\n", GOOD, "", "train.tsv, line 3: the label 'NaN' looks like a placeholder for"),
        (GOOD, GOOD, "--task gleu", "--task gleu: must be one of .*; did you mean glue?"),
        (GOOD, GOOD, "--task squad --text text", "--text: does not apply to SQuAD"),
        ("text\tlabel\n" + "".join(f"t {n}\tl {n}\n" for n in range(20)), GOOD, "", "20 different labels in 20 rows"),
    ],
)  # fmt: skip
def test_what_is_wrong_in_files_is_said_with_file_row_and_remedy(tmp_path, train, dev, options, words):
    for name, text in (("train", train), ("dev", dev)):
        if text is not None:
            (tmp_path / "bad").mkdir(exist_ok=True)
            (tmp_path / "bad" / f"{name}.tsv").write_text(text)
    said = refusal("finetune", START, "--data", tmp_path / "bad", "--output", tmp_path / "out", *options.split())
    assert re.search(words, said) and not (tmp_path / "out").exists(), said


@pytest.mark.parametrize("ending", ["tsv", "csv", "jsonl"])
def test_a_share_of_the_training_rows_is_held_out_the_same_one_each_time(tmp_path, ending):
    rows = sentences(60)
    if ending == "csv":
        rows[0] = ("two\nlines, one row", "calm")
    path = write(tmp_path / "moods" / f"train.{ending}", ("text", "label"), *rows)
    path.write_bytes(path.read_bytes().removesuffix(b"\n"))
    words = ("--data", path.parent, "--tokenizer", START.parent / "tokenizer", "--output", tmp_path / "out")
    for _ in range(2):  # the second finds what the first has prepared
        assert "dev." in invoke("finetune", *words, "--dev-share", "0.1")
    parts = [
        [tuple(row.fields) for row in read_rows(tmp_path / "out" / "held_out" / "moods" / f"{name}.{ending}")]
        for name in ("train", "dev")
    ]
    assert parts[0][0] == parts[1][0] == ("text", "label")
    (_, *train), (_, *dev) = parts
    assert Counter(mood for _, mood in dev) == dict.fromkeys(MOODS, 2)
    assert Counter(train + dev) == Counter(rows)


def test_a_folder_that_has_neither_a_training_file_nor_tasks_of_glue(tmp_path):
    (tmp_path / "reviews").mkdir()
    (tmp_path / "reviews" / "training.tsv").write_text(GOOD)
    said = refusal("finetune", START, "--data", tmp_path / "reviews", "--output", tmp_path / "out")
    assert "reviews contains neither a custom task's train file (.tsv, .csv, .jsonl, .conll) nor a " in said


def test_what_is_held_out_has_no_label_that_training_lacks(tmp_path):
    rows = [*sentences(9), ("once", "rare")]
    write(tmp_path / "moods" / "train.tsv", ("text", "label"), *rows)
    joys = [(text, ["joy"] * (n % 2)) for n, (text, _) in enumerate(rows)]
    write(tmp_path / "joys" / "train.jsonl", ("text", "label"), *joys, ("twice", ["joy", "rare"]))
    stars = [(text, f"{n}.5") for n, (text, _) in enumerate(rows)]
    write(tmp_path / "stars" / "train.tsv", ("text", "label"), *stars)
    for name in ("moods", "joys", "stars"):
        given = with_dev_file(None, settings_of(tmp_path, tmp_path / name, dev_share=0.5))
        row = choose_benchmark(None, given).row
        held_out = read_split(row, given.data, "valid").examples
        assert 3 <= len(held_out) <= 6 and not any("rare" in row.word_of(each.target) for each in held_out)


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("train.csv", 'text,label\n"a b,x\nc,y\n', "train.csv, line 2: not valid CSV"),
        (JSONL, '{"text": "a", "label": 1}\n{"text": "b\\ud800", "label": 2}\n', "line 2: not a JSON object"),
        (JSONL, '{"text": "a", "label": 1}\n[1]\n', "line 2: not a JSON object"),
        (JSONL, '{"text": "a", "label": 1}\n\n{"text": "b"}\n', "line 3: the label is empty"),
        (JSONL, '{"text": "a", "label": 1}\n{"text": "b", "label": null}\n', "line 2: the label is empty"),
        (JSONL, '{"text": "a", "label": {"x": 1}}\n', r"line 1: the field 'label' is an object, .*or a list of these"),
        (JSONL, '{"text": "a", "label": "x"}\n{"text": "b", "label": ["x"]}\n',
         r'train.jsonl, line 2: the label \["x"\] is a list; use lists either in all rows or in none; correct'),
        (JSONL, '{"text": "a", "label": ["x", "y"]}\n{"text": "b", "label": "x"}\n',
         r"""train.jsonl, line 2: label 'x' is not a list such as \["joy"\], but other rows have lists; correct"""),
        ("train.tsv", 'text\tlabel\na\t[]\nb\t["x", null]\n', "train.tsv, line 3: the label is empty; correct"),
        (JSONL, '{"text": "a", "label": [["x"]]}\n', "line 1: the label .*x.* is a list"),
        (JSONL, '{"text": "a", "label": []}\n', "all label lists are empty, so nothing can be learned"),
        (JSONL, '{"text": "a", "label": ["x"]}\n{"text": "a", "label": []}\n', "all 1 labels are 'x'"),
        (JSONL, '{"text": ["a", "b"], "label": "x"}\n', "line 1: the field 'text' is a list, .*; use a single text"),
        (JSONL, '{"text": "a", "label": "x", "label": "y"}\n', "line 1: .*key 'label' occurs twice"),
        (JSONL, '{"text": "a", "label": true}\n\n{"text": "b", "label": 1}\n', "true or false in line 1, .*line 3"),
        (JSONL, '{"text": "a", "label": "x"}\n{"txt": "b", "label": "y"}\n',
         r"line 2: the sentence is empty in column 'text' \(its fields are 'txt', 'label'\); correct"),
        (JSONL, '{"text": "a", "label": "x"}\n{"text": "b", "label": "null"}\n',
         "line 2: the label 'null' looks like a placeholder for a missing value; correct the row"),
        (JSONL, '{"text": "a", "label": "x\\ty"}\n', r"line 1: the label 'x\\ty' contains a tab"),
        ("train.tsv", b"text\tlabel\na\tx\nb\tnone\nc\td\ty\n", "line 4: found 3 fields, .*a tab in a sentence"),
        ("train.tsv", b"text\tlabel\n\xff\tx\n", "train.tsv, line 2: not UTF-8 text"),
    ],
)  # fmt: skip
def test_files_of_other_formats_are_checked(tmp_path, name, text, words):
    (tmp_path / "x").mkdir()
    (tmp_path / "x" / "dev.tsv").write_text(GOOD)
    (tmp_path / "x" / name).write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(UserError, match=words):
        choose_benchmark(None, settings_of(tmp_path, tmp_path / "x"))


@pytest.mark.parametrize("odd", [0, 5])
@pytest.mark.parametrize("field", ["text2", "label"])
def test_all_objects_decide_which_fields_there_are(tmp_path, field, odd):
    """An object that lacks a field, the first one or another, is refused and takes nothing from the others."""
    rows = [{"text": text, "text2": "a house", "label": mood} for text, mood in sentences(9)]
    lacking = [{name: value for name, value in row.items() if name != field or n != odd} for n, row in enumerate(rows)]
    for name in ("train", "dev"):
        (tmp_path / "pairs").mkdir(exist_ok=True)
        (tmp_path / "pairs" / f"{name}.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in lacking))
    wrong = {"text2": "the sentence is empty in column 'text2'", "label": "the label is empty"}[field]
    with pytest.raises(UserError, match=f"line {odd + 1}: {wrong}"):
        choose_benchmark(None, settings_of(tmp_path, tmp_path / "pairs"))
    (tmp_path / "pairs" / "train.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in reversed(rows)))
    assert choose_benchmark(None, settings_of(tmp_path, tmp_path / "pairs")).row.is_pair


WAYS = ("{}", "{}.", "{}.0", "{}.000", "+{}", "{}e0", "{}.00E+00")


@for_all(st.integers(0, 10**20), st.sampled_from(WAYS))
def test_a_whole_number_names_one_class_however_it_is_written(number, way):
    assert class_name(way.format(number)) == str(number)
    assert class_name("-" + way.format(number).lstrip("+")) == str(-number)


@for_all(st.text(max_size=12).filter(lambda word: not re.fullmatch(r"[+-]?\d+(\.0*)?([eE].*)?", word, re.ASCII)))
def test_any_other_word_is_a_class_as_it_is_written(other):
    """Only whole numbers are written anew."""
    assert class_name(other) == other or float(other).is_integer()
    for word in ("007", "1.5", "-0.25", "0x1", "1e-1", "1_0", "1.0.0", "v1.0", "", "10%"):
        assert class_name(word) == word


@pytest.mark.parametrize(
    ("words", "options", "classes", "said"),
    [
        (("0.0", "1.0"), {}, ("0", "1"), "2 classes (0, 1); for regression, set --label-type scores; accuracy"),
        (("2.0", "0.0", "1.0", "10"), {}, ("0", "1", "2", "10"), "4 classes (0, 1, 2, 10); for regression"),
        (("007", "7"), {}, ("007", "7"), "2 classes (007, 7); for regression"),
        (
            ("0.0", "0.5"),
            {},
            None,
            "targets with mean 0.25 and standard deviation 0.25; for classes, set --label-type classes; spearman",
        ),
        (("0.0", "0.5"), {"label_type": "classes"}, ("0", "0.5"), "2 classes (0, 0.5); for regression"),
        (("0.0", "1.0"), {"label_type": "scores"}, None, "targets with mean 0.5 and standard deviation 0.5"),
    ],
)
def test_labels_are_whole_numbers_or_scores_and_the_command_says_which(tmp_path, words, options, classes, said):
    header, texts = ("text", "label"), [text for text, _ in sentences(24)]
    rows = [(text, words[n % len(words)]) for n, text in enumerate(texts)]
    for name in ("train", "dev"):
        write(tmp_path / "numbers" / f"{name}.tsv", header, *rows)
    benchmark = choose_benchmark(None, settings_of(tmp_path, tmp_path / "numbers", **options))
    assert benchmark.row.labels == (classes or ()) and said in describe_in_words(benchmark.row)
    assert describe_in_words(benchmark.row).endswith("; texts in column 'text', labels in 'label'")
    targets = [example.target for example in read_split(benchmark.row, tmp_path / "numbers", "valid").examples]
    wanted = [float(word) if classes is None else classes.index(class_name(word)) for _, word in rows]
    assert targets == wanted


def test_json_numbers_and_booleans_are_classes(tmp_path):
    for values, labels in (
        ([0.0, 1, 1.0, 0], ("0", "1")),
        ([True, False], ("false", "true")),
        (["0", 1.0], ("0", "1")),
    ):
        rows = [{"text": text, "label": values[n % len(values)]} for n, (text, _) in enumerate(sentences(8))]
        (tmp_path / "json").mkdir(exist_ok=True)
        for name in ("train", "dev"):
            (tmp_path / "json" / f"{name}.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
        assert choose_benchmark(None, settings_of(tmp_path, tmp_path / "json")).row.labels == labels


LONG = "sees the house near the garden " * 12


@pytest.fixture(scope="module")
def cut_short(tmp_path_factory) -> tuple[Path, str]:
    """A folder with texts longer than the model's 64 positions and ``out``, what came of it; what was said."""
    folder = tmp_path_factory.mktemp("cut")
    moods = ["calm", "glad"] * 3
    write(folder / "long" / "train.tsv", ("text", "label"), *((f"{LONG}{mood}", mood) for mood in moods), ("a", "calm"))
    write(folder / "long" / "dev.tsv", ("text", "label"), ("anna", "calm"), (LONG, "calm"), ("ben", "calm"))
    options = "--lrs 1e-3 --seeds 1 --epochs 1 --gpus none --workers 1".split()
    return folder, invoke("finetune", f"m={START}", "--data", folder / "long", "--output", folder / "out", *options)


CUT = "{} rows{} longer than the 64 tokens that {} reads; the excess is truncated"


def test_what_a_model_does_not_read_is_counted_in_the_table_and_the_report(cut_short, tmp_path):
    folder, said = cut_short
    heads, _, *rows = said.splitlines()
    place = heads.index("cut at 64 tokens")
    assert [row[place:].split()[0] for row in rows[:2]] == ["6", "1"]
    told = [
        f"long: {CUT.format('6 of 7', ' of train.tsv are', 'm')}",
        f"long: {CUT.format('1 of 3', ' of dev.tsv is', 'm')}",
    ]
    markdown = (folder / "out" / "report" / "long.md").read_text()
    for sentence in told:
        assert f"note: {sentence}\n" in said and f"- {sentence}\n" in markdown
    # Once more, when the data is there already.
    again = invoke(
        "finetune", f"m={START}", "--output", folder / "out", *"--lrs 1e-3 --seeds 1 --epochs 1 --gpus none".split()
    )
    assert all(f"note: {sentence}\n" in again for sentence in told)


def test_a_development_set_of_one_class_is_named_beside_its_score(cut_short, tmp_path):
    folder, said = cut_short
    sentence = "long: all 3 rows of dev.tsv have the label 'calm', so scores on them are meaningless"
    markdown = (folder / "out" / "report" / "long.md").read_text()
    assert f"note: {sentence}\n" in said and f"- {sentence}\n" in markdown and f"- {sentence}\n" in said
    assert len(re.findall(r"\| m .* \d+\.\d\d \(one class\) ", said)) == 4, "in both tables, of every metric"
    marks = invoke("predict", folder / "out", folder / "long" / "dev.tsv", "--output", tmp_path / "x.tsv")
    assert "all labels in the file are 'calm', so these scores are meaningless" in marks
    (result,) = Path(shutil.copytree(folder / "out", tmp_path / "damaged")).rglob("result.json")
    known = json.loads(next((folder / "out").rglob("result.json")).read_text())["splits"][0]
    for splits in ([1], [{"file": "dev.tsv"}], [{**known, "cut": "6"}]):
        result.write_text(json.dumps({**json.loads(result.read_text()), "splits": splits}))
        with pytest.raises(UserError, match="result.json: .*splits"):
            invoke("report", tmp_path / "damaged")


def test_predict_counts_what_was_cut_and_a_caller_is_warned(cut_short, tmp_path):
    folder, _ = cut_short
    rows = [("anna",), (LONG,), ("ben",), (f"{LONG} {LONG}",)]
    for ending in ("tsv", "csv", "jsonl"):
        said = invoke("predict", folder / "out", write(tmp_path / f"long.{ending}", ("text",), *rows))
        line = 2 if ending == "jsonl" else 3
        assert f"{CUT.format('2 of 4', ' are', 'the model')}; the first is in line {line}" in said.splitlines(), said
    assert "longer" not in invoke("predict", folder / "out", write(tmp_path / "short.tsv", ("text",), ("anna",)))

    (run,) = (folder / "out").rglob("result.json")
    model = LazyFormerModel.from_pretrained(run.parent)
    with pytest.warns(UserWarning, match="2 of 4 texts are longer than the 64 tokens"):
        answers = model.predict([text for (text,) in rows])
    assert [answer.is_cut for answer in answers] == [False, True, False, True]
    with pytest.warns(UserWarning, match="1 of 2 texts is longer than the 64 tokens"):
        assert model.extract_features("anna", LONG).size(1) == 64
    with (
        pytest.warns(UserWarning, match="1 of 1 texts is longer"),
        pytest.raises(UserError, match="found <mask> 0 times in the first 64"),
    ):
        model.fill_mask(f"{LONG} <mask>")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model.predict(["anna"])
        model.extract_features("anna", "ben")


@pytest.mark.parametrize("ending", ["tsv", "csv", "jsonl"])
def test_rows_without_a_text_keep_their_place_and_get_no_answer(moods, run_of_moods, tmp_path, ending):
    texts = ["anna sees ben", "", "  ", "\0\1", "the river"]
    rows = [(str(number), text, "sad") for number, text in enumerate(texts)]
    file = write(tmp_path / f"gaps.{ending}", ("id", "text", "label"), *rows)
    (left,) = [unfinished_name(tmp_path / f"gaps.predictions.{ending}")]
    left.touch()
    said = invoke("predict", run_of_moods, file)
    assert not left.exists(), "a killed one's rest"
    line = 2 if ending == "jsonl" else 3
    assert f"3 of 5 rows have no text and received no prediction; the first is in line {line}\n" in said
    assert "scores against the file's labels in 2 of the rows: accuracy" in said
    text = (tmp_path / f"gaps.predictions.{ending}").read_text()
    if ending == "jsonl":
        found = [json.loads(line) for line in text.splitlines()]
        empty = {"prediction": None, "probability": None}
    else:
        found = list(csv.DictReader(text.splitlines(), delimiter="," if ending == "csv" else "\t"))
        empty = {"prediction": "", "probability": ""}
    assert [row["id"] for row in found] == list("01234")
    assert [{name: row[name] for name in empty} == empty for row in found] == [False, True, True, True, False]
    model = LazyFormerModel.from_pretrained(run_of_moods)
    with pytest.warns(UserWarning, match="3 of 5 texts are empty; their label is None"):
        answers = model.predict(texts)
    assert [answer.label for answer in answers] == [row["prediction"] or None for row in found]
    none = write(tmp_path / f"none.{ending}", ("id", "text"), ("1", ""), ("2", " "))
    assert f"none.{ending} contains no text" in refusal("predict", run_of_moods, none)


@pytest.mark.parametrize(
    ("name", "line", "sign"),
    [("x.jsonl", 2, "\t"), ("x.csv", 3, "\n"), ("x.txt", 2, "\t")],
)
def test_a_field_that_tsv_cannot_hold_is_refused_before_any_prediction(run_of_moods, tmp_path, name, line, sign):
    """Elsewhere it stays as it is, and so does the answer's place."""
    texts = ["anna sees ben", f"the{sign}river"]
    header = [] if name == "x.txt" else [("text",)]
    file = write(tmp_path / name, *header, *((text,) for text in texts))
    said = refusal("predict", run_of_moods, file, "--output", tmp_path / "x.tsv")
    assert (
        f"{name}, line {line}: a field contains {sign!r}, which a .tsv file cannot represent; use an --output" in said
    )
    invoke("predict", run_of_moods, file, "--output", tmp_path / "y.csv")
    with (tmp_path / "y.csv").open(newline="") as written:
        assert [row["text"] for row in csv.DictReader(written)] == texts


def test_texts_of_unknown_tokens_alone_are_counted(moods, run_of_moods, tmp_path):
    texts = ["anna sees ben", "漢字", "the 漢字", "漢 字", "", "<unk>"]
    rows = [(text, "sad") for text in texts]
    said = invoke("predict", run_of_moods, write(tmp_path / "x.tsv", ("text", "label"), *rows))
    assert (
        "3 of 6 rows have a text without known tokens, which the model cannot read; the first is in line 3\n"
    ) in said
    model = LazyFormerModel.from_pretrained(run_of_moods)
    with pytest.warns(UserWarning, match="2 of 3 texts have no known tokens; their labels are meaningless"):
        assert [answer.is_unknown for answer in model.predict(texts[1:4])] == [True, False, True]


def test_predict_looks_at_all_objects_and_names_what_they_have_in_place_of_a_text(run_of_moods, tmp_path):
    objects = [
        {"id": 3}, {"text": "anna sees ben", "label": "sad"}, {"text": None}, {"txt": "the river"},
        {"text": "the garden", "label": None}, {"text": "ben sees the river", "label": "glad"},
    ]  # fmt: skip
    file = tmp_path / "x.jsonl"
    file.write_text("".join(f"{json.dumps(each)}\n" for each in objects))
    said = invoke("predict", run_of_moods, file)
    assert (
        "3 of 6 rows have no text and received no prediction; the first is in line 1; some rows lack 'text' but have"
        in said
    )
    assert "but have 'id', 'txt'; is a name misspelled?" in said
    assert "scores against the file's labels in 2 of the rows: accuracy" in said, (
        "the label, which the first object lacks"
    )
    found = [json.loads(line) for line in (tmp_path / "x.predictions.jsonl").read_text().splitlines()]
    assert [{name: row[name] for name in own} for row, own in zip(found, objects, strict=True)] == objects
    invoke("predict", run_of_moods, file, "--output", tmp_path / "y.csv")
    with (tmp_path / "y.csv").open(newline="") as written:
        assert next(csv.reader(written)) == ["id", "text", "label", "txt", "prediction", "probability"]
    for content, words in (
        ('{"text": ["a", "b"]}\n', "line 1: the field 'text' is a list"),
        ('{"text": ""}\n{"txt": "a"}\n', "contains no text; some rows lack 'text' but have 'txt'"),
    ):
        file.write_text(content)
        assert words in refusal("predict", run_of_moods, file, "--output", tmp_path / "z.jsonl")
    file.write_text('{"text": "anna", "label": "sad"}\n{"text": "ben", "label": ["sad"]}\n')
    said = invoke("predict", run_of_moods, file, "--output", tmp_path / "z.jsonl")
    assert f'no scores: {file}, line 2: the label ["sad"] is a list' in said
    for content, output, words in (
        ("text\ttext\na\tb\n", "t.tsv", "2 columns are called 'text'"),
        (
            "text\tid\tid\na\tb\tc\n",
            "t.jsonl",
            "2 columns are named 'id', but the fields of a JSON object must have different names",
        ),
    ):
        (tmp_path / "twice.tsv").write_text(content)
        assert words in refusal("predict", run_of_moods, tmp_path / "twice.tsv", "--output", tmp_path / output)


def test_texts_that_cannot_be_labelled_leave_nothing_behind(moods, run_of_moods, tmp_path, monkeypatch):
    monkeypatch.setattr(predict_texts, "ROWS_AT_ONCE", 2)
    monkeypatch.chdir(tmp_path)
    rows = [("id", "text"), *((str(n), text) for n, (text, _) in enumerate(sentences(6)))]
    for name, changed, words in (
        ("short", [*rows, ("7",)], "short.tsv, line 8: found 1 field, expected 2"),
        ("unnamed", rows[1:], "unnamed.tsv, line 1: there is no column with texts"),
        ("empty", [], "empty.tsv is empty"),
        ("none", rows[:1], "none.tsv contains no text"),
        (
            "pairs",
            [("premise", "hypothesis"), ("a", "b")],
            "the model was trained on moods, which consists of single texts",
        ),
        ("again", [("text", "prediction"), ("a", "b")], "again.tsv, line 1: the field name 'prediction' is reserved"),
    ):
        write(Path(f"{name}.tsv"), *changed)
        assert words in refusal("predict", run_of_moods, f"{name}.tsv")
    Path("late.jsonl").write_text('{"text": "a"}\n{"text": "b", "probability": 1}\n')
    assert "late.jsonl, line 2: the field name 'probability' is reserved" in refusal(
        "predict", run_of_moods, "late.jsonl"
    )
    assert "there is no column '1'; the columns are 'text'" in refusal(
        "predict", run_of_moods, "late.jsonl", "--text", "1"
    )
    assert "pass --output" in refusal("predict", run_of_moods)
    assert "the file name must end in" in refusal("predict", run_of_moods, "short.tsv", "--output", "short.txt")
    for options in ("--tasks MNLI", "--n-best 3", "--max-answer-tokens 9", "--skip-mistakes", "--data ."):
        said = refusal("predict", run_of_moods, "unnamed.tsv", *options.split())
        assert f"{options.split()[0]}: does not apply to a text file such as unnamed.tsv" in said
    assert "pass the texts too" in refusal("predict", moods / "out", "--output", "folder")
    for options in ("--text text", "--head custom_moods"):
        said = refusal("predict", moods / "out", "--output", "folder", *options.split())
        assert said.startswith(f"{options.split()[0]}: applies only to text files")
    with monkeypatch.context() as stopped:

        def stop(*_: object, **__: object) -> None:
            raise KeyboardInterrupt

        stopped.setattr(TrainedModel, "predict_rows", stop)
        assert "stopped; nothing was written" in invoke("predict", run_of_moods, "short.tsv", code=130)
    assert not list(tmp_path.glob("*predictions*"))
    write(Path("unseen.tsv"), ("text", "label"), ("anna", "angry"))
    assert "no scores: unseen.tsv, line 2: label 'angry'" in invoke("predict", run_of_moods, "unseen.tsv")


@pytest.mark.parametrize(
    "change",
    [{"name": "../x"}, {"labels": [1]}, {"labels": None}, {"splits": []}, {"standard": [0, 0]},
     {"standard": [0, "nan"]}, {"standard": 7}, {"longest": "9"}, {"metrics": {}, "splits": {"x": 1}}, None],
)  # fmt: skip
def test_what_a_checkpoint_says_of_its_labels_is_checked(change):
    row = TaskDescription("t", {}, (), ("a", "b"), is_custom=True)
    weights = {f"classification_heads.{row.head_name}.out_proj.weight": torch.zeros(2, 4)}

    def found(saved: object) -> dict[str, TaskDescription]:
        return tasks_of_heads({"model": weights, "task_state": {"heads": {row.head_name: saved}}}, Path("x.pt"))

    assert found(row.as_json() | {"of a later version": 1}) == {row.head_name: row}
    with pytest.raises(UserError, match="x.pt: not a valid task description"):
        found(None if change is None else row.as_json() | change)


def test_a_model_predicts_or_says_that_it_was_not_fine_tuned(tmp_path):
    tuned = LazyFormerModel.from_pretrained(TRAINED_MODELS / "fine_tuned")
    assert {answer.label for answer in tuned.predict(["anna sees ben", "the garden"])} <= {"0", "1"}
    assert tuned.predict(iter(["anna sees ben"])) == tuned.predict(["anna sees ben"])  # as a column of pandas is
    assert tuned.predict([]) == [] and tuned.tasks["cola"].name == "CoLA"
    for texts, words in (
        ([("a", "b")], "was trained on texts"),
        ([3], "was trained on texts"),
        ("a", "one list"),
        (3, "one list"),
    ):
        with pytest.raises(UserError, match=words):
            tuned.predict(texts)
    with pytest.raises(UserError, match="not fine-tuned on a task"):
        LazyFormerModel.from_pretrained(START.parent).predict(["a"])
    (tmp_path / "x.txt").write_text("anna sees ben\n")
    assert "1 rows" in invoke("predict", TRAINED_MODELS / "exported", tmp_path / "x.txt")
