"""The work folder of a corpus at a URL, and each machine's local copy of it.

A task fetches any input files that its machine lacks, works on local files, and uploads its output and finally its
counts. The counts at the URL therefore show which tasks are done, no matter which machine ran them.
"""

import secrets
import shutil
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from fnmatch import fnmatch
from functools import partial
from itertools import chain
from pathlib import Path

from lazyformer_fairseq.corpus.stages import (
    RESULT,
    STAGES,
    Job,
    WorkPaths,
    cut_one,
    run_task,
    wait_for_workers,
    worker_lock,
)
from lazyformer_fairseq.data.count_model import MOST_COUNTED
from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.storage.atomic import UNFINISHED
from lazyformer_fairseq.storage.json_files import read_json
from lazyformer_fairseq.storage.remote import copies, digest, fetch, opened, remove
from lazyformer_fairseq.storage.run_lock import file_lock, run_lock

AT_ONCE = 32  # files to transfer in parallel
PLAN = "plan.json"
LATE_SETTINGS = "late_settings.json"
MANIFEST = "manifest.json"

# Files and folders in the work folder, by stage; {0:05d} is the task's number.
READ = {  # what a task reads besides its input; see also _parts_of_shard
    "cut": (),
    "words": (),
    "duplicates": ("words/*/fingerprints.npy", "words/*/bands.npy"),
    "count": ("words/{0:05d}", "duplicates/{0:05d}.npy"),
    "tokenizer": ("counts",),
    "ids": ("words/{0:05d}", "duplicates/{0:05d}.npy", "tokenizer", "kept_words.npy"),
    "shards": ("tokenizer",),
}
MADE = {  # what a task writes
    "cut": ("cut/{0:05d}",),
    "words": ("words/{0:05d}",),
    "duplicates": ("duplicates",),
    "count": ("counts/{0:05d}",),
    "tokenizer": ("tokenizer", "kept_words.npy", "vocabulary.json"),
    "ids": ("ids/{0:05d}.*",),
    "shards": ("result/shard{0}",),
}
READ_AFTER = {  # what the command reads after a stage, besides the counts
    "cut": ("cut",),
    "words": ("words/*/notes.json", "words/*/running_words.npy"),
    "duplicates": ("duplicates",),
    "count": (),
    "tokenizer": ("tokenizer", "vocabulary.json"),
    "ids": ("ids/*.json", "ids/*.unigrams.npy", "ids/*.valid.*"),
    "shards": (),
}


def _parts_of_shard(job: Job, rank: int) -> list[str]:
    parts = []
    for unit in range(rank, len(job.units), job.shards):
        parts += [f"ids/{unit:05d}.train.bin", f"ids/{unit:05d}.train.idx"]
    if rank == 0:
        parts.append("ids/*.valid.*")
    return parts


