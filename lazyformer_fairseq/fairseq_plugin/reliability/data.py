"""A run's data: whether its folders are whole (:func:`check_data`), and its place in an epoch.

A run resumes with exactly the samples it has not seen. fairseq deals the shuffled batches of an epoch to its processes
in turn and saves how many rounds are done. That is the place in the order as long as the number of processes and the
batches stay the same. Here the state also records how the batches were made and how many of them all processes together
have consumed. Another number of processes is dealt the rest of the same order; for another batch size (in sentences or
tokens) the rest is cut anew, its samples in the same order. Masks depend on a sample and the epoch alone, so they stay
as they would have been.
"""

import itertools
import logging
import math
import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal, Optional

import numpy as np
import torch.distributed
from fairseq.data import Dictionary
from fairseq.data.indexed_dataset import infer_dataset_impl
from fairseq.data.iterators import EpochBatchIterator, GroupedIterator, ShardedIterator

from lazyformer_fairseq.data.text.dictionary_file import load_dictionary
from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.storage.indexed_format import check_items
from lazyformer_fairseq.storage.json_files import read_json

logger = logging.getLogger(__name__)


Verify = Literal["quick", "full", "none"]
SHARD = re.compile(r"shard(0|[1-9]\d*)")
NOT_CHECKED = ("raw", "cached", "huffman", "fasta")  # fairseq's older formats


def check_data(
    folders: Sequence[str],
    split: str,
    dictionary: Dictionary,
    verify: Verify = "quick",
    tokenizer: Optional[Path] = None,
    combine: bool = False,
) -> None:
    """Checks a split in every folder it will be read from: all shards now, not when their epoch comes.

    Args:
        folders: of binarised data, as a task reads them in turn; a split other than ``train`` is in the first one.
        split: ``train``, ``valid``, ...
        dictionary: what the ids mean.
        verify: "quick" takes seconds whatever the size; "full" reads every id, with a bar, shared between the processes
            of a run; "none" checks nothing.
        tokenizer: its folder, where there is one; must have the same dictionary.
        combine: whether SPLIT1, SPLIT2 ... are read with SPLIT, as fairseq does for ``train``.

    Raises:
        UserError: names the file and what to do.
    """
    if verify == "none":
        return
    check_shards(folders)
    check_dictionaries(folders, dictionary, tokenizer)
    folders = folders if split == "train" else folders[:1]
    part, parts = 0, 1
    if torch.distributed.is_initialized():
        part, parts = torch.distributed.get_rank(), torch.distributed.get_world_size()
    tokens: list[int] = []
    for folder in folders:
        for prefix in prefixes(Path(folder) / split, combine):
            with suppress(OSError):  # which the check names
                if infer_dataset_impl(str(prefix)) in NOT_CHECKED:
                    logger.warning("%s: is in an older format of fairseq's, which is not checked", prefix)
                    return
            tokens.append(check_items(prefix, len(dictionary), dictionary.eos(), verify, part, parts))
    check_totals(folders, split, sum(tokens))
    logger.info("%s: %d files of %s checked (--verify %s)", split, len(tokens), ", ".join(folders), verify)


def check_shards(folders: Sequence[str]) -> None:
    """Raises a UserError where a corpus is not whole: a number is missing, or there are fewer shards than written."""
    for parent in dict.fromkeys(Path(folder).parent for folder in folders if SHARD.fullmatch(Path(folder).name)):
        there = {int(path.name[5:]): path for path in parent.glob("shard*") if SHARD.fullmatch(path.name)}
        wanted = _shards_of_manifest(parent) or 1 + max(there)
        missing = next(number for number in itertools.count() if number not in there)
        if missing < wanted:
            raise UserError(
                f"{parent / f'shard{missing}'}: this shard is missing; {len(there)} of {wanted} are there. "
                "Copy the corpus again, or name the shards that are to be read: shard0:shard2"
            )
        if left_out := sorted(number for number, path in there.items() if path not in map(Path, folders)):
            logger.warning("%s: shards %s are not read", parent, ", ".join(map(str, left_out)))


