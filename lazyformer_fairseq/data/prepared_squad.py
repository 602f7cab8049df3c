"""SQuAD's official files, prepared as a folder of windows that all runs can use.

FOLDER/SPLIT.npz        windows: ids, the context's position in each window, and its tokens' character offsets
FOLDER/SPLIT.json       a copy of the official file: contexts, questions, answers
FOLDER/manifest.json    the data's source and statistics
FOLDER/tokenizer/       a copy of the tokenizer
"""

import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple, Optional

from lazyformer_fairseq.data.datasets.question_windows import USUAL, Windows, WindowSettings, make_windows
from lazyformer_fairseq.data.prepared_folder import MANIFEST, PreparedFolder, SplitFacts
from lazyformer_fairseq.data.squad import SPLITS, SquadFile, read_squad
from lazyformer_fairseq.data.text.interface import TextTokenizer
from lazyformer_fairseq.data.text.tokenizer import load_tokenizer, tokenizer_hashes
from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.report.tables import Table
from lazyformer_fairseq.storage.checked import Count
from lazyformer_fairseq.storage.indexed_format import type_of_ids
from lazyformer_fairseq.storage.json_files import sha256_of

OFFICIAL_QUESTIONS = {"train": 87_599, "valid": 10_570}


@dataclass(frozen=True)
class SplitCounts:
    """The relevant fields of a split's entry in a manifest."""

    file: str
    paragraphs: Count
    rows: Count
    left_out: list[str]
    windows: Count
    windows_with_answer: Count
    cut_questions: Count
    kept_tokens: Count
    unknown_tokens: Count
    windows_sha256: str


@dataclass(frozen=True)
class SquadManifest:
    """The relevant fields of a manifest."""

    format_version: int
    max_length: int
    stride: int
    max_question_length: int
    skip_mistakes: bool
    tokenizer: dict[str, str]
    files: dict[str, str]
    splits: dict[Literal["train", "valid"], SplitCounts]


class PreparedSplit(NamedTuple):
    """A file's questions and the windows built from them."""

    file: SquadFile
    windows: Windows


class PreparedSquad(PreparedFolder):
    """A prepared folder of SQuAD windows."""

    FORMAT = "lazyformer squad"
    FORMAT_VERSION = 1
    SETTINGS = (
        "format_version",
        "max_length",
        "stride",
        "max_question_length",
        "skip_mistakes",
        "tokenizer",
        "files",
    )
    CONTENT = "prepared SQuAD"
    COMMAND = "lazyformer finetune --task squad"
    CHECKED_FIELDS = SquadManifest

    def count_cut(self, split: str, longest: int) -> int:  # noqa: ARG002  part of the interface
        """Return the number of truncated questions in a split; contexts are split into windows, not truncated."""
        return self.manifest["splits"][split]["cut_questions"]

    def facts(self, split: str, longest: int, most_rows: Optional[int] = None) -> SplitFacts:
        """Return the properties of a split's questions."""
        facts = super().facts(split, longest, most_rows)
        return replace(facts, longest=self.settings.max_question_length, unit="questions")

    @property
    def settings(self) -> WindowSettings:
        """The sizes of the windows."""
        sizes = {size.name: self.manifest[size.name] for size in fields(WindowSettings)}
        return WindowSettings(**sizes)

    def read(self, split: str) -> PreparedSplit:
        """Read a split.

        Raises:
            UserError: the folder was prepared without this split, or the split's data is missing or damaged.
        """
        if split not in self.manifest["splits"]:
            raise UserError(
                f"{self.folder}: no split {split!r}, only {', '.join(self.manifest['splits'])}; prepare "
                "the file of this split in a different folder"
            )
        hashes = {
            "json": self.manifest["files"].get(split),
            "npz": self.manifest["splits"][split]["windows_sha256"],
        }
        for ending, written in hashes.items():
            path = self.folder / f"{split}.{ending}"
            if not path.is_file() or sha256_of(path) != written:
                raise UserError(
                    f"{path} is missing or does not match {MANIFEST}; remove {self.folder} and run "
                    f"`{self.COMMAND}` again"
                )
        file = read_squad(self.folder / f"{split}.json", self.manifest["skip_mistakes"])
        return PreparedSplit(file, Windows.load(self.folder / f"{split}.npz"))


