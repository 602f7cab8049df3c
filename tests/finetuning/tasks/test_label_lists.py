"""Texts with several labels: lists of JSON in files, a sigmoid per label, lists in predictions and exports."""

import csv
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers import NAMES, THINGS
from hypothesis import given as for_all
from hypothesis import strategies as st
from in_process import invoke, refusal
from toy_squad import START

from lazyformer_fairseq.data.labelled_files import TaskDescription, parse_label_list
from lazyformer_fairseq.evaluation.metrics import METRICS
from lazyformer_fairseq.fairseq_plugin.models import LazyFormerModel
from lazyformer_fairseq.finetuning.benchmark import _best_constant_list
from lazyformer_fairseq.training.objectives.labelled_texts import LabelledTextsObjective

LABELS = ("calm", "glad", "sad")
LABELS_OF_FIRST_WORD = {"the": ["calm"], "anna": ["glad", "sad"], "ben": []}
OPTIONS = "--lrs 5e-3 --seeds 1 --epochs 20 --batch-size 8 --gpus none --workers 1".split()
TASK = TaskDescription("t", {}, ("micro_f1",), LABELS, is_custom=True, is_multi_label=True)


def rows(count: int) -> list[dict]:
    """Texts and their labels, which their first word decides: none, one or two."""
    texts = [f"sees the {thing} near {name}" for thing in THINGS for name in NAMES]
    found = []
    for number in range(count):
        first = list(LABELS_OF_FIRST_WORD)[number % 3]
        found.append({"text": f"{first} {texts[number % len(texts)]}", "label": LABELS_OF_FIRST_WORD[first]})
    return found


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Path:
    """A folder with ``words``, ``out``, and what the command said."""
    folder = tmp_path_factory.mktemp("lists")
    (folder / "words").mkdir()
    (folder / "words" / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows(96)))
    with (folder / "words" / "dev.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["text", "label"])
        writer.writerows([row["text"], json.dumps(row["label"])] for row in rows(24))
    words = ["finetune", f"m={START}", "--data", folder / "words", "--output", folder / "out", *OPTIONS]
    (folder / "said").write_text(invoke(*words))
    return folder


def test_lists_are_learnt_and_come_back_from_predict_and_exports(trained, tmp_path):
    said = (trained / "said").read_text()
    assert "words: lists of 3 labels (calm, glad, sad); micro_f1 selects the epoch and the learning rate" in said
    (result,) = (trained / "out").rglob("result.json")
    marks = json.loads(result.read_text())["metrics"]["dev"]
    assert marks == {"micro_f1": 1, "macro_f1": 1}, "it learns nothing that could be tested"

    said = invoke("predict", trained / "out", trained / "words" / "dev.csv", "--output", tmp_path / "x.jsonl")
    assert "x.jsonl: 24 rows\nscores against the file's labels: micro_f1 100.00, macro_f1 100.00" in said
    found = [json.loads(line) for line in (tmp_path / "x.jsonl").read_text().splitlines()]
    assert [row["prediction"] for row in found] == [row["label"] for row in rows(24)]
    for row in found:
        assert row["prediction"] == [label for label, share in row["probabilities"].items() if share > 0.5]
    invoke("predict", trained / "out", trained / "words" / "train.jsonl", "--output", tmp_path / "x.tsv")
    header, first, *_ = [line.split("\t") for line in (tmp_path / "x.tsv").read_text().splitlines()]
    assert header == ["text", "label", "prediction", "probabilities"]
    assert json.loads(first[2]) == rows(1)[0]["label"] and set(json.loads(first[3])) == set(LABELS)

    texts = [row["text"] for row in rows(24)]
    answers = LazyFormerModel.from_pretrained(result.parent).predict(texts)
    assert [answer.label for answer in answers] == [row["label"] for row in rows(24)]
    invoke("export", trained / "out", tmp_path / "model")
    assert LazyFormerModel.from_pretrained(tmp_path / "model").predict(texts) == answers


def test_an_export_to_transformers_says_that_there_are_several_and_comes_back(trained, tmp_path):
    transformers = pytest.importorskip("transformers")
    (result,) = (trained / "out").rglob("result.json")
    invoke("export", result.parent, tmp_path / "hf", "--to", "huggingface")
    config = json.loads((tmp_path / "hf" / "config.json").read_text())
    assert config["problem_type"] == "multi_label_classification"
    assert config["id2label"] == dict(zip("012", LABELS, strict=True))
    ours = LazyFormerModel.from_pretrained(result.parent)
    model = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path / "hf", trust_remote_code=True)
    texts = [row["text"] for row in rows(8)]
    ids = ours.encode(*texts)
    targets = torch.tensor([TASK.target_of(row["label"]) for row in rows(8)])
    output = model(ids, attention_mask=ids.ne(ours.tokenizer.special.pad), labels=targets.float())
    for shares, answer in zip(output.logits.sigmoid().tolist(), ours.predict(texts), strict=True):
        assert list(answer.probabilities.values()) == pytest.approx(shares, abs=1e-5)
    loss, _ = objective().score({"target": targets}, output.logits, training=True)
    assert loss.item() / 8 == pytest.approx(output.loss.item(), rel=1e-6)
    invoke("import", tmp_path / "hf", tmp_path / "back")
    (task,) = LazyFormerModel.from_pretrained(tmp_path / "back").tasks.values()
    assert task.is_multi_label and task.labels == LABELS


