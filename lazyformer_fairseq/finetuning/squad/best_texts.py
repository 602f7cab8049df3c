"""Answers in the format of the official evaluation."""

from collections.abc import Sequence

from lazyformer_fairseq.data.squad.answers import FoundAnswer
from lazyformer_fairseq.data.squad.official import SquadFile


def best_texts(file: SquadFile, answers: Sequence[Sequence[FoundAnswer]]) -> dict[str, str]:
    """Each question's id with the text of its best answer; "" where its context has no token of text."""
    return {
        question.id: found[0].text if found else "" for question, found in zip(file.questions, answers, strict=True)
    }
