"""Description of a run, with everything that the cost formulas need, from the name of an arch or from a YAML file."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Optional

from omegaconf import OmegaConf

from lazyformer_fairseq.arguments import options_by_name
from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.evaluation.costs.flops import (
    count_experts_elsewhere,
    count_flops,
    count_matrix_parameters,
    count_parameters,
)
from lazyformer_fairseq.evaluation.costs.memory import Batch, UpdateMemory, measure_update_memory
from lazyformer_fairseq.evaluation.default_vocab_sizes import arch_named, default_vocab_size
from lazyformer_fairseq.modules.networks.options import CausalLMOptions, MaskedLMOptions
from lazyformer_fairseq.options import (
    COUNT,
    COUNT_OR_NONE,
    LENGTH,
    PROPORTION_OR_ALL,
    check,
    num_processed_tokens,
    parse_masking_rates,
    refuse_out_of_bounds,
)
from lazyformer_fairseq.patterns.architectures import ARCHITECTURES, CAUSAL_ARCHITECTURES
from lazyformer_fairseq.patterns.kinds import Sizes, sizes_of
from lazyformer_fairseq.storage.checked import read_yaml

MASKED = 0.15  # default fraction of predicted tokens
KEPT_EVERY = 100_000  # updates between the checkpoints that `lazyformer pretrain` keeps permanently
SECTIONS = ("model", "task", "dataset", "optimization", "optimizer", "checkpoint")  # sections of a YAML file
_SYMBOLS = 5  # fairseq's special symbols and the mask, which are not listed in dict.txt


@dataclass(frozen=True)
class Job:
    """The description of a run.

    Attributes:
        name: the name of the arch or the file.
        config: the model's options.
        vocab_size: V.
        time: T, the number of tokens per sequence, or per segment of a stream.
        per_update: the number of sequences per update.
        max_update: the number of updates.
        masked: the maximum fraction of tokens that the head predicts in any update; 1 for causal models.
        task: fairseq's task settings.
        optimizer: the optimizer's name; muon is the only supported one with fewer than two moments per weight.
        checkpoint: fairseq's checkpoint settings, from a YAML file.
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
    _measured: dict[tuple[Any, ...], UpdateMemory] = field(init=False, default_factory=dict, compare=False, repr=False)

    def __post_init__(self):
        """Raise a UserError if a number is out of bounds."""
        check(self.config)
        numbers = {
            "tokens_per_sample": (self.time, LENGTH),
            "sequences_per_update": (self.per_update, COUNT),
            "max_update": (self.max_update, COUNT_OR_NONE),
            "mask_prob": (self.masked, PROPORTION_OR_ALL),
        }
        for name, (value, bounds) in numbers.items():
            refuse_out_of_bounds({name: value}, {name: bounds})

    @property
    def is_causal(self) -> bool:
        """True if the model is causal."""
        return isinstance(self.config, CausalLMOptions)

    @property
    def attention_backend(self) -> str:
        """The attention back end."""
        return str(self.config.attention_backend)

    @property
    def pattern(self) -> str:
        """The sublayer pattern."""
        return self.config.sublayer_pattern

    @property
    def sizes(self) -> Sizes:
        """The model's sizes, for counting costs."""
        options = vars(self.config)
        longest = max(options.get("max_positions", 0), self.time)
        return sizes_of(options | {"max_positions": longest}, self.vocab_size)

    @property
    def memory_length(self) -> int:
        """M, the number of positions that a causal model remembers; 0 for other models."""
        if self.is_causal:
            return self.config.mem_len
        return 0

    @property
    def parameters(self) -> int:
        """The number of parameters in the model."""
        return count_parameters(self.pattern, self.sizes)

    @property
    def single_moment_parameters(self) -> int:
        """The number of parameters with one optimizer moment instead of two."""
        if self.optimizer == "muon":
            return count_matrix_parameters(self.pattern, self.sizes)
        return 0

    @property
    def tokens(self) -> int:
        """The total number of training tokens."""
        return self.max_update * self.per_update * self.time

    @property
    def checkpoints(self) -> int:
        """The number of checkpoints at the end: last, best, three more, and for encoders one per 100,000 updates.

        Settings in a YAML file take precedence.
        """
        every = _number("save_interval_updates", self.checkpoint.get("save_interval_updates", 0))
        most = _number("keep_interval_updates", self.checkpoint.get("keep_interval_updates", -1))
        if every:
            written = self.max_update // every
            kept = written if most < 0 else min(most, written)
            return 2 + kept
        lasting = 0
        if not self.is_causal:
            lasting = len(range(KEPT_EVERY, self.max_update, KEPT_EVERY))
        return 3 + 2 + lasting

    @property
    def computed(self) -> int:
        """The number of tokens per sequence that the network processes."""
        return num_processed_tokens(self.task, self.time, round(self.masked * self.time))

    @property
    def flops(self) -> int:
        """The run's total FLOPs without recomputation; a backward pass costs twice as much as a forward pass."""
        predicted = round(self.masked * self.time)
        once = count_flops(self.pattern, self.sizes, self.computed, self.memory_length, predicted=predicted)
        return 3 * once * self.per_update * self.max_update

    def measure_memory(
        self,
        batch: int,
        precision: str,
        device: str,
        back_end: str,
        accumulates: bool = False,
        processes: int = 1,
    ) -> UpdateMemory:
        """Measure one process's memory on fake tensors, which takes a few seconds.

        Args:
            batch: the number of sequences per batch.
            precision: fp32, fp16 or bf16.
            device: cuda or cpu.
            back_end: the attention back end.
            accumulates: whether gradients from an earlier batch of the same update already exist.
            processes: the run's number of processes.
        """
        key = batch, precision, device, back_end, accumulates, processes
        if key in self._measured:
            return self._measured[key]
        options = replace(self.config, attention_backend=back_end)
        if not self.is_causal:
            options = replace(options, max_positions=max(options.max_positions, self.time), compile=False)
        self._measured[key] = measure_update_memory(
            options,
            self.vocab_size,
            Batch(
                sequences=batch,
                tokens=self.computed,
                predicted=round(self.masked * batch * self.time),
                memory=self.memory_length,
                is_permuted=self.computed > self.time,
            ),
            precision=precision,
            device=device,
            accumulates=accumulates,
            processes=processes,
            single_moment_parameters=self.single_moment_parameters,
            elsewhere=count_experts_elsewhere(self.pattern, self.sizes, processes),
        )
        return self._measured[key]


