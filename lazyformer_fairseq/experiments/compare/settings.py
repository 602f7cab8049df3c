"""All that decides a comparison's result: the table of tasks, the recipes, and what the user chose."""

import pkgutil
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass, field, replace
from functools import cached_property, partial
from typing import Any, Optional, Union

from lazyformer_fairseq.arguments import options_by_name
from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.experiments.compare.models import ModelSpec, read_models
from lazyformer_fairseq.fairseq_plugin.launcher.recipes import RECIPES as PRETRAINING
from lazyformer_fairseq.options import check, duration, option, read_count
from lazyformer_fairseq.patterns.architectures import CAUSAL_ARCHITECTURES
from lazyformer_fairseq.patterns.kinds import CAUSAL, ENCODER
from lazyformer_fairseq.training.laptop import LAPTOP, LAPTOP_HELP, laptop

Size = Union[int, float, bool, tuple[int, ...], None]


@dataclass(frozen=True)
class Task:
    """A task, and its defaults in a comparison.

    Attributes:
        name: the value of ``--task``.
        direction: the direction of the models, ENCODER or CAUSAL.
        implementation: ``MODULE:CLASS`` in this folder, a `ComparedTask`.
        measure: the measure of the points of a curve.
        holds: the file by which a folder of its data is known.
        prepares: the command that writes such a folder.
        presets: the models that are compared unless the user names some, by number of sublayers; the baseline first.
        sizes: options of the command that set the sizes of models and data, by name, with defaults.
        rates: the rate of each recipe, unless the user gives some.
        clip_norm: the norm that all clip gradients to.
        updates, budget: the default length of a training, the latter in seconds; one of them.
        takes_externals: whether models of fairseq and transformers can do it.
    """

    name: str
    direction: str
    implementation: str
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
        """Return the :class:`~lazyformer_fairseq.experiments.compare.task.ComparedTask` of a comparison's settings.

        Loads torch.
        """
        return pkgutil.resolve_name(f"{__package__}.{self.implementation}")(settings)


CAUSAL_NAMES = ("transformer_xl", "sandwich_transformer", "par_transformer", "lazy_par_transformer")
MASKED_LM = Task(
    name="masked-lm",
    direction=ENCODER,
    implementation="masked_lm:MaskedLM",
    measure={"name": "loss", "unit": "bits a masked piece", "lower_is_better": True},
    holds="dict.txt",
    prepares="lazyformer corpus",
    presets={
        12: {"bert": "(sf)x6", "lazyformer": "M2x3"},
        24: {"bert": "(sf)x12", "lazyformer": "M2x6", "par_bert": "(sff)x5 (f)x9"},
    },
    sizes={
        "embed_dim": 128,
        "ffn_embed_dim": 512,
        "heads": 4,
        "dropout": 0.0,
        "batch_size": 8,
        "tokens_per_sample": 128,
        "relative_position_buckets": 32,
    },
    rates={"adam": 2e-3, "nvidia": 1e-2, "laptop": LAPTOP["lr"]},
    clip_norm=1.0,
    budget=75.0,
    takes_externals=True,
)
LANGUAGE_MODEL = Task(
    name="language-model",
    direction=CAUSAL,
    implementation="language_model:LanguageModel",
    measure={"name": "perplexity", "unit": "per token", "lower_is_better": True},
    holds="manifest.json",
    prepares="lazyformer lm prepare",
    # The base models, of 32 sublayers, and the same proportions in 16.
    presets={
        16: {
            "transformer_xl": "(sf)x8",
            "sandwich_transformer": "(s)x3 (sf)x5 (f)x3",
            "par_transformer": "(sfff)x3 (f)x4",
            "lazy_par_transformer": "sffflfff sfff (f)x4",
        },
        32: {name: CAUSAL_ARCHITECTURES[f"{name}_base"].sublayer_pattern for name in CAUSAL_NAMES},
    },
    sizes={
        "embed_dim": 64,
        "ffn_embed_dim": 256,
        "heads": 4,
        "dropout": 0.0,
        "batch_size": 8,
        "tgt_len": 64,
        "mem_len": 64,
        "adaptive_softmax_cutoff": (2000, 10_000),
    },
    rates={"adam": 3e-3, "nvidia": 1e-2},
    clip_norm=0.25,
    updates=2000,
)
TASKS = (MASKED_LM, LANGUAGE_MODEL)


