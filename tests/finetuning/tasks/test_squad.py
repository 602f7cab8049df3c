"""Task and criterion ``squad``: losses, marks over whole questions, refusals, a run that learns; prepared files."""

import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from fairseq.tasks import setup_task
from helpers import toy_texts, train_tokenizer
from in_process import config_of
from torch import nn
from toy_squad import START, article, write_squad, write_toy_squad
from validation import batches, logged

from lazyformer_fairseq.data import prepared_squad
from lazyformer_fairseq.data.datasets.question_windows import (
    SpanCollector,
    WindowSettings,
    make_windows,
)
from lazyformer_fairseq.data.squad import read_squad, score
from lazyformer_fairseq.data.text.normalisation import TextSettings
from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.fairseq_plugin.criterions.finetuning import SquadCriterion
from lazyformer_fairseq.fairseq_plugin.models import LazyFormerModel
from lazyformer_fairseq.finetuning.settings import GridSettings
from lazyformer_fairseq.finetuning.tasks.squad import BENCHMARK, baseline_of
from lazyformer_fairseq.training.objectives.spans import SpansObjective

CONTEXT = "Anna sees Ben . Cara sees Dan . Anna sees Eva . Finn hears Gina ."
QUESTIONS = [("Who?", "Cara"), ("Whom?", "Ben"), ("And?", "Anna sees Eva"), ("Who hears?", "Finn")]


class Spans(nn.Module):
    """Logits that depend on a token and its place alone."""

    def __init__(self, size):
        super().__init__()
        self.classification_heads = {"squad": None}
        self.table = nn.Parameter(torch.from_numpy(np.random.default_rng(5).normal(size=(size, 40, 2)) * 3).float())

    def forward(self, src_tokens, src_lengths, has_padding, classification_head_name):
        assert classification_head_name in self.classification_heads
        return self.table[src_tokens, torch.arange(src_tokens.size(1))], {}


@pytest.fixture
def made(tmp_path):
    """Criterion, model and data: each question has several windows."""
    tokenizer = train_tokenizer(tmp_path / "tokenizer", [CONTEXT, "Who? Whom? And?"] * 3, 45, TextSettings())
    path = write_squad(tmp_path / "dev-v1.1.json", article("One", (CONTEXT, QUESTIONS)))
    file = read_squad(path)
    windows = make_windows(tokenizer, file, WindowSettings(16, 4, 4))
    objective = SpansObjective(
        read=lambda split: prepared_squad.PreparedSplit(file, windows),
        tokenizer_folder=tmp_path / "tokenizer",
        task_settings={},
        longest_answer=4,
    )
    criterion = SquadCriterion(SimpleNamespace(objective=objective))
    return criterion, Spans(len(tokenizer.symbols)), objective.dataset("valid")


@pytest.mark.parametrize("workers", [1, 2])
def test_marks_are_of_whole_questions_whatever_the_batches(made, workers):
    criterion, model, data = made
    criterion.eval()
    model.eval()
    assert len(data) >= 2 * len(QUESTIONS)
    with torch.no_grad():
        logs = [criterion(model, batch)[2] for batch in batches(data, size=3)]
    values = logged(criterion, logs, workers)

    collector = SpanCollector(data.windows, data.file, longest=4)
    [whole] = batches(data, size=len(data))
    logits = model(**whole["net_input"], classification_head_name="squad")[0].detach().numpy()
    collector.add(whole["id"].numpy(), logits[..., 0], logits[..., 1])
    found = zip(data.file.questions, collector.answers(), strict=True)
    texts = {question.id: answers[0].text for question, answers in found}
    assert {name: values[name] for name in ("exact_match", "f1")} == pytest.approx(score(data.file, texts))
    assert not any(key.startswith("_") for key in values)
    assert not criterion.logging_outputs_can_be_summed()


def test_loss_is_the_mean_of_both_and_padding_has_no_part(made):
    criterion, model, data = made
    criterion.train()
    loss, sample_size, log = criterion(model, *batches(data, size=len(data)))
    assert sample_size == len(data) and criterion.logging_outputs_can_be_summed()
    expected = 0.0
    for ids, targets in zip(data.windows.inputs, data.windows.targets, strict=True):
        logits = model.table[torch.from_numpy(ids).long(), torch.arange(len(ids))]
        for side in (0, 1):
            expected -= logits[:, side].log_softmax(0)[targets[side]] / 2
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5)
    assert logged(criterion, [log])["loss"] == pytest.approx(loss.item() / len(data) / np.log(2), abs=1e-3)