def job_of_arch(arch: str, vocab_size: Optional[int] = None) -> Job:
    """Return the job that `lazyformer pretrain ARCH` runs.

    Args:
        arch: the name of the arch.
        vocab_size: the vocabulary size; None for the model's default vocabulary size.

    Raises:
        UserError: there is no such arch; the message suggests similar names.
    """
    name = arch_named(arch)
    if name in ARCHITECTURES:
        row = ARCHITECTURES[name]
        config = MaskedLMOptions(**row.options())
        return Job(
            name=arch,
            config=config,
            vocab_size=vocab_size or default_vocab_size(vars(config)),
            time=row.max_positions or 512,
            per_update=256,
            max_update=1_000_000,
            masked=MASKED,
            task={"_name": row.task},
        )
    row = CAUSAL_ARCHITECTURES[name]
    config = CausalLMOptions(**row.options())
    return Job(
        name=arch,
        config=config,
        vocab_size=vocab_size or default_vocab_size(vars(config)),
        time=row.tgt_len,
        per_update=row.rows,
        max_update=row.updates,
        masked=1.0,
    )


def job_of_yaml(path: Path, overrides: Sequence[str] = ()) -> Job:
    """Return the job that `lazyformer pretrain FILE.yaml` runs.

    Args:
        path: the file.
        overrides: hydra overrides from the command line, such as ``recipe=phase1``.

    Raises:
        UserError: the file cannot be read, or its model is not from this package.
    """
    given = compose_yaml(path, overrides)
    name = str(given["model"].get("_name", "nothing"))
    models = {"lazyformer": MaskedLMOptions, "lazyformer_lm": CausalLMOptions}
    if name not in models:
        raise UserError(f"{path}: the model is {name}, but must be {' or '.join(models)}")

    task = given["task"]
    if name == "lazyformer_lm":
        time = task.get("tgt_len", 192)
        masked = 1.0
    else:
        time = task.get("tokens_per_sample", 512)
        masked = max(parse_masking_rates(task.get("mask_prob", MASKED)))
    config = _with(models[name](), given["model"])
    return Job(
        name=path.stem,
        config=config,
        vocab_size=default_vocab_size(vars(config)),
        time=time,
        per_update=task.get("sequences_per_update") or given["dataset"].get("batch_size", 256),
        max_update=given["optimization"].get("max_update", 1_000_000),
        masked=masked,
        optimizer=str(given["optimizer"].get("_name", "")),
        task=task,
        checkpoint=given["checkpoint"],
    )


