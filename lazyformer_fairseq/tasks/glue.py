"""Task ``glue``: fine-tuning on one GLUE task, from the official files (LazyFormer, section 4.1 and Table 5)."""

import logging
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Iterator, List, Optional

import numpy as np
from fairseq.data import Dictionary
from fairseq.dataclass import FairseqDataclass
from fairseq.tasks import FairseqTask, register_task
from omegaconf import II, MISSING
from tqdm import tqdm

from lazyformer_fairseq.data.labelled_texts_dataset import LabelledTextsDataset
from lazyformer_fairseq.data.tokenizer import Tokenizer
from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.glue.task_table import TaskDescription, find_task
from lazyformer_fairseq.glue.tsv import Example, read_split
from lazyformer_fairseq.tasks.dictionary_check import DictionaryCheck
from lazyformer_fairseq.tasks.tokenizer_copy import keep_tokenizer_with_checkpoints

logger = logging.getLogger(__name__)


@dataclass
class GlueConfig(FairseqDataclass):
    data: str = field(default=MISSING, metadata={"help": "folder of the task's official files, train.tsv and so on"})
    glue_task: Optional[str] = field(
        default=None, metadata={"help": "CoLA, SST-2, MRPC, STS-B, QQP, MNLI, QNLI, RTE or WNLI; default: folder's name"}
    )
    # Not `tokenizer`: fairseq has an option of that name already, which would win in silence.
    tokenizer_folder: Optional[str] = field(
        default=None,
        metadata={"help": "tokenizer of the checkpoint; default: tokenizer/ beside the checkpoint, then beside the data"},
    )
    max_positions: int = field(default=512, metadata={"help": "longer inputs are cut to so many tokens, all counted"})
    glue_head_name: Optional[str] = field(
        default=None, metadata={"help": "name of the classification head; default: the task's in lower case"}
    )
    seed: int = II("common.seed")
    finetune_from_model: Optional[str] = II("checkpoint.finetune_from_model")
    save_dir: str = II("checkpoint.save_dir")
    no_save: bool = II("checkpoint.no_save")
    best_checkpoint_metric: str = II("checkpoint.best_checkpoint_metric")
    maximize_best_checkpoint_metric: bool = II("checkpoint.maximize_best_checkpoint_metric")
    valid_subset: str = II("dataset.valid_subset")


@register_task("glue", dataclass=GlueConfig)
class GlueTask(DictionaryCheck, FairseqTask):
    """Reads and encodes the files, adds the head to the model, and checks the options before anything is trained.

    Attributes:
        description: the task's row of the table.
        head_name: of its classification head.
        tokenizer: that of the checkpoint.
    """

    cfg: GlueConfig

    def __init__(self, cfg: GlueConfig, description: TaskDescription, tokenizer: Tokenizer, tokenizer_folder: Path):
        super().__init__(cfg)
        self.description = description
        self.head_name = cfg.glue_head_name or description.head_name
        self.tokenizer = tokenizer
        self.tokenizer_folder = tokenizer_folder

    @classmethod
    def setup_task(cls, cfg: GlueConfig, **kwargs) -> "GlueTask":
        """Finds the row of the table and the tokenizer.

        Raises:
            UserError: an option that does not fit the task, or no tokenizer where it should be.
        """
        description = find_task(cfg.glue_task or Path(os.path.abspath(cfg.data)).name)
        check_options(cfg, description)
        folder = find_tokenizer(cfg)
        tokenizer = Tokenizer.load(folder)
        logger.info(
            "%s: %s, metrics %s; dictionary of %d symbols from %s",
            description.name,
            "scores" if description.is_regression else f"classes {', '.join(description.labels)}",
            ", ".join(description.metrics),
            len(tokenizer.dictionary),
            folder,
        )
        return cls(cfg, description, tokenizer, folder)

    def build_model(self, cfg: FairseqDataclass, from_checkpoint: bool = False):
        """The model with the task's head.

        Raises:
            UserError: ``--max-positions`` is more than the model has.
        """
        model = super().build_model(cfg, from_checkpoint)
        if self.cfg.max_positions > model.max_positions():
            raise UserError(
                f"--max-positions {self.cfg.max_positions} of task glue: the model has {model.max_positions()} "
                "positions; give as many at most"
            )
        model.register_classification_head(self.head_name, self.description.num_classes)
        return model

    def build_criterion(self, cfg: FairseqDataclass, from_checkpoint: bool = False):
        if cfg._name != "glue":
            raise UserError(f"--criterion {cfg._name} knows nothing of GLUE's labels; give --criterion glue")
        return super().build_criterion(cfg, from_checkpoint)

    def load_dataset(self, split: str, **kwargs) -> None:
        """Reads and encodes a split: `train`, `valid`, `test`; MNLI also has `valid1` and `test1` (mismatched)."""
        file = read_split(self.description, self.cfg.data, split)
        inputs = list(self._encode(file.examples, file.path))
        truncated = [example.line for example, ids in zip(file.examples, inputs) if ids is None]
        self.datasets[split] = file, inputs, truncated

    def _encode(self, examples: List[Example], path: Path) -> Iterator[np.ndarray]:
        raise NotImplementedError
