"""Writes a corpus's ``manifest.json``: the inputs, how many documents each step received and dropped, and the timings.

``report.html`` presents the same information in readable form, on one page that loads no resources and runs no scripts.
The page's text and layout are in ``report.html.jinja``. jinja2 escapes every value, because a corpus may contain
anything.
"""

import json
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Optional, Union

import numpy as np
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from lazyformer_fairseq.corpus.readers.inputs import DAMAGE_FILE
from lazyformer_fairseq.corpus.stages import SECONDS_FILE, STAGES, Job, WorkPaths
from lazyformer_fairseq.corpus.steps import BAD_RECORD, DAMAGED_FILE, EXAMPLES, TaskNotes
from lazyformer_fairseq.corpus.vocabulary import load_unigrams
from lazyformer_fairseq.corpus.words import NOTES_FILE
from lazyformer_fairseq.data.count_model import NEIGHBOURS, CountModel, read_tokens
from lazyformer_fairseq.data.frequencies import log_frequencies, unigram_loss_bits
from lazyformer_fairseq.data.text.tokenizer import load_tokenizer
from lazyformer_fairseq.report.numbers import duration, number
from lazyformer_fairseq.storage.atomic import write_text

FORMAT_VERSION = 1
# The result depends on the versions of these packages, in addition to those of Python and the spaCy model.
PACKAGES = ("lazyformer_fairseq", "fairseq-fixed", "numpy", "sacremoses", "sentencepiece", "spacy", "xxhash", "rensa")
NAMES_OF_DROPPED = 10
DROPPED = "dropped: "
MOST_VALIDATED = 200_000  # maximum number of validation tokens on which the table of counts is evaluated
FLOW = ("documents in", "documents out", "characters in", "characters out")


def describe(job: Job, plan: dict[str, Any], origins: dict[str, str], workers: int) -> dict[str, Any]:
    """Return the manifest of a corpus after all stages have run.

    Args:
        job: paths and settings.
        plan: settings, versions and inputs.
        origins: for each part of a file that was cut, the path of that file.
        workers: number of tasks that ran in parallel.
    """
    paths = job.paths
    totals_of_steps = stage_totals(paths.tasks / "words")
    steps = [_step(name, counts) for name, counts in totals_of_steps.items()]
    damaged = len(_damaged_while_cut(job))
    if damaged:
        counts = steps[0]["counts"]
        counts[f"{DAMAGED_FILE}s"] = counts.get(f"{DAMAGED_FILE}s", 0) + damaged

    vocabulary = json.loads(paths.vocabulary.read_text())
    tokens = {}  # for each split, how often each id except ``</s>`` occurs
    for split in ("train", "valid"):
        parts = job.unit_paths("ids", f".{split}")
        tokens[split] = load_unigrams(parts, vocabulary["size"])
    logarithms = log_frequencies(tokens["train"])
    totals = {split: _split_totals(job, split, counts, logarithms) for split, counts in tokens.items()}
    totals["valid"]["neighbours_bits"] = _count_model_loss(job)
    kept = {split: of_split.pop("documents") for split, of_split in totals.items()}
    kept_documents = sum(kept.values())

    duplicates = stage_totals(paths.tasks / "duplicates")["duplicates"]
    duplicates["documents out"] = kept_documents
    duplicates["documents in"] = kept_documents + sum(_dropped(duplicates).values())
    steps.append(_step("duplicates", duplicates))
    dropped: Counter[str] = Counter()
    for step in steps:
        dropped.update(step["dropped"])
    documents = {
        "in": steps[0]["documents out"] + sum(steps[0]["dropped"].values()),
        **kept,
        "dropped": {reason: n for reason, n in sorted(dropped.items()) if n},
    }
    assert documents["in"] == kept_documents + dropped.total(), documents

    notes = gather_notes(job, origins)
    inputs = [{**entry, "documents": notes.documents[entry["path"]]} for entry in plan["inputs"]]
    return {
        "format_version": FORMAT_VERSION,
        "settings": plan["settings"],
        "inputs": inputs,
        "documents": documents,
        "steps": steps,
        "dropped_names": notes.dropped,
        "examples": notes.examples,
        "vocabulary": vocabulary,
        **totals,
        "shards": job.shards,
        "versions": plan["versions"],
        "timing": _timing(paths, workers, steps),
    }


