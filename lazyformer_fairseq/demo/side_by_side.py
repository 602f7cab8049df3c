"""Pre-trains models side by side: update by update in turn, on the same batches, so that their times compare.

One process, one machine state: what slows one model down for a moment slows the others too.
"""

from pathlib import Path

from fairseq.logging import metrics
from tqdm import tqdm

from lazyformer_fairseq.demo.settings import MODELS, DemoSettings
from lazyformer_fairseq.training.stepwise import StepwiseTraining

VALIDATIONS = 8  # points of a curve beside the first
SAVES = 4


class Run(StepwiseTraining):
    """One model's pre-training.

    Attributes:
        name: key of MODELS.
        curve: by validation, lists: `updates`, `seconds` (of training alone), `loss` (bits a masked token), `accuracy`
            (percent).
    """

    def __init__(self, name: str, settings: DemoSettings, data: Path, folder: Path):
        super().__init__(settings.pretraining_command(name, data), folder)
        self.name = name
        self.task.load_dataset("valid")
        points = self._kept("curve", {})
        here = sum(updates <= self.updates for updates in points.get("updates", ()))
        self.curve: dict[str, list[float]] = {of: values[:here] for of, values in points.items() if here}

    def validate(self) -> None:
        """Adds a point to the curve: loss and accuracy on all held-out documents."""
        with metrics.aggregate(new_root=True) as found:
            for batch in self.trainer.get_valid_iterator("valid").next_epoch_itr(shuffle=False):
                self.trainer.valid_step(batch)
        point = {"updates": self.updates, "seconds": sum(self.seconds)}
        point |= {name: float(found[name].avg) for name in ("loss", "accuracy")}
        for name, value in point.items():
            self.curve.setdefault(name, []).append(value)

    def save(self, with_optimizer: bool = True) -> None:
        """Also keeps the curve."""
        self._keep("curve", self.curve)
        super().save(with_optimizer)


def pretrain(settings: DemoSettings, data: Path, folder: Path) -> dict[str, Run]:
    """Pre-trains all MODELS, or resumes; each has its checkpoints in `folder`/NAME. Returns the finished runs."""
    runs = [Run(name, settings, data, folder / name) for name in MODELS]
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
