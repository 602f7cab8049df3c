"""What experiments train on: masked text, streams of text, labelled texts; each as a task of fairseq-train reads it."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, Optional, Union

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lazyformer_fairseq.data.batches import EpochBatches
from lazyformer_fairseq.data.datasets.labelled_texts import LabelledTextsDataset
from lazyformer_fairseq.data.datasets.masked_blocks import CHANGING
from lazyformer_fairseq.data.datasets.token_streams import (
    Cut,
    EpochSegments,
    StreamOptions,
    check_memory_fits,
    item_length,
    open_tokens,
    shape_of,
)
from lazyformer_fairseq.data.encoding import read_examples
from lazyformer_fairseq.data.glue import find_task
from lazyformer_fairseq.data.labelled_files import TaskDescription
from lazyformer_fairseq.data.masked_text import MASKED, OPTIONS, MaskedText
from lazyformer_fairseq.data.prepared_folder import PreparedTask, load_prepared
from lazyformer_fairseq.data.shards import data_folders, tokenizer_of
from lazyformer_fairseq.data.text.dictionary_file import Dictionary, load_dictionary
from lazyformer_fairseq.data.text.interface import TextTokenizer
from lazyformer_fairseq.data.text.tokenizer import load_tokenizer
from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.evaluation import checkpoints, hub, match
from lazyformer_fairseq.evaluation.metrics import METRICS
from lazyformer_fairseq.modules import losses
from lazyformer_fairseq.modules.networks.carried_memory import CHECKPOINT_KEY, CarriedMemory, with_memory
from lazyformer_fairseq.modules.networks.documents import check_takes_documents
from lazyformer_fairseq.modules.networks.huggingface_bert import HuggingFaceBert, HuggingFaceBertOptions
from lazyformer_fairseq.modules.networks.options import CausalLMOptions, MaskedLMOptions
from lazyformer_fairseq.modules.networks.permuted import check_takes_permuted
from lazyformer_fairseq.storage.indexed_format import check_items
from lazyformer_fairseq.training.loop import Batch, Lesson

FAIRSEQS_NAMES = {
    MaskedLMOptions: "lazyformer",
    CausalLMOptions: "lazyformer_lm",
    HuggingFaceBertOptions: "huggingface_bert",
}


@dataclass(frozen=True)
class Network:
    """What builds a model: options of one of ours, of Hugging Face's BERT, or words for fairseq-train that name one."""

    options: Union[MaskedLMOptions, CausalLMOptions, HuggingFaceBertOptions, tuple[str, ...]]

    def build(self, dictionary: Dictionary) -> nn.Module:
        """With fresh weights. Raises a UserError where sizes do not fit together, or there is no such library."""
        if isinstance(self.options, tuple):
            from lazyformer_fairseq.fairseq_plugin.models.elsewhere import build

            return build(self.options, dictionary)
        try:
            if isinstance(self.options, HuggingFaceBertOptions):
                return HuggingFaceBert(self.options, len(dictionary), dictionary.pad())
            return hub.model_of(self.options, dictionary)
        except ValueError as error:
            raise UserError(str(error)) from error

    def settings(self) -> dict[str, Any]:
        """For a checkpoint."""
        if isinstance(self.options, tuple):
            return {"_name": self.options[self.options.index("--arch") + 1]}
        return {"_name": FAIRSEQS_NAMES[type(self.options)], **asdict(self.options)}


NOTHING_PREDICTED = "no token of the validation text is predicted, since it is too short; give more validation text"


def mean_of(sums: Iterable[Any], sizes: Sequence[int], digits: int) -> float:
    """Return the mean of a split from the sums of its batches, rounded as fairseq's log has it.

    Raises:
        UserError: no batch predicts anything.
    """
    if not sum(sizes):
        raise UserError(NOTHING_PREDICTED)
    predicting = [(total, size) for total, size in zip(sums, sizes, strict=True) if size]
    return round(float(sum(total / size * size for total, size in predicting) / sum(sizes)), digits)


