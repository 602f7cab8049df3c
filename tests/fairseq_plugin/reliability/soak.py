"""A long tiny run: makes it, judges whether what it holds stays flat, draws it."""

import json
import os
import subprocess
import sys
from pathlib import Path

from helpers import ROOT
from matplotlib.figure import Figure
from scipy.stats import theilslopes

# Growth an update that still counts as flat, by the length of the run. In full: of a million updates 256 MiB, and less
# than one file in ten epochs. What is measured jumps about, with the batches that happen to be under way and with what
# the allocator gives back, so that a short run tells only of what is lost in every epoch.
FLAT = {
    "full": {
        "memory_mib": 0.25 / 1024,
        "gpu_mib": 0.25 / 1024,
        "open_files": 0.001,
        "threads": 0.0005,
        "children": 0.0005,
    },
    "short": {"memory_mib": 16 / 1024, "gpu_mib": 16 / 1024, "open_files": 0.1, "threads": 0.005, "children": 0.005},
}
UNITS = {"memory_mib": "memory, MiB", "open_files": "open files", "threads": "threads", "children": "child processes"}


def run_soak(data: Path, folder: Path, updates: int, every: int) -> list[dict[str, float]]:
    """Trains for `updates`, with epochs, validations, checkpoints, skipped updates and rollbacks; returns samples."""
    script, samples = Path(__file__).with_name("soak_process.py"), folder / "samples.jsonl"
    command = [
        *(sys.executable, str(script), str(samples), str(every), str(data), "--save-dir", str(folder / "run")),
        *("--user-dir", str(ROOT / "lazyformer_fairseq"), "--task", "full_sentences_masked_lm", "--cpu"),
        *"--tokens-per-sample 32 --optimizer fused_adam --lr-scheduler linear_warmup --lr 1e-3".split(),
        *"--arch lazyformer_m2x6_s_tiny --sublayer-pattern M2 --criterion masked_lm_accuracy".split(),
        *"--batch-size 3 --num-workers 1 --log-format simple --no-epoch-checkpoints".split(),
        *"--save-interval-updates 250 --keep-interval-updates 3".split(),
        *"--max-skipped-updates 3 --max-rollbacks 1000 --loss-spike 10 --max-update".split(),
        str(updates),
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    with (folder / "log").open("w") as log:
        run = subprocess.run(command, stdout=log, stderr=subprocess.STDOUT, env=environment)
    assert run.returncode == 0, (folder / "log").read_text()[-3000:]
    return [json.loads(line) for line in samples.read_text().splitlines()]


def growth(samples: list[dict[str, float]], what: str) -> float:
    """Growth an update over the second half, by the Theil-Sen estimator: the median slope of all pairs of samples."""
    half = samples[len(samples) // 2 :]
    return float(theilslopes([sample[what] for sample in half], [sample["update"] for sample in half]).slope)


def what_grows(samples: list[dict[str, float]], form: str) -> list[str]:
    return [
        f"{what}: {growth(samples, what):.2g} an update, {samples[0][what]:g} to {samples[-1][what]:g}"
        for what, bound in FLAT[form].items()
        if growth(samples, what) > bound
    ]


def draw(samples: list[dict[str, float]], path: Path) -> None:
    """One picture of what the process held, against updates."""
    figure = Figure(figsize=(8, 5), layout="constrained")
    shown = UNITS | ({"gpu_mib": "GPU memory, MiB"} if samples[-1]["gpu_mib"] else {})
    all_axes = figure.subplots(len(shown), 1, sharex=True)
    for axes, (what, label) in zip(all_axes, shown.items(), strict=True):
        axes.plot([sample["update"] for sample in samples], [sample[what] for sample in samples], linewidth=1)
        axes.set_ylabel(label, rotation=0, ha="right", va="center")
        axes.set_ylim(0, 1.15 * max(sample[what] for sample in samples))
        axes.spines[["top", "right"]].set_visible(False)
    all_axes[-1].set_xlabel("updates")
    figure.savefig(path, dpi=120)
