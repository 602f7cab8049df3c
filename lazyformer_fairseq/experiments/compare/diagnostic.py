"""Made tasks with long inputs, ListOps and pairs of halves: accuracy, from scratch or self-pretrained first."""

import logging
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any, Optional

from lazyformer_fairseq.data.prepared_folder import PreparedDiagnostic
from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.experiments.compare import masked_lm
from lazyformer_fairseq.experiments.compare.models import ModelSpec
from lazyformer_fairseq.experiments.compare.task import CompareJob
from lazyformer_fairseq.experiments.trainings import Job, Training
from lazyformer_fairseq.finetuning import fairseq_task
from lazyformer_fairseq.measure.stepwise import StepwiseTraining

PRETRAINING_RATE, MASKED = 1e-3, 0.15
VALIDATION = ("--batch-size-valid", "64")


class MaskFilling(Training):
    """Self-pretraining; `accuracy` is the per cent of masked symbols that it finds."""

    def measure(self) -> Mapping[str, float]:
        found = self.evaluate()
        return {"accuracy": float(found["accuracy"]), "loss": float(found["loss"])}


class Compared(masked_lm.Compared):
    """Trains on a folder of `lazyformer diagnostics`, which fairseq's task ``glue`` reads."""

    predicted = 0

    @cached_property
    def prepared(self) -> PreparedDiagnostic:
        found, asked = PreparedDiagnostic.load(self.settings.data), self.settings.task
        if (made := found.manifest["task"].lower()) != asked:
            raise UserError(f"{self.settings.data}: is of --task {made}, not {asked}")
        return found

    @property
    def longest(self) -> int:
        return max(counts["longest"] for counts in self.prepared.manifest["splits"].values())

    def task_words(self) -> list[str]:
        words = [self.settings.data, "--task", "glue", "--criterion", "glue"]
        return [*words, "--pooler-dropout", str(self.settings.sizes["dropout"]), *VALIDATION]

    def pretraining(self, spec: ModelSpec, seed: int, folder: Path) -> Optional[Job]:
        """Fills masks in the task's own training inputs (Amos et al., 2023), each of them a block."""
        if not spec.pretrain:
            return None
        words = [self.settings.data, "--task", "inputs_masked_lm", "--criterion", "masked_lm_accuracy"]
        words += ["--tokens-per-sample", str(self.longest), "--mask-prob", str(MASKED), *VALIDATION]
        command = self.command(spec, seed, PRETRAINING_RATE, spec.pretrain, words)
        return Job(f"{spec.name} masks", tuple(command), folder, spec.pretrain, group=seed)

    def open_training(self, job: Job) -> Training:
        logging.getLogger(fairseq_task.__name__).setLevel(logging.ERROR)  # that weights are random is meant here
        return super().open_training(job) if isinstance(job, CompareJob) else MaskFilling(job)

    def measure(self, training: StepwiseTraining) -> dict[str, float]:
        """`accuracy`, percent, and `loss` on all of the validation split."""
        found = training.evaluate()
        return {"accuracy": 100 * float(found["accuracy"]), "loss": float(found["loss"])}

    def final(self, training: StepwiseTraining) -> dict[str, float]:
        return {**self.measure(training), "test_accuracy": 100 * float(training.evaluate("test")["accuracy"])}

    def describe_data(self) -> dict[str, Any]:
        """What the data was made with, and what simple rules reach, which need no model."""
        return {name: self.prepared.manifest[name] for name in ("settings", "splits", "rules")}

    def data_folders(self) -> list[Path]:
        return [self.prepared.folder]