def job_of_launch(
    arch: Optional[str],
    config: Optional[Path],
    data: str,
    given: Sequence[str],
    per_update: Optional[int] = None,
) -> Job:
    """Return the job that a launch command runs.

    Args:
        arch: the name of a model; None if `config` is set.
        config: a YAML file.
        data: folders of binarized data with the dictionary that determines the vocabulary size.
        given: fairseq-train options or hydra overrides specified by the user.
        per_update: the number of sequences per update; None for the job's default.

    Raises:
        UserError: :func:`job_of_arch`, :func:`job_of_yaml` or :func:`with_options` fails.
    """
    if arch is None:
        job = job_of_yaml(config, given)
    else:
        job = job_of_arch(arch)
        switches = {name for name, value in vars(job.config).items() if isinstance(value, bool)}
        may_be_empty = {"sublayer_pattern", "permuted_only", *switches}
        options = {}
        for name, value in options_by_name(given).items():
            if value or name in may_be_empty:
                options[name] = value
        job = with_options(job, options)
    if vocab_size := vocabulary_of(data, job.is_causal):
        job = replace(job, vocab_size=vocab_size)
    if per_update is not None:
        job = replace(job, per_update=per_update)
    return job


def compose_yaml(path: Path, overrides: Sequence[str] = ()) -> dict[str, dict[str, Any]]:
    """Return the sections of a YAML file that the formulas need, composed as in fairseq-hydra-train.

    Args:
        path: the file; the defaults that it refers to are in the same folder.
        overrides: hydra overrides from the command line.

    Raises:
        UserError: the file cannot be read, or a setting is invalid.
    """
    from hydra import compose, initialize_config_dir  # takes a third of a second

    if path.suffix != ".yaml":
        raise UserError(f"{path}: hydra only reads files with the suffix .yaml; rename this file to {path.stem}.yaml")
    read_yaml(path, "pass a file with training settings")  # enforces limits, and its errors name the line
    # "++" also accepts settings that are not in the file but in fairseq's dataclasses.
    words = [f"++{word}" if re.match(r"\w+\.", word) else word for word in overrides]
    try:
        with initialize_config_dir(str(path.parent.absolute()), version_base="1.1"):
            composed = compose(path.stem, overrides=words)
        found = {}
        for name in SECTIONS:
            section = composed.get(name) or OmegaConf.create()
            if not OmegaConf.is_dict(section):
                raise TypeError(f"{name} must be a section with settings")
            # A run's folder may depend on the job's name, which is only set in hydra's main function.
            found[name] = OmegaConf.to_container(section, resolve=name != "checkpoint")
        return found
    except Exception as error:  # hydra, OmegaConf and their parsers raise errors of many types
        raise UserError(f"{path}: cannot be read as training settings: {error}") from error


def with_options(job: Job, options: Mapping[str, Any]) -> Job:
    """Apply fairseq-train options to a job; options that the formulas do not need are ignored.

    Args:
        job: the job.
        options: options by name, with underscores.

    Raises:
        UserError: a value must be a number but is not.
    """
    names = {
        "tokens_per_sample": "time",
        "tgt_len": "time",
        "sequences_per_update": "per_update",
        "max_update": "max_update",
    }
    changed = {names[name]: _number(name, value) for name, value in options.items() if name in names}
    if "mask_prob" in options and not job.is_causal:
        changed["masked"] = max(parse_masking_rates(options["mask_prob"]))
    if "optimizer" in options:
        changed["optimizer"] = str(options["optimizer"])
    task = dict(job.task)
    if "task" in options:
        task["_name"] = options["task"]
    if "permuted_only" in options:
        task["permuted_only"] = _is_on(options["permuted_only"])
    return replace(job, config=_with(job.config, options), task=task, **changed)


def vocabulary_of(data: str, is_causal: bool = False) -> Optional[int]:
    """Return the vocabulary size from the dictionary in the first of the folders `a:b:c`, or None without one."""
    path = Path(data.split(":", maxsplit=1)[0]) / "dict.txt"
    if not path.is_file():
        return None
    with path.open("rb") as lines:
        if not (listed := sum(1 for _ in lines)):
            raise UserError(f"{path} contains no symbols")
        return listed + _SYMBOLS - is_causal


def _with(config: Any, options: Mapping[str, Any]) -> Any:
    found = {}
    for name, value in options.items():
        if name.startswith("_") or not hasattr(config, name):
            continue
        default = getattr(config, name)
        found[name] = value
        if isinstance(default, bool):
            found[name] = _is_on(value)
        elif isinstance(default, (int, float)):
            found[name] = _number(name, value, type(default))
    return replace(config, **found)


def _is_on(value: Any) -> bool:
    """Return True if a flag is on; flags on a command line have no value."""
    return str(value).lower() in ("", "true")


def _number(name: str, value: Any, number_type: type = int) -> Any:
    try:
        return number_type(value)
    except (TypeError, ValueError):
        raise UserError(f"--{name.replace('_', '-')} {value}: must be a number") from None
