"""The tasks ``full_sentences_masked_lm``, ``masked_permuted_lm`` and ``inputs_masked_lm``: masked LM on blocks of text.

The first task reads FULL-SENTENCES blocks (LazyFormer, appendix A), the second reads the same blocks but permutes them
(MPNet), and the third reads the inputs of a prepared task. With ``--next-sentence``, the first reads pairs of texts, as
in BERT's pre-training; see :mod:`lazyformer_fairseq.data.datasets.sentence_pairs`.
"""

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Optional

from fairseq.dataclass import FairseqDataclass
from fairseq.tasks import register_task
from omegaconf import II, MISSING

from lazyformer_fairseq.data import masked_text
from lazyformer_fairseq.data.masked_text import MaskedText, MaskedTextOptions
from lazyformer_fairseq.data.shards import data_folders, keep_tokenizer, tokenizer_of
from lazyformer_fairseq.data.text.dictionary_file import Dictionary
from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.fairseq_plugin.fairseq_classes import as_fairseq
from lazyformer_fairseq.fairseq_plugin.models.config import to_fairseq_dataclass
from lazyformer_fairseq.fairseq_plugin.reliability.options import ReliabilityConfig, option
from lazyformer_fairseq.fairseq_plugin.tasks import encoder_task
from lazyformer_fairseq.training.objectives.masked_lm import prepare_model

logger = logging.getLogger(__name__)

PAIRS_NEED = ("masked_lm_accuracy", "continued_masked_lm")  # the criterions that support --next-sentence


@dataclass
class FullSentencesMaskedLMConfig(to_fairseq_dataclass(MaskedTextOptions, "MaskedTextConfig"), ReliabilityConfig):
    """Options of masked LM on blocks, and the fairseq options that the task reads."""

    data: str = option(MISSING, "folder written by lazyformer corpus, or binarized folders a:b:c, one per epoch")
    checkpoint_words: Optional[str] = option(
        None,
        "save an additional checkpoint, which is never deleted and has no optimizer state, after training on each of "
        "these numbers of words, such as 1M,2M,5M",
    )
    word_budget: Optional[str] = option(
        None,
        "maximum number of words, such as 100M; a run that would read more, counting repetitions, is rejected",
    )
    seed: int = II("common.seed")
    max_update: int = II("optimization.max_update")
    save_dir: str = II("checkpoint.save_dir")
    no_save: bool = II("checkpoint.no_save")


