"""The models and objectives of a search, built as fairseq-train would build them from the same options."""

import difflib
from collections.abc import Sequence
from dataclasses import fields, replace
from functools import cached_property, partial
from typing import Any, Union

import torch
from torch import nn

from lazyformer_fairseq.data.datasets.token_streams import StreamOptions
from lazyformer_fairseq.data.masked_text import MaskedTextOptions
from lazyformer_fairseq.data.text.dictionary_file import Dictionary
from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.evaluation.costs.flops import count_flops
from lazyformer_fairseq.experiments.compare.settings import RECIPES, CompareSettings
from lazyformer_fairseq.experiments.compare.task import ComparedTask
from lazyformer_fairseq.experiments.search.settings import SearchSettings
from lazyformer_fairseq.experiments.search.supernet import supernet_pattern
from lazyformer_fairseq.experiments.search.supernet_objective import (
    ARCHITECTURE,
    WEIGHTS,
    BlocksPart,
    StreamsPart,
    SupernetObjective,
)
from lazyformer_fairseq.modules.networks.options import CausalLMOptions, MaskedLMOptions, Options, read_options
from lazyformer_fairseq.modules.networks.stack import Stack
from lazyformer_fairseq.options import parse_arguments, parse_masking_rates, select_options
from lazyformer_fairseq.patterns.architectures import ARCHITECTURES, CAUSAL_ARCHITECTURES
from lazyformer_fairseq.patterns.kinds import Sizes
from lazyformer_fairseq.training.objectives.masked_lm import MaskedLMObjective
from lazyformer_fairseq.training.objectives.network import Network
from lazyformer_fairseq.training.objectives.stream_lm import StreamLMObjective

# By task: the model options, the data options, the table of architectures, and the generic architecture.
OPTIONS_OF_TASK = {
    "masked-lm": (MaskedLMOptions, MaskedTextOptions, ARCHITECTURES, "lazyformer"),
    "language-model": (CausalLMOptions, StreamOptions, CAUSAL_ARCHITECTURES, "lazyformer_lm"),
}
SET_BY_SEARCH = ("--sublayer-pattern", "--arch", "--task", "--criterion", "--seed", "--batch-size", "--save-dir")


def merge_options(task: str, arch: str, given: Sequence[str], recipe: str) -> tuple[Options, dict[str, Any]]:
    """Combine the options from arch, recipe and user, in order of increasing precedence.

    Args:
        task: the task's name.
        arch: the arch's name.
        given: the user's command-line options, such as ``--dropout 0.1``.
        recipe: the recipe's name.

    Returns:
        The model options, and the data options by name.

    Raises:
        UserError: the arch does not fit the task, an option is unknown, or a value is invalid.
    """
    for word in given:
        if word.split("=")[0] in SET_BY_SEARCH:
            raise UserError(f"{word}: the search sets this option itself, so omit it (see lazyformer search --help)")

    model_options, data_options, rows, generic = OPTIONS_OF_TASK[task]
    fitting = (generic, *rows)
    if arch not in fitting:
        close = difflib.get_close_matches(arch, fitting)
        full_size = [name for name in fitting if not name.endswith("_tiny")]
        known = dict.fromkeys([*close, *full_size])
        raise UserError(
            f"--arch {arch}: not an architecture for --task {task}; choose from {', '.join(known)}, or use the "
            "_tiny version of one of them"
        )
    try:
        words = parse_arguments(given, model_options, data_options)
    except UserError as error:
        raise UserError(f"{error}; lazyformer search passes unknown options on to the model and the data") from None

    of_recipe = {**RECIPES[recipe].options, "length_schedule": ""}  # all blocks in a search have the same length
    if arch in rows:
        of_arch = rows[arch].options()
    else:
        of_arch = {}
    model = {**of_arch, **select_options(model_options, of_recipe), **select_options(model_options, words)}
    data = {**select_options(data_options, of_recipe), **select_options(data_options, words)}
    return read_options(model_options, model), data


