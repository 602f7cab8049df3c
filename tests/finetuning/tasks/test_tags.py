"""Tags of words: from CoNLL files to a model that tags words, and what is said where a file is wrong."""

import json
import random
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers import NAMES, THINGS, head_logits
from hypothesis import given as for_all
from hypothesis import settings
from hypothesis import strategies as st
from in_process import invoke, refusal
from toy_squad import START

from lazyformer_fairseq import load
from lazyformer_fairseq.data.datasets.tagged_words import TaggedWordsDataset
from lazyformer_fairseq.data.labelled_files import TaskDescription, read_rows
from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.evaluation.metrics import count_tags, entities, metric_of_tags
from lazyformer_fairseq.training.objectives.tags import TagsObjective

GOLD = ["B-PER", "I-PER", "O", "B-LOC"]


@pytest.mark.parametrize(
    ("tags", "found"),
    [
        (GOLD, {("PER", 0, 2), ("LOC", 3, 4)}),
        (["B-PER", "B-PER", "I-LOC"], {("PER", 0, 1), ("PER", 1, 2), ("LOC", 2, 3)}),
        (["I-PER", "I-PER", "O", "I-PER"], {("PER", 0, 2), ("PER", 3, 4)}),  # IOB1
        (["I-PER", "B-PER", "I-PER"], {("PER", 0, 1), ("PER", 1, 3)}),  # IOB1
        (["B-A-B", "I-A-B", "I-A"], {("A-B", 0, 2), ("A", 2, 3)}),
        (["NOUN", "O"], set()),
    ],
)
def test_entities_are_those_of_conlleval(tags, found):
    assert entities(tags) == found


def test_marks_by_hand():
    predicted = (["B-PER", "O", "O", "B-LOC"], ["O", "I-LOC"], ["O"])
    right = (GOLD, ["O", "B-LOC"], ["B-PER"])
    rows = np.array(list(map(count_tags, predicted, right)))
    assert rows.tolist() == [[3, 4, 1, 2, 2], [1, 2, 1, 1, 1], [0, 1, 0, 0, 1]]
    assert metric_of_tags("accuracy", rows) == 4 / 7
    assert metric_of_tags("entity_f1", rows) == 2 * 2 / (3 + 4)
    assert metric_of_tags("entity_f1", np.array([count_tags(["O"], ["O"])])) == 0, "there is none"


# --- files ------------------------------------------------------------------------------------------------------------


def write(path: Path, *sentences: list[tuple[str, ...]], between: str = "\n") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    blocks = ("".join(f"{' '.join(line)}\n" for line in sentence) for sentence in sentences)
    path.write_text(between.join(blocks), encoding="utf-8")
    return path


def rows_of(path: Path) -> list[tuple[int, str, str]]:
    header, *rows = read_rows(path)
    assert header.fields == ["text", "label"]
    return [(row.line, *row.fields) for row in rows]


@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_columns_empty_lines_and_new_documents(tmp_path, end):
    lines = [
        "\ufeff-DOCSTART- -X- O O",
        "",
        "EU NNP \t B-ORG",
        "rejects\tVBZ\tO ",
        "  ",
        "",
        "1\u00a0000 CD O",
        "-DOCSTART-",
    ]
    (tmp_path / "x.conll").write_text(end.join([*lines, "alone", "Anna B-PER"]), encoding="utf-8", newline="")
    assert rows_of(tmp_path / "x.conll") == [
        (3, "EU rejects", "B-ORG O"),
        (7, "1\u00a0000", "O"),
        (9, "alone Anna", " B-PER"),
    ]


WORDS = st.text(st.characters(exclude_categories=("Cs",), exclude_characters=" \t\r\n\ufeff"), min_size=1)


@settings(max_examples=40)
@for_all(st.lists(st.lists(st.tuples(WORDS, st.sampled_from(GOLD)), min_size=1), min_size=1))
def test_sentences_come_back(tmp_path_factory, sentences):
    path = write(tmp_path_factory.mktemp("conll") / "x.conll", *sentences)
    found = [(text.split(" "), tags.split(" ")) for _, text, tags in rows_of(path)]
    assert found == [tuple(map(list, zip(*sentence, strict=True))) for sentence in sentences]


