"""Writes a line's report.md and report.json: a verdict, its bars and its figures, from what its commands wrote.

    python scripts/gpu/report.py LINE FOLDER --seconds 512
    python scripts/gpu/report.py --best FOLDER

The second form prints the model of the line `learning` with the highest accuracy on BLiMP. Numbers that are no ratios
are for an H100 alone; on other devices the report leaves them out.
"""

import argparse
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Optional
from xml.etree import ElementTree

import torch

from lazyformer_fairseq.evaluation.costs.machine import describe_machine, describe_versions
from lazyformer_fairseq.experiments.compare.results import Model, read_folder
from lazyformer_fairseq.finetuning.registry import benchmark_of_grid
from lazyformer_fairseq.finetuning.report import model_row
from lazyformer_fairseq.finetuning.results import read_results
from lazyformer_fairseq.report.numbers import number
from lazyformer_fairseq.report.page import Block, Notes, Picture, write_page
from lazyformer_fairseq.report.tables import Table
from lazyformer_fairseq.storage.json_files import read_checked_as, read_json, write_json
from lazyformer_fairseq.zero_shot.results import Answers

Row = dict[str, Any]


@dataclass(frozen=True)
class Bar:
    """Something that a line aims at.

    Attributes:
        what: the measure.
        measured: its value; None where it was not measured.
        bar: the value to reach.
        at_most: whether less is better.
        needs_h100: whether the bar is no ratio, and so for an H100 alone.
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


@dataclass
class Findings:
    """What a line found. A row's columns in `absolute` are for an H100 alone."""

    bars: list[Bar] = field(default_factory=list)
    rows: list[Row] = field(default_factory=list)
    absolute: tuple[str, ...] = ()
    pictures: tuple[str, ...] = ()


def results_of(path: Path) -> Optional[dict[str, Any]]:
    """The content of a file of JSON, or None where its part was cut."""
    return read_json(path) if path.exists() else None


def throughput(folder: Path, _: Mapping[str, int]) -> Findings:
    results = results_of(folder / "throughput.json") or {"cells": [], "lengths": [1024, 8192]}
    found = Findings(absolute=("tokens/s",))
    speeds: list[dict[str, float]] = []
    for cell in results["cells"]:
        speed: dict[str, float] = {}
        for row in cell["rows"]:
            speed[row["model"]] = max(row["tokens_per_second"], speed.get(row["model"], 0.0))
        speeds.append(speed)
        for row in cell["rows"]:
            family = "modernbert" if "modernbert" in row["model"] else "bert"
            found.rows.append(
                {
                    "n": cell["time"],
                    "model": f"{row['model']}, {row['back_end']}",
                    "tokens/s": row["tokens_per_second"],
                    "x transformers'": ratio(row["tokens_per_second"], speed.get(f"transformers' {family}")),
                    "share of peak": row["share_of_peak"],
                    "MB": row["memory_bytes"] / 1e6,
                }
            )
    short, long = (*speeds, {}, {})[:2]
    n, longer = results["lengths"][:2]
    ours = short.get("modernbert")
    lazy = ratio(long.get("lazy_modernbert"), long.get("modernbert"))
    found.bars = [
        Bar(f"modernbert, n = {n}, tokens/s", ours, 365_000, needs_h100=True),
        Bar(f"modernbert x transformers', n = {n}", ratio(ours, short.get("transformers' modernbert")), 1.2),
        Bar(f"lazy_modernbert x modernbert, n = {longer}", lazy, 1.2),
    ]
    return found


def ratio(above: Optional[float], below: Optional[float]) -> Optional[float]:
    """None where one of the two was not measured."""
    return above / below if above and below else None


def trained(folder: Path) -> Iterator[tuple[Model, Row, Optional[Answers]]]:
    """Each model that was trained, its row, and its answers to BLiMP unless these were cut."""
    if not (folder / "models" / "results.json").exists():
        return
    for model in read_folder(folder / "models").models.values():
        costs = model.runs[1].wholes()
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
        yield model, row, answers


