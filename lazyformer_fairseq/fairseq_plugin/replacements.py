"""The table of everything that this package replaces in fairseq, torch and Python, and the functions that install it.

Each target appears in the table once, with the reason and the time of its replacement. Changes to updates and to the
saving of checkpoints are not in the table. They are methods of a subclass of fairseq's Trainer in :mod:`.trainer`,
which fairseq uses for our tasks because of a row here. This module imports neither fairseq nor torch, so that a command
line can read the table before it loads them.
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
    """The time at which a replacement is installed."""

    NAME = "before our architectures are registered"
    REGISTRATION = "when the plugin is registered; has no effect unless the command names one of our tasks"
    LOADING = (
        "when the plugin is registered, for all loads, even of stock tasks: it rejects damaged files and code, and "
        "changes no result"
    )
    RUN = "when a run of one of our tasks or commands starts; stays until the process ends"
    COMMAND_LINE = "when such a run is a process of its own, as opposed to a part of a notebook"


class How(Enum):
    """The way in which our function or class replaces the target."""

    AROUND = "is called instead of the target, with the target as an additional first argument"
    INSTEAD = "replaces the target"
    MAKES = "is called once with the target; its result replaces the target"
    SUBCLASS = "is constructed instead of the target, a class, if its `serves` accepts the arguments"


@dataclass(frozen=True)
class Replacement:
    """A row of the table.

    Attributes:
        stage: the time at which the replacement is installed.
        target: the replaced object, as ``module:name`` or ``module:Class.name``.
        ours: our function or class, as ``module:name`` relative to this folder; its parameters have the target's names.
        why: what fairseq does without the replacement.
        how: the way in which our object replaces the target.
        copies: modules that may have imported the target by its name, so that it must be replaced there, too.
    """

    stage: Stage
    target: str
    ours: str
    why: str
    how: How = How.AROUND
    copies: tuple[str, ...] = ()


# Modules of fairseq that call eval() on settings. The settings of a model come from its checkpoint, which also names
# the fairseq model: for fconv_lm, fairseq would run any code in decoder_layers.
EVALUATING_MODULES = tuple(
    f"fairseq.{name}"
    for name in """
    criterions.ctc data.audio.raw_audio_dataset data.codedataset models.fconv models.fconv_lm
    models.fconv_self_att models.hubert.hubert models.lightconv_lm models.speech_to_text.s2t_wav_transformer
    models.transformer_lm models.wav2vec.wav2vec models.wav2vec.wav2vec2 optim.adafactor optim.adam optim.adamax
    optim.cpu_adam optim.fused_lamb utils
    """.split()
)
# The modules that may be fairseq's training: under its name, or, started as `python -m fairseq_cli.train`, as the main
# module of the process or of its children.
TRAINING = ("fairseq_cli.train", "fairseq_cli.hydra_train", "__main__", "__mp_main__")

REPLACEMENTS = (
    Replacement(
        Stage.NAME,
        "fairseq.models:ARCH_MODEL_NAME_REGISTRY",
        "models.config:without_bert_base",
        "the legacy masked_lm model of fairseq has a preset named bert_base, which would prevent registering ours",
        How.MAKES,
    ),
    # Recognizing the commands that are for one of our tasks.
    Replacement(
        Stage.REGISTRATION,
        "fairseq.options:parse_args_and_arch",
        "reliability.options:starting_when_parsed",
        "fairseq's commands accept impossible options and take --bf16 for a TPU; they parse options when a run starts",
    ),
    Replacement(
        Stage.REGISTRATION,
        "fairseq.utils:import_user_module",
        "reliability.options:importing_one_plugin",
        "another copy of this package, given as --user-dir, ends in a traceback that names only one of the two",
    ),
    Replacement(
        Stage.REGISTRATION,
        "fairseq.dataclass.initialize:add_defaults",
        "reliability.options:starting_with_defaults",
        "runs under hydra and child processes do not parse options; this is the first function that they call",
        copies=TRAINING,
    ),
    Replacement(
        Stage.REGISTRATION,
        "fairseq.trainer:Trainer",
        "trainer:SafeTrainer",
        "a NaN ends a run, a signal kills it, and too large a batch is silently skipped; see trainer.py for more",
        How.SUBCLASS,
    ),
    Replacement(
        Stage.REGISTRATION,
        "fairseq.distributed.utils:call_main",
        "reliability.preemption:forwarding_signals",
        "the processes that fairseq starts for its GPUs receive no signals, and their exit codes are lost",
    ),
    # Reading untrusted files. Every checkpoint is loaded through these functions: to resume, to fine-tune, to use.
    Replacement(
        Stage.LOADING,
        "fairseq.checkpoint_utils:load_checkpoint_to_cpu",
        "reliability.checkpoints:loading_checked",
        "a damaged checkpoint ends in any error of the unpickler, code in one may run, and safetensors cannot be read",
    ),
    Replacement(
        Stage.LOADING,
        "fairseq.file_utils:load_archive_file",
        "reliability.checkpoints:refusing_archives",
        "a model in a .tar.gz is unpacked with its links and absolute paths, and the files that they name are moved",
    ),
    *(
        Replacement(
            Stage.LOADING,
            f"{module}:eval",
            "reliability.checkpoints:read_setting",
            "settings in a checkpoint are run as code; a name in the module takes precedence over Python's eval",
            How.INSTEAD,
        )
        for module in EVALUATING_MODULES
    ),
    # Processes and precision on machines that fairseq does not expect.
    Replacement(
        Stage.RUN,
        "fairseq.distributed.utils:_broadcast_object_slow",
        "reliability.preemption:broadcast_object",
        "settings are sent through torch.load, which rejects them since torch 2.6, so several processes cannot resume",
    ),
    Replacement(
        Stage.RUN,
        "fairseq.distributed.utils:all_gather_list",
        "reliability.preemption:gathering_without_gpu",
        "objects other than tensors are gathered through GPU memory, even if there is no GPU",
    ),
    Replacement(
        Stage.RUN,
        "fairseq.optim:FP16Optimizer",
        "optim.half_precision:FP16Optimizer",
        "weights in fp16 or bf16 are saved only after rounding, and gradients are summed in half precision",
        How.INSTEAD,
    ),
    # fairseq writes a checkpoint's first name atomically but copies the others in place. It checks no file, and stops
    # if the disk is full.
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
        "a full disk ends the run, and only the first process's state of the task is saved",
    ),
    Replacement(
        Stage.RUN,
        "fairseq.checkpoint_utils:verify_checkpoint_directory",
        "reliability.checkpoints:check_writable_folder",
        "a folder that cannot be written to ends in a traceback, and a user's file named dummy in it is removed",
        How.INSTEAD,
    ),
    Replacement(
        Stage.RUN,
        "fairseq.file_io:PathManager.copy",
        "reliability.checkpoints:copying_atomically",
        "the copies of a checkpoint under further names are written in place, so a kill may leave incomplete ones",
    ),
    Replacement(
        Stage.RUN,
        "fairseq.checkpoint_utils:os",
        "reliability.checkpoints:CarefulOs",
        "--keep-interval-updates, --keep-last-epochs and --keep-best-checkpoints may remove the last intact checkpoint",
        How.MAKES,
    ),
    # Tasks and fairseq_cli.train look up both iterators in this module.
    Replacement(
        Stage.RUN,
        "fairseq.data.iterators:EpochBatchIterator",
        "reliability.data:ExactEpochBatchIterator",
        "its position in an epoch is only valid for the same number of processes and the same batch size",
        How.INSTEAD,
    ),
    Replacement(
        Stage.RUN,
        "fairseq.data.iterators:GroupedIterator",
        "reliability.data:ExactGroupedIterator",
        "an epoch that is resumed at a batch that is not a multiple of --update-freq loses its last update",
        How.INSTEAD,
    ),
    Replacement(
        Stage.RUN,
        "torch.utils.data._utils.signal_handling:_set_worker_signal_handlers",
        "reliability.preemption:leaving_signals_to_the_run",
        "a data worker that dies of a signal ends the run before it has saved",
    ),
    Replacement(
        Stage.COMMAND_LINE,
        "sys:excepthook",
        "reliability.command_line:printing_user_errors",
        "a user's mistake or Ctrl-C prints a traceback instead of one line",
        How.MAKES,
    ),
)

_ABSENT = object()
_before: dict[Replacement, Any] = {}  # the original targets of the installed rows


def install(*stages: Stage, strict: bool = False) -> list[Replacement]:
    """Install the rows of some stages in the order of the table, except those that are already installed.

    Args:
        stages: the stages whose rows to install.
        strict: whether a missing target raises an error, because our runs need all rows; otherwise it is a warning,
            because stock tasks need none.

    Returns:
        The rows that were installed now.

    Raises:
        UserError: a target is missing, and `strict` is true.
    """
    missing = [row for row in REPLACEMENTS if row.stage in stages and row not in _before]
    misfits = {row: misfit for row in missing if (misfit := find_misfit(row))}
    if misfits:
        listed = "\n  ".join(misfits.values())
        message = f"the plugin is written for {WRITTEN_FOR}; install that version; these do not fit\n  {listed}"
        if strict:
            raise UserError(message)
        logger.warning(message)
    fresh = [row for row in missing if row not in misfits]
    for row in fresh:
        _put(row)
    return fresh


def start_run(command_line: bool = False) -> None:
    """Install every row that a run of one of our tasks needs.

    Args:
        command_line: whether the process is a command of fairseq or of this package, so that we may decide how it
            prints warnings and errors.

    Raises:
        UserError: some rows do not fit, and the message names them; a run with only some of the rows is not safe.
    """
    stages = [stage for stage in Stage if command_line or stage is not Stage.COMMAND_LINE]
    install(*stages, strict=True)


def protect_loads() -> None:
    """Install the rows that keep files from running code; raise a UserError, as :func:`start_run` does, for misfits."""
    install(Stage.LOADING, strict=True)


def find_misfit(row: Replacement) -> Optional[str]:
    """Return a description of what is wrong with a row's target; None if the target exists."""
    try:
        _, name, standing = _find(row.target)
    except (ImportError, AttributeError) as error:
        return f"{row.target} is not there ({error})"
    if standing is _ABSENT and not hasattr(builtins, name):  # a new name in a module may shadow a built-in one
        return f"{row.target} is not there"
    return None