def objective() -> LabelledTextsObjective:
    made = LabelledTextsObjective(data="nowhere")
    made.description = TASK
    return made


def test_the_loss_is_binary_cross_entropy_and_f1_is_counted_by_hand():
    logits = torch.tensor([[0.3, -2.0, 1.0], [-0.5, 0.25, 4.0]], requires_grad=True)
    targets = torch.tensor([[1, 0, 0], [0, 1, 1]])
    loss, log = objective().score({"target": targets}, logits, training=False)
    shares = 1 / (1 + np.exp(-logits.detach().double().numpy()))
    of_labels = np.where(targets.numpy() == 1, -np.log(shares), -np.log(1 - shares))
    assert loss.item() == pytest.approx(of_labels.mean(1).sum(), rel=1e-6)
    loss.backward()
    assert logits.grad.numpy() == pytest.approx((shares - targets.numpy()) / 3, rel=1e-5)
    assert log["rows"].tolist() == [[1, 0, 1, 1, 0, 0], [0, 1, 1, 0, 1, 1]]
    assert log["ncorrect"] == 1
    # Three of the four predicted labels are right, and all three that are there were found; the last has 2/3.
    assert objective().metric("micro_f1", log["rows"]) == pytest.approx(2 * 3 / (4 + 3))
    assert objective().metric("macro_f1", log["rows"]) == pytest.approx((1 + 1 + 2 / 3) / 3)


def test_the_baseline_is_the_best_constant_list():
    targets = np.array([[1, 0, 0], [1, 1, 0], [1, 0, 0], [0, 0, 1]])
    assert _best_constant_list(targets, METRICS["micro_f1"]).tolist() == [1, 0, 0]
    assert _best_constant_list(targets, METRICS["macro_f1"]).tolist() == [1, 1, 1]


@for_all(st.lists(st.text(), max_size=4))
def test_a_list_of_json_is_read_as_it_was_written(labels):
    assert parse_label_list(json.dumps(labels)) == labels


@for_all(st.text())
def test_any_other_word_is_no_list_or_one_of_json(word):
    found = parse_label_list(word)
    assert found is None or isinstance(json.loads(word), list)


@for_all(st.lists(st.sampled_from(LABELS)))
def test_targets_and_lists_stand_for_each_other(labels):
    target = TASK.target(json.dumps(labels))
    assert target == TASK.target_of(labels) == tuple(int(label in labels) for label in LABELS)
    assert set(json.loads(TASK.word_of(target))) == set(labels)


def test_what_options_say_otherwise_is_refused(trained, tmp_path):
    words = ["finetune", f"m={START}", "--data", trained / "words", "--output", tmp_path / "out"]
    assert "--label-type classes: the first row of" in refusal(*words, "--label-type", "classes")
    assert "--metric accuracy: for lists the metric must be one of micro_f1, macro_f1" in refusal(
        *words, "--metric", "accuracy"
    )
    assert "--labels: 'joy' is repeated, or does not occur in" in refusal(*words, "--labels", "calm,joy")
    bad = trained / "words" / "unseen.jsonl"
    bad.write_text('{"text": "anna", "label": ["calm"]}\n{"text": "ben", "label": ["ben"]}\n')
    assert f"no scores: {bad}, line 2: label 'ben' is not one of" in invoke(
        "predict", trained / "out", bad, "--output", tmp_path / "y.jsonl"
    )
