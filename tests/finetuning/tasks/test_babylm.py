"""BabyLM's fine-tuning tasks: JSON lines of one folder, as texts, as a table, and what is left out of it."""

import json
from pathlib import Path

import pytest
from glue_results import write_grid, write_result
from helpers import NAMES, THINGS
from in_process import invoke, refusal
from toy_squad import START

from lazyformer_fairseq.data.glue import BABYLM_TASKS, TASKS, find_task
from lazyformer_fairseq.data.labelled_files import Example, read_split
from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.finetuning.report import write_report
from lazyformer_fairseq.finetuning.results import RunKey
from lazyformer_fairseq.finetuning.tasks.babylm import BENCHMARK

ROWS = {
    "BoolQ": ({"question": "is it so", "passage": "It is ."}, ("is it so", "It is .")),
    "MNLI": ({"premise": "a", "hypothesis": "b"}, ("a", "b")),
    "MRPC": ({"sentence1": "a", "sentence2": "b"}, ("a", "b")),
    "MultiRC": (
        {"paragraph": "Anna sees {it} .", "question": "Who sees ?", "answer": "Anna"},
        ("Question: Who sees ? Answer: Anna", "Anna sees {it} ."),
    ),
    "QQP": ({"question1": "a", "question2": "b"}, ("a", "b")),
    "RTE": ({"sentence1": "a", "sentence2": "b"}, ("a", "b")),
    "WSC": (
        {"text": "Anna saw that she won .", "span1_text": "Anna", "span2_text": "she", "span1_index": 0},
        ('Does "she" refer to "Anna" in this passage?', "Anna saw that she won ."),
    ),
}


