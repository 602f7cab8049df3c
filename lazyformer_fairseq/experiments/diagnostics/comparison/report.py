"""The table of a comparison on a diagnostic, and the picture of its learning."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from lazyformer_fairseq.report.figures import write_picture
from lazyformer_fairseq.report.numbers import with_spread
from lazyformer_fairseq.report.tables import markdown_table, write_csv
from lazyformer_fairseq.storage.atomic import write_text

NOTE = (
    "Accuracy is on the test split after the last update: the median over seeds, and the lowest and highest. The rules "
    "need no model. A diagnostic, not a leaderboard: it says whether a pattern learns this at these sizes at all."
)


def write_report(results: Mapping[str, Any], out: Path) -> str:
    """Writes table.md, table.csv and learning.png from results.json's content; returns the table."""
    table = f"{markdown_table(rows_of(results), left=('start',))}\n\n{NOTE}"
    write_text(out / "table.md", table + "\n")
    write_csv(csv_rows(results), out / "table.csv")
    draw(results, out / "learning.png")
    return table


def rows_of(results: Mapping[str, Any]) -> list[dict[str, str]]:
    """A row a pattern and start, then one a rule."""
    rows = [
        {
            "model": entry["name"],
            "start": entry["start"],
            "parameters": f"{entry['parameters']:,}",
            "masked symbols found": over_seeds(entry["masked_accuracy"]),
            "accuracy": over_seeds(entry["test_accuracy"]),
            "ms an update (quartiles)": with_spread(entry["milliseconds"]),
            "seconds in all": f"{median(seconds_in_all(entry)):,.0f}",
        }
        for entry in results["entries"]
    ]
    nothing = dict.fromkeys(rows[0], "")
    rules = results["data"]["rules"].items()
    return rows + [nothing | {"model": f"rule: {name}", "accuracy": f"{value:.1%}"} for name, value in rules]


def csv_rows(results: Mapping[str, Any]) -> list[dict[str, Any]]:
    """A row a pattern, start and seed, then one a rule."""
    rows = [
        {
            "model": entry["name"],
            "pattern": entry["pattern"],
            "start": entry["start"],
            "seed": seed,
            "parameters": entry["parameters"],
            "test_accuracy": entry["test_accuracy"][number],
            "valid_accuracy": entry["valid_accuracy"][number],
            "ms_per_update": entry["milliseconds"]["median"],
            "seconds_in_all": seconds_in_all(entry)[number],
        }
        for entry in results["entries"]
        for number, seed in enumerate(results["settings"]["seeds"])
    ]
    rules = results["data"]["rules"].items()
    return rows + [{"model": f"rule: {name}", "test_accuracy": value} for name, value in rules]


def over_seeds(shares: Sequence[float]) -> str:
    """The median and, of several, the lowest and highest; empty for none."""
    if len(shares) < 2:
        return "".join(f"{share:.1%}" for share in shares)
    return f"{median(shares):.1%} ({min(shares):.1%} to {max(shares):.1%})"


def seconds_in_all(entry: Mapping[str, Any]) -> list[float]:
    """Of training, self-pretraining included, by seed."""
    before = entry["self_pretraining_seconds"] or [0.0] * len(entry["seconds"])
    return [one + other for one, other in zip(entry["seconds"], before, strict=True)]


def draw(results: Mapping[str, Any], path: Path) -> None:
    """Validation accuracy against updates, the median over seeds, with the best rule and the constant answer."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), layout="constrained")
    axis = figure.subplots()
    for entry in results["entries"]:
        curves = entry["curves"]
        accuracies = [median(values) for values in zip(*(curve["accuracy"] for curve in curves), strict=True)]
        style = "o-" if entry["start"] == "from scratch" else "s--"
        axis.plot(curves[0]["updates"], accuracies, style, markersize=4, label=f"{entry['name']}, {entry['start']}")
    rules = list(results["data"]["rules"].values())
    axis.axhline(max(rules), color="grey", linestyle=":", label="best simple rule")
    axis.axhline(rules[0], color="grey", linestyle="-.", label="constant answer")
    axis.set(xlabel="updates on the task", ylabel=f"validation accuracy, {results['data']['task']}")
    axis.grid(alpha=0.3)
    axis.legend()
    write_picture(figure, path)
