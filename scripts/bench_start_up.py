"""Measures the time to the first batch, stage by stage, and the memory, of processes that read DATA at once.

    python scripts/bench_start_up.py data --processes 8

DATA is what pre-training reads, as lazyformer corpus writes it. Other options of fairseq-train may follow. The
processes share the batches as the GPUs of a machine do, but there is no model, no GPU and no update; memory is read
when all have their first batch. The first run on new DATA also checks it and packs it; the next find that done.
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

from bench_loader import options, reading  # nothing heavy: importing is a stage that is measured

PROC = Path("/proc")


def measure(command: list[str], processes: int) -> list[dict[str, Any]]:
    """Of each process `stages`, [name, processor seconds, seconds], its `workers`' ids, and its id, `process`."""
    spawn, running = multiprocessing.get_context("spawn"), []
    try:
        for rank in range(processes):
            ours, theirs = spawn.Pipe()
            process = spawn.Process(target=read_data, args=(theirs, command, rank, processes, time.time()))
            process.start()
            theirs.close()  # else a death would not be noticed
            running.append((process, ours))
        found = []
        for process, ours in running:
            try:
                report = ours.recv()
            except EOFError:
                process.join()
                sys.exit(
                    f"error: a process that reads data died, exit code {process.exitcode}; is there enough memory?"
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
    """A process: tells its stages and data workers, or an error, then stands still until its parent hangs up."""
    multiprocessing.set_start_method(None, force=True)  # data workers start as under torchrun, not as this process did
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
    """The stages, and fairseq's iterator of epochs with its data workers. What runs is what fairseq's trainer calls."""
    stages, cpu = [], 0.0

    def done(name: str) -> None:
        nonlocal cpu, started
        now_cpu, now = time.process_time(), time.time()
        stages.append((name, now_cpu - cpu, now - started))
        cpu, started = now_cpu, now

    logging.basicConfig()  # else fairseq_cli would, where it is imported: everything, to stdout
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
    """Proportional set size (of a page that several map, each has its part), and what of it no file holds; bytes."""
    total = anonymous = 0
    for process in processes:
        account = PROC / str(process) / "smaps_rollup"  # man 5 proc; in units of 1,024 bytes
        found = dict(re.findall(r"^(Pss|Pss_Anon):\s+(\d+) kB$", account.read_text(), re.MULTILINE))
        total, anonymous = total + 1024 * int(found["Pss"]), anonymous + 1024 * int(found["Pss_Anon"])
    return total, anonymous


def tables(measured: Sequence[dict[str, Any]]) -> str:
    """Seconds of each stage, by processor and by clock; the memory of the processes and of their data workers."""
    from lazyformer_fairseq.report.tables import markdown_table

    stages = []
    for of_all in zip(*(each["stages"] for each in measured), strict=True):
        cpu = [seconds for _, seconds, _ in of_all]
        stages.append({
            "stage": of_all[0][0],
            "CPU seconds, mean of a process": f"{sum(cpu) / len(cpu):.2f}",
            "most": f"{max(cpu):.2f}",
            "seconds of the slowest": f"{max(seconds for *_, seconds in of_all):.2f}",
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
            "of it their own": f"{anonymous / 1e6:,.0f}",
            "mapped from files": f"{(total - anonymous) / 1e6:,.0f}",
        }
        for name, (total, anonymous) in named.items()
    ]
    return f"{markdown_table(stages)}\n\n{markdown_table(memory)}"


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--processes", type=int, default=8, help="as many as a machine has GPUs")
    parser.add_argument("--num-workers", type=int, default=1, help="data workers of each; 0 is a thread")
    given, more = parser.parse_known_args()
    if not (PROC / "self" / "smaps_rollup").exists():
        sys.exit("error: only Linux tells what part of a shared page is whose")
    command = reading(given.data, given.arch, given.tokens_per_sample, given.batch_size)
    command += ["--cpu", "--no-save", "--num-workers", str(given.num_workers), *more]
    print(tables(measure(command, given.processes)))


if __name__ == "__main__":
    main()