def find_task(name: str) -> Task:
    """Return a task of the table by name.

    Raises:
        UserError: there is none of that name.
    """
    by_name = {task.name: task for task in TASKS}
    if name not in by_name:
        raise UserError(f"--task {name}: choose from {', '.join(by_name)}")
    return by_name[name]


@dataclass(frozen=True)
class Recipe:
    """A recipe: optimizer and learning-rate schedule.

    Attributes:
        help: one line.
        warmup_ratio: share of the updates until the highest rate.
        decayed_to: share of the highest rate that is left in the end.
        optimizer, options: fairseq-train's options of these names; also options of models, text and schedule.
    """

    help: str
    warmup_ratio: float = 0.0
    decayed_to: float = 0.0
    optimizer: str = ""
    options: Mapping[str, Any] = field(default_factory=dict)

    def schedule(self, rate: float, updates: int) -> tuple[str, dict[str, Any]]:
        """Return name and options of the schedule for a training of so many updates."""
        if "lr_scheduler" in self.options:
            return self.options["lr_scheduler"], dict(self.options)
        if not self.decayed_to:
            return "linear_warmup", {"warmup_ratio": self.warmup_ratio}
        return "cosine", {"warmup_updates": round(self.warmup_ratio * updates), "min_lr": self.decayed_to * rate}


RECIPES = {
    "adam": Recipe("Adam (0.9, 0.98), linear decay to zero", 0.1, 0.0, "fused_adam", {"adam_betas": "(0.9,0.98)"}),
    "nvidia": Recipe(
        "LAMB, cosine decay to a tenth, as NVIDIA's Transformer-XL",
        0.025,
        0.1,
        "nvlamb",
        {"weight_decay": 0.0, "max_weight_norm": 10.0, "no_bias_correction": True},
    ),
    "laptop": Recipe(LAPTOP_HELP.partition(": ")[2], optimizer=LAPTOP["optimizer"], options=LAPTOP),
}
LAPTOP_SIZES = {"tokens_per_sample": PRETRAINING["laptop"].tokens, "batch_size": PRETRAINING["laptop"].sequences}


# Tables count by these, which therefore options of fairseq-train may not change.
COUNTED = {
    "sublayer_pattern": "give the pattern as its SPEC",
    **{
        f"{part}_{theirs}": f"give --{ours.replace('_', '-')} before `--`, or {own}=N in its SPEC"
        for part in ("encoder", "decoder")
        for theirs, ours, own in (
            ("embed_dim", "embed_dim", "embed"),
            ("ffn_embed_dim", "ffn_embed_dim", "ffn"),
            ("attention_heads", "heads", "heads"),
        )
    },
    **dict.fromkeys(
        ("tokens_per_sample", "tgt_len", "mem_len", "adaptive_softmax_cutoff"),
        "give it before `--`, for all models",
    ),
}

AXES = ("updates", "flops", "seconds")  # of curves
MODELS, SIZES, VALIDATION = "Models", "Sizes, of all models", "Validation"  # sections of --help
of_models = partial(option, section=MODELS)
of_length = partial(option, section="How long")
of_optimization = partial(option, section="How they learn")
of_place = partial(option, section="Where")


def size(name: str, help_text: str, **more: Any) -> Any:
    """Return an option of the tasks that have such a size, whose help shows each one's default."""
    defaults = {task.name: task.sizes[name] for task in TASKS if name in task.sizes}
    for task, value in defaults.items():
        if isinstance(value, tuple):
            defaults[task] = ",".join(map(str, value))
    values = set(defaults.values())
    if len(defaults) == len(TASKS) and len(values) == 1:
        shown = str(values.pop())
    else:
        shown = by_task(defaults)
    return option(None, help_text, section=SIZES, shown=shown, **more)


def by_task(values: Mapping[str, Any]) -> str:
    """Return ``75 for masked-lm, ...``."""
    return ", ".join(f"{value} for {name}" for name, value in values.items() if value is not None)


