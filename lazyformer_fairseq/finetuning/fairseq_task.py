"""What fairseq trains: the base of tasks and criterions that fine-tune an encoder, their options, their tokenizer."""

import logging
import math
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Optional

import numpy as np
import torch
from fairseq.criterions import FairseqCriterion
from fairseq.dataclass import FairseqDataclass
from fairseq.logging import metrics
from fairseq.logging.meters import MetersDict
from fairseq.models import ARCH_MODEL_REGISTRY
from omegaconf import II, MISSING
from torch import Tensor

from lazyformer_fairseq.data.datasets.labelled_texts import LabelledTextsDataset
from lazyformer_fairseq.data.shards import keep_tokenizer
from lazyformer_fairseq.data.text.interface import SETTINGS_FILE, TextTokenizer
from lazyformer_fairseq.data.text.tokenizer import load_tokenizer
from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.fairseq_plugin.kinds import as_fairseq
from lazyformer_fairseq.fairseq_plugin.reliability.options import ReliabilityConfig, option
from lazyformer_fairseq.fairseq_plugin.tasks.encoder_task import EncoderTask
from lazyformer_fairseq.modules import losses
from lazyformer_fairseq.modules.networks.documents import check_takes_documents
from lazyformer_fairseq.modules.networks.masked_lm import MaskedLM

logger = logging.getLogger(__name__)


@dataclass
class FineTuningConfig(ReliabilityConfig):
    data: str = option(MISSING, "folder of official files, or of data as prepared")
    # Not `tokenizer`: fairseq has an option of that name already, which would win in silence.
    tokenizer_folder: Optional[str] = option(
        None, "default: prepared data's, else tokenizer/ beside the checkpoint or in data"
    )
    no_padding: bool = option(False, "compute texts in a row, unpadded")
    seed: int = II("common.seed")
    finetune_from_model: Optional[str] = II("checkpoint.finetune_from_model")
    save_dir: str = II("checkpoint.save_dir")
    no_save: bool = II("checkpoint.no_save")
    best_checkpoint_metric: str = II("checkpoint.best_checkpoint_metric")
    maximize_best_checkpoint_metric: bool = II("checkpoint.maximize_best_checkpoint_metric")
    valid_subset: str = II("dataset.valid_subset")


