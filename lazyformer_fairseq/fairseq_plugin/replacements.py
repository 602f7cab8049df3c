"""The one table of what we replace in fairseq, torch and Python, why, and when; and what puts its rows in place.

Each target stands there once. What happens in an update, or around a checkpoint, is no row: :mod:`.trainer` has it, in
methods of a subclass of fairseq's Trainer, which fairseq makes for our tasks because of one row here. Imports neither
fairseq nor torch, so that a command line can read it before it loads them.
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
    """The moment when a replacement is put in place."""

    NAME = "before our architectures take their names"
    REGISTRATION = "with the registration; passes through unless the command names a task of ours"
    LOADING = (
        "with the registration, for every load, of stock tasks too: it refuses damage and code, and changes no result"
    )
    RUN = "when a run of one of our tasks or commands starts; to the end of the process"
    COMMAND_LINE = "when such a run is a process of its own, not a notebook's"


class How(Enum):
    """The way in which our function or class takes the target's place."""

    AROUND = "called in the target's place, with what stood there before the arguments"
    INSTEAD = "takes the target's place"
    MAKES = "called once, with what stands there; what it returns takes the target's place"
    SUBCLASS = "made in place of the target, a class, where its `serves` says so of the arguments"


@dataclass(frozen=True)
class Replacement:
    """A row of the table.

    Attributes:
        stage: when it is put in place.
        target: ``module:name`` or ``module:Class.name``.
        ours: ``module:name`` in this folder; the parameters that it names are the target's.
        why: what fairseq does otherwise.
        how: what becomes of ours.
        copies: modules that, where they are loaded, have imported the target by its name.
    """

    stage: Stage
    target: str
    ours: str
    why: str
    how: How = How.AROUND
    copies: tuple[str, ...] = ()


# Modules of fairseq that call eval() on settings. Those of a model come from its checkpoint, which also names
# the fairseq model: with fconv_lm, fairseq ran whatever stood in decoder_layers.
EVALUATING_MODULES = tuple(
    f"fairseq.{name}"
    for name in """
    criterions.ctc data.audio.raw_audio_dataset data.codedataset models.fconv models.fconv_lm
    models.fconv_self_att models.hubert.hubert models.lightconv_lm models.speech_to_text.s2t_wav_transformer
    models.transformer_lm models.wav2vec.wav2vec models.wav2vec.wav2vec2 optim.adafactor optim.adam optim.adamax
    optim.cpu_adam optim.fused_lamb utils
    """.split()
)
# Where fairseq's training is: by its name, or started as `python -m fairseq_cli.train`, there and in its children.
TRAINING = ("fairseq_cli.train", "fairseq_cli.hydra_train", "__main__", "__mp_main__")

REPLACEMENTS = (
    Replacement(
        Stage.NAME,
        "fairseq.models:ARCH_MODEL_NAME_REGISTRY",
        "models.config:without_bert_base",
        "fairseq's legacy masked_lm model calls a preset bert_base, and would refuse ours",
        How.MAKES,
    ),
    # Which command is one of ours.
    Replacement(
        Stage.REGISTRATION,
        "fairseq.options:parse_args_and_arch",
        "reliability.options:starting_when_parsed",
        "a run starts: fairseq's command lines parse their options, of which some cannot be met or mean a TPU",
    ),
    Replacement(
        Stage.REGISTRATION,
        "fairseq.utils:import_user_module",
        "reliability.options:importing_one_plugin",
        "another copy of this package, given as --user-dir, ends in a traceback that names one of the two",
    ),
    Replacement(
        Stage.REGISTRATION,
        "fairseq.dataclass.initialize:add_defaults",
        "reliability.options:starting_with_defaults",
        "a run starts: hydra, and each process that fairseq starts, call this first after they import us",
        copies=TRAINING,
    ),
    Replacement(
        Stage.REGISTRATION,
        "fairseq.trainer:Trainer",
        "trainer:SafeTrainer",
        "a NaN ends a run, a signal kills it, too large a batch is left out in silence; the trainer says more",
        How.SUBCLASS,
    ),
    Replacement(
        Stage.REGISTRATION,
        "fairseq.distributed.utils:call_main",
        "reliability.preemption:forwarding_signals",
        "the processes that fairseq starts for its GPUs hear no signals, and their exit code is lost",
    ),
    # Reading files that somebody else wrote. Every checkpoint comes through here: to resume, to fine-tune, to use.
    Replacement(
        Stage.LOADING,
        "fairseq.checkpoint_utils:load_checkpoint_to_cpu",
        "reliability.checkpoints:loading_checked",
        "a damaged checkpoint ends in whatever its unpickler raises; code in one may run; safetensors are no pickle",
    ),
    Replacement(
        Stage.LOADING,
        "fairseq.file_utils:load_archive_file",
        "reliability.checkpoints:refusing_archives",
        "a model given as .tar.gz is unpacked with its links and absolute names, and what they name is moved",
    ),
    *(
        Replacement(
            Stage.LOADING,
            f"{module}:eval",
            "reliability.checkpoints:read_setting",
            "settings of a checkpoint are run; a module's name comes before Python's",
            How.INSTEAD,
        )
        for module in EVALUATING_MODULES
    ),
    # Processes and precision on machines that fairseq does not expect.
    Replacement(
        Stage.RUN,
        "fairseq.distributed.utils:_broadcast_object_slow",
        "reliability.preemption:broadcast_object",
        "settings are sent through torch.load, which refuses them since torch 2.6: no run of several could resume",
    ),
    Replacement(
        Stage.RUN,
        "fairseq.distributed.utils:all_gather_list",
        "reliability.preemption:gathering_without_gpu",
        "what is no tensor is gathered through GPU memory, even where there is no GPU",
    ),
    Replacement(
        Stage.RUN,
        "fairseq.optim:FP16Optimizer",
        "optim.half_precision:FP16Optimizer",
        "of weights in fp16 or bf16 the rounded ones alone are saved, and gradients are added in half precision",
        How.INSTEAD,
    ),
    # fairseq writes one name by a rename, copies the others in place, checks nothing, and stops at a full disk.
    Replacement(
        Stage.RUN,
        "fairseq.checkpoint_utils:load_checkpoint",
        "trainer:loading_the_intact_one",
        "where checkpoint_last.pt is damaged the run stops, where it is missing it starts anew",
    ),
    Replacement(
        Stage.RUN,
        "fairseq.checkpoint_utils:save_checkpoint",
        "trainer:saving_if_there_is_room",
        "a full disk ends the run; the first process alone is asked what its task carries",
    ),
    Replacement(
        Stage.RUN,
        "fairseq.checkpoint_utils:verify_checkpoint_directory",
        "reliability.checkpoints:check_writable_folder",
        "a folder that cannot be written to ends in a traceback; a user's file dummy in it is removed",
        How.INSTEAD,
    ),
    Replacement(
        Stage.RUN,
        "fairseq.file_io:PathManager.copy",
        "reliability.checkpoints:copying_atomically",
        "further names of a checkpoint are written in place",
    ),
    Replacement(
        Stage.RUN,
        "fairseq.checkpoint_utils:os",
        "reliability.checkpoints:CarefulOs",
        "--keep-interval-updates, --keep-last-epochs and --keep-best-checkpoints may remove the last intact one",
        How.MAKES,
    ),
    # Tasks and fairseq_cli.train look both iterators up there.
    Replacement(
        Stage.RUN,
        "fairseq.data.iterators:EpochBatchIterator",
        "reliability.data:ExactEpochBatchIterator",
        "its place in an epoch means nothing to another number of processes or batch size",
        How.INSTEAD,
    ),
    Replacement(
        Stage.RUN,
        "fairseq.data.iterators:GroupedIterator",
        "reliability.data:ExactGroupedIterator",
        "an epoch that is resumed between two updates loses its last one",
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
        "a user's mistake, and Ctrl-C, are a line and no traceback",
        How.MAKES,
    ),
)

