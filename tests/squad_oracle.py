"""How many answers come back when a model knows each by heart: what tokens and windows alone cost (docs/squad.md).

Each question is answered with the best logits there are, 1 at the start and the end of its answer and 0 elsewhere. What
then differs from the answer is lost by the way from text to tokens and back, and no model can win it.
"""

from typing import NamedTuple

import numpy as np

from lazyformer_fairseq.data.datasets.question_windows import SpanCollector, Windows, tokens_of
from lazyformer_fairseq.data.squad import SquadFile, exact_match

AT_ONCE = 64  # windows


class LostAnswer(NamedTuple):
    """A first answer that does not come back as an exact match."""

    question: str  # its id
    wanted: str
    found: str
    cause: str


def lost_by_heart(file: SquadFile, windows: Windows, longest: int = 30) -> list[LostAnswer]:
    """Answers all questions with perfect logits; `longest` tokens an answer, as in prediction."""
    collector = SpanCollector(windows, file.contexts, longest, n_best=1)
    for first in range(0, len(windows), AT_ONCE):
        index = np.arange(first, min(first + AT_ONCE, len(windows)))
        logits = np.zeros((2, len(index), int(windows.sizes[index].max())), np.float32)
        for each, targets in zip(logits, windows.targets[index].T, strict=True):
            each[np.arange(len(index)), targets] = 1.0
        collector.add(index, *logits)
    lost = []
    for number, (question, answers) in enumerate(zip(file.questions, collector.answers(), strict=True)):
        wanted, found = question.answers[0].text, answers[0].text if answers else ""
        if not exact_match(found, [wanted]):
            lost.append(LostAnswer(question.id, wanted, found, _cause(file, windows, number, longest)))
    return lost


def _cause(file: SquadFile, windows: Windows, number: int, longest: int) -> str:
    answer, paragraph = file.questions[number].answers[0], windows.paragraph[number]
    spans = windows.offsets[windows.context_starts[paragraph] : windows.context_starts[paragraph + 1]]
    tokens = tokens_of(spans, answer.start, answer.end)
    if tokens is None:
        return "no token stands for its characters"
    if tokens[1] - tokens[0] >= longest:
        return f"longer than {longest} tokens"
    if not windows.targets[windows.question == number].any():
        return "no window holds the whole of it"
    inside = spans[tokens[0] : tokens[1] + 1]
    inside = inside[inside[:, 0] < inside[:, 1]]
    if inside[:, 0].min() < answer.start or inside[:, 1].max() > answer.end:
        return "begins or ends inside a piece"
    return "another"
