"""Binarized text as training data for masked LMs, in custom training loops (:func:`open_masked_text`) or fairseq-train.

text = open_masked_text("data", tokens_per_sample=128)  # the output of `lazyformer corpus my_texts data`
for batch in EpochBatches(text.split("train"), batch_size=32, seed=text.seed):
    inputs = batch["net_input"]["src_tokens"]  # (B, T)
    targets = batch["target"]  # (B, T); text.special.pad at positions that are not predicted
"""

import itertools
import math
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Optional

import numpy as np
import torch
from torch.utils.data import Dataset

from lazyformer_fairseq.data import frequencies
from lazyformer_fairseq.data.count_model import NEIGHBOURS, CountModel, read_tokens
from lazyformer_fairseq.data.datasets import masked_blocks
from lazyformer_fairseq.data.datasets.permuted_blocks import PermutedBlocksDataset
from lazyformer_fairseq.data.datasets.sentence_pairs import SentencePairsDataset
from lazyformer_fairseq.data.shards import check_data, data_folders, tokenizer_of
from lazyformer_fairseq.data.text.dictionary_file import Dictionary, load_dictionary, mask_index_of
from lazyformer_fairseq.data.text.interface import SpecialIds, TextTokenizer
from lazyformer_fairseq.data.text.tokenizer import load_tokenizer
from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.options import LENGTH, PROPORTION_OR_ALL, option, parse_masking_rates
from lazyformer_fairseq.storage.indexed_format import MappedItems


@dataclass
class MaskedTextOptions:
    """Options for turning text into masked blocks."""

    tokens_per_sample: int = option(
        512, "maximum number of tokens per block of sentences, including <s> and </s>", bounds=LENGTH
    )
    mask_prob: Any = option(
        0.15,
        "fraction of the tokens to predict; 0.3:0.15 lowers it linearly from 0.3 to 0.15 over the run",
        bounds=PROPORTION_OR_ALL,
    )
    length_schedule: str = option(
        "",
        "train on shorter sequences first; 128:0.8 uses 128-token sequences for the first 80% of updates (arXiv "
        "2012.15832)",
    )
    whole_word_masks: bool = option(
        False,
        "predict either all tokens of a word or none",
        "--whole-word-masks",
        "--mask-whole-words",
    )
    leave_unmasked_prob: float = option(
        0.1, "fraction of the predicted tokens that are left unchanged in the input", bounds=PROPORTION_OR_ALL
    )
    random_token_prob: float = option(
        0.1, "fraction of the predicted tokens that are replaced with a random token", bounds=PROPORTION_OR_ALL
    )
    next_sentence: bool = option(
        False,
        "also train on next-sentence prediction, as BERT does; combine with --token-types 2 to match BERT",
    )
    within_documents: bool = option(False, "restrict attention to tokens of the same document")
    document_positions: bool = option(False, "restart positions in each document")
    verify: str = option(
        "quick",
        "how to check the data of all epochs at startup: a sample of the ids (quick), every id (full) or not at all "
        "(none)",
        choices=("quick", "full", "none"),
    )


@dataclass
class PermutedTextOptions(MaskedTextOptions):
    """Options for turning text into masked and permuted blocks."""

    permuted_only: bool = option(False, "as in XLNet, omit the mask tokens at positions that are not predicted yet")


MASKED = "full_sentences_masked_lm"
PERMUTED = "masked_permuted_lm"
# Option classes, by the task's name in fairseq-train.
OPTIONS = {
    MASKED: MaskedTextOptions,
    PERMUTED: PermutedTextOptions,
}


def parse_length_schedule(given: str, longest: int) -> list[tuple[int, float]]:
    """Parse a length schedule such as ``64:0.3,128:0.8`` into lengths and the fractions of updates at which they end.

    Args:
        given: value of the option; an empty string for no schedule.
        longest: length of a full block; only lengths shorter than this are kept.

    Raises:
        UserError: the value is malformed, or the fractions do not increase.
    """
    pairs = []
    if given:
        pairs = [re.fullmatch(r"(\d{1,9}):(0?\.\d+|1)", part.strip()) for part in given.split(",")]
    lengths = [(int(pair[1]), float(pair[2])) for pair in pairs if pair]
    ends = [0.0, *(end for _, end in lengths)]

    is_malformed = None in pairs
    is_increasing = all(one < other for one, other in itertools.pairwise(ends))
    is_too_short = any(length < 3 for length, _ in lengths)
    if is_malformed or not is_increasing or is_too_short:
        raise UserError(
            f"--length-schedule {given}: use LENGTH:FRACTION pairs such as 64:0.3,128:0.8, with increasing fractions "
            "of the updates; the rest of the run uses full blocks"
        )
    return [(length, end) for length, end in lengths if length < longest]


