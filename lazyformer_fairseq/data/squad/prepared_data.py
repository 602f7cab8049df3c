"""A folder of windows made of official files, as ``lazyformer squad prepare`` writes it and task ``squad`` reads it.

FOLDER/SPLIT.npz        windows: ids, where the context stands in them, the characters of its tokens
FOLDER/SPLIT.json       a copy of the official file: contexts, questions, answers
FOLDER/manifest.json    where it comes from, and what was counted
FOLDER/tokenizer/       a copy of the tokenizer
"""

import shutil
from collections.abc import Mapping
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from lazyformer_fairseq.data.prepared_folder import MANIFEST, PreparedFolder
from lazyformer_fairseq.data.squad.official import SPLITS, SquadFile, read_squad
from lazyformer_fairseq.data.squad.windows import USUAL, Windows, WindowSettings, make_windows
from lazyformer_fairseq.data.text.interface import TextTokenizer
from lazyformer_fairseq.data.text.load_tokenizer import load_tokenizer, tokenizer_hashes
from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.extras import versions
from lazyformer_fairseq.storage.atomic import atomic_folder
from lazyformer_fairseq.storage.hashes import sha256_of
from lazyformer_fairseq.storage.indexed_format import type_of_ids
from lazyformer_fairseq.storage.json_files import write_json

PACKAGES = ("fairseq-fixed", "sacremoses", "sentencepiece", "torch")
SIZES = ("max_length", "stride", "max_question_length")  # a manifest's names of the settings of windows


class PreparedSplit(NamedTuple):
    """The questions of a file, and the windows made of it."""

    file: SquadFile
    windows: Windows


class PreparedSquad(PreparedFolder):
    """The folder of SQuAD's windows."""

    FORMAT, FORMAT_VERSION = "lazyformer squad", 1
    SETTINGS = ("format_version", *SIZES, "skip_mistakes", "tokenizer", "files")
    CONTENT, COMMAND = "prepared SQuAD", "lazyformer squad prepare"

    @staticmethod
    def is_whole(manifest: dict[str, Any]) -> bool:
        splits = manifest.get("splits")
        return (
            isinstance(splits, dict)
            and all(
                name in SPLITS  # it becomes a file's name
                and isinstance(counts, dict)
                and all(type(counts.get(count)) is int for count in ("rows", "windows", "kept_tokens"))
                for name, counts in splits.items()
            )
            and all(type(manifest[size]) is int for size in SIZES)
        )

    @property
    def settings(self) -> WindowSettings:
        return WindowSettings(*(self.manifest[size] for size in SIZES))

    def read(self, split: str) -> PreparedSplit:
        """Reads a split.

        Raises:
            UserError: there was no such file when the folder was made, or its data is gone or damaged.
        """
        if split not in self.manifest["splits"]:
            raise UserError(
                f"{self.folder}: holds no split {split!r}, but {', '.join(self.manifest['splits'])}; prepare its file "
                "into another folder"
            )
        wanted = self.manifest["splits"][split]
        try:
            file = read_squad(self.folder / f"{split}.json", self.manifest["skip_mistakes"], needs_answers=False)
            windows = _read_windows(self.folder / f"{split}.npz")
            _check(windows, file, wanted, len(load_tokenizer(self.tokenizer_folder).symbols))
        except Exception as error:  # numpy may raise anything for a damaged file
            raise UserError(
                f"{self.folder / split}.*: damaged ({error}); remove {self.folder} and run `{self.COMMAND}` again"
            ) from error
        return PreparedSplit(file, windows)


def prepare_squad(
    files: Mapping[str, Path],
    tokenizer: Path,
    folder: Path,
    settings: WindowSettings = USUAL,
    skip_mistakes: bool = False,
) -> PreparedSquad:
    """Writes a folder, whole or not at all, or reuses what was prepared from the same files in the same way.

    Args:
        files: an official file of each split, "train" and "valid" or one of them.
        tokenizer: its folder.
        folder: to write.
        skip_mistakes: leave out questions that are wrong in the files.

    Raises:
        UserError: a file is missing or wrong; the folder was prepared before in another way.
    """
    for path in files.values():
        if not path.is_file():
            raise UserError(f"{path}: no such file; put SQuAD's official files there, {' and '.join(SPLITS.values())}")
    sizes = dict(zip(SIZES, asdict(settings).values(), strict=True))
    hashes = {split: sha256_of(path) for split, path in files.items()}
    wanted = {"format_version": PreparedSquad.FORMAT_VERSION, **sizes, "skip_mistakes": skip_mistakes}
    wanted |= {"tokenizer": tokenizer_hashes(tokenizer), "files": hashes}
    if folder.exists():
        return _reuse(folder, wanted)
    read = {split: read_squad(path, skip_mistakes) for split, path in files.items()}  # before any is encoded
    own = load_tokenizer(tokenizer)
    with atomic_folder(folder) as unfinished:
        splits = {split: _write(file, split, own, settings, unfinished) for split, file in read.items()}
        own.save(unfinished / "tokenizer")
        manifest = {"format": PreparedSquad.FORMAT, **wanted, "splits": splits, "versions": versions(PACKAGES)}
        write_json(unfinished / MANIFEST, manifest, durable=False)
    return PreparedSquad(folder, manifest)