def stage_totals(folder: Path) -> dict[str, Counter]:
    """Return the counts of a stage's tasks, summed per step."""
    totals: dict[str, Counter] = defaultdict(Counter)
    for path in sorted(folder.glob("[0-9]*.json")):
        for step, counts in json.loads(path.read_text()).items():
            totals[step].update(counts)
    return totals


def _step(name: str, counts: Counter) -> dict[str, Any]:
    """Return a step's entry in the manifest."""
    flow = {label: counts[label] for label in FLOW if label in counts}
    others = {}
    for label, n in sorted(counts.items()):
        if label not in FLOW and not label.startswith(DROPPED):
            others[label] = n
    return {"name": name, **flow, "dropped": _dropped(counts), "counts": others}


def _dropped(counts: Counter) -> dict[str, int]:
    """Return the number of documents that a step dropped, by reason."""
    dropped = {}
    for label, n in sorted(counts.items()):
        if label.startswith(DROPPED):
            dropped[label.removeprefix(DROPPED)] = n
    return dropped


def gather_notes(job: Job, origins: dict[str, str]) -> TaskNotes:
    """Merge the notes of all units.

    The result contains the first examples for each step, the names of the first documents dropped for each reason, and
    the number of documents in each input file.
    """
    notes = TaskNotes()
    names: dict[str, list[str]] = defaultdict(list)
    for damage in _damaged_while_cut(job):
        names[DAMAGED_FILE].append(damage.read_text(encoding="utf-8"))
    for folder in job.unit_paths("words"):
        of_unit = json.loads((folder / NOTES_FILE).read_text(encoding="utf-8"))
        for step, pairs in of_unit["examples"].items():
            examples = notes.examples.setdefault(step, [])
            examples += pairs[: EXAMPLES - len(examples)]
        for reason, found in of_unit["dropped"].items():
            room = max(0, NAMES_OF_DROPPED - len(names[reason]))
            names[reason] += found[:room]
        notes.documents.update(of_unit["documents"])

    first_of_part = {}
    for part, origin in origins.items():  # the parts are in file order
        first_of_part[part] = notes.documents[origin]
        notes.documents[origin] += notes.documents.pop(part, 0)
    for reason in sorted(names):
        notes.dropped[reason] = [_in_input(name, origins, first_of_part) for name in names[reason]]
    return notes


def _in_input(name: str, origins: Mapping[str, str], first_of_part: Mapping[str, int]) -> str:
    """Rewrite a note such as ``FILE:NUMBER`` to refer to the input file instead of a part that was cut from it."""
    part, _, number = name.rpartition(":")
    if part in origins and number.isdecimal():
        return f"{origins[part]}:{first_of_part[part] + int(number)}"
    for part, origin in origins.items():
        if name.startswith(part):
            return f"{origin}{name.removeprefix(part)}"
    return name


def _damaged_while_cut(job: Job) -> list[Path]:
    """Return the files that report damage found in compressed input files while they were being cut."""
    return sorted(job.paths.root.glob(f"cut/*/{DAMAGE_FILE}"))


def bad_input_messages(manifest: dict[str, Any]) -> Iterator[str]:
    """Yield a message with a count and an example for each kind of bad input that ``--bad-input skip`` skipped."""
    numbers = {
        BAD_RECORD: manifest["documents"]["dropped"].get(BAD_RECORD, 0),
        DAMAGED_FILE: manifest["steps"][0]["counts"].get(f"{DAMAGED_FILE}s", 0),
    }
    outcomes = {BAD_RECORD: " skipped", DAMAGED_FILE: ", read up to the damage"}
    for name, several in numbers.items():
        if several:
            yield f"{plural(several, name)}{outcomes[name]}; the first: {manifest['dropped_names'][name][0]}"


def _timing(paths: WorkPaths, workers: int, steps: list[dict[str, Any]]) -> dict[str, Any]:
    """Return each stage's duration in seconds, summed over all runs, and the megabytes of text that were cleaned."""
    stages = []
    for stage in STAGES:
        folder = paths.tasks / stage
        seconds = sum(map(float, (folder / SECONDS_FILE).read_text().split()))
        tasks = len(list(folder.glob("[0-9]*.json")))
        stages.append({"name": stage, "seconds": round(seconds, 3), "tasks": tasks})
    return {
        "workers": workers,
        "seconds": round(sum(stage["seconds"] for stage in stages), 3),
        "megabytes": steps[0]["characters out"] / 10**6,
        "stages": stages,
    }


