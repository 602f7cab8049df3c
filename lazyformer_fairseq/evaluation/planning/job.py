"""What is to be trained, from the name of an arch or a YAML file: all that formulas need."""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Optional

from omegaconf import OmegaConf
from omegaconf._utils import get_yaml_loader
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from lazyformer_fairseq.arguments import options_by_name
from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.evaluation.costs.flops import count_flops, count_parameters
from lazyformer_fairseq.evaluation.costs.memory import UpdateMemory, count_single_moments, count_update_memory
from lazyformer_fairseq.evaluation.usual_sizes import arch_named, usual_symbols
from lazyformer_fairseq.modules.memory_costs import Pass
from lazyformer_fairseq.modules.networks.causal_decoder import CausalDecoder
from lazyformer_fairseq.modules.networks.options import CausalLMOptions, MaskedLMOptions
from lazyformer_fairseq.modules.sublayers.attention_variant import variant_classes
from lazyformer_fairseq.options import computed_tokens, mask_shares, refuse_out_of_bounds
from lazyformer_fairseq.patterns.architectures import ARCHITECTURES, CAUSAL_ARCHITECTURES
from lazyformer_fairseq.patterns.grammar import plan
from lazyformer_fairseq.patterns.kinds import Sizes, sizes_of
from lazyformer_fairseq.storage.checked import read_yaml

MASKED = 0.15  # of all tokens, by default
KEPT_EVERY = 100_000  # updates: `lazyformer pretrain` keeps these checkpoints for good
TAKEN_EMPTY = ("sublayer_pattern", "permuted_only")
KEYS = ("model", "task", "dataset", "optimization", "optimizer", "checkpoint")  # of a YAML file, that formulas need
_SYMBOLS = 5  # of fairseq's, and the mask, which a dictionary's file does not list


@dataclass(frozen=True)
class Job:
    """A training.

    Attributes:
        name: of the arch or the file.
        config: of the model.
        vocab_size: V.
        time: T, tokens of a sequence or of a stream's segment.
        per_update: sequences of an update.
        max_update: updates.
        masked: of all tokens those that the head predicts, in the update with most; 1 for causal models.
        task: fairseq's settings of it.
        optimizer: its name; of those known here muon alone keeps less than two moments.
        checkpoint: fairseq's settings of it, of a YAML file.
    """

    name: str
    config: Any
    vocab_size: int
    time: int
    per_update: int
    max_update: int
    masked: float
    optimizer: str = ""
    task: Mapping[str, Any] = field(default_factory=dict)
    checkpoint: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self):
        """Raises a UserError for a number that no training has."""
        sizes = {"tokens_per_sample": self.time, "sequences_per_update": self.per_update, "max_update": self.max_update}
        refuse_out_of_bounds({**vars(self.config), **sizes, "mask_prob": self.masked})

    @property
    def is_causal(self) -> bool:
        return isinstance(self.config, CausalLMOptions)

    @property
    def attention_backend(self) -> str:
        return str(self.config.attention_backend)

    @property
    def pattern(self) -> str:
        return self.config.sublayer_pattern

    @property
    def sizes(self) -> Sizes:
        options = vars(self.config)
        return sizes_of(options | {"max_positions": max(options.get("max_positions", 0), self.time)}, self.vocab_size)

    @property
    def memory_length(self) -> int:
        """M, of a causal model."""
        return self.config.mem_len if self.is_causal else 0

    @property
    def parameters(self) -> int:
        return count_parameters(self.pattern, self.sizes)

    @property
    def single_moments(self) -> int:
        """Parameters of which the optimizer keeps one moment, not two."""
        return count_single_moments(self.pattern, self.sizes, self.optimizer)

    @property
    def tokens(self) -> int:
        """That the model reads in all."""
        return self.max_update * self.per_update * self.time

    @property
    def checkpoints(self) -> int:
        """How many there are in the end: the last, the best, three more, and of encoders every 100,000th.

        By a YAML file, in their place, as many as it keeps.
        """
        names = {"save_interval_updates": 0, "keep_interval_updates": -1}
        every, most = (_number(name, self.checkpoint.get(name, usual)) for name, usual in names.items())
        if every:
            written = self.max_update // every
            return 2 + (written if most < 0 else min(most, written))
        lasting = 0 if self.is_causal else len(range(KEPT_EVERY, self.max_update, KEPT_EVERY))
        return 3 + 2 + lasting

    @property
    def computed(self) -> int:
        """Tokens of a sequence that the network computes."""
        return computed_tokens(self.task, self.time, round(self.masked * self.time))

    @property
    def flops(self) -> int:
        """In all: the backward pass of a product is two. What a back end computes anew does not count."""
        predicted = round(self.masked * self.time)
        once = count_flops(self.pattern, self.sizes, self.computed, self.memory_length, predicted=predicted)
        return 3 * once * self.per_update * self.max_update

    @property
    def estimated(self) -> list[str]:
        """Sublayers whose memory is an estimate."""
        sublayers = plan(self.pattern, self.sizes.direction)
        return sorted(
            {each.text for each in sublayers if not all(row.counts_memory for row in variant_classes(each.values))}
        )

    def count_memory(
        self, batch: int, precision: str, device: str, back_end: str, accumulates: bool = False, processes: int = 1
    ) -> UpdateMemory:
        """Of one process."""
        run, predicted = self.run(batch, precision, device, back_end), round(self.masked * batch * self.time)
        return count_update_memory(self.pattern, self.sizes, run, predicted, accumulates, processes, self.optimizer)

    def run(self, batch: int, precision: str, device: str, back_end: str) -> Pass:
        """Forward and backward pass of a batch."""
        c = self.config
        drops = (c.dropout > 0, c.attention_dropout > 0, c.activation_dropout > 0)
        is_pre_norm = c.decoder_normalize_before if self.is_causal else c.encoder_normalize_before
        recomputed = c.checkpoint_activations, c.reversible
        how = (*drops, str(c.activation_fn), is_pre_norm, lambda maker: back_end, *recomputed)
        return Pass(batch, self.computed, self.memory_length, precision, device, self.features, *how)

    @property
    def features(self) -> frozenset[str]:
        """Of the network's scores."""
        if self.is_causal:
            return CausalDecoder.features | ({"mask"} if self.config.same_length else set())
        if self.computed > self.time:
            return frozenset({"learned"})  # with the bias of each pair
        return frozenset({"bias"} if self.config.relative_position_buckets else ())