def _reuse(folder: Path, wanted: Mapping[str, Any]) -> PreparedSquad:
    prepared = PreparedSquad.load(folder)
    different = [name.replace("_", " ") for name in PreparedSquad.SETTINGS if prepared.manifest[name] != wanted[name]]
    if different:
        raise UserError(
            f"{folder}: was prepared before with other {' and '.join(different)} (see {MANIFEST} there); remove it, or "
            "give another folder"
        )
    return prepared


def _write(
    file: SquadFile, split: str, tokenizer: TextTokenizer, settings: WindowSettings, folder: Path
) -> dict[str, Any]:
    """Writes a split. Returns its entry in the manifest."""
    windows = make_windows(tokenizer, file, settings)
    arrays = {each.name: getattr(windows, each.name) for each in fields(Windows)}
    arrays["ids"] = windows.ids.astype(type_of_ids(len(tokenizer.symbols)))
    arrays["targets"] = np.zeros((0, 2), np.int64) if windows.targets is None else windows.targets
    np.savez(folder / f"{split}.npz", **arrays)
    shutil.copyfile(file.path, folder / f"{split}.json")
    return {
        "file": file.path.name,
        "articles": len({paragraph.title for paragraph in file.paragraphs}),
        "paragraphs": len(file.paragraphs),
        "rows": len(file.questions),
        "left_out": file.left_out,
        "windows": len(windows),
        "windows_with_answer": 0 if windows.targets is None else int((windows.targets[:, 0] > 0).sum()),
        "cut_questions": windows.cut_questions,
        "kept_tokens": int(windows.sizes.sum()),
        "longest": int(windows.sizes.max()),
        "unknown_tokens": int((windows.ids == tokenizer.special.unk).sum()),
    }


def _read_windows(path: Path) -> Windows:
    with np.load(path, allow_pickle=False) as arrays:
        values = {each.name: arrays[each.name] for each in fields(Windows)}
    for name, array in values.items():
        if array.dtype.kind not in "iu":
            raise ValueError(f"its {name} are no whole numbers")
        if name not in ("ids", "offsets"):  # small; sums of damaged ones shall not wrap round
            values[name] = array.astype(np.int64)
    values["cut_questions"] = int(values["cut_questions"])
    values["targets"] = values["targets"] if len(values["targets"]) else None
    return Windows(**values)


def _check(windows: Windows, file: SquadFile, wanted: Mapping[str, int], symbols: int) -> None:
    """Raises a ValueError where arrays do not belong together, or to the manifest; whatever is read lies within."""
    number, sizes = len(windows), windows.sizes
    found = {"rows": len(file.questions), "windows": number, "kept_tokens": int(sizes.sum())}
    if any(found[name] != wanted[name] for name in found):
        raise ValueError(
            f"not the {wanted['rows']:,} questions and {wanted['windows']:,} windows that {MANIFEST} names"
        )
    rows = (windows.question, windows.place, windows.first, windows.count, windows.own)
    if any(len(each) != number for each in rows) or not np.array_equal(windows.paragraph, file.paragraph_of):
        raise ValueError("its parts are not of one size")
    lengths = np.diff(windows.context_starts)
    is_within = (
        len(windows.ids) == found["kept_tokens"]
        and ((windows.ids >= 0) & (windows.ids < symbols)).all()
        and (sizes > 0).all()
        and ((windows.question >= 0) & (windows.question < found["rows"])).all()
        and ((windows.place >= 0) & (windows.first >= 0) & (windows.count >= 0)).all()
        and (windows.place + windows.count <= sizes).all()
        and len(lengths) == len(file.contexts)
        and windows.context_starts[0] == 0
        and (lengths >= 0).all()
        and windows.context_starts[-1] == len(windows.offsets)
        and (windows.first + windows.count <= lengths[windows.paragraph[windows.question]]).all()
        and (windows.targets is None or ((windows.targets >= 0) & (windows.targets < sizes[:, None])).all())
    )
    if not is_within:
        raise ValueError("its numbers lead outside")
