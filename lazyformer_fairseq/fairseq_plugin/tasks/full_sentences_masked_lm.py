"""Tasks ``full_sentences_masked_lm`` and ``inputs_masked_lm``: masked language modelling on blocks of text.

The first is on FULL-SENTENCES blocks (LazyFormer, appendix A).
With ``--next-sentence`` on pairs of texts, as BERT was pre-trained: see
:mod:`lazyformer_fairseq.data.datasets.sentence_pairs`.
"""

import logging
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from fairseq import utils
from fairseq.data import Dictionary, data_utils
from fairseq.data.indexed_dataset import infer_dataset_impl
from fairseq.dataclass import ChoiceEnum, FairseqDataclass
from fairseq.tasks import register_task
from omegaconf import II, MISSING

from lazyformer_fairseq.data.datasets import masked_blocks
from lazyformer_fairseq.data.datasets.sentence_pairs import SentencePairsDataset
from lazyformer_fairseq.data.text.dictionary_file import mask_index_of
from lazyformer_fairseq.data.text.interface import TextTokenizer
from lazyformer_fairseq.data.text.tokenizer import load_tokenizer
from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.fairseq_plugin.kinds import as_fairseq
from lazyformer_fairseq.fairseq_plugin.reliability.data import check_data, prefixes
from lazyformer_fairseq.fairseq_plugin.reliability.options import ReliabilityConfig, option
from lazyformer_fairseq.fairseq_plugin.tasks import encoder_task
from lazyformer_fairseq.options import mask_shares
from lazyformer_fairseq.storage.indexed_format import MappedItems

logger = logging.getLogger(__name__)

PAIRS_NEED = ("masked_lm_accuracy", "continued_masked_lm")  # criterions that learn what follows what


@dataclass
class FullSentencesMaskedLMConfig(ReliabilityConfig):
    data: str = option(MISSING, "what lazyformer corpus wrote, or binarised folders as a:b:c, one an epoch")
    tokens_per_sample: int = option(512, "longest block of sentences in tokens, <s> and </s> included")
    mask_prob: Any = option(0.15, "share of tokens to predict; 0.3:0.15: of the first and of the last update")
    whole_word_masks: bool = field(
        default=False,
        metadata={"help": "predict all pieces of a word, or none of them", "argparse_alias": "--mask-whole-words"},
    )
    leave_unmasked_prob: float = option(0.1, "share of these that stay as they are")
    random_token_prob: float = option(0.1, "share of these that become another word")
    next_sentence: bool = option(False, "read pairs of texts, and learn which follow which, as BERT; --token-types 2")
    within_documents: bool = option(False, "tokens see their own document alone")
    document_positions: bool = option(False, "positions begin anew in each document")
    verify: ChoiceEnum(["quick", "full", "none"]) = option(
        "quick", "check all epochs' data at the start: quick at samples, full at every id"
    )
    seed: int = II("common.seed")
    max_update: int = II("optimization.max_update")
    save_dir: str = II("checkpoint.save_dir")
    no_save: bool = II("checkpoint.no_save")