def job_of_arch(arch: str, vocab_size: Optional[int] = None) -> Job:
    """As `lazyformer pretrain` trains it.

    Raises:
        UserError: there is no such arch; with the nearest names.
    """
    if row := ARCHITECTURES.get(arch_named(arch)):
        config = MaskedLMOptions(**row.options())
        length = row.max_positions or 512
        return _job(arch, config, vocab_size, length, 256, 1_000_000, MASKED, "", {"_name": row.task})
    row = CAUSAL_ARCHITECTURES[arch]
    return _job(arch, CausalLMOptions(**row.options()), vocab_size, row.tgt_len, row.rows, row.updates, 1.0)


def job_of_yaml(path: Path, groups: Optional[Mapping[str, str]] = None) -> Job:
    """As `lazyformer pretrain FILE.yaml` trains it.

    Args:
        groups: files taken in place of those that its defaults name, as ``{"recipe": "phase1"}``.

    Raises:
        UserError: the file cannot be read, or lacks a model of this package.
    """
    given = _read(path, groups or {})
    name = str(given.get("model", {}).get("_name", "nothing"))
    models = {"lazyformer": MaskedLMOptions, "lazyformer_lm": CausalLMOptions}
    if name not in models:
        raise UserError(f"{path}: its model is {name}, must be {' or '.join(models)}")
    config = _with(models[name](), given["model"])
    task, updates = given.get("task", {}), given.get("optimization", {}).get("max_update", 1_000_000)
    is_causal = name == "lazyformer_lm"
    time = task.get("tgt_len", 192) if is_causal else task.get("tokens_per_sample", 512)
    per_update = task.get("sequences_per_update") or given.get("dataset", {}).get("batch_size", 256)
    masked = 1.0 if is_causal else max(mask_shares(task.get("mask_prob", MASKED)))
    optimizer = str(given.get("optimizer", {}).get("_name", ""))
    others = (optimizer, task, given.get("checkpoint", {}))
    return _job(path.stem, config, None, time, per_update, updates, masked, *others)


def job_of_launch(
    arch: Optional[str], config: Optional[Path], data: str, given: Sequence[str], per_update: Optional[int] = None
) -> Job:
    """What a launch trains.

    Args:
        arch: a named model, else `config` is a YAML file.
        given: options of fairseq-train, or of hydra, that the user gave.
        per_update: sequences of an update; None for the training's own.

    Raises:
        UserError: as :func:`job_of_arch`, :func:`job_of_yaml` and :func:`with_options` do.
    """
    options = options_by_name(given)
    job = job_of_arch(arch) if config is None else job_of_yaml(config, groups=_groups(options))
    may_be_empty = {*TAKEN_EMPTY, *(name for name, value in vars(job.config).items() if isinstance(value, bool))}
    options = {name: value for name, value in options.items() if value or name in may_be_empty}
    if by_hydra := [word for word in given if word.startswith("optimizer._name=")]:
        options["optimizer"] = by_hydra[-1].partition("=")[2]
    if per_update is not None:
        options["sequences_per_update"] = str(per_update)
    if vocab_size := vocabulary_of(data, job.is_causal):
        job = replace(job, vocab_size=vocab_size)
    return with_options(job, options)