GOOD = "Anna B-PER\nsees O\n\nBen B-PER\n"


@pytest.mark.parametrize(
    ("train", "dev", "options", "words"),
    [
        ("Anna B-PER\nsees\n", GOOD, "", r"train.conll, line 2: the label is empty; correct"),
        (GOOD, "Anna B-PER\n\nsees O\nit B-X\n", "", "dev.conll, line 4: label 'B-X' is not one of bad's labels: B"),
        ("", GOOD, "", "train.conll has no data rows; write one word and its tag per line"),
        (GOOD, "-DOCSTART- O\n\n", "", "dev.conll has no data rows; write one word"),
        (b"Anna B-PER\nM\xfcller B-PER\n", GOOD, "", "train.conll, line 2: not UTF-8 text"),
        (GOOD, None, "", r"contains no dev or valid file \(.tsv, .csv, .jsonl, .conll\); set --dev-share 0.1"),
        ("Anna O\nBen O\n", GOOD, "", "train.conll: all 2 labels are 'O'; at least two"),
        ("Anna S-PER\nBen B-PER\nA I-PER\n", GOOD, "", "train.conll contains tags such as 'B-PER' and 'S-PER'; write"),
        (GOOD, GOOD, "--metric f1", "--metric f1: for entities the metric must be one of entity_f1, accuracy"),
        (GOOD, GOOD, "--label-type classes", "--label-type: does not apply to bad"),
    ],
)  # fmt: skip
def test_what_is_wrong_in_files_is_said_with_file_line_and_remedy(tmp_path, train, dev, options, words):
    (tmp_path / "bad").mkdir()
    for name, text in (("train", train), ("dev", dev)):
        if text is not None:
            content = text if isinstance(text, bytes) else text.encode()
            (tmp_path / "bad" / f"{name}.conll").write_bytes(content)
    said = refusal("finetune", START, "--data", tmp_path / "bad", "--output", tmp_path / "out", *options.split())
    assert re.search(words, said) and not (tmp_path / "out").exists(), said


def test_a_share_of_the_training_sentences_is_held_out(tmp_path):
    path = write(tmp_path / "names" / "train.conll", *sentences(20, seed=1))
    whole = [text for _, *text in rows_of(path)]
    words = ("--data", path.parent, "--tokenizer", START.parent / "tokenizer", "--output", tmp_path / "out")
    assert "dev.conll" in invoke("finetune", *words, "--dev-share", "0.1")
    folder = tmp_path / "out" / "held_out" / "names"
    train, dev = ([text for _, *text in rows_of(folder / f"{name}.conll")] for name in ("train", "dev"))
    assert len(dev) == 2 and sorted(train + dev) == sorted(whole)


def test_both_files_have_tags_or_none_has(tmp_path):
    write(tmp_path / "mixed" / "train.conll", [("Anna", "B-PER"), ("sees", "O")])
    (tmp_path / "mixed" / "dev.tsv").write_text("text\tlabel\nAnna\tB-PER\n")
    said = refusal("finetune", START, "--data", tmp_path / "mixed", "--output", tmp_path / "out")
    assert "contains train.conll and dev.tsv; write both as .conll files" in said
    (tmp_path / "mixed" / "train.tsv").write_text("text\tlabel\nAnna\tB-PER\n")
    said = refusal("finetune", START, "--data", tmp_path / "mixed", "--output", tmp_path / "out")
    assert "contains train.tsv and train.conll; keep only one" in said


# --- training and prediction ------------------------------------------------------------------------------------------


