"""Pairs of texts as BERT's loop draws them, and what stands in a batch of them."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lazyformer_fairseq.data.datasets import sentence_pairs
from lazyformer_fairseq.data.datasets.masked_blocks import Masking
from lazyformer_fairseq.data.datasets.sentence_pairs import Documents, Pairs, SentencePairsDataset, draw_pairs
from lazyformer_fairseq.errors import UserError

# Documents as sizes of their sentences, without </s>.
documents = st.lists(st.lists(st.integers(1, 30), min_size=1, max_size=12), min_size=2, max_size=8)


def items_of(documents: list[list[int]]) -> np.ndarray:
    """Sizes of the items, a boundary before all and between documents, and two after the second."""
    items = [1]
    for number, sentences in enumerate(documents):
        items += [size + 1 for size in sentences] + [1] * (1 + (number == 1))
    return np.array(items[:-1] if len(documents) != 2 else items, np.int32)


def draw(documents: list[list[int]], room: int, seed: int = 1) -> Pairs:
    return draw_pairs(Documents(items_of(documents)), room, np.random.default_rng(seed))


def is_chunk(left: list[int], count: int, aim: int) -> bool:
    """Whether BERT's loop stops after `count` of these sentences."""
    return sum(left[: count - 1]) < aim and (count == len(left) or sum(left[:count]) >= aim)


@settings(max_examples=30)
@given(documents, st.integers(2, 40), st.integers(0, 99), st.sampled_from([0.0, 0.1, 1.0]))
def test_an_epoch_is_one_that_berts_loop_can_draw(documents, room, seed, short):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sentence_pairs, "SHORT", short)
        pairs = draw(documents, room, seed)
    starts = Documents(items_of(documents)).starts.tolist()
    rows = iter(zip(*pairs.first, *pairs.second, pairs.is_random.tolist(), strict=True))
    for start, sentences in zip(starts, documents, strict=True):
        place, aims = 0, set(range(2, room + 1)) if short else {room}
        while place < len(sentences):
            first, border, a_skip, a_size, second, stop, b_skip, b_size, is_random = next(rows)
            assert first == start + place  # what is left of the last chunk comes first
            left, count = sentences[place:], border - first
            a = sum(left[:count])
            if is_random:
                (other,) = (each for each, begin in enumerate(starts) if begin <= second < begin + len(documents[each]))
                assert starts[other] != start
                theirs = documents[other][second - starts[other] :]
                b = sum(theirs[: stop - second])
                chunks = [(aim, size) for aim in aims for size in range(1, 1 + len(left)) if is_chunk(left, size, aim)]
                aims = {aim for aim, size in chunks if count < size or size == 1}
                aims = {aim for aim in aims if is_chunk(theirs, stop - second, max(aim - a, 1))}  # a sentence at least
                place += count
            else:
                assert second == border < stop
                b = sum(left[count : stop - first])
                aims = {aim for aim in aims if is_chunk(left, stop - first, aim)}
                place += stop - first
            assert aims, "all chunks of a document have one aim"
            assert 0 <= a_skip <= a - a_size and 0 <= b_skip <= b - b_size
            while a + b > room:  # truncate_seq_pair of google-research/bert
                a, b = (a - 1, b) if a > b else (a, b - 1)
            assert (a_size, b_size) == (a, b)
    assert next(rows, None) is None
    assert pairs.sizes.max() <= room


def test_shares_are_berts():
    pairs = draw([[3] * 400] * 200, 60)
    assert abs(pairs.is_random.mean() - 0.5) < 0.02
    starts = Documents(items_of([[3] * 400] * 200)).starts
    document = np.searchsorted(starts, pairs.first.first, side="right") - 1
    longest = np.zeros(200)
    np.maximum.at(longest, document, pairs.sizes)
    assert 0.04 < (longest < 58).mean() < 0.18  # of documents, whose pairs are short
    sentences = pairs.first.end - pairs.first.first
    middle = sentences[np.isin(document, np.flatnonzero(longest >= 58)) & ~pairs.is_random]
    counts = np.bincount(middle[middle <= 19], minlength=20)[1:]
    assert counts.min() > 0.7 * counts.mean() and counts.max() < 1.3 * counts.mean()  # the first text ends anywhere


def test_what_is_too_long_is_cut_from_front_and_back_alike():
    pairs = draw([[90], [90]] * 500, 21)
    assert set(pairs.first.size) == {11} and set(pairs.second.size) == {10} and pairs.is_random.all()
    for texts in (pairs.first, pairs.second):
        assert abs(texts.skip.mean() - (90 - texts.size[0]) / 2) < 1 and texts.skip.std() > 3


