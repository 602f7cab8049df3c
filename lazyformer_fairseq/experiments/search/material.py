"""Model, data and loss of a search, as fairseq-train would build them of the same options.

The training data is in two disjoint parts: one for the weights, one for the architecture.
"""

import difflib
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any, Union

import numpy as np
import torch
from torch import Tensor, nn

from lazyformer_fairseq.data.datasets.labelled_texts import SizedDataset
from lazyformer_fairseq.data.datasets.token_streams import StreamOptions, TokenStreams, check_memory_fits, item_length
from lazyformer_fairseq.data.masked_text import MaskedTextOptions
from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.experiments.compare.settings import RECIPES, CompareSettings
from lazyformer_fairseq.experiments.compare.task import ComparedTask
from lazyformer_fairseq.experiments.search.settings import SearchSettings
from lazyformer_fairseq.experiments.search.supernet import Choices, Supernet, supernet_pattern
from lazyformer_fairseq.modules import losses
from lazyformer_fairseq.modules.networks.options import CausalLMOptions, MaskedLMOptions, Options, read_options
from lazyformer_fairseq.modules.networks.stack import Stack, StreamMemory
from lazyformer_fairseq.options import chosen, mask_shares, read_words
from lazyformer_fairseq.patterns.architectures import ARCHITECTURES, CAUSAL_ARCHITECTURES
from lazyformer_fairseq.training.objectives.masked_lm import MaskedLMObjective
from lazyformer_fairseq.training.objectives.network import Network
from lazyformer_fairseq.training.objectives.stream_lm import StreamLMObjective

# By task: options of the models and of the data, the architectures, and the name of the defaults.
KINDS = {
    "masked-lm": (MaskedLMOptions, MaskedTextOptions, ARCHITECTURES, "lazyformer"),
    "language-model": (CausalLMOptions, StreamOptions, CAUSAL_ARCHITECTURES, "lazyformer_lm"),
}
ARCHITECTURE_SHARE = 0.2  # of the training data is held apart for the architecture (PAR Transformer, section 2.2)
OURS = ("--sublayer-pattern", "--arch", "--task", "--criterion", "--seed", "--batch-size", "--save-dir")


def read_given(task: str, arch: str, given: Sequence[str], recipe: str) -> tuple[Options, dict[str, Any]]:
    """Options of the model, and of the data by name: the arch's, the recipe's, and of words such as ``--dropout 0.1``.

    Raises:
        UserError: the arch does not fit the task, or an option is unknown or its value none.
    """
    for word in given:
        if word.split("=")[0] in OURS:
            raise UserError(f"{word}: the search sets it itself (see lazyformer search --help)")
    kind, of_data, rows, name = KINDS[task]
    if arch not in (fitting := (name, *rows)):
        close = difflib.get_close_matches(arch, fitting)
        known = dict.fromkeys([*close, *(name for name in fitting if not name.endswith("_tiny"))])
        raise UserError(
            f"--arch {arch}: no architecture for --task {task}; choose from {', '.join(known)}, or the tiny twin of one"
        )
    try:
        words = read_words(given, kind, of_data)
    except UserError as error:
        raise UserError(
            f"{error}; options that lazyformer search does not have itself go to the model and its data"
        ) from None
    of_recipe = {**RECIPES[recipe].options, "length_schedule": ""}  # a search has blocks of one length
    text = {**chosen(of_data, of_recipe), **chosen(of_data, words)}
    of_arch = rows[arch].options() if arch in rows else {}
    return read_options(kind, {**of_arch, **chosen(kind, of_recipe), **chosen(kind, words)}), text


