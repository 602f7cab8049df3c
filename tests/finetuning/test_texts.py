"""Task and criterion ``glue``: metrics, encoding, what is loaded and refused, losses, and a run that learns."""

import math
import re
import warnings
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from fairseq.tasks import setup_task
from helpers import head_logits, write_toy_glue
from torch import nn
from validation import batches, logged

from lazyformer_fairseq.data.datasets.labelled_texts import LabelledTextsDataset
from lazyformer_fairseq.data.encoding import encode_split
from lazyformer_fairseq.data.glue import TASKS
from lazyformer_fairseq.data.labelled_files import Example, SplitFile
from lazyformer_fairseq.data.text.tokenizer import Tokenizer
from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.evaluation.metrics import METRICS
from lazyformer_fairseq.fairseq_plugin.criterions.finetuning import GlueCriterion
from lazyformer_fairseq.fairseq_plugin.models import LazyFormerModel
from lazyformer_fairseq.training.objectives.labelled_texts import LabelledTextsObjective


@pytest.mark.parametrize(
    ("name", "predictions", "targets", "expected"),
    [
        ("accuracy", [1, 0, 1, 1], [1, 0, 0, 1], 3 / 4),
        ("f1", [1, 0, 1, 1], [1, 0, 0, 1], 2 * 2 / (2 * 2 + 1 + 0)),  # 2 TP, 1 FP, 0 FN
        ("matthews", [1, 0, 1, 1], [1, 0, 0, 1], (2 * 1 - 1 * 0) / math.sqrt(3 * 2 * 2 * 1)),
        # 3 of 4 right; predicted 2, 1, 1 times, true 1, 1, 2 times
        ("matthews", [0, 1, 2, 0], [0, 1, 2, 2], (3 * 4 - 5) / math.sqrt((16 - 6) * (16 - 6))),
        ("pearson", [1.0, 2.0, 3.0], [1.0, 2.0, 4.0], 3 / math.sqrt(2 * 42 / 9)),
        ("spearman", [1.0, 2.0, 3.0, 4.0], [10.0, 9.0, 20.0, 30.0], 1 - 6 * (1 + 1) / (4 * 15)),
        ("spearman", [1.0, 2.0, 2.0], [1.0, 2.0, 3.0], math.sqrt(3) / 2),  # ranks 1, 2.5, 2.5
    ],
)
def test_by_hand(name, predictions, targets, expected):
    assert METRICS[name](np.array(predictions), np.array(targets)) == pytest.approx(expected)


@pytest.mark.parametrize("name", ["matthews", "pearson", "spearman", "f1"])
def test_undefined_is_zero_and_silent(name):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for predictions, targets in (([0] * 3, [0, 1, 1]), ([0, 1, 1], [0] * 3), ([0, 0], [0, 0]), ([0], [0])):
            assert METRICS[name](np.array(predictions), np.array(targets)) == 0.0


def test_a_pair_has_two_separators_and_long_inputs_are_cut_and_counted(data_folder):
    tokenizer = Tokenizer.load(data_folder / "tokenizer")

    def encode(*texts, max_length=512):
        return encode_split(tokenizer, SplitFile(Path("x"), [Example(pair, 0, 1) for pair in texts], []), max_length)

    bos, eos = tokenizer.dictionary.bos(), tokenizer.dictionary.eos()
    first, second = tokenizer.encode("Anna sees Ben"), tokenizer.encode("the old mirror")
    inputs, counts = encode(("Anna sees Ben",), ("Anna sees Ben", "the old mirror"))
    assert [ids.tolist() for ids in inputs] == [[bos, *first, eos], [bos, *first, eos, eos, *second, eos]]
    assert (counts["truncated"], counts["unknown_token_share"]) == (0, 0.0)
    long = "Anna sees Ben near the old mirror " * 10
    inputs, counts = encode(("Anna",), (long,), ("Anna", long), max_length=24)
    assert counts["truncated"] == 2 and [len(ids) for ids in inputs[1:]] == [24, 24]
    assert all(ids[-1] == eos for ids in inputs)


@pytest.mark.parametrize("texts", [("\0\1",), ("\0", "Anna"), ("Anna", "\0 \2")])
def test_a_labelled_text_without_a_token_is_refused_by_its_line(data_folder, texts):
    tokenizer = Tokenizer.load(data_folder / "tokenizer")
    examples = [Example(("Anna",) * len(texts), 1, 2), Example(texts, 0, 3)]
    with pytest.raises(UserError, match="x.tsv, line 3: a sentence contains only control characters"):
        encode_split(tokenizer, SplitFile(Path("x.tsv"), examples, []), 24)
    unlabelled = [replace(example, target=None) for example in examples]  # each row of a test set needs an answer
    assert len(encode_split(tokenizer, SplitFile(Path("x.tsv"), unlabelled, []), 24)[0]) == 2


