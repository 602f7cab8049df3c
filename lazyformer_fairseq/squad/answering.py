"""Answers in the form of the official evaluation."""

from collections.abc import Mapping, Sequence

from lazyformer_fairseq.data.datasets.question_windows import QuestionWindowsDataset
from lazyformer_fairseq.data.squad.answers import FoundAnswer


def best_texts(dataset: QuestionWindowsDataset, answers: Sequence[Sequence[FoundAnswer]]) -> Mapping[str, str]:
    """The official format: each question's id with the text of its best answer; none is empty where one was found."""
    return {
        question.id: found[0].text if found else ""
        for question, found in zip(dataset.file.questions, answers, strict=True)
    }
