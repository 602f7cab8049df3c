"""manifest.json -> report.html: one page without links to anything outside it, a minute's read."""

from collections import defaultdict
from pathlib import Path, PurePosixPath
from typing import Any

from lazyformer_fairseq.corpus.report import html
from lazyformer_fairseq.corpus.report.html import Html, count, duration, percent, short, size, table, text
from lazyformer_fairseq.corpus.report.pictures import picture_of_drops, picture_of_lengths

MOST_INPUTS = 40  # rows; more files than that are grouped by folder
Manifest = dict[str, Any]


def write_report(manifest: Manifest, path: Path) -> None:
    """Writes the page; the same manifest gives the same bytes."""
    sections = (
        _headline(manifest),
        _section("What was read", _inputs(manifest["inputs"])),
        _section("What each step did", _steps(manifest["steps"])),
        _section("Why documents were dropped", _drops(manifest)),
        _section("How long sentences and documents are", _lengths(manifest["lengths"])),
        _section("Vocabulary and splits", _vocabulary(manifest)),
        _section("Where the time went", _timing(manifest["timing"])),
        _section("Before and after each step", _examples(manifest["examples"])),
        _section("Settings and versions", _settings(manifest)),
    )
    # The policy lets a browser load nothing and run nothing, whatever the corpus holds.
    page = f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'; img-src data:">
