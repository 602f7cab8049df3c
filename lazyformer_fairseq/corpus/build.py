"""Plans the build of a corpus, runs its stages in a work folder, resumes a stopped run, and publishes the result."""

import os
import shutil
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Optional, Union

from lazyformer_fairseq.corpus import stages
from lazyformer_fairseq.corpus.manifest import (
    DROPPED,
    PACKAGES,
    describe,
    gather_notes,
    plural,
    stage_totals,
    write_report,
)
from lazyformer_fairseq.corpus.readers.formats import FORMATS
from lazyformer_fairseq.corpus.readers.inputs import InputFile, find_inputs, must_be_cut, plan_units
from lazyformer_fairseq.corpus.remote_work import (
    LATE_SETTINGS,
    MANIFEST,
    PLAN,
    RemoteWork,
    remote_work,
    run_remote_task,
)
from lazyformer_fairseq.corpus.sentences import load_splitter
from lazyformer_fairseq.corpus.settings import VOCAB_SIZE, CorpusSettings
from lazyformer_fairseq.corpus.steps import BAD_RECORD, NOT_UTF8
from lazyformer_fairseq.corpus.wiki_words import TABLE
from lazyformer_fairseq.corpus.words import WordStore
from lazyformer_fairseq.data.text.interface import DICTIONARY_FILE, SETTINGS_FILE
from lazyformer_fairseq.data.text.tokenizer import load_tokenizer
from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.executors.interface import Executor
from lazyformer_fairseq.executors.local import Local
from lazyformer_fairseq.extras import versions
from lazyformer_fairseq.progress import Progress
from lazyformer_fairseq.storage.atomic import copy_file, remove_leftovers, sync_content, unfinished_name, write_text
from lazyformer_fairseq.storage.checked import as_type
from lazyformer_fairseq.storage.json_files import read_json, sha256_of, write_json
from lazyformer_fairseq.storage.remote import is_url, local_copy, remove, remove_copies
from lazyformer_fairseq.storage.run_lock import differences, run_lock

MEGABYTE = 10**6
GIGABYTE = 10**9
PUBLISHED = "published"
UNITS_OF_SMALL_INPUT = 64
SMALLEST_UNIT = MEGABYTE // 4
LARGEST_UNIT = 32 * MEGABYTE
MOST_LINES = 10
WORKER_IMPORTS = "lazyformer_fairseq.corpus.worker_imports"  # takes seconds to import, so all workers share one import
# No stage reads these settings before the words are stored. They may therefore be changed while a corpus is unfinished,
# for example if the vocabulary turns out to be too large for the text.
DECIDED_LATE = ("valid_share", "seed", "word_coverage", "vocab_size", "shards", "tokenizer")
OPTION_OF_RULE = {
    "too short": " (--min-document-characters)",
    "short, not a sentence": " (--min-line-words)",
    "few letters": " (--min-line-letters)",
    BAD_RECORD: " (--bad-input skip)",
}


def build_corpus(
    inputs: Sequence[str],
    folder: Union[str, Path],
    settings: CorpusSettings = CorpusSettings(),  # noqa: B008 (frozen)
    workers: int = 1,
    word_budget: Optional[int] = None,
    executor: Optional[Executor] = None,
) -> dict[str, Any]:
    """Build a corpus (shards, dictionary, tokenizer, manifest.json and report.html) from raw text.

    The build can be stopped at any time; the same call resumes it. Except for the timings in manifest.json and
    report.html, the output is byte-identical for any number of workers.

    Args:
        inputs: paths or URLs of files or folders, each optionally preceded by ``FORMAT:``.
        folder: path or URL of the corpus to build.
        settings: the settings, which together with the inputs determine the corpus byte for byte.
        workers: number of tasks to run in parallel on this machine.
        word_budget: maximum number of words (separated by spaces) that both splits together may have after cleaning;
            None for no limit.
        executor: runs the tasks; None to run them on this machine.

    Returns:
        the manifest.

    Raises:
        UserError: an input, the folder or a setting is invalid, or a task failed; the message says why.
    """
    if executor is None and workers > 1:
        with Local(workers, preload=[WORKER_IMPORTS], keeps_processes=True) as here:
            return build_corpus(inputs, folder, settings, workers, word_budget, here)
    if is_url(folder):
        with remote_work(str(folder)) as remote:
            return _build(inputs, remote.folder, settings, workers, word_budget, executor, remote=remote)
    return _build(inputs, Path(folder), settings, workers, word_budget, executor)


