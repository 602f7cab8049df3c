"""The table of everything that this package patches in fairseq, torch and Python, and the functions that apply it.

Each target appears in the table once, with the reason for the patch and the time when it is applied. Most changes to
updates and to checkpoint saving are not in the table. They are methods of a subclass of fairseq's Trainer in
:mod:`.trainer`, which fairseq uses for our tasks because of a row here. This module imports neither fairseq nor torch,
so a command line can read the table before loading them.
"""

import builtins
import functools
import importlib
import inspect
import logging
import sys
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Any, Optional

from lazyformer_fairseq.errors import UserError

logger = logging.getLogger(__name__)

WRITTEN_FOR = "fairseq-fixed 0.12.3.1"
PACKAGE = __name__.partition(".")[0]


class Stage(Enum):
    """The time when a replacement is installed."""

    NAME = "before our architectures are registered"
    REGISTRATION = "when the plugin is registered; has no effect unless the command names one of our tasks"
    LOADING = (
        "when the plugin is registered, for every load, including stock tasks: it rejects damaged files and code, and "
        "changes no results"
    )
    RUN = "when a run of one of our tasks or commands starts; stays until the process ends"
    COMMAND_LINE = "when such a run has its own process, as opposed to running in a notebook"


class How(Enum):
    """The way in which our function or class replaces the target."""

    WRAP = "is called instead of the target, with the target as an additional first argument"
    REPLACE = "replaces the target"
    FACTORY = "is called once with the target, and its result replaces the target"
    SUBCLASS = "is constructed instead of the target class if its `serves` accepts the arguments"


@dataclass(frozen=True)
class Replacement:
    """A row of the table.

    Attributes:
        stage: when the replacement is installed.
        target: the replaced object, as ``module:name`` or ``module:Class.name``.
        ours: our function or class, as ``module:name`` relative to this folder; it has the target's parameter names.
        why: what fairseq does without the replacement.
        how: how our object replaces the target.
        copies: other modules that may have imported the target by name, so that it must be replaced there too.
    """

    stage: Stage
    target: str
    ours: str
    why: str
    how: How = How.WRAP
    copies: tuple[str, ...] = ()


# fairseq modules that call eval() on settings. A model's settings come from its checkpoint, which also names the
# fairseq model. If that is fconv_lm, for example, fairseq would run any code in decoder_layers.
EVALUATING_MODULES = tuple(
    f"fairseq.{name}"
    for name in """
    criterions.ctc data.audio.raw_audio_dataset data.codedataset models.fconv models.fconv_lm
    models.fconv_self_att models.hubert.hubert models.lightconv_lm models.speech_to_text.s2t_wav_transformer
    models.transformer_lm models.wav2vec.wav2vec models.wav2vec.wav2vec2 optim.adafactor optim.adam optim.adamax
    optim.cpu_adam optim.fused_lamb utils
    """.split()
)
# The modules under which fairseq's training script may be loaded. When started as `python -m fairseq_cli.train`, it is
# the main module of the process or of its children.
TRAINING = ("fairseq_cli.train", "fairseq_cli.hydra_train", "__main__", "__mp_main__")

