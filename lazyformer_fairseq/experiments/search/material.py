"""Model, data and loss of a search, as fairseq-train would build them of the same options.

For gradient descent the training data is in two disjoint parts: one for the weights, one for the architecture.
"""

import difflib
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Union

import numpy as np
import torch
from torch import Tensor, nn

from lazyformer_fairseq.data.datasets.labelled_texts import SizedDataset
from lazyformer_fairseq.data.datasets.token_streams import StreamOptions, TokenStreams, check_memory_fits, item_length
from lazyformer_fairseq.data.masked_text import MaskedTextOptions
from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.evaluation.costs.flops import count_flops
from lazyformer_fairseq.experiments.compare.settings import RECIPES, CompareSettings
from lazyformer_fairseq.experiments.compare.task import ComparedTask
from lazyformer_fairseq.experiments.search.settings import SearchSettings
from lazyformer_fairseq.experiments.search.supernet import Architecture, Supernet, supernet_pattern
from lazyformer_fairseq.modules import losses
from lazyformer_fairseq.modules.networks.options import CausalLMOptions, MaskedLMOptions, Options, read_options
from lazyformer_fairseq.modules.networks.stack import Stack
from lazyformer_fairseq.modules.networks.stream_memory import StreamMemory
from lazyformer_fairseq.options import chosen, mask_shares, read_words
from lazyformer_fairseq.patterns.architectures import ARCHITECTURES, CAUSAL_ARCHITECTURES
from lazyformer_fairseq.patterns.kinds import Sizes
from lazyformer_fairseq.training.objectives.masked_lm import MaskedLMObjective
from lazyformer_fairseq.training.objectives.network import Network
from lazyformer_fairseq.training.objectives.stream_lm import StreamLMObjective

# By task: options of the models and of the data, the architectures, and the name of the defaults.
OPTIONS_OF_TASK = {
    "masked-lm": (MaskedLMOptions, MaskedTextOptions, ARCHITECTURES, "lazyformer"),
    "language-model": (CausalLMOptions, StreamOptions, CAUSAL_ARCHITECTURES, "lazyformer_lm"),
}
ARCHITECTURE_SHARE = 0.2  # of the training data is held apart for the architecture (PAR Transformer, section 2.2)
SET_BY_SEARCH = ("--sublayer-pattern", "--arch", "--task", "--criterion", "--seed", "--batch-size", "--save-dir")


def read_given(task: str, arch: str, given: Sequence[str], recipe: str) -> tuple[Options, dict[str, Any]]:
    """Return the model's options, and the data's by name: those of arch, recipe, and words such as ``--dropout 0.1``.

    Raises:
        UserError: the arch does not fit the task, or an option is unknown or its value none.
    """
    for word in given:
        if word.split("=")[0] in SET_BY_SEARCH:
            raise UserError(f"{word}: the search sets it itself (see lazyformer search --help)")
    model_options, data_options, rows, generic = OPTIONS_OF_TASK[task]
    fitting = (generic, *rows)
    if arch not in fitting:
        close = difflib.get_close_matches(arch, fitting)
        known = dict.fromkeys([*close, *(name for name in fitting if not name.endswith("_tiny"))])
        raise UserError(
            f"--arch {arch}: no architecture for --task {task}; choose from {', '.join(known)}, or the tiny twin of one"
        )
    try:
        words = read_words(given, model_options, data_options)
    except UserError as error:
        raise UserError(
            f"{error}; options that lazyformer search does not have itself go to the model and its data"
        ) from None
    of_recipe = {**RECIPES[recipe].options, "length_schedule": ""}  # a search has blocks of one length
    if arch in rows:
        of_arch = rows[arch].options()
    else:
        of_arch = {}
    model = {**of_arch, **chosen(model_options, of_recipe), **chosen(model_options, words)}
    data = {**chosen(data_options, of_recipe), **chosen(data_options, words)}
    return read_options(model_options, model), data


