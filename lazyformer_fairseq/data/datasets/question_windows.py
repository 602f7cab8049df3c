"""Questions about contexts as inputs of the model, and answers from its logits.

A question and as much of its context as fits make one input, ``<s> question </s></s> context </s>`` or however the
tokenizer's model joins pairs. A longer context gets several windows, each of which starts `stride` tokens after the one
before (Devlin et al., 2019, and their run_squad.py: 384 tokens, a stride of 128, questions of up to 64).

Two rules are those of run_squad.py. If a window does not contain the whole answer, its targets are ``<s>``. Where
windows overlap, an answer may start at a token only in the window in which the token has the most context on the side
that has less (``token_is_max_context``). All allowed spans are compared, whereas run_squad.py compares those of the 20
best starts and the 20 best ends.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple, Optional

import numpy as np
import torch
from scipy.special import softmax

from lazyformer_fairseq.data.datasets.labelled_texts import LabelledTextsDataset
from lazyformer_fairseq.data.squad import SquadFile
from lazyformer_fairseq.data.text.interface import TextTokenizer
from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.progress import Progress
from lazyformer_fairseq.storage.arrays import refuse_packed

NOT_HERE = 0  # place of <s>, the start and end of an answer that a window does not contain
USUAL_ANSWERS = 20  # answers kept per question, as in run_squad.py
USUAL_ANSWER = 30  # tokens in the longest answer, as in run_squad.py


@dataclass(frozen=True)
class WindowSettings:
    """The sizes of windows, in tokens.

    Attributes:
        max_length: length of an input, special ids included.
        stride: distance between the starts of successive windows.
        max_question_length: length to which questions are cut.

    Raises:
        UserError: the sizes conflict.
    """

    max_length: int = 384
    stride: int = 128
    max_question_length: int = 64

    def __post_init__(self) -> None:
        for name in ("max_length", "stride", "max_question_length"):
            if getattr(self, name) < 1:
                raise UserError(f"{name.replace('_', ' ')} {getattr(self, name)}: must be at least 1 token")
        if self.max_length < self.max_question_length + 5:
            raise UserError(
                f"inputs of {self.max_length} tokens have no room for a context beside questions of "
                f"{self.max_question_length}; give at least {self.max_question_length + 5}, or shorter questions"
            )


USUAL = WindowSettings()  # BERT's


@dataclass(frozen=True)
class Windows:
    """The inputs for all questions of a file (N windows), with the windows of a question side by side.

    Attributes:
        ids: ids of all windows, one window after the other.
        sizes: number of ids per window, (N,).
        question: number of each window's question in the file, (N,).
        place: position in the input at which the context begins, (N,).
        count: number of the context's tokens in the window, (N,).
        first_offset: row of `offsets` for the first of these tokens, (N,).
        own: which of these tokens may start an answer in this window: the first, and the one after the last, (N, 2).
        targets: positions in the input at which the answer starts and ends, both inclusive, (N, 2); (0, 2) without
            answers.
        offsets: the characters of each token of each context: the first, and the one after the last, (tokens, 2).
        cut_questions: number of questions that were cut.
    """

    ids: np.ndarray
    sizes: np.ndarray
    question: np.ndarray
    place: np.ndarray
    count: np.ndarray
    first_offset: np.ndarray
    own: np.ndarray
    targets: np.ndarray
    offsets: np.ndarray
    cut_questions: int

    def __len__(self) -> int:
        return len(self.sizes)

    @property
    def has_targets(self) -> bool:
        """True if all questions have answers."""
        return len(self.targets) > 0

    @cached_property
    def inputs(self) -> list[np.ndarray]:
        """The ids of each window."""
        return np.split(self.ids, np.cumsum(self.sizes)[:-1])

    def save(self, path: Path) -> None:
        """Write all fields to an uncompressed ``.npz`` file."""
        np.savez(path, **{each.name: getattr(self, each.name) for each in fields(self)})

    @classmethod
    def load(cls, path: Path) -> "Windows":
        """Read a file that :meth:`save` wrote.

        Raises:
            ValueError: the arrays are compressed or contain objects, or a field is missing; numpy may raise other
                errors for a damaged file.
        """
        refuse_packed(path)
        with np.load(path, allow_pickle=False) as arrays:
            values = {each.name: arrays[each.name] for each in fields(cls)}
        values["cut_questions"] = int(values["cut_questions"])
        return cls(**values)


def make_windows(tokenizer: TextTokenizer, file: SquadFile, settings: WindowSettings = USUAL) -> Windows:
    """Encode each context and each question once, and lay windows over the contexts.

    The targets are those of each question's first answer. There are none if any question has no answer.
    """
    bos = tokenizer.special.bos
    eos = tokenizer.special.eos
    has_answers = all(question.answers for question in file.questions)
    inputs: list[np.ndarray] = []
    rows: list[tuple[int, ...]] = []
    offsets: list[np.ndarray] = []
    tokens_before = 0  # in the contexts before this one
    question_number = 0
    cut_questions = 0
    for paragraph in Progress(file.paragraphs, desc=f"encode {file.path}", unit=" paragraphs", delay=2):
        context_ids, spans = tokenizer.encode_with_offsets(paragraph.context)
        context_offsets = without_spaces(spans, paragraph.context)
        for question in paragraph.qas:
            question_ids = tokenizer.encode(question.question)
            cut_questions += len(question_ids) > settings.max_question_length
            head = [bos, *question_ids[: settings.max_question_length], *[eos] * tokenizer.separators]
            answer = None
            if has_answers:
                first_answer = question.answers[0]
                answer = tokens_of(context_offsets, first_answer.answer_start, first_answer.end)

            windows = windows_over(len(context_ids), settings.max_length - len(head) - 1, settings.stride)
            for (start, end), own in zip(windows, own_tokens(windows), strict=True):
                inputs.append(np.array([*head, *context_ids[start:end], eos], np.int32))
                target = (NOT_HERE, NOT_HERE)
                if answer is not None and start <= answer[0] and answer[1] < end:
                    shift = len(head) - start
                    target = (answer[0] + shift, answer[1] + shift)
                rows.append((question_number, len(head), end - start, tokens_before + start, *own, *target))
            question_number += 1
        offsets.append(context_offsets)
        tokens_before += len(context_ids)

    columns = np.array(rows, np.int64)
    targets = columns[:, 6:]
    if not has_answers:
        targets = targets[:0]
    return Windows(
        ids=np.concatenate(inputs),
        sizes=np.array([len(ids) for ids in inputs]),
        question=columns[:, 0],
        place=columns[:, 1],
        count=columns[:, 2],
        first_offset=columns[:, 3],
        own=columns[:, 4:6],
        targets=targets,
        offsets=np.concatenate(offsets),
        cut_questions=cut_questions,
    )


def windows_over(length: int, room: int, stride: int) -> list[tuple[int, int]]:
    """Return windows that cover `length` tokens: the first token of each, and the one after its last.

    Args:
        length: number of tokens.
        room: largest number of tokens in a window.
        stride: distance between the starts of successive windows.
    """
    windows = [(0, min(length, room))]
    while windows[-1][1] < length:
        start = windows[-1][0] + min(stride, room)
        windows.append((start, min(length, start + room)))
    return windows


def own_tokens(windows: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return the tokens that each window over a context shows best, counted from the window's start.

    A token has context on its left and on its right. A window's score for it is the smaller of the two, plus a small
    share of the window's size. If windows have the same score, the first one gets the token (run_squad.py's
    ``_check_is_max_context``). The tokens of a window are contiguous, because from token to token the later of two
    windows gains on the earlier one.
    """
    length = windows[-1][1]
    best_score = np.full(length, -1.0)
    best_window = np.zeros(length, np.int64)
    for number, (start, end) in enumerate(windows):
        left = np.arange(end - start)
        score = np.minimum(left, left[::-1]) + 0.01 * (end - start)
        is_better = score > best_score[start:end]
        best_score[start:end][is_better] = score[is_better]
        best_window[start:end][is_better] = number
    found = []
    for number, (start, _) in enumerate(windows):
        first = int(np.searchsorted(best_window, number))
        last = int(np.searchsorted(best_window, number + 1))
        found.append((first - start, last - start) if first < last else (0, 0))
    return found


