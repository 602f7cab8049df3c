"""A long run in a process of its own, which measures itself: ``python soak_process.py OUTPUT EVERY options ...``.

The options are fairseq-train's. Every EVERY updates a line of JSON goes to OUTPUT: what of the machine the process
holds. Every 500th update has a NaN in its gradient, and every 4,000th is followed by two more, which with
``--max-skipped-updates 3`` is a rollback.
"""

import json
import os
import sys
import threading
from pathlib import Path

import torch
from damage import WEIGHT, poisoned
from fairseq_cli.train import cli_main

import lazyformer_fairseq  # noqa: F401
from lazyformer_fairseq.fairseq_plugin.trainer import SafeTrainer

PAGE = os.sysconf("SC_PAGE_SIZE")


def main(output: Path, every: int, options: list[str]) -> None:
    torch.set_num_threads(1)
    train_step = SafeTrainer.train_step
    calls = 0

    def measured_train_step(trainer, samples, *args, **kwargs):
        nonlocal calls
        calls += 1
        bad = calls % 500 == 0 or (calls % 4000 in (1, 2) and calls > 4000)
        weight = dict(trainer.get_model().named_parameters())[WEIGHT]
        hook = weight.register_hook(lambda gradient: poisoned(gradient, torch.nan)) if bad else None
        try:
            return train_step(trainer, samples, *args, **kwargs)
        finally:
            if hook is not None:
                hook.remove()
            if calls % every == 0:
                with output.open("a") as file:
                    left = len(trainer.epoch_iterator) - trainer.epoch_iterator.iterations_in_epoch
                    file.write(json.dumps({"update": calls, "batches_left": left, **held()}) + "\n")

    SafeTrainer.train_step = measured_train_step
    sys.argv = ["fairseq-train", *options]
    cli_main()


def held() -> dict[str, float]:
    """Memory in MiB; open files, threads and child processes of this process (of any of its threads)."""
    process = Path("/proc/self")
    children = [(task / "children").read_text().split() for task in (process / "task").iterdir()]
    return {
        "memory_mib": int((process / "statm").read_text().split()[1]) * PAGE / 2**20,
        "gpu_mib": torch.cuda.memory_allocated() / 2**20 if torch.cuda.is_available() else 0.0,
        "open_files": len(list((process / "fd").iterdir())),
        "threads": threading.active_count(),
        "children": sum(map(len, children)),
    }


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3:])
