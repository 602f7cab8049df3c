import numpy as np
import pytest

from lazyformer_fairseq.data.neighbour_embeddings import STANDARD_DEVIATION, neighbour_embeddings

TEXT = np.array([2, 3, 2, 3, 4, 5, 4, 3, 2, 5, 5, 6, 2, 3, 6, 4, 2, 6])
SYMBOLS = 8  # 0, 1 and 7 do not occur


def expected(text: np.ndarray, symbols: int, width: int) -> np.ndarray:
    """By the definition, with dense matrices; signs of columns are free."""
    sides = []
    for tokens, neighbours in ((text[1:], text[:-1]), (text[:-1], text[1:])):
        information = np.zeros((symbols, symbols))
        smoothed = np.bincount(neighbours, minlength=symbols) ** 0.75
        for token, neighbour in zip(tokens, neighbours, strict=True):
            together = np.sum((tokens == token) & (neighbours == neighbour))
            share = smoothed[neighbour] / smoothed.sum()
            information[token, neighbour] = max(0, np.log(together / np.sum(tokens == token) / share))
        sides.append(information)
    u, singular, _ = np.linalg.svd(np.hstack(sides))
    return u[:, :width] * np.sqrt(singular[:width])


@pytest.mark.parametrize("width", [2, 5, 8])
def test_they_are_the_singular_vectors_of_the_information_about_neighbours(width):
    found = neighbour_embeddings(TEXT, SYMBOLS, width).astype(float)
    wanted = expected(TEXT, SYMBOLS, width)
    similar = wanted @ wanted.T
    scale = np.trace(found @ found.T) / np.trace(similar)
    np.testing.assert_allclose(found @ found.T, scale * similar, atol=1e-6)
    assert found[found.any(axis=1)].std() == pytest.approx(STANDARD_DEVIATION)
    assert found.any(axis=1).tolist() == [number in TEXT for number in range(SYMBOLS)]


def test_more_numbers_than_symbols_and_texts_without_neighbours():
    found = neighbour_embeddings(TEXT, SYMBOLS, 12)
    assert found.shape == (SYMBOLS, 12) and not found[:, SYMBOLS:].any()
    for text in (TEXT[:0], TEXT[:1], TEXT[:2]):  # a pair of tokens that always occur together tells nothing
        assert not neighbour_embeddings(text, SYMBOLS, 4).any()


def test_models_of_one_text_share_the_decomposition(monkeypatch):
    first = neighbour_embeddings(TEXT, SYMBOLS, 6)
    first[:] = 0
    monkeypatch.setattr("lazyformer_fairseq.data.neighbour_embeddings.randomized_svd", None)
    assert neighbour_embeddings(TEXT.copy(), SYMBOLS, 6).any()
    with pytest.raises(TypeError):
        neighbour_embeddings(TEXT[::-1].copy(), SYMBOLS, 6)
