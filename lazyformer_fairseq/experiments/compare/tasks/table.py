"""The one table of tasks that models are compared on; a row names the module that trains and measures."""

import importlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Optional, Union

from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.patterns.architectures import CAUSAL_ARCHITECTURES
from lazyformer_fairseq.patterns.kinds import CAUSAL, ENCODER

Size = Union[int, float, bool, tuple[int, ...], None]


@dataclass(frozen=True)
class Task:
    """A row.

    Attributes:
        name: of ``--task``.
        direction: of the models, ENCODER or CAUSAL.
        module: has the class `Compared`, a `ComparedTask`.
        measure: what a curve's points and the choice of a rate go by; lower is better.
        holds: the file by which a folder of its data is known.
        prepares: the command that writes such a folder.
        presets: by number of sublayers, the models that are compared unless the user names some; the baseline first.
        sizes: what the task's models and data can be given, with defaults; options of the command, by name.
        rates: of each recipe, unless the user gives some.
        clip_norm: of all.
        updates, budget: how long unless told, the latter in seconds; one of them.
        takes_externals: whether models from elsewhere can do it.
    """

    name: str
    direction: str
    module: str
    measure: Mapping[str, Any]
    holds: str
    prepares: str
    presets: Mapping[int, Mapping[str, str]]
    sizes: Mapping[str, Size]
    rates: Mapping[str, float]
    clip_norm: float
    updates: Optional[int] = None
    budget: Optional[float] = None
    takes_externals: bool = False

    def load(self, settings: Any) -> Any:
        """The :class:`~lazyformer_fairseq.experiments.compare.tasks.interface.ComparedTask` of a comparison's settings.

        Loads torch and fairseq.
        """
        return importlib.import_module(self.module).Compared(settings)


_CAUSAL_NAMES = ("transformer_xl", "sandwich_transformer", "par_transformer", "lazy_par_transformer")

TASKS = (
    Task(
        "masked-lm",
        ENCODER,
        "lazyformer_fairseq.experiments.compare.tasks.masked_lm",
        {"name": "loss", "unit": "bits a masked piece", "lower_is_better": True},
        "dict.txt",
        "lazyformer corpus",
        {
            12: {"bert": "(sf)x6", "lazyformer": "M2x3"},
            24: {"bert": "(sf)x12", "lazyformer": "M2x6", "par_bert": "(sff)x5 (f)x9"},
        },
        {
            **{"embed_dim": 128, "ffn_embed_dim": 512, "heads": 4, "dropout": 0.0, "batch_size": 8},
            **{"tokens_per_sample": 128, "max_positions": None, "relative_position_buckets": 32},
        },
        {"adam": 2e-3, "nvidia": 1e-2},
        clip_norm=1.0,
        budget=75.0,
        takes_externals=True,
    ),
    Task(
        "language-model",
        CAUSAL,
        "lazyformer_fairseq.experiments.compare.tasks.language_model",
        {"name": "perplexity", "unit": "per token", "lower_is_better": True},
        "manifest.json",
        "lazyformer lm prepare",
        # The base models, of 32 sublayers, and the same proportions in 16.
        {
            16: {
                "transformer_xl": "(sf)x8",
                "sandwich_transformer": "(s)x3 (sf)x5 (f)x3",
                "par_transformer": "(sfff)x3 (f)x4",
                "lazy_par_transformer": "sffflfff sfff (f)x4",
            },
            32: {name: CAUSAL_ARCHITECTURES[f"{name}_base"].sublayer_pattern for name in _CAUSAL_NAMES},
        },
        {
            **{"embed_dim": 64, "ffn_embed_dim": 256, "heads": 4, "dropout": 0.0, "batch_size": 8},
            **{"tgt_len": 64, "mem_len": 64, "adaptive_softmax_cutoff": (2000, 10_000)},
            **{"evaluation_tgt_len": 64, "evaluation_mem_len": 64, "evaluation_batch_size": 64},
            **{"clamp_len": 0, "same_length": False},
        },
        {"adam": 3e-3, "nvidia": 1e-2},
        clip_norm=0.25,
        updates=2000,
    ),
)


def find_task(name: str) -> Task:
    """Raises a UserError where there is none of that name."""
    for task in TASKS:
        if task.name == name:
            return task
    raise UserError(f"--task {name}: choose from {', '.join(task.name for task in TASKS)}")
