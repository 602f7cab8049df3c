import pickle
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lazyformer_fairseq.corpus.build import build_corpus
from lazyformer_fairseq.corpus.settings import CorpusSettings
from lazyformer_fairseq.data.datasets.masking import Masking
from lazyformer_fairseq.data.datasets.sentence_pairs import SentencePairsDataset
from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.storage.indexed_format import MappedItems

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


def test_epochs_have_pairs_of_their_own_which_come_again():
    dataset = dataset_of(numbered([[3] * 12] * 8))
    seen = []
    for epoch in (1, 2, 1):
        dataset.set_epoch(epoch)
        assert dataset.ordered_indices().max() == len(dataset) - 1
        seen.append([(dataset[n]["source"].tolist(), dataset[n]["is_random"]) for n in range(len(dataset))])
    assert seen[0] == seen[2] != seen[1]


def test_a_copy_for_a_worker_reads_the_same():
    dataset = dataset_of(numbered([[3] * 12] * 8))
    dataset.set_epoch(3)
    copy = pickle.loads(pickle.dumps(dataset))
    assert [copy.block(n).tolist() for n in range(len(copy))] == [dataset.block(n).tolist() for n in range(len(copy))]


@pytest.mark.parametrize("separators", [1, 2])
def test_batches_say_what_follows_and_of_which_text_a_token_is(separators):
    dataset = dataset_of(numbered([[3] * 12] * 8), separators=separators, has_token_types=True)
    samples = [dataset[number] for number in range(len(dataset))]
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
        ([[[5, 6], [7]]], 24, "holds 3 items, all of one document; --next-sentence"),
        ([[], []], 24, "holds no sentence; --next-sentence"),
        ([[[5, 6]], [[7]]], 5, "tokens_per_sample is 5; a pair needs .* at least 6"),
    ],
)
def test_what_makes_no_pairs_is_a_user_error(documents, length, words):
    with pytest.raises(UserError, match=words):
        dataset_of(documents, length)


@pytest.fixture(scope="module")
def real_corpus(real_data, tmp_path_factory) -> Path:
    """Articles of Wikipedia through the whole of `lazyformer corpus`."""
    folder = tmp_path_factory.mktemp("pairs")
    source = next((real_data / "raw" / "wikiextractor_graykode" / "AA").glob("wiki_*"))
    text = source.read_text()[:400_000]
    (folder / "wiki_00").write_text(text[: text.rindex("</doc>") + 7])
    build_corpus([str(folder / "wiki_00")], folder / "data", CorpusSettings(2_000, valid_share=0.01, shards=1))
    return folder / "data" / "shard0" / "train"


def test_real_text_keeps_its_order_and_its_documents(real_corpus):
    items = MappedItems(real_corpus)
    dataset = SentencePairsDataset(items, items.sizes, 128, BOS, EOS, MASKING, separators=1)
    documents, current = [], []
    for item in [*items, [EOS]]:  # read without the code under test
        if len(item) > 1:
            current.append(list(map(int, item[:-1])))
        elif current:
            documents.append(current)
            current = []
    assert len(documents) > 8
    flat = [(number, tuple(sentence)) for number, document in enumerate(documents) for sentence in document]
    for epoch in (1, 2):
        dataset.set_epoch(epoch)
        pairs = dataset.pairs
        item_of = np.flatnonzero(np.asarray(items.sizes) > 1)  # the item of each sentence of `flat`
        number_of = {int(item): number for number, item in enumerate(item_of)}
        used = []
        for index in range(len(pairs)):
            first, a_end = number_of[int(pairs.first.first[index])], int(pairs.first.end[index])
            second, b_end = number_of[int(pairs.second.first[index])], int(pairs.second.end[index])
            a, b = list(range(first, 1 + number_of[a_end - 1])), list(range(second, 1 + number_of[b_end - 1]))
            (document,), (other,) = {flat[number][0] for number in a}, {flat[number][0] for number in b}
            if pairs.is_random[index]:
                assert document != other
            else:
                assert document == other and b[0] == a[-1] + 1
            used += a if pairs.is_random[index] else a + b
            words = [[word for number in run for word in flat[number][1]] for run in (a, b)]
            block = dataset.block(index).tolist()
            border = block.index(EOS)
            for run, part in zip(words, (block[1:border], block[border + 1 : -1]), strict=True):
                assert any(run[start : start + len(part)] == part for start in range(len(run) - len(part) + 1))
                assert part == run or len(block) == 128  # cut only where there is no room
        assert used == list(range(len(flat)))  # no sentence is lost, none comes twice, all in their order
        assert 0.45 < pairs.is_random.mean() < 0.65