class FineTuningTask(EncoderTask):
    """A task that adds a head to a pre-trained model.

    Attributes:
        head_name: of the head.
        head: its outputs and its kind.
        tokenizer: that of the checkpoint.
        longest: tokens of an input; None until the model is built, unless an option sets it.
        has_token_types: whether the model tells the two texts of a pair apart by their tokens' types.
        marks_first_text: whether the pattern has sublayers that are told which tokens all others see.
    """

    def __init__(
        self, cfg: FineTuningConfig, tokenizer: Path, head_name: str, head: tuple[int, str], longest: Optional[int]
    ):
        self.tokenizer: TextTokenizer = load_tokenizer(tokenizer)
        super().__init__(cfg, self.tokenizer.dictionary)
        self.tokenizer_folder, self.head_name, self.head = tokenizer, head_name, head
        self.longest = self._wanted = longest
        self.has_token_types = self.marks_first_text = False

    def build_model(self, cfg: FairseqDataclass, from_checkpoint: bool = False):
        """The model with the task's head.

        Raises:
            UserError: ``--tokens-per-sample`` is more than the model has, or the model is no masked LM of ours.
        """
        if not issubclass(ARCH_MODEL_REGISTRY[cfg._name], MaskedLM):
            raise UserError(
                f"--arch {cfg._name}: is no masked language model of this package, which --task {self.cfg._name} "
                "needs; give one, such as bert_base"
            )
        model = super().build_model(cfg, from_checkpoint)
        self.has_token_types = getattr(cfg, "token_types", 0) > 1
        self.longest = self._wanted or model.max_positions()
        if self.longest > (most := model.max_positions()):
            raise UserError(f"--tokens-per-sample {self.longest}: the model has {most} positions; give as many at most")
        if self.cfg.no_padding:
            check_takes_documents(model, "--no-padding")
        self.marks_first_text = bool(model.encoder.sentence_encoder.asking)
        model.register_classification_head(self.head_name, *self.head)
        return model

    def build_criterion(self, cfg: FairseqDataclass, from_checkpoint: bool = False):
        if cfg._name != (own := self.cfg._name):
            raise UserError(f"--criterion {cfg._name}: --task {own} has its own; give --criterion {own}")
        return super().build_criterion(cfg, from_checkpoint)

    def load_dataset(self, split: str, **kwargs) -> None:
        """Reads and encodes a split; call it when the model is built. Keeps the tokenizer beside checkpoints.

        Raises:
            UserError: no such split or file, or rows in it that are wrong.
        """
        self.datasets[split] = as_fairseq(self.read(split))
        if split == "train" and not self.cfg.no_save:
            keep_tokenizer(self.tokenizer_folder, Path(self.cfg.save_dir))

    def order_of(self, split: str) -> dict[str, Any]:
        """What every dataset of the task is told of padding, order and types of tokens."""
        types_after = self.dictionary.eos() if self.has_token_types else None
        shuffled = {"shuffle": split == "train", "seed": self.cfg.seed}
        return {
            **{"pad": self.dictionary.pad(), "types_after": types_after, "in_a_row": self.cfg.no_padding},
            **shuffled,
        }

    @abstractmethod
    def read(self, split: str) -> LabelledTextsDataset:
        """A split as the model is fed."""

    @abstractmethod
    def marks(self, model: torch.nn.Module, criterion: FairseqCriterion, split: str) -> dict[str, float]:
        """Each metric of a model in evaluation mode on a split that is loaded, as its criterion or better."""

    @abstractmethod
    def baselines(self, split: str) -> dict[str, dict[str, float]]:
        """By name each metric of answers that need no model; they may learn from the training split, loaded before."""

    def max_positions(self) -> Optional[int]:
        return self.longest


class FineTuningCriterion(FairseqCriterion):
    """A head's loss, and metrics over the whole split from the rows that examples leave in validation.

    Attributes:
        NAME: as registered; the task's too.
    """

    NAME: ClassVar[str]

    def __init__(self, task: FineTuningTask):
        """Raises a UserError for another task."""
        super().__init__(task)
        self.head_name = getattr(task, "head_name", None)
        if self.head_name is None:
            raise UserError(f"--criterion {self.NAME} works with --task {self.NAME} alone, not {type(task).__name__}")

    def forward(self, model, sample: dict, reduce: bool = True) -> tuple[Tensor, int, dict]:
        """Loss of one batch.

        Returns:
            The summed loss (nats, or squared error), the number of examples (the gradient's denominator), and what to
            log: in validation also a row of numbers of each example.

        Raises:
            UserError: the model has no head for the task, or the batch has no labels.
        """
        if self.head_name not in getattr(model, "classification_heads", ()):
            raise UserError(
                f"the model has no head {self.head_name!r}; fine-tune it with --task {self.NAME}, or name the "
                f"head it has by --{self.NAME}-head-name"
            )
        if "target" not in sample:
            raise UserError(self.no_targets(sample))
        logits = model(**sample["net_input"], classification_head_name=self.head_name)[0].float()
        loss, log = self.score(sample, logits)
        size = len(sample["target"])
        scored = loss.detach()
        loss = losses.with_experts(model, loss, size, log)
        log |= {"loss": scored, "ntokens": sample["ntokens"], "nsentences": sample["nsentences"]}
        return loss, size, {**log, "sample_size": size}

    @abstractmethod
    def score(self, sample: dict, logits: Tensor) -> tuple[Tensor, dict]:
        """The summed loss and what else to log: in validation `rows` (B, columns) in float64, of each example."""

    def no_targets(self, sample: dict) -> str:
        """What to tell a user whose split has no labels."""
        return "the split has no labels to validate with"

    def logging_outputs_can_be_summed(self) -> bool:
        """True in training, where outputs are numbers; False in validation, where they hold rows."""
        return self.training


