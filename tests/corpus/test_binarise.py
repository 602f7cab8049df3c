"""The DATA folder: what is in it, where its boundaries are, and that fairseq's own tool would write the same."""

import filecmp
import json
import logging
import string

import numpy as np
import pytest
from fairseq import options
from fairseq.data.indexed_dataset import MMapIndexedDataset
from fairseq_cli import preprocess

from lazyformer_fairseq.corpus.binarise import is_held_out, prepare_corpus
from lazyformer_fairseq.corpus.documents import Document
from lazyformer_fairseq.corpus.sentences import SentenceSplitter
from lazyformer_fairseq.data.text_normalisation import TextSettings
from lazyformer_fairseq.data.tokenizer import Tokenizer
from lazyformer_fairseq.errors import UserError

VOCAB_SIZE = 140


def toy_document(number):
    return Document(
        f"d{number}", (f"Document {number} begins. It is short.", f"It has {number * 7} words, 猫 and <mask>!")
    )


DOCUMENTS = [Document("letters", (string.printable,)), *map(toy_document, range(60))]
DUPLICATE = Document("again", tuple(f" {paragraph.upper()}  " for paragraph in toy_document(7).paragraphs))
EMPTY = Document("empty", (" ",))


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    folder = tmp_path_factory.mktemp("corpus") / "data"
    settings = TextSettings(character_coverage=0.999)
    manifest = prepare_corpus([*DOCUMENTS, DUPLICATE, EMPTY], folder, VOCAB_SIZE, 0.2, seed=3, settings=settings)
    return folder, manifest, Tokenizer.load(folder / "tokenizer")


def read(folder, split):
    dataset = MMapIndexedDataset(str(folder / split))
    return [dataset[i].tolist() for i in range(len(dataset))]


def of_split(split):
    return [document for document in DOCUMENTS if is_held_out(document, 0.2, 3) == (split == "valid")]


@pytest.mark.parametrize("split", ["train", "valid"])
def test_items_are_encoded_sentences_and_boundaries(prepared, split):
    folder, _, tokenizer = prepared
    divide = SentenceSplitter()
    expected = []
    for document in of_split(split):
        for paragraph in document.paragraphs:
            for sentence in divide(paragraph):
                expected.append([*tokenizer.encode(sentence.replace("<mask>", "< mask >")), 2])
        expected.append([2])
    assert read(folder, split) == expected


def test_a_literal_mask_is_text(prepared):
    folder, _, tokenizer = prepared
    assert not any(tokenizer.mask_index in item for split in ("train", "valid") for item in read(folder, split))


def test_no_document_in_both_splits(prepared):
    folder, _, _ = prepared
    documents = {}
    for split in ("train", "valid"):
        text = " ".join(" ".join(map(str, item)) for item in read(folder, split))
        documents[split] = set(text.split(" 2 2"))
    assert min(map(len, documents.values())) > 5
    assert documents["train"] & documents["valid"] <= {""}


def test_split_does_not_depend_on_order(prepared, tmp_path):
    folder, _, _ = prepared
    prepare_corpus(DOCUMENTS[::-1], tmp_path / "data", VOCAB_SIZE, 0.2, seed=3)
    assert sorted(map(len, read(folder, "valid"))) == sorted(map(len, read(tmp_path / "data", "valid")))


def test_manifest_counts_everything(prepared):
    folder, manifest, tokenizer = prepared
    assert json.loads((folder / "manifest.json").read_text()) == manifest
    kept = {split: len(of_split(split)) for split in ("train", "valid")}
    assert manifest["documents"] == {"in": 63, **kept, "dropped": {"duplicate": 1, "no sentence": 1}}
    assert sum(kept.values()) + 2 == 63
    for split in ("train", "valid"):
        items = read(folder, split)
        tokens = np.array([index for item in items for index in item[:-1]])
        assert manifest[split]["sentences"] == len(items) - kept[split]
        assert manifest[split]["tokens"] == len(tokens)
        assert manifest[split]["unknown_share"] == pytest.approx((tokens == tokenizer.dictionary.unk()).mean())
        share = np.unique(tokens, return_counts=True)[1] / len(tokens)
        assert manifest[split]["unigram_entropy_bits"] == pytest.approx(-(share * np.log2(share)).sum())


def test_same_text_same_bytes(prepared, tmp_path):
    folder, _, tokenizer = prepared
    prepare_corpus([*DOCUMENTS, DUPLICATE, EMPTY], tmp_path / "data", VOCAB_SIZE, 0.2, 3, tokenizer.settings)
    files = [str(file.relative_to(folder)) for file in folder.rglob("*") if file.is_file()]
    assert len(files) == 9
    assert filecmp.cmpfiles(folder, tmp_path / "data", files, shallow=False)[0] == files
    assert filecmp.cmp(folder / "dict.txt", folder / "tokenizer" / "dict.txt", shallow=False)


def test_fairseq_preprocess_writes_the_same(prepared, tmp_path):
    folder, _, tokenizer = prepared
    for split in ("train", "valid"):
        lines = (" ".join(tokenizer.dictionary[index] for index in item[:-1]) for item in read(folder, split))
        (tmp_path / f"{split}.pieces").write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    arguments = ["--only-source", "--workers", "1", "--dataset-impl", "mmap", "--srcdict", str(folder / "dict.txt")]
    arguments += ["--trainpref", str(tmp_path / "train.pieces"), "--validpref", str(tmp_path / "valid.pieces")]
    arguments += ["--destdir", str(tmp_path / "out")]
    handlers = list(logging.getLogger("fairseq_cli.preprocess").handlers)
    preprocess.main(options.get_preprocessing_parser().parse_args(arguments))
    logging.getLogger("fairseq_cli.preprocess").handlers[:] = handlers
    names = ["dict.txt", "train.bin", "train.idx", "valid.bin", "valid.idx"]
    assert filecmp.cmpfiles(folder, tmp_path / "out", names, shallow=False)[0] == names


@pytest.mark.parametrize("documents", [[], [EMPTY], DOCUMENTS[:1]])
def test_a_split_without_documents(tmp_path, documents):
    with pytest.raises(UserError, match="documents fell into the"):
        prepare_corpus(documents, tmp_path / "data", VOCAB_SIZE)
    assert list(tmp_path.iterdir()) == []


def test_failure_leaves_nothing(tmp_path):
    with pytest.raises(UserError, match="vocabulary of 99999: too large"):
        prepare_corpus(DOCUMENTS, tmp_path / "data", 99999, 0.2)
    assert list(tmp_path.iterdir()) == []


def test_an_older_folder_is_kept(tmp_path):
    (tmp_path / "train.bin").write_bytes(b"precious")
    with pytest.raises(UserError, match="exists already"):
        prepare_corpus(DOCUMENTS, tmp_path, VOCAB_SIZE, 0.2)
    assert [file.name for file in tmp_path.iterdir()] == ["train.bin"]
