"""Builds a corpus: plans, runs the stages in a work folder, lets a stopped run resume, puts the result in place."""

import hashlib
import json
import os
import shutil
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Optional, Union

from tqdm import tqdm

from lazyformer_fairseq.corpus.executors import (
    ExecutorSettings,
    progress_bar,
    run_tasks,
    start_fork_server,
    wait_for_workers,
)
from lazyformer_fairseq.corpus.manifest import DROPPED, PACKAGES, describe, gather_notes, stage_totals, timing
from lazyformer_fairseq.corpus.readers.documents import FORMATS
from lazyformer_fairseq.corpus.readers.inputs import InputFile, find_inputs, must_be_cut, plan_units
from lazyformer_fairseq.corpus.report import write_report
from lazyformer_fairseq.corpus.sentences import load_splitter
from lazyformer_fairseq.corpus.settings import CorpusSettings
from lazyformer_fairseq.corpus.stages import RESULT, Stage, WorkPaths, cut_stage, later_stages
from lazyformer_fairseq.corpus.step import NOT_UTF8
from lazyformer_fairseq.data.text.interface import DICTIONARY_FILE, SETTINGS_FILE
from lazyformer_fairseq.data.text.load_tokenizer import load_tokenizer
from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.extras import versions
from lazyformer_fairseq.storage.atomic import remove_leftovers, sync_content
from lazyformer_fairseq.storage.hashes import sha256_of
from lazyformer_fairseq.storage.json_files import read_json, write_json
from lazyformer_fairseq.storage.run_lock import differences, run_lock

PLAN = "plan.json"
MANIFEST = "manifest.json"
PUBLISHED = "published"
MEGABYTE, GIGABYTE = 10**6, 10**9
UNITS_OF_SMALL_INPUT = 64
MOST_LINES = 10
# Not read before the words are stored; what is not possible with a text, such as a vocabulary too large, is among them.
LATE_SETTINGS = ("valid_share", "seed", "word_coverage", "min_word_count", "vocab_size", "shards", "tokenizer")
OPTION_OF_RULE = {
    "too short": " (--min-document-characters)",
    "short, not a sentence": " (--min-line-words)",
    "few letters": " (--min-line-letters)",
}
SMALLEST_UNIT, LARGEST_UNIT = MEGABYTE // 4, 32 * MEGABYTE