def open_masked_text(
    data: str,
    seed: int = 1,
    max_update: int = 0,
    task: str = MASKED,
    **options: Any,
) -> "MaskedText":
    """Open the output of ``lazyformer corpus`` as training data; fairseq-train's task `task` reads the same data.

    Args:
        data: folder of a corpus, or folders of binarized data as ``a:b:c``. Each epoch reads one shard of a corpus, in
            order.
        seed: random seed; a block's masks depend only on the seed, the epoch and the block's index.
        max_update: number of updates in the run; required if an option specifies a schedule.
        task: a key of :data:`OPTIONS`.
        options: fields of the task's :class:`MaskedTextOptions` or :class:`PermutedTextOptions`.

    Raises:
        UserError: a folder or its dictionary is missing, there is no such task or option, or options conflict.
    """
    if task not in OPTIONS:
        raise UserError(f"task {task}: must be {' or '.join(OPTIONS)}")
    options_class = OPTIONS[task]
    if unknown := sorted(set(options) - set(options_class.__dataclass_fields__)):
        raise UserError(f"{unknown[0]}: not an option of masked text; choose from {', '.join(vars(options_class()))}")
    first_folder = Path(data_folders(str(data))[0])
    dictionary = load_dictionary(first_folder / "dict.txt")
    return MaskedText(str(data), options_class(**options), dictionary, seed, max_update)


