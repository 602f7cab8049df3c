"""Reads Linux's description of this machine's CPU, without importing torch, which would take seconds."""

from pathlib import Path

CPUINFO = Path("/proc/cpuinfo")
WITH_BF16 = frozenset({"avx512_bf16", "amx_bf16"})  # instructions for bf16 matmuls; other CPUs emulate them slowly


def first_core() -> dict[str, str]:
    """Return the fields of Linux's description of the first core, or an empty dictionary on other systems."""
    try:
        first, _, _others = CPUINFO.read_text().partition("\n\n")
    except OSError:
        return {}
    lines = (line.partition(":") for line in first.splitlines())
    return {field.strip(): value.strip() for field, _, value in lines}


def has_bf16() -> bool:
    """Return whether the CPU has instructions for bf16 matmuls."""
    return not WITH_BF16.isdisjoint(first_core().get("flags", "").split())