def build_corpus(
    inputs: Sequence[str],
    folder: Union[str, Path],
    settings: CorpusSettings = CorpusSettings(),  # noqa: B008 (frozen)
    executor: ExecutorSettings = ExecutorSettings(),  # noqa: B008 (frozen)
) -> dict[str, Any]:
    """Makes ``folder`` from raw ``inputs``: shards, dictionary, tokenizer, manifest.json and report.html.

    Stop it at any time; call it again with the same arguments to resume. The bytes written are the same (but for
    ``timing`` in the manifest), whatever the executor and the number of workers.

    Args:
        inputs: files or folders, each with ``FORMAT:`` before it or without.

    Returns:
        the manifest.

    Raises:
        UserError: an input, the folder or a setting is wrong, or a task stopped, and why.
    """
    folder = Path(folder)
    left_out: list[str] = []
    files = find_inputs(inputs, settings.bad_files, left_out)
    _tell(left_out, files)
    digest = None
    if settings.tokenizer:
        path = os.path.abspath(settings.tokenizer)
        brought = load_tokenizer(path)
        settings = replace(settings, tokenizer=path, vocab_size=len(brought.symbols), text=brought.settings)
        digest = sha256_of(Path(path, SETTINGS_FILE))
    if settings.spacy_model:
        load_splitter(settings.spacy_model)  # names one that cannot do the work now, not in a worker
    if executor.kind == "local" and executor.workers > 1:
        start_fork_server()
    plan = {
        "settings": settings.as_json(digest),
        "versions": versions(PACKAGES, optional=filter(None, [settings.spacy_model])),
        "inputs": describe_inputs(files),
    }
    if manifest := finished_manifest(folder, plan):
        return manifest
    late = {name: plan["settings"][name] for name in LATE_SETTINGS}
    early = {name: value for name, value in plan["settings"].items() if name not in late}
    with work_folder(folder, {**plan, "settings": early}) as root:
        paths = WorkPaths(root)
        wait_for_workers(paths.tasks)
        remove_leftovers(root, deep=True)
        to_read, origins = _cut(paths, files, settings, executor)
        units = plan_units(to_read, unit_bytes(files, settings))
        if not units:
            raise UserError(f"{files[0].path}: is damaged from its start, and there is no other input; get it again")
        shards = settings.shards or -(-sum(file.size for file in files) // GIGABYTE)
        if shards > len(units):
            raise UserError(
                f"--shards {shards}: the input is {len(units)} units of work, and a shard needs one; give at most so "
                "many shards, or a smaller --unit-megabytes"
            )
        _forget_other(late, paths)
        tasks_of = {}
        for stage in later_stages(paths, units, settings, shards):
            _run_stage(paths, stage, executor)
            tasks_of[stage.name] = len(stage.sizes)
            if stage.name == "words":
                _tell_of_words(paths, len(units), origins)
            if stage.name == "duplicates":
                _refuse_empty_split(paths, settings.valid_share)
        megabytes = stage_totals(paths.stage("words"))["clean"]["characters in"] / MEGABYTE
        costs = timing(paths, tasks_of, megabytes, executor.workers)
        manifest = describe(paths, plan, len(units), shards, origins, costs)
        shutil.copytree(paths.tokenizer, paths.result / "tokenizer", dirs_exist_ok=True)
        shutil.copyfile(paths.tokenizer / DICTIONARY_FILE, paths.result / DICTIONARY_FILE)
        write_report(manifest, paths.result / "report.html")
        write_json(paths.result / MANIFEST, manifest)
        publish(root, folder)
    return manifest


def describe_inputs(files: Sequence[InputFile]) -> list[dict[str, Any]]:
    """Name, format, bytes and SHA-256 of every file, with a bar where that takes a while."""
    with (
        tqdm(
            total=sum(file.size for file in files), desc="checking inputs", unit="B", unit_scale=True, disable=None
        ) as bar,
        ThreadPoolExecutor(os.cpu_count()) as pool,
    ):

        def describe_file(file: InputFile) -> dict[str, Any]:
            with open(file.path, "rb") as content:
                digest = hashlib.file_digest(content, "sha256").hexdigest()
            bar.update(file.size)
            return {"path": file.path, "format": file.format, "bytes": file.size, "sha256": digest}

        return list(pool.map(describe_file, files))


def _forget_other(late: dict[str, Any], paths: WorkPaths) -> None:
    """Whoever changes a late setting of an unfinished corpus need not make the words again."""
    chosen = paths.root / "late_settings.json"
    if chosen.exists() and json.loads(chosen.read_text()) == late:
        return
    for folder in (*map(paths.stage, ("duplicates", "count", "tokenizer", "ids", "shards")), paths.result):
        shutil.rmtree(folder, ignore_errors=True)
    write_json(chosen, late)


def unit_bytes(files: Sequence[InputFile], settings: CorpusSettings) -> int:
    """Bytes of input in a unit: by the settings, else few enough that a few workers share a small input evenly."""
    if settings.unit_megabytes:
        return max(1, round(settings.unit_megabytes * MEGABYTE))
    total = sum(file.size for file in files)
    return min(max(total // UNITS_OF_SMALL_INPUT, SMALLEST_UNIT), LARGEST_UNIT)


def _cut(
    paths: WorkPaths, files: Sequence[InputFile], settings: CorpusSettings, executor: ExecutorSettings
) -> tuple[list[InputFile], dict[str, str]]:
    """The files to read, with parts in place of those that cannot be read in pieces; the file of each part."""
    size = unit_bytes(files, settings)
    to_cut = [file for file in files if must_be_cut(file, size)]
    if to_cut:
        _run_stage(paths, cut_stage(paths, to_cut, size, settings), executor)
    to_read, origins = [], {}
    for file in files:
        if file not in to_cut:
            to_read.append(file)
            continue
        for part in sorted(paths.cut(to_cut.index(file)).glob("part-*")):
            to_read.append(InputFile(str(part), file.format, part.stat().st_size))
            origins[str(part)] = file.path
    return to_read, origins


def _run_stage(paths: WorkPaths, stage: Stage, executor: ExecutorSettings) -> None:
    folder = paths.stage(stage.name)
    for name in ("progress", "completions"):
        (folder / name).mkdir(parents=True, exist_ok=True)
    in_bytes = any(size > 1 for size in stage.sizes)
    began = time.monotonic()
    try:
        with progress_bar(stage.name, stage.sizes, folder / "completions", folder / "progress", in_bytes):
            run_tasks(stage.pipeline, len(stage.sizes), folder, executor)
    finally:
        with (folder / "seconds").open("a") as file:  # of this run; a resumed run adds a line
            file.write(f"{time.monotonic() - began}\n")


def _tell_of_words(paths: WorkPaths, units: int, origins: dict[str, str]) -> None:
    """Reports what reading and cleaning dropped and by which rule, before hours of work on the rest.

    Raises:
        UserError: nothing is left.
    """
    steps = stage_totals(paths.stage("words"))
    read = steps["read"]
    documents, lines = (f"{read.get('documents out', 0):,.0f} documents", f"{steps['clean']['lines in']:,.0f} lines")
    of_documents, of_lines = _by_rule(steps, DROPPED), _by_rule(steps, "lines dropped: ")
    if not steps["store"].get("documents out"):
        raise UserError(f"none of the {documents} is left: dropped {of_documents}; of {lines}: {of_lines or 'none'}")
    for dropped, of in ((of_documents, documents), (of_lines, lines)):
        if dropped:
            tqdm.write(f"dropped of {of}: {dropped}", file=sys.stderr)
    if number := read.get(NOT_UTF8):
        names = dict.fromkeys(origins.get(path, path) for path in gather_notes(paths, units, origins)[1][NOT_UTF8])
        tqdm.write(
            f"{number:,.0f} lines are not UTF-8 and were read as Windows-1252, perhaps wrongly (iconv converts files); "
            f"the first are in {', '.join(names)}",
            file=sys.stderr,
        )


def _by_rule(steps: dict[str, dict[str, float]], label: str) -> str:
    dropped: Counter[str] = Counter()
    for counts in steps.values():
        dropped.update({name.removeprefix(label): int(n) for name, n in counts.items() if name.startswith(label)})
    del dropped["empty"]  # lines
    return ", ".join(f"{n:,} {rule}{OPTION_OF_RULE.get(rule, '')}" for rule, n in dropped.most_common() if n)


def _refuse_empty_split(paths: WorkPaths, valid_share: float) -> None:
    counts = stage_totals(paths.stage("duplicates"))["duplicates"]
    for split in ("train", "valid"):
        if not counts[split] and (split == "train" or valid_share):
            raise UserError(
                f"none of the {counts['train'] + counts['valid']:,.0f} documents fell into the {split} split "
                f"(--valid-share {valid_share}); give more documents, or another share or seed; --valid-share 0 holds "
                "out none"
            )


def _tell(left_out: Sequence[str], files: Sequence[InputFile]) -> None:
    """Reports the format of each input: a guess may not be what the user meant."""
    for name, format in FORMATS.items():
        if sizes := [file.size for file in files if file.format == name]:
            what = f"{len(sizes):,} {'file' if len(sizes) == 1 else 'files'}, {sum(sizes) / MEGABYTE:,.1f} MB"
            tqdm.write(f"read as {name}: {what}; a document is {format.document}", file=sys.stderr)
    for line in left_out[:MOST_LINES]:
        tqdm.write(f"left out: {line}", file=sys.stderr)
    if len(left_out) > MOST_LINES:
        tqdm.write(f"left out: {len(left_out) - MOST_LINES:,} more files", file=sys.stderr)


def finished_manifest(folder: Path, plan: dict[str, Any]) -> Optional[dict[str, Any]]:
    """The manifest of an existing corpus; None where ``folder`` does not exist, or is empty.

    Raises:
        UserError: ``folder`` holds something else, or a corpus of another ``plan``; names the difference.
    """
    if not folder.exists() or (folder.is_dir() and not any(folder.iterdir())):
        return None
    try:
        manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        _refuse_other_plan({name: manifest[name] for name in plan}, plan, folder)
    except UserError:
        raise
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError):
        raise UserError(f"{folder}: exists already; remove it or choose another folder") from None
    return manifest


@contextmanager
def work_folder(folder: Path, plan: dict[str, Any]) -> Iterator[Path]:
    """Yields the folder ``.NAME.unfinished`` beside ``folder``, as the last run of the same plan left it.

    Raises:
        UserError: it cannot be made, another run is at work in it, or it was begun with another ``plan``.
    """
    work = folder.absolute().with_name(f".{folder.absolute().name}.unfinished")
    if (work / PUBLISHED).exists() and not (work / RESULT).exists():
        shutil.rmtree(work)  # what publish() was stopped at
    with run_lock(work):
        if (work / PLAN).exists():
            _refuse_other_plan(read_json(work / PLAN), plan, work)
        else:
            write_json(work / PLAN, plan)
        yield work


def publish(work: Path, folder: Path) -> None:
    """Gives the folder ``result`` inside ``work`` the name ``folder``, and removes the rest of ``work``."""
    (work / PUBLISHED).touch()  # from now on a work folder without a result is rubbish, whole or not
    sync_content(work / RESULT)
    if folder.is_dir():
        folder.rmdir()  # an empty one, see finished_manifest
    os.replace(work / RESULT, folder)
    shutil.rmtree(work)


def _refuse_other_plan(there: dict[str, Any], plan: dict[str, Any], folder: Path) -> None:
    for group in ("settings", "versions"):
        begun_with = {name: there[group].get(name) for name in plan[group]}
        if differing := differences(begun_with, plan[group]):
            raise UserError(
                f"{folder} was begun with other {group} ({differing}); give the same, remove it, or choose another "
                "folder"
            )
    before = {(entry["path"], entry["format"]): entry["sha256"] for entry in there["inputs"]}
    now = {(entry["path"], entry["format"]): entry["sha256"] for entry in plan["inputs"]}
    if list(before.items()) != list(now.items()):
        changed = sorted({path for path, _ in set(before.items()) ^ set(now.items()) for path in path[:1]})
        raise UserError(
            f"{folder} was begun with other inputs ({changed[0] if changed else 'in another order'} differs); "
            "give the same, remove it, or choose another folder"
        )
