"""Everything that determines a comparison's result: the table of tasks, the recipes and the user's settings."""

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
    """A task that models are compared on, with its defaults.

    Attributes:
        name: the value of ``--task``.
        direction: the models' direction, ENCODER or CAUSAL.
        implementation: the task's `ComparedTask`, as ``MODULE:CLASS`` in this folder.
        measure: the name, unit and direction of the metric plotted in the curves.
        data_file: the name of a file that identifies a folder as data for this task.
        prepared_by: the command that writes such a folder.
        presets: the default models to compare, by their number of sublayers; the baseline comes first.
        sizes: the default model and data sizes, by option name.
        rates: the default learning rate for each recipe.
        clip_norm: the maximum gradient norm, unless the recipe sets a different one.
        updates: the default length of a run in updates; None if the default is a budget.
        budget: the default length of a run in seconds; None if the default is a number of updates.
        supports_external_models: whether fairseq's and transformers' models can be trained on the task.
    """

    name: str
    direction: str
    implementation: str
    measure: Mapping[str, Any]
    data_file: str
    prepared_by: str
    presets: Mapping[int, Mapping[str, str]]
    sizes: Mapping[str, Size]
    rates: Mapping[str, float]
    clip_norm: float
    updates: Optional[int] = None
    budget: Optional[float] = None
    supports_external_models: bool = False

    def load(self, settings: Any) -> Any:
        """Load the task as a :class:`~lazyformer_fairseq.experiments.compare.task.ComparedTask` with these settings.

        This imports torch.
        """
        return pkgutil.resolve_name(f"{__package__}.{self.implementation}")(settings)


