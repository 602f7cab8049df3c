"""Questions on contexts as inputs of the model, and answers from its logits.

A question and as much of its context as there is room for make one input, ``<s> question </s></s> context </s>`` or
as the tokenizer's model knows pairs. A longer context gets several windows, each `stride` tokens further on (Devlin et
al., 2019, and their run_squad.py: 384 tokens, 128 further on, questions of up to 64).

Two things follow run_squad.py as well. Where a window does not hold the whole answer, the start and end to be learnt
are ``<s>``'s. And where windows overlap, an answer may start at a token only in the window in which that token has most
context on its poorer side (its ``token_is_max_context``). Of spans all that are allowed are compared: run_squad.py
looks at those of the 20 best starts and the 20 best ends alone.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple, Optional

import numpy as np
import torch

from lazyformer_fairseq.data.datasets.labelled_texts import LabelledTextsDataset
from lazyformer_fairseq.data.squad import Answer, SquadFile
from lazyformer_fairseq.data.text.interface import TextTokenizer
from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.progress import Progress
from lazyformer_fairseq.storage.arrays import refuse_packed

TOKENS_AT_ONCE = 1024  # of a context, each beside the windows that hold one of them
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

    @classmethod
    def load(cls, path: Path) -> "Windows":
        """Reads an npz of the fields. Raises a ValueError where they are no whole numbers, or what numpy raises."""
        refuse_packed(path)
        with np.load(path, allow_pickle=False) as arrays:
            values = {each.name: arrays[each.name] for each in fields(cls)}
        for name, array in values.items():
            if array.dtype.kind not in "iu":
                raise ValueError(f"its {name} are no whole numbers")
            if name not in ("ids", "offsets"):  # small; sums of damaged ones shall not wrap round
                values[name] = array.astype(np.int64)
        values["cut_questions"] = int(values["cut_questions"])
        values["targets"] = values["targets"] if len(values["targets"]) else None
        return cls(**values)

    def check(self, file: SquadFile, symbols: int, wanted: Mapping[str, int], source: str) -> None:
        """Raises a ValueError where arrays do not belong together, or to the file; whatever is read lies within.

        Args:
            symbols: of the dictionary.
            wanted: how many `questions`, `windows` and `tokens` there should be, as `source` names them.
        """
        number, sizes = len(self), self.sizes
        found = {"questions": len(file.questions), "windows": number, "tokens": int(sizes.sum())}
        if found != dict(wanted):
            raise ValueError(f"not the {wanted['questions']:,} questions and {wanted['windows']:,} windows of {source}")
        rows = (self.question, self.place, self.first, self.count, self.own)
        is_whole = self.targets is None or self.targets.shape == (number, 2)
        is_whole = is_whole and all(len(each) == number for each in rows)
        if not is_whole or not np.array_equal(self.paragraph, file.paragraph_of):
            raise ValueError("its parts are not of one size")
        lengths = np.diff(self.context_starts)

        def within(numbers: np.ndarray, end: Any = np.inf) -> bool:
            return ((numbers >= 0) & (numbers < end)).all()

        is_within = (
            len(self.ids) == found["tokens"]
            and within(self.ids, symbols)
            and within(sizes - 1)
            and within(self.question, found["questions"])
            and all(map(within, (self.place, self.first, self.count, sizes - self.place - self.count, lengths)))
            and (len(lengths), self.context_starts[0]) == (len(file.contexts), 0)
            and self.context_starts[-1] == len(self.offsets)
            and within(lengths[self.paragraph[self.question]] - self.first - self.count)
            and (self.targets is None or within(self.targets, sizes[:, None]))
        )
        if not is_within:
            raise ValueError("its numbers lead outside")


def make_windows(tokenizer: TextTokenizer, file: SquadFile, settings: WindowSettings = USUAL) -> Windows:
    """Encodes each context and each question once, and lays windows over the contexts.

    Targets are of each question's first answer; there are none where a question has no answer.
    """
    bos, _, eos, *_ = tokenizer.special
    has_answers = all(question.answers for question in file.questions)
    inputs: list[np.ndarray] = []
    rows: list[np.ndarray] = []  # of a question: question, place, first, count, own (2), targets (2)
    offsets: list[np.ndarray] = []
    cut_questions = 0
    end = np.array([eos], np.int32)
    for paragraph in Progress(file.paragraphs, desc=f"encode {file.path}", unit=" paragraphs", delay=2):
        found, spans = tokenizer.encode_with_offsets(paragraph.context)
        context = np.array(found, np.int32)
        offsets.append(without_spaces(spans, paragraph.context))
        for question in paragraph.questions:
            asked = tokenizer.encode(question.text)
            cut_questions += len(asked) > settings.longest_question
            head = np.array([bos, *asked[: settings.longest_question], *[eos] * tokenizer.separators], np.int32)
            firsts = starts_of_windows(len(context), settings.longest - len(head) - 1, settings.stride)
            counts = np.minimum(len(context) - firsts, settings.longest - len(head) - 1)
            answer = question.answers[0] if has_answers else None
            targets = _targets(answer, offsets[-1], firsts, counts, len(head))
            same = np.full((len(firsts), 2), (len(rows), len(head)))
            rows.append(np.column_stack([same, firsts, counts, own_tokens(firsts, counts), targets]).astype(np.int32))
            inputs += [
                np.concatenate([head, context[first : first + count], end])
                for first, count in zip(firsts.tolist(), counts.tolist(), strict=True)
            ]
    of_all = np.concatenate(rows)
    return Windows(
        ids=np.concatenate(inputs),
        sizes=np.array([len(ids) for ids in inputs]),
        **dict(zip(("question", "place", "first", "count"), of_all.T, strict=False)),
        own=of_all[:, 4:6],
        targets=of_all[:, 6:].astype(np.int64) if has_answers else None,
        offsets=np.concatenate(offsets),
        context_starts=np.cumsum([0, *map(len, offsets)]),
        paragraph=file.paragraph_of,
        cut_questions=cut_questions,
    )


def _targets(
    answer: Optional[Answer], spans: np.ndarray, firsts: np.ndarray, counts: np.ndarray, place: int
) -> np.ndarray:
    """Where in each window's input the answer starts and ends, (W, 2); NOT_HERE where it is not whole."""
    span = tokens_of(spans, answer.start, answer.end) if answer else None
    if span is None:
        return np.full((len(firsts), 2), NOT_HERE)
    is_inside = (firsts <= span[0]) & (span[1] < firsts + counts)
    return np.where(is_inside[:, None], np.array(span) - firsts[:, None] + place, NOT_HERE)


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
    best = []
    for begin in range(0, ends[-1], TOKENS_AT_ONCE):
        tokens = np.arange(begin, min(begin + TOKENS_AT_ONCE, ends[-1]))[:, None]
        there = slice(np.searchsorted(ends, begin, "right"), np.searchsorted(firsts, tokens[-1, 0], "right"))
        context = np.minimum(tokens - firsts[there], ends[there] - 1 - tokens)
        best.append(np.where(context >= 0, context + 0.01 * counts[there], -1.0).argmax(1) + there.start)
    found = np.searchsorted(np.concatenate(best), np.arange(len(firsts))[:, None] + [0, 1])
    return np.where(found[:, :1] < found[:, 1:], found, firsts[:, None])


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


