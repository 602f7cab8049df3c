"""Masked language modelling on blocks of a corpus or on the inputs of a prepared task."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, Optional

import torch
from torch import Tensor, nn

from lazyformer_fairseq.data.batches import EpochBatches
from lazyformer_fairseq.data.datasets.masked_blocks import CHANGING
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
    dealt,
    in_bits,
    mean_per_prediction,
    total,
)
from lazyformer_fairseq.training.objectives.network import Network
from lazyformer_fairseq.training.objectives.stream_lm import next_token_scalars
from lazyformer_fairseq.training.processes import ALONE, Processes


@dataclass
class MaskedLMObjective(Objective):
    """The objective of masked language modelling.

    Attributes:
        network: the model.
        data: a folder that `lazyformer corpus` wrote, several of them as ``a:b:c``, or a prepared task.
        batch_size: blocks per batch.
        seed: the seed that determines masks and order.
        updates: the total number of updates, on which the schedules of masking rate and block length depend.
        text: options of :class:`~lazyformer_fairseq.data.masked_text.MaskedTextOptions`, by name.
        whole_inputs: whether each input is a block of its own.
        batch_size_valid: blocks per validation batch; None for the same as in training.
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
    TASK: ClassVar[str] = MASKED  # a key of `OPTIONS` and the name of the task in fairseq

    @cached_property
    def texts(self) -> MaskedText:
        """The masked text."""
        dictionary = load_dictionary(Path(data_folders(self.data)[0]) / "dict.txt")
        options = OPTIONS[self.TASK](**self.text)
        return MaskedText(self.data, options, dictionary, self.seed, self.updates, self.whole_inputs)

    @property
    def dictionary(self) -> Dictionary:
        """The dictionary of inputs and targets."""
        return self.texts.dictionary

    def build_model(self) -> nn.Module:
        """Build the model; some of its weights may be initialised from counts of the text.

        Raises:
            UserError: the model does not support the options of the text.
        """
        model = self.network.build(self.dictionary)
        prepare_model(model, self.texts, self.TASK)
        if self.texts.options.next_sentence:
            raise UserError("--next-sentence: only fairseq-train supports it; leave it out")
        return model

    def batches(self, processes: Processes = ALONE) -> EpochBatches:
        """Return the training batches of this process."""
        return dealt(EpochBatches(self.texts.split("train"), self.batch_size, seed=self.seed), processes)

    def data_folders(self) -> list[Path]:
        """Return the folders that hold the data."""
        return [Path(folder) for folder in self.texts.folders]

    def at_update(self, batch: Batch, update: int) -> Batch:
        """Return a batch with the block length and the masks of an update."""
        if CHANGING.isdisjoint(batch):
            return batch
        return self.texts.at_update(batch, update)

    def loss(self, model: nn.Module, batch: Batch) -> tuple[Tensor, int, dict[str, Any]]:
        """Compute the cross-entropy of the masked tokens."""
        return losses.masked_lm(model, batch, self.texts.special.pad)

    @staticmethod
    def scalars(logs: Sequence[Log]) -> dict[str, Scalar]:
        """Return `loss` in bits per masked token, `accuracy` in percent, and the terms of spans, experts and pairs."""
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
        return EpochBatches(self.texts.split(split), self.batch_size_valid or self.batch_size, shuffle=False)

    def settings(self) -> dict[str, dict[str, Any]]:
        """Return the settings that checkpoints store."""
        if self.whole_inputs:
            name = "inputs_masked_lm"
        else:
            name = self.TASK
        task = {"_name": name, "data": self.data, "seed": self.seed, **asdict(self.texts.options)}
        return {"model": self.own_network.settings(), "task": task, "criterion": {"_name": "masked_lm_accuracy"}}

    @property
    def tokenizer_folder(self) -> Path:  # type: ignore[override]  # the base has an attribute
        """The folder of the corpus's tokenizer."""
        return tokenizer_of(self.texts.folders[0])


def prepare_model(model: nn.Module, text: MaskedText, task: str, starts_fresh: bool = True) -> None:
    """Check that a model supports a masked text, and initialise weights from its counts if the model's options say so.

    Args:
        model: the model.
        text: the text that the model will read.
        task: the name of the task, for error messages.
        starts_fresh: False if the weights come from a checkpoint.

    Raises:
        UserError: the model does not support documents or permuted blocks, but the text consists of them.
    """
    if starts_fresh:
        start_from_counts(model, text)
    if text.options.within_documents:
        check_takes_documents(model, "--within-documents")
    if text.is_permuted:
        check_takes_permuted(model, f"--task {task}")


@torch.no_grad()
def start_from_counts(model: nn.Module, text: MaskedText) -> None:
    """Initialise the output bias and word embeddings from counts of the training text, if the model's options say so.

    With ``--frequency-bias`` the loss starts at that of token frequencies, :meth:`~MaskedText.cost_of_frequencies`
    (Karpathy, 2019, "A Recipe for Training Neural Networks": initialise the final layer's bias). With
    ``--neighbour-embeddings`` word embeddings start as the vectors of
    :mod:`~lazyformer_fairseq.data.neighbour_embeddings`; those of tokens that do not occur in the text, such as
    ``<mask>``, stay random.
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
