"""Task ``squad``: fine-tuning on SQuAD v1.1, spans of a text that answer questions (PAR, section 3.3 and Table 4).

From the official files, or from the folder that ``lazyformer squad prepare`` made of them.
"""

import logging
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Optional

from fairseq.dataclass import FairseqDataclass
from fairseq.tasks import register_task
from omegaconf import MISSING

from lazyformer_fairseq.data.datasets.question_windows import QuestionWindowsDataset
from lazyformer_fairseq.data.squad.metrics import METRICS
from lazyformer_fairseq.data.squad.official import SPLITS, read_squad
from lazyformer_fairseq.data.squad.prepared_data import PreparedSplit, PreparedSquad
from lazyformer_fairseq.data.squad.windows import USUAL, WindowSettings, make_windows
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
from lazyformer_fairseq.modules.networks.heads import SPAN

logger = logging.getLogger(__name__)


@dataclass
class SquadConfig(FineTuningConfig):
    data: str = option(MISSING, f"folder of the official files {', '.join(SPLITS.values())}, or of SQuAD as prepared")
    train_file: str = option(SPLITS["train"], "name of the file to train on, in the folder of official files")
    valid_file: str = option(SPLITS["valid"], "name of the file to validate on, in the folder of official files")
    skip_mistakes: bool = option(False, "leave out what is wrong in the files, as answers that are not at their place")
    tokens_per_sample: Optional[int] = option(
        None, f"tokens of an input, all counted; default: {USUAL.longest}, or as prepared"
    )
    doc_stride: Optional[int] = option(
        None,
        "a context too long for one input gets several, each so many tokens further on; default: "
        f"{USUAL.stride}, or as prepared",
    )
    max_question_tokens: Optional[int] = option(
        None, f"longer questions are cut to so many tokens; default: {USUAL.longest_question}, or as prepared"
    )
    max_answer_tokens: int = option(30, "longest answer that is predicted")
    squad_head_name: str = option("squad", "name of the head")


@register_task("squad", dataclass=SquadConfig)
class SquadTask(FineTuningTask):
    """Reads and encodes the files, adds the head to the model, and checks the options before anything is trained.

    Attributes:
        settings: sizes of the windows.
        marks_questions: whether the pattern has sublayers that are told which tokens all others see; the question's.
    """

    cfg: SquadConfig

    def __init__(self, cfg: SquadConfig, tokenizer_folder: Path, settings: WindowSettings):
        super().__init__(cfg, tokenizer_folder, cfg.squad_head_name, settings.longest)
        self.settings = settings
        self.marks_questions = False

    @classmethod
    def setup_task(cls, cfg: SquadConfig, **kwargs) -> "SquadTask":
        """Finds the tokenizer and the sizes of windows.

        Raises:
            UserError: an option that does not fit, or no tokenizer where it should be.
        """
        if not kwargs.get("from_checkpoint"):
            check_start(cfg, "SQuAD")
            check_best_metric(cfg, "SQuAD", list(METRICS))
            warn_without_start(cfg)
        if cfg.max_answer_tokens < 1:
            raise UserError(f"--max-answer-tokens {cfg.max_answer_tokens}: must be 1 at least")
        prepared = PreparedSquad.load(cfg.data) if PreparedSquad.is_at(cfg.data) else None
        folder = find_tokenizer(cfg, prepared and prepared.tokenizer_folder)
        task = cls(cfg, folder, settings_of(cfg, prepared))
        logger.info("SQuAD v1.1: dictionary of %d symbols from %s; %s", len(task.dictionary), folder, task.settings)
        return task

    def build_model(self, cfg: FairseqDataclass, from_checkpoint: bool = False):
        """The model with the head.

        Raises:
            UserError: inputs are longer than the model's, or the model has no heads.
        """
        model = super().build_model(cfg, from_checkpoint)
        if not hasattr(model, "register_classification_head"):
            raise UserError("--task squad needs a model that encodes; this one writes text from left to right")
        self.marks_questions = bool(model.encoder.sentence_encoder.asking)
        model.register_classification_head(self.head_name, 2, SPAN)
        return model

    def build_criterion(self, cfg: FairseqDataclass, from_checkpoint: bool = False):
        if cfg._name != "squad":
            raise UserError(f"--criterion {cfg._name} does not read SQuAD's spans; give --criterion squad")
        return super().build_criterion(cfg, from_checkpoint)

    def load_dataset(self, split: str, **kwargs) -> None:
        """Reads and encodes a split, `train` or `valid`; call it when the model is built.

        Raises:
            UserError: no such split or file, or questions in it that are wrong.
        """
        if split not in SPLITS:
            raise UserError(f"SQuAD has no split {split!r}; it has {', '.join(SPLITS)}")
        is_prepared = PreparedSquad.is_at(self.cfg.data)
        read = PreparedSquad.load(self.cfg.data).read(split) if is_prepared else self._read_official(split)
        self.datasets[split] = self.dataset_of(read, split)
        logger.info(
            "%s: %d questions on %d paragraphs, %d windows, the longest of %d tokens, %d questions cut",
            read.file.path,
            len(read.file.questions),
            len(read.file.contexts),
            len(read.windows),
            read.windows.sizes.max(),
            read.windows.cut_questions,
        )
        if split == "train" and not self.cfg.no_save:
            keep_tokenizer_with_checkpoints(self.tokenizer_folder, Path(self.cfg.save_dir))

    def dataset_of(self, read: PreparedSplit, split: str) -> QuestionWindowsDataset:
        """A split as the model is fed; answers are needed to train and to validate, not to predict."""
        return QuestionWindowsDataset(
            *read,
            split,
            self.cfg.max_answer_tokens,
            pad=self.dictionary.pad(),
            shuffle=split == "train",
            seed=self.cfg.seed,
            types_after=self.dictionary.eos() if self.has_token_types else None,
            marks_questions=self.marks_questions,
        )

    def _read_official(self, split: str) -> PreparedSplit:
        name = {"train": self.cfg.train_file, "valid": self.cfg.valid_file}[split]
        file = read_squad(Path(self.cfg.data) / name, self.cfg.skip_mistakes)
        for mistake in file.left_out:
            logger.warning("%s, left out: %s", file.path, mistake)
        return PreparedSplit(file, make_windows(self.tokenizer, file, self.settings))


def settings_of(cfg: SquadConfig, prepared: Optional[PreparedSquad]) -> WindowSettings:
    """The sizes of windows that options ask for, or as prepared; UserError where both are there and differ."""
    usual = prepared.settings if prepared else USUAL
    given = {
        "longest": cfg.tokens_per_sample, "stride": cfg.doc_stride, "longest_question": cfg.max_question_tokens,
    }  # fmt: skip
    wanted = replace(usual, **{name: size for name, size in given.items() if size is not None})
    if prepared and wanted != usual:
        raise UserError(
            f"{cfg.data}: was prepared with {usual}, the options ask for {wanted}; leave --tokens-per-sample, "
            "--doc-stride and --max-question-tokens out, or prepare the data anew"
        )
    return wanted
