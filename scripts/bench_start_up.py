"""Measures the start-up time (by stage) and the memory of several processes that read the same DATA.

    python scripts/bench_start_up.py data --processes 8

DATA is a corpus for pre-training, as written by lazyformer corpus. You can append options of fairseq-train. The
processes divide the batches as the GPUs of a machine do, but without a model, GPUs or updates. Memory is measured once
all of them have loaded their first batch. The first run on new DATA also checks and packs it; later runs skip this.
"""

import logging
import multiprocessing
import re
import sys
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from bench_loader import options, reading  # imports nothing heavy, because the time of imports is measured as a stage

PROC = Path("/proc")


def measure(command: list[str], processes: int) -> list[dict[str, Any]]:
    """Return for each process its `stages` (name, CPU seconds, seconds), its id (`process`) and its `workers`' ids."""
    spawn, running = multiprocessing.get_context("spawn"), []
    try:
        for rank in range(processes):
            ours, theirs = spawn.Pipe()
            process = spawn.Process(target=read_data, args=(theirs, command, rank, processes, time.time()))
            process.start()
            theirs.close()  # otherwise, the death of the process would not be detected
            running.append((process, ours))
        found = []
        for process, ours in running:
            try:
                report = ours.recv()
            except EOFError:
                process.join()
                sys.exit(
                    f"error: a process that reads data died with exit code {process.exitcode}; is there enough memory?"
                )
            if isinstance(report, str):
                sys.exit(f"error: {report}")
            found.append({**report, "process": process.pid})
        for each in found:
            each["memory"] = [memory_of([each["process"]]), memory_of(each["workers"])]
        return found
    finally:
        for process, ours in running:
            ours.close()
            process.join(60)
            process.kill()


def read_data(theirs: Connection, command: list[str], rank: int, processes: int, started: float) -> None:
    """Send this process's stages and data workers, or an error, and wait until the parent closes the connection."""
    multiprocessing.set_start_method(None, force=True)  # start data workers as torchrun does, not by spawning
    try:
        stages, epoch = first_batch(command, rank, processes, started)
    except Exception as error:
        theirs.send(str(error))
        return
    theirs.send({"stages": stages, "workers": [worker.pid for worker in multiprocessing.active_children()]})
    theirs.poll(None)
    from lazyformer_fairseq.fairseq_plugin.reliability.preemption import end_reader

    end_reader(epoch)


def first_batch(command: list[str], rank: int, processes: int, started: float) -> tuple[list, Any]:
    """Return the stages and fairseq's epoch iterator with its data workers, making the calls of fairseq's trainer."""
    stages, cpu = [], 0.0

    def done(name: str) -> None:
        nonlocal cpu, started
        now_cpu, now = time.process_time(), time.time()
        stages.append((name, now_cpu - cpu, now - started))
        cpu, started = now_cpu, now

    logging.basicConfig()  # otherwise, importing fairseq_cli configures logging to print everything to stdout
    from fairseq import options as fairseq_options
    from fairseq.dataclass.utils import convert_namespace_to_omegaconf
    from fairseq.tasks import setup_task

    from lazyformer_fairseq.fairseq_plugin.replacements import start_run

    start_run()
    parser = fairseq_options.get_training_parser()
    cfg = convert_namespace_to_omegaconf(fairseq_options.parse_args_and_arch(parser, command))
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


def memory_of(processes: Sequence[int]) -> tuple[int, int]:
    """Return the proportional set size of processes and its anonymous part, in bytes.

    In the proportional set size, a page that is mapped by several processes is divided among them.
    """
    total = anonymous = 0
    for process in processes:
        account = PROC / str(process) / "smaps_rollup"  # see `man 5 proc`; in units of 1,024 bytes
        found = dict(re.findall(r"^(Pss|Pss_Anon):\s+(\d+) kB$", account.read_text(), re.MULTILINE))
        total, anonymous = total + 1024 * int(found["Pss"]), anonymous + 1024 * int(found["Pss_Anon"])
    return total, anonymous


def tables(measured: Sequence[dict[str, Any]]) -> str:
    """Return two tables: the CPU and wall-clock time of each stage, and the memory of processes and data workers."""
    from lazyformer_fairseq.report.tables import markdown_table

    stages = []
    for of_all in zip(*(each["stages"] for each in measured), strict=True):
        cpu = [seconds for _, seconds, _ in of_all]
        stages.append({
            "stage": of_all[0][0],
            "CPU seconds, mean over processes": f"{sum(cpu) / len(cpu):.2f}",
            "maximum": f"{max(cpu):.2f}",
            "seconds of the slowest process": f"{max(seconds for *_, seconds in of_all):.2f}",
        })  # fmt: skip
    parts = zip(*(each["memory"] for each in measured), strict=True)
    own, workers = ([sum(sizes) for sizes in zip(*part, strict=True)] for part in parts)
    number = sum(len(each["workers"]) for each in measured)
    named = {f"processes: {len(measured)}": own, f"their data workers: {number}": workers}
    named["all"] = [one + other for one, other in zip(own, workers, strict=True)]
    memory = [
        {
            "memory": name,
            "MB (PSS)": f"{total / 1e6:,.0f}",
            "anonymous": f"{anonymous / 1e6:,.0f}",
            "mapped from files": f"{(total - anonymous) / 1e6:,.0f}",
        }
        for name, (total, anonymous) in named.items()
    ]
    return f"{markdown_table(stages)}\n\n{markdown_table(memory)}"


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--processes", type=int, default=8, help="number of processes, such as the machine's GPUs")
    parser.add_argument("--num-workers", type=int, default=1, help="data workers per process; 0: a thread")
    given, more = parser.parse_known_args()
    if not (PROC / "self" / "smaps_rollup").exists():
        sys.exit("error: the memory of shared pages can only be measured on Linux")
    command = reading(given.data, given.arch, given.tokens_per_sample, given.batch_size)
    command += ["--cpu", "--no-save", "--num-workers", str(given.num_workers), *more]
    print(tables(measure(command, given.processes)))


if __name__ == "__main__":
    main()
