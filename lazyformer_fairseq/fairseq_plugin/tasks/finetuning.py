"""The fairseq tasks ``glue`` and ``squad`` for fine-tuning with ``fairseq-train``.

They locate the data and the tokenizer, check for mistakes that would otherwise surface late, and leave the rest to
:class:`~lazyformer_fairseq.training.objectives.labelled_texts.LabelledTextsObjective` or
:class:`~lazyformer_fairseq.training.objectives.spans.SpansObjective`.
"""

import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Optional

from fairseq.dataclass import ChoiceEnum, FairseqDataclass
from fairseq.models import ARCH_MODEL_REGISTRY
from fairseq.tasks import register_task
from omegaconf import II, MISSING

from lazyformer_fairseq.data.datasets.question_windows import (
    DEFAULT_MAX_ANSWER_TOKENS,
    USUAL,
    WindowSettings,
    make_windows,
)
from lazyformer_fairseq.data.glue import TASKS, find_task
from lazyformer_fairseq.data.labelled_files import TaskDescription
from lazyformer_fairseq.data.prepared_folder import PreparedTask, load_prepared
from lazyformer_fairseq.data.prepared_squad import PreparedSplit, PreparedSquad
from lazyformer_fairseq.data.shards import keep_tokenizer
from lazyformer_fairseq.data.squad import METRICS, SPLITS, read_squad
from lazyformer_fairseq.data.text.interface import SETTINGS_FILE
from lazyformer_fairseq.data.text.tokenizer import load_tokenizer
from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.fairseq_plugin.fairseq_classes import as_fairseq
from lazyformer_fairseq.fairseq_plugin.reliability.options import ReliabilityConfig, option
from lazyformer_fairseq.fairseq_plugin.tasks.encoder_task import EncoderTask
from lazyformer_fairseq.modules.networks.heads import CLASSIFICATION_HEADS
from lazyformer_fairseq.modules.networks.masked_lm import MaskedLM
from lazyformer_fairseq.training.objectives.head import HeadObjective
from lazyformer_fairseq.training.objectives.labelled_texts import LabelledTextsObjective
from lazyformer_fairseq.training.objectives.spans import SpansObjective

logger = logging.getLogger(__name__)

TASKS_TO_TRAIN = [name for name, task in TASKS.items() if "train" in task.splits]


@dataclass
class FineTuningConfig(ReliabilityConfig):
    """Options that both tasks share, and the fairseq options that they read."""

    data: str = option(MISSING, "folder containing the official files or prepared data")
    # Not named `tokenizer`, because fairseq has an option of that name, which would silently take precedence.
    tokenizer_folder: Optional[str] = option(
        None,
        "tokenizer folder; default: the prepared data's tokenizer, else tokenizer/ beside the checkpoint or in the "
        "data folder",
    )
    no_padding: bool = option(False, "concatenate the texts of a batch instead of padding them")
    seed: int = II("common.seed")
    finetune_from_model: Optional[str] = II("checkpoint.finetune_from_model")
    save_dir: str = II("checkpoint.save_dir")
    no_save: bool = II("checkpoint.no_save")
    best_checkpoint_metric: str = II("checkpoint.best_checkpoint_metric")
    maximize_best_checkpoint_metric: bool = II("checkpoint.maximize_best_checkpoint_metric")
    valid_subset: str = II("dataset.valid_subset")


