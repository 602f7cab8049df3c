"""Documents -> the DATA folder: tokenizer, dictionary, binarised train and validation split, manifest.

    DATA/dict.txt  DATA/train.bin  DATA/train.idx  DATA/valid.bin  DATA/valid.idx  DATA/tokenizer/  DATA/manifest.json

fairseq's memory-mapped format, as fairseq-preprocess writes it: one sentence an item, ending ``</s>``; an item of
``</s>`` alone after each document. This version keeps the text in memory (some 3 times its size).
"""

import hashlib
import json
import re
import shutil
import sys
from collections.abc import Iterable
from importlib.metadata import version
from pathlib import Path
from typing import Any, Optional, Union

import numpy as np
import torch
from fairseq.data.indexed_dataset import MMapIndexedDatasetBuilder, best_fitting_int_dtype
from tqdm import tqdm

from lazyformer_fairseq.corpus.documents import Document
from lazyformer_fairseq.corpus.sentences import SentenceSplitter
from lazyformer_fairseq.data.text_normalisation import TextNormaliser, TextSettings
from lazyformer_fairseq.data.tokenizer import DICTIONARY_FILE, Tokenizer
from lazyformer_fairseq.data.whole_folder import refuse_filled_folder, written_whole
from lazyformer_fairseq.errors import UserError

LITERAL_MASK = re.compile("<(mask)>", re.IGNORECASE)  # of a text about masks; only the task may mask
PACKAGES = ("fairseq-fixed", "sacremoses", "sentencepiece", "spacy")
Sentences = list[str]


def prepare_corpus(
    documents: Iterable[Document],
    folder: Union[str, Path],
    vocab_size: int,
    valid_share: float = 0.05,
    seed: int = 1,
    settings: TextSettings = TextSettings(),  # noqa: B008 (frozen)
    spacy_model: Optional[str] = None,
) -> dict[str, Any]:
    """Trains a tokenizer on the training documents and writes the DATA folder, whole or not at all.

    Args:
        vocab_size: size of the dictionary, all symbols included.
        valid_share: share of the documents held out; which ones depends on their text and ``seed`` alone.
        spacy_model: see :class:`SentenceSplitter`.

    Returns:
        the manifest: counts of documents (in = train + valid + dropped), sentences, tokens; unknown share; versions.

    Raises:
        UserError: no document, none in one of the splits, a folder that exists, a vocabulary too large for the text.
    """
    refuse_filled_folder(folder)
    splits: dict[str, list[Sentences]] = {"train": [], "valid": []}
    dropped = {"duplicate": 0, "no sentence": 0}
    seen = set()
    split_sentences, normalise = SentenceSplitter(spacy_model), TextNormaliser(settings)
    for document in tqdm(documents, desc="sentences and words", unit=" documents", disable=None):
        fingerprint = text_hash(document)
        if fingerprint in seen:
            dropped["duplicate"] += 1
            continue
        seen.add(fingerprint)
        cased = (sentence for paragraph in document.paragraphs for sentence in split_sentences(paragraph))
        sentences = list(filter(None, (normalise(LITERAL_MASK.sub(r"< \1 >", sentence)) for sentence in cased)))
        if not sentences:
            dropped["no sentence"] += 1
            continue
        splits["valid" if is_held_out(document, valid_share, seed) else "train"].append(sentences)
    _refuse_empty_split(splits, valid_share)
    with written_whole(Path(folder)) as unfinished:
        training_text = (sentence for sentences in splits["train"] for sentence in sentences)
        tokenizer = Tokenizer.train(
            training_text, unfinished / "tokenizer", vocab_size, settings, already_normalised=True
        )
        shutil.copyfile(unfinished / "tokenizer" / DICTIONARY_FILE, unfinished / DICTIONARY_FILE)
        counts = {name: binarise(splits[name], tokenizer, unfinished / name) for name in splits}
        kept = {name: len(split) for name, split in splits.items()}
        manifest = {
            "documents": {"in": sum(kept.values()) + sum(dropped.values()), **kept, "dropped": dropped},
            **counts,
            "vocab_size": vocab_size,
            "valid_share": valid_share,
            "seed": seed,
            "spacy_model": spacy_model,
            "versions": {"python": sys.version.split()[0], **{package: version(package) for package in PACKAGES}},
        }
        (unfinished / "manifest.json").write_text(json.dumps(manifest, indent=2) + "\n", encoding="utf-8")
    return manifest


def binarise(documents: list[Sentences], tokenizer: Tokenizer, prefix: Path) -> dict[str, Any]:
    """Writes ``prefix.bin`` and ``prefix.idx`` from documents of normalised sentences.

    Returns:
        counts: sentences; tokens without ``</s>``; the share of ``<unk>`` among them, and the entropy of their
        unigram distribution in bits (what a model pays a token that knows how often each occurs, and nothing else).
    """
    eos = tokenizer.dictionary.eos()
    builder = MMapIndexedDatasetBuilder(f"{prefix}.bin", dtype=best_fitting_int_dtype(len(tokenizer.dictionary)))
    occurrences = np.zeros(len(tokenizer.dictionary), dtype=np.int64)
    for sentences in tqdm(documents, desc=f"ids of {prefix.name}", unit=" documents", disable=None):
        for sentence in sentences:
            ids = np.array([*tokenizer.encode_normalised(sentence), eos])
            occurrences += np.bincount(ids, minlength=len(occurrences))
            builder.add_item(torch.from_numpy(ids))
        builder.add_item(torch.tensor([eos]))
    builder.finalize(f"{prefix}.idx")
    occurrences[eos] = 0
    share = occurrences[occurrences > 0] / occurrences.sum()
    return {
        "sentences": sum(map(len, documents)),
        "tokens": int(occurrences.sum()),
        "unknown_share": float(occurrences[tokenizer.dictionary.unk()] / occurrences.sum()),
        "unigram_entropy_bits": float(-(share * np.log2(share)).sum()),
    }


def is_held_out(document: Document, valid_share: float, seed: int) -> bool:
    """Whether a document belongs to the validation split: by its text and the seed, never by its place."""
    digest = hashlib.blake2b(text_hash(document), digest_size=8, key=str(seed).encode()).digest()
    return int.from_bytes(digest, "big") < valid_share * 2**64


def text_hash(document: Document) -> bytes:
    """16 bytes that two documents share when they differ in case and spacing alone."""
    text = " ".join(" ".join(document.paragraphs).lower().split())
    return hashlib.blake2b(text.encode(), digest_size=16).digest()


def _refuse_empty_split(splits: dict[str, list[Sentences]], valid_share: float) -> None:
    for name, split in splits.items():
        if not split:
            found = sum(map(len, splits.values()))
            raise UserError(
                f"none of the {found} documents fell into the {name} split (valid_share = {valid_share}); "
                "give more documents, or another share or seed"
            )
