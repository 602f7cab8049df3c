"""Measures an update by the package's own loop beside one by fairseq's trainer, in turn, of the same model and batches.

    python scripts/bench_loop.py data --arch bert_small --batch-size 8

DATA is what pre-training reads, as lazyformer corpus writes it. Prints median milliseconds, and the median ratio of
updates that followed each other.
"""

import argparse
from pathlib import Path
from tempfile import TemporaryDirectory

WARM_UP = 3  # updates that do not count
RATE = 1e-4


def main() -> None:
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=form)
    parser.add_argument("data")
    parser.add_argument("--arch", default="bert_small")
    parser.add_argument("--tokens-per-sample", type=int, default=128, help="longest block")
    parser.add_argument("--batch-size", type=int, default=8, help="blocks of an update")
    parser.add_argument("--updates", type=int, default=100, help="of each")
    parser.add_argument("--precision", choices=("fp32", "bf16", "fp16"), default="fp32")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    given = parser.parse_args()

    import numpy as np
    from bench_loader import reading
    from fairseq_stepwise import FairseqTraining

    from lazyformer_fairseq.experiments.lessons import MaskedBlocks, Network
    from lazyformer_fairseq.fairseq_plugin.replacements import start_run
    from lazyformer_fairseq.measure.stepwise import Learning, StepwiseTraining
    from lazyformer_fairseq.modules.networks.options import options_of_arch
    from lazyformer_fairseq.report.tables import markdown_table

    start_run()
    total = given.updates + WARM_UP
    learning = Learning(total, RATE, clip_norm=1.0, precision=given.precision, device=given.device)
    network = Network(options_of_arch(given.arch, max_positions=given.tokens_per_sample))
    text = {"tokens_per_sample": given.tokens_per_sample}
    lesson = MaskedBlocks(network, given.data, given.batch_size, 1, total, text)
    command = [
        *reading(given.data, given.arch, given.tokens_per_sample, given.batch_size),
        *("--optimizer", "fused_adam", "--lr-scheduler", "linear_warmup", "--lr", str(RATE), "--clip-norm", "1.0"),
        *("--num-workers", "0", "--no-save", *(["--cpu"] if given.device == "cpu" else [])),
        *([] if given.precision == "fp32" else [f"--{given.precision}"]),
    ]
    with TemporaryDirectory() as folder:
        ours = StepwiseTraining(lesson, learning, Path(folder) / "ours")
        theirs = FairseqTraining(command, Path(folder) / "fairseq")
        for _ in range(total):
            ours.update()
            theirs.update()
    seconds = [np.array(training.seconds[WARM_UP:]) for training in (ours, theirs)]
    medians = [f"{1000 * np.median(each):.2f}" for each in seconds]
    ratio = np.median(seconds[1] / seconds[0])
    print(markdown_table([{"": "ms an update", "ours": medians[0], "fairseq's": medians[1], "ratio": f"{ratio:.3f}"}]))


if __name__ == "__main__":
    main()