def prepare_squad(
    files: Mapping[str, Path],
    tokenizer: Path,
    folder: Path,
    settings: WindowSettings = USUAL,
    skip_mistakes: bool = False,
) -> PreparedSquad:
    """Prepare a folder atomically, or reuse one that was prepared from the same files with the same settings.

    Args:
        files: path of the official file for "train", "valid" or both.
        tokenizer: folder of the tokenizer.
        folder: folder to write.
        settings: sizes of the windows.
        skip_mistakes: whether to skip questions that have mistakes.

    Raises:
        UserError: a file is missing or invalid, or the folder was prepared with different settings.
    """
    for path in files.values():
        if not path.is_file():
            raise UserError(
                f"{path}: no such file; place SQuAD's official files, {' and '.join(SPLITS.values())}, there"
            )
    wanted = {
        "format_version": PreparedSquad.FORMAT_VERSION,
        **asdict(settings),
        "skip_mistakes": skip_mistakes,
        "tokenizer": tokenizer_hashes(tokenizer),
        "files": {split: sha256_of(path) for split, path in files.items()},
    }
    there = PreparedSquad.reuse(folder, wanted)
    if there is not None:
        return there
    # All files are read before the slow encoding, so that mistakes are reported early.
    read = {split: read_squad(path, skip_mistakes) for split, path in files.items()}
    loaded = load_tokenizer(tokenizer)

    def write_splits(unfinished: Path) -> dict[str, Any]:
        return {split: _write(file, split, loaded, settings, unfinished) for split, file in read.items()}

    return PreparedSquad.write(folder, wanted, loaded, write_splits)


def _write(
    file: SquadFile,
    split: str,
    tokenizer: TextTokenizer,
    settings: WindowSettings,
    folder: Path,
) -> dict[str, Any]:
    """Write a split and return its entry in the manifest."""
    windows = make_windows(tokenizer, file, settings)
    dtype = type_of_ids(len(tokenizer.symbols))
    windows = replace(windows, ids=windows.ids.astype(dtype))
    windows.save(folder / f"{split}.npz")
    shutil.copyfile(file.path, folder / f"{split}.json")
    return {
        "file": file.path.name,
        "paragraphs": len(file.paragraphs),
        "rows": len(file.questions),
        "left_out": file.left_out,
        "windows": len(windows),
        "windows_with_answer": int((windows.targets > 0).any(axis=1).sum()),
        "cut_questions": windows.cut_questions,
        "kept_tokens": int(windows.sizes.sum()),
        "longest": int(windows.sizes.max()),
        "unknown_tokens": int((windows.ids == tokenizer.special.unk).sum()),
        "windows_sha256": sha256_of(folder / f"{split}.npz"),
    }


def window_settings(longest: Optional[int]) -> WindowSettings:
    """Return BERT's window sizes for inputs of `longest` tokens.

    The stride is limited to half of that length, and the length of questions to a quarter of it.
    """
    longest = longest or USUAL.max_length
    return WindowSettings(
        max_length=longest,
        stride=min(USUAL.stride, longest // 2),
        max_question_length=min(USUAL.max_question_length, longest // 4),
    )


def overview(prepared: PreparedSquad) -> str:
    """Format a table of the prepared data, one row per file, with notes on skipped questions and unofficial files."""
    rows = []
    notes = []
    for split, counts in prepared.manifest["splits"].items():
        file = counts["file"]
        questions = counts["rows"]
        rows.append(
            {
                "file": file,
                "paragraphs": f"{counts['paragraphs']:,}",
                "questions": f"{questions:,}",
                "skipped": f"{len(counts['left_out']):,}",
                "windows": f"{counts['windows']:,}",
                "with the answer": f"{counts['windows_with_answer']:,}",
                "questions cut": f"{counts['cut_questions']:,}",
                "tokens per window": f"{counts['kept_tokens'] / counts['windows']:.1f}",
                "unknown tokens": f"{100 * counts['unknown_tokens'] / counts['kept_tokens']:.2f}%",
            }
        )
        notes += [f"note: {file}: skipped: {mistake}" for mistake in counts["left_out"]]
        official = OFFICIAL_QUESTIONS[split]
        if questions != official:
            notes.append(f"note: {file}: this file has {questions:,} questions; the official file has {official:,}")
    return "\n".join([Table("", rows).printed("simple"), *notes])
