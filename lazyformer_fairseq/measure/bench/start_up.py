"""What the data costs a run before its first update, stage by stage, and the memory of the processes that read it.

Nothing heavy is imported above the processes that measure: importing is a stage of theirs, and a page that the command
mapped too would count as shared with one process more.
"""

import logging
import multiprocessing
import re
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.util import get_temp_dir
from pathlib import Path

from tqdm import tqdm

from lazyformer_fairseq.child_process import end_with_parent
from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.fairseq_plugin.replacements import Stage as HookStage
from lazyformer_fairseq.fairseq_plugin.replacements import install

PROC = Path("/proc")
MEGABYTE = 1e6


@dataclass(frozen=True)
class Stage:
    """What one process needed for a stage, in seconds."""

    name: str
    cpu: float
    wall: float


@dataclass(frozen=True)
class Memory:
    """Proportional set size: of a page that several processes map, each has its part. In bytes.

    Attributes:
        anonymous: the part of `total` that no file holds.
    """

    total: int
    anonymous: int

    def __add__(self, other: "Memory") -> "Memory":
        return Memory(self.total + other.total, self.anonymous + other.anonymous)


@dataclass(frozen=True)
class StartUp:
    """Of one process that reads data.

    Attributes:
        workers: how many data workers it has.
        memory: its own and that of its data workers; None where the system does not tell.
    """

    stages: list[Stage]
    workers: int
    memory: tuple[Memory, Memory] | None


def measure_start_up(command: list[str], processes: int) -> list[StartUp]:
    """Starts the reading of data as this many processes of one run do, at once, up to the first batch of each.

    They share the batches among them as the GPUs of a machine do, but there is no model, no GPU and no update. Memory
    is read when all have their first batch, and none goes on.

    Args:
        command: arguments of fairseq-train.

    Raises:
        UserError: as the task does; a process died.
    """
    with _processes(command, processes) as running:
        reports = [_receive(*each) for each in tqdm(running, desc="first batches", leave=False)]
        return [
            StartUp(stages, len(workers), _memory_of(process.pid, workers))
            for (process, _), (stages, workers) in zip(running, reports, strict=True)
        ]


@contextmanager
def _processes(command: list[str], number: int) -> Iterator[list[tuple[multiprocessing.Process, Connection]]]:
    """They live until the block ends, and are given time to end well only if it ends well."""
    get_temp_dir()  # theirs too, so that it goes when this process does
    spawn, running = multiprocessing.get_context("spawn"), []
    try:
        for rank in range(number):
            ours, theirs = spawn.Pipe()
            process = spawn.Process(target=_read_data, args=(theirs, command, rank, number, time.time()))
            process.start()
            theirs.close()  # else a death would not be noticed
            running.append((process, ours))
        yield running
    except BaseException:
        for process, _ in running:
            process.terminate()
        raise
    finally:
        for process, ours in running:
            ours.close()
            process.join()


def _receive(process: multiprocessing.Process, ours: Connection) -> tuple[list[Stage], list[int]]:
    try:
        report = ours.recv()
    except EOFError:
        process.join()
        message = f"a process that reads data died, exit code {process.exitcode}; is there enough memory?"
        raise UserError(message) from None
    if isinstance(report, Exception):
        raise report
    return report


def _read_data(theirs: Connection, command: list[str], rank: int, processes: int, started: float) -> None:
    """A process: tells stages and ids of data workers, or an error, then stands still until its parent hangs up."""
    end_with_parent()
    multiprocessing.set_start_method(None, force=True)  # data workers start as under torchrun, not as this process did
    try:
        stages, epoch = _first_batch(command, rank, processes, started)
    except Exception as error:
        theirs.send(error if isinstance(error, UserError) else RuntimeError(f"process {rank}: {error!r}"))
        return
    theirs.send((stages, [worker.pid for worker in multiprocessing.active_children()]))
    theirs.poll(None)
    from lazyformer_fairseq.fairseq_plugin.reliability.preemption import end_reader

    end_reader(epoch)