REPLACEMENTS = (
    Replacement(
        Stage.NAME,
        "fairseq.models:ARCH_MODEL_NAME_REGISTRY",
        "models.config:without_bert_base",
        "fairseq's legacy masked_lm model has a preset named bert_base, which would prevent registering ours",
        How.FACTORY,
    ),
    # Detecting commands that run one of our tasks.
    Replacement(
        Stage.REGISTRATION,
        "fairseq.options:parse_args_and_arch",
        "reliability.options:starting_when_parsed",
        "fairseq's commands accept invalid options and take --bf16 to mean a TPU; every run starts by parsing options",
    ),
    Replacement(
        Stage.REGISTRATION,
        "fairseq.utils:import_user_module",
        "reliability.options:importing_one_plugin",
        "another copy of this package, passed as --user-dir, causes a traceback that names only one of the two",
    ),
    Replacement(
        Stage.REGISTRATION,
        "fairseq.dataclass.initialize:add_defaults",
        "reliability.options:starting_with_defaults",
        "hydra runs and child processes do not parse options; this is the first function that they call",
        copies=TRAINING,
    ),
    Replacement(
        Stage.REGISTRATION,
        "fairseq.trainer:Trainer",
        "trainer:SafeTrainer",
        "a NaN ends a run, a signal kills it, and a batch that is too large is silently skipped; see trainer.py",
        How.SUBCLASS,
    ),
    Replacement(
        Stage.REGISTRATION,
        "fairseq.distributed.utils:call_main",
        "reliability.preemption:forwarding_signals",
        "the processes that fairseq starts, one per GPU, receive no signals, and their exit codes are lost",
    ),
    # Reading untrusted files. Every checkpoint is loaded through these functions, whatever it is loaded for.
    Replacement(
        Stage.LOADING,
        "fairseq.checkpoint_utils:load_checkpoint_to_cpu",
        "reliability.checkpoints:loading_checked",
        "a bad checkpoint may run code or raise arbitrary unpickling errors, and safetensors files cannot be read",
    ),
    Replacement(
        Stage.LOADING,
        "fairseq.file_utils:load_archive_file",
        "reliability.checkpoints:refusing_archives",
        "a model in a .tar.gz is unpacked with its links and absolute paths, and the files they point to are moved",
    ),
    *(
        Replacement(
            Stage.LOADING,
            f"{module}:eval",
            "reliability.checkpoints:read_setting",
            "settings in a checkpoint are run as code; a module-level eval takes precedence over the built-in one",
            How.REPLACE,
        )
        for module in EVALUATING_MODULES
    ),
    # Processes and precision on machines that fairseq does not anticipate.
    Replacement(
        Stage.RUN,
        "fairseq.distributed.utils:_broadcast_object_slow",
        "reliability.preemption:broadcast_object",
        "settings are sent through torch.load, which rejects them since torch 2.6, so multi-process runs cannot resume",
    ),
    Replacement(
        Stage.RUN,
        "fairseq.distributed.utils:all_gather_list",
        "reliability.preemption:gathering_without_gpu",
        "non-tensor objects are gathered through GPU memory, even if there is no GPU",
    ),
    Replacement(
        Stage.RUN,
        "fairseq.optim:FP16Optimizer",
        "optim.half_precision:FP16Optimizer",
        "fp16 and bf16 checkpoints contain only the rounded weights, and gradients are summed in half precision",
        How.REPLACE,
    ),
    # fairseq writes a checkpoint under its first name atomically, but copies it to its other names in place. It
    # verifies no file, and stops if the disk is full.
    Replacement(
        Stage.RUN,
        "fairseq.checkpoint_utils:load_checkpoint",
        "trainer:loading_the_intact_one",
        "the run stops if checkpoint_last.pt is damaged, and starts from scratch if it is missing",
    ),
    Replacement(
        Stage.RUN,
        "fairseq.checkpoint_utils:save_checkpoint",
        "trainer:saving_if_there_is_room",
        "a full disk ends the run, and the task's state is saved only for the first process",
    ),
    Replacement(
        Stage.RUN,
        "fairseq.checkpoint_utils:verify_checkpoint_directory",
        "reliability.checkpoints:check_writable_folder",
        "an unwritable folder causes a traceback, and a user's file named dummy in the folder is removed",
        How.REPLACE,
    ),
    Replacement(
        Stage.RUN,
        "fairseq.file_io:PathManager.copy",
        "reliability.checkpoints:copy_atomically",
        "a checkpoint's copies under other names are written in place, so a kill may leave them incomplete",
    ),
    Replacement(
        Stage.RUN,
        "fairseq.checkpoint_utils:os",
        "reliability.checkpoints:CarefulOs",
        "--keep-interval-updates, --keep-last-epochs and --keep-best-checkpoints may remove the last intact checkpoint",
        How.FACTORY,
    ),
    # Tasks and fairseq_cli.train look up both iterators in this module.
    Replacement(
        Stage.RUN,
        "fairseq.data.iterators:EpochBatchIterator",
        "reliability.data:ExactEpochBatchIterator",
        "its position in an epoch is valid only for the same number of processes and the same batch size",
        How.REPLACE,
    ),
    Replacement(
        Stage.RUN,
        "fairseq.data.iterators:GroupedIterator",
        "reliability.data:ExactGroupedIterator",
        "an epoch resumed at a batch number that is not a multiple of --update-freq loses its last update",
        How.REPLACE,
    ),
    Replacement(
        Stage.RUN,
        "torch.utils.data._utils.signal_handling:_set_worker_signal_handlers",
        "reliability.preemption:leaving_signals_to_the_run",
        "a data worker killed by a signal ends the run before the run has saved",
    ),
    Replacement(
        Stage.COMMAND_LINE,
        "sys:excepthook",
        "reliability.command_line:printing_user_errors",
        "a user's mistake or Ctrl-C prints a traceback instead of one line",
        How.FACTORY,
    ),
)

