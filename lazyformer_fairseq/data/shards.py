"""Folders of binarized data, such as a corpus's shards, and checks of their integrity (:func:`check_data`)."""

import itertools
import logging
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Optional

import torch.distributed

from lazyformer_fairseq.data.text.dictionary_file import Dictionary, load_dictionary
from lazyformer_fairseq.data.text.tokenizer import load_tokenizer
from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.storage.indexed_format import How, check_items
from lazyformer_fairseq.storage.json_files import read_json

logger = logging.getLogger(__name__)

SHARD = re.compile(r"shard(0|[1-9]\d*)")


def check_data(
    folders: Sequence[str],
    split: str,
    dictionary: Dictionary,
    verify: str = "quick",
    tokenizer: Optional[Path] = None,
) -> None:
    """Check a split in all of its folders at startup, rather than when an epoch first reads them.

    Args:
        folders: folders of binarized data, in the order in which a task reads them; splits other than ``train`` are in
            the first one.
        split: ``train``, ``valid``, ...
        dictionary: the dictionary that defines the ids.
        verify: "quick" takes a few seconds for data of any size; "full" reads every id, shows a progress bar, and
            divides the work among the processes of a run; "none" skips the check.
        tokenizer: folder of the tokenizer, if any; it must have the same dictionary.

    Raises:
        UserError: a file is missing, damaged or from different data; the message names it and says what to do.
    """
    if verify == "none":
        return
    check_shards(folders)
    check_dictionaries(folders, dictionary, tokenizer)
    if split != "train":
        folders = folders[:1]

    part = 0
    parts = 1
    if torch.distributed.is_initialized():
        part = torch.distributed.get_rank()
        parts = torch.distributed.get_world_size()
    how: How = "quick"
    if verify == "full":
        how = "full"

    tokens: list[int] = []
    for folder in folders:
        prefix = Path(folder) / split
        if split == "train" and prefix.with_name("train1.idx").is_file():
            raise UserError(
                f"{prefix}1.idx: additional training files are not read; merge them into train, or place each one in a "
                "separate folder"
            )
        tokens.append(check_items(prefix, len(dictionary), dictionary.eos(), how, part, parts))
    check_totals(folders, split, sum(tokens))
    logger.info(
        "%s: checked %d files in %s (--verify %s)",
        split,
        len(tokens),
        ", ".join(folders),
        verify,
    )


def check_shards(folders: Sequence[str]) -> None:
    """Raise a UserError if the shard numbers or the manifest show that a shard of a corpus is missing."""
    paths = [Path(folder) for folder in folders]
    parents = [path.parent for path in paths if SHARD.fullmatch(path.name)]
    for parent in dict.fromkeys(parents):
        there = shards_in(parent)
        wanted = _shards_of_manifest(parent) or 1 + max(there)
        missing = next(number for number in itertools.count() if number not in there)
        if missing < wanted:
            raise UserError(
                f"{parent / f'shard{missing}'}: this shard is missing; found {len(there)} of {wanted}. "
                "Copy the corpus again, or list the shards to read, such as shard0:shard2"
            )
        left_out = sorted(number for number, path in there.items() if path not in paths)
        if left_out:
            logger.warning("%s: shards %s are not read", parent, ", ".join(map(str, left_out)))


def check_dictionaries(folders: Sequence[str], dictionary: Dictionary, tokenizer: Optional[Path] = None) -> None:
    """Raise a UserError if the dict.txt of a folder or of the tokenizer differs from the first folder's."""
    first, *others = (Path(folder) / "dict.txt" for folder in folders)
    if tokenizer is not None:
        others.append(tokenizer / "dict.txt")
    own = _symbols(first)
    for path in others:
        if path.is_file() and path.read_bytes() != first.read_bytes() and _symbols(path) != own:
            raise UserError(
                f"{path} differs from {first}, so ids have different meanings. Use the data, dict.txt "
                "and tokenizer of the same corpus"
            )
    assert dictionary.symbols[: len(own) - 4] == own[:-4], "the task must use the first folder's dictionary"