def log_loss(logging_outputs: list[dict], unit: float = math.log(2)) -> None:
    """Logs the mean loss of an example over all workers: in bits, or in another unit."""
    examples = sum(log.get("sample_size", 0) for log in logging_outputs)
    loss = sum(log.get("loss", 0) for log in logging_outputs)
    metrics.log_scalar("loss", loss / examples / unit, examples, round=3)


def log_metrics(logging_outputs: list[dict], functions: Mapping[str, Callable[[np.ndarray], float]]) -> None:
    """Logs metrics of the rows of the whole split, from whichever worker and batch they come.

    Args:
        functions: by name, of rows (N, columns).
    """
    for log in logging_outputs:
        metrics.log_custom(_RowsMeter, "_rows", log["rows"])
    for name, function in functions.items():
        metrics.log_derived(name, lambda meters, function=function: function(np.concatenate(meters["_rows"].rows)))


class _RowsMeter(MetersDict._DerivedMeter):
    """Gathers rows batch by batch. Its key starts with "_", so fairseq prints no value of it.

    fairseq saves meters with a checkpoint, and looks for their classes among its own when it resumes. It leaves out
    meters of derived values, as it does this one: the next validation fills it anew.
    """

    def __init__(self):
        self.rows: list[np.ndarray] = []

    def update(self, rows: np.ndarray) -> None:
        self.rows.append(rows)


def check_options(cfg: FineTuningConfig, what: str, metrics: Sequence[str]) -> None:
    """Raises a UserError for paths that are not there, and options that would keep the worst checkpoint or fail late.

    Args:
        what: the data's name, for messages.
        metrics: names, beside the loss.
    """
    if not Path(cfg.data).is_dir():
        raise UserError(f"{cfg.data}: no such folder; give the one with {what}'s official files")
    if cfg.finetune_from_model and not Path(cfg.finetune_from_model).is_file():
        raise UserError(f"--finetune-from-model {cfg.finetune_from_model}: no such file; give a checkpoint, *.pt")
    metric = cfg.best_checkpoint_metric
    if metric not in ("loss", *metrics):
        raise UserError(f"--best-checkpoint-metric {metric}: {what} has loss, {', '.join(metrics)}")
    if cfg.maximize_best_checkpoint_metric != (metric != "loss"):
        change = "drop" if metric == "loss" else "add"
        raise UserError(
            f"--best-checkpoint-metric {metric} would keep the worst checkpoint as the best; {change} "
            "--maximize-best-checkpoint-metric"
        )
    if not cfg.finetune_from_model:
        logger.warning("no --finetune-from-model: a run that is not resumed starts from random weights")


def find_tokenizer(cfg: FineTuningConfig, prepared: Optional[Path]) -> Path:
    """The tokenizer's folder: of prepared data, its own; else the one given, beside the checkpoint or the data.

    Args:
        prepared: the tokenizer's folder in prepared data; None for official files.

    Raises:
        UserError: none is there, or data was prepared with another than the one given.
    """
    if prepared is not None:
        given = Path(cfg.tokenizer_folder or prepared)
        load_tokenizer(given)  # raises what is wrong with it
        if (given / SETTINGS_FILE).read_bytes() != (prepared / SETTINGS_FILE).read_bytes():
            raise UserError(
                f"--tokenizer-folder {given}: {cfg.data} was prepared with another tokenizer; prepare the data with "
                "this one, or leave the option out"
            )
        return prepared
    if cfg.tokenizer_folder:
        return Path(cfg.tokenizer_folder)
    neighbours = [Path(cfg.finetune_from_model).parent] if cfg.finetune_from_model else []
    candidates = [folder / "tokenizer" for folder in (*neighbours, Path(cfg.data))]
    if found := next(filter(Path.is_dir, candidates), None):
        return found
    raise UserError(f"no tokenizer at {' or '.join(map(str, candidates))}; give the checkpoint's by --tokenizer-folder")
