"""Errors and warnings of command lines. This module imports neither fairseq nor torch."""

import errno
import json
import os
import re
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Optional

from lazyformer_fairseq.errors import UserError, nearest
from lazyformer_fairseq.extras import lack_of_fairseq
from lazyformer_fairseq.storage.atomic import OUT_OF_SPACE

FORWARDED = "LAZYFORMER_SIGNALS_FORWARDED"  # the process that hands signals on to its children
WITH_FAIRSEQ = ("fairseq", "fairseq_cli", "hydra")  # come and go together
# Where a file, its folder or its disk is not what a command needs, and only the user can change that.
OF_THE_FILE_SYSTEM = (
    errno.EACCES,
    errno.EPERM,
    errno.EROFS,
    errno.EISDIR,
    errno.ENOTDIR,
    errno.EEXIST,
    errno.ENOTEMPTY,
    errno.ELOOP,
    errno.ENAMETOOLONG,
    errno.EIO,
    errno.ESTALE,
)
USER_ERROR = "the user has to mend something"


def printing_user_errors(excepthook: Callable) -> Callable:
    """Return an ``excepthook`` that prints a user's mistake and Ctrl-C as one line, and silence others' warnings.

    fairseq wraps some errors in its own, so the whole chain is searched. Others go to the hook that was there.
    hydra would print a traceback of its own, but with HYDRA_FULL_ERROR it leaves errors alone.
    """
    os.environ.setdefault("HYDRA_FULL_ERROR", "1")
    # hydra and torch are called in ways that they deprecate: each run would start with a page of warnings.
    for module in (r"hydra\.", r"fairseq\.", r"torch\.utils\.data\.dataloader"):
        for category in (UserWarning, FutureWarning):
            warnings.filterwarnings("ignore", category=category, module=module)
    warnings.filterwarnings("ignore", message=r"\n'config' is validated against ConfigStore schema")

    def hook(error_type, error, traceback):
        user_error = find_user_error(error)
        if user_error is None and not issubclass(error_type, KeyboardInterrupt):
            excepthook(error_type, error, traceback)
            return
        message = "interrupted; the same command, run again, resumes from what was saved, if anything was"
        if user_error is not None:
            message = f"error: {user_error}"
            note_user_error()
        sys.stdout.flush()
        print(message, file=sys.stderr)

    return hook


def find_user_error(error: Optional[BaseException]) -> Optional[UserError]:
    """Return the UserError that led to `error`, itself included, or None; make one for a full disk, or no fairseq.

    A file that the system does not let this process open, or write, or rename makes one where `error` itself says so.
    """
    if isinstance(error, OSError) and error.errno in OF_THE_FILE_SYSTEM and error.filename is not None:
        name = error.filename2 or error.filename  # of a rename, the name that is visible
        where = os.fsdecode(name) if isinstance(name, (str, bytes)) else name
        return UserError(
            f"{where}: {error.strerror}; see what stands there and who may write to it, and run the same command again"
        )
    spawn = sys.modules.get("torch.multiprocessing.spawn")
    while error is not None and not isinstance(error, UserError):
        if isinstance(error, ModuleNotFoundError) and error.name in WITH_FAIRSEQ:
            return UserError(lack_of_fairseq("this"))
        if type(error).__module__ == "hydra.errors":
            return _user_error_of_hydra(error)
        if isinstance(error, OSError) and error.errno in OUT_OF_SPACE:
            where = error.filename or "a file"
            return UserError(f"{where}: cannot be written ({error.strerror}); make room and run the same command again")
        if spawn and isinstance(error, spawn.ProcessRaisedException):
            return _user_error_in_text(str(error))
        error = error.__cause__ or error.__context__
    return error


def _user_error_of_hydra(error: BaseException) -> UserError:
    """Return hydra's error about a setting, with the nearest names of settings beside it."""
    first_line = str(error).partition("\n")[0].removesuffix(".")
    cause = error.__cause__
    known = getattr(cause, "parent_node", None) or ()
    return UserError(first_line + nearest(str(getattr(cause, "key", "")), map(str, known)))


def _user_error_in_text(traceback: str) -> Optional[UserError]:
    """Read a UserError in a traceback's text: all that comes from the processes that fairseq starts for its GPUs."""
    package = UserError.__module__.partition(".")[0]  # of a UserError and those derived from it
    *_, last = [None, *re.finditer(rf"^{package}(\.\w+)+Error: ", traceback, re.MULTILINE)]
    if last:
        return UserError(traceback[last.end() :].partition("\n\n")[0].rstrip())
    return None


def note_user_error() -> None:
    """Write the file that torchrun looks into when a process of its has failed: another try is useless."""
    if path := os.environ.get("TORCHELASTIC_ERROR_FILE"):
        Path(path).write_text(json.dumps({"message": USER_ERROR}))