def _split_totals(job: Job, split: str, token_counts: np.ndarray, logarithms: np.ndarray) -> dict[str, Any]:
    """Return a split's totals; ``logarithms`` are the ids' log-frequencies in the training text."""
    parts = []
    for path in job.unit_paths("ids", ".json"):
        counts_of_splits = json.loads(path.read_text())
        parts.append(counts_of_splits[split])

    names = ("documents", "sentences", "words", "tokens", "unknown")
    sums = {name: sum(part[name] for part in parts) for name in names}

    unknown = sums.pop("unknown")
    sums["unknown_share"] = None  # remains None if the split is empty
    sums["frequencies_bits"] = None
    if sums["tokens"]:
        sums["unknown_share"] = unknown / sums["tokens"]
        sums["frequencies_bits"] = unigram_loss_bits(logarithms, token_counts)
    return sums


def _count_model_loss(job: Job) -> Optional[float]:
    """Return the validation loss, in bits per token, of the table of counts when all neighboring tokens are visible.

    Return None if there is no validation text. Sentence ends are visible but not predicted.
    """
    tokenizer = load_tokenizer(job.paths.tokenizer)
    ids = read_tokens(job.unit_paths("ids", ".valid"), MOST_VALIDATED)[None]
    at = ids != tokenizer.special.eos
    if not at.any():
        return None
    train = job.unit_paths("ids", ".train")
    model = CountModel(NEIGHBOURS, len(tokenizer.symbols), read_tokens(train))
    return model.bits(ids, at, ids[at])


Manifest = dict[str, Any]


def write_report(manifest: Manifest, path: Path) -> None:
    """Write the report page; the output is byte-identical for equal manifests."""
    settings = manifest["settings"]
    flat_settings = {name: value for name, value in settings.items() if name != "text"}
    flat_settings |= {f"text.{name}": value for name, value in settings["text"].items()}

    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        finalize=visible,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters.update(count=count, short=short, percent=percent, duration=duration, plural=plural)
    page = environment.get_template("report.html.jinja").render(
        **manifest,
        reasons=_reasons(manifest),
        flat_settings=flat_settings,
    )
    write_text(path, page)


def _reasons(manifest: Manifest) -> list[tuple[str, Optional[int], list[str]]]:
    """Return (reason, number of documents, names of the first documents) for each reason, most frequent first.

    Reasons that drop no documents, such as a damaged file, come last.
    """
    most_frequent_first = Counter(manifest["documents"]["dropped"]).most_common()
    dropped = {reason: n for reason, n in most_frequent_first if n}
    names = manifest["dropped_names"]
    ordered = dict.fromkeys([*dropped, *sorted(names)])
    return [(reason, dropped.get(reason), names.get(reason, [])) for reason in ordered]


def visible(value: Any) -> Any:
    """Return a value as text, with newlines shown as ↵ and invisible characters shown as codes.

    Invisible characters include control characters, direction marks and lone surrogates.
    """
    if isinstance(value, Markup):
        return value
    text = str(value).replace("\n", " ↵ ")
    return "".join(character if character.isprintable() else f"⟨U+{ord(character):04X}⟩" for character in text)


def count(value: Optional[float]) -> str:
    """Format a number without decimals, or None as a dash."""
    if value is None:
        return "–"
    return f"{value:,.0f}"


def plural(several: int, noun: str) -> str:
    """Format a count with its noun in the singular or plural."""
    if several == 1:
        return f"1 {noun}"
    return f"{several:,} {noun}s"


def short(value: Union[int, float]) -> str:
    """Format a number compactly, such as 1,234 or 12.3 M; from one million up, it has three digits and a unit."""
    for size, unit in ((1e12, "T"), (1e9, "G"), (1e6, "M")):
        if value >= 0.9995 * size:
            return f"{number(value / size)} {unit}"
    return f"{value:,.0f}"


def percent(share: Optional[float]) -> str:
    """Format a fraction as a percentage with two significant digits, such as 0.012%; show None and NaN as a dash."""
    if share is None or np.isnan(share):
        return "–"
    rounded = float(f"{100 * share:.2g}")
    return f"{rounded:g}%"