@dataclass
class MaskedBlocks(Lesson):
    """Masked language modelling, of a corpus, or of the inputs of a prepared task.

    Args:
        text: of the task's options, by name.
        updates: in which masks may change.
        whole_inputs: each input is a block.
        task: what is learned, a key of :data:`~lazyformer_fairseq.data.masked_text.OPTIONS`.
        batch_size_valid: by default as in training.
    """

    network: Network
    data: str
    batch_size: int
    seed: int
    updates: int
    text: Mapping[str, Any] = field(default_factory=dict)
    whole_inputs: bool = False
    batch_size_valid: Optional[int] = None
    task: str = MASKED
    CRITERION: ClassVar[str] = "MaskedLMAccuracyCriterion"

    @cached_property
    def texts(self) -> MaskedText:
        dictionary = load_dictionary(Path(data_folders(self.data)[0]) / "dict.txt")
        given = OPTIONS[self.task](**self.text)
        return MaskedText(self.data, given, dictionary, self.seed, self.updates, self.whole_inputs)

    @property
    def dictionary(self) -> Dictionary:
        return self.texts.dictionary

    def build_model(self) -> nn.Module:
        model = self.network.build(self.dictionary)
        self.texts.start_bias(model)
        if self.texts.options.within_documents:
            check_takes_documents(model, "--within-documents")
        if self.texts.is_permuted:
            check_takes_permuted(model, f"--task {self.task}")
        if self.texts.options.next_sentence:
            raise UserError("--next-sentence: is for fairseq-train; leave it out")
        return model

    def batches(self) -> EpochBatches:
        return EpochBatches(self.texts.split("train"), self.batch_size, seed=self.seed)

    def at_update(self, batch: Batch, update: int) -> Batch:
        return batch if CHANGING.isdisjoint(batch) else self.texts.at_update(batch, update)

    def loss(self, model: nn.Module, batch: Batch) -> tuple[Tensor, int, dict]:
        return losses.masked_lm(model, batch, self.texts.special.pad)

    def held_out(self, split: str) -> EpochBatches:
        return EpochBatches(self.texts.split(split), self.batch_size_valid or self.batch_size, shuffle=False)

    def measures(self, logs: list[dict[str, Any]]) -> dict[str, float]:
        """`loss`, bits a masked token, and `accuracy`, percent."""
        sizes = [log["sample_size"] for log in logs]
        return {
            "loss": mean_of((log["loss"] / math.log(2) for log in logs), sizes, 3),
            "accuracy": mean_of((100 * log["ncorrect"] for log in logs), sizes, 2),
        }

    def settings(self) -> dict[str, dict[str, Any]]:
        name = "inputs_masked_lm" if self.whole_inputs else self.task
        task = {"_name": name, "data": self.data, "seed": self.seed, **asdict(self.texts.options)}
        return {"model": self.network.settings(), "task": task, "criterion": {"_name": "masked_lm_accuracy"}}

    @property
    def tokenizer_folder(self) -> Path:
        return tokenizer_of(self.texts.folders[0])