def write_rows(path: Path, rows: list[dict]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.mark.parametrize("name", ROWS)
def test_fields_become_a_pair_of_texts_as_in_the_pipeline(tmp_path, name):
    fields, texts = ROWS[name]
    write_rows(tmp_path / f"{name.lower()}.valid.jsonl", [{**fields, "idx": {"any": 1}, "label": 1}])
    task = find_task(name.lower(), BABYLM_TASKS)
    assert read_split(task, tmp_path, "valid").examples == [Example(texts, 1, 1)]
    assert task.is_pair and task.selecting_metric == ("f1" if name in ("MRPC", "QQP") else "accuracy")
    assert not {task.head_name} & {other.head_name for other in TASKS.values()}


def test_a_wrong_row_is_named_by_file_and_line(tmp_path):
    fields, _ = ROWS["WSC"]
    write_rows(tmp_path / "wsc.train.jsonl", [{**fields, "label": 1}, {**fields, "label": 2}])
    with pytest.raises(UserError, match=r"wsc.train.jsonl, line 2: label '2' is not one of BabyLM-WSC's labels: 0, 1"):
        read_split(BABYLM_TASKS["BabyLM-WSC"], tmp_path, "train")
    write_rows(tmp_path / "wsc.train.jsonl", [{**fields, "label": 1}, {**fields, "span1_text": "", "label": 1}])
    with pytest.raises(UserError, match=r"line 2: the sentence is empty in column 'span1_text'"):
        read_split(BABYLM_TASKS["BabyLM-WSC"], tmp_path, "train")


@pytest.mark.parametrize("task", BABYLM_TASKS.values(), ids=lambda task: task.name)
def test_every_row_of_the_real_files(real_data, task):
    folder = real_data / "babylm" / "glue"
    there = [name for name, split in task.splits.items() if (folder / split.file).is_file()]
    if not there:
        pytest.skip(f"{folder}: not among the real data")
    for name in there:
        examples = read_split(task, folder, name).examples
        assert len(examples) == task.splits[name].rows
        assert {example.target for example in examples} == set(range(task.num_classes))
        assert all(len(example.texts) == 2 and all(map(str.strip, example.texts)) for example in examples)


@pytest.fixture(scope="module")
def toy_babylm(tmp_path_factory) -> Path:
    """RTE, whose first word decides, WSC with two rows, and BoolQ without a training file."""
    folder = tmp_path_factory.mktemp("babylm")
    texts = [f"sees the {thing} near {name}" for thing in THINGS for name in NAMES]
    pairs = [
        {"sentence1": f"{('the', 'anna')[number % 2]} {text}", "sentence2": text, "label": number % 2, "idx": number}
        for number, text in enumerate(texts)
    ]
    write_rows(folder / "rte.train.jsonl", pairs[:96])
    write_rows(folder / "rte.valid.jsonl", pairs[96:120])
    coreferences = [{**ROWS["WSC"][0], "label": label} for label in (0, 1)]
    for split in ("train", "valid"):
        write_rows(folder / f"wsc.{split}.jsonl", coreferences)
    write_rows(folder / "boolq.valid.jsonl", [{**ROWS["BoolQ"][0], "label": 1}])
    return folder


def test_the_whole_way_from_files_to_the_table_resumed_and_predicted(toy_babylm, tmp_path):
    words = ["finetune", f"m={START}", "--task", "babylm", "--data", toy_babylm, "--output", tmp_path / "out"]
    options = "--lrs 1e-2 --epochs 12,wsc=1 --batch-size 8 --gpus none --workers 1".split()
    said = invoke(*words, *options)
    assert f"note: BabyLM-BoolQ is skipped, because {toy_babylm} contains no boolq.train.jsonl to train on" in said
    assert "| model" in said and "rte.train.jsonl ends at line 96 and has 96 rows, but the official file" in said
    report = (tmp_path / "out" / "report" / "babylm.md").read_text()
    assert report.startswith("m scores ") and " on average (2 scores), compared with 50.00 for the baseline" in report
    header, _, ours = report.split("development sets, percent\n\n")[1].splitlines()[:3]
    assert [cell.strip() for cell in header.split("|")[1:-1]] == ["model", "updates", "RTE", "WSC", "Avg."]
    rte, wsc, average = (float(cell) for cell in ours.split("|")[3:-1])
    assert rte == 100, "it learns nothing that could be tested"
    assert average == pytest.approx((rte + wsc) / 2)
    assert "The average lacks BoolQ, MNLI, MRPC, MultiRC, QQP" in report
    settings = json.loads(next((tmp_path / "out").rglob("BabyLM-RTE/*/result.json")).read_text())["settings"]
    assert (settings["seed"], settings["epochs"], settings["warmup_ratio"]) == (42, 12, 0.06)

    again = invoke("finetune", f"m={START}", "--task", "babylm", "--output", tmp_path / "out", *options)
    assert "runs: 2 of 2 runs are finished" in again and "[1/2]" not in again
    (run,) = (tmp_path / "out" / "runs" / "m" / "BabyLM-RTE").iterdir()
    said = invoke("predict", run, toy_babylm / "rte.valid.jsonl", "--output", tmp_path / "rte.jsonl")
    assert "rte.jsonl: 24 rows\nscores against the file's labels: accuracy 100.00" in said
    (run,) = (tmp_path / "out" / "runs" / "m" / "BabyLM-WSC").iterdir()
    assert "2 rows" in invoke("predict", run, toy_babylm / "wsc.valid.jsonl", "--output", tmp_path / "wsc.jsonl")
    assert "pass the texts too" in refusal("predict", tmp_path / "out", "--output", tmp_path / "none")


def test_what_cannot_be_trained_is_refused(toy_babylm, tmp_path):
    words = ["finetune", f"m={START}", "--task", "babylm", "--output", tmp_path / "out", "--data", toy_babylm]
    assert f"{toy_babylm} contains no training file for BabyLM-BoolQ; with --data" in refusal(
        *words, "--tasks", "boolq"
    )
    assert "'STS-B' is not a BabyLM task; choose from BabyLM-BoolQ" in refusal(*words, "--tasks", "STS-B")
    assert "--protocol par: for BabyLM it must be one of babylm" in refusal(*words, "--protocol", "par")
    assert not (tmp_path / "out").exists()


def test_the_protocol_is_the_pipeline_s():
    usual = BENCHMARK.default_protocol
    assert (usual.lrs, usual.seeds, usual.epochs, usual.batch_size) == ((5e-5,), (42,), 10, 32)
    assert [score.name for score in BENCHMARK.scores] == list(ROWS)


def test_the_verdict_compares_models_on_the_scores_that_all_have(tmp_path, monkeypatch):
    monkeypatch.setattr("lazyformer_fairseq.finetuning.report.draw", lambda *_: None)
    write_grid(tmp_path, {"bert": "b.pt", "lazy": "l.pt"}, ["RTE", "CoLA"], [2e-5], [1])
    for model, task, score in (("bert", "RTE", 0.6), ("lazy", "RTE", 0.7), ("lazy", "CoLA", 0.1)):
        write_result(tmp_path, RunKey(model, task, 2e-5, 1), score, baseline=0.5)
    first = write_report(tmp_path, tmp_path / "report").splitlines()[0]
    assert first == (
        "lazy scores 70.00 on RTE (accuracy), compared with 60.00 for bert and 50.00 for the baseline, which needs no "
        "model. Runs are missing, so this may change."
    )
    write_result(tmp_path, RunKey("bert", "CoLA", 2e-5, 1), 0.4, baseline=0.5)
    first = write_report(tmp_path, tmp_path / "report").splitlines()[0]
    assert first.startswith(
        "bert scores 50.00 on average (2 scores), compared with 40.00 for lazy and 50.00 for the baseline"
    )
