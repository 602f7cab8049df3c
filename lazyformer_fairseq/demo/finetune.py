"""Fine-tunes the pre-trained models on the acceptability task, by fairseq-train, both at once."""

import os
import re
import subprocess
import sys
import time
from pathlib import Path

import torch
from tqdm import tqdm

from lazyformer_fairseq.demo.settings import MODELS, DemoSettings
from lazyformer_fairseq.errors import UserError


def finetune(settings: DemoSettings, task: Path, pretrained: Path, folder: Path) -> dict[str, float]:
    """Matthews correlation of each model's best epoch on the held-out split.

    Checkpoints and logs go to `folder`/NAME; what a killed run left there is resumed.
    """
    runs: dict[str, tuple[subprocess.Popen, Path]] = {}
    for name in MODELS:
        save_dir = folder / name
        save_dir.mkdir(parents=True, exist_ok=True)
        command = settings.finetuning_command(name, task, pretrained / name / "checkpoint_last.pt", save_dir)
        with (save_dir / "log.txt").open("w") as log:
            run = subprocess.Popen(
                [sys.executable, "-m", "fairseq_cli.train", *command],
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
            )
        runs[name] = run, save_dir
    try:
        _show_progress(settings, runs)
    finally:
        for run, _ in runs.values():
            run.kill()
    return {name: _best_score(save_dir / "checkpoint_best.pt") for name, (_, save_dir) in runs.items()}


def _show_progress(settings: DemoSettings, runs: dict[str, tuple[subprocess.Popen, Path]]) -> None:
    with tqdm(total=settings.finetuning_epochs * len(runs), desc="fine-tuning", unit=" epochs") as progress:
        while True:
            still_running = [run for run, _ in runs.values() if run.poll() is None]
            finished_epochs = [_finished_epochs(save_dir / "log.txt") for _, save_dir in runs.values()]
            progress.update(sum(finished_epochs) - progress.n)
            for name, (run, save_dir) in runs.items():
                if run.returncode:
                    raise UserError(f"fine-tuning {name} failed; the end of {save_dir / 'log.txt'} says why")
            if not still_running:
                return
            time.sleep(0.3)


def _finished_epochs(log: Path) -> int:
    """The last epoch that the log reports; a resumed run starts above 1."""
    epochs = re.findall(r"\| valid \| epoch (\d+)", log.read_text())
    return int(epochs[-1]) if epochs else 0


def _best_score(checkpoint: Path) -> float:
    return float(torch.load(checkpoint, weights_only=True)["extra_state"]["best"])