@dataclass(frozen=True)
class Sizes:
    """Options of sizes; those that are not given are the task's."""

    embed_dim: Optional[int] = size("embed_dim", "Embedding dimension.", low=1)
    ffn_embed_dim: Optional[int] = size("ffn_embed_dim", "Width of the feed-forward sublayers.", low=1)
    heads: Optional[int] = size("heads", "Attention heads.", low=1)
    dropout: Optional[float] = size("dropout", "On embeddings and sublayer outputs.", low=0, high=0.999)
    batch_size: Optional[int] = size("batch_size", "Sequences, or streams of text, of an update.", low=1)
    tokens_per_sample: Optional[int] = size("tokens_per_sample", "Longest block.", low=1)
    relative_position_buckets: Optional[int] = size(
        "relative_position_buckets",
        "Of T5's relative positions, in models of ours; 0 for none.",
        low=0,
    )
    tgt_len: Optional[int] = size("tgt_len", "Tokens of a segment.", low=1)
    mem_len: Optional[int] = size("mem_len", "Tokens remembered.", low=0)
    adaptive_softmax_cutoff: Optional[tuple[int, ...]] = size(
        "adaptive_softmax_cutoff",
        "Ids that start a new band of words; '' for one band.",
        low=0,
        metavar="N,N,...",
    )


