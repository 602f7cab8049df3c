"""Writes the folder of a diagnostic: what the tasks `glue` and `inputs_masked_lm` read, and a report of the data."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Optional

import numpy as np

from lazyformer_fairseq.data.glue.prepared_data import EncodedExamples, PreparedDiagnostic, write_split
from lazyformer_fairseq.data.glue.task_table import DIAGNOSTICS
from lazyformer_fairseq.data.prepared_folder import MANIFEST
from lazyformer_fairseq.data.text.interface import DICTIONARY_FILE, TextTokenizer
from lazyformer_fairseq.data.text.load_tokenizer import tokenizer_hashes
from lazyformer_fairseq.report.tables import markdown_table
from lazyformer_fairseq.storage.json_files import write_json

REPORT = "report.md"


def write_prepared(
    folder: Path,
    task: str,
    settings: Mapping[str, Any],
    tokenizer: TextTokenizer,
    splits: Mapping[str, EncodedExamples],
    rules: Mapping[str, float],
    notes: Optional[Mapping[str, Any]] = None,
) -> dict[str, Any]:
    """Writes a folder that is there already; returns its manifest.

    Args:
        task: its name in DIAGNOSTICS.
        settings: that decide the data.
        splits: encoded examples by split.
        rules: accuracy on the test split of what a model must beat, the constant first.
        notes: further facts on the data.
    """
    tokenizer.save(folder / "tokenizer")
    (folder / DICTIONARY_FILE).write_bytes((folder / "tokenizer" / DICTIONARY_FILE).read_bytes())
    manifest = {
        "format": PreparedDiagnostic.FORMAT,
        "format_version": PreparedDiagnostic.FORMAT_VERSION,
        "task": task,
        "settings": settings,
        "tokenizer": tokenizer_hashes(folder / "tokenizer"),
        "dictionary_size": len(tokenizer.dictionary),
        "splits": {name: _write(folder, name, task, examples, tokenizer) for name, examples in splits.items()},
        "rules": {name: round(accuracy, 4) for name, accuracy in rules.items()},
        **(notes or {}),
    }
    (folder / REPORT).write_text(f"{report_of(manifest)}\n", encoding="utf-8")
    write_json(folder / MANIFEST, manifest, durable=False)
    return manifest


def _write(folder: Path, split: str, task: str, examples: EncodedExamples, tokenizer: TextTokenizer) -> dict[str, Any]:
    """Writes a split; returns its entry in the manifest."""
    write_split(folder, split, examples, len(tokenizer.dictionary))
    sizes = np.array([len(ids) for ids in examples.inputs])
    counts = np.bincount(examples.targets, minlength=len(DIAGNOSTICS[task].labels))
    return {
        "rows": len(sizes),
        "bytes": (folder / f"{split}.bin").stat().st_size,
        "labels": dict(zip(DIAGNOSTICS[task].labels, counts.tolist(), strict=True)),
        "tokens": int(sizes.sum()),
        "shortest": int(sizes.min()),
        "median": int(np.median(sizes)),
        "longest": int(sizes.max()),
    }


def report_of(manifest: Mapping[str, Any]) -> str:
    """The report of the data, in Markdown: lengths, balance of classes, and what simple rules reach."""
    rows = [
        {
            "split": split,
            "examples": f"{counts['rows']:,}",
            "tokens of an input": f"{counts['shortest']:,} to {counts['longest']:,}, median {counts['median']:,}",
            **{name: f"{count / counts['rows']:.1%}" for name, count in counts["labels"].items()},
        }
        for split, counts in manifest["splits"].items()
    ]
    rules = [{"rule": name, "accuracy on test": f"{value:.1%}"} for name, value in manifest["rules"].items()]
    return "\n\n".join(
        [
            f"# {manifest['task']}",
            "All symbols of an input are counted, those at its ends too.",
            markdown_table(rows, left=("tokens of an input",)),
            "What needs no model; one that does not beat the best of these has learnt nothing worth its time:",
            markdown_table(rules),
        ]
    )
