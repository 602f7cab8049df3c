"""Measures the throughput of the data loader alone and of training, in tokens per second.

    python scripts/bench_loader.py data --arch bert_base --batch-size 4 --workers 0 2

DATA is a corpus for pre-training, as written by lazyformer corpus. You can append options of fairseq-train, such as
--bf16. The loader's work includes everything before an update: reading, packing, masking, collating and, with workers,
the transfer to the main process. With 0 workers, the loader runs in a thread of the main process while the model is
idle.
"""

import argparse
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

from lazyformer_fairseq import USER_DIR

WARM_UP = 2  # untimed batches or updates, in which workers start and torch selects kernels


def reading(data: str, arch: str, tokens_per_sample: int, batch_size: int) -> list[str]:
    """Return fairseq-train's arguments for pre-training on DATA, without the optimizer's."""
    return [
        *(data, "--user-dir", str(USER_DIR), "--task", "full_sentences_masked_lm", "--arch", arch),
        *("--tokens-per-sample", str(tokens_per_sample), "--max-positions", str(tokens_per_sample)),
        *("--criterion", "masked_lm_accuracy", "--max-update", "1000000", "--batch-size", str(batch_size)),
        *("--log-format", "none"),
    ]


def options(description: str) -> argparse.ArgumentParser:
    """Return a parser with the options shared by the two benchmarks of data loading."""
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=description, formatter_class=form, allow_abbrev=False)
    parser.add_argument("data")
    parser.add_argument("--arch", default="lazyformer_m2x6_s", help="the model to train")
    parser.add_argument(
        "--tokens-per-sample", type=int, default=512, help="maximum tokens per block, as in pre-training"
    )
    parser.add_argument("--batch-size", type=int, default=16, help="blocks per batch; an update is one batch")
    return parser


def loaded_tokens(training, workers: int) -> Iterator[int]:
    """Yield the number of tokens of each batch that a run with this many workers reads, for any number of epochs."""
    training.cfg.dataset.num_workers = workers
    epoch = training.trainer.get_train_iterator(1)
    while True:
        for batch in epoch.next_epoch_itr():
            yield batch["ntokens"]


def speed(counts: Iterator[int], seconds: float) -> float:
    """Return the tokens per second, measured over about `seconds` seconds."""
    for _ in range(WARM_UP):
        next(counts)
    total, start = 0, time.perf_counter()
    while not total or time.perf_counter() - start < seconds:
        total += next(counts)
    return total / (time.perf_counter() - start)


def main() -> None:
    parser = options(__doc__)
    parser.add_argument(
        "--workers", type=int, nargs="+", default=[0, 2], help="numbers of data workers to try; 0: a thread"
    )
    parser.add_argument("--seconds", type=float, default=10.0, help="seconds per measurement")
    parser.add_argument("--cpu", action="store_true", help="train on the CPU even if there is a GPU")
    given, more = parser.parse_known_args()
    import torch
    from fairseq_stepwise import FairseqTraining

    from lazyformer_fairseq.fairseq_plugin.reliability.options import refuse_long_temporary_folder
    from lazyformer_fairseq.fairseq_plugin.replacements import start_run
    from lazyformer_fairseq.report.tables import markdown_table

    start_run()
    refuse_long_temporary_folder(max(given.workers))
    command = [
        *reading(given.data, given.arch, given.tokens_per_sample, given.batch_size),
        *("--optimizer", "fused_adam", "--lr-scheduler", "linear_warmup", "--lr", "1e-4", "--clip-norm", "1.0"),
        *("--num-workers", "0", "--no-save", *more),
        *([] if torch.cuda.is_available() and not given.cpu else ["--cpu"]),
    ]
    with TemporaryDirectory() as folder:
        training = FairseqTraining(command, Path(folder))
        speeds = {"model, an update": speed((training.update() for _ in iter(int, 1)), given.seconds)}
        for number in given.workers:
            speeds[f"loader, {number} workers"] = speed(loaded_tokens(training, number), given.seconds)
    model = speeds["model, an update"]
    rows = [
        {"": name, "tokens per second": f"{found:,.0f}", "relative to the model": f"{found / model:.1f}"}
        for name, found in speeds.items()
    ]
    print(markdown_table(rows))


if __name__ == "__main__":
    main()
    sys.stdout.flush()
    os._exit(0)  # fairseq's threads still prepare batches, and torch would abort if Python exited normally