class SearchContext:
    """The models and objectives of a search.

    Args:
        settings: the search's settings.

    Attributes:
        options: the model options.
        text: the data options, by name.
        training_lengths: the sequence length T and memory length M during training; M is 0 for encoders.
        predicted_share: the fraction of a sequence's tokens that are predicted during training.
        sizes: the options of `lazyformer compare` for the same text, without widths and batch size.
        latency_tokens: the sequence length T for latency measurements; by default the same as for training.
        latency_memory: the memory length M for latency measurements.

    Raises:
        UserError: the options are invalid (see :func:`merge_options`), or change masks or lengths during training.
    """

    def __init__(self, settings: SearchSettings):
        self.settings = settings
        self.options, self.text = merge_options(settings.task, settings.arch, settings.fairseq_options, settings.recipe)
        _, data_options, _, _ = OPTIONS_OF_TASK[settings.task]
        text = data_options(**self.text)
        if isinstance(text, MaskedTextOptions):
            first, last = parse_masking_rates(text.mask_prob)
            varies = ""
            if first != last:
                varies = f"--mask-prob {text.mask_prob}"
            elif text.length_schedule:
                varies = "--length-schedule"
            if varies:
                raise UserError(
                    f"{varies}: in a search, the mask probability and the length must be the same for all updates"
                )
            self.training_lengths = (text.tokens_per_sample, 0)
            self.predicted_share = first
            self.sizes = {
                "tokens_per_sample": text.tokens_per_sample,
                "relative_position_buckets": self.options.relative_position_buckets,
            }
        else:
            self.training_lengths = (text.tgt_len, self.options.mem_len)
            self.predicted_share = 1.0
            self.sizes = {
                "tgt_len": text.tgt_len,
                "mem_len": self.options.mem_len,
                "adaptive_softmax_cutoff": self.options.adaptive_softmax_cutoff,
            }
        time, self.latency_memory = self.training_lengths
        self.latency_tokens = settings.latency_tokens or time

    @cached_property
    def dictionary(self) -> Dictionary:
        """The text's dictionary."""
        return self.objective(self.settings.baseline).dictionary

    def objective(self, pattern: str) -> Union[MaskedLMObjective, StreamLMObjective]:
        """Return the objective for a pattern."""
        network = Network(replace(self.options, sublayer_pattern=pattern))
        return self.compared.objective_of(network, self.text, self.settings.seed, self.settings.max_updates)

    def build_model(self, pattern: str) -> tuple[nn.Module, Stack]:
        """Build a seeded model from a pattern on the search's device, and return the model and its stack."""
        torch.manual_seed(self.settings.seed)
        model = self.objective(pattern).build_model().to(self.settings.device)
        return model, next(module for module in model.modules() if isinstance(module, Stack))

    def supernet_objective(self) -> SupernetObjective:
        """Return the objective of a supernet, which has a layer of candidates for each sublayer of the baseline."""
        settings = self.settings
        objective = self.objective(supernet_pattern(settings.candidates, settings.layers))
        if isinstance(objective, MaskedLMObjective):
            part_class = BlocksPart
        else:
            part_class = StreamsPart
        given = {field.name: getattr(objective, field.name) for field in fields(objective)}
        given["batch_size"] = settings.batch_size // settings.update_freq
        sides = {side: part_class(**given, side=side) for side in (WEIGHTS, ARCHITECTURE)}
        return SupernetObjective(sides, settings)

    @cached_property
    def network_sizes(self) -> Sizes:
        """The sizes that all models in the search have in common."""
        return self.build_model(self.settings.baseline)[1].sizes

    def relative_flops(self, pattern: str) -> float:
        """Return a pattern's FLOPs per update relative to the baseline's."""
        time, memory = self.training_lengths
        predicted = round(self.predicted_share * time)
        flops = partial(count_flops, sizes=self.network_sizes, time=time, memory=memory, predicted=predicted)
        return flops(pattern) / flops(self.settings.baseline)

    @cached_property
    def compared(self) -> ComparedTask:
        """The comparison task that trains and validates patterns outside a supernet."""
        settings = self.settings
        rates: tuple[float, ...] = ()
        if settings.lr:
            rates = (settings.lr,)
        compare_settings = CompareSettings(
            task=settings.task,
            data=settings.data,
            recipe=settings.recipe,
            validation_tokens=settings.validation_tokens,
            in_turn=settings.in_turn,
            device=settings.device,
            updates=settings.max_updates,
            rates=rates,
            models={"baseline": settings.baseline},
            sizes={**self.sizes, "batch_size": settings.batch_size},
            fairseq_options=settings.fairseq_options,
        )
        return compare_settings.row.load(compare_settings)