class FineTuningTask(EncoderTask):
    """The base class of both tasks, which adapts an objective with a head to fairseq.

    Attributes:
        objective: the objective, which reads the data and computes the loss.
    """

    def __init__(self, cfg: FineTuningConfig, objective: HeadObjective):
        super().__init__(cfg, objective.dictionary)
        self.objective = objective
        self._wanted = objective.longest

    def build_model(self, cfg: FairseqDataclass, from_checkpoint: bool = False):
        """Build the model with the objective's head.

        Raises:
            UserError: ``--tokens-per-sample`` exceeds the model's positions, or the model is not one of this package's
                masked LMs.
        """
        if not issubclass(ARCH_MODEL_REGISTRY[cfg._name], MaskedLM):
            raise UserError(
                f"--arch {cfg._name} is not one of this package's masked language models, which --task "
                f"{self.cfg._name} requires; use one of them, such as bert_base"
            )
        model = super().build_model(cfg, from_checkpoint)
        most = model.max_positions()
        self.objective.longest = self._wanted
        if self._wanted is not None and self._wanted > most:
            raise UserError(f"--tokens-per-sample {self._wanted}: must not exceed the model's {most} positions")
        self.objective.attach(model)
        self.state.merge_state_dict(self.objective.task_state())
        return model

    def build_criterion(self, cfg: FairseqDataclass, from_checkpoint: bool = False):
        """Build the criterion, which must have the task's name.

        Raises:
            UserError: the criterion has a different name.
        """
        name = self.cfg._name
        if cfg._name != name:
            raise UserError(f"--criterion {cfg._name}: --task {name} has its own criterion; use --criterion {name}")
        return super().build_criterion(cfg, from_checkpoint)

    def load_dataset(self, split: str, **kwargs) -> None:
        """Read and encode a split; for training, also copy the tokenizer to ``--save-dir``.

        The model must be built first.

        Raises:
            UserError: the split or its file does not exist, or the file has invalid rows.
        """
        self.datasets[split] = as_fairseq(self.objective.dataset(split))
        if split == "train" and not self.cfg.no_save:
            keep_tokenizer(self.objective.tokenizer_folder, Path(self.cfg.save_dir))

    def max_positions(self) -> Optional[int]:
        """Return the maximum number of tokens per input; None if it is unknown."""
        return self.objective.longest


# --- classification and regression ------------------------------------------------------------------------------------


@dataclass
class GlueConfig(FineTuningConfig):
    """Options of ``--task glue``."""

    data: str = option(MISSING, "folder containing the task's official files (train.tsv and so on) or prepared data")
    glue_task: Optional[str] = option(
        None, f"task name: {', '.join(TASKS_TO_TRAIN)}; default: the name of the data folder"
    )
    # Not named `max_positions`, because the model has an option of that name, and setting one would set both.
    tokens_per_sample: Optional[int] = option(
        None,
        "truncate inputs to this many tokens, including special tokens; default: the model's number of positions",
    )
    glue_head_name: Optional[str] = option(
        None, "name of the classification head; default: the task name in lower case"
    )
    glue_head: ChoiceEnum(list(CLASSIFICATION_HEADS)) = option(
        "dense",
        "type of the classification head on <s>: dense (two linear layers, as in RoBERTa) or linear (one "
        "layer); --pooler-dropout sets its dropout",
    )
    max_train_rows: Optional[int] = option(
        None, "number of training rows to use, sampled independently of the seed; default: all"
    )


@register_task("glue", dataclass=GlueConfig)
class GlueTask(FineTuningTask):
    """Classification or regression on texts and text pairs (LazyFormer, appendix A, Table 5)."""

    @classmethod
    def setup_task(cls, cfg: GlueConfig, **kwargs) -> "GlueTask":
        """Look up the task's description and the tokenizer.

        Raises:
            UserError: an option does not suit the task, or there is no tokenizer.
        """
        is_prepared = PreparedTask.is_at(cfg.data)
        if is_prepared and not cfg.glue_task:
            description = load_prepared(cfg.data).task
        else:
            description = _named_task(cfg)
        if not kwargs.get("from_checkpoint"):
            _check_glue_options(cfg, description)
        if is_prepared:
            prepared = load_prepared(cfg.data).tokenizer_folder
        else:
            prepared = None
        objective = LabelledTextsObjective(
            data=cfg.data,
            task=None if description.is_custom or (is_prepared and not cfg.glue_task) else description.name,
            head_type=str(cfg.glue_head),
            head_name=cfg.glue_head_name,
            max_train_rows=cfg.max_train_rows,
            longest=cfg.tokens_per_sample,
            no_padding=cfg.no_padding,
            seed=cfg.seed,
            tokenizer_folder=find_tokenizer(cfg, prepared),
        )
        if description.is_regression:
            what = "regression"
        else:
            what = f"classes {', '.join(description.labels)}"
        logger.info(
            "%s: %s; dictionary of %d symbols from %s",
            description.name,
            what,
            len(objective.dictionary),
            objective.tokenizer_folder,
        )
        return cls(cfg, objective)


