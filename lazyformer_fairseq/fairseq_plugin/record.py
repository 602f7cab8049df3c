"""The record of a run of fairseq's loop: ``run.json`` before its first update, and a line of metrics per interval.

The files are those of :mod:`lazyformer_fairseq.training.run_record`. fairseq reports what it measured to a progress
bar; :class:`RecordingBar` stands around it and appends the same numbers to ``metrics.jsonl``.
"""

import sys
from argparse import Namespace
from collections.abc import Iterator, Mapping
from numbers import Number
from pathlib import Path
from typing import Any, Optional, Union

import torch
from fairseq.logging.meters import AverageMeter, StopwatchMeter, TimeMeter
from fairseq.logging.progress_bar import BaseProgressBar
from fairseq.trainer import Trainer
from omegaconf import OmegaConf

from lazyformer_fairseq.data.shards import data_folders
from lazyformer_fairseq.training import run_record
from lazyformer_fairseq.training.run_record import MetricsLine, MetricsLog, RunRecord

_TRAIN = "train"
_INTERVAL = "train_inner"  # fairseq's name for the updates since the last line
_recorder: Optional["RunRecorder"] = None  # of the run under way in this process


class RunRecorder:
    """Writes the record of one trainer's run into ``--save-dir``.

    Args:
        trainer: has loaded its checkpoint, if there is one.
    """

    def __init__(self, trainer: Any):
        self.trainer = trainer
        self.folder = Path(trainer.cfg.checkpoint.save_dir)
        self._metrics: Optional[MetricsLog] = None
        self._last_interval = -1

    def begin(self) -> None:
        """Write ``run.json``, and from here on record what the run measures."""
        global _recorder  # noqa: PLW0603  fairseq makes progress bars in functions that do not have the trainer
        _recorder = self
        trainer = self.trainer
        if trainer.cfg.checkpoint.no_save or not trainer.is_data_parallel_master:
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        run_record.write_run(self.folder, self.describe())
        self._metrics = MetricsLog(self.folder, trainer.get_num_updates())

    def describe(self) -> RunRecord:
        """Return everything that decides the result of the run."""
        trainer = self.trainer
        cfg = OmegaConf.to_container(trainer.cfg, resolve=True, enum_to_str=True)
        if trainer.experts is None:
            parameters = sum(weight.numel() for weight in trainer.get_model().parameters())
        else:
            parameters = trainer.experts.parameters

        if cfg["common"]["bf16"]:
            precision = "bf16"
        elif cfg["common"]["fp16"]:
            precision = "fp16"
        else:
            precision = "fp32"

        optimization = cfg["optimization"]
        schedule = _named(cfg["lr_scheduler"])
        schedule["max_update"] = optimization["max_update"]
        schedule["max_epoch"] = optimization["max_epoch"]
        task = _named(cfg["task"])
        dictionary = getattr(trainer.task, "dictionary", None)
        if dictionary is not None:
            task["vocab_size"] = len(dictionary)
        trainer_settings = {
            "finetune_from_model": cfg["checkpoint"]["finetune_from_model"],
            "restore_file": cfg["checkpoint"]["restore_file"],
            "ema": cfg["ema"],
        }
        return RunRecord(
            command=tuple(sys.argv),
            model=_named(cfg["model"]),
            parameters=parameters,
            task=task,
            criterion=_named(cfg["criterion"]),
            data=run_record.hash_data(folder for folder in self._data_folders() if folder.is_dir()),
            optimizer=_named(cfg["optimizer"]),
            schedule=schedule,
            batch={
                "batch_size": cfg["dataset"]["batch_size"],
                "max_tokens": cfg["dataset"]["max_tokens"],
                "update_freq": optimization["update_freq"],
                "clip_norm": optimization["clip_norm"],
            },
            precision=precision,
            seed=cfg["common"]["seed"],
            processes=trainer.data_parallel_world_size,
            trainer=trainer_settings,
            **run_record.describe_here(trainer.device),
        )

    def _data_folders(self) -> list[Path]:
        data = str(self.trainer.cfg.task.get("data") or "")
        if data:
            return [Path(folder) for folder in data_folders(data)]
        return []

    def add(self, stats: Mapping[str, Any], tag: Optional[str], updates: Optional[int], epoch: Optional[int]) -> None:
        """Append a line of what fairseq reports.

        Args:
            stats: numbers and meters, by name.
            tag: ``train_inner``, ``train`` at the end of an epoch, or the name of a held-out split.
            updates: that the run has made.
            epoch: from 1.
        """
        if self._metrics is None or tag is None:
            return
        if updates is None:
            updates = self.trainer.get_num_updates()
        else:
            updates = int(updates)
        if tag == _INTERVAL:
            self._last_interval = updates
        elif tag == _TRAIN and updates == self._last_interval:
            return  # the interval's line says it already

        values = {}
        for name, value in stats.items():
            number = _number_of(value)
            if number is not None and name not in ("epoch", "num_updates"):
                values[name] = number
        line = MetricsLine(
            updates=updates,
            split=_TRAIN if tag == _INTERVAL else tag,
            seconds=float(Trainer.cumulative_training_time(self.trainer)),  # a tensor where processes share it
            values=run_record.finite_values(values),
            epoch=epoch,
        )
        self._metrics.append(line)

    def rewind(self, updates: int) -> None:
        """Remove the lines beyond a number of updates, as the run goes back to a checkpoint."""
        if self._metrics is not None:
            self._metrics.rewind(updates)