def test_the_loss_is_of_words_that_are_read_and_cut_ones_are_outside_of_entities():
    inputs = [np.array([0, 5, 6, 2]), np.array([0, 7, 8, 9, 6, 2])]
    targets = [np.array([1, 0, 2, 1, 3, 0]), np.array([1, 0, 4, 1])]
    data = TaggedWordsDataset(inputs, targets, pad=1, shuffle=False)
    objective = TagsObjective(data="nowhere", tokenizer_folder=Path("nowhere"))
    objective.description = TaskDescription("x", {}, ("entity_f1", "accuracy"), ("B-A", "I-A"), tags_words=True)
    batch = data.collater([data[0], data[1]])
    logits = torch.randn(2, 6, 2, generator=torch.Generator().manual_seed(1)).double()
    logits[:, :, 1] = torch.tensor([-9.0, -8, 7, -6, 5, 4]).double()  # B-A, but I-A at the places 2, 4 and 5
    loss, log = objective.score(batch, logits, training=False)
    right = ((0, 1, 0), (0, 2, 1), (1, 1, 0), (1, 4, 1))
    by_hand = sum(logits[row, place].logsumexp(0) - logits[row, place, tag] for row, place, tag in right)
    assert loss.item() == pytest.approx(by_hand.item(), rel=1e-6)
    # B-A I-A O, where the last word is B-A too; B-A I-A
    assert log["rows"].tolist() == [[2, 3, 1, 1, 2], [2, 2, 1, 1, 1]]
    assert objective.metric("entity_f1", log["rows"]) == 2 * 2 / 5


def sentences(count: int, seed: int) -> list[list[tuple[str, ...]]]:
    """Names are people, but places after ``near``; the garden and its like have a word before them."""
    draw = random.Random(seed)
    found = []
    for _ in range(count):
        found.append([(draw.choice(NAMES), "NN", "B-PER"), ("sees", "V", "O"), ("the", "D", "B-LOC")])
        found[-1] += [(draw.choice(THINGS), "NN", "I-LOC"), ("near", "P", "O"), (draw.choice(NAMES), "NN", "B-LOC")]
    return found


def fine_tuned(folder: Path, *options: object) -> str:
    shared = "--lrs 1e-2 --seeds 1 --batch-size 8 --gpus none --workers 1".split()
    return invoke("finetune", f"m={START}", "--data", folder / "names", "--output", folder / "out", *shared, *options)


@pytest.fixture(scope="module")
def names(tmp_path_factory) -> Path:
    """A folder with ``names``, and ``out``, what came of it."""
    folder = tmp_path_factory.mktemp("tags")
    write(folder / "names" / "train.conll", [("-DOCSTART-", "-X-", "O")], *sentences(64, seed=1))
    write(folder / "names" / "valid.conll", *sentences(12, seed=2))
    said = fine_tuned(folder, "--epochs", "6")
    assert "names: 4 tags (B-LOC, B-PER, I-LOC, O); entity_f1 selects the epoch and the learning rate; words in" in said
    assert f"to use the model: lazyformer predict {folder / 'out'} texts.conll" in said
    assert "most frequent tag of each word" in said
    return folder


@pytest.fixture(scope="module")
def run_of_names(names) -> Path:
    (result,) = (names / "out").rglob("result.json")
    found = json.loads(result.read_text())
    assert found["metrics"]["valid"]["entity_f1"] > 0.95 > 0.8 > found["baseline"]["valid"]["entity_f1"] > 0.3
    assert found["metrics"]["valid"]["accuracy"] > found["baseline"]["valid"]["accuracy"] > 0.6
    return result.parent


def test_the_baseline_is_each_words_most_frequent_tag(names, run_of_names):
    counted: dict[str, list[str]] = {}
    for word, _, tag in (line for sentence in sentences(64, seed=1) for line in sentence):
        counted.setdefault(word, []).append(tag)
    everything = [tag for tags in counted.values() for tag in tags]
    right = 0
    for word, _, tag in (line for sentence in sentences(12, seed=2) for line in sentence):
        seen = counted.get(word, everything)
        right += max(dict.fromkeys(seen), key=seen.count) == tag
    found = json.loads((run_of_names / "result.json").read_text())["baseline"]["valid"]["accuracy"]
    assert found == right / 72