def tokens_of(spans: np.ndarray, start: int, end: int) -> Optional[tuple[int, int]]:
    """Return the first and the last token with a character from start to end, both inclusive, or None for no token."""
    touching = np.flatnonzero((spans[:, 0] < end) & (spans[:, 1] > start))
    if not len(touching):
        return None
    return int(touching[0]), int(touching[-1])


def without_spaces(spans: list[tuple[int, int]], text: str) -> np.ndarray:
    """Return spans, int32 (T, 2), without white space at their ends; a span of white space alone becomes empty."""
    found = np.array(spans, np.int32).reshape(-1, 2)
    for token, (start, end) in enumerate(spans):
        part = text[start:end]
        stripped = part.strip()
        if stripped != part:
            first = start + len(part) - len(part.lstrip())
            found[token] = (first, first + len(stripped))
    return found


def best_spans(start_T: np.ndarray, end_T: np.ndarray, longest: int, n_best: int) -> list[tuple[int, int, float]]:
    """Return the `n_best` best spans of a window, the best first: start and end, both inclusive, and score.

    Among spans of equal score, the one that starts first comes first, and then the shortest.

    Args:
        start_T: logits of each token as start, -inf where no answer may start.
        end_T: logits of each token as end, -inf where no answer may end.
        longest: largest number of tokens in an answer.
        n_best: largest number of spans.
    """
    padded = np.pad(end_T, (0, longest - 1), constant_values=-np.inf)
    followers = np.lib.stride_tricks.sliding_window_view(padded, longest)  # (T, longest)
    scores = (start_T[:, None] + followers).ravel()
    found = []
    for place in np.argsort(-scores, kind="stable")[:n_best].tolist():
        if scores[place] > -np.inf:
            start, further = divmod(place, longest)
            found.append((start, start + further, float(scores[place])))
    return found