@register_task("full_sentences_masked_lm", dataclass=FullSentencesMaskedLMConfig)
class FullSentencesMaskedLMTask(encoder_task.EncoderTask):
    """Packs, masks and batches; see :mod:`lazyformer_fairseq.data`.

    Attributes:
        has_token_types: whether the model tells the two texts of a pair apart by their tokens' types.
    """

    cfg: FullSentencesMaskedLMConfig
    has_token_types: bool = False

    def __init__(self, cfg: FullSentencesMaskedLMConfig, dictionary: Dictionary):
        """Raises a UserError for shares of masks that need the run's length, or words that need a tokenizer."""
        super().__init__(cfg, dictionary)
        if cfg.within_documents and cfg.next_sentence:
            raise UserError("--within-documents: the two texts of --next-sentence must see each other; leave one out")
        if cfg.document_positions and not cfg.within_documents:
            raise UserError("--document-positions: is of --within-documents; give both, or neither")
        mask_index = mask_index_of(dictionary)
        first, last = mask_shares(cfg.mask_prob)
        if first != last and not cfg.max_update:
            raise UserError(f"--mask-prob {cfg.mask_prob}: is the share over a run; say how long it is by --max-update")
        self.masking = masked_blocks.Masking(
            vocab_size=len(dictionary),
            mask_index=mask_index,
            pad_index=dictionary.pad(),
            special=(dictionary.bos(), dictionary.pad(), dictionary.eos(), dictionary.unk(), mask_index),
            probability=first,
            keep=cfg.leave_unmasked_prob,
            random=cfg.random_token_prob,
            last=None if first == last else last,
            begins_word=self._begins_word() if cfg.whole_word_masks else None,
        )

    def _begins_word(self) -> np.ndarray:
        """Which ids do, bool (V,)."""
        folder = tokenizer_of(data_folders(self.cfg.data)[0])
        if not folder.is_dir():
            raise UserError(
                f"--whole-word-masks: no tokenizer beside the data ({folder}), which says where words begin; "
                "lazyformer corpus writes one"
            )
        if not (found := load_tokenizer(folder).begins_word).any():
            raise UserError(f"--whole-word-masks: no symbol of {folder} begins a word; leave it out")
        return found

    def at_update(self, batch: dict[str, Any], update: int) -> dict[str, Any]:
        """A training batch with the masks that the run's update `update`, from 0, is to have: linear over the run."""
        masking, done = self.masking, min(1, update / max(1, self.cfg.max_update - 1))
        share = masking.probability + done * (masking.last - masking.probability)
        return masked_blocks.at_share(batch, share, masking.pad_index)

    @classmethod
    def setup_task(cls, cfg: FullSentencesMaskedLMConfig, **kwargs) -> "FullSentencesMaskedLMTask":
        return cls(cfg, encoder_task.dictionary_of(data_folders(cfg.data)[0]))

    def build_model(self, cfg: FairseqDataclass, from_checkpoint: bool = False):
        """The model, for pairs with the head that says whether the second text follows the first.

        Raises:
            UserError: a model that has no place for it.
        """
        model = super().build_model(cfg, from_checkpoint)
        if self.cfg.within_documents:
            encoder_task.check_takes_documents(model, "--within-documents")
        if self.cfg.next_sentence:
            if not hasattr(model, "register_next_sentence_head"):
                raise UserError("--next-sentence: is for encoders of this package; leave it out")
            model.register_next_sentence_head()
            self.has_token_types = getattr(cfg, "token_types", 0) > 1
            if not self.has_token_types:
                logger.warning("--next-sentence: the model has no token types; BERT has them: --token-types 2")
        return model

    def build_criterion(self, cfg: FairseqDataclass, from_checkpoint: bool = False):
        """Raises a UserError for one that would leave the pairs' labels alone."""
        if self.cfg.next_sentence and cfg._name not in PAIRS_NEED:
            raise UserError(f"--criterion {cfg._name}: does not learn next sentences; give --criterion {PAIRS_NEED[0]}")
        if self.cfg.next_sentence and getattr(cfg, "distill", None):
            raise UserError("--distill: a teacher teaches words alone; leave it out, or --next-sentence")
        if self.cfg.within_documents and getattr(cfg, "distill", None) and cfg.distill_attention_weight:
            raise UserError(
                "--within-documents: the attention that --distill compares is that of whole blocks; give "
                "--distill-attention-weight 0"
            )
        return super().build_criterion(cfg, from_checkpoint)

    def load_dataset(self, split: str, epoch: int = 1, combine: bool = False, **kwargs) -> None:
        """Loads the shard of an epoch; `train` also copies the tokenizer beside the checkpoints.

        Raises:
            UserError: a file of any epoch is missing, damaged or of other data (see ``--verify``).
        """
        cfg, folders = self.cfg, data_folders(self.cfg.data)
        tokenizer = tokenizer_of(folders[0])
        if split not in self.datasets:
            known = tokenizer if tokenizer.is_dir() else None
            check_data(folders, split, self.dictionary, str(cfg.verify), known, combine)
        path = str(Path(folders[(epoch - 1) % len(folders)]) / split)
        if infer_dataset_impl(path) == "mmap" and len(prefixes(Path(path), combine)) == 1:
            items = MappedItems(path)
        else:
            items = data_utils.load_indexed_dataset(path, self.dictionary, combine=combine)
        if items is None:
            raise UserError(f"{path}.bin, {path}.idx: no such files; does --data name the folder of binarised data?")
        make, own_options = self._dataset_class(tokenizer)
        ends = {"bos": self.dictionary.bos(), "eos": self.dictionary.eos()}
        masking, is_training = self.masking, split == "train"
        if masking.last is not None and not is_training:
            masking = replace(masking, probability=masking.last, last=None)
        how = {"masking": masking, "seed": cfg.seed, "name": path, "shuffle": is_training, **own_options}
        dataset = make(items, items.sizes, cfg.tokens_per_sample, **ends, **how)
        if split == "train":
            dataset.set_epoch(epoch)
        self.datasets[split] = as_fairseq(dataset)
        what, efficiency = "pairs" if cfg.next_sentence else "blocks", dataset.packing_efficiency(cfg.tokens_per_sample)
        logger.info(
            f"{path}: {len(items)} items packed into {len(dataset)} {what} of at most {cfg.tokens_per_sample} tokens, "
            f"packing efficiency {efficiency:.1%}"
        )
        if split == "train" and not cfg.no_save:
            encoder_task.keep_tokenizer_with_checkpoints(tokenizer, Path(cfg.save_dir))

    def _dataset_class(self, tokenizer: Path) -> tuple[type[masked_blocks.MaskedBlocksDataset], dict[str, Any]]:
        """What makes blocks of the items, and the options that it alone has."""
        if not self.cfg.next_sentence:
            of_documents = {name: getattr(self.cfg, name) for name in ("within_documents", "document_positions")}
            return masked_blocks.FullSentencesDataset, of_documents
        known = load_tokenizer(tokenizer) if tokenizer.is_dir() else TextTokenizer
        return SentencePairsDataset, {"separators": known.separators, "has_token_types": self.has_token_types}

    def has_sharded_data(self, split: str) -> bool:
        return len(data_folders(self.cfg.data)) > 1

    def max_positions(self) -> int:
        return self.cfg.tokens_per_sample