class RecordingBar(BaseProgressBar):
    """Reports to fairseq's progress bar, and to the record of the run."""

    def __init__(self, bar: BaseProgressBar, epoch: Optional[int]):
        self.bar = bar
        self.epoch = epoch

    def __len__(self) -> int:
        return len(self.bar)

    def __iter__(self) -> Iterator[Any]:
        return iter(self.bar)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.bar, name)

    def log(self, stats: Mapping[str, Any], tag: Optional[str] = None, step: Optional[int] = None) -> None:
        """Report an interval."""
        self._record(stats, tag, step)
        self.bar.log(stats, tag=tag, step=step)

    def print(self, stats: Mapping[str, Any], tag: Optional[str] = None, step: Optional[int] = None) -> None:
        """Report an epoch or a validation."""
        self._record(stats, tag, step)
        self.bar.print(stats, tag=tag, step=step)

    def update_config(self, config: Any) -> None:
        """Hand the settings of the run on."""
        self.bar.update_config(config)

    def _record(self, stats: Mapping[str, Any], tag: Optional[str], step: Optional[int]) -> None:
        if _recorder is not None:
            _recorder.add(stats, tag, step, self.epoch)


def recording_progress(progress_bar: Any, iterator: Any, *args: Any, **kwargs: Any) -> RecordingBar:
    """Return fairseq's progress bar, whose reports are recorded too."""
    return RecordingBar(progress_bar(iterator, *args, **kwargs), kwargs.get("epoch"))


def _named(section: Union[Mapping[str, Any], Namespace]) -> dict[str, Any]:
    """Return a section of fairseq's settings with its ``_name`` as `name`.

    fairseq's older models, such as RoBERTa's, have their arguments as a namespace, whose `arch` names the model.
    """
    if isinstance(section, Namespace):
        options = dict(vars(section))
        name = options["arch"]
    else:
        options = dict(section)
        name = options["_name"]
    options.pop("_name", None)
    return {"name": name, **options}


def _number_of(value: Any) -> Optional[float]:
    """Return what a meter or a tensor stands for; None for what is no number."""
    if isinstance(value, (AverageMeter, TimeMeter)):
        value = value.avg
    elif isinstance(value, StopwatchMeter):
        value = value.sum
    if torch.is_tensor(value) and value.numel() == 1:
        value = value.item()
    if isinstance(value, Number) and not isinstance(value, bool):
        return float(value)
    return None
