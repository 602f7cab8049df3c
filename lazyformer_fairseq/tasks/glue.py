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
from omegaconf import II, MISSING

from lazyformer_fairseq.data.datasets.labelled_texts import LabelledTextsDataset
from lazyformer_fairseq.data.glue.encode import encode_split
from lazyformer_fairseq.data.glue.prepared_data import EncodedExamples, PreparedTask, draw_rows, targets_of
from lazyformer_fairseq.data.glue.task_table import TASKS, TaskDescription, find_task
from lazyformer_fairseq.data.glue.tsv import read_split
from lazyformer_fairseq.data.text.interface import SETTINGS_FILE, TextTokenizer
from lazyformer_fairseq.data.text.load_tokenizer import load_tokenizer
from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.modules.networks.heads import CLASSIFICATION_HEADS
from lazyformer_fairseq.reliability.options import ReliabilityConfig, option
from lazyformer_fairseq.tasks.encoder_task import EncoderTask, keep_tokenizer_with_checkpoints

logger = logging.getLogger(__name__)

TASKS_TO_TRAIN = [name for name, task in TASKS.items() if "train" in task.splits]


@dataclass
class GlueConfig(ReliabilityConfig):
    data: str = option(MISSING, "folder of the task's official files, train.tsv and so on, or of the task as prepared")
    glue_task: Optional[str] = option(None, f"one of {', '.join(TASKS_TO_TRAIN)}; default: the data folder's name")
    # Not `tokenizer`: fairseq has an option of that name already, which would win in silence.
    tokenizer_folder: Optional[str] = option(
        None,
        "the checkpoint's tokenizer; default: that of prepared data, else tokenizer/ beside the "
        "checkpoint, else in the data folder",
    )
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
    seed: int = II("common.seed")
    finetune_from_model: Optional[str] = II("checkpoint.finetune_from_model")
    save_dir: str = II("checkpoint.save_dir")
    no_save: bool = II("checkpoint.no_save")
    best_checkpoint_metric: str = II("checkpoint.best_checkpoint_metric")
    maximize_best_checkpoint_metric: bool = II("checkpoint.maximize_best_checkpoint_metric")
    valid_subset: str = II("dataset.valid_subset")


@register_task("glue", dataclass=GlueConfig)
class GlueTask(EncoderTask):
    """Reads and encodes the files, adds the head to the model, and checks the options before anything is trained.

    Attributes:
        description: the task's row of the table.
        head_name: of its classification head.
        tokenizer: that of the checkpoint.
        longest: tokens of an input; None until the model is built, unless an option sets it.
        has_token_types: whether the model tells the two texts of a pair apart by their tokens' types.
    """

    cfg: GlueConfig

    def __init__(self, cfg: GlueConfig, description: TaskDescription, tokenizer: TextTokenizer, tokenizer_folder: Path):
        super().__init__(cfg, tokenizer.dictionary)
        self.description = description
        self.head_name = cfg.glue_head_name or description.head_name
        self.tokenizer = tokenizer
        self.tokenizer_folder = tokenizer_folder
        self.longest = cfg.tokens_per_sample
        self.has_token_types = False

    @classmethod
    def setup_task(cls, cfg: GlueConfig, **kwargs) -> "GlueTask":
        """Finds the task's row of the table and the tokenizer.

        Raises:
            UserError: an option that does not fit the task, or no tokenizer where it should be.
        """
        try:
            description = find_task(cfg.glue_task or Path(os.path.abspath(cfg.data)).name)
        except UserError as error:
            raise UserError(f"{error}; give one of them by --glue-task") from None
        if not kwargs.get("from_checkpoint"):
            check_options(cfg, description)
            if not cfg.finetune_from_model:
                logger.warning("no --finetune-from-model: a run that is not resumed starts from random weights")
        folder = find_tokenizer(cfg)
        tokenizer = load_tokenizer(folder)
        logger.info(
            "%s: %s, %s, metrics %s; dictionary of %d symbols from %s",
            description.name,
            "pairs" if description.is_pair else "single sentences",
            "scores" if description.is_regression else f"classes {', '.join(description.labels)}",
            ", ".join(description.metrics),
            len(tokenizer.dictionary),
            folder,
        )
        return cls(cfg, description, tokenizer, folder)

    def build_model(self, cfg: FairseqDataclass, from_checkpoint: bool = False):
        """The model with the task's head.

        Raises:
            UserError: ``--tokens-per-sample`` is more than the model has.
        """
        model = super().build_model(cfg, from_checkpoint)
        self.has_token_types = getattr(cfg, "token_types", 0) > 1
        self.longest = self.cfg.tokens_per_sample or model.max_positions()
        if self.longest > model.max_positions():
            raise UserError(
                f"--tokens-per-sample {self.longest}: the model has {model.max_positions()} positions; give as many at "
                "most"
            )
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
        )
        if split == "train" and not self.cfg.no_save:
            keep_tokenizer_with_checkpoints(self.tokenizer_folder, Path(self.cfg.save_dir))

    def _read_prepared(self, split: str) -> EncodedExamples:
        examples = PreparedTask.load(self.cfg.data).read(split, self.longest, self.dictionary.eos())
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

    def max_positions(self) -> Optional[int]:
        return self.longest


