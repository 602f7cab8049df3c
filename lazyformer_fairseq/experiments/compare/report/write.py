"""Writes a report's files."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from lazyformer_fairseq.experiments.compare.report import BASELINE, pictures
from lazyformer_fairseq.experiments.compare.report.comparison import Comparison
from lazyformer_fairseq.experiments.compare.report.fronts import fronts
from lazyformer_fairseq.experiments.compare.report.notes import notes
from lazyformer_fairseq.experiments.compare.report.read_results import comparison_of
from lazyformer_fairseq.experiments.compare.report.tables import (
    Table,
    cost_table,
    csv_curves,
    csv_models,
    csv_times,
    time_table,
)
from lazyformer_fairseq.experiments.compare.report.times import Target, times_to_target
from lazyformer_fairseq.report.tables import write_csv
from lazyformer_fairseq.storage.atomic import write_text

OF_OTHERS = {"fairseq": "fairseq's own model", "huggingface": "Hugging Face's own model"}


def write_report(results: Mapping[str, Any], folder: Path, target: Target = BASELINE) -> str:
    """The report of results.json's content; see :func:`write_files`."""
    return write_files(comparison_of(results), folder, target)


def write_files(comparison: Comparison, folder: Path, target: Target = BASELINE) -> str:
    """Writes tables and pictures, each whole; returns the tables for a reader, in Markdown.

    `table.md`, `table.tex` and `table.csv` have the models, the first two also the times to the target and what a
    reader must know; `times.csv` and `curves.csv` all that the pictures show: `curves.png`, `times.png`, `fronts.png`,
    and of language models `comparison.png`.

    Args:
        target: a value of the measure, or ``baseline`` for where the baseline ended.
    """
    times, found = times_to_target(comparison, target), fronts(comparison)
    tables = [cost_table(comparison, found), time_table(times)]
    said = notes(comparison, times, target)
    title = "; ".join(describe(comparison))
    pictures.draw_curves(comparison, times, title, folder / "curves.png")
    pictures.draw_times(times, title, folder / "times.png")
    pictures.draw_fronts(comparison, found, title, folder / "fronts.png")
    if pictures.shows_attention(comparison):
        pictures.draw_attention(comparison, title, folder / "comparison.png")
    write_csv(csv_models(comparison, found), folder / "table.csv")
    write_csv(list(csv_times(times)), folder / "times.csv")
    write_csv(list(csv_curves(comparison)), folder / "curves.csv")
    write_text(folder / "table.tex", "\n\n".join(_latex(tables)) + "\n")
    markdown = _markdown(comparison, tables, said)
    write_text(folder / "table.md", markdown)
    return markdown


def describe(comparison: Comparison) -> Iterator[str]:
    """What all models shared, for the title of a picture."""
    facts, seeds = comparison.facts, {len(model.runs) for model in comparison.models.values()}
    sizes = facts["settings"].get("sizes") or {}
    for name, label in (("embed_dim", "width"), ("tokens_per_sample", "n ="), ("tgt_len", "n =")):
        if name in sizes:
            yield f"{label} {sizes[name]:,}"
    yield f"{min(seeds)} seed{'s' * (min(seeds) > 1)}" if len(seeds) == 1 else f"{min(seeds)} to {max(seeds)} seeds"
    yield str((facts.get("machine") or {}).get("device", "machine not known"))


def _markdown(comparison: Comparison, tables: Sequence[Table], said: Sequence[str]) -> str:
    patterns = [
        f"- {family}: " + (f"`{facts['pattern']}`" if facts.get("pattern") else OF_OTHERS.get(facts["what"], "an arch"))
        for family, facts in ((family, models[-1].facts) for family, models in comparison.families.items())
    ]
    blocks = [f"## {table.title}\n\n{table.printed('github')}" for table in tables]
    blocks.append("\n".join(f"- {sentence}" for sentence in said))
    blocks.append("Patterns:\n\n" + "\n".join(patterns))
    return "\n\n".join(blocks) + "\n"


def _latex(tables: Sequence[Table]) -> Iterator[str]:
    yield "% needs \\usepackage{booktabs}"
    for table in tables:
        yield f"% {table.title}\n{table.printed('latex_booktabs')}"