@pytest.mark.parametrize(("context", "best"), [("x", "x"), ("?!", "?!"), ("a b. c d! e", "c d!")])
def test_sentences_answer_without_a_model_whatever_the_text(context, best, tmp_path):
    file = read_squad(write_squad(tmp_path / "dev.json", article("One", (context, [("D, c?", best)]), ("a e", []))))
    assert baseline_of(file)["exact_match"] == 1.0


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Official files, and a tokenizer beside them."""
    folder = write_toy_squad(tmp_path_factory.mktemp("squad") / "data")
    train_tokenizer(folder / "tokenizer", toy_texts(60), 120, TextSettings())
    return folder


@pytest.fixture
def config(folders):
    """``config(options ...)``: fairseq's configuration for a command line of the task."""

    def build(*arguments, data=folders):
        words = "--task squad --criterion squad --arch bert_tiny --sublayer-pattern sf --optimizer fused_adam"
        more = "--lr-scheduler linear_warmup --max-epoch 1 --batch-size 16 --no-save"
        return config_of(data, *words.split(), *more.split(), *arguments)

    return build


def load(cfg, *splits):
    task = setup_task(cfg.task)
    model = task.build_model(cfg.model)
    for split in splits:
        task.load_dataset(split)
    return task, model


def test_prepared_data_are_the_same_batches(config, folders, tmp_path):
    files = {"train": folders / "train-v1.1.json", "valid": folders / "dev-v1.1.json"}
    settings = WindowSettings(15, 2, 6)
    prepared = prepared_squad.prepare_squad(files, folders / "tokenizer", tmp_path / "prepared", settings)
    assert [prepared.manifest["splits"][split]["rows"] for split in ("train", "valid")] == [120, 24]
    sizes = ("--tokens-per-sample", 15, "--doc-stride", 2, "--max-question-tokens", 6)
    official, _ = load(config(*sizes), "valid")
    ready, _ = load(config(data=prepared.folder), "valid")
    assert len(official.dataset("valid")) == len(ready.dataset("valid")) > 24
    for one, other in zip(official.dataset("valid"), ready.dataset("valid"), strict=True):
        assert torch.equal(one["source"], other["source"]) and torch.equal(one["target"], other["target"])
    with pytest.raises(UserError, match="was prepared with .*15.*, but the options request .*32"):
        setup_task(config("--tokens-per-sample", 32, data=prepared.folder).task)
    (prepared.folder / "valid.npz").write_bytes((prepared.folder / "train.npz").read_bytes())
    with pytest.raises(UserError, match="valid.npz is missing or does not match manifest.json"):
        prepared_squad.PreparedSquad.load(prepared.folder).read("valid")


@pytest.mark.parametrize(
    "options", [("--sublayer-pattern", "s[window=2,global=given] f"), ("--token-types", 2)], ids=["global", "types"]
)
def test_models_that_tell_the_question_apart_get_it(config, options):
    """Where global tokens are given, or tokens have types."""
    task, model = load(config(*options), "valid")
    data = task.dataset("valid")
    inputs = data.collater([data[0], data[5]])["net_input"]
    starts = data.windows.place[[0, 5]].tolist()
    if "--token-types" in options:
        for types, start, length in zip(inputs["token_types"], starts, inputs["src_lengths"], strict=True):
            assert types[: start - 1].eq(0).all() and types[start:length].eq(1).all()
    else:
        assert inputs["global_positions"].sum(1).tolist() == starts
    assert model(**inputs, classification_head_name="squad")[0].isfinite().all()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            "--best-checkpoint-metric accuracy",
            "--best-checkpoint-metric accuracy: SQuAD's metrics are loss, exact_match, f1",
        ),
        ("--best-checkpoint-metric f1", "add --maximize-best-checkpoint-metric"),
        ("--finetune-from-model nowhere.pt", "nowhere.pt: no such file"),
        ("--tokens-per-sample 64", "too short for a context"),
        ("--doc-stride 0", "stride 0: must be at least 1 token"),
        ("--max-answer-tokens 0", "--max-answer-tokens 0: must be at least 1"),
    ],
)
def test_options_that_do_not_fit_are_refused_at_once(config, arguments, message):
    with pytest.raises(UserError, match=message):
        setup_task(config(*arguments.split()).task)


