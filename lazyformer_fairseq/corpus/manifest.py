"""``manifest.json``: a corpus's inputs; for every step, what it took in, dropped and gave out; and the cost."""

import json
from collections import Counter, defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from lazyformer_fairseq.corpus.readers.inputs import DAMAGE_FILE
from lazyformer_fairseq.corpus.stages import WorkPaths
from lazyformer_fairseq.corpus.step import EXAMPLES
from lazyformer_fairseq.corpus.vocabulary import LENGTH_EDGES, load_unigrams
from lazyformer_fairseq.corpus.words import NOTES_FILE

FORMAT_VERSION = 1
PACKAGES = (  # with Python and the spaCy model, all that decides the result
    *("lazyformer_fairseq", "datatrove", "fairseq-fixed", "numpy", "sacremoses", "sentencepiece", "spacy"),
    *("wikiextractor", "xxhash", "rensa"),
)
NAMES_OF_DROPPED = 10
DROPPED = "dropped: "
CORE_SECONDS = "core seconds"
StepTotals = dict[str, float]


def describe(
    paths: WorkPaths, plan: dict[str, Any], units: int, shards: int, origins: dict[str, str], timing: dict[str, Any]
) -> dict[str, Any]:
    """The manifest of a corpus whose stages have all run.

    Args:
        plan: settings and inputs.
        origins: the file of each part, for files that were cut.
        timing: see :func:`timing`.
    """
    steps = steps_of_words(stage_totals(paths.stage("words")))
    of_duplicates = dropped(stage_totals(paths.stage("duplicates"))["duplicates"])
    symbols = plan["settings"]["vocab_size"]
    train, lengths = split_totals(paths, units, "train", symbols)
    valid, lengths_of_valid = split_totals(paths, units, "valid", symbols)
    drops = Counter(of_duplicates)
    for step in steps:
        drops.update(step["dropped"])
    documents = {
        "in": steps[0]["documents out"],
        "train": train.pop("documents"),
        "valid": valid.pop("documents"),
        "dropped": {reason: n for reason, n in sorted(drops.items()) if n},
    }
    assert documents["in"] == documents["train"] + documents["valid"] + sum(drops.values()), documents
    steps.append(
        {
            "name": "duplicates",
            "documents in": documents["train"] + documents["valid"] + sum(of_duplicates.values()),
            "documents out": documents["train"] + documents["valid"],
            "dropped": of_duplicates,
            "counts": {split: documents[split] for split in ("train", "valid")},
        }
    )
    examples, names, documents_of = gather_notes(paths, units, origins)
    return {
        "format_version": FORMAT_VERSION,
        "settings": plan["settings"],
        "inputs": [{**entry, "documents": documents_of[entry["path"]]} for entry in plan["inputs"]],
        "documents": documents,
        "steps": steps,
        "dropped_names": names,
        "examples": examples,
        "vocabulary": json.loads(paths.vocabulary.read_text()),
        "train": train,
        "valid": valid,
        "lengths": {
            name: {"edges": LENGTH_EDGES.tolist(), "counts": (counts + lengths_of_valid[name]).tolist()}
            for name, counts in lengths.items()
        },
        "shards": shards,
        "versions": plan["versions"],
        "timing": timing,
    }


def stage_totals(folder: Path) -> dict[str, StepTotals]:
    """The counts of a stage's tasks, added up by step.

    ``peak memory`` is the largest of the tasks, not their sum.
    """
    totals: dict[str, StepTotals] = {}
    for path in sorted((folder / "stats").glob("*.json")):
        for step in json.loads(path.read_text()):
            counts = totals.setdefault(step["name"].split(": ", 1)[1], defaultdict(float))
            for label, value in step["stats"].items():
                total = value["total"] if isinstance(value, dict) else value
                counts[label] = max(counts[label], total) if label == "peak memory" else counts[label] + total
    return totals


def steps_of_words(totals: dict[str, StepTotals]) -> list[dict[str, Any]]:
    """The manifest's list of steps that documents pass through."""
    flow = ("documents in", "documents out", "characters in", "characters out")
    return [
        {
            "name": name,
            **{label: int(counts[label]) for label in flow if label in counts},
            "dropped": dropped(counts),
            "counts": {
                label: int(value)
                for label, value in sorted(counts.items())
                if label not in (*flow, CORE_SECONDS) and not label.startswith(DROPPED)
            },
        }
        for name, counts in totals.items()
        if name != "task"
    ]


