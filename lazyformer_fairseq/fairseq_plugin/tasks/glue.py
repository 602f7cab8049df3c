"""Task ``glue``: fine-tuning on one GLUE task (LazyFormer, appendix A and Table 5).

From the official files, or from the folder that ``lazyformer glue prepare`` made of them.
"""

import logging
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Optional

from fairseq.dataclass import ChoiceEnum, FairseqDataclass
from fairseq.tasks import register_task
from omegaconf import MISSING

from lazyformer_fairseq.data.datasets.labelled_texts import LabelledTextsDataset
from lazyformer_fairseq.data.glue.encode import encode_split
from lazyformer_fairseq.data.glue.prepared_data import (
    EncodedExamples,
    PreparedDiagnostic,
    PreparedTask,
    draw_rows,
    load_prepared,
    targets_of,
)
from lazyformer_fairseq.data.glue.task_table import TASKS, TaskDescription, find_task
from lazyformer_fairseq.data.glue.tsv import read_split
from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.fairseq_plugin.reliability.options import option
from lazyformer_fairseq.fairseq_plugin.tasks.encoder_task import keep_tokenizer_with_checkpoints
from lazyformer_fairseq.fairseq_plugin.tasks.fine_tuning import (
    FineTuningConfig,
    FineTuningTask,
    check_best_metric,
    check_start,
    find_tokenizer,
    warn_without_start,
)
from lazyformer_fairseq.modules.networks.heads import CLASSIFICATION_HEADS

logger = logging.getLogger(__name__)

TASKS_TO_TRAIN = [name for name, task in TASKS.items() if "train" in task.splits]


@dataclass
class GlueConfig(FineTuningConfig):
    data: str = option(MISSING, "folder of the task's official files, train.tsv and so on, or of the task as prepared")
    glue_task: Optional[str] = option(None, f"one of {', '.join(TASKS_TO_TRAIN)}; default: the data folder's name")
    # Not `max_positions`: the model has an option of that name already, and one option would set both.
    tokens_per_sample: Optional[int] = option(
        None, "longer inputs are cut to so many tokens, all counted; default: the model's positions"
    )
    glue_head_name: Optional[str] = option(None, "name of the classification head; default: the task's in lower case")
    glue_head: ChoiceEnum(list(CLASSIFICATION_HEADS)) = option(
        "dense",
        "the head on <s>: dense is RoBERTa's (dropout, linear map, tanh, dropout, linear map), linear is dropout and "
        "one linear map; --pooler-dropout is the dropout",
    )
    max_train_rows: Optional[int] = option(None, "train on so many rows, drawn once for all seeds; default: on all")