@dataclass(eq=False, repr=False)
class MaskedText:
    """Folders of binarized text together with their masking options.

    Args:
        data, seed, max_update: see :func:`open_masked_text`.
        options: an object with the fields of a class in :data:`OPTIONS`, such as fairseq's config.
        dictionary: the folders' dictionary; ``<mask>`` is added if it is missing.
        whole_inputs: whether to use each item as one block instead of packing items.

    Attributes:
        permuted_only: see :class:`PermutedTextOptions`; None for blocks that are not permuted.
        is_permuted: whether blocks are permuted.
        special: ids of the special symbols.
        masking: the masking procedure.

    Raises:
        UserError: options conflict, or require a run length or a tokenizer that is not available.
    """

    data: str
    options: MaskedTextOptions
    dictionary: Dictionary
    seed: int = 1
    max_update: int = 0
    whole_inputs: bool = False

    def __post_init__(self) -> None:
        options = self.options
        dictionary = self.dictionary
        self.permuted_only: Optional[bool] = getattr(options, "permuted_only", None)
        self.is_permuted = self.permuted_only is not None
        for name in ("next_sentence", "within_documents"):
            if self.is_permuted and getattr(options, name):
                raise UserError(f"--{name.replace('_', '-')}: not supported for permuted text; remove this option")
        if options.within_documents and options.next_sentence:
            raise UserError(
                "--within-documents: the two texts of --next-sentence must attend to each other; remove one of the two "
                "options"
            )
        if options.document_positions and not options.within_documents:
            raise UserError("--document-positions: requires --within-documents; use both or neither")

        self.special = SpecialIds(
            bos=dictionary.bos(),
            pad=dictionary.pad(),
            eos=dictionary.eos(),
            unk=dictionary.unk(),
            mask=mask_index_of(dictionary),
        )

        first, last = parse_masking_rates(options.mask_prob)
        self.lengths = parse_length_schedule(options.length_schedule, options.tokens_per_sample)
        for flag, changes in (
            ("mask_prob", first != last),
            ("length_schedule", self.lengths),
        ):
            said = f"--{flag.replace('_', '-')} {getattr(options, flag)}"
            if changes and self.is_permuted:
                raise UserError(f"{said}: permuted text does not support schedules; remove the option")
            if changes and not self.max_update:
                raise UserError(f"{said}: a schedule depends on the length of the run; set --max-update")
        if self.lengths and (self.whole_inputs or options.within_documents or options.next_sentence):
            raise UserError(
                "--length-schedule: only plain blocks can be split, not whole inputs, documents or pairs; remove the "
                "option"
            )

        self.masking = masked_blocks.Masking(
            vocab_size=len(dictionary),
            mask_index=self.special.mask,
            pad_index=self.special.pad,
            special=tuple(self.special),
            probability=first,
            keep=options.leave_unmasked_prob,
            random=options.random_token_prob,
            last=None if first == last else last,
            begins_word=self._begins_word() if options.whole_word_masks else None,
        )

    @cached_property
    def folders(self) -> list[str]:
        """The data folders; each training epoch reads the next one, cyclically."""
        return data_folders(self.data)

    @cached_property
    def tokenizer(self) -> Optional[TextTokenizer]:
        """The tokenizer stored with the data, or None if there is none."""
        if self._tokenizer_folder is None:
            return None
        return load_tokenizer(self._tokenizer_folder)

    @cached_property
    def _tokenizer_folder(self) -> Optional[Path]:
        folder = tokenizer_of(self.folders[0])
        if folder.is_dir():
            return folder
        return None

    @cached_property
    def log_frequencies(self) -> np.ndarray:
        """The log frequency of each id in the training text, (V,)."""
        texts = (MappedItems(Path(folder) / "train").ids for folder in self.folders)
        counts = frequencies.count_tokens(texts, len(self.dictionary))
        return frequencies.log_frequencies(counts, self.special)

    def cost_of_frequencies(self, batches: Iterable[dict[str, Any]]) -> float:
        """Return the unigram loss on batches, in bits per target."""
        targets = torch.cat([batch["target"].flatten() for batch in batches])
        predicted = targets[targets.ne(self.special.pad)].numpy()
        counts = np.bincount(predicted, minlength=len(self.dictionary))
        return frequencies.unigram_loss_bits(self.log_frequencies, counts)

    @cached_property
    def neighbour_counts(self) -> CountModel:
        """The count model of neighboring tokens, estimated from the first 20 million tokens of the training text."""
        return CountModel(NEIGHBOURS, len(self.dictionary), self._counted())

    def neighbour_embeddings(self, width: int) -> np.ndarray:
        """Return word embeddings (V, `width`) computed from the first 20 million tokens of the training text."""
        # Imported here because scikit-learn is slow to import.
        from lazyformer_fairseq.data.neighbour_embeddings import neighbour_embeddings

        return neighbour_embeddings(self._counted(), len(self.dictionary), width)

    def _counted(self) -> np.ndarray:
        return read_tokens(Path(folder) / "train" for folder in self.folders)

    def count_model_loss(self, batches: Iterable[dict[str, Any]]) -> float:
        """Return the count model's loss on masked batches, in bits per target."""
        nats = []
        for batch in batches:
            targets = batch["target"].numpy()
            at = targets != self.special.pad
            ids = batch["net_input"]["src_tokens"].numpy()
            nats.append(-self.neighbour_counts.log_probabilities(ids, at, targets[at]))
        return float(np.concatenate(nats).mean() / math.log(2))

    def split(self, name: str) -> "EpochShard":
        """Check a split's files as the ``verify`` option requires, and return the split's samples.

        Raises:
            UserError: a file that any epoch reads is missing, damaged or from different data.
        """
        self.check(name)
        shards = 0
        if name == "train":
            shards = len(self.folders)
        return EpochShard(partial(self.dataset, name), shards)

    def check(self, split: str) -> None:
        """Raise a UserError unless a split is complete in every folder."""
        check_data(self.folders, split, self.dictionary, str(self.options.verify), self._tokenizer_folder)

    def path(self, split: str, epoch: int = 1) -> str:
        """Return the path of an epoch's files, without the extension."""
        folder = self.folders[(epoch - 1) % len(self.folders)]
        return str(Path(folder) / split)

    def dataset(self, split: str, epoch: int = 1, types: bool = False) -> masked_blocks.MaskedBlocksDataset:
        """Return an epoch's samples.

        Args:
            split: name of the split.
            epoch: epoch, from 1.
            types: whether batches of pairs include token types.

        Raises:
            UserError: the files are missing or damaged, or contain no sentences.
        """
        path = self.path(split, epoch)
        is_training = split == "train"
        masking = self.masking
        items = MappedItems(path)
        if masking.last is not None and not is_training:
            masking = replace(masking, probability=masking.last, last=None)
        dataset = self.blocks(items, path, masking, is_training, types)
        if is_training:
            dataset.set_epoch(epoch)
            dataset.is_cut = bool(self.lengths)
        return dataset

    def blocks(
        self,
        items: Any,
        name: str,
        masking: Optional[masked_blocks.Masking] = None,
        shuffle: bool = False,
        types: bool = False,
    ) -> masked_blocks.MaskedBlocksDataset:
        """Return a dataset of masked blocks of sentences.

        Args:
            items: sentences, as any sequence of arrays or tensors that end in ``</s>``.
            name: name of the sentences, for messages.
            masking: masking procedure; None for :attr:`masking`.
            shuffle: whether to shuffle the blocks.
            types: whether batches of pairs include token types.
        """
        options = self.options
        sizes = getattr(items, "sizes", None)
        if sizes is None:
            sizes = np.array([len(item) for item in items])
        common = {
            "items": items,
            "item_sizes": sizes,
            "tokens_per_sample": options.tokens_per_sample,
            "bos": self.special.bos,
            "eos": self.special.eos,
            "masking": masking or self.masking,
            "seed": self.seed,
            "name": name,
            "shuffle": shuffle,
        }

        if self.whole_inputs:
            return masked_blocks.MaskedInputsDataset(**common)
        if options.next_sentence:
            separators = (self.tokenizer or TextTokenizer).separators
            return SentencePairsDataset(**common, separators=separators, has_token_types=types)
        if self.is_permuted:
            return PermutedBlocksDataset(**common, permuted_only=bool(self.permuted_only))
        return masked_blocks.FullSentencesDataset(
            **common,
            within_documents=options.within_documents,
            document_positions=options.document_positions,
        )

    def at_update(self, batch: dict[str, Any], update: int) -> dict[str, Any]:
        """Apply the masking-rate and length schedules to the training batch of an update (counted from 0)."""
        masking = self.masking
        done = min(1, update / max(1, self.max_update - 1))
        length = self.length_at(update)
        if masking.last is not None:
            share = masking.probability + done * (masking.last - masking.probability)
            batch = masked_blocks.apply_masking_rate(batch, share, masking.pad_index)
        if length is None:
            return batch
        return masked_blocks.cut(batch, length, masking.pad_index)

    def length_at(self, update: int) -> Optional[int]:
        """Return the sequence length of an update (from 0), or None if it reads full blocks."""
        for length, until in self.lengths:
            if update < until * self.max_update:
                return length
        return None

    def _begins_word(self) -> np.ndarray:
        """Return a mask of the ids that begin a word, bool (V,)."""
        folder = tokenizer_of(self.folders[0])
        if self.tokenizer is None:
            raise UserError(
                f"--whole-word-masks: requires a tokenizer next to the data ({folder}) to detect word boundaries; "
                "`lazyformer corpus` writes one"
            )
        if not self.tokenizer.begins_word.any():
            raise UserError(f"--whole-word-masks: no symbol in {folder} begins a word; remove the option")
        return self.tokenizer.begins_word