_ABSENT = object()
_before: dict[Replacement, Any] = {}  # the original targets of the installed rows


def install(*stages: Stage, strict: bool = False) -> list[Replacement]:
    """Install the rows of the given stages in table order, skipping rows that are already installed.

    Args:
        stages: the stages to install.
        strict: whether a missing target raises an error, because our runs need all rows. Otherwise it causes only a
            warning, because stock tasks need no rows.

    Returns:
        The newly installed rows.

    Raises:
        UserError: a target is missing, and `strict` is true.
    """
    missing = [row for row in REPLACEMENTS if row.stage in stages and row not in _before]
    misfits = {row: misfit for row in missing if (misfit := find_missing_target(row))}
    if misfits:
        listed = "\n  ".join(misfits.values())
        message = f"the plugin requires {WRITTEN_FOR}; install that version. These targets are missing:\n  {listed}"
        if strict:
            raise UserError(message)
        logger.warning(message)
    fresh = [row for row in missing if row not in misfits]
    for row in fresh:
        _install_row(row)
    return fresh


def start_run(command_line: bool = False) -> None:
    """Install every row that a run of one of our tasks needs.

    Args:
        command_line: whether the process runs a fairseq command or one of ours, so that we may decide how it prints
            warnings and errors.

    Raises:
        UserError: targets are missing; the message names them. A run with only some of the rows is not safe.
    """
    stages = [stage for stage in Stage if command_line or stage is not Stage.COMMAND_LINE]
    install(*stages, strict=True)


def protect_loads() -> None:
    """Install the rows that keep files from running code; like `start_run`, raise a UserError for missing targets."""
    install(Stage.LOADING, strict=True)


def find_missing_target(row: Replacement) -> Optional[str]:
    """Return an error message if a row's target is missing; None if it exists."""
    try:
        _, name, standing = _find(row.target)
    except (ImportError, AttributeError) as error:
        return f"{row.target} does not exist ({error})"
    if standing is _ABSENT and not hasattr(builtins, name):  # a new module attribute may shadow a built-in
        return f"{row.target} does not exist"
    return None


def _find(target: str) -> tuple[Any, str, Any]:
    """Look up a target.

    Args:
        target: ``module:name`` or ``module:Class.name``.

    Returns:
        The module or class that contains the target, the target's name in it, and the target itself or ``_ABSENT``. A
        static method is returned as its ``staticmethod`` object.
    """
    module, _, path = target.partition(":")
    *parents, name = path.split(".")
    owner = functools.reduce(getattr, parents, importlib.import_module(module))
    return owner, name, inspect.getattr_static(owner, name, _ABSENT)


def _install_row(row: Replacement) -> None:
    module, _, attribute = row.ours.partition(":")
    ours = getattr(importlib.import_module(f"{PACKAGE}.fairseq_plugin.{module}"), attribute)
    if row in _before:  # importing our module installed the row
        return
    owner, name, standing = _find(row.target)
    _before[row] = standing
    if row.how is How.SUBCLASS:
        standing.__new__ = _making(standing, ours)
        return
    if row.how is How.FACTORY:
        ours = ours(standing)
    elif row.how is How.WRAP:
        ours = _around(getattr(standing, "__func__", standing), ours)
    if isinstance(standing, (staticmethod, classmethod)):
        ours = type(standing)(ours)
    setattr(owner, name, ours)
    for copy in filter(None, map(sys.modules.get, row.copies)):
        if vars(copy).get(name) is standing:
            setattr(copy, name, ours)


def _around(standing: Callable, wrapper: Callable) -> Callable:
    @functools.wraps(standing)
    def wrapped(*args, **kwargs):
        return wrapper(standing, *args, **kwargs)

    return wrapped


def _making(base: type, subclass: Any) -> Callable:
    """Return a ``__new__`` for `base` that creates a `subclass` instance if the subclass serves the arguments."""

    def new(cls: type, *args: Any, **kwargs: Any) -> Any:
        if cls is base and subclass.serves(*args, **kwargs):
            return object.__new__(subclass)
        return object.__new__(cls)

    return new
