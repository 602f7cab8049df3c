"""Model inputs for extractive question answering, and extraction of answers from the model's logits.

An input consists of a question and as much of its context as fits, written ``<s> question </s></s> context </s>`` or in
the tokenizer's own format for pairs. A longer context is covered by several windows with a stride of `stride` tokens
(Devlin et al., 2019, and their run_squad.py: 384 tokens, a stride of 128, questions of up to 64 tokens).

Two rules follow run_squad.py. If a window does not contain the whole answer, its targets are ``<s>``. Where windows
overlap, an answer may start at a token only in the window that has the most context on the token's shorter side
(``token_is_max_context``). All valid spans are compared, whereas run_squad.py compares only combinations of the 20 best
starts and the 20 best ends.
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

NOT_HERE = 0  # position of <s>, used as start and end of an answer outside the window
DEFAULT_N_BEST = 20  # number of answers kept per question, as in run_squad.py
DEFAULT_MAX_ANSWER_TOKENS = 30  # maximum number of tokens per answer, as in run_squad.py


@dataclass(frozen=True)
class WindowSettings:
    """The sizes of windows, in tokens.

    Attributes:
        max_length: maximum length of an input, including special tokens.
        stride: distance between the starts of consecutive windows.
        max_question_length: maximum length of a question; longer ones are truncated.

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
                f"inputs of {self.max_length} tokens are too short for a context and a question of "
                f"{self.max_question_length} tokens; use inputs of at least {self.max_question_length + 5}, or limit "
                "questions to fewer tokens"
            )


USUAL = WindowSettings()  # BERT's


@dataclass(frozen=True)
class Windows:
    """The inputs for all questions of a file (N windows); the windows of each question are consecutive.

    Attributes:
        ids: concatenated ids of all windows.
        sizes: number of ids per window, (N,).
        question: index of each window's question in the file, (N,).
        place: position in the input at which the context starts, (N,).
        count: number of context tokens in the window, (N,).
        first_offset: row of `offsets` for the first context token, (N,).
        own: range (start, exclusive end) of the context tokens that may start an answer in this window, (N, 2).
        targets: start and end of the answer in the input, both inclusive, (N, 2); (0, 2) if there are no answers.
        offsets: character range (start, exclusive end) of each token of each context, (tokens, 2).
        cut_questions: number of truncated questions.
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
        """Token ids of each window."""
        return np.split(self.ids, np.cumsum(self.sizes)[:-1])

    def save(self, path: Path) -> None:
        """Write all fields to an uncompressed ``.npz`` file."""
        arrays = {each.name: getattr(self, each.name) for each in fields(self)}
        np.savez(path, **arrays)

    @classmethod
    def load(cls, path: Path) -> "Windows":
        """Load a file written by :meth:`save`.

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
    """Encode a file's contexts and questions, and split the contexts into windows.

    The targets are taken from each question's first answer. There are no targets if any question lacks an answer.
    """
    bos = tokenizer.special.bos
    eos = tokenizer.special.eos
    has_answers = all(question.answers for question in file.questions)
    inputs: list[np.ndarray] = []
    rows: list[tuple[int, ...]] = []
    offsets: list[np.ndarray] = []
    tokens_before = 0  # number of tokens in the preceding contexts
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
                ids = [*head, *context_ids[start:end], eos]
                inputs.append(np.array(ids, np.int32))
                target = (NOT_HERE, NOT_HERE)
                if answer is not None and start <= answer[0] and answer[1] < end:
                    shift = len(head) - start
                    target = (answer[0] + shift, answer[1] + shift)
                count = end - start
                first_offset = tokens_before + start
                rows.append((question_number, len(head), count, first_offset, *own, *target))
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
    """Return the windows that cover `length` tokens, as ranges (start, exclusive end).

    Args:
        length: number of tokens.
        room: maximum number of tokens per window.
        stride: distance between the starts of consecutive windows.
    """
    windows = [(0, min(length, room))]
    while windows[-1][1] < length:
        start = windows[-1][0] + min(stride, room)
        windows.append((start, min(length, start + room)))
    return windows


def own_tokens(windows: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Assign each token of a context to the window that gives it the most context.

    A window's score for a token is the number of the window's tokens on the token's shorter side, plus a small fraction
    of the window's size. Ties go to the first window (run_squad.py's ``_check_is_max_context``). The tokens assigned to
    a window are contiguous, because from each token to the next, later windows gain on earlier ones in score.

    Returns:
        The range (start, exclusive end) of each window's tokens, relative to the window's start.
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
        if first < last:
            found.append((first - start, last - start))
        else:
            found.append((0, 0))
    return found


def tokens_of(spans: np.ndarray, start: int, end: int) -> Optional[tuple[int, int]]:
    """Return the first and last token (inclusive) that overlap characters `start` to `end`, or None if none does."""
    overlaps = (spans[:, 0] < end) & (spans[:, 1] > start)
    touching = np.flatnonzero(overlaps)
    if not len(touching):
        return None
    return int(touching[0]), int(touching[-1])