<title>Corpus report</title>
<style>{html.STYLE}</style>
</head>
<body>
{"".join(sections)}</body>
</html>
"""
    path.write_text(page, encoding="utf-8")


def _section(title: str, content: str) -> str:
    return f"<section>\n<h2>{title}</h2>\n{content}\n</section>\n"


def _headline(manifest: Manifest) -> str:
    documents, timing = manifest["documents"], manifest["timing"]
    dropped = sum(documents["dropped"].values())
    sentences, tokens = (manifest["train"][key] + manifest["valid"][key] for key in ("sentences", "tokens"))
    tiles = (
        (short(documents["in"]), "documents read"),
        (short(documents["train"] + documents["valid"]), "documents kept"),
        (short(dropped), f"documents dropped ({percent(dropped / max(1, documents['in']))})"),
        (short(sentences), "sentences"),
        (short(tokens), "tokens"),
        (percent(manifest["train"]["unknown_share"]), "of the training tokens unknown"),
        (f"{timing['megabytes_per_core_second']:.2f}", "MB per core-second"),
        (duration(timing["seconds"]), f"with {_plural(timing['workers'], 'worker')}"),
    )
    boxes = "".join(f'<div class="tile"><b>{text(value)}</b><span>{text(name)}</span></div>' for value, name in tiles)
    size_read = size(sum(file["bytes"] for file in manifest["inputs"]))
    return (
        f'<h1>Corpus report</h1>\n<p class="soft">{size_read} in {_plural(len(manifest["inputs"]), "file")}, '
        f'{_plural(manifest["shards"], "shard")} of binarised data.</p>\n<div class="tiles">{boxes}</div>\n'
        f'<p class="soft">{count(documents["in"])} documents = {count(documents["train"])} train + '
        f"{count(documents['valid'])} valid + {count(dropped)} dropped.</p>\n"
    )


def _inputs(inputs: list[dict[str, Any]]) -> Html:
    if len(inputs) <= MOST_INPUTS:
        rows = [
            (file["path"], file["format"], size(file["bytes"]), count(file.get("documents")), file["sha256"][:12])
            for file in inputs
        ]
        return table(("file", "format", "size", "documents", "sha256 begins"), rows, "ttnnt")
    return table(("folder", "format", "files", "size", "documents"), _grouped(inputs), "ttnnn")


def _grouped(inputs: list[dict[str, Any]]) -> list[tuple[str, ...]]:
    """Rows of folders and formats, the largest first; those over the limit share one row."""
    groups: dict[tuple[str, str], list[int]] = defaultdict(lambda: [0, 0, 0])
    for file in inputs:
        sums = groups[str(PurePosixPath(file["path"]).parent), file["format"]]
        for place, value in enumerate((1, file["bytes"], file.get("documents", 0))):
            sums[place] += value
    ordered = sorted(groups.items(), key=lambda item: (-item[1][1], item[0]))
    rows = [(*key, *sums) for key, sums in ordered[:MOST_INPUTS]]
    rest = [sums for _, sums in ordered[MOST_INPUTS:]]
    if rest:
        rows.append((f"and {_plural(len(rest), 'more folder')}", "", *map(sum, zip(*rest, strict=True))))
    return [(path, kind, count(files), size(total), count(documents)) for path, kind, files, total, documents in rows]


def _steps(steps: list[dict[str, Any]]) -> Html:
    rows = []
    for step in steps:
        before, after = step.get("characters in"), step.get("characters out")  # the first and last have no such count
        rows.append(
            (
                step["name"],
                count(step.get("documents in")),
                count(step.get("documents out")),
                html.listing(f"{reason} {count(n)}" for reason, n in step["dropped"].items() if n),
                f"{short(before)} → {short(after or 0)}" if before else "–",
                percent((after or 0) / before) if before else "–",
                html.listing(f"{label} {count(n)}" for label, n in step["counts"].items()),
            )
        )
    headers = ("step", "documents in", "out", "dropped", "characters in → out", "share", "also counted")
    return table(headers, rows, "tnntnnt")


def _drops(manifest: Manifest) -> str:
    documents, names = manifest["documents"], manifest["dropped_names"]
    dropped = {reason: n for reason, n in documents["dropped"].items() if n}
    ordered = sorted(dropped, key=lambda reason: (-dropped[reason], reason))
    others = sorted(reason for reason in names if reason not in dropped)  # whole files, say
    rows = [(reason, count(dropped.get(reason)), html.listing(names.get(reason, ()))) for reason in (*ordered, *others)]
    picture = picture_of_drops(dropped, max(1, documents["in"])) if dropped else ""
    if not rows:
        return '<p class="soft">No document was dropped.</p>'
    return picture + table(("reason", "documents", "the first of them"), rows, "tnt")


def _lengths(lengths: dict[str, dict[str, list]]) -> str:
    explanation = "Share of all sentences, or documents, per doubling of the length."
    return f'<p class="soft">{explanation}</p>\n{picture_of_lengths(lengths)}'


def _vocabulary(manifest: Manifest) -> str:
    words = manifest["vocabulary"]
    lost = words["words"] - words["kept_words"]
    rare = (
        f"The {count(lost)} of them ({percent(words['dropped_types_share'])}) that occur fewer than "
        f"{count(words['min_count'])} times become <unk>: {percent(words['dropped_tokens_share'])} of all words in "
        "running text."
    )
    line = text(
        f"{count(words['words'])} different words in the training text. {rare if lost else 'All of them are kept.'} "
        f"The dictionary has {count(words['size'])} entries, all symbols included."
    )
    rows = []
    for name in ("train", "valid"):
        split = manifest[name]
        numbers = (manifest["documents"][name], split["sentences"], split["tokens"])
        entropy = f"{split['unigram_entropy_bits']:.2f}" if split["tokens"] else "–"
        label = name if split["tokens"] else f"{name}: empty"
        rows.append((label, *map(count, numbers), percent(split["unknown_share"]), entropy))
    headers = ("split", "documents", "sentences", "tokens", "unknown", "unigram entropy, bits")
    return f"<p>{line}</p>\n{table(headers, rows, 'tnnnnn')}"


def _timing(timing: dict[str, Any]) -> str:
    stages, steps = timing["stages"], timing["steps"]
    all_seconds = sum(stage["core_seconds"] for stage in stages) or 1.0
    stage_rows = [
        (
            stage["name"],
            count(stage["tasks"]),
            duration(stage["seconds"]),
            duration(stage["core_seconds"]),
            html.bar(stage["core_seconds"] / all_seconds),
            size(stage["peak_memory_bytes"]),
        )
        for stage in stages
    ]
    step_sum = sum(steps.values()) or 1.0
    step_rows = [(name, duration(n), percent(n / step_sum), html.bar(n / step_sum)) for name, n in steps.items()]
    line = (
        f"{short(timing['megabytes'])} MB of text, {duration(timing['seconds'])} with "
        f"{_plural(timing['workers'], 'worker')}, {timing['megabytes_per_core_second']:.2f} MB per core-second; "
        f"at most {size(timing['peak_disk_bytes'])} of disk."
    )
    stage_headers = ("stage", "tasks", "passed", "core time", "", "peak memory of a task")
    return (
        f"<p>{text(line)}</p>\n<h3>By stage</h3>\n{table(stage_headers, stage_rows, 'tnnntn')}\n"
        f"<h3>By step</h3>\n{table(('step', 'core time', 'share', ''), step_rows, 'tnnt')}"
    )


def _examples(examples: dict[str, list[list[str]]]) -> str:
    parts = []
    for step, pairs in examples.items():
        if pairs:
            rows = [html.marked(before, after) for before, after in pairs]
            parts.append(f"<h3>{text(step)}</h3>\n{table(('before', 'after'), rows, 'ee')}")
    return "\n".join(parts) or '<p class="soft">No step changed anything.</p>'


def _settings(manifest: Manifest) -> str:
    tables = (("setting", flat(manifest["settings"])), ("package", manifest["versions"]))
    return "\n".join(table((title, ""), values.items()) for title, values in tables)


def flat(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """``{"text": {"seed": 1}}`` becomes ``{"text.seed": 1}``."""
    result = {}
    for name, value in values.items():
        inner = flat(value, f"{prefix}{name}.") if isinstance(value, dict) else {f"{prefix}{name}": value}
        result.update(inner)
    return result


def _plural(number: int, noun: str) -> str:
    return f"{count(number)} {noun}{'s' * (number != 1)}"