CAUSAL_NAMES = ("transformer_xl", "sandwich_transformer", "par_transformer", "lazy_par_transformer")
MASKED_LM = Task(
    name="masked-lm",
    direction=ENCODER,
    implementation="masked_lm:MaskedLM",
    measure={"name": "loss", "unit": "bits per masked token", "lower_is_better": True},
    data_file="dict.txt",
    prepared_by="lazyformer corpus",
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
    supports_external_models=True,
)
LANGUAGE_MODEL = Task(
    name="language-model",
    direction=CAUSAL,
    implementation="language_model:LanguageModel",
    measure={"name": "perplexity", "unit": "per token", "lower_is_better": True},
    data_file="manifest.json",
    prepared_by="lazyformer lm prepare",
    # The base models, which have 32 sublayers, and 16-sublayer versions with the same proportions.
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
    """Return the task with the given name.

    Raises:
        UserError: no task has this name.
    """
    by_name = {task.name: task for task in TASKS}
    if name not in by_name:
        raise UserError(f"--task {name}: choose from {', '.join(by_name)}")
    return by_name[name]


@dataclass(frozen=True)
class Recipe:
    """A training recipe: an optimizer, a learning-rate schedule, and further options.

    Attributes:
        help: a one-line description for ``--help``.
        warmup_ratio: the fraction of the updates spent warming up to the peak learning rate.
        decayed_to: the final learning rate as a fraction of the peak.
        optimizer: the optimizer's name in fairseq-train.
        options: further options for the optimizer, models, text and schedule, by their names in fairseq-train.
    """

    help: str
    warmup_ratio: float = 0.0
    decayed_to: float = 0.0
    optimizer: str = ""
    options: Mapping[str, Any] = field(default_factory=dict)

    def schedule(self, rate: float, updates: int) -> tuple[str, dict[str, Any]]:
        """Return the learning-rate schedule's name and options for a run of `updates` updates."""
        if "lr_scheduler" in self.options:
            return self.options["lr_scheduler"], dict(self.options)
        if not self.decayed_to:
            return "linear_warmup", {"warmup_ratio": self.warmup_ratio}
        return "cosine", {"warmup_updates": round(self.warmup_ratio * updates), "min_lr": self.decayed_to * rate}


RECIPES = {
    "adam": Recipe("Adam (0.9, 0.98), linear decay to zero", 0.1, 0.0, "fused_adam", {"adam_betas": "(0.9,0.98)"}),
    "nvidia": Recipe(
        "LAMB, cosine decay to a tenth, as in NVIDIA's Transformer-XL",
        0.025,
        0.1,
        "nvlamb",
        {"weight_decay": 0.0, "max_weight_norm": 10.0, "no_bias_correction": True},
    ),
    "laptop": Recipe(LAPTOP_HELP.partition(": ")[2], optimizer=LAPTOP["optimizer"], options=LAPTOP),
}
LAPTOP_SIZES = {"tokens_per_sample": PRETRAINING["laptop"].tokens, "batch_size": PRETRAINING["laptop"].sequences}


# Costs and tables are computed from these options, so the fairseq-train options after `--` must not set them.
COUNTED = {
    "sublayer_pattern": "specify the pattern as the model's SPEC",
    **{
        f"{part}_{option_name}": f"set --{size.replace('_', '-')} before `--`, or {key}=N in the model's SPEC"
        for part in ("encoder", "decoder")
        for option_name, size, key in (
            ("embed_dim", "embed_dim", "embed"),
            ("ffn_embed_dim", "ffn_embed_dim", "ffn"),
            ("attention_heads", "heads", "heads"),
        )
    },
    **dict.fromkeys(
        ("tokens_per_sample", "tgt_len", "mem_len", "adaptive_softmax_cutoff"),
        "set it before `--`, for all models",
    ),
}

AXES = ("updates", "flops", "seconds")  # horizontal axes of the curves
# Sections of --help.
MODELS = "Models"
SIZES = "Sizes of all models"
VALIDATION = "Validation"
of_models = partial(option, section=MODELS)
of_length = partial(option, section="Training length")
of_optimization = partial(option, section="Optimization")
of_place = partial(option, section="Device and order of training")


def size(name: str, help_text: str, **more: Any) -> Any:
    """Return the option for a size; its help shows the default of each task that has this size."""
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
    """Format the values other than None, each with its task, as in ``75 for masked-lm, ...``."""
    return ", ".join(f"{value} for {name}" for name, value in values.items() if value is not None)


@dataclass(frozen=True)
class Sizes:
    """The options for model and batch sizes; each defaults to the task's value."""

    embed_dim: Optional[int] = size("embed_dim", "Embedding dimension.", low=1)
    ffn_embed_dim: Optional[int] = size("ffn_embed_dim", "Width of the feed-forward sublayers.", low=1)
    heads: Optional[int] = size("heads", "Number of attention heads.", low=1)
    dropout: Optional[float] = size("dropout", "Dropout on embeddings and sublayer outputs.", low=0, high=0.999)
    batch_size: Optional[int] = size("batch_size", "Number of sequences (or streams of text) per update.", low=1)
    tokens_per_sample: Optional[int] = size("tokens_per_sample", "Maximum block length, in tokens.", low=1)
    relative_position_buckets: Optional[int] = size(
        "relative_position_buckets",
        "Number of buckets of T5's relative position bias in this package's models; 0 for no bias.",
        low=0,
    )
    tgt_len: Optional[int] = size("tgt_len", "Segment length, in tokens.", low=1)
    mem_len: Optional[int] = size("mem_len", "Memory length, in tokens.", low=0)
    adaptive_softmax_cutoff: Optional[tuple[int, ...]] = size(
        "adaptive_softmax_cutoff",
        "Word ids at which new bands of the adaptive softmax start; '' for a single band.",
        low=0,
        metavar="N,N,...",
    )


@dataclass(frozen=True)
class CompareSettings:
    """The user's settings, completed with the task's and the recipe's defaults. The comparison's folder stores them.

    Attributes:
        models: each model's SPEC by NAME; empty for the task's smallest presets.
        sizes: the task's sizes by name.
        updates: the number of updates per model; None if `budget` is set.
        budget: the training time per model in seconds; None if `updates` is set.
        shares: fractions of the baseline's training time; the other models are trained once for each fraction. If
            empty, they are trained once, for `updates` or `budget`.
        fairseq_options: further command-line options that apply to every model.

    Raises:
        UserError: settings conflict, or a SPEC cannot be parsed.
    """

    task: str = of_models(MISSING, "Task to train the models on.", choices=[task.name for task in TASKS])
    data: str
    models: Mapping[str, str] = field(default_factory=dict)
    baseline: Optional[str] = of_models(None, "Model to compare the others with.", metavar="NAME", shown="the first")
    equal_parameters: bool = of_models(
        False,
        "Set every other model's feed-forward width to the multiple of 8 at which its parameter count without "
        "embeddings is closest to the baseline's.",
    )
    updates: Optional[int] = of_length(
        None,
        "Number of updates per model and seed; all models train on the same batches.",
        low=1,
        shown=by_task({task.name: task.updates for task in TASKS}),
    )
    budget: Optional[float] = of_length(
        None,
        "Training time per model, such as 90s or 10min, instead of --updates. A short trial run first determines how "
        "many of each model's updates fit into this time.",
        parse=duration,
        metavar="TIME",
        shown=by_task({task.name: task.budget and f"{task.budget:g}s" for task in TASKS}),
    )
    shares: tuple[float, ...] = of_length(
        (),
        "Train every other model once for each of these fractions X of the baseline's training time, under the name "
        "NAME@X. Each of these runs completes its learning-rate schedule, so the shortest run that reaches the "
        "baseline's loss shows how long the model takes.",
        "--time-fractions",
        low=0,
        is_open=True,
        high=10,
        metavar="X,X,...",
    )
    checkpoint_words: tuple[int, ...] = of_length(
        (),
        "Save an additional checkpoint of each model, without its optimizer state, after training on about each of "
        "these numbers of words, such as 1M,2M,5M.",
        parse=read_count,
        metavar="N,N,...",
    )
    word_budget: Optional[int] = of_length(
        None,
        "Maximum number of words, such as 100M, that a run may read, counting repetitions. With --budget, training "
        "stops when a run reaches this number; a value of --updates that would exceed this number is rejected.",
        parse=read_count,
        metavar="N",
    )
    seeds: tuple[int, ...] = of_length(
        (1, 2, 3), "Random seeds; every model is trained once per seed.", low=0, metavar="N,N,..."
    )
    rates: tuple[float, ...] = of_optimization(
        (),
        "Peak learning rate. If there are several, each model tries all of them with the first seed and then uses its "
        "best one.",
        "--lr",
        low=0,
        is_open=True,
        high=1,
        metavar="R,R,...",
        shown="a single rate that depends on the task and the recipe",
    )
    rate_updates: Optional[int] = of_optimization(
        None, "Number of updates per learning-rate trial.", low=1, shown="the full length"
    )
    recipe: str = of_optimization(
        "adam",
        f"{'; '.join(f'{name}: {recipe.help}' for name, recipe in RECIPES.items())}.",
        choices=tuple(RECIPES),
    )
    normalize_before: bool = option(
        True,
        "Place LayerNorm before or after each sublayer.",
        "--pre-norm/--post-norm",
        section=SIZES,
    )
    sizes: Mapping[str, Any] = field(default_factory=dict)
    validation_tokens: int = option(
        16_384,
        "Number of tokens to evaluate on at each point of a curve. The text and the masks are the same for all models, "
        "seeds and points.",
        low=1,
        section=VALIDATION,
    )
    in_turn: Optional[bool] = of_place(
        None,
        "Interleave the models' updates in one process (--in-turn), or train each model in a separate process "
        "(--alone): one process per GPU or, on CPUs, as many at once as the cores allow with OMP_NUM_THREADS threads "
        "each.",
        "--in-turn/--alone",
        shown="alone if there are several GPUs",
    )
    device: Optional[str] = of_place(
        None, "Device to train on.", choices=("cpu", "cuda"), shown="cuda if there is a GPU"
    )
    precision: Optional[str] = of_place(
        None,
        "Numeric precision of training.",
        choices=("fp32", "bf16", "fp16"),
        shown="bf16 on GPUs if all of them support it, otherwise fp16; fp32 on CPUs",
    )
    fairseq_options: Sequence[str] = ()

    def __post_init__(self):
        if self.updates and self.budget:
            raise UserError("--updates and --budget: specify only one of the two")
        for name, value in self._completed().items():
            object.__setattr__(self, name, value)
        check(self)
        if self.baseline not in self.models:
            raise UserError(f"--baseline {self.baseline}: not one of the models; choose from {', '.join(self.models)}")
        for name in self.models:
            if not name or "/" in name or "@" in name:
                raise UserError(
                    f"--model {name}=...: the name must not be empty or contain / or @ (@ marks a fraction of the "
                    "training time)"
                )
        for spec in self.specs.values():
            self.recipe_of(spec)

    def _completed(self) -> dict[str, Any]:
        """Return the settings that depend on other settings or on the machine, with their defaults filled in."""
        from lazyformer_fairseq.evaluation.costs.machine import device_named
        from lazyformer_fairseq.executors.nvidia_smi import count_gpus, precision_on

        row = self.row
        if self.recipe not in row.rates:
            raise UserError(
                f"--recipe {self.recipe}: not supported for --task {self.task}; choose {' or '.join(row.rates)}"
            )
        given = {name: value for name, value in self.sizes.items() if value is not None}
        foreign = sorted(given.keys() - row.sizes.keys())
        if foreign:
            raise UserError(f"--{foreign[0].replace('_', '-')}: does not apply to --task {self.task}; omit the option")
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
        """The chosen task's row in the table of tasks."""
        return find_task(self.task)

    def recipe_of(self, spec: Optional[ModelSpec] = None) -> Recipe:
        """Return a model's recipe, without the parts that the model omits.

        Raises:
            UserError: the recipe has no such part.
        """
        without: tuple[str, ...] = ()
        if spec:
            without = spec.without
        if self.recipe != "laptop":
            if without:
                raise UserError(f"--model {spec.name}: without={','.join(without)} works only with --recipe laptop")
            return RECIPES[self.recipe]
        chosen = {"optimizer"} & options_by_name(self.words_of(spec)).keys()
        found = laptop(without, chosen)
        return replace(RECIPES["laptop"], optimizer=found.get("optimizer", ""), options=found)

    def words_of(self, spec: Optional[ModelSpec] = None) -> list[str]:
        """Return the further command-line options for all models, followed by the model's own options."""
        words = list(self.fairseq_options)
        if spec:
            words += spec.options
        return words

    def rates_of(self, spec: ModelSpec) -> tuple[float, ...]:
        """Return the learning rates that a model tries.

        These are the model's own rates if it has any, otherwise the comparison's, otherwise the recipe's. A model that
        omits or replaces the laptop recipe's optimizer gets the recipe's rate for Adam.
        """
        if spec.rates:
            return spec.rates
        if self.rates:
            return self.rates
        rate_for_adam = self.row.rates[self.recipe]
        return (self.recipe_of(spec).options.get("lr", rate_for_adam),)

    @cached_property
    def specs(self) -> dict[str, ModelSpec]:
        """The models by name, before feed-forward widths are adjusted to equalize parameters."""
        return read_models(self.models, self.row, self.sizes)

    def trained(self) -> dict[str, tuple[str, float]]:
        """Return the runs by their names in the results: NAME or NAME@FRACTION.

        Each is a pair of the model's own name and its fraction of the baseline's training time.
        """
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