def _build(
    inputs: Sequence[str],
    folder: Path,
    settings: CorpusSettings,
    workers: int,
    word_budget: Optional[int],
    executor: Optional[Executor],
    *,
    remote: Optional[RemoteWork] = None,
) -> dict[str, Any]:
    """Build a corpus as :func:`build_corpus` does, in a local folder that may be the copy of a remote one."""
    folder = folder.resolve()  # the finished result cannot replace a symlink or "."
    left_out: list[str] = []
    files = find_inputs(inputs, settings.bad_input, left_out)
    _report_inputs(left_out, files)
    settings, digest = _with_tokenizer(settings)
    packages = list(PACKAGES)
    if settings.spacy_model:
        load_splitter(settings.spacy_model)  # reports an unusable model here rather than in a worker
        packages.append(settings.spacy_model)
    plan = {
        "settings": settings.as_json(digest),
        "versions": versions(packages),
        "inputs": describe_inputs(files),
    }

    origins: dict[str, str] = {}
    manifest = finished_manifest(folder, plan)
    if manifest:
        size = manifest["vocabulary"]["size"]
        if settings.vocab_size not in (None, size):
            raise UserError(
                f"{folder} contains a corpus with a vocabulary of only {size} symbols, because its text is small; omit "
                "--vocab-size, or remove the folder"
            )
        remove_leftovers(folder.parent, folder.name)
        remove_published_work(folder)
    else:
        late = {name: plan["settings"][name] for name in DECIDED_LATE}
        late["vocab_size"] = settings.vocab_size
        early = {name: value for name, value in plan["settings"].items() if name not in late}
        with work_folder(folder, {**plan, "settings": early}) as root:
            job = stages.Job(stages.WorkPaths(root), settings, unit_bytes(files, settings), ())
            stages.wait_for_workers(job.paths.tasks)
            remove_leftovers(root, deep=True)

            job, origins = _run_stages(job, files, late, word_budget, executor, remote)
            if executor is not None:
                workers = min(executor.free, len(job.units))
            manifest = describe(job, plan, origins, workers)
            _write_result(job.paths, manifest)
            if remote:
                remote.publish()
            else:
                publish(root, folder)

    for path in [*origins, *(file.path for file in files)]:
        if is_url(path):
            remove_copies(path)
    return manifest


def _run_stages(
    job: stages.Job,
    files: Sequence[InputFile],
    late: dict[str, Any],
    word_budget: Optional[int],
    executor: Optional[Executor],
    remote: Optional[RemoteWork],
) -> tuple[stages.Job, dict[str, str]]:
    """Run all stages.

    Returns:
        the job with its units, and a dictionary that contains, for each part of a file that was cut, the path of that
        file.
    """
    paths = job.paths
    if remote:
        remote.send([PLAN])
    job = replace(job, to_cut=[file for file in files if must_be_cut(file, job.unit_bytes)])
    if job.to_cut:
        _run_stage("cut", stages.cut_one, [file.size for file in job.to_cut], job, executor, remote)
    to_read, origins = _with_parts(files, job, remote)
    job = _planned(job, files, to_read)
    _discard_stale_results(late, paths, remote)
    stages.loaded_tokenizer.cache_clear()  # may contain the tokenizer of an earlier corpus at the same path
    for stage, (task, sizes) in stages.STAGES.items():
        _run_stage(stage, task, sizes(job), job, executor, remote)
        if stage == "words":
            _report_dropped(job, origins)
        if stage == "tokenizer":
            size = read_json(paths.vocabulary)["size"]
            if size < (job.settings.vocab_size or VOCAB_SIZE):
                _say(f"vocabulary: {size:,} symbols, because the text is small; use --vocab-size to change this")
        if stage == "duplicates":
            _refuse_empty_split(paths, job.settings.valid_share)
            _refuse_empty_shard(job)
            _refuse_too_many_words(job, word_budget)
    return job, origins


def _write_result(paths: stages.WorkPaths, manifest: dict[str, Any]) -> None:
    """Write a corpus's tokenizer, dictionary, report and manifest, which are everything in it except the shards."""
    shutil.copytree(paths.tokenizer, paths.result / "tokenizer", copy_function=copy_file, dirs_exist_ok=True)
    copy_file(paths.tokenizer / DICTIONARY_FILE, paths.result / DICTIONARY_FILE)
    write_report(manifest, paths.result / "report.html")
    write_json(paths.result / MANIFEST, manifest)