def check_dictionaries(folders: Sequence[str], dictionary: Dictionary, tokenizer: Optional[Path] = None) -> None:
    """Raises a UserError where a folder or the tokenizer has another dict.txt than the first folder."""
    first, *others = (Path(folder) / "dict.txt" for folder in (*folders, *filter(None, [tokenizer])))
    own = _symbols(first)
    for path in others:
        if path.is_file() and path.read_bytes() != first.read_bytes() and _symbols(path) != own:
            raise UserError(
                f"{path}: another dictionary than {first}; ids mean nothing under it. Take data, dict.txt and "
                "tokenizer from the same corpus"
            )
    assert dictionary.symbols[: len(own) - 4] == own[:-4], "the task's dictionary is the first folder's"


def check_totals(folders: Sequence[str], split: str, tokens: int) -> None:
    """Raises a UserError where the shards of a corpus together do not hold the tokens that its manifest counted.

    Args:
        tokens: ids without the ``</s>`` at the end of each item.
    """
    parent = Path(folders[0]).parent
    manifest = _manifest(parent)
    parents = {Path(folder).parent for folder in folders}
    is_whole = split != "train" or len({Path(folder).name for folder in folders}) == _shards_of_manifest(parent)
    if manifest is None or parents != {parent} or not SHARD.fullmatch(Path(folders[0]).name) or not is_whole:
        return
    counts = manifest.get(split)
    if isinstance(counts, dict) and isinstance(wanted := counts.get("tokens"), int) and wanted != tokens:
        raise UserError(
            f"{parent}: its {split} files hold {tokens:,} tokens, {parent / 'manifest.json'} speaks of {wanted:,}: a "
            "file is of another corpus, or of another shard. Copy the corpus again"
        )


def prefixes(prefix: Path, combine: bool) -> list[Path]:
    """SPLIT and, where `combine` is on, SPLIT1, SPLIT2 and so on as far as they go."""
    found = [prefix]
    while combine and (next_one := prefix.with_name(f"{prefix.name}{len(found)}")).with_suffix(".idx").is_file():
        found.append(next_one)
    return found


def _symbols(path: Path) -> list[str]:
    """All of them, and last those that begin, pad and end a text or stand for what is unknown."""
    dictionary = load_dictionary(path)
    special = (dictionary.bos(), dictionary.pad(), dictionary.eos(), dictionary.unk())
    return [*dictionary.symbols, *map(dictionary.symbols.__getitem__, special)]


def _shards_of_manifest(corpus: Path) -> Optional[int]:
    shards = (_manifest(corpus) or {}).get("shards")
    return shards if isinstance(shards, int) and shards > 0 else None


def _manifest(corpus: Path) -> Optional[dict[str, Any]]:
    """The manifest of a corpus; None where it has none.

    Raises:
        UserError: its manifest is damaged.
    """
    path = corpus / "manifest.json"
    return read_json(path, "copy the corpus again") if path.is_file() else None


Batches = Sequence[Sequence[int]]
BatchSize = dict[str, Optional[int]]  # fairseq's max_tokens and max_sentences