@dataclass
class BlocksPart:
    """Some blocks of a dataset, read in a different order each epoch; the same from any start.

    Attributes:
        dataset: all blocks.
        first: the first block of the part.
        last: the block behind its last one.
        batch_size: blocks per batch.
        chunks: into which a batch is divided.
    """

    dataset: SizedDataset
    first: int
    last: int
    batch_size: int
    chunks: int = 1

    def __len__(self) -> int:
        return math.ceil((self.last - self.first) / self.batch_size)

    def batches(self, epoch: int, start: int) -> Iterator[list[dict[str, Any]]]:
        """Return an epoch's batches from number `start` on, each in its chunks.

        The part whose epoch began last decides what is masked.
        """
        self.dataset.set_epoch(epoch)
        order = np.asarray(self.dataset.ordered_indices())
        blocks = order[(order >= self.first) & (order < self.last)]
        starts = range(start * self.batch_size, len(blocks), self.batch_size)
        return (self._batch(blocks[at : at + self.batch_size]) for at in starts)

    def _batch(self, blocks: np.ndarray) -> list[dict[str, Any]]:
        rows = [self.dataset[int(block)] for block in blocks]
        size = self.batch_size // self.chunks
        return [self.dataset.collater(rows[at : at + size]) for at in range(0, len(rows), size)]

    def state_dict(self) -> dict[str, Any]:
        """Return the epoch."""
        return {"epoch": self.dataset.epoch}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on in an epoch."""
        self.dataset.set_epoch(state["epoch"])


class StreamsPart:
    """Streams of contiguous text, with their memory. Each epoch starts at their beginning, with an empty memory.

    Args:
        chunks: the streams of a batch, in its chunks.
        mem_len: M.

    Raises:
        UserError: the streams are shorter than a segment and the memory.
    """

    def __init__(self, chunks: Sequence[TokenStreams], mem_len: int):
        check_memory_fits(mem_len, chunks[0])
        self.chunks = chunks
        self.memories = [StreamMemory() for _ in chunks]

    def __len__(self) -> int:
        return len(self.chunks[0])

    def batches(self, _: int, start: int) -> Iterator[list[dict[str, Any]]]:
        """Yield the batches from segment `start` on, each in its chunks; the first one begins with an empty memory."""
        for segment in range(start, len(self)):
            batch = []
            for streams, memory in zip(self.chunks, self.memories, strict=True):
                if segment == 0:
                    memory.clear()
                chunk = dict(streams[segment])
                chunk["net_input"] = {**chunk["net_input"], "memory": memory}
                batch.append(chunk)
            yield batch

    def state_dict(self) -> dict[str, Any]:
        """Return the memories."""
        return {"memories": [memory.state_dict() for memory in self.memories]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the memories."""
        for memory, saved in zip(self.memories, state["memories"], strict=True):
            memory.load_state_dict(saved)


Part = Union[BlocksPart, StreamsPart]


def two_parts_of_blocks(dataset: SizedDataset, batch_size: int, chunks: int = 1) -> tuple[Part, Part]:
    """Return the parts (for the weights, for the architecture): the last blocks, of other documents, are the latter's.

    Raises:
        UserError: a part would be empty.
    """
    border = _border(len(dataset), "blocks")
    weights = BlocksPart(dataset, 0, border, batch_size, chunks)
    return weights, BlocksPart(dataset, border, len(dataset), batch_size, chunks)


def two_parts_of_text(tokens: np.ndarray, mem_len: int, chunks: int = 1, **streams: int) -> tuple[Part, Part]:
    """Return the same for one long text; `streams` are further arguments of :class:`TokenStreams`."""
    border = _border(len(tokens), "tokens")
    parts = []
    for part in (tokens[:border], tokens[border:]):
        in_chunks = [TokenStreams(part, shards=chunks, shard=chunk, **streams) for chunk in range(chunks)]
        parts.append(StreamsPart(in_chunks, mem_len))
    return parts[0], parts[1]


def _border(count: int, what: str) -> int:
    border = count - round(count * ARCHITECTURE_SHARE)
    if not 0 < border < count:
        raise UserError(
            f"the training data's {count} {what} make no second part of {ARCHITECTURE_SHARE:.0%} for the architecture; "
            "give more text"
        )
    return border