def _run_stage(
    stage: str,
    task: stages.Task,
    sizes: Sequence[int],
    job: stages.Job,
    executor: Optional[Executor],
    remote: Optional[RemoteWork],
) -> None:
    """Run a stage's tasks; if the work folder is at a URL, fetch the results that this process needs."""
    folder = job.paths.tasks / stage
    if remote is None:
        stages.run_tasks(partial(task, job), sizes, folder, executor)
        return
    if stage == "tokenizer" and job.settings.tokenizer:
        executor = None  # the user's tokenizer may exist only on this machine
    stages.run_tasks(partial(run_remote_task, remote, stage, job), sizes, folder, executor, keeps_counts=True)
    remote.fetch_after(stage, job)


def _with_tokenizer(settings: CorpusSettings) -> tuple[CorpusSettings, Optional[str]]:
    """Apply the user's tokenizer, if any, to the settings; return the settings and the tokenizer's digest, if any."""
    if not settings.tokenizer:
        return settings, None
    path = os.path.abspath(settings.tokenizer)
    brought = load_tokenizer(path)
    settings = replace(settings, tokenizer=path, vocab_size=len(brought.symbols), text=brought.settings)
    return settings, sha256_of(Path(path, SETTINGS_FILE))


def describe_inputs(files: Sequence[InputFile]) -> list[dict[str, Any]]:
    """Return each file's path, format, size in bytes and SHA-256, showing a progress bar while hashing."""
    scale = {"unit": "B", "unit_scale": True}
    with (
        Progress(total=sum(file.size for file in files), desc="checking inputs", **scale) as bar,
        ThreadPoolExecutor(os.cpu_count()) as pool,
    ):

        def describe_file(file: InputFile) -> dict[str, Any]:
            digest = sha256_of(Path(local_copy(file.path)))
            bar.update(file.size)
            return {"path": file.path, "format": file.format, "bytes": file.size, "sha256": digest}

        return list(pool.map(describe_file, files))


