"""Masked language modeling on blocks from a corpus or on a prepared task's inputs."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, Optional

import torch
from torch import Tensor, nn

from lazyformer_fairseq.data.batches import EpochBatches
from lazyformer_fairseq.data.datasets.masked_blocks import UPDATE_DEPENDENT_KEYS
from lazyformer_fairseq.data.masked_text import MASKED, OPTIONS, MaskedText
from lazyformer_fairseq.data.shards import data_folders, tokenizer_of
from lazyformer_fairseq.data.text.dictionary_file import Dictionary, load_dictionary
from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.modules import losses
from lazyformer_fairseq.modules.networks.documents import check_takes_documents
from lazyformer_fairseq.modules.networks.masked_lm import MaskedLM
from lazyformer_fairseq.modules.networks.permuted import check_takes_permuted
from lazyformer_fairseq.training.objectives.interface import (
    Batch,
    Log,
    Objective,
    Scalar,
    in_bits,
    mean_per_prediction,
    shard_batches,
    total,
)
from lazyformer_fairseq.training.objectives.network import Network
from lazyformer_fairseq.training.objectives.stream_lm import next_token_scalars
from lazyformer_fairseq.training.processes import ALONE, Processes


@dataclass
class MaskedLMObjective(Objective):
    """Masked language modeling objective.

    Attributes:
        network: the model.
        data: a folder written by `lazyformer corpus`, several such folders joined as ``a:b:c``, or a prepared task.
        batch_size: the number of blocks per batch.
        seed: the seed for masking and data order.
        updates: the total number of updates, which the masking-rate and block-length schedules depend on.
        text: options of :class:`~lazyformer_fairseq.data.masked_text.MaskedTextOptions`, by name.
        whole_inputs: whether to use each input as a separate block.
        batch_size_valid: the number of blocks per validation batch; None for the training batch size.
    """

    network: Network
    data: str
    batch_size: int
    seed: int
    updates: int
    text: Mapping[str, Any] = field(default_factory=dict)
    whole_inputs: bool = False
    batch_size_valid: Optional[int] = None
    CRITERION: ClassVar[str] = "MaskedLMAccuracyCriterion"
    TASK: ClassVar[str] = MASKED  # a key of `OPTIONS` and fairseq's name for the task

    @cached_property
    def texts(self) -> MaskedText:
        """The masked text."""
        dictionary = load_dictionary(Path(data_folders(self.data)[0]) / "dict.txt")
        options = OPTIONS[self.TASK](**self.text)
        return MaskedText(self.data, options, dictionary, self.seed, self.updates, self.whole_inputs)

    @property
    def dictionary(self) -> Dictionary:
        """The dictionary for inputs and targets."""
        return self.texts.dictionary

    def build_model(self) -> nn.Module:
        """Build the model; depending on its options, some weights are initialized from token counts.

        Raises:
            UserError: the model does not support the text options.
        """
        model = self.network.build(self.dictionary)
        prepare_model(model, self.texts, self.TASK)
        if self.texts.options.next_sentence:
            raise UserError("--next-sentence: supported only by fairseq-train; omit the option")
        return model

    def batches(self, processes: Processes = ALONE) -> EpochBatches:
        """Return this process's training batches."""
        batches = EpochBatches(self.texts.split("train"), self.batch_size, seed=self.seed)
        return shard_batches(batches, processes)

    def data_folders(self) -> list[Path]:
        """Return the data folders."""
        return [Path(folder) for folder in self.texts.folders]

    def at_update(self, batch: Batch, update: int) -> Batch:
        """Cut a batch to the update's block length, and mask it."""
        if UPDATE_DEPENDENT_KEYS.isdisjoint(batch):
            return batch
        return self.texts.at_update(batch, update)

    def loss(self, model: nn.Module, batch: Batch) -> tuple[Tensor, int, dict[str, Any]]:
        """Compute the cross-entropy over the masked tokens."""
        return losses.masked_lm(model, batch, self.texts.special.pad)

    @staticmethod
    def scalars(logs: Sequence[Log]) -> dict[str, Scalar]:
        """Return `loss` in bits per masked token, `accuracy` in percent, and any span, expert and pair terms."""
        found = next_token_scalars(logs)
        predictions = total(logs, "sample_size")
        found["accuracy"] = Scalar(100 * mean_per_prediction(logs, "ncorrect"), predictions, digits=2)
        if "next_sentence_loss" in logs[0]:
            pairs = total(logs, "nsentences")
            loss = in_bits(mean_per_prediction(logs, "next_sentence_loss", "nsentences"))
            right = 100 * mean_per_prediction(logs, "next_sentence_right", "nsentences")
            found["next_sentence_loss"] = Scalar(loss, pairs)
            found["next_sentence_accuracy"] = Scalar(right, pairs, digits=2)
        return found

    def held_out(self, split: str) -> EpochBatches:
        """Return the batches of a held-out split, in order."""
        batch_size = self.batch_size_valid or self.batch_size
        return EpochBatches(self.texts.split(split), batch_size, shuffle=False)

    def settings(self) -> dict[str, dict[str, Any]]:
        """Return the settings to store in checkpoints."""
        if self.whole_inputs:
            name = "inputs_masked_lm"
        else:
            name = self.TASK
        task = {"_name": name, "data": self.data, "seed": self.seed, **asdict(self.texts.options)}
        return {"model": self.own_network.settings(), "task": task, "criterion": {"_name": "masked_lm_accuracy"}}

    @property
    def tokenizer_folder(self) -> Path:  # type: ignore[override]  # the base has an attribute
        """The folder with the corpus's tokenizer."""
        return tokenizer_of(self.texts.folders[0])


def prepare_model(model: nn.Module, text: MaskedText, task: str, starts_fresh: bool = True) -> None:
    """Check that a model supports a masked text, and initialize weights from token counts if its options request it.

    Args:
        model: the model.
        text: the training text.
        task: the task's name, for error messages.
        starts_fresh: False if the weights come from a checkpoint.

    Raises:
        UserError: the text consists of documents or permuted blocks, which the model does not support.
    """
    if starts_fresh:
        start_from_counts(model, text)
    if text.options.within_documents:
        check_takes_documents(model, "--within-documents")
    if text.is_permuted:
        check_takes_permuted(model, f"--task {task}")


@torch.no_grad()
def start_from_counts(model: nn.Module, text: MaskedText) -> None:
    """Initialize the output bias and word embeddings from token counts in the text, if the model's options request it.

    With ``--frequency-bias``, the loss starts at the unigram loss, :meth:`~MaskedText.cost_of_frequencies` (Karpathy,
    2019, "A Recipe for Training Neural Networks", recommends initializing the final bias in this way). With
    ``--neighbour-embeddings``, word embeddings are initialized to the vectors from
    :mod:`~lazyformer_fairseq.data.neighbour_embeddings`. Tokens that do not occur in the text, such as ``<mask>``, keep
    random embeddings.
    """
    if not isinstance(model, MaskedLM):
        return
    if model.cfg.frequency_bias:
        model.encoder.lm_head.bias.copy_(torch.from_numpy(text.log_frequencies))
    if model.cfg.neighbour_embeddings:
        embed_tokens = model.encoder.sentence_encoder.embed_tokens
        assert embed_tokens is not None, "a masked language model has token embeddings"
        vectors = torch.from_numpy(text.neighbour_embeddings(embed_tokens.embedding_dim))
        occurs = vectors.any(dim=1)
        embed_tokens.weight[occurs] = vectors[occurs].to(embed_tokens.weight)
