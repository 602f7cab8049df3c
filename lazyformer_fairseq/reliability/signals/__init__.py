"""A run that is asked to end saves first."""

import signal

EXIT_CODE = 75  # EX_TEMPFAIL of sysexits.h: try again later
SIGNALS = (signal.SIGTERM, signal.SIGUSR1)
