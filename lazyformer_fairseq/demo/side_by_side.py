"""Pre-trains models side by side: update by update in turn, on the same batches, so that their times compare.

One process, one machine state: what slows one model down for a moment slows the others too.
"""

import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from fairseq import checkpoint_utils, options, utils
from fairseq.data import iterators
from fairseq.dataclass.utils import convert_namespace_to_omegaconf
from fairseq.logging import metrics
from fairseq.tasks import setup_task
from fairseq.trainer import Trainer
from tqdm import tqdm

from lazyformer_fairseq.demo.settings import MODELS, DemoSettings

VALIDATIONS = 8  # points of a curve beside the first
SAVES = 4


class Run:
    """One model's pre-training, as fairseq-train would do it, one update at a time.

    Attributes:
        name: key of MODELS.
        save_dir: of its checkpoints; one that is there is resumed.
        curve: by validation, lists: `updates`, `seconds` (of training alone), `loss` (bits a masked token), `accuracy`
            (percent).
        seconds: of each update.
    """

    def __init__(self, name: str, command: list[str], save_dir: Path):
        self.name = name
        self.save_dir = save_dir
        parser = options.get_training_parser()
        self.cfg = convert_namespace_to_omegaconf(options.parse_args_and_arch(parser, command))
        np.random.seed(self.cfg.common.seed)
        utils.set_torch_seed(self.cfg.common.seed)
        self.task = setup_task(self.cfg.task)
        model, criterion = self.task.build_model(self.cfg.model), self.task.build_criterion(self.cfg.criterion)
        self.task.load_dataset("valid")
        self.trainer = Trainer(self.cfg, self.task, model, criterion)
        saved, self.epochs = checkpoint_utils.load_checkpoint(self.cfg.checkpoint, self.trainer)
        self.curve: dict[str, list[float]] = saved["curve"] if saved else {}
        self.seconds: list[float] = saved["seconds"] if saved else []
        self.batches = self._batches()

    @property
    def updates(self) -> int:
        return self.trainer.get_num_updates()

    @property
    def parameters(self) -> int:
        return sum(parameter.numel() for parameter in self.trainer.model.parameters())

    def _batches(self) -> Iterator[list[dict]]:
        """Batches of this epoch and all that follow."""
        while True:
            yield from iterators.GroupedIterator(self.epochs.next_epoch_itr(), 1)
            self.epochs = self.trainer.get_train_iterator(self.epochs.next_epoch_idx)

    def update(self) -> None:
        batch = next(self.batches)
        start = time.perf_counter()
        with metrics.aggregate(new_root=True):
            self.trainer.train_step(batch)
        self.seconds.append(time.perf_counter() - start)

    def validate(self) -> None:
        """Adds a point to the curve: loss and accuracy on all held-out documents."""
        with metrics.aggregate(new_root=True) as found:
            for batch in self.trainer.get_valid_iterator("valid").next_epoch_itr(shuffle=False):
                self.trainer.valid_step(batch)
        point = {"updates": self.updates, "seconds": sum(self.seconds)}
        point |= {name: float(found[name].avg) for name in ("loss", "accuracy")}
        for name, value in point.items():
            self.curve.setdefault(name, []).append(value)

    def save(self) -> None:
        """Writes a checkpoint that fairseq-train could resume, with the curve and times beside."""
        extra_state = {
            "train_iterator": self.epochs.state_dict(),
            "val_loss": None,
            "curve": self.curve,
            "seconds": self.seconds,
        }
        self.trainer.consolidate_optimizer()
        self.trainer.save_checkpoint(str(self.save_dir / "checkpoint_last.pt"), extra_state)


def pretrain(settings: DemoSettings, data: Path, folder: Path) -> dict[str, Run]:
    """Pre-trains all MODELS, or resumes; each has its checkpoints in `folder`/NAME. Returns the finished runs."""
    runs = []
    for name in MODELS:
        save_dir = folder / name
        save_dir.mkdir(parents=True, exist_ok=True)
        runs.append(Run(name, settings.pretraining_command(name, data, save_dir), save_dir))
    total = settings.updates
    point_every, save_every = max(1, total // VALIDATIONS), max(1, total // SAVES)
    done = sum(run.updates for run in runs)
    if done:
        print(f"Resuming pre-training at {', '.join(f'{run.name}: update {run.updates}' for run in runs)} of {total}.")
    with tqdm(total=total * len(runs), initial=done, desc="pre-training", unit=" updates") as progress:
        while (behind := min(runs, key=lambda run: run.updates)).updates < total:
            if not behind.curve:
                behind.validate()
            behind.update()
            progress.update()
            if behind.updates % point_every == 0 or behind.updates == total:
                behind.validate()
                losses = (f"{run.name} {run.curve['loss'][-1]:.2f}" for run in runs if run.curve)
                progress.set_postfix_str(f"bits: {', '.join(losses)}")
            if behind.updates % save_every == 0 or behind.updates == total:
                behind.save()
    return {run.name: run for run in runs}