class EpochShard(Dataset):
    """A split's dataset, which switches to a different shard in each training epoch.

    Attributes not defined here are looked up in the current epoch's dataset, :attr:`now`. Use this class with
    :class:`~lazyformer_fairseq.data.batches.EpochBatches`, torch's DataLoader or transformers' Trainer, and pass
    :attr:`collater` as the collate function. `set_epoch` must be called before workers start; with a DataLoader you
    have to call it yourself. Splits other than the training split are the same in all epochs.

    Args:
        open_epoch: function that opens an epoch's dataset.
        shards: number of shards, which the epochs read cyclically; 0 for a split that is the same in all epochs.
    """

    def __init__(
        self,
        open_epoch: Callable[[int], masked_blocks.MaskedBlocksDataset],
        shards: int,
    ):
        self._open_epoch = open_epoch
        self._shards = shards
        self.now = open_epoch(1)
        self._epoch = 1

    def set_epoch(self, epoch: int) -> None:
        """Start an epoch: select its shard, order and masks."""
        if self._shards:
            if (epoch - self._epoch) % self._shards:
                self.now = self._open_epoch(epoch)
            self.now.set_epoch(epoch)
            self._epoch = epoch

    def __len__(self) -> int:
        return len(self.now)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return self.now[index]

    def __getattr__(self, name: str) -> Any:
        if name == "now":  # not set yet, such as while a copy is made
            raise AttributeError(name)
        return getattr(self.now, name)