def _first_batch(command: list[str], rank: int, processes: int, started: float):
    """The stages, and fairseq's iterator of epochs with its data workers. What runs is what fairseq's trainer calls."""
    stages, cpu = [], 0.0

    def done(name: str) -> None:
        nonlocal cpu, started
        now_cpu, now = time.process_time(), time.time()
        stages.append(Stage(name, now_cpu - cpu, now - started))
        cpu, started = now_cpu, now

    logging.basicConfig()  # else fairseq_cli would, where it is imported: everything, to stdout
    install(HookStage.COMMAND_LINE)
    from fairseq import options
    from fairseq.dataclass.utils import convert_namespace_to_omegaconf
    from fairseq.tasks import setup_task

    cfg = convert_namespace_to_omegaconf(options.parse_args_and_arch(options.get_training_parser(), command))
    done("start Python, import torch and fairseq, parse options")
    task, data = setup_task(cfg.task), cfg.dataset
    task.load_dataset(data.train_subset, combine=True, epoch=1)
    done("set up the task, load the data")
    epoch = task.get_batch_iterator(
        task.dataset(data.train_subset),
        max_tokens=data.max_tokens,
        max_sentences=data.batch_size,
        max_positions=task.max_positions(),
        ignore_invalid_inputs=True,
        required_batch_size_multiple=data.required_batch_size_multiple,
        seed=cfg.common.seed,
        num_shards=processes,
        shard_id=rank,
        num_workers=data.num_workers,
        epoch=1,
        data_buffer_size=data.data_buffer_size,
    )
    batches = epoch.next_epoch_itr()
    done("make the batches' list, shuffle it")
    next(iter(batches))
    done("first batch")
    return stages, epoch


def _memory_of(process: int, workers: Sequence[int]) -> tuple[Memory, Memory] | None:
    if not (PROC / "self" / "smaps_rollup").exists():
        return None
    return _proportional(process), sum(map(_proportional, workers), Memory(0, 0))


def _proportional(process: int) -> Memory:
    """From Linux's own account (man 5 proc, smaps_rollup), in units of 1,024 bytes there."""
    account = (PROC / str(process) / "smaps_rollup").read_text()
    found = dict(re.findall(r"^(Pss|Pss_Anon):\s+(\d+) kB$", account, re.MULTILINE))
    return Memory(int(found["Pss"]) * 1024, int(found["Pss_Anon"]) * 1024)


def stage_rows(measured: Sequence[StartUp]) -> list[dict[str, str]]:
    """For a table: seconds of each stage, by processor and by clock."""
    rows = []
    for stages in zip(*(each.stages for each in measured), strict=True):
        cpu = [stage.cpu for stage in stages]
        rows.append({
            "stage": stages[0].name,
            "CPU seconds, mean of a process": f"{sum(cpu) / len(cpu):.2f}",
            "most": f"{max(cpu):.2f}",
            "seconds of the slowest": f"{max(stage.wall for stage in stages):.2f}",
        })  # fmt: skip
    return rows


def memory_rows(measured: Sequence[StartUp]) -> list[dict[str, str]]:
    """For a table: the processes' memory and that of their data workers; none where the system does not tell."""
    known = [each.memory for each in measured if each.memory]
    if not known:
        return []
    ours, workers = (sum(part, Memory(0, 0)) for part in zip(*known, strict=True))
    number = sum(each.workers for each in measured)
    named = {f"processes: {len(measured)}": ours, f"their data workers: {number}": workers, "all": ours + workers}
    return [
        {
            "memory": name,
            "MB (PSS)": f"{memory.total / MEGABYTE:,.0f}",
            "of it their own": f"{memory.anonymous / MEGABYTE:,.0f}",
            "mapped from files": f"{(memory.total - memory.anonymous) / MEGABYTE:,.0f}",
        }
        for name, memory in named.items()
    ]