def without_spaces(spans: list[tuple[int, int]], text: str) -> np.ndarray:
    """Strip whitespace from the ends of spans, int32 (T, 2); a span of only whitespace becomes empty."""
    found = np.array(spans, np.int32).reshape(-1, 2)
    for token, (start, end) in enumerate(spans):
        part = text[start:end]
        stripped = part.strip()
        if stripped != part:
            first = start + len(part) - len(part.lstrip())
            found[token] = (first, first + len(stripped))
    return found


def best_spans(start_T: np.ndarray, end_T: np.ndarray, longest: int, n_best: int) -> list[tuple[int, int, float]]:
    """Return the `n_best` best spans of a window as (start, inclusive end, score), sorted by descending score.

    Ties are broken by the earlier start, then by the shorter span.

    Args:
        start_T: start logits of all tokens, -inf where no answer may start.
        end_T: end logits of all tokens, -inf where no answer may end.
        longest: maximum number of tokens per answer.
        n_best: maximum number of spans.
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
    """A predicted answer to a question.

    Attributes:
        text: characters `start` to `end` of the context.
        start: character offset of the start.
        end: character offset of the end, exclusive.
        score: sum of the start and end logits.
        probability: softmax probability among the answers kept for the question.
    """

    text: str
    start: int
    end: int
    score: float
    probability: float = float("nan")


@dataclass(eq=False, repr=False)
class SpanCollector:
    """A collector of the best answers to each question, which accepts the logits of windows in any order.

    Every question gets an answer, because SQuAD 1.1 has no unanswerable questions.

    Args:
        windows: windows of all questions.
        file: questions and their contexts.
        longest: maximum number of tokens per answer.
        n_best: maximum number of answers per question.
    """

    windows: Windows
    file: SquadFile
    longest: int = DEFAULT_MAX_ANSWER_TOKENS
    n_best: int = DEFAULT_N_BEST

    def __post_init__(self) -> None:
        self._found: dict[int, list[FoundAnswer]] = defaultdict(list)  # by question

    def add(self, index: np.ndarray, starts_BT: np.ndarray, ends_BT: np.ndarray) -> None:
        """Add the best answers in the windows `index` (B,), given their logits, which may be right-padded."""
        for window, start_T, end_T in zip(index.tolist(), starts_BT, ends_BT, strict=True):
            question = int(self.windows.question[window])
            self._found[question] += self.answers_in(window, start_T, end_T)

    def answers_in(self, window: int, start_T: np.ndarray, end_T: np.ndarray) -> list[FoundAnswer]:
        """Return the answers in a window by descending score; their probabilities are still nan.

        Answers start and end at context tokens that represent text. A token of only whitespace, for example, can be
        neither a start nor an end.
        """
        windows = self.windows
        count = windows.count[window]
        first_row = windows.first_offset[window]
        offsets = windows.offsets[first_row : first_row + count]
        is_text = offsets[:, 0] < offsets[:, 1]
        if not is_text.any():  # for example, a context of control characters
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
            # If a quote and a comma were swapped, the last token does not have the largest end offset.
            covered = offsets[first : last + 1][is_text[first : last + 1]]
            start = int(covered[:, 0].min())
            end = int(covered[:, 1].max())
            answers.append(FoundAnswer(context[start:end], start, end, score))
        return answers

    def answers(self) -> list[list[FoundAnswer]]:
        """Return each question's answers by descending score; there are none if its context has no text tokens.

        If a text occurs several times in the context, only its highest-scoring occurrence is included.
        """
        answers = []
        for question in range(len(self.file.questions)):
            found = self._found[question]
            best_first = sorted(found, key=lambda answer: (-answer.score, answer.start, answer.end))
            of_text: dict[str, FoundAnswer] = {}
            for answer in best_first:
                of_text.setdefault(answer.text, answer)
            best = list(of_text.values())[: self.n_best]
            if best:
                shares = softmax([answer.score for answer in best]).tolist()
                best = [answer._replace(probability=share) for answer, share in zip(best, shares, strict=True)]
            answers.append(best)
        return answers


class QuestionWindowsDataset(LabelledTextsDataset):
    """A dataset of question-answering windows; each target is the answer's start and end in the input, (2,).

    Args:
        file: the questions.
        windows: the windows built from the file.
        split: name of the split, which is added to each batch.
        longest_answer: maximum number of tokens per answer.
        marks_questions: whether `net_input` has `global_positions`, a mask of all positions before the context.
        **how: additional arguments of :class:`~.labelled_texts.LabelledTextsDataset`.
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
        """Collate samples like :class:`LabelledTextsDataset`, with `target` (B, 2) and `split`."""
        batch = super().collater(samples)
        if not batch:
            return batch
        batch["split"] = self.split
        if self.marks_questions:
            places = torch.from_numpy(self.windows.place[batch["id"].numpy()])
            # All positions before the context are marked: <s>, the question and the separators.
            positions = torch.arange(batch["net_input"]["src_tokens"].size(1))
            batch["net_input"]["global_positions"] = positions < places[:, None]
        return batch

    def collector(self, n_best: int) -> SpanCollector:
        """Create a collector of the `n_best` answers to each question."""
        return SpanCollector(self.windows, self.file, self.longest_answer, n_best)