@dataclass
class Streams(Lesson):
    """Causal language modelling of a text in streams, with a memory that is carried from segment to segment.

    Args:
        text: of :class:`StreamOptions`, by name.
    """

    network: Network
    data: str
    batch_size: int
    seed: int
    text: Mapping[str, Any]
    CRITERION: ClassVar[str] = "CausalLMCriterion"

    def __post_init__(self):
        self.options, self.memory = StreamOptions(**self.text), CarriedMemory()
        self.mem_len = self.network.options.mem_len

    @cached_property
    def dictionary(self) -> Dictionary:
        return load_dictionary(Path(self.data) / "dict.txt")

    def build_model(self) -> nn.Module:
        return self.network.build(self.dictionary)

    def tokens(self) -> np.ndarray:
        """Of training, checked."""
        found = open_tokens(prefix := Path(self.data) / "train")
        check_items(prefix, len(self.dictionary), eos=None)  # characters have no ends
        return found

    def batches(self) -> EpochSegments:
        options, ends = self.options, (self.dictionary.eos(), self.dictionary.pad())
        cut = Cut(options.roll, options.varlen, self.seed)
        found = EpochSegments(self.tokens(), self.batch_size, options.tgt_len, *ends, cut, item_length(self.data))
        check_memory_fits(self.mem_len, found.dataset)
        self._shape = shape_of(found.dataset, self.mem_len, options)
        return found

    def at_update(self, batch: Batch, update: int) -> Batch:
        return with_memory(batch, self.memory.before(batch["segment"]))

    def loss(self, model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor, dict]:
        found = losses.causal_lm(model, batch, self.dictionary.pad())
        self.memory.has_read(batch["segment"])
        return found

    def forget(self) -> None:
        self.memory.memory.clear()

    def settings(self) -> dict[str, dict[str, Any]]:
        task = {"_name": "stream_language_modeling", "data": self.data, **asdict(self.options)}
        return {"model": self.network.settings(), "task": task, "criterion": {"_name": "causal_lm"}}

    def state_dict(self) -> dict[str, Any]:
        return {CHECKPOINT_KEY: self.memory.gather(self._shape)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if (saved := state.get(CHECKPOINT_KEY)) is not None:
            self.memory.restore(saved, self._shape, slice(None))


@dataclass
class LabelledTexts(Lesson):
    """Classes of texts, of a task of GLUE by its official files or of one that was prepared.

    Args:
        task: its name; None for what the folder holds.
        begins_with: a checkpoint.
    """

    network: Network
    data: str
    batch_size: int
    seed: int
    task: Optional[str] = None
    begins_with: Optional[Path] = None
    batch_size_valid: Optional[int] = None
    CRITERION: ClassVar[str] = "GlueCriterion"

    @cached_property
    def description(self) -> TaskDescription:
        return find_task(self.task) if self.task else load_prepared(self.data).task

    @cached_property
    def tokenizer_folder(self) -> Path:
        if PreparedTask.is_at(self.data):
            return load_prepared(self.data).tokenizer_folder
        return self.begins_with.parent / "tokenizer"

    @cached_property
    def tokenizer(self) -> TextTokenizer:
        return load_tokenizer(self.tokenizer_folder)

    @property
    def dictionary(self) -> Dictionary:
        return self.tokenizer.dictionary

    def build_model(self) -> nn.Module:
        model, row = self.network.build(self.dictionary), self.description
        model.register_classification_head(row.head_name, row.num_classes)
        if self.begins_with is not None:
            match.load_weights(model, checkpoints.load(self.begins_with)["model"])
        self.longest = model.max_positions()
        marks, types = model.encoder.sentence_encoder.asking, model.cfg.token_types > 1
        eos = self.dictionary.eos()
        self._told = {"types_after": eos if types else None, "marks_before": eos if marks else None}
        return model

    def dataset(self, split: str) -> LabelledTextsDataset:
        """A split, as the model that was built reads it."""
        examples = read_examples(self.description, self.data, split, self.tokenizer, self.longest)
        how = {"pad": self.dictionary.pad(), "shuffle": split == "train", "seed": self.seed, **self._told}
        return LabelledTextsDataset(examples.inputs, examples.targets, **how)

    def batches(self) -> EpochBatches:
        return EpochBatches(self.dataset("train"), self.batch_size, seed=self.seed)

    def loss(self, model: nn.Module, batch: Batch) -> tuple[Tensor, int, dict]:
        targets = batch["target"]
        logits = model(**batch["net_input"], classification_head_name=self.description.head_name)[0].float()
        loss = F.cross_entropy(logits, targets, reduction="sum")
        rows = torch.stack([logits.detach().argmax(-1), targets], dim=1)
        return loss, len(targets), {"loss": loss.detach(), "sample_size": len(targets), "rows": rows}

    def held_out(self, split: str) -> EpochBatches:
        return EpochBatches(self.dataset(split), self.batch_size_valid or self.batch_size, shuffle=False)

    def measures(self, logs: list[dict[str, Any]]) -> dict[str, float]:
        """`loss`, bits an example, and the task's metrics of the whole split."""
        predictions, targets = torch.cat([log["rows"] for log in logs]).cpu().double().numpy().T
        sizes = [log["sample_size"] for log in logs]
        found = {name: METRICS[name](predictions, targets) for name in self.description.metrics}
        return {**found, "loss": mean_of((log["loss"] / math.log(2) for log in logs), sizes, 3)}

    def settings(self) -> dict[str, dict[str, Any]]:
        task = {"_name": "glue", "data": self.data, "glue_task": self.description.name, "seed": self.seed}
        return {"model": self.network.settings(), "task": task, "criterion": {"_name": "glue"}}

    def task_state(self) -> dict[str, Any]:
        row = replace(self.description, longest=self.longest)
        return {"heads": {row.head_name: row.as_json()}}
