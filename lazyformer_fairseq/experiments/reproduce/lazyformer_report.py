"""LazyFormer's page: the paper's tables and figures, what was measured here beside what is printed there."""

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, Optional

from lazyformer_fairseq.evaluation.bench.models import OURS, REGISTERED
from lazyformer_fairseq.experiments.reproduce import lazyformer as of
from lazyformer_fairseq.experiments.reproduce.engine import (
    Reproduction,
    Step,
    copied,
    losses_of,
    missing,
    what_it_took,
    written_on,
)
from lazyformer_fairseq.finetuning.benchmark import TableRow
from lazyformer_fairseq.finetuning.paper_numbers import COLUMNS, PAPER_ROWS
from lazyformer_fairseq.finetuning.report import average_of, cells, model_row
from lazyformer_fairseq.finetuning.report import write_report as write_glue_report
from lazyformer_fairseq.finetuning.results import Results, read_results
from lazyformer_fairseq.finetuning.tasks.glue import BENCHMARK as GLUE
from lazyformer_fairseq.report.numbers import NOTHING
from lazyformer_fairseq.report.tables import markdown_table
from lazyformer_fairseq.storage.atomic import write_text
from lazyformer_fairseq.storage.json_files import read_json

BERTS_SECONDS = of.PRINTED["bert_base"].seconds


def reproduction(size: of.Size, inputs: of.Inputs, out: Path, precision: str, speed: float) -> Reproduction:
    """All of it.

    Args:
        precision: of the benchmarks.
        speed: FLOP/s of training that all devices reach together.
    """
    steps = of.steps(size, inputs, out, precision)
    rests_on = (
        f"By arithmetic: {speed / 1e12:g} TFLOP/s of training (--teraflops), a backward pass of two forward passes, "
        f"{of.MEGABYTES_A_CORE_SECOND} MB of text a core-second, {of.BYTES_OF_PARAMETER} bytes a parameter of a "
        "checkpoint. Benchmarks take at most the minutes that they are given, and a round.",
        f"Pre-trained: {', '.join(inputs.models)}. Timed alone: "
        f"{', '.join(arch for arch in of.TIMED if arch not in inputs.models) or 'none'}; --models adds them.",
    )
    costs = partial(of.cost_of, size=size, inputs=inputs, speed=speed)
    write = partial(write_report, steps, size, inputs, out)
    return Reproduction(steps, of.as_json(size, inputs), costs, rests_on, write, size.is_tiny)


def write_report(steps: Sequence[Step], size: of.Size, inputs: of.Inputs, out: Path) -> Path:
    """Writes OUT/report: report.md and pictures, of what is there. Returns the page."""
    places = of.Places(out)
    glue = _glue_results(places)
    updates = f"{size.updates:,} updates"
    parts = [
        ("# LazyFormer, reproduced" + (" in miniature" if size.is_tiny else ""), _introduction(size, inputs)),
        (f"## Table 1: GLUE after {updates}", _table_1(glue, size)),
        ("## Figure 2: validation loss, GLUE", _figure_2(places, glue)),
        ("## Tables 2 and 3: time of an update", _table_2(places, size, glue, inputs)),
        ("## Table 4: larger models", _table_4(glue, size)),
        ("## Figure 3: speed-up against length", _figure_3(places, size)),
        ("## What it took", what_it_took(steps, out)),
    ]
    page = places.report / "report.md"
    write_text(page, "\n\n".join(f"{title}\n\n{text}" for title, text in parts) + "\n")
    return page


def _introduction(size: of.Size, inputs: of.Inputs) -> str:
    said = (
        "Rows marked (paper) are printed in arXiv 2102.12702; all others were measured here, one seed of pre-training "
        f"each. Pre-trained and fine-tuned (--models): {', '.join(inputs.models)}; {_left_out(inputs)}. GLUE's tasks: "
        f"{', '.join(inputs.tasks)}. {written_on()}"
    )
    if size.is_tiny:
        said = (
            f"**This shows that everything runs, not which model is better**: widths of a sixteenth, {size.length} "
            f"tokens a sequence, {size.sequences} sequences an update, {size.updates:,} updates, {size.rows} rows of "
            f"each task, {len(size.seeds)} seeds, {size.epochs} epochs. The benchmarks' models all have the same tiny "
            f"widths.\n\n{said}"
        )
    return said