def test_predictions_are_a_last_column_or_lines_of_words_and_tags(names, run_of_names, tmp_path):
    said = invoke("predict", names / "out", names / "names" / "valid.conll", "--output", tmp_path / "valid.conll")
    assert "valid.conll: 12 rows\nscores against the file's tags in 12 of the rows: entity_f1 " in said
    own = (names / "names" / "valid.conll").read_text().splitlines()
    lines = (tmp_path / "valid.conll").read_text().splitlines()
    assert [line.rpartition(" ")[0] for line in lines] == own
    assert {line.rpartition(" ")[2] for line in lines} == {"", "B-LOC", "B-PER", "I-LOC", "O"}
    f1 = json.loads((run_of_names / "result.json").read_text())["metrics"]["valid"]["entity_f1"]
    assert f"entity_f1 {100 * f1:.2f}" in said

    (tmp_path / "x.txt").write_text("anna  sees the river\n\nben\n")
    assert "1 of 3 rows has no text" in invoke("predict", run_of_names, tmp_path / "x.txt")
    written = (tmp_path / "x.predictions.conll").read_text()
    assert written == "anna\tB-PER\nsees\tO\nthe\tB-LOC\nriver\tI-LOC\n\n\nben\tB-PER\n\n"
    invoke("predict", run_of_names, tmp_path / "x.txt", "--output", tmp_path / "x.jsonl")
    first = json.loads((tmp_path / "x.jsonl").read_text().splitlines()[0])
    assert first == {"text": "anna  sees the river", "prediction": ["B-PER", "O", "B-LOC", "I-LOC"]}
    (tmp_path / "y.conll").write_text("anna B-PER\nsees\n\nben B-LORD\n")
    said = invoke("predict", run_of_names, tmp_path / "y.conll")
    assert f"no scores: {tmp_path / 'y.conll'}, line 2: the label is empty" in said


@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_a_conll_file_keeps_its_lines(run_of_names, tmp_path, end):
    """Columns, documents and empty lines stay where they are, so that conlleval and diff find every line."""
    given = [
        "-DOCSTART- -X- O",
        "",
        "anna NN B-PER",
        "sees  V O ",
        "",
        "",
        "-DOCSTART-",
        "ben",
        "sees",
        " ",
        "ben\tB-X",
    ]
    (tmp_path / "x.conll").write_text(end.join([*given, "", ""]), newline="")
    invoke("predict", run_of_names, tmp_path / "x.conll")
    assert (tmp_path / "x.predictions.conll").read_bytes().decode().split("\n") == [
        *("-DOCSTART- -X- O O", "", "anna NN B-PER B-PER", "sees  V O O", "", "", "-DOCSTART-"),
        *("ben\tB-PER", "sees\tO", " ", "ben\tB-X\tB-PER", "", ""),
    ]


def test_words_that_are_cut_off_are_counted_and_one_tag_alone_is_named(run_of_names, tmp_path):
    write(tmp_path / "long.conll", [("anna", "O")] * 100, [("ben", "O")])
    said = invoke("predict", run_of_names, tmp_path / "long.conll")
    assert "1 of 2 rows is longer than the 64 tokens" in said
    cut = int(re.search(r"(\d+) of 101 words were not part of the model's input, and received the tag O", said)[1])
    (long,) = load(run_of_names).predict_rows(["anna " * 100])
    assert long.cut_words == cut > 0 and long.label[-cut:] == ["O"] * cut and long.label[-cut - 1] != "O"
    assert "all tags in the file are 'O', so these scores are meaningless" in said


def test_rows_and_dropout_are_those_that_options_ask_for_and_one_tag_alone_is_marked(tmp_path):
    write(tmp_path / "names" / "train.conll", *sentences(16, seed=1))
    write(tmp_path / "names" / "dev.conll", [("anna", "O"), ("sees", "O")], [("ben", "O")])
    said = fine_tuned(tmp_path, *"--epochs 1 --max-train-rows 8 --glue-head linear:0.3".split())
    sentence = "names: all words of dev.conll have the tag 'O', so scores on them are meaningless"
    assert f"note: {sentence}" in said and f"- {sentence}\n" in said
    assert re.search(r"\| m .* \d+\.\d\d \(one class\) ", said)
    (path,) = (tmp_path / "out").rglob("result.json")
    result = json.loads(path.read_text())
    assert result["train_rows"] == 8
    record = json.loads(path.with_name("run.json").read_text())
    assert record["model"]["pooler_dropout"] == 0.3 and record["task"]["max_train_rows"] == 8
    for head in ("dense:0.1", "dense"):
        said = refusal("finetune", START, "--output", tmp_path / "out", "--glue-head", head)
        assert f"--glue-head {head}: tagging requires a linear head; linear:0.1 sets the head's dropout" in said