def learning(folder: Path, seconds: Mapping[str, int]) -> Findings:
    found = Findings(absolute=("tokens/s", "seconds"))
    first = None
    for _, row, answers in trained(folder):
        above, error = None, None
        if answers is not None:
            first = first or answers
            above, error = (100 * each for each in answers.difference(first, list(answers.margins)))
        found.rows.append({**row, "above BERT": above, "standard error": error})
    best = max((row["BLiMP, %"] for row in found.rows if row["BLiMP, %"] is not None), default=None)
    total = seconds["line"]
    found.bars = [
        Bar("minutes", total / 60, 8, at_most=True, needs_h100=True),
        Bar("share of BLiMP in the time", ratio(seconds.get("BLiMP"), total), 1 / 3, at_most=True),
        Bar("BLiMP of the best row, %", best, 71.3),
        Bar("BLiMP of the best row, %: the goal", best, 74),
    ]
    if (folder / "blimp" / "phenomena.png").exists():
        found.pictures = ("blimp/phenomena.png",)
    return found


def base_size(folder: Path, _: Mapping[str, int]) -> Findings:
    found = Findings(absolute=("tokens/s", "seconds"))
    blimp = minutes = None
    for model, row, _ in trained(folder):
        if (folder / "glue").exists():
            benchmark = benchmark_of_grid(folder / "glue")
            results = read_results(folder / "glue", benchmark)
            row |= model_row(results, benchmark, f"{model.name}-seed1").scores
        found.rows.append(row)
        blimp, minutes = row["BLiMP, %"], row["seconds"] / 60
    found.bars = [Bar("minutes of training", minutes, 5, at_most=True, needs_h100=True)]
    line_2 = results_of(folder.parent / "learning" / "report.json")
    if line_2:
        best = max(row["BLiMP, %"] or 0 for row in line_2["rows"])
        found.bars.append(Bar("BLiMP, % (bar: the best of `learning`)", blimp, best))
    return found


def correctness(folder: Path, seconds: Mapping[str, int]) -> Findings:
    files: dict[str, Row] = {}
    if (folder / "tests.xml").exists():
        for case in ElementTree.parse(folder / "tests.xml").iter("testcase"):  # noqa: S314 - pytest wrote it
            name = case.get("classname", "").rpartition("tests.")[2]
            row = files.setdefault(name, {"tests": name, "passed": 0, "failed": 0, "skipped": 0})
            ends = {child.tag for child in case}
            end = "failed" if ends & {"failure", "error"} else "skipped" if "skipped" in ends else "passed"
            row[end] += 1
    failed = sum(row["failed"] for row in files.values()) if files else None
    minutes = seconds.get("tests", 0) / 60
    bars = [
        Bar("tests that failed", failed, 0, at_most=True),
        Bar("tests that passed", sum(row["passed"] for row in files.values()), 1),
        Bar("minutes", minutes, 4, at_most=True, needs_h100=True),
    ]
    return Findings(bars, list(files.values()))


def documents(folder: Path, _: Mapping[str, int]) -> Findings:
    found = Findings(absolute=("ms, all pairs", "ms, within documents"))
    for path in sorted((folder / "documents").glob("*.json")):
        row = read_json(path)
        found.rows.append({"attention": path.stem, **row})
        found.bars.append(Bar(f"{path.stem}: time over visible pairs", row["over that of pairs"], 1.3, at_most=True))
    shares = results_of(folder / "rte.json") or {}
    share = shares.get("by length, in a row")
    found.bars.append(Bar("an epoch of RTE without padding, of padded time", share, 0.5, at_most=True))
    return found


OURS = "our bert_base"
# (model, n): how many times faster than our bert_base on its fastest back end.
SPEEDUPS = {
    ("lazyformer_m2x6_s", 512): 1.00,
    ("lazyformer_m2x6_s", 4096): 1.05,
    ("lazyformer_m2x6_s", 8192): 1.08,
    ("lazyformer_m6x2_s", 8192): 1.15,
    ("m2x6_w3072", 512): 1.08,
    ("m2x6_w3072", 8192): 1.15,
}
SHARE_OF_PEAK = {512: 0.45}  # of our bert_base


