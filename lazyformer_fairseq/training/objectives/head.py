"""Base class for objectives that fine-tune a pre-trained encoder together with a new head."""

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Optional

import numpy as np
from torch import Tensor, nn

from lazyformer_fairseq.data.batches import EpochBatches
from lazyformer_fairseq.data.datasets.labelled_texts import LabelledTextsDataset
from lazyformer_fairseq.data.text.dictionary_file import Dictionary
from lazyformer_fairseq.data.text.interface import TextTokenizer
from lazyformer_fairseq.data.text.tokenizer import load_tokenizer
from lazyformer_fairseq.evaluation import checkpoints, match
from lazyformer_fairseq.modules import losses
from lazyformer_fairseq.modules.networks.documents import check_takes_documents
from lazyformer_fairseq.modules.networks.masked_lm import MaskedLM
from lazyformer_fairseq.training.objectives.interface import Batch, Log, Objective, shard_batches
from lazyformer_fairseq.training.objectives.network import Network
from lazyformer_fairseq.training.processes import ALONE, Processes


@dataclass(kw_only=True)
class HeadObjective(Objective):
    """Objective for fine-tuning an encoder and a head on labeled examples.

    Attributes:
        network: the model; None if another trainer builds it and calls :meth:`attach`.
        batch_size: the number of examples per batch.
        seed: the seed for the order of the training examples.
        begins_with: the checkpoint to initialize the model from; None for random initialization.
        batch_size_valid: the number of examples per validation batch; None for the training batch size.
        no_padding: whether to concatenate the texts of a batch instead of padding them.
        longest: the maximum number of tokens per input; None for the model's number of positions.
    """

    network: Optional[Network] = None
    batch_size: int = 32
    seed: int = 1
    begins_with: Optional[Path] = None
    batch_size_valid: Optional[int] = None
    no_padding: bool = False
    longest: Optional[int] = None

    # The model's input format; `observe` sets both attributes once the model is known.
    marks_first_text = False
    has_token_types = False

    @property
    @abstractmethod
    def head(self) -> tuple[str, int, str]:
        """The head's name, its number of outputs, and its type, a key of :data:`heads.HEADS`."""

    @abstractmethod
    def dataset(self, split: str) -> LabelledTextsDataset:
        """Load a split as a dataset in the model's input format."""

    @abstractmethod
    def score(self, batch: Batch, logits: Tensor, training: bool) -> tuple[Tensor, dict[str, Any]]:
        """Return the summed loss of a batch, and additional values to log.

        Args:
            batch: the batch with its `target`.
            logits: the head's output.
            training: False in evaluation mode, where the values to log also include `rows`, a float64 array (B,
                columns) that :meth:`metric` is computed from.
        """

    @cached_property
    def tokenizer(self) -> TextTokenizer:
        """The tokenizer for the texts."""
        assert self.tokenizer_folder is not None
        return load_tokenizer(self.tokenizer_folder)

    @property
    def dictionary(self) -> Dictionary:
        """The input dictionary."""
        return self.tokenizer.dictionary

    def build_model(self) -> nn.Module:
        """Build the model with its head, and load the weights from :attr:`begins_with`."""
        model = self.own_network.build(self.dictionary)
        assert isinstance(model, MaskedLM)
        self.attach(model)
        if self.begins_with is not None:
            match.load_weights(model, checkpoints.load(self.begins_with)["model"])
        return model

    def attach(self, model: MaskedLM) -> None:
        """Add the head to a model.

        Raises:
            UserError: ``--no-padding`` is set, but the model needs padding.
        """
        if self.no_padding:
            check_takes_documents(model, "--no-padding")
        self.observe(model)
        model.register_classification_head(*self.head)

    def observe(self, model: MaskedLM) -> None:
        """Store the model's input format."""
        if self.longest is None:
            self.longest = model.max_positions()
        self.has_token_types = model.cfg.token_types > 1
        self.marks_first_text = bool(model.encoder.sentence_encoder.sublayers_with_given_global)

    def dataset_options(self, split: str) -> dict[str, Any]:
        """Return the keyword arguments shared by all datasets of this objective."""
        return {
            "pad": self.dictionary.pad(),
            "shuffle": split == "train",
            "seed": self.seed,
            "token_type_eos": self.dictionary.eos() if self.has_token_types else None,
            "concatenates_texts": self.no_padding,
        }

    def batches(self, processes: Processes = ALONE) -> EpochBatches:
        """Return this process's training batches."""
        batches = EpochBatches(self.dataset("train"), self.batch_size, seed=self.seed)
        return shard_batches(batches, processes)

    def held_out(self, split: str) -> EpochBatches:
        """Return the batches of a held-out split, in order."""
        batch_size = self.batch_size_valid or self.batch_size
        return EpochBatches(self.dataset(split), batch_size, shuffle=False)

    def loss(self, model: nn.Module, batch: Batch) -> tuple[Tensor, int, dict[str, Any]]:
        """Compute the loss of the head's predictions, plus the experts' load-balancing loss, if any.

        Returns:
            The summed loss, the number of examples, and the values to log. In evaluation mode these include `rows`.
        """
        logits = model(**batch["net_input"], classification_head_name=self.head[0])[0].float()
        loss, log = self.score(batch, logits, model.training)
        size = len(batch["target"])
        log |= {
            "loss": loss.detach(),
            "ntokens": batch["ntokens"],
            "nsentences": batch["nsentences"],
            "sample_size": size,
        }
        return losses.with_experts(model, loss, size, log), size, log

    def measures(self, logs: Sequence[Log]) -> dict[str, float]:
        """Return the metrics and the loss of an entire split."""
        rows = np.concatenate([log["rows"] for log in logs])
        metrics = {name: self.metric(name, rows) for name in self.metric_names}
        return {**metrics, "loss": super().measures(logs)["loss"]}

    @property
    @abstractmethod
    def metric_names(self) -> tuple[str, ...]:
        """The names of the metrics to compute for a split."""

    @staticmethod
    @abstractmethod
    def metric(name: str, rows: np.ndarray) -> float:
        """Compute a split's metric from the `rows` of all its examples."""