def update_of_yaml(path: Path, given: Sequence[str]) -> Optional[int]:
    """Sequences of an update, as the file or the words of hydra behind it say; None where only hydra reads them."""
    options = options_by_name(given)
    with suppress(UserError):
        size = {**_read(path, _groups(options)).get("task", {}), **options}.get("sequences_per_update")
        return size and _number("sequences_per_update", size)
    return None


def _groups(options: Mapping[str, str]) -> dict[str, str]:
    return {name: options[name] for name in ("recipe",) if options.get(name)}


def with_options(job: Job, options: Mapping[str, Any]) -> Job:
    """The same with options of fairseq-train, by name with underscores; those that formulas do not need are ignored.

    Raises:
        UserError: a value is no number where one is needed.
    """
    names = {"tokens_per_sample": "time", "tgt_len": "time", "sequences_per_update": "per_update", "max_update": None}
    changed = {names[name] or name: _number(name, value) for name, value in options.items() if name in names}
    if "mask_prob" in options and not job.is_causal:
        changed["masked"] = max(mask_shares(options["mask_prob"]))
    optimizer, task = str(options.get("optimizer", job.optimizer)), dict(job.task)
    if "task" in options:
        task["_name"] = options["task"]
    if "permuted_only" in options:
        task["permuted_only"] = _is_on(options["permuted_only"])
    return replace(job, config=_with(job.config, options), optimizer=optimizer, task=task, **changed)


def vocabulary_of(data: str, is_causal: bool = False) -> Optional[int]:
    """Symbols of the dictionary in the first of these folders (`a:b:c`); None where there is none."""
    path = Path(data.split(":")[0]) / "dict.txt"
    if not path.is_file():
        return None
    with path.open("rb") as lines:
        if not (listed := sum(1 for _ in lines)):
            raise UserError(f"{path}: lists no symbol")
        return listed + _SYMBOLS - is_causal


def _job(name: str, config: Any, vocab_size: Optional[int], *more: Any) -> Job:
    return Job(name, config, vocab_size or usual_symbols(vars(config)), *more)


def _with(config: Any, options: Mapping[str, Any]) -> Any:
    found = {}
    for name, value in options.items():
        if not name.startswith("_") and hasattr(config, name):
            default = getattr(config, name)
            if isinstance(default, bool):
                found[name] = _is_on(value)
            else:
                found[name] = _number(name, value, type(default)) if isinstance(default, (int, float)) else value
    return replace(config, **found)


def _is_on(value: Any) -> bool:
    """A switch, which has no value on a command line."""
    return str(value).lower() in ("", "true")


def _number(name: str, value: Any, kind: type = int) -> Any:
    try:
        return kind(value)
    except (TypeError, ValueError):
        raise UserError(f"--{name.replace('_', '-')} {value}: must be a number") from None


def _read(path: Path, groups: Mapping[str, str]) -> dict[str, Any]:
    """A YAML file with those that it names as defaults, which win, as hydra merges them."""
    try:
        own = OmegaConf.create(read_yaml(path, "give a training's settings", get_yaml_loader()))
        below = own.pop("defaults", [])
        files = (None if name == "_self_" else path.parent / _file_of(name, groups) for name in below)
        parts = [own if file is None else _read(file, groups) for file in files] or [own]
        merged = OmegaConf.merge(*map(OmegaConf.create, parts))
        return {key: _plain(merged, key) for key in KEYS if key in merged}
    except RecursionError:
        raise UserError(f"{path}: its defaults name each other in a circle; take one of them out") from None
    except (YAMLError, OmegaConfBaseException, AttributeError, TypeError) as error:
        raise UserError(f"{path}: cannot be read as a training's settings: {error}") from error


def _file_of(default: Any, groups: Mapping[str, str]) -> str:
    """Of an entry of a file's defaults: ``name``, or ``group: name``."""
    if not OmegaConf.is_dict(default):
        return f"{default}.yaml"
    group, name = next(iter(default.items()))
    return f"{group}/{groups.get(group, name)}.yaml"


def _plain(merged: Any, key: str) -> dict[str, Any]:
    if not OmegaConf.is_dict(merged[key]):
        raise TypeError(f"{key} must have settings of its own")
    return OmegaConf.to_container(merged[key], resolve=False)
