"""What tasks share that fine-tune a pre-trained encoder on labelled texts: options, the tokenizer, the head."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Optional

from fairseq.dataclass import FairseqDataclass
from omegaconf import II, MISSING

from lazyformer_fairseq.data.text.interface import SETTINGS_FILE, TextTokenizer
from lazyformer_fairseq.data.text.load_tokenizer import load_tokenizer
from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.fairseq_plugin.reliability.options import ReliabilityConfig, option
from lazyformer_fairseq.fairseq_plugin.tasks.encoder_task import EncoderTask

logger = logging.getLogger(__name__)


@dataclass
class FineTuningConfig(ReliabilityConfig):
    data: str = option(MISSING, "folder of official files, or of data as prepared")
    # Not `tokenizer`: fairseq has an option of that name already, which would win in silence.
    tokenizer_folder: Optional[str] = option(
        None,
        "the checkpoint's tokenizer; default: that of prepared data, else tokenizer/ beside the "
        "checkpoint, else in the data folder",
    )
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
        tokenizer: that of the checkpoint.
        longest: tokens of an input; None until the model is built, unless an option sets it.
        has_token_types: whether the model tells the two texts of a pair apart by their tokens' types.
    """

    def __init__(self, cfg: FineTuningConfig, tokenizer_folder: Path, head_name: str, longest: Optional[int]):
        self.tokenizer: TextTokenizer = load_tokenizer(tokenizer_folder)
        super().__init__(cfg, self.tokenizer.dictionary)
        self.tokenizer_folder = tokenizer_folder
        self.head_name = head_name
        self.longest = self._wanted = longest
        self.has_token_types = False

    def build_model(self, cfg: FairseqDataclass, from_checkpoint: bool = False):
        """The model, without the task's head.

        Raises:
            UserError: ``--tokens-per-sample`` is more than the model has.
        """
        model = super().build_model(cfg, from_checkpoint)
        self.has_token_types = getattr(cfg, "token_types", 0) > 1
        self.longest = self._wanted or model.max_positions()
        if self.longest > model.max_positions():
            raise UserError(
                f"--tokens-per-sample {self.longest}: the model has {model.max_positions()} positions; give as many at "
                "most"
            )
        return model

    def max_positions(self) -> Optional[int]:
        return self.longest


def check_start(cfg: FineTuningConfig, what: str) -> None:
    """Raises a UserError where the data folder or the checkpoint to start from is not there.

    Args:
        what: the data's name, for messages.
    """
    if not Path(cfg.data).is_dir():
        raise UserError(f"{cfg.data}: no such folder; give the one with {what}'s official files")
    if cfg.finetune_from_model and not Path(cfg.finetune_from_model).is_file():
        raise UserError(f"--finetune-from-model {cfg.finetune_from_model}: no such file; give a checkpoint, *.pt")


def check_best_metric(cfg: FineTuningConfig, what: str, metrics: Sequence[str]) -> None:
    """Raises a UserError for options that would fail at the first validation, or keep the worst checkpoint."""
    metric = cfg.best_checkpoint_metric
    if metric not in ("loss", *metrics):
        raise UserError(f"--best-checkpoint-metric {metric}: {what} has loss, {', '.join(metrics)}")
    if cfg.maximize_best_checkpoint_metric != (metric != "loss"):
        change = "drop" if metric == "loss" else "add"
        raise UserError(
            f"--best-checkpoint-metric {metric} would keep the worst checkpoint as the best; {change} "
            "--maximize-best-checkpoint-metric"
        )


def warn_without_start(cfg: FineTuningConfig) -> None:
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
        return _tokenizer_of_prepared(cfg, prepared)
    if cfg.tokenizer_folder:
        return Path(cfg.tokenizer_folder)
    neighbours = [Path(cfg.finetune_from_model).parent] if cfg.finetune_from_model else []
    candidates = [folder / "tokenizer" for folder in (*neighbours, Path(cfg.data))]
    for folder in candidates:
        if folder.is_dir():
            return folder
    raise UserError(f"no tokenizer at {' or '.join(map(str, candidates))}; give the checkpoint's by --tokenizer-folder")


def _tokenizer_of_prepared(cfg: FineTuningConfig, folder: Path) -> Path:
    given = Path(cfg.tokenizer_folder or folder)
    load_tokenizer(given)  # raises what is wrong with it
    if (given / SETTINGS_FILE).read_bytes() != (folder / SETTINGS_FILE).read_bytes():
        raise UserError(
            f"--tokenizer-folder {given}: {cfg.data} was prepared with another tokenizer; prepare the data with this "
            "one, or leave the option out"
        )
    return folder
