"""Task ``full_sentences_masked_lm``: masked language modelling on FULL-SENTENCES blocks (LazyFormer, appendix A)."""

import logging
from dataclasses import dataclass
from pathlib import Path

from fairseq import utils
from fairseq.data import Dictionary, data_utils
from fairseq.data.indexed_dataset import infer_dataset_impl
from fairseq.dataclass import ChoiceEnum
from fairseq.tasks import register_task
from omegaconf import II, MISSING

from lazyformer_fairseq.data.datasets.full_sentences import FullSentencesDataset
from lazyformer_fairseq.data.datasets.masking import Masking
from lazyformer_fairseq.data.text.dictionary_file import mask_index_of
from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.files.indexed_format import MappedItems
from lazyformer_fairseq.reliability.data_check import check_data, prefixes
from lazyformer_fairseq.reliability.options import ReliabilityConfig, option
from lazyformer_fairseq.tasks.encoder_task import EncoderTask, dictionary_of, keep_tokenizer_with_checkpoints

logger = logging.getLogger(__name__)


@dataclass
class FullSentencesMaskedLMConfig(ReliabilityConfig):
    data: str = option(
        MISSING, "what lazyformer corpus wrote, or folders of binarised data as a:b:c, one an epoch in turn"
    )
    tokens_per_sample: int = option(512, "longest block of sentences in tokens, <s> and </s> included")
    mask_prob: float = option(0.15, "share of tokens to predict")
    leave_unmasked_prob: float = option(0.1, "share of these that stay as they are")
    random_token_prob: float = option(0.1, "share of these that become another word")
    verify: ChoiceEnum(["quick", "full", "none"]) = option(
        "quick",
        "check the data of all epochs at the start: quick looks at the ends of files and at samples, full at every id",
    )
    seed: int = II("common.seed")
    save_dir: str = II("checkpoint.save_dir")
    no_save: bool = II("checkpoint.no_save")


@register_task("full_sentences_masked_lm", dataclass=FullSentencesMaskedLMConfig)
class FullSentencesMaskedLMTask(EncoderTask):
    """Packs, masks and batches; see :mod:`lazyformer_fairseq.data`."""

    cfg: FullSentencesMaskedLMConfig

    def __init__(self, cfg: FullSentencesMaskedLMConfig, dictionary: Dictionary):
        super().__init__(cfg, dictionary)
        mask_index = mask_index_of(dictionary)
        self.masking = Masking(
            vocab_size=len(dictionary),
            mask_index=mask_index,
            pad_index=dictionary.pad(),
            special=(dictionary.bos(), dictionary.pad(), dictionary.eos(), dictionary.unk(), mask_index),
            probability=cfg.mask_prob,
            keep=cfg.leave_unmasked_prob,
            random=cfg.random_token_prob,
        )

    @classmethod
    def setup_task(cls, cfg: FullSentencesMaskedLMConfig, **kwargs) -> "FullSentencesMaskedLMTask":
        return cls(cfg, dictionary_of(data_folders(cfg.data)[0]))

    def load_dataset(self, split: str, epoch: int = 1, combine: bool = False, **kwargs) -> None:
        """Loads the shard of an epoch; `train` also copies the tokenizer beside the checkpoints.

        Raises:
            UserError: a file of any epoch is missing, damaged or of other data (see ``--verify``).
        """
        folders = data_folders(self.cfg.data)
        if split not in self.datasets:
            self._check_data(folders, split, combine)
        path = str(Path(folders[(epoch - 1) % len(folders)]) / split)
        if infer_dataset_impl(path) == "mmap" and len(prefixes(Path(path), combine)) == 1:
            items = MappedItems(path)
        else:
            items = data_utils.load_indexed_dataset(path, self.dictionary, combine=combine)
        if items is None:
            raise UserError(f"{path}.bin, {path}.idx: no such files; does --data name the folder of binarised data?")
        dataset = FullSentencesDataset(
            items,
            items.sizes,
            self.cfg.tokens_per_sample,
            bos=self.dictionary.bos(),
            eos=self.dictionary.eos(),
            masking=self.masking,
            seed=self.cfg.seed,
            shuffle=split == "train",
            name=path,
        )
        self.datasets[split] = dataset
        logger.info(
            "%s: %d items packed into %d blocks of at most %d tokens, packing efficiency %.1f%%",
            path,
            len(items),
            len(dataset),
            self.cfg.tokens_per_sample,
            100 * dataset.packing_efficiency(self.cfg.tokens_per_sample),
        )
        if split == "train" and not self.cfg.no_save:
            keep_tokenizer_with_checkpoints(tokenizer_of(folders[0]), Path(self.cfg.save_dir))

    def _check_data(self, folders: list[str], split: str, combine: bool) -> None:
        tokenizer = tokenizer_of(folders[0])
        check_data(
            folders, split, self.dictionary, str(self.cfg.verify), tokenizer if tokenizer.is_dir() else None, combine
        )

    def has_sharded_data(self, split: str) -> bool:
        return len(data_folders(self.cfg.data)) > 1

    def max_positions(self) -> int:
        return self.cfg.tokens_per_sample


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