def _named_task(cfg: GlueConfig) -> TaskDescription:
    """Return the description of the task named by ``--glue-task`` or, without it, by the data folder."""
    try:
        return find_task(cfg.glue_task or Path(os.path.abspath(cfg.data)).name)
    except UserError as error:
        raise UserError(f"{error}; choose a task with --glue-task") from None


def _check_glue_options(cfg: GlueConfig, description: TaskDescription) -> None:
    """Raise a UserError for options that would make the run fail late or select the worst checkpoint."""
    if description.tags_words:
        raise UserError(f"{cfg.data} has per-word tags, which only `lazyformer finetune` can train on")
    check_options(cfg, description.name, description.metrics)
    if PreparedTask.is_at(cfg.data) and load_prepared(cfg.data).task != description:
        raise UserError(f"{cfg.data} contains {load_prepared(cfg.data).task.name}, not {description.name}")
    for split in cfg.valid_subset.split(","):
        if split in description.splits and description.splits[split].label is None:
            raise UserError(f"--valid-subset {cfg.valid_subset}: {description.name}'s {split} split has no labels")


# --- spans ------------------------------------------------------------------------------------------------------------


@dataclass
class SquadConfig(FineTuningConfig):
    """Options of ``--task squad``."""

    data: str = option(
        MISSING,
        f"folder containing the official files {', '.join(SPLITS.values())}, or prepared data",
    )
    train_file: str = option(SPLITS["train"], "name of the official training file")
    valid_file: str = option(SPLITS["valid"], "name of the official validation file")
    skip_mistakes: bool = option(
        False,
        "skip invalid entries, such as answers that are not at the stated position, and log a warning for each",
    )
    tokens_per_sample: Optional[int] = option(
        None,
        f"maximum number of tokens per input; default: {USUAL.max_length}, or the value in the prepared data",
    )
    doc_stride: Optional[int] = option(
        None,
        f"stride in tokens between the windows of a long context; default: {USUAL.stride}, or the value in the "
        "prepared data",
    )
    max_question_tokens: Optional[int] = option(
        None,
        f"truncate questions to this many tokens; default: {USUAL.max_question_length}, or the value in the prepared "
        "data",
    )
    max_answer_tokens: int = option(DEFAULT_MAX_ANSWER_TOKENS, "maximum number of tokens in a predicted answer")
    squad_head_name: str = option("squad", "name of the span head")


@register_task("squad", dataclass=SquadConfig)
class SquadTask(FineTuningTask):
    """Extractive question answering: prediction of the answer's span in the text."""

    @classmethod
    def setup_task(cls, cfg: SquadConfig, **kwargs) -> "SquadTask":
        """Look up the tokenizer and the window sizes.

        Raises:
            UserError: an option does not suit the data, or there is no tokenizer.
        """
        if not kwargs.get("from_checkpoint"):
            check_options(cfg, "SQuAD", list(METRICS))
        if cfg.max_answer_tokens < 1:
            raise UserError(f"--max-answer-tokens {cfg.max_answer_tokens}: must be at least 1")
        if PreparedSquad.is_at(cfg.data):
            prepared = PreparedSquad.load(cfg.data)
        else:
            prepared = None
        settings = _window_settings(cfg, prepared)
        folder = find_tokenizer(cfg, prepared and prepared.tokenizer_folder)
        objective = SpansObjective(
            read=prepared.read if prepared else lambda split: _read_official(cfg, split, folder, settings),
            tokenizer_folder=folder,
            task_settings={},
            longest_answer=cfg.max_answer_tokens,
            head_name=cfg.squad_head_name,
            longest=settings.max_length,
            no_padding=cfg.no_padding,
            seed=cfg.seed,
        )
        logger.info("SQuAD v1.1: dictionary of %d symbols from %s; %s", len(objective.dictionary), folder, settings)
        return cls(cfg, objective)


