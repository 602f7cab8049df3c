"""What a search from a checkpoint found: a page, tables for programs, pictures."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Optional

from scipy.stats import spearmanr

from lazyformer_fairseq.experiments.search.from_checkpoint.pictures import CONTROL, SUMMED, draw_changes, draw_losses
from lazyformer_fairseq.experiments.search.report.found_pattern import compact
from lazyformer_fairseq.report.numbers import with_spread
from lazyformer_fairseq.report.tables import markdown_table, write_csv
from lazyformer_fairseq.storage.atomic import write_text

FEWEST = 3  # of a rank correlation


def write_report(result: Mapping[str, Any], path: Path) -> None:
    """Writes ``report.md``, ``changes.csv``, ``patterns.csv`` and two pictures into a folder."""
    write_csv(result["changes"], path / "changes.csv")
    write_csv([each | {"by_place": " ".join(each["by_place"])} for each in result["measured"]], path / "patterns.csv")
    draw_losses(result, path / "losses.png")
    draw_changes(result, path / "changes.png")
    write_text(path / "report.md", page(result, path))


def page(result: Mapping[str, Any], path: Path) -> str:
    """In Markdown."""
    original, count = result["original"], result["evaluations"]
    parts = [
        "# Patterns from a trained model",
        f"`{compact(original['pattern'])}`: {original['bits']:.3f} bits a masked token, on {result['masked_tokens']:,} "
        f"of them in {result['blocks']} blocks of held-out text; {_milliseconds(original)} ms at batch 1 and "
        f"{result['latency_tokens']} tokens. Nothing is trained here: losses are those of the first moment.",
        budgets_table(result),
        "On other text: on as much that had no part in the choice.",
        f"The search measured {count['search']} patterns, the control {count['control']} random ones. Where several "
        f"sublayers change, the sum of scores {_correlated(_several(result, SUMMED), 'sum', 'above')} in the search's "
        f"patterns, and {_correlated(_several(result, CONTROL), 'sum', 'above')} in random ones. Predicted latency "
        f"{_correlated(_shown(result), 'predicted_ms', 'measured_ms')}.",
        "## Go on with one",
        continue_lines(result, path),
        "## What each change costs alone",
        changes_table(result),
    ]
    return "\n\n".join(parts) + "\n"


def budgets_table(result: Mapping[str, Any]) -> str:
    """A row for each budget: the pattern found, its latency and loss, and the best random one."""
    return markdown_table([_row(each) for each in result["budgets"]], left=("pattern",))


def _row(each: Mapping[str, Any]) -> dict[str, str]:
    found, control = each["found"], each["control"]
    return {
        "budget": f"{each['budget']:.0%}",
        "pattern": f"`{compact(found['pattern'])}`",
        "latency, predicted": f"{found['predicted_share']:.0%}",
        "measured": f"{found['measured_share']:.0%}",
        "ms (quartiles)": _milliseconds(found),
        "sum of scores": "" if found["sum"] is None else f"{found['sum']:+.3f}",
        "bits above the original": _above(found),
        "on other text": _above(found["on_other_text"]),
        "best random pattern": "" if control is None else _above(control),
        "its on other text": "" if control is None else _above(control["on_other_text"]),
    }


def _above(row: Optional[Mapping[str, Any]]) -> str:
    return "" if row is None else f"{row['above']:+.3f} ± {row['error']:.3f}"


def _milliseconds(row: Mapping[str, Any]) -> str:
    return with_spread(row["measured_ms"], 2)


def _shown(result: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Patterns whose latency was measured, each once."""
    rows = [result["original"], *(row[by] for row in result["budgets"] for by in ("found", "control") if row[by])]
    return list({row["pattern"]: row | {"measured_ms": row["measured_ms"]["median"]} for row in rows}.values())


def _several(result: Mapping[str, Any], by: str) -> list[dict[str, Any]]:
    """Patterns whose loss no score was made of."""
    return [row for row in result["measured"] if row["by"] == by]


def _correlated(rows: Iterable[Mapping[str, Any]], one: str, other: str) -> str:
    found = rank_correlation([(row[one], row[other]) for row in rows if row[one] is not None])
    if found is None:
        return "has too few values for a rank correlation with what was measured"
    return f"has a rank correlation of {found:.2f} with what was measured"


def rank_correlation(pairs: list[tuple[float, float]]) -> Optional[float]:
    """Spearman's; None for fewer than three pairs, or where all are alike."""
    if len(pairs) < FEWEST or any(len(set(side)) == 1 for side in zip(*pairs, strict=True)):
        return None
    return float(spearmanr(*zip(*pairs, strict=True)).statistic)


def continue_lines(result: Mapping[str, Any], path: Path) -> str:
    """Commands that go on with pre-training, one for each budget."""
    data = result["text"] if Path(result["text"]).is_dir() else "DATA"
    folders = [path / "models" / f"{row['budget']:g}" for row in result["budgets"]]
    lines = [f"lazyformer continue {folder} {data} --save-dir {path / 'trained' / folder.name}" for folder in folders]
    return "\n".join(["```bash", *lines, "```"])


def changes_table(result: Mapping[str, Any]) -> str:
    """Bits above the original by place and change; what needs other changes too is in ``changes.csv``."""
    alone = [each for each in result["changes"] if each["is_alone"]]
    names = list(dict.fromkeys(each["becomes"] for each in alone))
    scores = {(each["place"], each["becomes"]): f"{each['score']:+.3f}" for each in alone}
    rows = [
        {"place": str(place), "was": f"`{was}`", **{_named(name): scores.get((place, name), "") for name in names}}
        for place, was in enumerate(result["original"]["by_place"])
    ]
    return markdown_table(rows, left=("was",))


def _named(text: str) -> str:
    return "nothing" if text == "-" else f"`{text}`"
