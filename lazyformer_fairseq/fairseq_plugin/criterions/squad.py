"""Criterion ``squad``: cross-entropy of an answer's start and end, and the official marks over the whole split."""

import math
from functools import partial

import numpy as np
import torch
from fairseq.criterions import FairseqCriterion, register_criterion
from fairseq.dataclass import FairseqDataclass
from fairseq.logging import metrics
from fairseq.logging.meters import MetersDict
from torch import Tensor
from torch.nn import functional as F

from lazyformer_fairseq.data.squad.metrics import METRICS
from lazyformer_fairseq.errors import UserError

COLUMNS = ("question", "window", "score", *METRICS)  # of what validation gathers


@register_criterion("squad", dataclass=FairseqDataclass)
class SquadCriterion(FairseqCriterion):
    """The mean of two cross-entropies over the tokens of a window (Devlin et al., 2019, section 4.2).

    As in BERT's run_squad.py all tokens take part, those of the question too; padding alone does not, for here it
    depends on what else is in the batch.

    Raises:
        UserError: the task is another than ``squad``.
    """

    def __init__(self, task):
        super().__init__(task)
        if not hasattr(task, "marks_questions"):
            raise UserError(f"--criterion squad works with --task squad alone, not with {type(task).__name__}")
        self.head_name = task.head_name

    def forward(self, model, sample: dict, reduce: bool = True) -> tuple[Tensor, int, dict]:
        """Loss of one batch.

        Returns:
            The summed loss (nats), the number of windows (the gradient's denominator), and what to log: in validation
            also each window's best answer, as a row of :data:`COLUMNS`.

        Raises:
            UserError: the model has no such head, or the batch has no answers.
        """
        self._check(model, sample)
        inputs, targets_B2 = sample["net_input"], sample["target"]
        logits_BT2 = model(**inputs, classification_head_name=self.head_name)[0].float()
        is_padding_BT = inputs["src_tokens"].eq(self.task.dictionary.pad())
        loss = span_loss(logits_BT2, targets_B2, is_padding_BT)
        logging_output = {
            "loss": loss.detach(),
            "ntokens": sample["ntokens"],
            "nsentences": sample["nsentences"],
            "sample_size": len(targets_B2),
        }
        if not self.training:
            logging_output["answers"] = self._answers(sample, logits_BT2)
        return loss, len(targets_B2), logging_output

    def _check(self, model, sample: dict) -> None:
        if self.head_name not in getattr(model, "classification_heads", ()):
            raise UserError(
                f"the model has no head {self.head_name!r}; fine-tune it with --task squad, or name the head it has by "
                "--squad-head-name"
            )
        if "target" not in sample:
            path = self.task.dataset(sample["split"]).file.path
            raise UserError(f"{path}: has questions without an answer; they can be predicted, not trained on or marked")

    def _answers(self, sample: dict, logits_BT2: Tensor) -> np.ndarray:
        """A row of :data:`COLUMNS` for each window, float64 (B, 5)."""
        dataset = self.task.dataset(sample["split"])
        index = sample["id"].cpu().numpy()
        rows = []
        best = dataset.best_answers(index, logits_BT2.detach().cpu().numpy())
        for window, answer in zip(index.tolist(), best, strict=True):
            number = int(dataset.windows.question[window])
            answers = dataset.file.questions[number].answer_texts
            marks = [metric(answer.text, answers) if answer else 0.0 for metric in METRICS.values()]
            rows.append((number, window, answer.score if answer else -np.inf, *marks))
        return np.array(rows, np.float64).reshape(-1, len(COLUMNS))

    @staticmethod
    def reduce_metrics(logging_outputs: list[dict]) -> None:
        """Logs the loss (bits a window), and in validation exact match and F1 (0 to 1) over whole questions.

        Each question has the best answer of all its windows, from whichever worker and batch they come.
        """
        windows = sum(log.get("sample_size", 0) for log in logging_outputs)
        loss = sum(log.get("loss", 0) for log in logging_outputs)
        metrics.log_scalar("loss", loss / windows / math.log(2), windows, round=3)
        if "answers" not in logging_outputs[0]:
            return
        for log in logging_outputs:
            metrics.log_custom(_AnswersMeter, "_answers", log["answers"])
        for name in METRICS:
            metrics.log_derived(name, partial(_mean_over_questions, name))

    def logging_outputs_can_be_summed(self) -> bool:
        """True in training, where outputs are numbers; False in validation, where they hold answers."""
        return self.training


def span_loss(logits_BT2: Tensor, targets_B2: Tensor, is_padding_BT: Tensor) -> Tensor:
    """Half the summed cross-entropies of starts and ends, nats.

    Args:
        logits_BT2: of each token as start and as end.
        targets_B2: the tokens that are.
        is_padding_BT: tokens that take no part.
    """
    logits_B2T = logits_BT2.transpose(1, 2).masked_fill(is_padding_BT[:, None], -torch.inf)
    return F.cross_entropy(logits_B2T.flatten(0, 1), targets_B2.flatten(), reduction="sum") / 2


class _AnswersMeter(MetersDict._DerivedMeter):
    """Gathers answers batch by batch; not printed and not saved with a checkpoint, as the split meter of GLUE."""

    def __init__(self):
        self.answers: list[np.ndarray] = []

    def update(self, answers: np.ndarray) -> None:
        self.answers.append(answers)


def _mean_over_questions(name: str, meters: MetersDict) -> float:
    answers = np.concatenate(meters["_answers"].answers)
    question, window, score = answers[:, :3].T
    best_first = np.lexsort((window, -score, question))
    _, first_of_question = np.unique(question[best_first], return_index=True)
    return float(answers[best_first[first_of_question], COLUMNS.index(name)].mean())