def _find(target: str) -> tuple[Any, str, Any]:
    """Look up a target.

    Args:
        target: a ``module:name`` or ``module:Class.name``.

    Returns:
        The module or class that contains the target; its name there; and the target itself, in which a static method
        is still a ``staticmethod`` object, or ``_ABSENT``.
    """
    module, _, path = target.partition(":")
    *parents, name = path.split(".")
    owner = functools.reduce(getattr, parents, importlib.import_module(module))
    return owner, name, inspect.getattr_static(owner, name, _ABSENT)


def _put(row: Replacement) -> None:
    module, _, attribute = row.ours.partition(":")
    ours = getattr(importlib.import_module(f"{PACKAGE}.fairseq_plugin.{module}"), attribute)
    if row in _before:  # importing our module has installed the row already
        return
    owner, name, standing = _find(row.target)
    _before[row] = standing
    if row.how is How.SUBCLASS:
        standing.__new__ = _making(standing, ours)
        return
    if row.how is How.MAKES:
        ours = ours(standing)
    elif row.how is How.AROUND:
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
    """Return a ``__new__`` of `base` that makes a `subclass` if that serves the arguments, before ``__init__`` runs."""

    def new(cls: type, *args: Any, **kwargs: Any) -> Any:
        return object.__new__(subclass if cls is base and subclass.serves(*args, **kwargs) else cls)

    return new
