"""This machine's processor, by Linux: torch takes seconds to import."""

from pathlib import Path

CPUINFO = Path("/proc/cpuinfo")
WITH_BF16 = frozenset({"avx512_bf16", "amx_bf16"})  # instructions that multiply bf16; others emulate it, slowly


def first_core() -> dict[str, str]:
    """Return Linux's own description; empty elsewhere."""
    try:
        first, _, _others = CPUINFO.read_text().partition("\n\n")
    except OSError:
        return {}
    lines = (line.partition(":") for line in first.splitlines())
    return {field.strip(): value.strip() for field, _, value in lines}


def has_bf16() -> bool:
    """Return whether the processor multiplies in bf16."""
    return not WITH_BF16.isdisjoint(first_core().get("flags", "").split())
