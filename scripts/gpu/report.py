"""Writes report.md and report.json for a line of the plan: a verdict, the line's targets, and its results.

    python scripts/gpu/report.py LINE FOLDER --seconds 512
    python scripts/gpu/report.py --best FOLDER

The second form prints the model with the highest accuracy on BLiMP in the line `learning`. Targets that are not ratios
are for an H100; on other devices, the report omits them.
"""

import argparse
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Optional
from xml.etree import ElementTree

import torch

from lazyformer_fairseq.evaluation.costs.machine import describe_machine, describe_versions
from lazyformer_fairseq.experiments.compare.results import read_folder
from lazyformer_fairseq.finetuning.registry import benchmark_of_grid
from lazyformer_fairseq.finetuning.report import model_row
from lazyformer_fairseq.finetuning.results import read_results
from lazyformer_fairseq.report.numbers import number
from lazyformer_fairseq.report.page import Block, Notes, Picture, write_page
from lazyformer_fairseq.report.tables import Table
from lazyformer_fairseq.storage.json_files import read_checked_as, read_json, write_json
from lazyformer_fairseq.zero_shot.results import Answers

Row = dict[str, Any]
ABSOLUTE = ("tokens/s", "seconds", "ms, all pairs", "ms, within documents")  # columns


@dataclass(frozen=True)
class Bar:
    """A target of a line.

    Attributes:
        what: the quantity.
        measured: its value; None if it was not measured.
        bar: the value to reach.
        at_most: whether lower is better.
        needs_h100: whether the target is not a ratio, and therefore only applies to an H100.
    """

    what: str
    measured: Optional[float]
    bar: float
    at_most: bool = False
    needs_h100: bool = False

    @property
    def reached(self) -> str:
        if self.measured is None:
            return "not measured"
        is_reached = self.measured <= self.bar if self.at_most else self.measured >= self.bar
        return "yes" if is_reached else "no"


Found = tuple[list[Bar], list[Row]]
Seconds = Mapping[str, int]  # by part; "line" is all of them


def read_if_there(path: Path) -> dict[str, Any]:
    """Return the content of a JSON file, or an empty dictionary if its part was cut short."""
    return read_json(path) if path.exists() else {}


def ratio(above: Optional[float], below: Optional[float]) -> Optional[float]:
    """Return the ratio, or None if one of the two values was not measured."""
    return above / below if above and below else None


def throughput(folder: Path, _: Seconds) -> Found:
    results = read_if_there(folder / "throughput.json")
    rows = []
    speeds: dict[tuple[int, str], float] = {}  # by length and model, on its fastest back end
    for cell in results.get("cells", ()):
        n = cell["time"]
        for row in cell["rows"]:
            at = (n, row["model"])
            speeds[at] = max(row["tokens_per_second"], speeds.get(at, 0.0))
        for row in cell["rows"]:
            family = "modernbert" if "modernbert" in row["model"] else "bert"
            found = {"n": n, "model": f"{row['model']}, {row['back_end']}", "tokens/s": row["tokens_per_second"]}
            found["x transformers'"] = ratio(row["tokens_per_second"], speeds.get((n, f"transformers' {family}")))
            rows.append({**found, "share of peak": row["share_of_peak"], "MB": row["memory_bytes"] / 1e6})
    n, longer, *_ = results.get("lengths", (1024, 8192))
    ours = speeds.get((n, "modernbert"))
    lazy = ratio(speeds.get((longer, "lazy_modernbert")), speeds.get((longer, "modernbert")))
    bars = [
        Bar(f"modernbert, n = {n}, tokens/s", ours, 365_000, needs_h100=True),
        Bar(f"modernbert x transformers', n = {n}", ratio(ours, speeds.get((n, "transformers' modernbert"))), 1.2),
        Bar(f"lazy_modernbert x modernbert, n = {longer}", lazy, 1.2),
    ]
    return bars, rows


def trained(folder: Path) -> Iterator[tuple[Row, Optional[Answers]]]:
    """Yield a row for each trained model, with its BLiMP answers if they exist."""
    if not (folder / "models" / "results.json").exists():
        return
    for model in read_folder(folder / "models").models.values():
        costs = model.runs[1].total_costs()
        path = folder / "blimp" / f"{model.name}-seed1.json"
        answers = read_checked_as(Answers, path) if path.exists() else None
        row = {
            "model": model.name,
            "pattern": model.facts["pattern"],
            "parameters": model.facts["parameters"],
            "updates": model.facts["updates"],
            "tokens": costs["tokens"],
            "tokens/s": costs["tokens"] / costs["seconds"],
            "seconds": costs["seconds"],
            "loss, bits": model.runs[1].final["loss"],
            "BLiMP, %": answers and 100 * answers.mean_accuracy(list(answers.margins)),
        }
        yield row, answers


