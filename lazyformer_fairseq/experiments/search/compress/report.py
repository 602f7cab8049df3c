"""The report of a search that starts from a trained encoder: a page and a plot."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Optional

from lazyformer_fairseq.experiments.search.space import compact
from lazyformer_fairseq.report.figures import COLORS, picture
from lazyformer_fairseq.report.numbers import with_spread
from lazyformer_fairseq.report.page import Block, write_page
from lazyformer_fairseq.report.tables import markdown_table

LINEAR = 0.05  # bits above which the loss axis is logarithmic


def write_report(result: Mapping[str, Any], path: Path) -> None:
    """Write ``report.md`` and ``losses.png`` to the folder `path`."""
    _draw_losses(result, path / "losses.png")
    write_page(_page(result, path), path, "report")


def _page(result: Mapping[str, Any], path: Path) -> list[Block]:
    original = result["original"]
    return [
        "# Patterns from a trained model",
        f"The trained model, `{compact(original['pattern'])}`, has a loss of {original['bits']:.3f} bits per masked "
        f"token, measured on {result['masked_tokens']:,} masked tokens in {result['blocks']} blocks of held-out text. "
        f"A forward pass takes {_milliseconds(original)} ms at batch size 1 and {result['latency_tokens']} tokens. "
        "The search trains nothing; all losses are measured before any update.",
        budgets_table(result),
        "Losses on other text are measured on an equal amount of text that was not used for the selection.",
        f"The search measured {len(result['measured'])} patterns. `lazyformer pretrain {path / 'models'}/BUDGET DATA` "
        "continues to train a budget's model.",
        "## Loss of each change alone, in bits above the original",
        _changes_table(result),
    ]


def budgets_table(result: Mapping[str, Any]) -> str:
    """Return a table of the patterns that were found, one per budget, with their latencies and losses."""
    return markdown_table([_row(each) for each in result["budgets"]], left=("pattern",))


def _row(each: Mapping[str, Any]) -> dict[str, str]:
    found = each["found"]
    sum_of_scores = ""
    if found["sum"] is not None:
        sum_of_scores = f"{found['sum']:+.3f}"
    return {
        "budget": f"{each['budget']:.0%}",
        "pattern": f"`{compact(found['pattern'])}`",
        "latency, predicted": f"{found['predicted_share']:.0%}",
        "measured": f"{found['measured_share']:.0%}",
        "ms (quartiles)": _milliseconds(found),
        "total score": sum_of_scores,
        "bits above the original": _above(found),
        "on other text": _above(found["on_other_text"]),
    }


def _above(row: Optional[Mapping[str, Any]]) -> str:
    if row is None:
        return ""
    return f"{row['above']:+.3f} ± {row['error']:.3f}"


def _milliseconds(row: Mapping[str, Any]) -> str:
    return with_spread(row["measured_ms"], 2)


def _changes_table(result: Mapping[str, Any]) -> str:
    """Return a table of single changes' scores in bits above the original, with one row per position.

    Changes that require further changes appear only in ``result.json``.
    """
    alone = [each for each in result["changes"] if each["is_alone"]]
    headers = {each["becomes"]: f"`{each['becomes']}`" for each in alone}
    if "-" in headers:
        headers["-"] = "nothing"
    rows = []
    for place, was in enumerate(result["original"]["by_place"]):
        row = {"place": str(place), "was": f"`{was}`"}
        row |= dict.fromkeys(headers.values(), "")
        rows.append(row)
    for each in alone:
        rows[each["place"]][headers[each["becomes"]]] = f"{each['score']:+.3f}"
    return markdown_table(rows, left=("was",))


def _draw_losses(result: Mapping[str, Any], path: Path) -> None:
    """Plot the losses of all measured patterns, in bits above the original, against latency; mark the selected ones."""
    with picture(path, panel=(7, 4.5)) as ((axis,),):
        for is_scored, colour, label in (
            (True, COLORS[5], "single changes"),
            (False, COLORS[0], "promising combinations"),
        ):
            rows = [row for row in result["measured"] if row["is_scored"] == is_scored]
            above = [row["above"] for row in rows]
            axis.scatter(_percent(rows), above, s=8, color=colour, label=label, linewidths=0)
        rows = [row["found"] for row in result["budgets"]]
        rows.sort(key=lambda row: row["predicted_ms"])
        above = [row["above"] for row in rows]
        error = [row["error"] for row in rows]
        axis.errorbar(_percent(rows), above, yerr=error, color=COLORS[1], marker="o", label="found")
        axis.scatter([100], [0], marker="*", s=130, color="black", label="original", zorder=3)
        axis.set_yscale("symlog", linthresh=LINEAR)
        axis.set(
            xlabel="predicted latency, % of the original's",
            ylabel="loss before any update, bits above the original",
        )
        axis.legend(fontsize=8)


def _percent(rows: Sequence[Mapping[str, Any]]) -> list[float]:
    return [100 * row["predicted_share"] for row in rows]
