"""Questions on contexts as inputs of the model: windows over each context, and the characters that their tokens are.

A question and as much of its context as there is room for make one input, ``<s> question </s></s> context </s>`` or
as the tokenizer's model knows pairs. A longer context gets several windows, each `stride` tokens further on (Devlin et
al., 2019, and their run_squad.py: 384 tokens, 128 further on, questions of up to 64).

Two things follow run_squad.py as well. Where a window does not hold the whole answer, the start and end to be learnt
are ``<s>``'s. And where windows overlap, an answer may start at a token only in the window in which that token has most
context on its poorer side (its ``token_is_max_context``).
"""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Optional

import numpy as np
from tqdm import tqdm

from lazyformer_fairseq.data.squad.official import Answer, Question, SquadFile
from lazyformer_fairseq.data.text.interface import TextTokenizer
from lazyformer_fairseq.errors import UserError

NOT_HERE = 0  # <s>: start and end of an answer that a window does not hold


@dataclass(frozen=True)
class WindowSettings:
    """Sizes in tokens; UserError for sizes that do not fit together.

    Attributes:
        longest: of an input, all ids counted.
        stride: how much further on the next window starts.
        longest_question: longer questions are cut.
    """

    longest: int = 384
    stride: int = 128
    longest_question: int = 64

    def __post_init__(self):
        for name in ("longest", "stride", "longest_question"):
            if getattr(self, name) < 1:
                raise UserError(f"{name.replace('_', ' ')} {getattr(self, name)}: must be 1 token at least")
        if self.longest < self.longest_question + 5:
            raise UserError(
                f"inputs of {self.longest} tokens have no room for a context beside questions of "
                f"{self.longest_question}; give {self.longest_question + 5} at least, or shorter questions"
            )


USUAL = WindowSettings()  # BERT's


@dataclass(frozen=True)
class Windows:
    """Inputs of all questions of a file, those of one question side by side, and what they show of its context.

    Attributes:
        ids: of all windows, one after the other, int32.
        sizes: ids of each window, (N,).
        question: the number of each window's question in the file, (N,).
        place: where in the input the context begins, (N,).
        first: the first token of the context that the window holds, (N,).
        count: how many tokens of the context it holds, (N,).
        own: tokens of the context at which answers may start in this window, the first and one past the last, (N, 2).
        targets: where in the input the answer starts and ends, both inclusive, (N, 2); None without answers.
        offsets: the characters of each token of all contexts, the first and one past the last, int32 (tokens, 2).
        context_starts: where in `offsets` each context begins, and the end, (contexts + 1,).
        paragraph: the number of each question's context, (questions,).
        cut_questions: questions that were longer than allowed.
    """

    ids: np.ndarray
    sizes: np.ndarray
    question: np.ndarray
    place: np.ndarray
    first: np.ndarray
    count: np.ndarray
    own: np.ndarray
    targets: Optional[np.ndarray]
    offsets: np.ndarray
    context_starts: np.ndarray
    paragraph: np.ndarray
    cut_questions: int

    def __len__(self) -> int:
        return len(self.sizes)

    @cached_property
    def inputs(self) -> list[np.ndarray]:
        """The ids of each window."""
        ends = np.cumsum(self.sizes)
        return [self.ids[end - size : end] for end, size in zip(ends.tolist(), self.sizes.tolist(), strict=True)]

    @cached_property
    def first_offset(self) -> np.ndarray:
        """Where in `offsets` the first token of the context stands that each window holds, (N,)."""
        return self.context_starts[self.paragraph[self.question]] + self.first


@dataclass(frozen=True)
class _Text:
    """A context's ids (T,), and the characters of each (T, 2)."""

    ids: np.ndarray
    spans: np.ndarray


def make_windows(
    tokenizer: TextTokenizer,
    file: SquadFile,
    settings: WindowSettings = USUAL,
) -> Windows:
    """Encodes each context and each question once, and lays windows over the contexts.

    Targets are of each question's first answer; there are none where a question has no answer.
    """
    progress = tqdm(total=len(file.contexts), desc=f"encode {file.path}", unit=" paragraphs", delay=2, disable=None)
    maker = _Maker(tokenizer, settings, all(question.answers for question in file.questions))
    with progress:
        for paragraph in file.paragraphs:
            maker.add(paragraph.context, paragraph.questions)
            progress.update()
    return maker.windows(file.paragraph_of)