_ABSENT = object()
_before: dict[Replacement, Any] = {}  # what stood where ours is in place now


def install(*stages: Stage, strict: bool = False) -> list[Replacement]:
    """Put the rows of some stages in place, in the table's order; skip those already there.

    Args:
        stages: the stages whose rows are installed.
        strict: refuse rows whose target is not there, as a run of ours needs all; else warn, as stock tasks need none.

    Returns:
        The rows that were not in place before.

    Raises:
        UserError: `strict`, and a target is not there.
    """
    missing = [row for row in REPLACEMENTS if row.stage in stages and row not in _before]
    misfits = {row: misfit for row in missing if (misfit := find_misfit(row))}
    if misfits:
        listed = "\n  ".join(misfits.values())
        message = f"the plugin is written for {WRITTEN_FOR}; install that, these do not fit\n  {listed}"
        if strict:
            raise UserError(message)
        logger.warning(message)
    fresh = [row for row in missing if row not in misfits]
    for row in fresh:
        _put(row)
    return fresh


def start_run(command_line: bool = False) -> None:
    """Put in place every row that a run of ours needs.

    Args:
        command_line: the process is fairseq's or ours from its start, so that warnings and errors are ours to print.

    Raises:
        UserError: names every row that does not fit; a run that only some of them protect is not safe.
    """
    stages = [stage for stage in Stage if command_line or stage is not Stage.COMMAND_LINE]
    install(*stages, strict=True)


def protect_loads() -> None:
    """Keep files from running code; raise a UserError as :func:`start_run` does where a registration only warns."""
    install(Stage.LOADING, strict=True)


def find_misfit(row: Replacement) -> Optional[str]:
    """Return what is wrong with a row's target, in words; None where it is there."""
    try:
        _, name, standing = _find(row.target)
    except (ImportError, AttributeError) as error:
        return f"{row.target} is not there ({error})"
    if standing is _ABSENT and not hasattr(builtins, name):  # a module may shadow a name of Python's
        return f"{row.target} is not there"
    return None


def _find(target: str) -> tuple[Any, str, Any]:
    """Return the object that ``module:path`` is a name in, the name, and what stands there, a static method as one."""
    module, _, path = target.partition(":")
    *parents, name = path.split(".")
    owner = functools.reduce(getattr, parents, importlib.import_module(module))
    return owner, name, inspect.getattr_static(owner, name, _ABSENT)


def _put(row: Replacement) -> None:
    module, _, attribute = row.ours.partition(":")
    ours = getattr(importlib.import_module(f"{PACKAGE}.fairseq_plugin.{module}"), attribute)
    if row in _before:  # loaded, it has put itself in place
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
    """Return a ``__new__`` of `base`; Python then calls the ``__init__`` of what it returns."""

    def new(cls: type, *args: Any, **kwargs: Any) -> Any:
        return object.__new__(subclass if cls is base and subclass.serves(*args, **kwargs) else cls)

    return new