class BlocksPart:
    """Some blocks of a dataset, read in a different order each epoch; the same from any start.

    Args:
        first, last: the part holds the blocks from `first` up to, not including, `last`.
        pieces: into which a batch is divided.
    """

    def __init__(self, dataset: SizedDataset, first: int, last: int, batch_size: int, pieces: int = 1):
        self.dataset, self.first, self.last, self.batch_size = dataset, first, last, batch_size
        self.of_piece = batch_size // pieces

    def __len__(self) -> int:
        return -(-(self.last - self.first) // self.batch_size)

    def batches(self, epoch: int, start: int) -> Iterator[list[dict[str, Any]]]:
        """An epoch's batches from number `start` on, each in its pieces. The part whose epoch began last decides what
        is masked."""
        self.dataset.set_epoch(epoch)
        order = np.asarray(self.dataset.ordered_indices())
        own = order[(order >= self.first) & (order < self.last)]
        places = range(start * self.batch_size, len(own), self.batch_size)
        return (self._pieces([self.dataset[int(index)] for index in own[at : at + self.batch_size]]) for at in places)

    def _pieces(self, rows: list[Any]) -> list[dict[str, Any]]:
        firsts = range(0, len(rows), self.of_piece)
        return [self.dataset.collater(rows[first : first + self.of_piece]) for first in firsts]

    def state_dict(self) -> dict[str, Any]:
        return {"epoch": self.dataset.epoch}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.dataset.set_epoch(state["epoch"])


class StreamsPart:
    """Streams of contiguous text, with their memory.

    Each epoch starts at their beginning, with an empty memory.

    Args:
        pieces: the streams of a batch, in its pieces.

    Raises:
        UserError: the streams are shorter than a segment and the memory.
    """

    def __init__(self, pieces: Sequence[TokenStreams], mem_len: int):
        check_memory_fits(mem_len, pieces[0])
        self.pieces, self.memories = pieces, [StreamMemory() for _ in pieces]

    def __len__(self) -> int:
        return len(self.pieces[0])

    def batches(self, epoch: int, start: int) -> Iterator[list[dict[str, Any]]]:
        """Batches from segment `start` on, each in its pieces; clears the memory at 0."""
        for segment in range(start, len(self)):
            batch = [dict(streams[segment]) for streams in self.pieces]
            for piece, memory in zip(batch, self.memories, strict=True):
                if segment == 0:
                    memory.clear()
                piece["net_input"] = {**piece["net_input"], "memory": memory}
            yield batch

    def state_dict(self) -> dict[str, Any]:
        first, *others = [memory.state_dict() for memory in self.memories]
        return {**first, "others": others} if others else first

    def load_state_dict(self, state: dict[str, Any]) -> None:
        first = {name: value for name, value in state.items() if name != "others"}
        for memory, kept in zip(self.memories, [first, *state.get("others", ())], strict=True):
            memory.load_state_dict(kept)


Part = Union[BlocksPart, StreamsPart]


def two_parts_of_blocks(dataset: SizedDataset, batch_size: int, pieces: int = 1) -> tuple[Part, Part]:
    """(for the weights, for the architecture): the last blocks, which hold other documents, are the architecture's.

    Raises:
        UserError: a part would be empty.
    """
    border = _border(len(dataset), "blocks")
    sizes = batch_size, pieces
    return BlocksPart(dataset, 0, border, *sizes), BlocksPart(dataset, border, len(dataset), *sizes)


def two_parts_of_text(
    tokens: np.ndarray, batch_size: int, tgt_len: int, mem_len: int, eos: int, pad: int, pieces: int = 1
) -> tuple[Part, Part]:
    """As :func:`two_parts_of_blocks`, for one long text."""
    border = _border(len(tokens), "tokens")
    weights, architecture = (
        [TokenStreams(part, batch_size, tgt_len, eos, pad, pieces, piece) for piece in range(pieces)]
        for part in (tokens[:border], tokens[border:])
    )
    return StreamsPart(weights, mem_len), StreamsPart(architecture, mem_len)


def _border(count: int, what: str) -> int:
    border = count - round(count * ARCHITECTURE_SHARE)
    if not 0 < border < count:
        raise UserError(
            f"the training data's {count} {what} make no second part of {ARCHITECTURE_SHARE:.0%} for the architecture; "
            "give more text"
        )
    return border


class Material:
    """What a search builds; raises a UserError as the data and :func:`read_given` do.

    Attributes:
        training_lengths: T and M in training; M is 0 for encoders.
        predicted_share: of a sequence's tokens, in training.
        sizes: options of `lazyformer compare` for the same text, beside widths and batch size.
        latency_tokens, latency_memory: T and M for measuring latency: T as the settings say, else the training's.
    """

    def __init__(self, settings: SearchSettings):
        self.settings = settings
        self.options, self.text = read_given(settings.task, settings.arch, settings.fairseq_options, settings.recipe)
        is_encoder = settings.task == "masked-lm"
        objective = self.objective(settings.baseline)
        self.dictionary = objective.dictionary
        if is_encoder:
            text = objective.texts.options
            self.training_lengths, share = (text.tokens_per_sample, 0), mask_shares(text.mask_prob)
            if share[0] != share[1] or text.length_schedule:
                what = f"--mask-prob {text.mask_prob}" if share[0] != share[1] else "--length-schedule"
                raise UserError(f"{what}: a search has one share of masks, and one length, for all updates")
            self.predicted_share = share[0]
            buckets = {"relative_position_buckets": self.options.relative_position_buckets}
            self.sizes = {"tokens_per_sample": text.tokens_per_sample, **buckets}
        else:
            self.training_lengths, self.predicted_share = (objective.options.tgt_len, objective.mem_len), 1.0
            cutoffs = {"adaptive_softmax_cutoff": self.options.adaptive_softmax_cutoff}
            self.sizes = {"tgt_len": objective.options.tgt_len, "mem_len": objective.mem_len, **cutoffs}
        time, self.latency_memory = self.training_lengths
        self.latency_tokens = settings.latency_tokens or time

    def objective(self, pattern: str) -> Union[MaskedLMObjective, StreamLMObjective]:
        """What a model of a pattern learns."""
        settings, network = self.settings, Network(replace(self.options, sublayer_pattern=pattern))
        of_all = (network, settings.data, settings.batch_size, settings.seed)
        if settings.task == "masked-lm":
            return MaskedLMObjective(*of_all, settings.max_updates, self.text)
        return StreamLMObjective(*of_all, self.text)

    def build_model(self, pattern: str) -> tuple[nn.Module, Stack]:
        """A fresh seeded model of any pattern, on the search's device, and its stack."""
        torch.manual_seed(self.settings.seed)
        model = self.objective(pattern).build_model().to(self.settings.device)
        return model, next(module for module in model.modules() if isinstance(module, Stack))

    def build_supernet(self) -> Supernet:
        """Of the candidates, with as many layers as the baseline."""
        layers, candidates = self.settings.layers, self.settings.candidates
        model, network = self.build_model(supernet_pattern(candidates, layers))
        return Supernet(model, network, Choices(layers, candidates).to(self.settings.device))

    @cached_property
    def compared(self) -> ComparedTask:
        """How trainings of whole patterns learn, and on what they are validated: as in a comparison."""
        settings, sizes = self.settings, {**self.sizes, "batch_size": self.settings.batch_size}
        names = ("task", "data", "recipe", "validation_tokens", "in_turn", "device")
        how = {name: getattr(settings, name) for name in names}
        how |= {"updates": settings.max_updates, "rates": (settings.lr,) if settings.lr else ()}
        how |= {"models": {"baseline": settings.baseline}, "fairseq_options": settings.fairseq_options}
        found = CompareSettings(sizes=sizes, **how)
        return found.row.load(found)

    def loss_of(self, model: nn.Module, batch: dict[str, Any]) -> tuple[Tensor, Any]:
        """Summed loss in nats and number of predictions."""
        loss_of = losses.masked_lm if self.settings.task == "masked-lm" else losses.causal_lm
        loss, count, _ = loss_of(model, batch, self.dictionary.pad())
        return loss, count

    def parts(self) -> tuple[Part, Part]:
        """The training data, for the weights and for the architecture; each call starts it anew.

        Raises:
            UserError: there is too little of it, or it does not fit the model.
        """
        settings, objective = self.settings, self.objective(self.settings.baseline)
        if settings.task == "masked-lm":
            return two_parts_of_blocks(objective.texts.split("train").now, settings.batch_size, settings.parts)
        if item_length(settings.data):
            raise UserError(f"{settings.data}: holds images, and a search divides a text; give one that holds a text")
        sizes = (settings.batch_size, *self.training_lengths)
        ends = self.dictionary.eos(), self.dictionary.pad()
        return two_parts_of_text(objective.tokens(), *sizes, *ends, settings.parts)