def _read_official(cfg: SquadConfig, split: str, tokenizer_folder: Path, settings: WindowSettings) -> PreparedSplit:
    files = {"train": cfg.train_file, "valid": cfg.valid_file}
    if split not in files:
        raise UserError(f"SQuAD has no {split!r} split; its splits are {', '.join(files)}")
    file = read_squad(Path(cfg.data) / files[split], cfg.skip_mistakes)
    for mistake in file.left_out:
        logger.warning("%s: skipped an entry: %s", file.path, mistake)
    return PreparedSplit(file, make_windows(load_tokenizer(tokenizer_folder), file, settings))


def _window_settings(cfg: SquadConfig, prepared: Optional[PreparedSquad]) -> WindowSettings:
    """Return the window sizes from the prepared data, else from the options; raise a UserError if the two conflict."""
    if prepared:
        usual = prepared.settings
    else:
        usual = USUAL
    given = {
        "max_length": cfg.tokens_per_sample,
        "stride": cfg.doc_stride,
        "max_question_length": cfg.max_question_tokens,
    }
    chosen = {name: size for name, size in given.items() if size is not None}
    wanted = replace(usual, **chosen)
    if prepared and wanted != usual:
        raise UserError(
            f"{cfg.data} was prepared with {usual}, but the options request {wanted}; omit --tokens-per-sample, "
            "--doc-stride and --max-question-tokens, or prepare the data again"
        )
    return wanted


# --- checks -----------------------------------------------------------------------------------------------------------


def check_options(cfg: FineTuningConfig, what: str, metrics: Sequence[str]) -> None:
    """Check that paths exist, and that no option makes the run fail late or keep the worst checkpoint as the best.

    Args:
        cfg: the task's options.
        what: the name of the data, for messages.
        metrics: the names of the task's metrics, without the loss.

    Raises:
        UserError: an option is invalid.
    """
    if not Path(cfg.data).is_dir():
        raise UserError(f"{cfg.data}: no such folder; pass the folder containing {what}'s official files")
    if cfg.finetune_from_model and not Path(cfg.finetune_from_model).is_file():
        raise UserError(f"--finetune-from-model {cfg.finetune_from_model}: no such file; pass a checkpoint (*.pt)")
    metric = cfg.best_checkpoint_metric
    if metric not in ("loss", *metrics):
        raise UserError(f"--best-checkpoint-metric {metric}: {what}'s metrics are loss, {', '.join(metrics)}")
    if cfg.maximize_best_checkpoint_metric != (metric != "loss"):
        if metric == "loss":
            change = "drop"
        else:
            change = "add"
        raise UserError(
            f"--best-checkpoint-metric {metric} would keep the worst checkpoint as the best; {change} "
            "--maximize-best-checkpoint-metric"
        )
    if not cfg.finetune_from_model:
        logger.warning("without --finetune-from-model, the run starts from random weights unless it resumes")


def find_tokenizer(cfg: FineTuningConfig, prepared: Optional[Path]) -> Path:
    """Find the tokenizer folder: in prepared data, from the option, beside the checkpoint, or in the data folder.

    Args:
        cfg: the task's options.
        prepared: the tokenizer folder in prepared data; None for official files.

    Raises:
        UserError: there is no tokenizer, or ``--tokenizer-folder`` is not the one used to prepare the data.
    """
    if prepared is not None:
        given = Path(cfg.tokenizer_folder or prepared)
        load_tokenizer(given)  # raises an error if it is not a tokenizer
        if (given / SETTINGS_FILE).read_bytes() != (prepared / SETTINGS_FILE).read_bytes():
            raise UserError(
                f"--tokenizer-folder {given}: {cfg.data} was prepared with a different tokenizer; prepare the data "
                "with this one, or omit the option"
            )
        return prepared
    if cfg.tokenizer_folder:
        return Path(cfg.tokenizer_folder)
    if cfg.finetune_from_model:
        neighbours = [Path(cfg.finetune_from_model).parent]
    else:
        neighbours = []
    candidates = [folder / "tokenizer" for folder in (*neighbours, Path(cfg.data))]
    for folder in candidates:
        if folder.is_dir():
            return folder
    raise UserError(
        f"no tokenizer at {' or '.join(map(str, candidates))}; pass the checkpoint's tokenizer with --tokenizer-folder"
    )