@register_task("inputs_masked_lm", dataclass=FullSentencesMaskedLMConfig)
class InputsMaskedLMTask(FullSentencesMaskedLMTask):
    """Masked language modelling on a prepared task's own inputs, one a block; labels are left alone.

    Self-pretraining (Amos et al., 2023, "Never Train from Scratch"): before a model learns the labels of a task, it
    learns to fill masks in the training inputs of that task and in nothing else.
    """

    @classmethod
    def setup_task(cls, cfg: FullSentencesMaskedLMConfig, **kwargs) -> "InputsMaskedLMTask":
        """Raises a UserError for pairs of texts, and documents in a text: inputs are whole already."""
        for name in ("next_sentence", "within_documents"):
            if getattr(cfg, name):
                option = f"--{name.replace('_', '-')}"
                raise UserError(f"{option}: the inputs of a task are whole already; leave it out")
        return super().setup_task(cfg, **kwargs)

    def _dataset_class(self, tokenizer: Path) -> tuple[type[masked_blocks.MaskedInputsDataset], dict[str, Any]]:
        """Each input is a block."""
        return masked_blocks.MaskedInputsDataset, {}


def data_folders(data: str) -> list[str]:
    """The folders of ``a:b:c``, each of which must exist (UserError); a corpus means its shards, in order."""
    folders = []
    for folder in utils.split_paths(data):
        if not folder or not Path(folder).is_dir():
            raise UserError(f"--data {data}: {folder or 'an empty name'} is no folder")
        shards = {int(path.name[5:]): str(path) for path in Path(folder).glob("shard*") if path.name[5:].isdigit()}
        folders += [shards[number] for number in sorted(shards)] or [folder]
    return folders


def tokenizer_of(folder: str) -> Path:
    """The tokenizer beside a folder's data, or beside the folder if that is a shard."""
    beside = Path(folder) / "tokenizer"
    return beside if beside.is_dir() else Path(folder).parent / "tokenizer"