def check_totals(folders: Sequence[str], split: str, tokens: int) -> None:
    """Raise a UserError if a corpus's shards and its manifest disagree on the total number of tokens.

    Args:
        folders: folders of binarized data.
        split: name of the split.
        tokens: number of ids, excluding the ``</s>`` at the end of each item.
    """
    parent = Path(folders[0]).parent
    manifest = _manifest(parent)
    parents = {Path(folder).parent for folder in folders}
    names = {Path(folder).name for folder in folders}
    is_shard = SHARD.fullmatch(Path(folders[0]).name) is not None
    is_whole = split != "train" or len(names) == _shards_of_manifest(parent)
    if manifest is None or parents != {parent} or not is_shard or not is_whole:
        return

    counts = manifest.get(split)
    if not isinstance(counts, dict):
        return
    wanted = counts.get("tokens")
    if isinstance(wanted, int) and wanted != tokens:
        raise UserError(
            f"{parent}: the {split} files have {tokens:,} tokens, but {parent / 'manifest.json'} lists {wanted:,}; the "
            "files and the manifest are from different corpora or shards. Copy the corpus again"
        )


@dataclass(frozen=True)
class WordCounts:
    """Word counts of a corpus's training text, as recorded in its manifest.

    Attributes:
        per_token: words per id, counting the ids of ``</s>``.
        per_epoch: approximate number of words per shard.
    """

    per_token: float
    per_epoch: float


def read_word_counts(data: str) -> WordCounts:
    """Return the word counts of the training text from a corpus's manifest.

    Raises:
        UserError: the data is not a corpus, or its manifest has no word counts.
    """
    first = Path(data_folders(data)[0])
    for folder in (first, first.parent):
        counts = (_manifest(folder) or {}).get("train")
        if isinstance(counts, dict) and "words" in counts:
            documents = read_json(folder / "manifest.json")["documents"]["train"]
            return WordCounts(
                per_token=counts["words"] / (counts["tokens"] + counts["sentences"] + documents),
                per_epoch=counts["words"] / (_shards_of_manifest(folder) or 1),
            )
    raise UserError(f"{data}: no manifest.json with word counts found; use a folder written by `lazyformer corpus`")


def _symbols(path: Path) -> list[str]:
    """Return all symbols of a dictionary, followed by its bos, pad, eos and unk symbols."""
    dictionary = load_dictionary(path)
    special = (
        dictionary.bos(),
        dictionary.pad(),
        dictionary.eos(),
        dictionary.unk(),
    )
    return [*dictionary.symbols, *map(dictionary.symbols.__getitem__, special)]


def _shards_of_manifest(corpus: Path) -> Optional[int]:
    shards = (_manifest(corpus) or {}).get("shards")
    if isinstance(shards, int) and shards > 0:
        return shards
    return None


def _manifest(corpus: Path) -> Optional[dict[str, Any]]:
    """Read the manifest of a corpus; return None if there is none.

    Raises:
        UserError: the manifest is damaged.
    """
    path = corpus / "manifest.json"
    if path.is_file():
        return read_json(path, "copy the corpus again")
    return None


def data_folders(data: str) -> list[str]:
    """Split ``a:b:c`` into folders, replacing each corpus with its shards in order.

    Raises:
        UserError: a folder does not exist.
    """
    folders = []
    for folder in data.split(os.pathsep):
        if not folder or not Path(folder).is_dir():
            raise UserError(f"--data {data}: {folder or 'an empty name'} is not a folder")
        shards = shards_in(Path(folder))
        if shards:
            folders += [str(shards[number]) for number in sorted(shards)]
        else:
            folders.append(folder)
    return folders


def shards_in(corpus: Path) -> dict[int, Path]:
    """Return the shard folders of a corpus by shard number; empty for a folder that is not a corpus."""
    shards = {}
    for path in corpus.glob("shard*"):
        if match := SHARD.fullmatch(path.name):
            shards[int(match[1])] = path
    return shards


def tokenizer_of(folder: str) -> Path:
    """Return the path of a data folder's tokenizer, which is inside the folder or, for a shard, next to it."""
    beside = Path(folder) / "tokenizer"
    if beside.is_dir():
        return beside
    return Path(folder).parent / "tokenizer"


def keep_tokenizer(tokenizer: Path, save_dir: Path) -> None:
    """Copy the folder `tokenizer` to `save_dir`/tokenizer, which makes the checkpoint folder self-contained.

    Only the first process copies the tokenizer, and only if the target does not exist yet. If the data has no
    tokenizer because it was binarized by other means, a warning is logged.
    """
    if torch.distributed.is_initialized() and torch.distributed.get_rank() > 0:
        return
    if not tokenizer.is_dir():
        logger.warning(
            "%s: there is no tokenizer next to the data, so none is saved with the checkpoints",
            tokenizer,
        )
        return
    target = save_dir / "tokenizer"
    if not target.exists():
        load_tokenizer(tokenizer).save(target)
        logger.info("tokenizer saved with the checkpoints: %s", target)
