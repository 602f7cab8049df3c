"""PAR Transformer's Table 4: latency, SQuAD's F1, and the accuracies on SST-2 and MRPC of encoders.

The scores come from two grids, ``lazyformer glue run``'s and ``lazyformer squad run``'s; the latencies, where they were
measured, from ``lazyformer bench table4``, by a model's name.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Optional

import numpy as np

from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.finetuning.report.read_results import read_results
from lazyformer_fairseq.finetuning.report.results import Results
from lazyformer_fairseq.finetuning.report.tables import INCOMPLETE, NOTHING, Table
from lazyformer_fairseq.finetuning.squad_family import SQUAD, SQUAD_FAMILY
from lazyformer_fairseq.measure.bench.settings import PAPER_LATENCY
from lazyformer_fairseq.patterns.architectures import ARCHITECTURES
from lazyformer_fairseq.storage.json_files import read_json

SQUADS_COLUMN = "SQuAD v1.1"
GLUE_TASKS = ("SST-2", "MRPC")
COLUMNS = (SQUADS_COLUMN, *GLUE_TASKS)


@dataclass(frozen=True)
class Row:
    """A model.

    Attributes:
        latency: as it is printed, in milliseconds; empty where it was not measured.
        scores: by column, in percent; those that are known.
        incomplete: columns whose grid lacks runs.
    """

    name: str
    pattern: str
    latency: str
    scores: Mapping[str, float]
    incomplete: frozenset[str] = field(default=frozenset())

    def cells(self) -> list[str]:
        scores = (
            f"{self.scores[column]:.1f}{INCOMPLETE if column in self.incomplete else ''}"
            if column in self.scores
            else NOTHING
            for column in COLUMNS
        )
        return [self.name, self.pattern or NOTHING, self.latency or NOTHING, *scores]


def _paper(name: str, arch: str, scores: str) -> Row:
    numbers = dict(zip(COLUMNS, map(float, scores.split()), strict=True))
    return Row(f"{name} (paper)", ARCHITECTURES[arch].sublayer_pattern, PAPER_LATENCY[arch], numbers)


PAPER_ROWS = (
    _paper("DistilBERT", "distilbert_base", "86.9 91.3 87.5"),
    _paper("BERT Base", "bert_base_absolute", "88.4 91.5 88.7"),
    _paper("PAR BERT Base", "par_bert_base", "87.4 91.6 89.2"),
)


@dataclass(frozen=True)
class Sources:
    """What the table is made of.

    Attributes:
        glue: the grid on GLUE.
        squad: the grid on SQuAD; None where there is none.
        latency: the content of table4.json; empty where there is none.
    """

    glue: Results
    squad: Optional[Results]
    latency: Mapping[str, Any]


def read_sources(glue: Results, squad: Optional[Path], latency: Optional[Path]) -> Optional[Sources]:
    """Reads what lies beside a grid on GLUE; None where that is nothing.

    Args:
        squad: the folder that ``lazyformer squad run`` wrote; by default ``squad`` beside GLUE's, if it is there.
        latency: the folder that ``lazyformer bench table4`` wrote; by default ``table4`` beside GLUE's, likewise.

    Raises:
        UserError: a file is missing or wrong.
    """
    beside = glue.folder.absolute().parent
    squad = squad or _if_there(beside / "squad", "runs/grid.json")
    latency = latency or _if_there(beside / "table4", "table4.json")
    if squad is None and latency is None:
        return None
    read = {} if latency is None else _read_latency(latency / "table4.json")
    return Sources(glue, squad and read_results(squad, SQUAD_FAMILY), read)


def _if_there(folder: Path, file: str) -> Optional[Path]:
    return folder if (folder / file).is_file() else None


def _read_latency(path: Path) -> dict[str, Any]:
    found = read_json(path, remedy="give the folder that `lazyformer bench table4` wrote")
    try:
        {row["arch"]: row["seconds"]["median"] for row in found["rows"]}
    except (KeyError, TypeError):
        raise UserError(f"{path}: is no result of `lazyformer bench table4`; run it again") from None
    return found


def table_4(sources: Sources) -> Table:
    """Our models, then the paper's."""
    rows = [*(_own_row(sources, model) for model in _models(sources)), *PAPER_ROWS]
    headers = ("model", "architecture", "latency, ms", *COLUMNS)
    return Table(
        "PAR Transformer's Table 4, development sets, percent", headers, [row.cells() for row in rows], texts=2
    )


def _models(sources: Sources) -> list[str]:
    of_squad = sources.squad.grid.models if sources.squad else {}
    of_glue = sources.glue.grid.models if set(GLUE_TASKS) & set(sources.glue.grid.tasks) else {}
    return list(dict.fromkeys([*of_glue, *of_squad]))


def _own_row(sources: Sources, model: str) -> Row:
    scores, incomplete = {}, set()
    for column, results, task, metric in _places(sources):
        if results is None or model not in results.grid.models or task not in results.grid.tasks:
            continue
        found = results.of(model, task)
        if found.runs:
            scores[column] = float(np.median(found.values("valid", metric)))
        if not found.is_complete:
            incomplete.add(column)
    measured = next((row for row in sources.latency.get("rows", []) if row["arch"] == model), None)
    pattern = ARCHITECTURES[model].sublayer_pattern if model in ARCHITECTURES else ""
    latency = f"{1000 * measured['seconds']['median']:.1f}" if measured else ""
    return Row(model, pattern, latency, scores, frozenset(incomplete))


def _places(sources: Sources) -> Iterator[tuple[str, Optional[Results], str, str]]:
    """Where each column's scores stand: column, grid, task, metric."""
    yield SQUADS_COLUMN, sources.squad, SQUAD.name, "f1"
    for task in GLUE_TASKS:
        yield task, sources.glue, task, "accuracy"


def notes(sources: Sources) -> Iterator[str]:
    """What a reader needs to compare the rows, a sentence or two each."""
    yield (
        "PAR Transformer's Table 4: F1 for SQuAD v1.1, accuracy for SST-2 and MRPC, medians over seeds on the "
        "development sets. Rows marked (paper) are those of arXiv 2009.04534: medians of five runs, latencies of an "
        "A100; + is their estimate. DistilBERT's scores are those of its own paper."
    )
    if sources.squad:
        yield f"SQuAD's scores stand in {sources.squad.folder}."
    if sources.latency:
        facts = sources.latency
        where = f"{facts.get('device')}, {facts.get('threads', 'no')} threads, {facts.get('precision')}"
        yield (
            f"Our latencies are medians of encoder and span head at batch 1, n = {facts.get('tokens')} ({where}); a "
            "model has that of the arch of its name."
        )
