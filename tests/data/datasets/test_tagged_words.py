"""Tagged words: the places of words among the tokens, and batches of them."""

import numpy as np
import pytest
from other_tokenizers import ODD, SIZES, trained_on_odd

from lazyformer_fairseq.data.datasets.tagged_words import NO_TOKEN, TaggedWordsDataset, first_tokens
from lazyformer_fairseq.data.labelled_files import words_of


@pytest.mark.parametrize("algorithm", SIZES)
def test_a_words_first_token_spells_its_beginning(algorithm, tmp_path):
    tokenizer = trained_on_odd(algorithm, tmp_path)
    words = [*words_of(ODD), "\x00", "end."]
    assert "1\u00a0000\u00a0000," in words
    ids = tokenizer.build_input(" ".join(words))
    places = first_tokens(tokenizer, words)
    assert (places == NO_TOKEN).tolist() == [word == "\x00" and algorithm != "byte-level BPE" for word in words]
    found = places[places != NO_TOKEN].tolist()
    assert len(set(found)) == len(found) and set(found) <= set(range(1, len(ids) - 1))
    for word in ("He", "said", "the"):
        piece = tokenizer.decode([ids[places[words.index(word)]]]).lower()
        assert piece and word.lower().startswith(piece)


def test_words_that_are_cut_have_no_place():
    inputs = [np.array([0, 5, 6, 2]), np.array([0, 7, 8, 9, 6, 2])]
    targets = [np.array([1, 0, 2, 1, 3, 0]), np.array([1, 0, 4, 1, NO_TOKEN, 2])]
    data = TaggedWordsDataset(inputs, targets, pad=1, shuffle=False)
    batch = data.collater([data[0], data[1]])
    assert batch["target"].tolist() == [0, 1, 0, 0, 1, 2]
    assert batch["places"].tolist() == [1, 2, -1, 7, 10, -1], "of the first row's </s>, and nowhere"
    assert batch["words"] == [3, 3]
    assert data.collater([data[0]])["places"].tolist() == [1, 2, -1]