def rest(folder: Path, _: Mapping[str, int]) -> Findings:
    found = Findings()
    for part in ("models", "kinds"):
        results = results_of(folder / part / "results.json") or {"cells": []}
        for cell in results["cells"]:
            for row in cell["rows"]:
                beside = row["against"].get(OURS, {})
                facts = {"n": cell["time"], "work": cell["workload"], "bias": row["buckets"], "on": row["back_end"]}
                measured = {key: beside.get(key) for key in ("speedup", "low", "high", "limit", "memory")}
                row = {"model": row["model"], **facts, **measured, "share of peak": row["share_of_peak"]}
                found.rows.append(row)
                found.bars += bars_of_the_rest(row)
    return found


def bars_of_the_rest(row: Row) -> Iterator[Bar]:
    """The bars of one model in one cell."""
    model, n = row["model"], row["n"]
    where = f"n = {n}, {row['work']}, {row['bias']} buckets, {row['on']}"
    if model == OURS:
        if n in SHARE_OF_PEAK and row["speedup"] == 1:  # on its fastest back end
            yield Bar(f"{OURS}: share of the matrix peak, {where}", row["share of peak"], SHARE_OF_PEAK[n])
        return
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
    """Write both files, and return what a screen shows."""
    machine = describe_machine("cuda" if torch.cuda.is_available() else "cpu")
    parts = [text.split("\t") for text in (folder / "parts.tsv").read_text().splitlines()]
    seconds = {name: int(taken) for name, taken, _ in parts} | {"line": total}
    found = LINES[line](folder, seconds)
    bars = found.bars
    rows = found.rows
    if "H100" not in str(machine["device"]):
        bars = [bar for bar in bars if not bar.needs_h100]
        rows = [{name: value for name, value in row.items() if name not in found.absolute} for row in rows]
    verdict = verdict_on(bars, str(machine["device"]))
    if is_tiny:
        verdict = f"A rehearsal with tiny models, whose figures mean nothing. {verdict}"
    content = {"line": line, "verdict": verdict, "seconds": total, "machine": machine, "versions": describe_versions()}
    content["parts"] = [dict(zip(("part", "seconds", "end"), part, strict=True)) for part in parts]
    content |= {"bars": [{**asdict(bar), "reached": bar.reached} for bar in bars], "rows": rows}
    write_json(folder / "report.json", content)
    page: list[Block] = [f"# {line}", verdict]
    if rows:
        page.append(
            Table("Figures", shown(rows), left=[name for name, value in rows[0].items() if isinstance(value, str)])
        )
    if bars:
        columns = ("what", "measured", "bar", "reached")
        page.append(Table("Bars", shown([{name: getattr(bar, name) for name in columns} for bar in bars])))
    page += [Table("Parts", content["parts"]), *map(Picture, found.pictures)]
    page.append(Notes([f"{name}: {value}" for name, value in (machine | content["versions"]).items()]))
    return write_page(page, folder, "report")


def verdict_on(bars: list[Bar], device: str) -> str:
    """One sentence."""
    by_end = {end: [bar.what for bar in bars if bar.reached == end] for end in ("yes", "no", "not measured")}
    sentence = f"On {device} {len(by_end['yes'])} of {len(bars)} bars are reached"
    if by_end["no"]:
        sentence += f"; missed: {'; '.join(by_end['no'])}"
    if by_end["not measured"]:
        sentence += f"; not measured: {'; '.join(by_end['not measured'])}"
    return f"{sentence}."


def shown(rows: list[Row]) -> list[dict[str, str]]:
    """Rows as they are printed."""
    return [{name: cell(value) for name, value in row.items()} for row in rows]


def cell(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, float):
        return number(value)
    return f"{value:,}" if isinstance(value, int) else str(value)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("line", nargs="?")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seconds", type=int, default=0, help="of the line so far")
    parser.add_argument("--tiny", action="store_true", help="the line was a rehearsal")
    parser.add_argument("--best", action="store_true")
    given = parser.parse_args()
    if given.best:
        rows = read_json(given.folder / "report.json")["rows"]
        print(max(rows, key=lambda row: row["BLiMP, %"] or 0)["model"])
    else:
        print(write_report(given.line, given.folder, given.seconds, given.tiny))