def unit_bytes(files: Sequence[InputFile], settings: CorpusSettings) -> int:
    """Return the bytes of input per unit: the configured size, or one that lets several workers share a small input."""
    if settings.unit_megabytes:
        return max(1, round(settings.unit_megabytes * MEGABYTE))
    total = sum(file.size for file in files)
    return min(max(total // UNITS_OF_SMALL_INPUT, SMALLEST_UNIT), LARGEST_UNIT)


def _with_parts(
    files: Sequence[InputFile], job: stages.Job, remote: Optional[RemoteWork]
) -> tuple[list[InputFile], dict[str, str]]:
    """List the files to read, with each file that was cut replaced by its parts.

    Returns:
        the files to read, and a dictionary that contains, for each part, the path of the file from which it was cut.
    """
    to_read = []
    origins = {}
    for file in files:
        if file not in job.to_cut:
            to_read.append(file)
            continue
        folder = job.paths.of("cut", job.to_cut.index(file))
        for part in sorted(folder.glob("part-*")):
            first_line = int(part.name.split(".")[1])
            size = part.stat().st_size
            path = str(part)
            if remote:
                path = f"{remote.work_url}/{part.relative_to(job.paths.root)}"
            to_read.append(replace(file, path=path, size=size, first_line=first_line))
            origins[path] = file.path
    return to_read, origins


def _planned(job: stages.Job, files: Sequence[InputFile], to_read: Sequence[InputFile]) -> stages.Job:
    """Return the job with its units and its number of shards.

    Raises:
        UserError: there are no units, or fewer units than shards.
    """
    units = plan_units(to_read, job.unit_bytes)
    if not units:
        raise UserError(f"{files[0].path} is damaged from the start, and there is no other input; get a new copy")
    total = sum(file.size for file in files)
    shards = job.settings.shards or -(-total // GIGABYTE)
    if shards > len(units):
        raise UserError(
            f"--shards {shards}: each shard needs at least one unit of work, but the input has only {len(units)}; use "
            "at most that many shards"
        )
    return replace(job, units=units, shards=shards)


def _discard_stale_results(late: dict[str, Any], paths: stages.WorkPaths, remote: Optional[RemoteWork]) -> None:
    """Remove all that was built from an unfinished corpus's words if the settings of later stages have changed."""
    chosen = paths.root / LATE_SETTINGS
    if chosen.exists() and read_json(chosen) == late:
        return
    stale = [paths.tasks / stage for stage in stages.STAGES if stage != "words"]
    stale += [paths.tokenizer, paths.result]
    for folder in stale:
        shutil.rmtree(folder, ignore_errors=True)
    write_json(chosen, late)
    if remote:
        for folder in stale:
            remove(f"{remote.work_url}/{folder.relative_to(paths.root)}")
        remote.send([LATE_SETTINGS])


def _report_inputs(left_out: Sequence[str], files: Sequence[InputFile]) -> None:
    """Report the skipped files, and the formats of the others, because a format may have been detected wrongly."""
    for name, format in FORMATS.items():
        if sizes := [file.size for file in files if file.format == name]:
            what = f"{plural(len(sizes), 'file')}, {sum(sizes) / MEGABYTE:,.1f} MB"
            _say(f"read as {name}: {what}; a document is {format.document}")
    nameless = [file.path for file in files if file.format == "mediawiki" and not file.left_out_namespaces]
    if nameless:
        _say(
            f"{', '.join(nameless[:3])}: no <siteinfo> with the names of namespaces; links to images and categories "
            f"are recognized only if their namespaces are named in one of {len(TABLE)} languages"
        )
    for line in left_out[:MOST_LINES]:
        _say(f"skipped: {line}")
    if len(left_out) > MOST_LINES:
        _say(f"skipped: {len(left_out) - MOST_LINES:,} more, which are not listed")


def _report_dropped(job: stages.Job, origins: dict[str, str]) -> None:
    """Report what reading and cleaning dropped, by rule, before hours are spent on the rest.

    Raises:
        UserError: nothing is left.
    """
    steps = stage_totals(job.paths.tasks / "words")
    read = steps["read"]
    documents = f"{read['documents out'] + read[DROPPED + BAD_RECORD]:,.0f} documents"
    lines = f"{steps['clean']['lines in']:,.0f} lines"
    of_documents = _by_rule(steps.values(), DROPPED)
    of_lines = _by_rule(steps.values(), "lines dropped: ")
    if not steps["store"]["documents out"]:
        raise UserError(
            f"none of the {documents} is left. Dropped documents: {of_documents}; lines dropped from {lines}: "
            f"{of_lines or 'none'}. Relax these rules, or use other text"
        )
    for dropped, of in ((of_documents, documents), (of_lines, lines)):
        if dropped:
            _say(f"dropped from {of}: {dropped}")
    if number := read[NOT_UTF8]:
        names = gather_notes(job, origins).dropped[NOT_UTF8]
        files = dict.fromkeys(origins.get(path, path) for path in names)
        _say(
            f"lines that are not UTF-8: {number:,.0f}; they were decoded as Windows-1252. If the files have a "
            f"different encoding, convert them with iconv; the first such lines are in {', '.join(files)}"
        )


def _say(line: str) -> None:
    Progress.write(line, file=sys.stderr)


def _by_rule(steps: Iterable[Counter], label: str) -> str:
    dropped: Counter[str] = Counter()
    for counts in steps:
        for name, n in counts.items():
            if name.startswith(label):
                dropped[name.removeprefix(label)] += n
    del dropped["empty"]  # dropping an empty line loses nothing

    parts = []
    for rule, n in dropped.most_common():
        if n:
            option = OPTION_OF_RULE.get(rule, "")
            parts.append(f"{n:,} {rule}{option}")
    return ", ".join(parts)


def _refuse_empty_split(paths: stages.WorkPaths, valid_share: float) -> None:
    counts = stage_totals(paths.tasks / "duplicates")["duplicates"]
    for split, must_have in (("train", True), ("valid", valid_share > 0)):
        if must_have and not counts[split]:
            raise UserError(
                f"the {split} split is empty (documents in total: {counts['train'] + counts['valid']:,.0f}, "
                f"--valid-share {valid_share}); use more documents, a different --valid-share or a different --seed; "
                "with --valid-share 0, no documents are held out"
            )


def _refuse_empty_shard(job: stages.Job) -> None:
    """Raise a UserError if a shard has no training documents, because all its documents are duplicates or held out."""
    has_text = []
    for unit in range(len(job.units)):
        train = job.documents_of_splits(unit)["train"]
        has_text.append(train.any())
    for rank in range(job.shards):
        if not any(has_text[rank :: job.shards]):
            raise UserError(f"--shards {job.shards}: no training document is left for shard{rank}; use fewer shards")


def _refuse_too_many_words(job: stages.Job, budget: Optional[int]) -> None:
    """Raise a UserError if the text exceeds the word budget, such as the one in BabyLM's rules."""
    words = 0
    for unit, folder in enumerate(job.unit_paths("words")):
        stored = WordStore(folder).running_words
        for documents in job.documents_of_splits(unit).values():
            words += int(stored[documents].sum(dtype="int64"))
    if budget is not None and words > budget:
        raise UserError(f"--word-budget {budget:,}: the text has {words:,} words; use less text, or a larger budget")


def finished_manifest(folder: Path, plan: dict[str, Any]) -> Optional[dict[str, Any]]:
    """Return the manifest of an existing corpus, or None if ``folder`` does not exist or is empty.

    Raises:
        UserError: ``folder`` contains something else, or a corpus built with a different ``plan``; the message names
            the difference.
    """
    if not folder.exists():
        return None
    is_empty = folder.is_dir() and not any(folder.iterdir())
    if is_empty and not folder.is_mount():
        return None
    try:
        manifest = read_json(folder / MANIFEST)
        there = as_type(Plan, manifest, folder / MANIFEST, "remove it")
    except UserError:
        raise UserError(f"{folder} already exists; remove it or choose another folder") from None
    _refuse_other_plan(there, plan, folder)
    return manifest


def work_folder_of(folder: Path) -> Path:
    """Return the work folder in which a corpus is built."""
    return folder.absolute().with_name(f".{folder.absolute().name}.unfinished")


def remove_published_work(folder: Path) -> None:
    """Remove the work folder left behind if :func:`publish` was stopped after renaming the result."""
    work = work_folder_of(folder)
    if (work / PUBLISHED).exists() and not (work / stages.RESULT).exists():
        shutil.rmtree(work)


@contextmanager
def work_folder(folder: Path, plan: dict[str, Any]) -> Iterator[Path]:
    """Yield the work folder ``.NAME.unfinished`` next to ``folder``, as the last run with the same plan left it.

    Raises:
        UserError: the work folder cannot be created, is used by another run, or contains a corpus that was begun with a
            different ``plan``.
    """
    remove_published_work(folder)
    work = work_folder_of(folder)
    with run_lock(work):
        if (work / PLAN).exists():
            there = as_type(Plan, read_json(work / PLAN), work / PLAN, f"remove {work}")
            _refuse_other_plan(there, plan, work)
        write_json(work / PLAN, plan)
        yield work


def publish(work: Path, folder: Path) -> None:
    """Rename the finished corpus ``work/result`` to ``folder``, and remove the rest of ``work``."""
    write_text(work / PUBLISHED, "")  # from now on, a work folder without a result may be deleted
    sync_content(work / stages.RESULT)
    if folder.is_dir():
        folder.rmdir()  # it is empty, see finished_manifest
    os.replace(work / stages.RESULT, folder)
    os.replace(work, rest := unfinished_name(folder))  # if the command is stopped here, the next run removes it
    shutil.rmtree(rest, ignore_errors=True)


@dataclass(frozen=True)
class PlannedInput:
    """An input file of a corpus; a hash identifies the file's content."""

    path: str
    format: str
    sha256: str


@dataclass(frozen=True)
class Plan:
    """The part of a manifest, or of the plan in a work folder, that determines the corpus."""

    settings: dict[str, Any]
    versions: dict[str, Any]
    inputs: list[PlannedInput]


def _refuse_other_plan(there: Plan, plan: dict[str, Any], folder: Path) -> None:
    remedy = "use the same ones as before, remove the folder, or choose another folder"
    settings = dict(there.settings)
    if settings.get("bad_input") == "stop":  # no bad input was found so far, so "skip" would give the same results
        settings["bad_input"] = plan["settings"]["bad_input"]
    for name, found in (("settings", settings), ("versions", there.versions)):
        compared = {key: found.get(key) for key in plan[name]}
        if differing := differences(compared, plan[name]):
            raise UserError(f"{folder} contains a corpus that was begun with different {name} ({differing}); {remedy}")
    now = [PlannedInput(each["path"], each["format"], each["sha256"]) for each in plan["inputs"]]
    if there.inputs != now:
        changed = sorted(each.path for each in {*there.inputs} ^ {*now})
        where = changed[0] if changed else "their order"
        raise UserError(f"{folder} contains a corpus that was begun with different inputs ({where} differs); {remedy}")
