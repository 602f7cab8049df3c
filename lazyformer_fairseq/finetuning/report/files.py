"""The files of a report: STEM.md, STEM.tex, STEM_scores.csv."""

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.finetuning.report.results import Results, mean_bounds
from lazyformer_fairseq.finetuning.report.tables import Table
from lazyformer_fairseq.report.tables import write_csv


def refuse_no_runs(results: Results) -> None:
    """Raises a UserError where no run has ended well."""
    if not results.runs:
        raise UserError(
            f"{results.folder / 'runs'}: no run has ended well yet, {len(results.failures)} failed; see the logs in "
            f"it, or run `{results.family.command}` again"
        )


def write_files(
    results: Results, output: Path, stem: str, tables: Iterable[Table], notes: list[str], pictures: Sequence[Path]
) -> str:
    """Writes the tables in Markdown and LaTeX, and every score as CSV. Returns the Markdown.

    Args:
        notes: sentences under the first table.
        pictures: in `output`, to show at the end.
    """
    tables = list(tables)
    markdown = _markdown(tables, notes, pictures)
    (output / f"{stem}.md").write_text(markdown, encoding="utf-8")
    latex = (f"% {table.title}\n{table.printed('latex_booktabs')}\n" for table in tables)
    (output / f"{stem}.tex").write_text("\n".join(latex), encoding="utf-8")
    write_csv(list(map(six_digits, _scores_as_csv(results))), output / f"{stem}_scores.csv")
    return markdown


def _markdown(tables: list[Table], said: list[str], pictures: Sequence[Path]) -> str:
    blocks = [f"## {table.title}\n\n{table.printed('github')}" for table in tables]
    blocks.insert(1, "\n".join(f"- {sentence}" for sentence in said))
    blocks += [f"![{picture.stem}]({picture.name})" for picture in pictures]
    return "\n\n".join(blocks) + "\n"


def _scores_as_csv(results: Results) -> Iterator[dict[str, Any]]:
    headers = (
        "model task split metric median lowest highest lower_bound upper_bound baseline rate seeds seeds_asked runs "
        "runs_asked runs_failed"
    ).split()
    for one in results.measurements():
        found, bounds = one.found, mean_bounds(one.values) or (None, None)
        middle = [np.median(one.values), one.values.min(), one.values.max(), *bounds, one.baseline, found.rate]
        counts = [len(one.values), len(results.grid.seeds), len(found.runs), len(found.asked), len(found.failed)]
        yield dict(zip(headers, [one.model, one.task, one.split, one.metric, *middle, *counts], strict=True))


def six_digits(row: dict[str, Any]) -> dict[str, Any]:
    """The row of a CSV file, its fractions rounded."""
    return {name: f"{cell:.6g}" if isinstance(cell, float) else cell for name, cell in row.items()}
