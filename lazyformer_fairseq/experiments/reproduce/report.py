"""The page: the paper's tables and figures, what was measured here beside what is printed there."""

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Optional

from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.experiments.curves.report import AXES, csv_rows, draw, histories, labels, logs_of_runs, table
from lazyformer_fairseq.experiments.reproduce import steps as of
from lazyformer_fairseq.finetuning.benchmark import COLUMNS, PAPER_ROWS, TableRow
from lazyformer_fairseq.finetuning.report import average_of, cells, own_row
from lazyformer_fairseq.finetuning.report import write_report as write_glue_report
from lazyformer_fairseq.finetuning.results import Results, read_results
from lazyformer_fairseq.finetuning.tasks.glue import BENCHMARK as GLUE
from lazyformer_fairseq.measure.bench.models import OURS
from lazyformer_fairseq.measure.costs.machine import describe_machine, describe_versions, device_named
from lazyformer_fairseq.report.numbers import NOTHING
from lazyformer_fairseq.report.tables import markdown_table, write_csv
from lazyformer_fairseq.storage.atomic import atomic_file, write_text
from lazyformer_fairseq.storage.json_files import read_json

BERTS_SECONDS = of.PRINTED["bert_base"].seconds


def write_report(steps: Sequence[of.Step], size: of.Size, inputs: of.Inputs, out: Path) -> Path:
    """Writes OUT/report: report.md and pictures, of what is there. Returns the page.

    Raises:
        UserError: nothing is there yet.
    """
    places = of.Places(out)
    if not any(of.record_of(out, step) for step in steps):
        raise UserError(f"{out}: no step is done yet, so there is nothing to report")
    places.report.mkdir(parents=True, exist_ok=True)
    glue = _glue_results(places)
    updates = f"{size.updates:,} updates"
    parts = [
        ("# LazyFormer, reproduced" + (" in miniature" if size.is_tiny else ""), _introduction(size, inputs)),
        (f"## Table 1: GLUE after {updates}", _table_1(glue, size)),
        ("## Figure 2: validation loss, GLUE", _figure_2(places, glue)),
        ("## Tables 2 and 3: time of an update", _table_2(places, size, glue)),
        ("## Table 4: larger models", _table_4(glue, size)),
        ("## Figure 3: speed-up against length", _figure_3(places, size)),
        ("## What it took", _costs(steps, out)),
    ]
    page = places.report / "report.md"
    write_text(page, "\n\n".join(f"{title}\n\n{text}" for title, text in parts) + "\n")
    return page


def _introduction(size: of.Size, inputs: of.Inputs) -> str:
    facts = {**describe_machine(device_named("auto")), **describe_versions()}
    said = (
        "Rows marked (paper) are printed in arXiv 2102.12702; all others were measured here, one seed of pre-training "
        f"each. GLUE's tasks: {', '.join(inputs.tasks)}. Written on: "
        + "; ".join(f"{name} {value}" for name, value in facts.items())
        + "."
    )
    if size.is_tiny:
        said = (
            f"**This shows that everything runs, not which model is better**: widths of a sixteenth, {size.length} "
            f"tokens a sequence, {size.sequences} sequences an update, {size.updates:,} updates, {size.rows} rows of "
            f"each task, {len(size.seeds)} seeds, {size.epochs} epochs. The benchmarks' models all have the same tiny "
            f"widths.\n\n{said}"
        )
    return said


def _glue_results(places: of.Places) -> Optional[Results]:
    results = read_results(places.glue, GLUE) if (places.glue / "runs" / "grid.json").exists() else None
    if not results or not results.runs:
        return None
    write_glue_report(places.glue, places.report / "glue")
    return results


def _missing(step: str) -> str:
    return f"Not there yet: `{step}`."


# --- GLUE


def _own(glue: Optional[Results], arch: str, updates: int) -> Optional[TableRow]:
    name = of.model_name(arch, updates)
    return own_row(glue, GLUE, name) if glue and name in glue.grid.models else None


