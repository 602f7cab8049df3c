"""Extractive question answering, where the answer to a question is a span of the context (SQuAD v1.1)."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from lazyformer_fairseq.data.datasets.question_windows import DEFAULT_MAX_ANSWER_TOKENS, QuestionWindowsDataset
from lazyformer_fairseq.data.prepared_squad import PreparedSplit
from lazyformer_fairseq.data.squad import METRICS
from lazyformer_fairseq.modules.networks.heads import SPAN
from lazyformer_fairseq.training.objectives.head import HeadObjective
from lazyformer_fairseq.training.objectives.interface import Batch, Log, Scalar, in_bits, mean_per_prediction, total


@dataclass(kw_only=True)
class SpansObjective(HeadObjective):
    """Objective for predicting the start and end of an answer in a window (Devlin et al., 2019, section 4.2).

    The loss is the mean of the start and end cross-entropies. As in BERT's run_squad.py, the softmax is over all
    tokens, including the question. Only padding is excluded, because here the amount of padding depends on the other
    windows in the batch.

    Attributes:
        read: a function that returns a split's questions and windows.
        tokenizer_folder: folder of the tokenizer that the windows were built with.
        task_settings: additional task settings to store in checkpoints, such as the data and the window size.
        longest_answer: the maximum number of tokens in a predicted answer.
        head_name: the head's name.
    """

    read: Callable[[str], PreparedSplit]
    tokenizer_folder: Path
    task_settings: dict[str, Any]
    longest_answer: int = DEFAULT_MAX_ANSWER_TOKENS
    head_name: str = "squad"
    CRITERION: ClassVar[str] = "SquadCriterion"

    def __post_init__(self) -> None:
        self._datasets: dict[str, QuestionWindowsDataset] = {}

    @property
    def head(self) -> tuple[str, int, str]:
        """The head's name, its number of outputs (start and end), and its type."""
        return self.head_name, 2, SPAN

    def dataset(self, split: str) -> QuestionWindowsDataset:
        """Return the split `train` or `valid`; each split is read only once."""
        if split not in self._datasets:
            self._datasets[split] = self.dataset_of(self.read(split), split)
        return self._datasets[split]

    def dataset_of(self, prepared: PreparedSplit, split: str) -> QuestionWindowsDataset:
        """Wrap windows as a dataset in the model's input format. Training and validation windows must have answers."""
        return QuestionWindowsDataset(
            prepared.file,
            prepared.windows,
            split,
            self.longest_answer,
            marks_questions=self.marks_first_text,
            **self.dataset_options(split),
        )

    def data_folders(self) -> list[Path]:
        """Return the data folder."""
        return [Path(self.task_settings["data"])]

    def score(self, batch: Batch, logits: Tensor, training: bool) -> tuple[Tensor, dict[str, Any]]:
        """Return the summed loss of logits (B, T, 2), and additional values to log.

        In evaluation mode, each window's entry in `rows` consists of the question's index, the window's index, the best
        answer's score, and each metric's value for that answer.
        """
        is_padding_BT = batch["net_input"]["src_tokens"].eq(self.dictionary.pad())
        loss = span_loss(logits, batch["target"], is_padding_BT)
        if training:
            return loss, {}
        return loss, {"rows": self._rows(batch, logits.detach().cpu().numpy())}

    def _rows(self, batch: Batch, logits_BT2: np.ndarray) -> np.ndarray:
        dataset = self.dataset(batch["split"])
        collector = dataset.collector(n_best=1)
        rows = []
        for window, logits_T2 in zip(batch["id"].tolist(), logits_BT2, strict=True):
            question = int(dataset.windows.question[window])
            found = collector.answers_in(window, logits_T2[:, 0], logits_T2[:, 1])
            if not found:
                rows.append((question, window, -np.inf, *[0.0] * len(METRICS)))
                continue
            answer = found[0]
            right = dataset.file.questions[question].answer_texts
            values = [metric(answer.text, right) for metric in METRICS.values()]
            rows.append((question, window, answer.score, *values))
        return np.array(rows, np.float64)

    @staticmethod
    def scalars(logs: Sequence[Log]) -> dict[str, Scalar]:
        """Return `loss` in bits per window."""
        loss = in_bits(mean_per_prediction(logs, "loss"))
        return {"loss": Scalar(loss, total(logs, "sample_size"))}

    @property
    def metric_names(self) -> tuple[str, ...]:
        """The names of the metrics: exact match and F1."""
        return tuple(METRICS)

    @staticmethod
    def metric(name: str, rows: np.ndarray) -> float:
        """Return a metric (0 to 1) averaged over questions, each judged by the best answer from all of its windows."""
        question, window, score = rows[:, :3].T
        best_first = np.lexsort((window, -score, question))
        _, first_of_question = np.unique(question[best_first], return_index=True)
        column = 3 + list(METRICS).index(name)
        return float(rows[best_first[first_of_question], column].mean())

    def settings(self) -> dict[str, dict[str, Any]]:
        """Return the settings to store in checkpoints."""
        task = {
            "_name": "squad",
            **self.task_settings,
            "squad_head_name": self.head_name,
            "max_answer_tokens": self.longest_answer,
            "no_padding": self.no_padding,
            "seed": self.seed,
        }
        return {"model": self.own_network.settings(), "task": task, "criterion": {"_name": "squad"}}


def span_loss(logits_BT2: Tensor, targets_B2: Tensor, is_padding_BT: Tensor) -> Tensor:
    """Return half the summed cross-entropy of starts and ends, in nats.

    Args:
        logits_BT2: each token's start and end logits.
        targets_B2: the indices of the correct start and end tokens.
        is_padding_BT: True at tokens that are excluded from the softmax.
    """
    logits_B2T = logits_BT2.transpose(1, 2).masked_fill(is_padding_BT[:, None], -torch.inf)
    return F.cross_entropy(logits_B2T.flatten(0, 1), targets_B2.flatten(), reduction="sum") / 2