def test_what_is_not_there_is_refused(config, folders, tmp_path):
    with pytest.raises(UserError, match="nowhere: no such folder; pass the folder containing SQuAD's official files"):
        setup_task(config(data="nowhere").task)
    task, model = load(config())
    with pytest.raises(UserError, match="no 'test' split"):
        task.load_dataset("test")
    content = json.loads((folders / "dev-v1.1.json").read_text())
    content["data"][0]["paragraphs"][0]["qas"][0]["answers"] = []
    (tmp_path / "open.json").write_text(json.dumps(content))
    file = read_squad(tmp_path / "open.json", needs_answers=False)
    objective = task.objective
    objective.read = lambda split: prepared_squad.PreparedSplit(file, make_windows(objective.tokenizer, file))
    dataset = objective.dataset("valid")
    batch = dataset.collater([dataset[0]])
    with pytest.raises(UserError, match="open.json contains questions without answers"):
        task.build_criterion(config().criterion)(model, batch)
    with pytest.raises(UserError, match="use --criterion squad"):
        task.build_criterion(config("--criterion", "cross_entropy").criterion)
    with pytest.raises(UserError, match="--tokens-per-sample 384: must not exceed the model's 64"):
        load(config("--max-positions", 64))
    shutil.copytree(folders / "tokenizer", tmp_path / "tokenizer")
    with pytest.raises(UserError, match="mine.json: cannot be read as JSON"):
        load(config("--train-file", "mine.json", data=tmp_path), "train")


@pytest.mark.slow
def test_it_learns_and_the_loaded_model_answers(folders, fairseq_train, tmp_path):
    options = "--criterion squad --arch bert_tiny --batch-size 8 --lr 0.005 --max-epoch 10 --seed 1 --save-interval 5"
    options += " --validate-interval 5 --best-checkpoint-metric f1 --maximize-best-checkpoint-metric"
    task = "squad --tokens-per-sample 32 --max-question-tokens 12"
    state = fairseq_train(folders, options, tmp_path / "run", task=task)
    assert state["extra_state"]["best"] > 0.9
    hub = LazyFormerModel.from_pretrained(str(tmp_path / "run"))
    context = "  Eva  sees the HOUSE!"
    for question, wanted in (("Who sees?", "Eva"), ("Sees what?", "HOUSE")):
        (answer,) = hub.answer(question, context)
        assert answer.text == wanted == context[answer.start : answer.end]
        assert 0.05 < answer.probability <= 1
        assert hub.answer(question, context, n_best=3)[0] == answer
    with pytest.warns(UserWarning, match="1 of 1 questions is longer than the"):
        hub.answer("Who sees the house? " * 30, context)
    with pytest.raises(UserError, match="no span head 'other'; set head to one of squad"):
        hub.answer("Who?", context, head="other")
    with pytest.raises(UserError, match="question ' '"):
        hub.answer(" ", context)


# --- Prepared files: damage, oddities listed, the second time reused


@pytest.fixture
def on_disk(folders, tmp_path):
    """What is prepared of the official file to train on."""
    files = {"train": folders / "train-v1.1.json"}
    return prepared_squad.prepare_squad(files, folders / "tokenizer", tmp_path / "prepared", WindowSettings(15, 2, 6))


