"""Training on our data with transformers: a data collator, and a Trainer with the same batches as fairseq-train.

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
    """Convert one of this package's tokenizers to a transformers tokenizer.

    Args:
        tokenizer: The tokenizer.
        max_length: The number of tokens to which inputs are truncated.

    Raises:
        UserError: The tokenizer cannot be converted; see
            :func:`~lazyformer_fairseq.huggingface.tokenizer.write_tokenizer`.
    """
    with TemporaryDirectory(prefix="lazyformer") as folder:
        write_tokenizer(tokenizer, Path(folder), max_length)
        return AutoTokenizer.from_pretrained(folder)


class MaskedTextCollator:
    """A ``data_collator`` for Trainer that converts masked text samples to inputs for transformers' masked LMs.

    Args:
        text: The masked text that the samples come from.

    Raises:
        UserError: The text has pairs for next-sentence prediction, is permuted, or has a schedule of mask probabilities
            or lengths. Trainer supports none of these.
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
                raise UserError(
                    f"{what} is not supported by transformers' Trainer; use fairseq-train or your own training loop"
                )
        self.pad = text.special.pad
        self.collater = text.dataset("train").collater

    def __call__(self, samples: list[dict[str, Any]]) -> dict[str, Any]:
        """Collate samples into a batch of model inputs.

        Returns:
            `input_ids` (B, T); `labels` (B, T), with -100 at tokens that are not predicted; and each block's documents
            if they are kept separate.

        Raises:
            UserError: Trainer has removed columns from the samples.
        """
        if samples and "source" not in samples[0]:
            raise UserError("samples have no source: set remove_unused_columns=False in TrainingArguments")
        return self.inputs(self.collater(samples))

    def inputs(self, batch: dict[str, Any]) -> dict[str, Any]:
        """Return the model inputs for a batch from the dataset's collater."""
        given = batch["net_input"]
        target = batch["target"]
        documents = {name: given[name] for name in ("documents", "restart_positions") if name in given}
        labels = target.masked_fill(target == self.pad, IGNORED)
        return {"input_ids": given["src_tokens"], "labels": labels, **documents}


class _Samples(Dataset):
    """A wrapper that hides a dataset's ``set_epoch`` from accelerate, which counts epochs from 0.

    Only the sampler sets the epoch.
    """

    def __init__(self, dataset: Dataset):
        self.dataset = dataset

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> Any:
        return self.dataset[index]


class EpochSampler:
    """A DataLoader ``batch_sampler`` that yields an epoch's sample indices in the same order as fairseq-train.

    Args:
        batches: The batches of all epochs.
    """

    drop_last = False

    def __init__(self, batches: EpochBatches):
        self.batches = batches
        self.sampler = self  # wrappers such as accelerate's call set_epoch on this attribute
        self.batch_size = batches.batch_size

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next pass, counted from 0."""
        self.batches.epoch = epoch + 1

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[list[int]]:
        # This is not a generator, because workers copy the dataset before they request the first batch. Computing the
        # indices here sets the dataset's epoch before the dataset is copied.
        return iter([batch.tolist() for batch in self.batches.indices])


class ShardTrainer(Trainer):
    """A transformers Trainer that trains on the same batches as fairseq-train with the same seed.

    `train_dataset` is a split from :func:`~lazyformer_fairseq.data.masked_text.open_masked_text`. The seed is
    ``data_seed`` from the arguments if it is set, otherwise ``seed``.

    Like Trainer, evaluation reports ``eval_loss``, which is in nats per predicted token. It also reports ``eval_bits``,
    which is the same loss in bits, as in this package's other reports, and ``eval_perplexity``.
    """

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> Any:
        """Evaluate like Trainer, and add the value in bits and the perplexity for each loss."""
        output = super().evaluation_loop(*args, **kwargs)
        losses = {name: value for name, value in output.metrics.items() if name.endswith("_loss")}
        for name, nats in losses.items():
            start = name.removesuffix("loss")
            output.metrics[f"{start}bits"] = nats / math.log(2)
            output.metrics[f"{start}perplexity"] = float(torch.tensor(nats, dtype=torch.double).exp())
        return output

    def get_train_dataloader(self) -> DataLoader:
        """Return a resumable loader of batches of ``per_device_train_batch_size`` samples."""
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