@register_task("full_sentences_masked_lm", dataclass=FullSentencesMaskedLMConfig)
class FullSentencesMaskedLMTask(encoder_task.EncoderTask):
    """Masked LM on blocks of text; see :mod:`lazyformer_fairseq.data.masked_text`.

    Raises:
        UserError: ``--mask-prob`` changes during the run but ``--max-update`` is missing, or whole-word masking lacks
            a tokenizer.

    Attributes:
        text: the binarized text.
        masking: the masking settings.
        has_token_types: whether the model has token types, which distinguish the two texts of a pair.
    """

    cfg: FullSentencesMaskedLMConfig
    WHOLE_INPUTS: ClassVar[bool] = False  # whether each item of the data is one block
    has_token_types: bool = False

    def __init__(self, cfg: FullSentencesMaskedLMConfig, dictionary: Dictionary):
        super().__init__(cfg, dictionary)
        self.text = MaskedText(
            cfg.data,
            cfg,
            self.dictionary,
            cfg.seed,
            max_update=cfg.max_update,
            whole_inputs=self.WHOLE_INPUTS,
        )
        self.masking = self.text.masking

    def at_update(self, batch: dict[str, Any], update: int) -> dict[str, Any]:
        """Return a training batch adapted to a given update, counted from 0."""
        return self.text.at_update(batch, update)

    @classmethod
    def setup_task(cls, cfg: FullSentencesMaskedLMConfig, **kwargs) -> "FullSentencesMaskedLMTask":
        """Load the data's dictionary and create the task."""
        return cls(cfg, encoder_task.dictionary_of(data_folders(cfg.data)[0]))

    def build_model(self, cfg: FairseqDataclass, from_checkpoint: bool = False):
        """Build the model; with ``--next-sentence``, add the next-sentence prediction head.

        Raises:
            UserError: the model does not support that head.
        """
        model = super().build_model(cfg, from_checkpoint)
        prepare_model(model, self.text, masked_text.PERMUTED, starts_fresh=not from_checkpoint)
        if self.cfg.next_sentence:
            if not hasattr(model, "register_next_sentence_head"):
                raise UserError("--next-sentence: only this package's encoders support it; omit the option")
            model.register_next_sentence_head()
            self.has_token_types = getattr(cfg, "token_types", 0) > 1
            if not self.has_token_types:
                logger.warning(
                    "--next-sentence: the model has no token types; to add them as in BERT, use --token-types 2"
                )
        return model

    def build_criterion(self, cfg: FairseqDataclass, from_checkpoint: bool = False):
        """Build the criterion.

        Raises:
            UserError: the criterion does not use the pairs' labels, or distillation would compare attention that does
                not cover whole blocks.
        """
        if self.cfg.next_sentence and cfg._name not in PAIRS_NEED:
            raise UserError(
                f"--criterion {cfg._name} does not support --next-sentence; use --criterion {PAIRS_NEED[0]}"
            )
        if self.cfg.next_sentence and getattr(cfg, "distill", None):
            raise UserError(
                "--distill: a teacher does not predict next sentences; omit either this option or --next-sentence"
            )
        is_apart = self.cfg.within_documents or self.text.is_permuted
        if is_apart and getattr(cfg, "distill", None) and cfg.distill_attention_weight:
            what = f"--task {masked_text.PERMUTED}" if self.text.is_permuted else "--within-documents"
            raise UserError(
                f"{what}: --distill compares attention over whole blocks, which does not exist here; set "
                "--distill-attention-weight 0"
            )
        return super().build_criterion(cfg, from_checkpoint)

    def load_dataset(self, split: str, epoch: int = 1, combine: bool = False, **kwargs) -> None:
        """Load an epoch's shard; for `train`, also copy the tokenizer to ``--save-dir``.

        Raises:
            UserError: some epoch's file is missing, is damaged or does not match the data (see ``--verify``).
        """
        cfg = self.cfg
        text = self.text
        if split not in self.datasets:
            text.check(split)
        path = text.path(split, epoch)
        dataset = text.dataset(split, epoch, self.has_token_types)
        self.datasets[split] = as_fairseq(dataset)
        what = "pairs" if cfg.next_sentence else "blocks"
        efficiency = dataset.packing_efficiency(cfg.tokens_per_sample)
        logger.info(
            f"{path}: {len(dataset.items)} items packed into {len(dataset)} {what} of at most {cfg.tokens_per_sample} "
            f"tokens, packing efficiency {efficiency:.1%}"
        )
        if split == "train" and not cfg.no_save:
            keep_tokenizer(tokenizer_of(text.folders[0]), Path(cfg.save_dir))

    def has_sharded_data(self, split: str) -> bool:
        """Return whether each epoch has a separate folder."""
        return len(self.text.folders) > 1

    def max_positions(self) -> int:
        """Return the maximum number of tokens per block."""
        return self.cfg.tokens_per_sample


MaskedPermutedLMConfig = to_fairseq_dataclass(
    masked_text.PermutedTextOptions,
    "MaskedPermutedLMConfig",
    base=FullSentencesMaskedLMConfig,
)


@register_task(masked_text.PERMUTED, dataclass=MaskedPermutedLMConfig)
class MaskedPermutedLMTask(FullSentencesMaskedLMTask):
    """Prediction of the last tokens of permuted blocks, as in MPNet or, with ``--permuted-only``, as in XLNet."""


@register_task("inputs_masked_lm", dataclass=FullSentencesMaskedLMConfig)
class InputsMaskedLMTask(FullSentencesMaskedLMTask):
    """Masked language modeling on the inputs of a prepared task, one per block, without their labels.

    This is self-pretraining (Amos et al., 2023, "Never Train from Scratch"): before a model is fine-tuned on a task, it
    is pre-trained on that task's training inputs and on no other text.
    """

    WHOLE_INPUTS = True

    @classmethod
    def setup_task(cls, cfg: FullSentencesMaskedLMConfig, **kwargs) -> "InputsMaskedLMTask":
        """Load the data's dictionary and create the task.

        Raises:
            UserError: ``--next-sentence`` or ``--within-documents`` is set, although each input is one text.
        """
        for name in ("next_sentence", "within_documents"):
            if getattr(cfg, name):
                option = f"--{name.replace('_', '-')}"
                raise UserError(f"{option}: each of a task's inputs is one whole text; omit the option")
        return super().setup_task(cfg, **kwargs)
