"""Word embeddings from co-occurrence counts; tokens with similar neighbors are initialized to similar vectors.

Each token w has a row of 2 V numbers: its positive pointwise mutual information with every left neighbor c and with
every right neighbor c,

    max(0, log(P(w, c) / (P(w) P(c)))).

The truncated singular value decomposition is the best rank-C approximation of this matrix, and the rows of U S can
serve as the vectors. word2vec implicitly learns a similar factorization (Levy and Goldberg, 2014, "Neural Word
Embedding as Implicit Matrix Factorization"). Here, U is weighted by the square roots of the singular values instead,
and P(c) is computed from frequencies raised to the power of 0.75 (Levy, Goldberg and Dagan, 2015, "Improving
Distributional Similarity with Lessons Learned from Word Embeddings", sections 3.2 and 3.3).
"""

import hashlib

import numpy as np
from scipy import sparse
from sklearn.utils.extmath import randomized_svd

SMOOTHING = 0.75
STANDARD_DEVIATION = 0.1  # of the vectors' entries; BERT initializes with 0.02
ITERATIONS = 4  # power iterations, enough for nearly exact leading singular vectors

_last: dict[tuple[bytes, int, int], np.ndarray] = {}  # cached because the models in a comparison share them


def neighbour_embeddings(text: np.ndarray, symbols: int, width: int) -> np.ndarray:
    """Compute token embeddings, float32 (V, C), from the counts of neighboring tokens.

    Args:
        text: token ids (N,) of the training text.
        symbols: vocabulary size V.
        width: embedding size C. If it exceeds V, the remaining entries are 0.

    Returns:
        The embeddings, with zeros for tokens that do not occur.
    """
    key = (hashlib.sha256(text.tobytes()).digest(), symbols, width)
    if key not in _last:
        _last.clear()
        _last[key] = _decompose(text, symbols, width)
    return _last[key].copy()


def _decompose(text: np.ndarray, symbols: int, width: int) -> np.ndarray:
    """Compute the embeddings without the cache; see :func:`neighbour_embeddings`."""
    left = text[:-1]
    right = text[1:]
    counts_VV = sparse.coo_array((np.ones(len(left)), (left, right)), shape=(symbols, symbols))
    left_and_right = sparse.hstack([_information(counts_VV.T), _information(counts_VV)]).tocsr()
    found = np.zeros((symbols, width), np.float32)
    if not left_and_right.count_nonzero():
        return found
    u, singular, _ = randomized_svd(left_and_right, min(width, symbols), n_iter=ITERATIONS, random_state=0)
    occurs = np.bincount(text, minlength=symbols) > 0
    vectors = u[occurs] * np.sqrt(singular)
    found[occurs, : vectors.shape[1]] = vectors * (STANDARD_DEVIATION / vectors.std())
    return found


def _information(counts_VV: sparse.coo_array) -> sparse.coo_array:
    """Return the positive pointwise mutual information between tokens (rows) and their neighbors (columns)."""
    pairs = counts_VV.tocsr().tocoo()
    if not pairs.nnz:
        return pairs
    of_token = np.bincount(pairs.row, pairs.data, minlength=pairs.shape[0])
    of_neighbour = np.bincount(pairs.col, pairs.data, minlength=pairs.shape[1]) ** SMOOTHING
    share = of_neighbour / of_neighbour.sum()
    information = np.log(pairs.data / of_token[pairs.row] / share[pairs.col])
    positive = np.maximum(information, 0)
    return sparse.coo_array((positive, (pairs.row, pairs.col)), shape=pairs.shape)
