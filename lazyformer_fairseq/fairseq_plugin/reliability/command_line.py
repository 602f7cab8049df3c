"""Prints errors and warnings on the command line. This module imports neither fairseq nor torch."""

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
from lazyformer_fairseq.extras import missing_fairseq_message
from lazyformer_fairseq.storage.atomic import OUT_OF_SPACE

FORWARDED = "LAZYFORMER_SIGNALS_FORWARDED"  # environment variable: ID of the process that forwards signals to children
WITH_FAIRSEQ = ("fairseq", "fairseq_cli", "hydra")  # modules that are installed together with fairseq
# Errors about a file, its folder or its disk that only the user can fix.
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
USER_ERROR = "the user must fix a setting or file"


def printing_user_errors(excepthook: Callable) -> Callable:
    """Return an ``excepthook`` that prints a UserError or Ctrl-C as one line, and silence other libraries' warnings.

    fairseq wraps some errors in its own errors, so the hook searches the whole chain of causes. All other errors go to
    the previous hook. HYDRA_FULL_ERROR makes hydra propagate errors instead of printing its own traceback.

    Args:
        excepthook: the previous hook.
    """
    os.environ.setdefault("HYDRA_FULL_ERROR", "1")
    # fairseq uses deprecated hydra and torch APIs, so each run would start with a page of warnings.
    for module in (r"hydra\.", r"fairseq\.", r"torch\.utils\.data\.dataloader"):
        for category in (UserWarning, FutureWarning):
            warnings.filterwarnings("ignore", category=category, module=module)
    warnings.filterwarnings("ignore", message=r"\n'config' is validated against ConfigStore schema")

    def hook(error_type, error, traceback):
        user_error = find_user_error(error)
        if user_error is None and not issubclass(error_type, KeyboardInterrupt):
            excepthook(error_type, error, traceback)
            return
        message = "interrupted; run the same command again to resume from the last saved state, if any"
        if user_error is not None:
            message = f"error: {user_error}"
            note_user_error()
        sys.stdout.flush()
        print(message, file=sys.stderr)

    return hook


def find_user_error(error: Optional[BaseException]) -> Optional[UserError]:
    """Find the UserError in an error's chain of causes, or create one for other errors that only the user can fix.

    A UserError is created for a full disk, a missing fairseq installation, a hydra error about a setting, and, if it is
    `error` itself, for a file that this process cannot open, write or rename.

    Args:
        error: the error, which may itself be a UserError.

    Returns:
        The UserError; None if the user cannot fix the error.
    """
    if isinstance(error, OSError) and error.errno in OF_THE_FILE_SYSTEM and error.filename is not None:
        name = error.filename2 or error.filename  # for a failed rename, the target, because the source is temporary
        where = os.fsdecode(name) if isinstance(name, (str, bytes)) else name
        return UserError(
            f"{where}: {error.strerror}; check that the path exists and is writable, and run the same command again"
        )
    spawn = sys.modules.get("torch.multiprocessing.spawn")
    while error is not None and not isinstance(error, UserError):
        if isinstance(error, ModuleNotFoundError) and error.name in WITH_FAIRSEQ:
            return UserError(missing_fairseq_message("this"))
        if type(error).__module__ == "hydra.errors":
            return _user_error_of_hydra(error)
        if isinstance(error, OSError) and error.errno in OUT_OF_SPACE:
            where = error.filename or "a file"
            return UserError(
                f"{where}: cannot be written ({error.strerror}); free up disk space and run the same command again"
            )
        if spawn and isinstance(error, spawn.ProcessRaisedException):
            return _user_error_in_text(str(error))
        error = error.__cause__ or error.__context__
    return error


def _user_error_of_hydra(error: BaseException) -> UserError:
    """Convert hydra's error about a setting to a UserError that suggests the most similar setting names."""
    first_line = str(error).partition("\n")[0].removesuffix(".")
    cause = error.__cause__
    known = getattr(cause, "parent_node", None) or ()
    key = str(getattr(cause, "key", ""))
    return UserError(first_line + nearest(key, map(str, known)))


def _user_error_in_text(traceback: str) -> Optional[UserError]:
    """Extract a UserError from a traceback's text, which is all that a child process reports."""
    package = UserError.__module__.partition(".")[0]  # subclasses of UserError are also defined in the package
    *_, last = [None, *re.finditer(rf"^{package}(\.\w+)+Error: ", traceback, re.MULTILINE)]
    if last:
        return UserError(traceback[last.end() :].partition("\n\n")[0].rstrip())
    return None


def note_user_error() -> None:
    """Record a user error in the file that torchrun reads after a process fails, which prevents a restart."""
    if path := os.environ.get("TORCHELASTIC_ERROR_FILE"):
        Path(path).write_text(json.dumps({"message": USER_ERROR}))