@register_task("glue", dataclass=GlueConfig)
class GlueTask(FineTuningTask):
    """Reads and encodes the files, adds the head to the model, and checks the options before anything is trained.

    Attributes:
        description: the task's row of the table.
        marks_first_text: whether the pattern has sublayers that are told which tokens all others see.
    """

    cfg: GlueConfig

    def __init__(self, cfg: GlueConfig, description: TaskDescription, tokenizer_folder: Path):
        super().__init__(cfg, tokenizer_folder, cfg.glue_head_name or description.head_name, cfg.tokens_per_sample)
        self.description = description
        self.marks_first_text = False

    @classmethod
    def setup_task(cls, cfg: GlueConfig, **kwargs) -> "GlueTask":
        """Finds the task's row of the table and the tokenizer.

        Raises:
            UserError: an option that does not fit the task, or no tokenizer where it should be.
        """
        description = describe_task(cfg)
        if not kwargs.get("from_checkpoint"):
            check_options(cfg, description)
            warn_without_start(cfg)
        prepared = load_prepared(cfg.data).tokenizer_folder if PreparedTask.is_at(cfg.data) else None
        task = cls(cfg, description, find_tokenizer(cfg, prepared))
        logger.info(
            "%s: %s, %s, metrics %s; dictionary of %d symbols from %s",
            description.name,
            "pairs" if description.is_pair else "single sentences",
            "scores" if description.is_regression else f"classes {', '.join(description.labels)}",
            ", ".join(description.metrics),
            len(task.dictionary),
            task.tokenizer_folder,
        )
        return task

    def build_model(self, cfg: FairseqDataclass, from_checkpoint: bool = False):
        """The model with the task's head.

        Raises:
            UserError: ``--tokens-per-sample`` is more than the model has.
        """
        model = super().build_model(cfg, from_checkpoint)
        self.marks_first_text = bool(model.encoder.sentence_encoder.asking)
        model.register_classification_head(self.head_name, self.description.num_classes, str(self.cfg.glue_head))
        return model

    def build_criterion(self, cfg: FairseqDataclass, from_checkpoint: bool = False):
        if cfg._name != "glue":
            raise UserError(f"--criterion {cfg._name} does not read GLUE's labels; give --criterion glue")
        return super().build_criterion(cfg, from_checkpoint)

    def load_dataset(self, split: str, **kwargs) -> None:
        """Reads and encodes a split: `train`, `valid`, `test`; MNLI also has `valid1` and `test1` (mismatched)."""
        examples = self._read_prepared(split) if PreparedTask.is_at(self.cfg.data) else self._read_official(split)
        if split == "train" and self.cfg.max_train_rows:
            examples = draw_rows(examples, self.cfg.max_train_rows)
            logger.info("trained on %d rows", len(examples.inputs))
        self.datasets[split] = LabelledTextsDataset(
            examples.inputs,
            examples.targets,
            pad=self.dictionary.pad(),
            shuffle=split == "train",
            seed=self.cfg.seed,
            types_after=self.dictionary.eos() if self.has_token_types else None,
            marks_before=self.dictionary.eos() if self.marks_first_text else None,
        )
        if split == "train" and not self.cfg.no_save:
            keep_tokenizer_with_checkpoints(self.tokenizer_folder, Path(self.cfg.save_dir))

    def _read_prepared(self, split: str) -> EncodedExamples:
        examples = load_prepared(self.cfg.data).read(split, self.longest, self.dictionary.eos())
        longest = int(examples.inputs.sizes.max())
        logger.info("%s/%s: %d examples, the longest %d tokens", self.cfg.data, split, len(examples.inputs), longest)
        return examples

    def _read_official(self, split: str) -> EncodedExamples:
        file = read_split(self.description, self.cfg.data, split)
        for oddity in file.oddities():
            logger.warning("%s", oddity)
        encoded = encode_split(self.tokenizer, file, self.longest)
        logger.info(
            "%s: %d examples, %d cut to %s tokens, %.2f%% of tokens unknown",
            file.path,
            len(file.examples),
            encoded.truncated,
            self.longest,
            100 * encoded.unknown_share,
        )
        return EncodedExamples(encoded.inputs, targets_of(self.description, file.examples))


def describe_task(cfg: GlueConfig) -> TaskDescription:
    """The row of the task that the options, or the data folder's name, name; a diagnostic's folder says what it holds.

    Raises:
        UserError: none is named.
    """
    if not cfg.glue_task and PreparedTask.is_at(cfg.data):
        prepared = load_prepared(cfg.data)
        if isinstance(prepared, PreparedDiagnostic):
            return prepared.task
    try:
        return find_task(cfg.glue_task or Path(os.path.abspath(cfg.data)).name)
    except UserError as error:
        raise UserError(f"{error}; give one of them by --glue-task") from None


def check_options(cfg: GlueConfig, description: TaskDescription) -> None:
    """Raises a UserError for options that would fail late, or select the worst checkpoint."""
    check_start(cfg, description.name)
    if PreparedTask.is_at(cfg.data) and load_prepared(cfg.data).task is not description:
        raise UserError(f"{cfg.data}: holds {load_prepared(cfg.data).task.name}, not {description.name}")
    check_best_metric(cfg, description.name, description.metrics)
    for split in cfg.valid_subset.split(","):
        if split in description.splits and description.splits[split].label is None:
            raise UserError(f"--valid-subset {cfg.valid_subset}: {description.name}'s split {split} has no labels")