def best_of(rows: Sequence[Row]) -> Optional[Row]:
    """Return the row with the highest accuracy on BLiMP, or None if there is none."""
    return max((row for row in rows if row["BLiMP, %"]), key=lambda row: row["BLiMP, %"], default=None)


def learning(folder: Path, seconds: Seconds) -> Found:
    rows = []
    first = None
    for row, answers in trained(folder):
        row |= {"above BERT": None, "standard error": None}
        if answers:
            first = first or answers
            above, error = answers.difference(first, list(answers.margins))
            row |= {"above BERT": 100 * above, "standard error": 100 * error}
        rows.append(row)
    best = best_of(rows) or {"BLiMP, %": None}
    bars = [
        Bar("minutes", seconds["line"] / 60, 8, at_most=True, needs_h100=True),
        Bar("BLiMP's share of the time", ratio(seconds.get("BLiMP"), seconds["line"]), 1 / 3, at_most=True),
        Bar("BLiMP of the best row, %", best["BLiMP, %"], 71.3),
        Bar("BLiMP of the best row, % (goal)", best["BLiMP, %"], 74),
    ]
    return bars, rows


def base_size(folder: Path, _: Seconds) -> Found:
    rows = [row for row, _ in trained(folder)]
    for row in rows:
        if (folder / "glue").exists():
            benchmark = benchmark_of_grid(folder / "glue")
            row |= model_row(read_results(folder / "glue", benchmark), benchmark, f"{row['model']}-seed1").scores
    (row,) = rows or [{"BLiMP, %": None, "seconds": None}]
    bars = [Bar("minutes of training", ratio(row["seconds"], 60), 5, at_most=True, needs_h100=True)]
    best = best_of(read_if_there(folder.parent / "learning" / "report.json").get("rows", ()))
    if best:
        bars.append(Bar("BLiMP, % (target: the best of `learning`)", row["BLiMP, %"], best["BLiMP, %"]))
    return bars, rows


def correctness(folder: Path, seconds: Seconds) -> Found:
    files: dict[str, Row] = {}
    failed = None
    if (folder / "tests.xml").exists():
        for case in ElementTree.parse(folder / "tests.xml").iter("testcase"):  # noqa: S314 - pytest wrote it
            name = case.get("classname", "").rpartition("tests.")[2]
            row = files.setdefault(name, {"tests": name, "passed": 0, "failed": 0, "skipped": 0})
            ends = {child.tag for child in case}
            end = "failed" if ends & {"failure", "error"} else "skipped" if "skipped" in ends else "passed"
            row[end] += 1
        failed = sum(row["failed"] for row in files.values())
    bars = [
        Bar("tests that failed", failed, 0, at_most=True),
        Bar("tests that passed", sum(row["passed"] for row in files.values()), 1),
        Bar("minutes", seconds["line"] / 60, 4, at_most=True, needs_h100=True),
    ]
    return bars, list(files.values())


def documents(folder: Path, _: Seconds) -> Found:
    rows = [{"attention": path.stem, **read_json(path)} for path in sorted((folder / "documents").glob("*.json"))]
    bars = [
        Bar(f"{row['attention']}: time over visible pairs", row["over that of pairs"], 1.3, at_most=True)
        for row in rows
    ]
    share = read_if_there(folder / "rte.json").get("by length, in a row")
    return [*bars, Bar("an epoch of RTE without padding, relative to padded", share, 0.5, at_most=True)], rows


OURS = "our bert_base"
# (model, n): how many times faster than our bert_base on its fastest back end.
SPEEDUPS = {
    ("lazyformer_m2x6_s", 512): 1.00,
    ("lazyformer_m2x6_s", 4096): 1.05,
    ("lazyformer_m2x6_s", 8192): 1.10,
    ("lazyformer_m6x2_s", 8192): 1.15,
    ("m2x6_w3072", 512): 1.08,
    ("m2x6_w3072", 8192): 1.15,
}
SHARE_OF_PEAK = {512: 0.45}  # of our bert_base