class FoundAnswer(NamedTuple):
    """An answer that was found for a question.

    Attributes:
        text: characters `start` to `end` of the context.
        start: place of the first character.
        end: place after the last character.
        score: the sum of the logits of its start and its end.
        probability: its share among the answers that were kept for the question.
    """

    text: str
    start: int
    end: int
    score: float
    probability: float = float("nan")


@dataclass(eq=False, repr=False)
class SpanCollector:
    """A collector of the best answers to each question, from the logits of windows in any order.

    Every question is answered, because version 1.1 has no score for "no answer".

    Args:
        windows: the windows of all questions.
        file: the questions and their contexts.
        longest: largest number of tokens in an answer.
        n_best: largest number of answers to a question.
    """

    windows: Windows
    file: SquadFile
    longest: int = USUAL_ANSWER
    n_best: int = USUAL_ANSWERS

    def __post_init__(self) -> None:
        self._found: dict[int, list[FoundAnswer]] = defaultdict(list)  # by question

    def add(self, index: np.ndarray, starts_BT: np.ndarray, ends_BT: np.ndarray) -> None:
        """Add the answers in the windows `index` (B,), given their logits; inputs may be padded on the right."""
        for window, start_T, end_T in zip(index.tolist(), starts_BT, ends_BT, strict=True):
            self._found[int(self.windows.question[window])] += self.answers_in(window, start_T, end_T)

    def answers_in(self, window: int, start_T: np.ndarray, end_T: np.ndarray) -> list[FoundAnswer]:
        """Return the best answers in a window, the best first, without probabilities (nan).

        Answers start and end in the context, at tokens that stand for text. For example, a space that is a token by
        itself can be neither a start nor an end.
        """
        windows = self.windows
        count = windows.count[window]
        first_row = windows.first_offset[window]
        offsets = windows.offsets[first_row : first_row + count]
        is_text = offsets[:, 0] < offsets[:, 1]
        if not is_text.any():  # a context of control characters, for example
            return []
        token = np.arange(count)
        first_own, end_own = windows.own[window]
        may_start = is_text & (token >= first_own) & (token < end_own)
        inside = slice(windows.place[window], windows.place[window] + count)
        starts = np.where(may_start, start_T[inside].astype(np.float32), -np.inf)
        ends = np.where(is_text, end_T[inside].astype(np.float32), -np.inf)

        context = self.file.contexts[self.file.paragraph_of[windows.question[window]]]
        answers = []
        for first, last, score in best_spans(starts, ends, self.longest, self.n_best):
            # If a quote and a comma have changed places, the last token is not the one that ends last.
            covered = offsets[first : last + 1][is_text[first : last + 1]]
            start = int(covered[:, 0].min())
            end = int(covered[:, 1].max())
            answers.append(FoundAnswer(context[start:end], start, end, score))
        return answers

    def answers(self) -> list[list[FoundAnswer]]:
        """Return the best answers to each question, the best first; none if its context has no token of text.

        A text that occurs at several places counts once, with its best score.
        """
        answers = []
        for question in range(len(self.file.questions)):
            found = self._found[question]
            of_text: dict[str, FoundAnswer] = {}
            for answer in sorted(found, key=lambda answer: (-answer.score, answer.start, answer.end)):
                of_text.setdefault(answer.text, answer)
            best = list(of_text.values())[: self.n_best]
            if best:
                shares = softmax([answer.score for answer in best]).tolist()
                best = [answer._replace(probability=share) for answer, share in zip(best, shares, strict=True)]
            answers.append(best)
        return answers


class QuestionWindowsDataset(LabelledTextsDataset):
    """A dataset of the inputs for a file's questions; the target of each is the answer's start and end in it, (2,).

    Args:
        file: the questions.
        windows: the windows made from the file.
        split: name of the split, which is part of each batch.
        longest_answer: largest number of tokens in an answer.
        marks_questions: whether batches have `global_positions` in `net_input`, which are True at the tokens of the
            question and at ``<s>``.
        **how: further arguments of :class:`~.labelled_texts.LabelledTextsDataset`.
    """

    def __init__(
        self,
        file: SquadFile,
        windows: Windows,
        split: str,
        longest_answer: int,
        marks_questions: bool = False,
        **how: Any,
    ):
        super().__init__(windows.inputs, windows.targets if windows.has_targets else None, **how)
        self.file = file
        self.windows = windows
        self.split = split
        self.longest_answer = longest_answer
        self.marks_questions = marks_questions

    def collater(self, samples: list[dict]) -> dict:
        """Collate samples as :class:`LabelledTextsDataset` does, with `target` (B, 2) and the `split`."""
        batch = super().collater(samples)
        if not batch:
            return batch
        batch["split"] = self.split
        if self.marks_questions:
            places = torch.from_numpy(self.windows.place[batch["id"].numpy()])
            # The separator before the context is not marked.
            positions = torch.arange(batch["net_input"]["src_tokens"].size(1))
            batch["net_input"]["global_positions"] = positions < places[:, None]
        return batch

    def collector(self, n_best: int) -> SpanCollector:
        """Return a collector that finds the `n_best` answers to each question from the logits of the windows."""
        return SpanCollector(self.windows, self.file, self.longest_answer, n_best)