def test_rows_of_unknown_tokens_alone_are_counted_with_their_first_line(data_folder, caplog):
    tokenizer = Tokenizer.load(data_folder / "tokenizer")
    pairs = [("Anna", "Ben"), ("Anna", "漢字"), ("漢 字", "漢字"), ("Anna 漢字", "the")]
    examples = [Example(pair, 0, line) for line, pair in enumerate(pairs, start=2)]
    encode_split(tokenizer, SplitFile(Path("x.tsv"), examples, []), 24)
    assert "x.tsv: 2 of 4 rows have a text without known tokens" in caplog.text
    assert caplog.messages[-1].endswith("the first is in line 3")
    caplog.clear()
    encode_split(tokenizer, SplitFile(Path("x.tsv"), examples[:1], []), 24)
    assert not caplog.text


class Answers(nn.Module):
    """Gives each text the logits whose row is its first id."""

    def __init__(self, head, logits):
        super().__init__()
        self.classification_heads = {head: None}
        self.logits = logits

    def forward(self, src_tokens, src_lengths, has_padding, classification_head_name):
        assert classification_head_name in self.classification_heads
        return self.logits[src_tokens[:, 0]], {}


def make(name, count=19):
    """Criterion, model, dataset and the predictions for a task, with texts of random lengths."""
    random = np.random.default_rng(3)
    task = TASKS[name]
    logits = torch.from_numpy(random.normal(size=(count, task.num_classes)).astype(np.float32))
    if task.is_regression:
        targets, predictions = random.uniform(0, 5, count), logits[:, 0].numpy()
    else:
        targets, predictions = random.integers(task.num_classes, size=count), logits.argmax(dim=1).numpy()
    inputs = [np.array([index, *[2] * random.integers(1, 9)]) for index in range(count)]
    data = LabelledTextsDataset(inputs, targets, pad=1, shuffle=False)
    objective = LabelledTextsObjective(data="nowhere", task=name)
    criterion = GlueCriterion(SimpleNamespace(objective=objective))
    return criterion, Answers(task.head_name, logits), data, predictions, targets


@pytest.mark.parametrize("name", ["CoLA", "MRPC", "STS-B", "MNLI"])
@pytest.mark.parametrize("workers", [1, 2])
def test_metrics_are_those_of_the_whole_split(name, workers):
    criterion, model, data, predictions, targets = make(name)
    criterion.eval()
    model.eval()
    logs = [criterion(model, batch)[2] for batch in batches(data, size=4)]
    values = logged(criterion, logs, workers)
    for metric in TASKS[name].metrics:
        assert values[metric] == pytest.approx(METRICS[metric](predictions, targets))
        by_batch = np.mean([METRICS[metric](*log["rows"].T) for log in logs])
        assert values[metric] != pytest.approx(by_batch)
    assert not any(key.startswith("_") for key in values)
    assert not criterion.logging_outputs_can_be_summed()


def test_loss_of_classes_is_in_bits_and_of_scores_the_squared_error():
    criterion, model, data, predictions, targets = make("MNLI")
    criterion.train()
    [batch] = batches(data, size=len(data))
    loss, sample_size, log = criterion(model, batch)
    probabilities = model.logits.softmax(dim=1).numpy()[np.arange(len(targets)), targets]
    assert sample_size == len(targets) and criterion.logging_outputs_can_be_summed()
    assert loss.item() == pytest.approx(-np.log(probabilities).sum(), rel=1e-5)
    values = logged(criterion, [log])
    assert values["loss"] == pytest.approx(-np.log2(probabilities).mean(), abs=1e-3)
    assert values["accuracy"] == pytest.approx((predictions == targets).mean(), abs=1e-4)

    criterion, model, data, predictions, targets = make("STS-B")
    loss, sample_size, log = criterion(model, *batches(data, size=len(data)))
    assert loss.item() / sample_size == pytest.approx(np.square(predictions - targets).mean(), rel=1e-5)
    assert logged(criterion, [log])["loss"] == pytest.approx(loss.item() / sample_size, abs=1e-3)