def rest(folder: Path, _: Seconds) -> Found:
    rows = []
    for part in ("models", "kinds"):
        for cell in read_if_there(folder / part / "results.json").get("cells", ()):
            for row in cell["rows"]:
                facts = {"n": cell["time"], "work": cell["workload"], "bias": row["buckets"], "on": row["back_end"]}
                beside = row["against"].get(OURS, {})
                measured = {key: beside.get(key) for key in ("speedup", "low", "high", "limit", "memory")}
                rows.append({"model": row["model"], **facts, **measured, "share of peak": row["share_of_peak"]})
    return [bar for row in rows for bar in bars_of_the_rest(row)], rows


def bars_of_the_rest(row: Row) -> Iterator[Bar]:
    """Yield the targets of one model in one cell."""
    model, n = row["model"], row["n"]
    where = f"n = {n}, {row['work']}, {row['bias']} buckets, {row['on']}"
    if model == OURS and n in SHARE_OF_PEAK and row["speedup"] == 1:  # on its fastest back end
        yield Bar(f"{OURS}: share of the matrix peak, {where}", row["share of peak"], SHARE_OF_PEAK[n])
    if (model, n) in SPEEDUPS:
        yield Bar(f"{model} x {OURS}, {where}", row["speedup"], SPEEDUPS[model, n])
        if row["work"] == "training":
            yield Bar(f"{model}: memory / {OURS}'s, {where}", row["memory"], 1.0, at_most=True)


LINES = {
    "throughput": throughput,
    "learning": learning,
    "correctness": correctness,
    "documents": documents,
    "base-size": base_size,
    "base-best": base_size,
    "rest": rest,
}


def write_report(line: str, folder: Path, total: int, is_tiny: bool) -> str:
    """Write both files, and return the text to print."""
    machine = describe_machine("cuda" if torch.cuda.is_available() else "cpu")
    facts = {**machine, **describe_versions()}
    texts = (folder / "parts.tsv").read_text().splitlines()
    parts = [dict(zip(("part", "seconds", "end"), text.split("\t"), strict=True)) for text in texts]
    seconds = {part["part"]: int(part["seconds"]) for part in parts}
    bars, rows = LINES[line](folder, {**seconds, "line": total})
    if "H100" not in str(machine["device"]):
        bars = [bar for bar in bars if not bar.needs_h100]
        rows = [{name: value for name, value in row.items() if name not in ABSOLUTE} for row in rows]
    verdict = verdict_on(bars, str(machine["device"]))
    if is_tiny:
        verdict = f"This is a test run with tiny models, and its numbers are meaningless: {verdict}"
    shown_bars = [{**asdict(bar), "reached": bar.reached} for bar in bars]
    content = {"line": line, "verdict": verdict, "seconds": total, "parts": parts, "bars": shown_bars, "rows": rows}
    write_json(folder / "report.json", content | {"facts": facts})
    page: list[Block] = [f"# {line}", verdict]
    for title, table in (("Figures", rows), ("Targets", shown_bars), ("Parts", parts)):
        if table:
            words = [name for name, value in table[0].items() if isinstance(value, str)]
            cells = [{name: cell(value) for name, value in row.items()} for row in table]
            page.append(Table(title, cells, left=words))
    page += [Picture(str(path.relative_to(folder))) for path in folder.glob("*/phenomena.png")]
    page.append(Notes([f"{name}: {value}" for name, value in facts.items()]))
    return write_page(page, folder, "report")


def verdict_on(bars: Sequence[Bar], device: str) -> str:
    """Return a sentence that says which targets were met."""
    sentence = f"on {device} {sum(bar.reached == 'yes' for bar in bars)} of {len(bars)} targets are met"
    for end, said in (("no", "missed"), ("not measured", "not measured")):
        if found := [bar.what for bar in bars if bar.reached == end]:
            sentence += f"; {said}: {'; '.join(found)}"
    return f"{sentence}."


def cell(value: Any) -> str:
    """Return a value as text."""
    if value is None:
        return ""
    if isinstance(value, float):
        return number(value)
    return f"{value:,}" if type(value) is int else str(value)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("line", nargs="?")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seconds", type=int, default=0, help="seconds that the line has taken so far")
    parser.add_argument("--tiny", action="store_true", help="the line ran with tiny models")
    parser.add_argument("--best", action="store_true")
    given = parser.parse_args()
    if given.best:
        best = best_of(read_json(given.folder / "report.json")["rows"])
        print(best["model"] if best else "")
    else:
        print(write_report(given.line, given.folder, given.seconds, given.tiny))
