"""The criterion with a model that answers what the test tells it to: losses, and metrics over the whole split."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from fairseq.logging import metrics
from torch import nn

from lazyformer_fairseq.data.datasets.labelled_texts import LabelledTextsDataset
from lazyformer_fairseq.data.glue.metrics import METRICS
from lazyformer_fairseq.data.glue.task_table import TASKS
from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.fairseq_plugin.criterions.glue import GlueCriterion


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
        targets = random.uniform(0, 5, count)
        predictions = logits[:, 0].numpy()
    else:
        targets = random.integers(task.num_classes, size=count)
        predictions = logits.argmax(dim=1).numpy()
    inputs = [np.array([index, *[2] * random.integers(1, 9)]) for index in range(count)]
    data = LabelledTextsDataset(inputs, targets, pad=1, shuffle=False)
    criterion = GlueCriterion(SimpleNamespace(description=task, head_name=task.head_name))
    return criterion, Answers(task.head_name, logits), data, predictions, targets


def batches(data, size):
    order = data.ordered_indices()
    return [data.collater([data[i] for i in order[start : start + size]]) for start in range(0, len(data), size)]


@pytest.mark.parametrize("name", ["CoLA", "MRPC", "STS-B", "MNLI"])
@pytest.mark.parametrize("workers", [1, 2])
def test_metrics_are_those_of_the_whole_split(name, workers):
    criterion, model, data, predictions, targets = make(name)
    criterion.eval()
    logs = [criterion(model, batch)[2] for batch in batches(data, size=4)]
    with metrics.aggregate(new_root=True) as split:
        for start in range(0, len(logs), workers):
            with metrics.aggregate():
                criterion.reduce_metrics(logs[start : start + workers])
    values = split.get_smoothed_values()
    for metric in TASKS[name].metrics:
        assert values[metric] == pytest.approx(METRICS[metric](predictions, targets))
        by_batch = np.mean([METRICS[metric](log["predictions"], log["targets"]) for log in logs])
        assert values[metric] != pytest.approx(by_batch)
    assert not any(key.startswith("_") for key in values)
    assert not criterion.logging_outputs_can_be_summed()


def test_loss_of_classes_is_in_bits_and_training_logs_accuracy():
    criterion, model, data, predictions, targets = make("MNLI")
    criterion.train()
    [batch] = batches(data, size=len(data))
    loss, sample_size, log = criterion(model, batch)
    probabilities = model.logits.softmax(dim=1).numpy()[np.arange(len(targets)), targets]
    assert sample_size == len(targets)
    assert loss.item() == pytest.approx(-np.log(probabilities).sum(), rel=1e-5)
    assert criterion.logging_outputs_can_be_summed()
    with metrics.aggregate(new_root=True) as agg:
        criterion.reduce_metrics([log])
    values = agg.get_smoothed_values()
    assert values["loss"] == pytest.approx(-np.log2(probabilities).mean(), abs=1e-3)
    assert values["accuracy"] == pytest.approx((predictions == targets).mean(), abs=1e-4)


def test_loss_of_scores_is_the_squared_error():
    criterion, model, data, predictions, targets = make("STS-B")
    [batch] = batches(data, size=len(data))
    loss, sample_size, log = criterion(model, batch)
    assert loss.item() / sample_size == pytest.approx(np.square(predictions - targets).mean(), rel=1e-5)
    with metrics.aggregate(new_root=True) as agg:
        criterion.reduce_metrics([log])
    assert agg.get_smoothed_values()["loss"] == pytest.approx(loss.item() / sample_size, abs=1e-3)


@pytest.mark.parametrize("name", ["CoLA", "STS-B"])
def test_half_precision_logits_give_a_float32_loss(name):
    criterion, model, data, *_ = make(name)
    [batch] = batches(data, size=len(data))
    in_full = criterion(model, batch)[0]
    model.logits = model.logits.to(torch.bfloat16).requires_grad_()
    loss, *_ = criterion(model, batch)
    loss.backward()
    assert loss.dtype == torch.float32
    assert loss.item() == pytest.approx(in_full.item(), rel=1e-2)
    assert model.logits.grad.dtype == torch.bfloat16


def test_user_errors():
    criterion, model, data, _, _ = make("CoLA")
    batch = batches(data, size=4)[0]
    with pytest.raises(UserError, match=r"no classification head 'cola'.*--glue-task CoLA"):
        criterion(Answers("rte", model.logits), batch)
    del batch["target"]
    with pytest.raises(UserError, match="no labels"):
        criterion(model, batch)
    with pytest.raises(UserError, match="--task glue alone"):
        GlueCriterion(SimpleNamespace())