class _Maker:
    """Gathers the windows, context by context."""

    def __init__(self, tokenizer: TextTokenizer, settings: WindowSettings, has_answers: bool):
        self.tokenizer = tokenizer
        self.settings = settings
        self.has_answers = has_answers
        self.inputs: list[np.ndarray] = []
        self.rows: list[np.ndarray] = []  # of a question: question, place, first, count, own (2), targets (2)
        self.spans: list[np.ndarray] = []
        self.questions = 0
        self.cut_questions = 0

    def add(self, context: str, questions: Iterable[Question]) -> None:
        ids, spans = self.tokenizer.encode_with_offsets(context)
        text = _Text(np.array(ids, np.int32), without_spaces(spans, context))
        self.spans.append(text.spans)
        for question in questions:
            self._add_question(question.text, question.answers[0] if self.has_answers else None, text)

    def _add_question(self, question: str, answer: Optional[Answer], text: _Text) -> None:
        bos, _, eos, *_ = self.tokenizer.special
        asked = self.tokenizer.encode(question)
        self.cut_questions += len(asked) > self.settings.longest_question
        head = [bos, *asked[: self.settings.longest_question], *[eos] * self.tokenizer.separators]
        room = self.settings.longest - len(head) - 1
        firsts = starts_of_windows(len(text.ids), room, self.settings.stride)
        counts = np.minimum(len(text.ids) - firsts, room)
        rows = np.zeros((len(firsts), 8), np.int32)
        rows[:, 0], rows[:, 1], rows[:, 2], rows[:, 3] = self.questions, len(head), firsts, counts
        rows[:, 4:6] = own_tokens(firsts, counts)
        if answer is not None and (span := tokens_of(text.spans, answer.start, answer.end)):
            is_inside = (firsts <= span[0]) & (span[1] < firsts + counts)
            rows[:, 6:] = np.where(is_inside[:, None], np.array(span) - firsts[:, None] + len(head), NOT_HERE)
        self.rows.append(rows)
        before, end = np.array(head, np.int32), np.array([eos], np.int32)
        for first, count in zip(firsts.tolist(), counts.tolist(), strict=True):
            self.inputs.append(np.concatenate([before, text.ids[first : first + count], end]))
        self.questions += 1

    def windows(self, paragraph: np.ndarray) -> Windows:
        rows = np.concatenate(self.rows)
        return Windows(
            ids=np.concatenate(self.inputs),
            sizes=np.array([len(ids) for ids in self.inputs]),
            question=rows[:, 0],
            place=rows[:, 1],
            first=rows[:, 2],
            count=rows[:, 3],
            own=rows[:, 4:6],
            targets=rows[:, 6:].astype(np.int64) if self.has_answers else None,
            offsets=np.concatenate(self.spans),
            context_starts=np.cumsum([0, *map(len, self.spans)]),
            paragraph=paragraph,
            cut_questions=self.cut_questions,
        )


def starts_of_windows(length: int, room: int, stride: int) -> np.ndarray:
    """The first token of each window over `length` tokens, of which one shows `room`; no token is passed over."""
    step = min(stride, room)
    return np.arange(1 + max(0, -((room - length) // step))) * step


def own_tokens(firsts: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """For each window over one context the tokens that it shows best, the first and one past the last, (W, 2).

    A token has context to its left and to its right; what counts is the lesser, and a little the window's size. Of
    windows that are equal in this the first one has the token (run_squad.py's ``_check_is_max_context``). A window's
    tokens stand side by side: of two windows the later gains on the earlier from token to token.
    """
    ends = firsts + counts
    if len(firsts) == 1:
        return np.stack([firsts, ends], axis=1)
    tokens = np.arange(ends.max())[:, None]
    context = np.minimum(tokens - firsts, ends - 1 - tokens)
    best = np.where(context >= 0, context + 0.01 * counts, -1.0).argmax(1)
    is_own = best[:, None] == np.arange(len(firsts))
    found = np.stack([is_own.argmax(0), len(tokens) - is_own[::-1].argmax(0)], axis=1)
    return np.where(is_own.any(0)[:, None], found, firsts[:, None])


def tokens_of(spans: np.ndarray, start: int, end: int) -> Optional[tuple[int, int]]:
    """The first and the last token, inclusive, that have a character of start to end; None where none has."""
    touching = np.flatnonzero((spans[:, 0] < end) & (spans[:, 1] > start))
    return (int(touching[0]), int(touching[-1])) if len(touching) else None


def without_spaces(spans: list[tuple[int, int]], text: str) -> np.ndarray:
    """Spans, int32 (T, 2), that neither begin nor end with white space of the text; those of spaces alone are empty."""
    found = np.array(spans, np.int32).reshape(-1, 2)
    for token, (start, end) in enumerate(spans):
        part = text[start:end]
        if (stripped := part.strip()) != part:
            start += len(part) - len(part.lstrip())
            found[token] = start, start + len(stripped)
    return found
