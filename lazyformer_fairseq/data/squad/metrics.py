"""Exact match and F1 as SQuAD's official evaluation defines them (Rajpurkar et al., 2016, section 6.1).

Both compare texts without case, punctuation of ASCII, English articles and superfluous spaces. Other punctuation, such
as a curly quote or a long dash, stays, as it does there.
"""

import re
import string
from collections import Counter
from collections.abc import Callable, Mapping, Sequence

from lazyformer_fairseq.data.squad.official import SquadFile

ARTICLES = re.compile(r"\b(a|an|the)\b")
PUNCTUATION = str.maketrans("", "", string.punctuation)


def normalise(text: str) -> str:
    """Lower case, then no punctuation, then no articles, then single spaces; in this order."""
    return " ".join(ARTICLES.sub(" ", text.lower().translate(PUNCTUATION)).split())


def exact_match(prediction: str, answers: Sequence[str]) -> float:
    """1.0 where the prediction is one of the answers, normalised; else 0.0."""
    wanted = normalise(prediction)
    return float(any(wanted == normalise(answer) for answer in answers))


def f1(prediction: str, answers: Sequence[str]) -> float:
    """The best F1 of the prediction's words with those of an answer, as bags; 0.0 where none is shared.

    So two texts of articles alone match exactly and have F1 of 0.0, as in the official evaluation of version 1.1.
    """
    found = Counter(normalise(prediction).split())
    return max((_f1(found, Counter(normalise(answer).split())) for answer in answers), default=0.0)


def _f1(found: Counter, wanted: Counter) -> float:
    shared = (found & wanted).total()
    return 2 * shared / (found.total() + wanted.total()) if shared else 0.0


METRICS: Mapping[str, Callable[[str, Sequence[str]], float]] = {"exact_match": exact_match, "f1": f1}


def score(file: SquadFile, predictions: Mapping[str, str]) -> dict[str, float]:
    """The mean of each metric over a file's questions, 0.0 to 1.0; a question without a prediction counts as 0.0.

    Args:
        predictions: a text for each question's id.
    """
    pairs = [(predictions.get(question.id), question.answer_texts) for question in file.questions]
    return {
        name: sum(metric(text, answers) for text, answers in pairs if text is not None) / len(pairs)
        for name, metric in METRICS.items()
    }