def _left_out(inputs: of.Inputs) -> str:
    return f"left out: {', '.join(arch for arch in of.PRINTED if arch not in inputs.models) or 'none'}"


def _glue_results(places: of.Places) -> Optional[Results]:
    results = read_results(places.glue, GLUE) if (places.glue / "runs" / "grid.json").exists() else None
    if not results or not results.runs:
        return None
    write_glue_report(places.glue, places.report / "glue")
    return results


# --- GLUE


def _own(glue: Optional[Results], arch: str, updates: int) -> Optional[TableRow]:
    name = of.model_name(arch, updates)
    return model_row(glue, GLUE, name) if glue and name in glue.grid.models else None


def _table_1(glue: Optional[Results], size: of.Size) -> str:
    """Ours and the paper's in turn; a score of a task that was not run is a dash."""
    if glue is None:
        return missing("glue_*")
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
    blocks = losses_of(list(map(places.pretraining, of.PRINTED)), places.report, "pretrain_*")
    if glue and (places.report / "glue" / "glue_updates.png").exists():
        blocks.append("![GLUE's scores against updates of pre-training](glue/glue_updates.png)")
    return "\n\n".join(blocks)


# --- Times


def _cells(places: of.Places, name: str) -> list[dict[str, Any]]:
    path = places.bench(name) / "results.json"
    return read_json(path)["cells"] if path.exists() else []


def fastest(cell: dict[str, Any], model: str) -> Optional[dict[str, Any]]:
    """The row of a model's quickest back end."""
    rows = [row for row in cell["rows"] if row["model"] == model]
    return min(rows, key=lambda row: row["seconds"]["median"], default=None)


def _speedup(row: Optional[dict[str, Any]], baseline: str) -> str:
    against = row and row["against"].get(baseline)
    return f"{against['speedup']:.2f}x" if against else NOTHING


def _table_2(places: of.Places, size: of.Size, glue: Optional[Results], inputs: of.Inputs) -> str:
    cells = _cells(places, "tables")
    if not cells:
        return missing("bench_tables")
    cell, rows = cells[0], []
    without = of.Printed("BERT, no attention dropout (ours)", None, None)
    for arch, printed in ({OURS: without} | of.PRINTED).items():
        row = fastest(cell, OURS if arch == OURS else size.bench_arch(arch))
        rows.append(
            {
                "model": printed.name,
                "ms": f"{1000 * row['seconds']['median']:.1f}" if row else NOTHING,
                "speed-up": _speedup(row, REGISTERED),
                "speed-up over BERT, no attention dropout": _speedup(row, OURS),
                "back end": row["back_end"] if row else NOTHING,
                "GLUE Avg.": NOTHING if arch == OURS else _average(glue, arch, size),
                "speed-up (paper)": f"{BERTS_SECONDS / printed.seconds:.2f}x" if printed.seconds else NOTHING,
                "GLUE Avg. (paper)": f"{printed.average:.2f}" if printed.average else NOTHING,
            }
        )
    said = (
        f"An update of {cell['batch']} sequences of {cell['time']} tokens in {cell['precision']}, on one "
        f"{read_json(places.bench('tables') / 'results.json')['machine']['device']}. The first speed-up is over BERT "
        "as the paper has it, with attention dropout 0.1, as SD models have it too; the second one over the same BERT "
        "without it, on its fastest back end: what lazy attention alone gains. The paper's are seconds of 100 "
        f"updates on eight V100s, divided. Averages are of those that were pre-trained; {_left_out(inputs)}."
    )
    return f"{markdown_table(rows, left=('back end',))}\n\n{said}"


def _figure_3(places: of.Places, size: of.Size) -> str:
    cells = _cells(places, "figure_3")
    if not cells:
        return missing("bench_figure_3")
    rows = []
    for arch in of.FIGURE_3:
        found = {cell["time"]: fastest(cell, size.bench_arch(arch)) for cell in cells}
        rows.append({"model": arch, **{f"n = {n:,}": _speedup(row, REGISTERED) for n, row in found.items()}})
    said = (
        "Speed-up over BERT as the paper has it, with attention dropout 0.1; the pictures have also that over BERT "
        "without it. The paper draws its figure and prints no numbers of it; it says almost 2x."
    )
    blocks = [markdown_table(rows), said]
    for picture in sorted(places.bench("figure_3").glob("speedup_training_*.png")):
        blocks.append(copied(picture, places.report, "speed-up against tokens a sequence"))
    return "\n\n".join(blocks)
