"""Official files -> a folder of windows, which all runs share (``lazyformer squad prepare``)."""

from dataclasses import dataclass
from pathlib import Path
from typing import Optional

from tabulate import tabulate

from lazyformer_fairseq.data.squad.official import SPLITS
from lazyformer_fairseq.data.squad.prepared_data import PreparedSquad, prepare_squad
from lazyformer_fairseq.data.squad.windows import USUAL, WindowSettings
from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.finetuning.squad.protocol import OFFICIAL_QUESTIONS
from lazyformer_fairseq.finetuning.squad.split import split_by_articles


@dataclass(frozen=True)
class Preparation:
    """The request to prepare.

    Attributes:
        data: folder of the official files; with `dev_articles` the file to split, or a folder with the one to train on.
        tokenizer: its folder.
        output: OUT; windows go to OUT/data, files that were split to OUT/split.
        dev_articles: hold out every so many-th article; None where there is a file to validate on.
        max_length, stride, max_question_length: of the windows; None for the usual ones.
        skip_mistakes: leave out questions that are wrong in the files.
    """

    data: Path
    tokenizer: Path
    output: Path
    dev_articles: Optional[int] = None
    max_length: Optional[int] = None
    stride: Optional[int] = None
    max_question_length: Optional[int] = None
    skip_mistakes: bool = False

    @property
    def settings(self) -> WindowSettings:
        return WindowSettings(
            self.max_length or USUAL.longest,
            self.stride or USUAL.stride,
            self.max_question_length or USUAL.longest_question,
        )


def prepare(wanted: Preparation) -> PreparedSquad:
    """Prepares the files, or reuses what was prepared from the same ones in the same way.

    Raises:
        UserError: a file is missing or wrong, or the folder holds what was prepared in another way.
    """
    folder = official_folder(wanted)
    files = {split: folder / name for split, name in SPLITS.items()}
    return prepare_squad(files, wanted.tokenizer, wanted.output / "data", wanted.settings, wanted.skip_mistakes)


def official_folder(wanted: Preparation) -> Path:
    """The folder with both official files, which are made of one where articles are held out."""
    if wanted.dev_articles is None:
        if wanted.data.is_file():
            raise UserError(
                f"{wanted.data}: is a file; give the folder of {' and '.join(SPLITS.values())}, or hold out articles "
                "of this file, as in --dev-articles 5"
            )
        return wanted.data
    source = wanted.data / SPLITS["train"] if wanted.data.is_dir() else wanted.data
    return split_by_articles(source, wanted.dev_articles, wanted.output / "split")


def remarks(prepared: PreparedSquad) -> list[str]:
    """Remarks for the user: questions left out, an unofficial number of questions."""
    lines = []
    for split, counts in prepared.manifest["splits"].items():
        lines += [f"{counts['file']}: left out: {mistake}" for mistake in counts["left_out"]]
        if counts["rows"] != (official := OFFICIAL_QUESTIONS[split]):
            lines.append(f"{counts['file']}: has {counts['rows']:,} questions; the official file has {official:,}")
    return lines


def overview(prepared: PreparedSquad) -> str:
    """A table of the prepared data, a row per file, with remarks for the user under it."""
    rows = [
        (
            counts["file"],
            *(f"{counts[name]:,}" for name in ("articles", "paragraphs", "rows")),
            f"{len(counts['left_out']):,}",
            *(f"{counts[name]:,}" for name in ("windows", "windows_with_answer", "cut_questions")),
            f"{counts['kept_tokens'] / counts['windows']:.1f}",
            f"{100 * counts['unknown_tokens'] / counts['kept_tokens']:.2f}%",
        )
        for counts in prepared.manifest["splits"].values()
    ]
    titles = ("file", "articles", "paragraphs", "questions", "left out", "windows", "with the answer")
    titles += ("questions cut", "tokens a window", "unknown tokens")
    table = tabulate(rows, titles, colalign=("left", *["right"] * 9), disable_numparse=True)
    return "\n".join([table, *(f"note: {remark}" for remark in remarks(prepared))])