MOST_AT_ONCE = 1 << 22  # scores that are in memory at once, 16 MB


class Spans(NamedTuple):
    """Of each window the best spans, the best first.

    Attributes:
        starts, ends: tokens of the input, both inclusive, (N, n).
        scores: sums of logits, float32 (N, n); -inf where there is no further span.
    """

    starts: np.ndarray
    ends: np.ndarray
    scores: np.ndarray


def best_spans(
    starts_NT: np.ndarray,
    ends_NT: np.ndarray,
    is_start_NT: np.ndarray,
    is_end_NT: np.ndarray,
    longest: int,
    n_best: int,
) -> Spans:
    """The `n_best` best spans of each window.

    Args:
        starts_NT, ends_NT: logits of every token as start and as end.
        is_start_NT, is_end_NT: at which tokens an answer may start, and end: bool.
        longest: tokens of an answer.
    """
    number, length = starts_NT.shape
    at_once = max(1, MOST_AT_ONCE // (length * longest))
    if number > at_once:
        arrays = (starts_NT, ends_NT, is_start_NT, is_end_NT)
        parts = [[of_all[first : first + at_once] for of_all in arrays] for first in range(0, number, at_once)]
        found = [best_spans(*part, longest, n_best) for part in parts]
        return Spans(*map(np.concatenate, zip(*found, strict=True)))
    starts_NT = np.where(is_start_NT, starts_NT.astype(np.float32), -np.inf)
    ends_NT = np.where(is_end_NT, ends_NT.astype(np.float32), -np.inf)
    padded = np.pad(ends_NT, ((0, 0), (0, longest - 1)), constant_values=-np.inf)
    followers = np.lib.stride_tricks.sliding_window_view(padded, longest, axis=1)  # (N, T, longest)
    scores = (starts_NT[:, :, None] + followers).reshape(number, length * longest)
    n_best = min(n_best, scores.shape[1])
    rows = np.arange(number)[:, None]
    chosen = scores.argmax(1)[:, None] if n_best == 1 else np.argpartition(scores, -n_best, axis=1)[:, -n_best:]
    order = np.lexsort((chosen, -scores[rows, chosen]), axis=1)  # of equal spans the first one, and the shortest
    chosen = chosen[rows, order]
    first, further = np.divmod(chosen, longest)
    return Spans(first, first + further, scores[rows, chosen])


USUAL_ANSWERS = 20  # kept to a question, as run_squad.py does


class FoundAnswer(NamedTuple):
    """One answer.

    Attributes:
        text: characters `start` to `end` of the context.
        start, end: the first character, and one past the last.
        score: the sum of the logits of its start and its end.
        probability: among the answers that were kept to the question.
    """

    text: str
    start: int
    end: int
    score: float
    probability: float


class SpanCollector:
    """Takes logits of windows in any order; then each question has the best spans of all its windows.

    A question is always answered: with no score for "no answer", as version 1.1 has none.

    Args:
        windows: of all questions.
        contexts: the texts.
        longest: tokens of an answer.
        n_best: answers to a question.
    """

    def __init__(self, windows: Windows, contexts: Sequence[str], longest: int = 30, n_best: int = USUAL_ANSWERS):
        self.windows, self.contexts, self.longest, self.n_best = windows, contexts, longest, n_best
        self._found: dict[int, list[FoundAnswer]] = {}

    def add(self, index: np.ndarray, starts_BT: np.ndarray, ends_BT: np.ndarray) -> None:
        """Takes the logits of the windows `index` (B,); inputs may be padded on the right."""
        for window, spans in zip(index.tolist(), self.spans(index, starts_BT, ends_BT), strict=True):
            self._found.setdefault(int(self.windows.question[window]), []).extend(spans)

    def spans(self, index: np.ndarray, starts_BT: np.ndarray, ends_BT: np.ndarray) -> list[list[FoundAnswer]]:
        """The best spans of each of the windows `index` (B,), the best first, without probabilities (nan)."""
        if not len(self.windows.offsets):  # control characters alone, say: there is nothing to point at
            return [[] for _ in index]
        is_start, is_end = allowed(self.windows, index, starts_BT.shape[1])
        best = best_spans(starts_BT, ends_BT, is_start, is_end, self.longest, self.n_best)
        firsts, lasts = characters(self.windows, index, best)
        paragraphs = self.windows.paragraph[self.windows.question[index]].tolist()
        return [
            [
                FoundAnswer(self.contexts[paragraph][start:end], start, end, score, float("nan"))
                for start, end, score in zip(*row, strict=True)
                if score > -np.inf
            ]
            for paragraph, *row in zip(paragraphs, firsts.tolist(), lasts.tolist(), best.scores.tolist(), strict=True)
        ]

    def answers(self) -> list[list[FoundAnswer]]:
        """For each question its best answers, the best first; none where its context has no token of text.

        A text that stands in several places counts once, at the best.
        """
        return [self._answers(self._found.get(number, [])) for number in range(len(self.windows.paragraph))]

    def _answers(self, found: list[FoundAnswer]) -> list[FoundAnswer]:
        of_text: dict[str, FoundAnswer] = {}
        for answer in sorted(found, key=lambda answer: (-answer.score, answer.start, answer.end)):
            of_text.setdefault(answer.text, answer)
        best = list(of_text.values())[: self.n_best]
        scores = np.array([answer.score for answer in best])
        weights = np.exp(scores - scores.max()) if best else scores
        shares = (weights / weights.sum()).tolist()
        return [answer._replace(probability=share) for answer, share in zip(best, shares, strict=True)]


def allowed(windows: Windows, index: np.ndarray, length: int) -> tuple[np.ndarray, np.ndarray]:
    """At which tokens of each window answers may start, and end, bool (B, length): in the context, at text.

    Tokens that stand for no character, as a space that is a token by itself, are neither.
    """
    tokens = np.arange(length)[None, :] - windows.place[index, None]  # of the window's part of the context
    is_inside = (tokens >= 0) & (tokens < windows.count[index, None])
    spans = windows.offsets[np.where(is_inside, windows.first_offset[index, None] + tokens, 0)]
    is_end = is_inside & (spans[..., 0] < spans[..., 1])
    in_context = windows.first[index, None] + tokens
    own = windows.own[index]
    return is_end & (in_context >= own[:, :1]) & (in_context < own[:, 1:]), is_end


def characters(windows: Windows, index: np.ndarray, spans: Spans) -> tuple[np.ndarray, np.ndarray]:
    """The first character of each span, and one past the last, (B, n) both; of spans that are none, anything.

    Of all of its tokens: where a quote and a comma have changed places, the last token is not the one that ends last.
    """
    tokens = np.arange(1 + (spans.ends - spans.starts).max(initial=0))
    shift = (windows.first_offset - windows.place)[index, None, None]
    places = shift + np.minimum(spans.starts[..., None] + tokens, spans.ends[..., None])
    of_tokens = windows.offsets[np.clip(places, 0, len(windows.offsets) - 1)]
    is_text = of_tokens[..., 0] < of_tokens[..., 1]
    starts = np.where(is_text, of_tokens[..., 0], np.iinfo(np.int32).max).min(-1)
    return starts, np.where(is_text, of_tokens[..., 1], 0).max(-1)


class QuestionWindowsDataset(LabelledTextsDataset):
    """Inputs of a file's questions; the target of each is where the answer starts and ends in it, (2,).

    Args:
        file: the questions.
        windows: made of it.
        split: its name; batches carry it.
        longest_answer: tokens.
        pad, shuffle, seed, types_after, in_a_row: as of LabelledTextsDataset.
        marks_questions: batches have `global_positions` in `net_input`, True at tokens of the question and ``<s>``.
    """

    def __init__(
        self,
        file: SquadFile,
        windows: Windows,
        split: str,
        longest_answer: int,
        pad: int,
        shuffle: bool,
        seed: int = 1,
        types_after: Optional[int] = None,
        marks_questions: bool = False,
        in_a_row: bool = False,
    ):
        super().__init__(windows.inputs, windows.targets, pad, shuffle, seed, types_after, in_a_row=in_a_row)
        self.file, self.windows, self.split = file, windows, split
        self.longest_answer, self.marks_questions = longest_answer, marks_questions

    def collater(self, samples: list[dict]) -> dict:
        """As of LabelledTextsDataset, `target` (B, 2), and the `split`."""
        if not (batch := super().collater(samples)):
            return batch
        batch["split"] = self.split
        if self.marks_questions:
            places = torch.from_numpy(self.windows.place[batch["id"].numpy()])
            # The separator before the context is not marked.
            positions = torch.arange(batch["net_input"]["src_tokens"].size(1))
            batch["net_input"]["global_positions"] = positions < places[:, None]
        return batch

    def collector(self, n_best: int) -> SpanCollector:
        """Takes logits of the windows, and gives the `n_best` answers to each question."""
        return SpanCollector(self.windows, self.file.contexts, self.longest_answer, n_best)

    def best_answers(self, index: np.ndarray, logits_BT2: np.ndarray) -> list[Optional[FoundAnswer]]:
        """The best answer of each of the windows `index` (B,); None where a window has none.

        Args:
            logits_BT2: of starts and ends; inputs may be padded on the right.
        """
        found = self.collector(n_best=1).spans(index, logits_BT2[..., 0], logits_BT2[..., 1])
        return [answers[0] if answers else None for answers in found]