@pytest.mark.parametrize("name", ["CoLA", "STS-B"])
def test_half_precision_logits_give_a_float32_loss(name):
    criterion, model, data, *_ = make(name)
    [batch] = batches(data, size=len(data))
    in_full = criterion(model, batch)[0]
    model.logits = model.logits.to(torch.bfloat16).requires_grad_()
    loss, *_ = criterion(model, batch)
    loss.backward()
    assert loss.dtype == torch.float32 and model.logits.grad.dtype == torch.bfloat16
    assert loss.item() == pytest.approx(in_full.item(), rel=1e-2)


def test_user_errors():
    criterion, model, data, _, _ = make("CoLA")
    batch = batches(data, size=4)[0]
    with pytest.raises(UserError, match=r"no head 'cola'; fine-tune the model with --task glue"):
        criterion(Answers("rte", model.logits), batch)
    del batch["target"]
    with pytest.raises(UserError, match="no labels"):
        criterion(model, batch)
    with pytest.raises(UserError, match="only with --task glue"):
        GlueCriterion(SimpleNamespace())


def test_tokenizer_is_found_beside_the_checkpoint(toy_glue, glue_config, data_folder, tmp_path):
    (tmp_path / "model.pt").touch()
    folder = toy_glue / "CoLA"
    cfg = glue_config(folder, "--tokenizer-folder", "", "--finetune-from-model", tmp_path / "model.pt")
    with pytest.raises(UserError, match=re.escape(f"no tokenizer at {tmp_path}/tokenizer or {folder}/tokenizer")):
        setup_task(cfg.task)
    Tokenizer.load(data_folder / "tokenizer").save(tmp_path / "tokenizer")
    assert setup_task(cfg.task).objective.tokenizer_folder == tmp_path / "tokenizer"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--glue-task COCA", "'COCA' is not a GLUE task"),
        ("--best-checkpoint-metric f1", "--best-checkpoint-metric f1: CoLA's metrics are loss, matthews, accuracy"),
        ("--best-checkpoint-metric matthews", "add --maximize-best-checkpoint-metric"),
        ("--maximize-best-checkpoint-metric", "drop --maximize-best-checkpoint-metric"),
        ("--valid-subset valid,test", "test split has no labels"),
        ("--finetune-from-model nowhere.pt", "nowhere.pt: no such file"),
        ("--tokenizer-folder nowhere", "nowhere/tokenizer.json: cannot be read"),
    ],
)
def test_options_that_do_not_fit_are_refused_at_once(glue_config, toy_glue, arguments, message):
    with pytest.raises(UserError, match=message):
        setup_task(glue_config(toy_glue / "CoLA", *arguments.split()).task)


@pytest.mark.parametrize("arch", ["roberta_base", "transformer_xl_tiny"])
def test_other_models_are_refused(glue_config, toy_glue, arch):
    cfg = glue_config(toy_glue / "CoLA", "--arch", arch)
    with pytest.raises(UserError, match=f"--arch {cfg.model._name} is not one of this package's masked language "):
        setup_task(cfg.task).build_model(cfg.model)


def test_it_learns_and_a_checkpoint_goes_on_to_another_task(data_folder, fairseq_train, tmp_path):
    glue = write_toy_glue(tmp_path / "glue")  # the label of CoLA says whether a sentence starts with "the"
    shared = "--criterion glue --arch bert_tiny --sublayer-pattern sfsf --batch-size 16"
    shared += " --maximize-best-checkpoint-metric"
    options = f"{shared} --lr 0.006 --max-epoch 4 --best-checkpoint-metric matthews"
    tokenizer = f"--tokenizer-folder {data_folder / 'tokenizer'}"
    state = fairseq_train(glue / "CoLA", options, tmp_path / "cola", task=f"glue {tokenizer}")
    assert state["extra_state"]["best"] > 0.9
    hub = LazyFormerModel.from_pretrained(str(tmp_path / "cola"))
    logits = head_logits(hub, "cola", "the anna sees the river", "anna sees the river")
    assert logits.argmax(dim=1).tolist() == [1, 0]

    options = f"{shared} --max-epoch 1 --best-checkpoint-metric pearson --finetune-from-model"
    options = f"{options} {tmp_path / 'cola' / 'checkpoint_best.pt'}"
    state = fairseq_train(glue / "STS-B", options, tmp_path / "sts-b", task="glue")
    heads = {name.split(".")[1] for name in state["model"] if name.startswith("classification_heads")}
    assert heads == {"sts-b"}
    assert torch.isfinite(torch.tensor(state["extra_state"]["best"]))