def test_half_a_file_other_folders_and_splits_are_refused(on_disk, folders, tmp_path):
    for name in ("train.npz", "train.json"):
        path = on_disk.folder / name
        whole = path.read_bytes()
        for damage in (lambda path=path, whole=whole: path.write_bytes(whole[:-1]), path.unlink):
            damage()
            with pytest.raises(UserError, match=f"{name} is missing or does not .*; remove .*prepared and run"):
                on_disk.read("train")
        path.write_bytes(whole)
    with pytest.raises(UserError, match="no split 'valid', only train"):
        on_disk.read("valid")
    path = on_disk.folder / "manifest.json"
    manifest = json.loads(path.read_text())
    for change, words in (
        ({"format": "lazyformer glue task"}, "not a manifest of prepared SQuAD"),
        ({"format_version": 9}, "format version 9 is not supported, only 1"),
        ({"splits": {"../train": {}}}, "damaged"),
        ({"max_length": "long"}, "damaged"),
    ):
        path.write_text(json.dumps({**manifest, **change}))
        with pytest.raises(UserError, match=words):
            prepared_squad.PreparedSquad.load(on_disk.folder)
    with pytest.raises(UserError, match="nowhere.json: no such file"):
        prepared_squad.prepare_squad({"train": tmp_path / "nowhere.json"}, folders / "tokenizer", tmp_path / "other")


def wanted(data: Path, output: Path, **more) -> GridSettings:
    given = {"data": data, "tokenizer": START.parent / "tokenizer", "output": output, "max_length": 64}
    return GridSettings(**{**given, **more})


def test_counts_are_printed_and_the_second_time_nothing_is_made(toy_squad, tmp_path):
    text = BENCHMARK.prepare(wanted(toy_squad, tmp_path))
    prepared = prepared_squad.PreparedSquad.load(tmp_path / "data")
    train = next(line for line in text.splitlines() if line.startswith("train-v1.1.json"))
    assert train.split()[1:4] == ["16", "48", "0"]
    assert prepared.facts("train", 64).warnings() == []
    assert "note: dev-v1.1.json: this file has 12 questions; the official file has 10,570" in text
    before = (tmp_path / "data" / "manifest.json").stat().st_mtime_ns
    assert BENCHMARK.prepare(wanted(toy_squad, tmp_path)) == text
    assert (tmp_path / "data" / "manifest.json").stat().st_mtime_ns == before
    with pytest.raises(UserError, match="already prepared with different max length"):
        BENCHMARK.prepare(wanted(toy_squad, tmp_path, max_length=80))


def test_questions_that_are_cut_are_counted(tmp_path):
    question = "Who " + "sees the garden and " * 8 + "the river?"
    for name in ("train", "dev"):
        asked = [(question, "Anna"), ("Who?", "Anna"), (question, "Ben")]
        write_squad(tmp_path / f"{name}-v1.1.json", article("One", ("Anna sees Ben.", asked)))
    BENCHMARK.prepare(wanted(tmp_path, tmp_path / "out"))
    prepared = prepared_squad.PreparedSquad.load(tmp_path / "out" / "data")
    (said,) = prepared.facts("valid", 64).warnings("m")
    assert said == (
        "2 of 3 questions of dev-v1.1.json are longer than the 16 tokens that m reads; the excess is truncated"
    )


def test_mistakes_are_named_or_left_out_and_listed(toy_squad, tmp_path):
    train, dev = (json.loads((toy_squad / f"{name}-v1.1.json").read_text())["data"] for name in ("train", "dev"))
    for number in range(7):
        train[number]["paragraphs"][0]["qas"][1]["answers"][0]["answer_start"] += 1
    train[7]["paragraphs"][0]["qas"][0]["answers"] = dev[0]["paragraphs"][0]["qas"][0]["answers"] = []
    write_squad(tmp_path / "files" / "train-v1.1.json", *train)
    write_squad(tmp_path / "files" / "dev-v1.1.json", *dev)
    with pytest.raises(UserError, match="8 mistakes.*--skip-mistakes"):
        BENCHMARK.prepare(wanted(tmp_path / "files", tmp_path / "out"))
    assert not (tmp_path / "out").exists()
    text = BENCHMARK.prepare(wanted(tmp_path / "files", tmp_path / "out", skip_mistakes=True))
    prepared = prepared_squad.PreparedSquad.load(tmp_path / "out" / "data")
    assert text.count("skipped: article ") == 9
    assert "(id Article 6-0-1)" in text and text.count("has no answer") == 2
    assert [len(prepared.read(split).file.questions) for split in ("train", "valid")] == [40, 11]
    with pytest.raises(UserError, match="too short for a context"):
        BENCHMARK.prepare(wanted(toy_squad, tmp_path / "new", max_length=4))