def _table_1(glue: Optional[Results], size: of.Size) -> str:
    """Ours and the paper's in turn; a score of a task that was not run is a dash."""
    if glue is None:
        return _missing("glue_*")
    printed = {row.model: row for row in PAPER_ROWS}
    wanted = [(arch, size.updates, of.PRINTED[arch].name) for arch in of.TABLE_1]
    rows = []
    for arch, updates, called in (*wanted, ("lazyformer_m2x6", size.updates // 2, "M2x6 mid")):
        theirs = TableRow(f"{called} (paper)", "paper", printed[called].updates, printed[called].scores)
        rows += [cells(row, GLUE) for row in (_own(glue, arch, updates), theirs) if row]
    return f"{markdown_table(rows)}\n\nAll scores, spreads and baselines: [glue/glue.md](glue/glue.md)."


def _average(glue: Optional[Results], arch: str, size: of.Size) -> str:
    own = _own(glue, arch, size.updates)
    average = average_of(own, GLUE) if own else None
    return NOTHING if average is None else f"{average:.2f}"


def _table_4(glue: Optional[Results], size: of.Size) -> str:
    rows = []
    for arch, printed in of.PRINTED.items():
        if printed.mnli is None:
            continue
        own = _own(glue, arch, size.updates)
        mnli = [f"{own.scores[name]:.2f}" for name in COLUMNS["MNLI-m/mm"] if own and name in own.scores]
        embed, inner, heads = size.widths(arch).values()
        ours = {"MNLI-m/mm": "/".join(mnli) or NOTHING, "Avg.": _average(glue, arch, size)}
        theirs = {"MNLI-m/mm (paper)": printed.mnli, "Avg. (paper)": f"{printed.average:.2f}"}
        rows.append({"model": printed.name, "(W, H, N)": f"{inner}, {embed}, {heads}", **ours, **theirs})
    return (
        f"{markdown_table(rows)}\n\nThe paper's 85.72/35.67 is as printed; its Table 1 has 85.69/85.46 for that model."
    )


# --- Validation loss


def _figure_2(places: of.Places, glue: Optional[Results]) -> str:
    folders = [str(folder) for folder in map(places.pretraining, of.PRINTED) if (folder / "train.log").exists()]
    try:
        shown, silent = histories(logs_of_runs(folders))
    except UserError:
        return _missing("pretrain_*")
    names = labels(shown)
    axes = [axis for axis in AXES if axis != "tokens"]  # all see the same
    draw(shown, names, axes, places.report / "loss.png")
    write_csv(list(csv_rows(shown)), places.report / "loss.csv")
    blocks = [table(shown, names), *silent, "![validation loss against updates, hours and FLOPs](loss.png)"]
    if glue and (places.report / "glue" / "glue_updates.png").exists():
        blocks.append("![GLUE's scores against updates of pre-training](glue/glue_updates.png)")
    return "\n\n".join(blocks)


# --- Times


def _cells(places: of.Places, name: str) -> list[dict[str, Any]]:
    path = places.bench(name) / "results.json"
    return read_json(path)["cells"] if path.exists() else []


def fastest(cell: dict[str, Any], model: str) -> Optional[dict[str, Any]]:
    """The row of a model's quickest back end; ``bert_base`` is the baseline of that name."""
    rows = [row for row in cell["rows"] if row["model"] == model or (model == "bert_base" and row["baseline"] == OURS)]
    return min(rows, key=lambda row: row["seconds"]["median"], default=None)


def _table_2(places: of.Places, size: of.Size, glue: Optional[Results]) -> str:
    cells = _cells(places, "tables")
    if not cells:
        return _missing("bench_tables")
    rows = []
    for arch, printed in of.PRINTED.items():
        row = fastest(cells[0], arch if arch == "bert_base" else size.bench_arch(arch))
        speedup = row and row["against"].get(OURS, {}).get("speedup")
        rows.append(
            {
                "model": printed.name,
                "ms": f"{1000 * row['seconds']['median']:.1f}" if row else NOTHING,
                "speed-up": f"{speedup:.2f}x" if speedup else NOTHING,
                "back end": row["back_end"] if row else NOTHING,
                "GLUE Avg.": _average(glue, arch, size),
                "speed-up (paper)": f"{BERTS_SECONDS / printed.seconds:.2f}x" if printed.seconds else NOTHING,
                "GLUE Avg. (paper)": f"{printed.average:.2f}",
            }
        )
    cell = cells[0]
    said = (
        f"An update of {cell['batch']} sequences of {cell['time']} tokens in {cell['precision']}, on one "
        f"{read_json(places.bench('tables') / 'results.json')['machine']['device']}; speed-up against our own BERT on "
        "its fastest back end. The paper's are seconds of 100 updates on eight V100s, divided. Of Table 3 only "
        "BERT and M2x6-SD are pre-trained here."
    )
    return f"{markdown_table(rows, left=('back end',))}\n\n{said}"


def _figure_3(places: of.Places, size: of.Size) -> str:
    cells = _cells(places, "figure_3")
    if not cells:
        return _missing("bench_figure_3")
    rows = []
    for arch in of.FIGURE_3:
        found = {cell["time"]: fastest(cell, size.bench_arch(arch)) for cell in cells}
        beside = {length: row and row["against"].get(OURS) for length, row in found.items()}
        speedups = {f"n = {n:,}": f"{each['speedup']:.2f}x" if each else NOTHING for n, each in beside.items()}
        rows.append({"model": arch, **speedups})
    blocks = [markdown_table(rows), "The paper draws its figure and prints no numbers of it; it says almost 2x."]
    for picture in sorted(places.bench("figure_3").glob("speedup_training_*.png")):
        with picture.open("rb") as source, atomic_file(places.report / picture.name) as target:
            shutil.copyfileobj(source, target)
        blocks.append(f"![speed-up against tokens a sequence]({picture.name})")
    return "\n\n".join(blocks)


def _costs(steps: Sequence[of.Step], out: Path) -> str:
    rows = []
    for step in steps:
        record = of.record_of(out, step)
        hours = f"{record['seconds'] / 3600:,.3f}" if record else "not done"
        rows.append({"step": step.name, "what": step.what, "hours of its last start": hours})
    return markdown_table(rows, left=("what",))