@dataclass(frozen=True)
class CompareSettings:
    """The user's settings, completed by the task's and the recipe's defaults; kept in the comparison's folder.

    Attributes:
        models: SPEC by NAME; empty for the task's smallest presets.
        sizes: the sizes that the task's row names, each with its value.
        updates: the updates of each model; or
        budget: seconds of training for each model.
        shares: shares of the baseline's seconds; the others train once for each. Empty: once, by `updates` or `budget`.
        fairseq_options: further options of every model.

    Raises:
        UserError: values that do not fit together, or a model that cannot be read.
    """

    task: str = of_models(MISSING, "What they learn from DATA.", choices=[task.name for task in TASKS])
    data: str
    models: Mapping[str, str] = field(default_factory=dict)
    baseline: Optional[str] = of_models(None, "What the others are compared with.", metavar="NAME", shown="the first")
    equal_parameters: bool = of_models(
        False,
        "The others get the feed-forward width, a multiple of 8, that brings them closest to the baseline's "
        "parameters without embeddings.",
    )
    updates: Optional[int] = of_length(
        None,
        "Of each model and seed, on the same batches.",
        low=1,
        shown=by_task({task.name: task.updates for task in TASKS}),
    )
    budget: Optional[float] = of_length(
        None,
        "In place of --updates: as many as each model makes in so much training, such as 90s or 10min, by a trial "
        "before.",
        parse=duration,
        metavar="TIME",
        shown=by_task({task.name: task.budget and f"{task.budget:g}s" for task in TASKS}),
    )
    shares: tuple[float, ...] = of_length(
        (),
        "The others train once for each of these shares of the baseline's seconds: NAME@X. A schedule belongs to a "
        "length, so that is how a time to the baseline's loss is found.",
        "--time-fractions",
        low=0,
        is_open=True,
        high=10,
        metavar="X,X,...",
    )
    checkpoint_words: tuple[int, ...] = of_length(
        (),
        "Also keep each model, without its optimizer, once it has read about so many words, such as 1M,2M,5M.",
        parse=read_count,
        metavar="N,N,...",
    )
    word_budget: Optional[int] = of_length(
        None,
        "Most words that a training may read, repetitions included, such as 100M: --budget ends there at the latest, "
        "more --updates are refused.",
        parse=read_count,
        metavar="N",
    )
    seeds: tuple[int, ...] = of_length((1, 2, 3), "Each trains every model.", low=0, metavar="N,N,...")
    rates: tuple[float, ...] = of_optimization(
        (),
        "Highest learning rate; of several every model tries each with the first seed, and its best one counts.",
        "--lr",
        low=0,
        is_open=True,
        high=1,
        metavar="R,R,...",
        shown="one, the task's and the recipe's",
    )
    rate_updates: Optional[int] = of_optimization(None, "Of a try.", low=1, shown="the full length")
    recipe: str = of_optimization(
        "adam",
        f"{'; '.join(f'{name}: {recipe.help}' for name, recipe in RECIPES.items())}.",
        choices=tuple(RECIPES),
    )
    normalize_before: bool = option(
        True,
        "LayerNorms stand before sublayers, or behind them.",
        "--pre-norm/--post-norm",
        section=SIZES,
    )
    sizes: Mapping[str, Any] = field(default_factory=dict)
    validation_tokens: int = option(
        16_384,
        "Of a point of a curve: the same text, and the same masks, for all models, seeds and points.",
        low=1,
        section=VALIDATION,
    )
    in_turn: Optional[bool] = of_place(
        None,
        "Update by update in turn in one process, or each in a process of its own, GPU by GPU; on a processor as "
        "many at a time as OMP_NUM_THREADS leaves room for.",
        "--in-turn/--alone",
        shown="alone where there are several GPUs",
    )
    device: Optional[str] = of_place(None, "Where.", choices=("cpu", "cuda"), shown="cuda where there is a GPU")
    precision: Optional[str] = of_place(
        None,
        "Of training.",
        choices=("fp32", "bf16", "fp16"),
        shown="on GPUs bf16 where all have it, else fp16; on a CPU fp32",
    )
    fairseq_options: Sequence[str] = ()

    def __post_init__(self):
        if self.updates and self.budget:
            raise UserError("give --updates or --budget, not both")
        for name, value in self._completed().items():
            object.__setattr__(self, name, value)
        check(self)
        if self.baseline not in self.models:
            raise UserError(f"--baseline {self.baseline}: the models are {', '.join(self.models)}")
        for name in self.models:
            if not name or "/" in name or "@" in name:
                raise UserError(f"--model {name}=...: a name holds neither / nor @, which names a share")
        for spec in self.specs.values():
            self.recipe_of(spec)

    def _completed(self) -> dict[str, Any]:
        """Return the settings that were not given and whose defaults depend on something else."""
        from lazyformer_fairseq.evaluation.costs.machine import device_named
        from lazyformer_fairseq.executors.nvidia_smi import count_gpus, precision_on

        row = self.row
        if self.recipe not in row.rates:
            raise UserError(f"--recipe {self.recipe}: is not for --task {self.task}; give {' or '.join(row.rates)}")
        given = {name: value for name, value in self.sizes.items() if value is not None}
        foreign = sorted(given.keys() - row.sizes.keys())
        if foreign:
            raise UserError(f"--{foreign[0].replace('_', '-')}: means nothing for --task {self.task}")
        sizes = dict(row.sizes)
        if self.recipe == "laptop":
            sizes |= LAPTOP_SIZES
        models = dict(self.models or row.presets[min(row.presets)])
        device = self.device or device_named(None)
        completed = {
            "models": models,
            "baseline": self.baseline or next(iter(models)),
            "sizes": sizes | given,
            "device": device,
            "precision": self.precision or precision_on(device),
        }
        if not self.updates and not self.budget:
            completed |= {"updates": row.updates, "budget": row.budget}
        if self.in_turn is None:
            completed["in_turn"] = device == "cpu" or count_gpus() < 2
        return completed

    @property
    def row(self) -> Task:
        """The task's row of the table."""
        return find_task(self.task)

    def recipe_of(self, spec: Optional[ModelSpec] = None) -> Recipe:
        """Return the recipe, without the parts that a model leaves out.

        Raises:
            UserError: the recipe has no such part.
        """
        without: tuple[str, ...] = ()
        if spec:
            without = spec.without
        if self.recipe != "laptop":
            if without:
                raise UserError(f"--model {spec.name}: without={','.join(without)} is of --recipe laptop")
            return RECIPES[self.recipe]
        chosen = {"optimizer"} & options_by_name(self.words_of(spec)).keys()
        found = laptop(without, chosen)
        return replace(RECIPES["laptop"], optimizer=found.get("optimizer", ""), options=found)

    def words_of(self, spec: Optional[ModelSpec] = None) -> list[str]:
        """Return the words of further options, of all models and of one alone."""
        words = list(self.fairseq_options)
        if spec:
            words += spec.options
        return words

    def rates_of(self, spec: ModelSpec) -> tuple[float, ...]:
        """Return the rates that a model tries: its own, the comparison's, or the recipe's, or Adam's in its place."""
        return spec.rates or self.rates or (self.recipe_of(spec).options.get("lr", self.row.rates[self.recipe]),)

    @cached_property
    def specs(self) -> dict[str, ModelSpec]:
        """The models by name, before widths are made equal."""
        return read_models(self.models, self.row, self.sizes)

    def trained(self) -> dict[str, tuple[str, float]]:
        """Return by name in the results, NAME or NAME@SHARE, the model and its share of the baseline's seconds."""
        found = {}
        for name in self.models:
            shares = self.shares
            if name == self.baseline or not shares:
                shares = (1.0,)
            for share in shares:
                label = name
                if share != 1:
                    label = f"{name}@{share:g}"
                found[label] = (name, float(share))
        return found
