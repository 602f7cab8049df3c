"""The criterion with a model that answers what the test tells it to: losses, and marks over whole questions."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from fairseq.logging import metrics
from helpers import dictionary_of, train_tokenizer
from torch import nn
from toy_squad import article, write_squad

from lazyformer_fairseq.data.datasets.question_windows import QuestionWindowsDataset
from lazyformer_fairseq.data.squad.answers import SpanCollector
from lazyformer_fairseq.data.squad.metrics import score
from lazyformer_fairseq.data.squad.official import read_squad
from lazyformer_fairseq.data.squad.windows import WindowSettings, make_windows
from lazyformer_fairseq.data.text.normalisation import TextSettings
from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.fairseq_plugin.criterions.squad import SquadCriterion, span_loss

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
    data = QuestionWindowsDataset(file, windows, "valid", longest_answer=4, pad=tokenizer.special.pad, shuffle=False)
    task = SimpleNamespace(
        marks_questions=False, head_name="squad", dictionary=tokenizer.dictionary, dataset=lambda split: data
    )
    return SquadCriterion(task), Spans(len(tokenizer.symbols)), data


def batches(data, size):
    order = data.ordered_indices()
    return [data.collater([data[i] for i in order[start : start + size]]) for start in range(0, len(data), size)]


@pytest.mark.parametrize("workers", [1, 2])
def test_marks_are_of_whole_questions_whatever_the_batches(made, workers):
    criterion, model, data = made
    criterion.eval()
    assert len(data) >= 2 * len(QUESTIONS)
    with torch.no_grad():
        logs = [criterion(model, batch)[2] for batch in batches(data, size=3)]
    with metrics.aggregate(new_root=True) as split:
        for start in range(0, len(logs), workers):
            with metrics.aggregate():
                criterion.reduce_metrics(logs[start : start + workers])
    values = split.get_smoothed_values()

    collector = SpanCollector(data.windows, data.file.contexts, longest=4)
    [whole] = batches(data, size=len(data))
    logits = model(**whole["net_input"], classification_head_name="squad")[0].detach().numpy()
    collector.add(whole["id"].numpy(), logits[..., 0], logits[..., 1])
    texts = {
        question.id: found[0].text for question, found in zip(data.file.questions, collector.answers(), strict=True)
    }
    assert {name: values[name] for name in ("exact_match", "f1")} == pytest.approx(score(data.file, texts))
    assert not any(key.startswith("_") for key in values)
    assert not criterion.logging_outputs_can_be_summed()


def test_loss_is_the_mean_of_both_and_padding_has_no_part(made):
    criterion, model, data = made
    criterion.train()
    [batch] = batches(data, size=len(data))
    loss, sample_size, log = criterion(model, batch)
    assert sample_size == len(data)
    assert criterion.logging_outputs_can_be_summed()
    expected = 0.0
    for ids, targets in zip(data.windows.inputs, data.windows.targets, strict=True):
        logits = model.table[torch.from_numpy(ids).long(), torch.arange(len(ids))]
        for side in (0, 1):
            expected -= logits[:, side].log_softmax(0)[targets[side]] / 2
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5)
    with metrics.aggregate(new_root=True) as agg:
        criterion.reduce_metrics([log])
    assert agg.get_smoothed_values()["loss"] == pytest.approx(loss.item() / len(data) / np.log(2), abs=1e-3)


def test_padding_has_no_gradient_and_no_nan():
    logits = torch.randn(2, 5, 2, requires_grad=True)
    is_padding = torch.tensor([[False] * 5, [False] * 3 + [True] * 2])
    span_loss(logits, torch.tensor([[1, 2], [0, 0]]), is_padding).backward()
    assert logits.grad.isfinite().all()
    assert logits.grad[1, 3:].eq(0).all()
    assert logits.grad[1, :3].ne(0).all()


def test_half_precision_logits_give_a_float32_loss(made):
    criterion, model, data = made
    [batch] = batches(data, size=len(data))
    in_full = criterion(model, batch)[0]
    model.table = nn.Parameter(model.table.to(torch.bfloat16))
    loss, *_ = criterion(model, batch)
    loss.backward()
    assert loss.dtype == torch.float32
    assert loss.item() == pytest.approx(in_full.item(), rel=2e-2)


def test_user_errors(made):
    criterion, model, data = made
    batch = batches(data, size=4)[0]
    model.classification_heads = {}
    with pytest.raises(UserError, match="no head 'squad'; fine-tune it with --task squad"):
        criterion(model, batch)
    model.classification_heads = {"squad": None}
    del batch["target"]
    with pytest.raises(UserError, match="questions without an answer"):
        criterion(model, batch)
    with pytest.raises(UserError, match="--task squad alone"):
        SquadCriterion(SimpleNamespace(dictionary=dictionary_of(8)))