def test_other_documents_are_drawn_alike_and_from_any_sentence_on():
    documents = [[2] * 10] * 5
    starts = Documents(items_of(documents)).starts
    found = [draw(documents, 4, seed) for seed in range(60)]
    places = np.concatenate([pairs.second.first[pairs.is_random] for pairs in found])
    own = np.concatenate([pairs.first.first[pairs.is_random] for pairs in found])
    own, other = (np.searchsorted(starts, each, side="right") - 1 for each in (own, places))
    counts = np.bincount(other * 10 + places - starts[other], minlength=50)
    assert len(counts) == 50 and counts.min() > 0.3 * counts.mean() and counts.max() < 2 * counts.mean()
    assert len(set(zip(own.tolist(), other.tolist(), strict=True))) == 5 * 4


BOS, PAD, EOS, MASK = 0, 1, 2, 999
MASKING = Masking(vocab_size=1000, mask_index=MASK, pad_index=PAD, special=(0, 1, 2, 3, MASK))


def dataset_of(documents: list[list[list[int]]], tokens_per_sample: int = 24, **options) -> SentencePairsDataset:
    """Documents of sentences without their </s>."""
    items = [torch.tensor([*words, EOS]) for document in documents for words in [*document, []]]
    sizes = np.array([len(item) for item in items], np.int32)
    return SentencePairsDataset(items, sizes, tokens_per_sample, BOS, EOS, MASKING, **options)


def numbered(documents: list[list[int]]) -> list[list[list[int]]]:
    """Documents of sentences of these sizes, no word twice."""
    words = iter(range(4, 999))
    return [[[next(words) for _ in range(size)] for size in document] for document in documents]


sizes = st.lists(st.lists(st.integers(1, 9), min_size=1, max_size=6), min_size=2, max_size=5)


@settings(max_examples=30)
@given(sizes, st.integers(6, 40), st.sampled_from([1, 2]), st.integers(1, 9))
def test_pairs_read_as_the_documents_do(sizes, tokens_per_sample, separators, epoch):
    documents = numbered(sizes)
    dataset = dataset_of(documents, tokens_per_sample, separators=separators)
    dataset.set_epoch(epoch)
    texts = [[word for sentence in document for word in sentence] for document in documents]
    document_of = {word: number for number, text in enumerate(texts) for word in text}
    for index in range(len(dataset)):
        block = dataset.block(index).tolist()
        assert len(block) == dataset.size(index) == dataset.sizes[index] <= tokens_per_sample
        assert (block[0], block[-1], block.count(EOS)) == (BOS, EOS, separators + 1)
        border = block.index(EOS)
        first, second = block[1:border], block[border + separators : -1]
        assert block[border : border + separators] == [EOS] * separators and first and second
        runs = [texts[document_of[part[0]]] for part in (first, second)]
        for part, text in zip((first, second), runs, strict=True):
            start = text.index(part[0])
            assert text[start : start + len(part)] == part
        if dataset[index]["is_random"]:
            assert document_of[first[0]] != document_of[second[0]]
        elif len(first) + len(second) < dataset.room:  # nothing is cut
            start = runs[0].index(first[0])
            assert runs[0][start : start + len(first) + len(second)] == first + second


@pytest.mark.parametrize("separators", [1, 2])
def test_batches_say_what_follows_and_of_which_text_a_token_is(separators):
    dataset = dataset_of(numbered([[3] * 12] * 8), separators=separators, has_token_types=True)
    seen = []
    for epoch in (1, 2, 1):  # an epoch has pairs of its own, which come again
        dataset.set_epoch(epoch)
        assert dataset.ordered_indices().max() == len(dataset) - 1
        samples = [dataset[number] for number in range(len(dataset))]
        seen.append([(sample["source"].tolist(), sample["is_random"]) for sample in samples])
    assert seen[0] == seen[2] != seen[1]
    batch = dataset.collater(samples)
    assert batch["next_sentence"].tolist() == [int(sample["is_random"]) for sample in samples]
    assert {0, 1} == set(batch["next_sentence"].tolist()) and batch["next_sentence"].dtype == torch.int64
    types, tokens = batch["net_input"]["token_types"], batch["net_input"]["src_tokens"]
    for row, ids, sample in zip(types.tolist(), tokens.tolist(), samples, strict=True):
        first = ids.index(EOS) + 1
        size = len(sample["source"])
        assert row == [0] * first + [1] * (size - first) + [0] * (len(ids) - size)
    dataset.has_token_types = False
    assert "token_types" not in dataset.collater(samples)["net_input"]
    assert dataset.collater([]) == {}


@pytest.mark.parametrize(
    ("documents", "length", "words"),
    [
        ([[[5, 6], [7]]], 24, "contains 3 items, all from one document; --next-sentence"),
        ([[], []], 24, "contains no sentences; --next-sentence"),
        ([[[5, 6]], [[7]]], 5, "--tokens-per-sample 5: must be at least 6, because a pair"),
    ],
)
def test_what_makes_no_pairs_is_a_user_error(documents, length, words):
    with pytest.raises(UserError, match=words):
        dataset_of(documents, length)