class ExactEpochBatchIterator(EpochBatchIterator):
    """fairseq's iterator, whose state loads with other numbers of processes, and other batch sizes if the task helps.

    Attributes:
        batch_size: what the batches were made with; None where the task did not tell.
        pieces: of the epoch that was resumed, how batches were made and how many were consumed: one piece, and another
            for each time that the batch size changed within the epoch. Empty in an epoch from its start.
    """

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.batch_size: Optional[BatchSize] = None
        self.pieces: list[dict[str, Any]] = []
        self._rest: Optional[Batches] = None
        self._start = 0  # rounds that stand for what was consumed before the epoch was resumed

    def tell_batch_size(self, size: BatchSize, make: Callable[[BatchSize], Batches], cut: Callable) -> None:
        """For the task: `make(size)` makes batches of all samples, `cut(samples, size)` of some, in their order."""
        self.batch_size, self._make, self._cut = size, make, cut

    def state_dict(self) -> dict[str, Any]:
        state = super().state_dict()
        if state["iterations_in_epoch"]:
            rounds = state["iterations_in_epoch"] - self._start
            piece = self.pieces[-1] if self.pieces else self._new_piece()
            last = {**piece, "consumed": piece["consumed"] + rounds * self.num_shards}
            state.update(pieces=[*self.pieces[:-1], last], samples=self._samples())
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Also loads the state of another number of processes or batch size. With other data the epoch starts anew."""
        if not state.get("pieces") or self._supports_prefetch:
            return super().load_state_dict(state)
        if state["samples"] != self._samples():
            logger.warning(
                "the checkpoint is from the midst of an epoch of %d samples, and now there are %d (other data, or "
                "other --tokens-per-sample): the epoch starts anew, so some samples come twice",
                *(state["samples"], self._samples()),
            )
            return super().load_state_dict({**state, "iterations_in_epoch": 0})
        self.pieces = [dict(piece) for piece in state["pieces"]]
        if None not in (self.batch_size, before := self.pieces[-1]["batch_size"]) and self.batch_size != before:
            logger.info("batch size %s, before %s: the rest of the epoch is cut anew", self.batch_size, self.pieces[-1])
            self.pieces.append(self._new_piece())
        self._rest = self._what_is_left(state["epoch"], state["shuffle"])
        self._start = max(1, len(self) - math.ceil(len(self._rest) / self.num_shards))
        super().load_state_dict({**state, "iterations_in_epoch": self._start})

    def next_epoch_itr(self, *args, **kwargs):
        if self._next_epoch_itr is None:  # an epoch from its start
            self.pieces, self._rest, self._start = [], None, 0
        return super().next_epoch_itr(*args, **kwargs)

    def ordered_batches(self, epoch: int, fix_batches_to_gpus: bool, shuffle: bool) -> Batches:
        if self._rest is None:
            return super().ordered_batches(epoch, fix_batches_to_gpus, shuffle)
        mine = ShardedIterator(self._rest, self.num_shards, self.shard_id, fill_value=[])
        return [[]] * self._start + list(mine)  # fairseq skips the first ones

    def _new_piece(self) -> dict[str, Any]:
        return {"batch_size": self.batch_size, "shards": self.num_shards, "consumed": 0}

    def _samples(self) -> int:
        return sum(map(len, self.frozen_batches))

    def _what_is_left(self, epoch: int, shuffle: bool) -> Batches:
        """Batches of the rest of the epoch, in the order in which all processes together consume them."""
        first, *others = self.pieces
        known = first["batch_size"] in (self.batch_size, None)
        batches = self.frozen_batches if known else tuple(self._make(first["batch_size"]))
        left = self._whole_order(batches, first["shards"], epoch, shuffle)[first["consumed"] :]
        for piece in others:
            samples = np.array(list(itertools.chain.from_iterable(left)))
            left = self._cut(samples, piece["batch_size"])[piece["consumed"] :]
        return left

    def _whole_order(self, batches: Batches, shards: int, epoch: int, shuffle: bool) -> list[Sequence[int]]:
        """As fairseq deals them to `shards` processes; how many matters where it shuffles groups of that many."""
        before = self._frozen_batches, self.num_shards, self.shard_id
        shards = shards if self.grouped_shuffling else 1
        try:
            dealt = []
            for shard in range(shards):
                self._frozen_batches, self.num_shards, self.shard_id = batches, shards, shard
                dealt.append(super().ordered_batches(epoch, False, shuffle))
        finally:
            self._frozen_batches, self.num_shards, self.shard_id = before
        return [batch for batches_of_round in zip(*dealt, strict=True) for batch in batches_of_round if len(batch)]


class ExactGroupedIterator(GroupedIterator):
    """fairseq's groups of ``--update-freq`` batches, all of them.

    fairseq counts them from the epoch's start, and leaves out the last one where an epoch is resumed at a batch that is
    no multiple of the update-freq, as it can be when that has changed.
    """

    def __init__(self, iterable, chunk_size: int, skip_remainder_batch: bool = False):
        position = getattr(iterable, "n", 0)
        left = len(iterable) - position
        super().__init__(iterable, chunk_size)
        groups = left // chunk_size if skip_remainder_batch else math.ceil(left / chunk_size)
        self.total = self.n + groups
        if skip_remainder_batch:
            iterable.take(position + groups * chunk_size)  # else the epoch would not end
