"""A run that is asked to end saves first, and tells its launcher why it ended."""

import json
import os
import signal

EXIT_CODE = 75  # EX_TEMPFAIL of sysexits.h: try again later
INTERRUPTED = 128 + signal.SIGINT  # 130, as shells have it for a process that Ctrl-C ended
SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
FORWARDED = "LAZYFORMER_SIGNALS_FORWARDED"  # the process that hands signals on to its children
USER_ERROR = "the user has to mend something"


def note_user_error() -> None:
    """Writes the file that torchrun looks into when a process of its has failed: another try is useless."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if path:
        with open(path, "w") as file:
            json.dump({"message": USER_ERROR}, file)