def check_options(cfg: GlueConfig, description: TaskDescription) -> None:
    """Raises a UserError for options that would fail late, or select the worst checkpoint."""
    if not Path(cfg.data).is_dir():
        raise UserError(f"{cfg.data}: no such folder; give the one with {description.name}'s official files")
    if PreparedTask.is_at(cfg.data) and PreparedTask.load(cfg.data).task is not description:
        raise UserError(f"{cfg.data}: holds {PreparedTask.load(cfg.data).task.name}, not {description.name}")
    if cfg.finetune_from_model and not Path(cfg.finetune_from_model).is_file():
        raise UserError(f"--finetune-from-model {cfg.finetune_from_model}: no such file; give a checkpoint, *.pt")
    metric = cfg.best_checkpoint_metric
    if metric not in ("loss", *description.metrics):
        raise UserError(
            f"--best-checkpoint-metric {metric}: {description.name} has loss, {', '.join(description.metrics)}"
        )
    if cfg.maximize_best_checkpoint_metric != (metric != "loss"):
        change = "drop" if metric == "loss" else "add"
        raise UserError(
            f"--best-checkpoint-metric {metric} would keep the worst checkpoint as the best; {change} "
            "--maximize-best-checkpoint-metric"
        )
    for split in cfg.valid_subset.split(","):
        if split in description.splits and description.splits[split].label is None:
            raise UserError(f"--valid-subset {cfg.valid_subset}: {description.name}'s split {split} has no labels")


def find_tokenizer(cfg: GlueConfig) -> Path:
    """The tokenizer's folder: of prepared data, its own; else the one given, beside the checkpoint or the data.

    Raises:
        UserError: none is there, or data was prepared with another than the one given.
    """
    if PreparedTask.is_at(cfg.data):
        return _tokenizer_of_prepared(cfg)
    if cfg.tokenizer_folder:
        return Path(cfg.tokenizer_folder)
    neighbours = [Path(cfg.finetune_from_model).parent] if cfg.finetune_from_model else []
    candidates = [folder / "tokenizer" for folder in (*neighbours, Path(cfg.data))]
    for folder in candidates:
        if folder.is_dir():
            return folder
    raise UserError(f"no tokenizer at {' or '.join(map(str, candidates))}; give the checkpoint's by --tokenizer-folder")


def _tokenizer_of_prepared(cfg: GlueConfig) -> Path:
    folder = PreparedTask.load(cfg.data).tokenizer_folder
    given = Path(cfg.tokenizer_folder or folder)
    load_tokenizer(given)  # raises what is wrong with it
    if (given / SETTINGS_FILE).read_bytes() != (folder / SETTINGS_FILE).read_bytes():
        raise UserError(
            f"--tokenizer-folder {given}: {cfg.data} was prepared with another tokenizer; prepare the data with this "
            "one, or leave the option out"
        )
    return folder