def dropped(counts: StepTotals) -> dict[str, int]:
    """The number of documents a step dropped, by reason."""
    reasons = {label.removeprefix(DROPPED): int(n) for label, n in counts.items() if label.startswith(DROPPED)}
    return dict(sorted(reasons.items()))


def gather_notes(
    paths: WorkPaths, units: int, origins: dict[str, str]
) -> tuple[dict[str, list], dict[str, list[str]], Counter[str]]:
    """The first examples of every step, the first names of what was dropped by reason, documents by input file."""
    examples: dict[str, list] = defaultdict(list)
    names: dict[str, list[str]] = defaultdict(list)
    documents: Counter[str] = Counter()
    for damage in sorted(paths.root.glob(f"cut/*/{DAMAGE_FILE}")):
        names["bad file"].append(damage.read_text(encoding="utf-8"))
    for unit in range(units):
        notes = json.loads((paths.store(unit) / NOTES_FILE).read_text(encoding="utf-8"))
        for step, pairs in notes["examples"].items():
            examples[step] += pairs[: EXAMPLES - len(examples[step])]
        for reason, found in notes["dropped"].items():
            names[reason] += found[: max(0, NAMES_OF_DROPPED - len(names[reason]))]
        documents.update(notes["documents"])
    first_of_part, of_file = {}, Counter()
    for path, origin in origins.items():  # in the order of the file
        first_of_part[path], of_file[origin] = of_file[origin], of_file[origin] + documents.pop(path, 0)
    names = {reason: [_in_input(name, origins, first_of_part) for name in found] for reason, found in names.items()}
    return dict(examples), dict(sorted(names.items())), documents + of_file


def _in_input(name: str, origins: Mapping[str, str], first_of_part: Mapping[str, int]) -> str:
    """``FILE:NUMBER`` of a document, or another remark, in the input; its parts are gone by now."""
    part, _, number = name.rpartition(":")
    if part in origins and number.isdecimal():
        return f"{origins[part]}:{first_of_part[part] + int(number)}"
    part = next((part for part in origins if name.startswith(part)), None)
    return f"{origins[part]}, a part of it{name.removeprefix(part)}" if part else name


def timing(paths: WorkPaths, tasks_of: dict[str, int], megabytes: float, workers: int) -> dict[str, Any]:
    """The cost of the stages; ``tasks_of`` gives the number of tasks of each.

    Core seconds cover the tasks only: starting processes, and the command itself, come on top.
    """
    entries, steps = [], {}
    for name, tasks in tasks_of.items():
        seconds = sum(map(float, (paths.stage(name) / "seconds").read_text().split()))
        totals = stage_totals(paths.stage(name))
        meter = totals.pop("task")
        steps.update({step: round(counts[CORE_SECONDS], 3) for step, counts in totals.items()})
        entries.append(
            {
                "name": name,
                "seconds": round(seconds, 3),
                "core_seconds": round(meter[CORE_SECONDS], 3),
                "tasks": tasks,
                "peak_memory_bytes": int(meter["peak memory"]),
            }
        )
    core_seconds = sum(entry["core_seconds"] for entry in entries)
    return {
        "workers": workers,
        "seconds": round(sum(entry["seconds"] for entry in entries), 3),
        "stages": entries,
        "steps": steps,
        "megabytes": megabytes,
        "megabytes_per_core_second": round(megabytes / core_seconds, 3),
        "peak_disk_bytes": sum(path.stat().st_size for path in paths.root.rglob("*") if path.is_file()),
    }


def split_totals(
    paths: WorkPaths, units: int, split: str, symbols: int
) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """The totals of a split, and the histograms of its lengths."""
    parts = [json.loads(paths.ids(unit, "json").read_text())[split] for unit in range(units)]
    unigrams = load_unigrams((paths.ids(unit, split) for unit in range(units)), symbols)
    tokens, unknown, sentences = (sum(part[name] for part in parts) for name in ("tokens", "unknown", "sentences"))
    share = unigrams[unigrams > 0] / max(1, unigrams.sum())
    lengths = {name: sum(np.array(part["lengths"][name]) for part in parts) for name in parts[0]["lengths"]}
    return {
        "documents": sum(part["documents"] for part in parts),
        "sentences": sentences,
        "tokens": tokens,
        "unknown_share": unknown / tokens if tokens else None,  # None: the split is empty
        "unigram_entropy_bits": float(-(share * np.log2(share)).sum()) if tokens else None,
    }, lengths
