"""What the operating system says of the processor."""

import functools
import platform
from pathlib import Path

CPUINFO = Path("/proc/cpuinfo")


@functools.cache
def processor_name() -> str:
    """As it is sold, where there is Linux to ask; elsewhere the family."""
    return _first("model name") or platform.processor() or platform.machine()


@functools.cache
def is_amd() -> bool:
    """Whether AMD made it."""
    return "AuthenticAMD" in (_first("vendor_id") or platform.processor())


def _first(field: str) -> str:
    """The value of the first line of `field` in Linux's own description; "" where there is none."""
    try:
        lines = CPUINFO.read_text().splitlines()
    except OSError:
        return ""
    return next((line.partition(":")[2].strip() for line in lines if line.partition(":")[0].strip() == field), "")