def test_python_and_exports_tag_alike(run_of_names, tmp_path):
    texts = ["anna sees the river near ben", "", "otto"]
    loaded = load(run_of_names)
    with pytest.warns(UserWarning, match="1 of 3 texts are empty"):
        answers = loaded.predict(texts)
    assert answers[0].label == ["B-PER", "O", "B-LOC", "I-LOC", "O", "B-LOC"] and answers[1].label is None
    with pytest.warns(UserWarning, match="longer than the 64 tokens"):
        (long,) = loaded.predict(["anna " * 100])
    assert long.is_cut and len(long.label) == 100 and long.label[-1] == "O"
    assert "O" not in long.label[:9]
    invoke("export", run_of_names, tmp_path / "model")
    with pytest.warns(UserWarning):
        assert load(tmp_path / "model").predict(texts) == answers

    pytest.importorskip("transformers")
    from transformers import AutoModelForTokenClassification

    invoke("export", run_of_names, tmp_path / "hf", "--to", "huggingface")
    model = AutoModelForTokenClassification.from_pretrained(tmp_path / "hf", trust_remote_code=True)
    assert list(model.config.id2label.values()) == ["B-LOC", "B-PER", "I-LOC", "O"]
    logits = model(loaded.encode(texts[0])).logits[0]
    torch.testing.assert_close(logits, head_logits(loaded, "custom_names", texts[0])[0], rtol=1e-4, atol=1e-5)
    assert "custom_names: B-LOC, B-PER, I-LOC, O" in (tmp_path / "hf" / "README.md").read_text()

    # And back, also from what transformers saves.
    model.save_pretrained(tmp_path / "saved")
    shutil.copytree(tmp_path / "hf" / "tokenizer", tmp_path / "saved" / "tokenizer")
    for folder in ("hf", "saved"):
        said = invoke("import", tmp_path / folder, tmp_path / f"{folder}_back", "--head-name", "custom_names")
        assert "not imported" not in said
        with pytest.warns(UserWarning):
            assert load(tmp_path / f"{folder}_back").predict(texts) == answers


def test_fairseqs_task_refuses_them(names, run_of_names, glue_config):
    from fairseq.tasks import setup_task

    folder = names / "out" / "tasks" / "names"
    cfg = glue_config(folder, "--tokenizer-folder", folder / "tokenizer", "--best-checkpoint-metric", "accuracy")
    with pytest.raises(UserError, match="names has per-word tags, which only `lazyformer finetune` can train on"):
        setup_task(cfg.task)


def test_parts_of_speech_are_measured_by_accuracy_and_cut_words_are_counted(tmp_path):
    tagged = [[line[:2] for line in sentence] for sentence in sentences(16, seed=1)]
    for name in ("train", "dev"):
        write(tmp_path / "names" / f"{name}.conll", *tagged)
    said = fine_tuned(tmp_path, "--epochs", "1", "--max-length", "8")
    assert "names: 4 tags (D, NN, P, V); accuracy selects" in said and "words cut at 8" in said
    (cut,) = set(re.findall(r"(?m)^names .*?\.conll +16 +0 +16 +(\d+)", said))
    result = json.loads(next((tmp_path / "out").rglob("result.json")).read_text())
    assert int(cut) >= 16 and result["metrics"]["dev"]["accuracy"] <= 1 - int(cut) / 96
    assert list(result["metrics"]["dev"]) == ["accuracy"]
    assert [split["cut"] for split in result["splits"]] == [16, 16]
