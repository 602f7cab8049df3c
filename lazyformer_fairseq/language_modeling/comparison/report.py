"""The table of a comparison, in Markdown and CSV: the PAR paper's Tables 2 and 6 in one, with the spread of each."""

import csv
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tabulate import tabulate

HEADERS = (
    "parameters",
    "GFLOPs",
    "updates",
    "ms per update (quartiles)",
    "latency, ms (quartiles)",
    "valid PPL (range)",
    "test PPL (range)",
)
CSV_COLUMNS = {
    "ms_per_update": "milliseconds_per_update",
    "latency_ms": "latency_milliseconds",
    "valid_perplexity": "valid_perplexity",
    "test_perplexity": "test_perplexity",
}


def markdown_table(models: Mapping[str, Mapping[str, Any]]) -> str:
    """One row per model: medians, each followed by its quartiles, or its lowest and highest over seeds."""
    rows = [
        [
            name,
            f"`{model['pattern']}`",
            *map(str, model["sublayers"].values()),
            f"{model['parameters']:,}",
            f"{model['flops'] / 1e9:.3g}",
            f"{model['updates']:,}",
            _with_spread(model["milliseconds_per_update"]),
            _with_spread(model["latency_milliseconds"]),
            _with_spread(model["valid_perplexity"]),
            _with_spread(model["test_perplexity"]),
        ]
        for name, model in models.items()
    ]
    headers = ("model", "pattern", *_letters(models), *HEADERS)
    align = ("left", "left", *["right"] * (len(headers) - 2))
    return tabulate(rows, headers, tablefmt="github", disable_numparse=True, colalign=align)


def write_csv(models: Mapping[str, Mapping[str, Any]], path: Path) -> None:
    """The same in full precision, each number in a column of its own."""
    spread = [f"{column}{part}" for column in CSV_COLUMNS for part in ("", "_low", "_high")]
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(["model", "pattern", *_letters(models), "parameters", "flops", "updates", *spread])
        for name, model in models.items():
            fixed = (model["parameters"], model["flops"], model["updates"])
            values = (model[key][part] for key in CSV_COLUMNS.values() for part in ("median", "low", "high"))
            writer.writerow([name, model["pattern"], *model["sublayers"].values(), *fixed, *values])


def _letters(models: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """The kinds that are counted, the same for each model."""
    return list(next(iter(models.values()))["sublayers"])


def _with_spread(of: Mapping[str, float]) -> str:
    return f"{of['median']:.1f} ({of['low']:.1f} to {of['high']:.1f})"
