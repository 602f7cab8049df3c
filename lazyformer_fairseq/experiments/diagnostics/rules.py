"""What needs no Transformer: a constant answer, and a linear model of symbol counts. A model must beat these."""

from collections.abc import Sequence

import numpy as np

from lazyformer_fairseq.data.glue.prepared_data import EncodedExamples

MOST_ROWS = 10_000  # that a linear model is fitted to
CONSTANT = "constant: the most frequent class"


def constant_answer(train: np.ndarray, test: np.ndarray) -> float:
    """Accuracy on test of the class that is most frequent in train."""
    return float(np.mean(test == np.bincount(train).argmax()))


def frequent_by_group(train: Sequence, train_targets: np.ndarray, test: Sequence, test_targets: np.ndarray) -> float:
    """Accuracy on test of the class that is most frequent in train among the examples of the same group.

    Args:
        train, test: the group of each example; that of a new group gets the most frequent class of all.
    """
    train, test = np.asarray(train), np.asarray(test)
    usual = np.bincount(train_targets).argmax()
    answers = {group: np.bincount(train_targets[train == group]).argmax() for group in np.unique(train).tolist()}
    return float(np.mean(test_targets == np.array([answers.get(group, usual) for group in test.tolist()])))


def bag_of_words(train: EncodedExamples, test: EncodedExamples, symbols: int) -> float:
    """Accuracy on test of logistic regression on the share of each symbol in an input, whatever its place."""
    from sklearn.linear_model import LogisticRegression
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import MaxAbsScaler

    if len(np.unique(train.targets[:MOST_ROWS])) < 2:
        return constant_answer(train.targets, test.targets)
    model = make_pipeline(MaxAbsScaler(), LogisticRegression(max_iter=200))
    model.fit(_shares(train.inputs[:MOST_ROWS], symbols), train.targets[:MOST_ROWS])
    return float(model.score(_shares(test.inputs, symbols), test.targets))


def _shares(inputs: Sequence[np.ndarray], symbols: int):
    """Sparse (examples, symbols)."""
    from scipy.sparse import csr_matrix

    rows = np.repeat(np.arange(len(inputs)), [len(ids) for ids in inputs])
    values = np.concatenate([np.full(len(ids), 1 / len(ids)) for ids in inputs])
    return csr_matrix((values, (rows, np.concatenate(inputs))), shape=(len(inputs), symbols))


def shared_words(train: EncodedExamples, test: EncodedExamples, symbols: int, eos: int) -> float:
    """Accuracy on test of calling a pair's halves of one document where they share enough rare words.

    That is the cosine of their counts, each weighted by how few halves have the word; the bound is the best on train.
    """
    weight = _rarity(train.inputs[:MOST_ROWS], symbols, eos)
    known = _likeness(train.inputs[:MOST_ROWS], symbols, eos, weight)
    order, targets = np.argsort(known), train.targets[:MOST_ROWS]
    below_is_right = np.cumsum(np.append(0, targets[order] == 0))
    above_is_right = np.cumsum(np.append(0, targets[order][::-1] == 1))[::-1]
    best = int(np.argmax(below_is_right + above_is_right))
    bound = known[order[best]] if best < len(order) else np.inf
    return float(np.mean((_likeness(test.inputs, symbols, eos, weight) >= bound) == test.targets))


def _halves(inputs: Sequence[np.ndarray], symbols: int, eos: int) -> tuple:
    """Counts of the words of the first and of the second halves, sparse (examples, symbols) each."""
    parts = [(ids[1:], np.flatnonzero(ids == eos)) for ids in inputs]
    firsts = [ids[: ends[0] - 1] for ids, ends in parts]
    seconds = [ids[ends[-2] : ends[-1] - 1] for ids, ends in parts]
    return _shares(firsts, symbols), _shares(seconds, symbols)


def _rarity(inputs: Sequence[np.ndarray], symbols: int, eos: int) -> np.ndarray:
    having = sum(np.asarray((counts > 0).sum(0)).ravel() for counts in _halves(inputs, symbols, eos))
    return np.log((1 + 2 * len(inputs)) / (1 + having))


def _likeness(inputs: Sequence[np.ndarray], symbols: int, eos: int, weight: np.ndarray) -> np.ndarray:
    """The cosine of the two halves' weighted counts, (examples,)."""
    first, second = (counts.multiply(weight).tocsr() for counts in _halves(inputs, symbols, eos))
    lengths = [np.sqrt(np.asarray(half.multiply(half).sum(1)).ravel()) for half in (first, second)]
    return np.asarray(first.multiply(second).sum(1)).ravel() / np.maximum(lengths[0] * lengths[1], 1e-12)