@dataclass(frozen=True)
class RemoteWork:
    """The work folder of a corpus at a URL; this object is sent to the machines that run tasks.

    Attributes:
        url: the URL of the corpus to build.
        run: unique name of this run of the command; copies from other runs are discarded.
    """

    url: str
    run: str

    @property
    def home(self) -> Path:
        """The local folder for the copies of the corpus and of its work folder."""
        return copies() / digest(self.url)

    @property
    def folder(self) -> Path:
        """The local copy of the corpus."""
        return self.home / self.url.rpartition("/")[2]

    @property
    def work_url(self) -> str:
        """The URL of the work folder."""
        parent, _, name = self.url.rpartition("/")
        return f"{parent}/.{name}{UNFINISHED}"

    @property
    def paths(self) -> WorkPaths:
        """The paths in the local copy of the work folder."""
        return WorkPaths(self.home / self.work_url.rpartition("/")[2])

    def open(self) -> WorkPaths:
        """Return the paths in the local copy of the work folder; a copy from another run is discarded first."""
        paths = self.paths
        paths.tasks.mkdir(parents=True, exist_ok=True)
        mark = self.home / "run"
        with file_lock(self.home / "opening.lock"):
            if not mark.exists() or mark.read_text() != self.run:
                wait_for_workers(paths.tasks)
                shutil.rmtree(paths.root)
                paths.tasks.mkdir(parents=True)
                mark.write_text(self.run)
        return paths

    def fetch(self, names: Sequence[str], needed: bool = True) -> None:
        """Fetch the files that this machine lacks.

        Args:
            names: files or folders in the work folder, or patterns such as ``ids/*.json``.
            needed: whether every name must match something.

        Raises:
            FileNotFoundError: a needed name matches nothing.
        """
        with opened(self.work_url) as (files, top), ThreadPoolExecutor(AT_ONCE) as pool:

            def files_named(name: str) -> list[str]:
                below = files.find(f"{top}/{name.partition('/*')[0]}")
                found = [path.removeprefix(f"{top}/") for path in below]
                found = [path for path in found if fnmatch(path, name) or path.startswith(f"{name}/")]
                found = [path for path in found if ".." not in path.split("/")]  # .. would escape the local copy
                if needed and not found:
                    raise FileNotFoundError(f"{top}/{name}")
                return found

            def fetch_one(name: str) -> None:
                fetch(files, f"{top}/{name}", self.paths.root / name)

            found_names = chain.from_iterable(pool.map(files_named, names))
            list(pool.map(fetch_one, found_names))

    def send(self, names: Sequence[str]) -> None:
        """Upload the files and folders that match these names or patterns."""
        with opened(self.work_url) as (files, top), ThreadPoolExecutor(AT_ONCE) as pool:
            root = self.paths.root
            found: list[Path] = []
            for name in names:
                for path in root.glob(name):
                    found += [file for file in (path, *path.rglob("*")) if file.is_file()]
            targets = [f"{top}/{file.relative_to(root).as_posix()}" for file in found]
            list(pool.map(files.put_file, map(str, found), targets))

    def fetch_after(self, stage: str, job: Job) -> None:
        """Fetch the files that the command reads after a stage."""
        self.fetch([f"tasks/{stage}", *READ_AFTER[stage]])
        if stage != "ids":
            return
        counted = 0
        for unit in range(len(job.units)):
            if counted < MOST_COUNTED:
                self.fetch([f"ids/{unit:05d}.train.bin", f"ids/{unit:05d}.train.idx"])
                counted += read_json(job.paths.of("ids", unit, ".json"))["train"]["tokens"]

    def fetch_begun(self) -> None:
        """Fetch the results of an earlier run: the manifest of a finished corpus, or else the plan and the counts.

        Raises:
            UserError: something else exists at the URL.
        """
        with opened(self.url) as (files, top):
            if files.exists(f"{top}/{MANIFEST}"):
                fetch(files, f"{top}/{MANIFEST}", self.folder / MANIFEST)
                return
            self.fetch([PLAN, LATE_SETTINGS, "tasks"], needed=False)
            if files.exists(top) and not (self.paths.root / PLAN).exists():
                raise UserError(f"{self.url} already exists; remove it or choose another folder")

    def publish(self) -> None:
        """Copy the result to its URL, file by file; the manifest is copied last."""
        self.send([RESULT])
        with opened(f"{self.work_url}/{RESULT}") as (files, result), opened(self.url) as (_, top):
            manifest = f"{result}/{MANIFEST}"
            names = [name for name in files.find(result) if name != manifest]
            files.copy(names, [top + name.removeprefix(result) for name in names])
            files.copy(manifest, f"{top}/{MANIFEST}")


@contextmanager
def remote_work(url: str) -> Iterator[RemoteWork]:
    """Yield the work folder of a corpus at a URL, as the last run left it; remove it and its local copy at the end.

    Raises:
        UserError: the URL cannot be reached, or another command on this machine is building the same corpus. A
            UserError from the block is re-raised with the URL in its message instead of the local path.
    """
    url = url.rstrip("/")
    parent, _, name = url.rpartition("/")
    if not name or parent.endswith("/"):
        raise UserError(f"{url} is a whole bucket; use a folder in it, such as {url}/data")
    work = RemoteWork(url, secrets.token_hex(8))
    try:
        with run_lock(work.home):
            work.open()
            shutil.rmtree(work.folder, ignore_errors=True)
            work.fetch_begun()
            yield work
            remove(work.work_url)
            shutil.rmtree(work.home)
    except UserError as error:
        message = str(error).replace(f"{work.home}/", f"{parent}/").replace(str(work.home), url)
        raise UserError(message) from error


def run_remote_task(work: RemoteWork, stage: str, job: Job, rank: int) -> int:
    """Run a task on the local copy of the work folder, upload its output, and return its rank."""
    paths = work.open()
    job = replace(job, paths=paths)
    task = cut_one
    if stage in STAGES:
        task, _ = STAGES[stage]
    reads = [name.format(rank) for name in READ[stage]]
    if stage == "shards":
        reads += _parts_of_shard(job, rank)
    with worker_lock(paths.tasks):  # makes a resumed run wait until the last file is uploaded
        work.fetch(reads)
        run_task(partial(task, job), paths.tasks / stage, rank)
        work.send([name.format(rank) for name in MADE[stage]])
        work.send([f"tasks/{stage}/{rank:05d}.json"])
    return rank
