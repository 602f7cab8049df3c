"""Our text in transformers' Trainer: a collator for any, and a Trainer whose batches are fairseq-train's.

text = open_masked_text("data", tokens_per_sample=128)
train, valid = text.split("train"), text.split("valid")
ShardTrainer(model, arguments, MaskedTextCollator(text), train, valid).train()
"""

import math
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset
from transformers import AutoTokenizer, Trainer

from lazyformer_fairseq.data.batches import EpochBatches
from lazyformer_fairseq.data.masked_text import MaskedText
from lazyformer_fairseq.data.text.interface import TextTokenizer
from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.huggingface.models.heads import IGNORED
from lazyformer_fairseq.huggingface.tokenizer import write_tokenizer


def tokenizer_for_transformers(tokenizer: TextTokenizer, max_length: int) -> Any:
    """Return a tokenizer as transformers'.

    Args:
        tokenizer: the tokenizer.
        max_length: the longest input, in tokens, that truncation leaves.

    Raises:
        UserError: as :func:`~lazyformer_fairseq.huggingface.tokenizer.write_tokenizer`.
    """
    with TemporaryDirectory(prefix="lazyformer") as folder:
        write_tokenizer(tokenizer, Path(folder), max_length)
        return AutoTokenizer.from_pretrained(folder)


class MaskedTextCollator:
    """A Trainer's ``data_collator``: samples of masked text become inputs of a masked LM of transformers.

    Args:
        text: the source of the samples.

    Raises:
        UserError: text of pairs, permuted, or whose masks or lengths change: Trainer trains none of these.
    """

    def __init__(self, text: MaskedText):
        options = text.options
        refused = {
            "next_sentence": options.next_sentence,
            "task masked_permuted_lm": text.is_permuted,
            f"mask_prob {options.mask_prob}": text.masking.last is not None,
            f"length_schedule {options.length_schedule}": bool(text.lengths),
        }
        for what, is_asked in refused.items():
            if is_asked:
                raise UserError(f"{what}: not in transformers' Trainer; take fairseq-train, or your own loop")
        self.pad = text.special.pad
        self.collater = text.dataset("train").collater

    def __call__(self, samples: list[dict[str, Any]]) -> dict[str, Any]:
        """Return `input_ids` (B, T), `labels` (B, T), -100 where nothing is masked, and documents, if they are apart.

        Raises:
            UserError: Trainer has removed columns.
        """
        if samples and "source" not in samples[0]:
            raise UserError("samples without source: give TrainingArguments remove_unused_columns=False")
        return self.inputs(self.collater(samples))

    def inputs(self, batch: dict[str, Any]) -> dict[str, Any]:
        """Return the same for a batch that the dataset's collater made."""
        given = batch["net_input"]
        target = batch["target"]
        documents = {name: given[name] for name in ("documents", "positions_begin_anew") if name in given}
        labels = target.masked_fill(target == self.pad, IGNORED)
        return {"input_ids": given["src_tokens"], "labels": labels, **documents}


class _Samples(Dataset):
    """A dataset whose epoch the sampler alone sets: accelerate counts from 0."""

    def __init__(self, dataset: Dataset):
        self.dataset = dataset

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> Any:
        return self.dataset[index]


class EpochSampler:
    """The batches of an epoch by index, in fairseq-train's order; a DataLoader's ``batch_sampler``.

    Args:
        batches: of all epochs.
    """

    drop_last = False

    def __init__(self, batches: EpochBatches):
        self.batches = batches
        self.sampler = self  # whoever wraps it looks for the epoch there
        self.batch_size = batches.batch_size

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next pass, from 0."""
        self.batches.epoch = epoch + 1

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[list[int]]:
        # No generator: workers copy the dataset before they ask for a first batch, and it must know the epoch by then.
        return iter([batch.tolist() for batch in self.batches.indices])


class ShardTrainer(Trainer):
    """transformers' Trainer; its batches of training are those that fairseq-train reads with the same seed.

    `train_dataset` is a split of :func:`~lazyformer_fairseq.data.masked_text.open_masked_text`. The seed is
    ``data_seed`` of the arguments, else ``seed``.

    An evaluation reports ``eval_loss`` in nats per predicted token, as Trainer does, and beside it ``eval_bits``, the
    unit of all other reports of this package, and ``eval_perplexity``.
    """

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> Any:
        """Evaluate as Trainer does; add to each loss its value in bits, and the perplexity."""
        output = super().evaluation_loop(*args, **kwargs)
        losses = {name: value for name, value in output.metrics.items() if name.endswith("_loss")}
        for name, nats in losses.items():
            start = name.removesuffix("loss")
            output.metrics[f"{start}bits"] = nats / math.log(2)
            output.metrics[f"{start}perplexity"] = float(torch.tensor(nats, dtype=torch.double).exp())
        return output

    def get_train_dataloader(self) -> DataLoader:
        """Return batches of ``per_device_train_batch_size`` samples, which resume where they were."""
        seed = self.args.data_seed
        if seed is None:
            seed = self.args.seed
        batches = EpochBatches(self.train_dataset, self._train_batch_size, seed=seed)
        loader = DataLoader(
            _Samples(self.train_dataset),
            batch_sampler=EpochSampler(batches),
            collate_fn=self.data_collator,
            num_workers=self.args.dataloader_num_workers,
            pin_memory=self.args.dataloader_pin_memory,
        )
        return self.accelerator.prepare(loader)