class Material:
    """The models, data and losses of a search; raises a UserError as the data and :func:`read_given` do.

    Attributes:
        options: of models.
        text: options of the data by name.
        training_lengths: T and M in training; M is 0 for encoders.
        predicted_share: share of a sequence's tokens that are predicted in training.
        sizes: options of `lazyformer compare` for the same text, beside widths and batch size.
        latency_tokens: T for measuring latency: as the settings say, else the training's.
        latency_memory: M for measuring latency.
    """

    def __init__(self, settings: SearchSettings):
        self.settings = settings
        self.options, self.text = read_given(settings.task, settings.arch, settings.fairseq_options, settings.recipe)
        objective = self.objective(settings.baseline)
        self.dictionary = objective.dictionary
        if isinstance(objective, MaskedLMObjective):
            text = objective.texts.options
            first, last = mask_shares(text.mask_prob)
            if first != last or text.length_schedule:
                if first != last:
                    what = f"--mask-prob {text.mask_prob}"
                else:
                    what = "--length-schedule"
                raise UserError(f"{what}: a search has one share of masks, and one length, for all updates")
            self.training_lengths = (text.tokens_per_sample, 0)
            self.predicted_share = first
            self.sizes = {
                "tokens_per_sample": text.tokens_per_sample,
                "relative_position_buckets": self.options.relative_position_buckets,
            }
        else:
            self.training_lengths = (objective.options.tgt_len, objective.mem_len)
            self.predicted_share = 1.0
            self.sizes = {
                "tgt_len": objective.options.tgt_len,
                "mem_len": objective.mem_len,
                "adaptive_softmax_cutoff": self.options.adaptive_softmax_cutoff,
            }
        time, self.latency_memory = self.training_lengths
        self.latency_tokens = settings.latency_tokens or time

    def objective(self, pattern: str) -> Union[MaskedLMObjective, StreamLMObjective]:
        """Return the objective of a model of a pattern."""
        settings = self.settings
        network = Network(replace(self.options, sublayer_pattern=pattern))
        if settings.task == "masked-lm":
            return MaskedLMObjective(
                network,
                settings.data,
                settings.batch_size,
                settings.seed,
                settings.max_updates,
                self.text,
            )
        return StreamLMObjective(network, settings.data, settings.batch_size, settings.seed, self.text)

    def build_model(self, pattern: str) -> tuple[nn.Module, Stack]:
        """Build a fresh seeded model of any pattern, on the search's device; return it and its stack."""
        torch.manual_seed(self.settings.seed)
        model = self.objective(pattern).build_model().to(self.settings.device)
        return model, next(module for module in model.modules() if isinstance(module, Stack))

    def build_supernet(self) -> Supernet:
        """Build the supernet of the candidates, with as many layers as the baseline."""
        layers = self.settings.layers
        candidates = self.settings.candidates
        model, network = self.build_model(supernet_pattern(candidates, layers))
        return Supernet(model, network, Architecture(layers, candidates).to(self.settings.device))

    @cached_property
    def network_sizes(self) -> Sizes:
        """The sizes of a model's network."""
        return self.build_model(self.settings.baseline)[1].sizes

    def relative_flops(self, pattern: str) -> float:
        """Return the FLOPs of a training update of a pattern, in those of the baseline."""
        predicted = round(self.predicted_share * self.training_lengths[0])
        of_pattern, of_baseline = (
            count_flops(each, self.network_sizes, *self.training_lengths, predicted=predicted)
            for each in (pattern, self.settings.baseline)
        )
        return of_pattern / of_baseline

    @cached_property
    def compared(self) -> ComparedTask:
        """The task of a comparison that trains and validates whole patterns in the same way."""
        settings = self.settings
        compare_settings = CompareSettings(
            task=settings.task,
            data=settings.data,
            recipe=settings.recipe,
            validation_tokens=settings.validation_tokens,
            in_turn=settings.in_turn,
            device=settings.device,
            updates=settings.max_updates,
            rates=(settings.lr,) if settings.lr else (),
            models={"baseline": settings.baseline},
            sizes={**self.sizes, "batch_size": settings.batch_size},
            fairseq_options=settings.fairseq_options,
        )
        return compare_settings.row.load(compare_settings)

    def loss_of(self, model: nn.Module, batch: dict[str, Any]) -> tuple[Tensor, Any]:
        """Return the summed loss in nats, and the number of predictions."""
        if self.settings.task == "masked-lm":
            compute = losses.masked_lm
        else:
            compute = losses.causal_lm
        loss, count, _ = compute(model, batch, self.dictionary.pad())
        return loss, count

    def parts(self) -> tuple[Part, Part]:
        """Return the training data, for the weights and for the architecture; each call starts it anew.

        Raises:
            UserError: there is too little of it, or it does not fit the model.
        """
        settings = self.settings
        objective = self.objective(settings.baseline)
        if isinstance(objective, MaskedLMObjective):
            return two_parts_of_blocks(objective.texts.split("train").now, settings.batch_size, settings.update_freq)
        if item_length(settings.data):
            raise UserError(f"{settings.data}: holds images, and a search divides a text; give one that holds a text")
        tgt_len, mem_len = self.training_lengths
        return two_parts_of_text(
            objective.tokens(),
            mem_len,
            settings.update_freq,
            rows=settings.batch_size,
            tgt_len=tgt_len,
            eos=self.dictionary.eos(),
            pad=self.dictionary.pad(),
        )
