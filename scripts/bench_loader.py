"""Measures the tokens a second that the data loader gives, alone, and those that training takes.

    python scripts/bench_loader.py data --arch bert_base --batch-size 4 --workers 0 2

DATA is what pre-training reads, as lazyformer corpus writes it. Other options of fairseq-train may follow, as --bf16.
The loader covers all that a run does before an update: reading, packing, masking, collating and, with workers, the
transfer to the run's process. 0 workers means a thread of that process, which the model does not share here.
"""

import argparse
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

from lazyformer_fairseq import USER_DIR

WARM_UP = 2  # untimed batches or updates: workers start, torch chooses kernels


def reading(data: str, arch: str, tokens_per_sample: int, batch_size: int) -> list[str]:
    """Arguments of fairseq-train for pre-training on DATA, those of its optimizer excepted."""
    return [
        *(data, "--user-dir", str(USER_DIR), "--task", "full_sentences_masked_lm", "--arch", arch),
        *("--tokens-per-sample", str(tokens_per_sample), "--max-positions", str(tokens_per_sample)),
        *("--criterion", "masked_lm_accuracy", "--max-update", "1000000", "--batch-size", str(batch_size)),
        *("--log-format", "none"),
    ]


def options(description: str) -> argparse.ArgumentParser:
    """What both benches of data take; further words go to fairseq-train."""
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=description, formatter_class=form, allow_abbrev=False)
    parser.add_argument("data")
    parser.add_argument("--arch", default="lazyformer_m2x6_s", help="the model that is trained")
    parser.add_argument("--tokens-per-sample", type=int, default=512, help="longest block, as in pre-training")
    parser.add_argument("--batch-size", type=int, default=16, help="blocks of a batch; an update is one batch")
    return parser


def loaded_tokens(training, workers: int) -> Iterator[int]:
    """The tokens of each batch that a run with this many workers would get, epoch after epoch."""
    training.cfg.dataset.num_workers = workers
    epoch = training.trainer.get_train_iterator(1)
    while True:
        for batch in epoch.next_epoch_itr():
            yield batch["ntokens"]


def speed(counts: Iterator[int], seconds: float) -> float:
    """Tokens a second over about `seconds`."""
    for _ in range(WARM_UP):
        next(counts)
    total, start = 0, time.perf_counter()
    while not total or time.perf_counter() - start < seconds:
        total += next(counts)
    return total / (time.perf_counter() - start)


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--workers", type=int, nargs="+", default=[0, 2], help="numbers of data workers; 0: a thread")
    parser.add_argument("--seconds", type=float, default=10.0, help="for each measurement")
    parser.add_argument("--cpu", action="store_true", help="train on the processor even where there is a GPU")
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
        {"": name, "tokens a second": f"{found:,.0f}", "times the model": f"{found / model:.1f}"}
        for name, found in speeds.items()
    ]
    print(markdown_table(rows))


if __name__ == "__main__":
    main()
    sys.stdout.flush()
    os._exit(0)  # fairseq's threads still make batches, and torch aborts where Python ends beneath them
