"""SQuAD's official files prepared into a folder of windows, which all runs share.

FOLDER/SPLIT.npz        windows: ids, where the context stands in them, the characters of its tokens
FOLDER/SPLIT.json       a copy of the official file: contexts, questions, answers
FOLDER/manifest.json    where it comes from, and what was counted
FOLDER/tokenizer/       a copy of the tokenizer
"""

import shutil
from collections.abc import Mapping
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any, NamedTuple, Optional

import numpy as np
from tabulate import tabulate

from lazyformer_fairseq.data.datasets.question_windows import USUAL, Windows, WindowSettings, make_windows
from lazyformer_fairseq.data.prepared_folder import MANIFEST, PreparedFolder, SplitFacts
from lazyformer_fairseq.data.squad import SPLITS, SquadFile, read_squad
from lazyformer_fairseq.data.text.interface import TextTokenizer
from lazyformer_fairseq.data.text.tokenizer import load_tokenizer, tokenizer_hashes
from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.finetuning.settings import GridSettings
from lazyformer_fairseq.storage.indexed_format import type_of_ids
from lazyformer_fairseq.storage.json_files import sha256_of

SIZES = ("max_length", "stride", "max_question_length")  # a manifest's names of the settings of windows
PREPARED_IN = "data"  # of a grid's folder
OFFICIAL_QUESTIONS = {"train": 87_599, "valid": 10_570}


class PreparedSplit(NamedTuple):
    """The questions of a file, and the windows made of it."""

    file: SquadFile
    windows: Windows


class PreparedSquad(PreparedFolder):
    """The folder of SQuAD's windows."""

    FORMAT, FORMAT_VERSION = "lazyformer squad", 1
    SETTINGS = ("format_version", *SIZES, "skip_mistakes", "tokenizer", "files")
    CONTENT, COMMAND = "prepared SQuAD", "lazyformer finetune --task squad"

    @classmethod
    def is_whole(cls, manifest: dict[str, Any]) -> bool:
        are_sizes = all(type(manifest[size]) is int for size in SIZES)
        return are_sizes and cls.has_splits(manifest, SPLITS, ("rows", "windows", "kept_tokens", "cut_questions"))

    def count_cut(self, split: str, longest: int) -> int:
        return self.manifest["splits"][split]["cut_questions"]

    def facts(self, split: str, longest: int, most_rows: Optional[int] = None) -> SplitFacts:
        """Return facts on the questions: contexts are divided, not cut."""
        return replace(super().facts(split, self.settings.longest_question), unit="questions")

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
            file = read_squad(self.folder / f"{split}.json", self.manifest["skip_mistakes"])
            windows = Windows.load(self.folder / f"{split}.npz")
            counts = {"questions": wanted["rows"], "windows": wanted["windows"], "tokens": wanted["kept_tokens"]}
            windows.check(file, len(load_tokenizer(self.tokenizer_folder).symbols), counts, MANIFEST)
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
    if (there := PreparedSquad.reuse(folder, wanted)) is not None:
        return there
    read = {split: read_squad(path, skip_mistakes) for split, path in files.items()}  # before any is encoded
    own = load_tokenizer(tokenizer)

    def write_splits(unfinished: Path) -> dict[str, Any]:
        return {split: _write(file, split, own, settings, unfinished) for split, file in read.items()}

    return PreparedSquad.write(folder, wanted, own, write_splits)


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
    articles = len({paragraph.title for paragraph in file.paragraphs})
    return {
        **{"file": file.path.name, "articles": articles, "paragraphs": len(file.paragraphs)},
        **{"rows": len(file.questions), "left_out": file.left_out, "windows": len(windows)},
        "windows_with_answer": 0 if windows.targets is None else int((windows.targets[:, 0] > 0).sum()),
        "cut_questions": windows.cut_questions,
        "kept_tokens": int(windows.sizes.sum()),
        "longest": int(windows.sizes.max()),
        "unknown_tokens": int((windows.ids == tokenizer.special.unk).sum()),
    }


def window_settings(longest: Optional[int]) -> WindowSettings:
    """Lengths of windows, strides and questions: BERT's; of short windows the stride is a half, questions a quarter."""
    longest = longest or USUAL.longest
    return WindowSettings(longest, min(USUAL.stride, longest // 2), min(USUAL.longest_question, longest // 4))


def prepare(wanted: GridSettings) -> PreparedSquad:
    """Prepares the official files into OUT/data, or reuses what is there.

    Raises:
        UserError: a file is missing or wrong, or the folder holds what was prepared in another way.
    """
    files = {split: wanted.data / name for split, name in SPLITS.items()}
    output = wanted.output / PREPARED_IN
    return prepare_squad(files, wanted.tokenizer, output, window_settings(wanted.max_length), wanted.skip_mistakes)


def overview(prepared: PreparedSquad) -> str:
    """A table of the prepared data, a row per file, and under it what was left out and unofficial numbers."""
    rows, remarks = [], []
    for split, counts in prepared.manifest["splits"].items():
        file, left_out, windows, tokens = (counts[name] for name in ("file", "left_out", "windows", "kept_tokens"))
        row = {"file": file, "articles": counts["articles"], "paragraphs": counts["paragraphs"]}
        row |= {"questions": counts["rows"], "left out": len(left_out), "windows": windows}
        row |= {"with the answer": counts["windows_with_answer"], "questions cut": counts["cut_questions"]}
        row = {name: f"{value:,}" if isinstance(value, int) else value for name, value in row.items()}
        unknown = f"{100 * counts['unknown_tokens'] / tokens:.2f}%"
        rows.append({**row, "tokens a window": f"{tokens / windows:.1f}", "unknown tokens": unknown})
        remarks += [f"{file}: left out: {mistake}" for mistake in left_out]
        if counts["rows"] != (official := OFFICIAL_QUESTIONS[split]):
            remarks.append(f"{file}: has {row['questions']} questions; the official file has {official:,}")
    table = tabulate(rows, "keys", colalign=("left", *["right"] * 9), disable_numparse=True)
    return "\n".join([table, *(f"note: {remark}" for remark in remarks)])
