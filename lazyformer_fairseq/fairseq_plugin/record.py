"""The record of a fairseq run: ``run.json``, and a line of ``metrics.jsonl`` for each logging interval and validation.

The file format is defined in :mod:`lazyformer_fairseq.training.run_record`; the metrics are the ones that fairseq logs.
"""

import sys
from argparse import Namespace
from collections.abc import Mapping
from numbers import Number
from pathlib import Path
from typing import Any, Optional, Union

import torch
from fairseq.logging import metrics
from fairseq.trainer import Trainer
from omegaconf import OmegaConf

from lazyformer_fairseq.data.shards import data_folders
from lazyformer_fairseq.options import split_at_commas
from lazyformer_fairseq.training import run_record
from lazyformer_fairseq.training.run_record import MetricsLine, MetricsLog, RunRecord

INTERVAL = "train_inner"  # fairseq's name for the meters of the current logging interval


class RunRecorder:
    """The recorder of a fairseq run, which writes ``run.json`` and ``metrics.jsonl`` to ``--save-dir``.

    Args:
        trainer: fairseq's trainer.

    Attributes:
        held_out: the split that the trainer is validating on.
    """

    def __init__(self, trainer: Any):
        self.trainer = trainer
        self.folder = Path(trainer.cfg.checkpoint.save_dir)
        self.held_out = ""
        self._metrics: Optional[MetricsLog] = None

    def begin(self) -> None:
        """Write ``run.json`` and start recording metrics; call this once the trainer has loaded its checkpoint."""
        trainer = self.trainer
        if trainer.cfg.checkpoint.no_save or not trainer.is_data_parallel_master:
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        run_record.write_run(self.folder, self.describe())
        report_to = split_at_commas(getattr(trainer.cfg.task, "report_to", None) or "")
        self._metrics = MetricsLog(self.folder, trainer.get_num_updates(), report_to)

    def describe(self) -> RunRecord:
        """Return a record of everything that determines the run's result."""
        trainer = self.trainer
        cfg = OmegaConf.to_container(trainer.cfg, resolve=True, enum_to_str=True)
        if trainer.experts is None:
            parameters = sum(weight.numel() for weight in trainer.get_model().parameters())
        else:
            parameters = trainer.experts.parameters

        precision = "fp32"
        for half in ("fp16", "bf16"):
            if cfg["common"][half]:
                precision = half

        optimization = cfg["optimization"]
        schedule = _named(cfg["lr_scheduler"])
        schedule["max_update"] = optimization["max_update"]
        schedule["max_epoch"] = optimization["max_epoch"]
        task = _named(cfg["task"])
        dictionary = getattr(trainer.task, "dictionary", None)
        if dictionary is not None:
            task["vocab_size"] = len(dictionary)
        data = task.get("data")
        folders = data_folders(str(data)) if data else []
        return RunRecord(
            command=tuple(sys.argv),
            model=_named(cfg["model"]),
            parameters=parameters,
            task=task,
            criterion=_named(cfg["criterion"]),
            data=run_record.hash_data(map(Path, folders)),
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
            trainer={
                "finetune_from_model": cfg["checkpoint"]["finetune_from_model"],
                "restore_file": cfg["checkpoint"]["restore_file"],
                "ema": cfg["ema"],
            },
            **run_record.describe_here(trainer.device),
        )

    def add_update(self) -> None:
        """Append a line if the last update ended a logging interval, an epoch or the run."""
        if self._metrics is None:
            return
        trainer = self.trainer
        updates = trainer.get_num_updates()
        ends_interval = updates % trainer.cfg.common.log_interval == 0
        ends_run = updates == trainer.cfg.optimization.max_update
        meters = metrics.get_meters(INTERVAL)  # None if a script uses the trainer without fairseq's training loop
        if meters is not None and (ends_interval or ends_run or trainer.epoch_iterator.end_of_epoch()):
            self._add("train", meters.get_smoothed_values())

    def add_validation(self, scores: Mapping[str, Any]) -> None:
        """Append a line with a held-out split's metrics."""
        if self._metrics is not None:
            self._add(self.held_out, scores)

    def _add(self, split: str, stats: Mapping[str, Any]) -> None:
        values = {}
        for name, value in stats.items():
            is_number = isinstance(value, (Number, torch.Tensor)) and not isinstance(value, bool)
            if is_number and name != "num_updates":
                values[name] = value
        line = MetricsLine(
            updates=self.trainer.get_num_updates(),
            split=split,
            seconds=float(Trainer.cumulative_training_time(self.trainer)),  # a tensor if there are several processes
            values=run_record.finite_values(values),
            epoch=self.trainer.epoch_iterator.epoch,
        )
        self._metrics.append(line)

    def rewind(self, updates: int) -> None:
        """Remove all lines about updates after `updates`, because the run rolls back to that update."""
        if self._metrics is not None:
            self._metrics.rewind(updates)


def _named(section: Union[Mapping[str, Any], Namespace]) -> dict[str, Any]:
    """Return a section of fairseq's settings with its registered name stored under `name`.

    For fairseq's older models, such as RoBERTa, the section is an argparse namespace, and `arch` is the name.
    """
    if isinstance(section, Namespace):
        section = {**vars(section), "_name": section.arch}
    return run_record.named(section)
