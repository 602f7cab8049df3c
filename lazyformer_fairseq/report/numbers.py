"""Formats numbers for reports, with few digits and, for repeated measurements, with their spread."""

from collections.abc import Mapping, Sequence
from typing import Optional

import numpy as np

NOTHING = "-"  # a cell without a value
FEWEST_FOR_QUARTILES = 3
WIDE = 0.1  # fraction of the median; if the quartiles of times are farther apart, the machine is noisy
CONFIDENCE = 0.95


def number(value: float) -> str:
    """Format a number with at least three significant digits: 0.0123, 4.56 or 7,890."""
    if abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:.3g}"


def spread(values: Sequence[float]) -> dict[str, float]:
    """Return the number `n` of values, their `median` and, if `n` is at least 3, the quartiles `low` and `high`."""
    found = {"n": len(values), "median": float(np.median(values))}
    if len(values) >= FEWEST_FOR_QUARTILES:
        found |= {
            "low": float(np.quantile(values, 0.25)),
            "high": float(np.quantile(values, 0.75)),
        }
    return found


def in_milliseconds(seconds: Sequence[float]) -> dict[str, float]:
    """Return the :func:`spread` of times, converted from seconds to milliseconds."""
    return spread([1000 * each for each in seconds])


def with_spread(of: Mapping[str, float], digits: int = 1) -> str:
    """Format a result of :func:`spread`.

    The median is followed in parentheses by the quartiles or, if there are none, by the number of values.
    """
    median = f"{of['median']:.{digits}f}"
    if "low" not in of:
        return f"{median} (n = {of['n']})"
    return f"{median} ({of['low']:.{digits}f} to {of['high']:.{digits}f})"


def noise_warning(timings: Mapping[str, Mapping[str, float]]) -> list[str]:
    """Return a list with a warning about a noisy machine if quartiles are far apart; otherwise, return an empty list.

    Args:
        timings: results of :func:`spread`, by the name of the timing.
    """
    widths = {}
    for name, of in timings.items():
        if "low" in of:
            widths[name] = (of["high"] - of["low"]) / of["median"]
    noisy = [name for name, width in widths.items() if width > WIDE]
    if not noisy:
        return []
    worst = max(noisy, key=lambda name: widths[name])
    return [
        f"The machine was noisy: for {len(noisy)} of {len(timings)} timings, the quartiles differ by more than "
        f"{WIDE:.0%} of the median (by {widths[worst]:.0%} for {worst}). Measure again with no other programs running."
    ]


def with_range(values: Sequence[float]) -> str:
    """Format values as their median, followed by the range in parentheses if there are several values."""
    middle = float(np.median(values))
    digits = 3
    if abs(middle) >= 100:
        digits = 1
    if len(values) < 2:
        return f"{middle:.{digits}f}"
    return f"{middle:.{digits}f} ({min(values):.{digits}f} to {max(values):.{digits}f})"


def mean_bounds(values: Sequence[float]) -> Optional[tuple[float, float]]:
    """Return the two-sided 95% t confidence interval for the mean over seeds, or None for fewer than two seeds."""
    if len(values) < 2:
        return None
    from scipy import stats  # the import takes a second

    middle = float(np.mean(values))
    error = float(stats.sem(values))
    if error == 0:
        return middle, middle  # scipy would return NaN
    degrees_of_freedom = len(values) - 1
    low, high = stats.t.interval(CONFIDENCE, degrees_of_freedom, loc=middle, scale=error)
    return float(low), float(high)


def duration(seconds: float) -> str:
    """Format a duration in a suitable unit: 31.4 s, 12 min, 2 h 05 min, 3.4 days or 57.1 years."""
    if seconds < 100:
        return f"{seconds:.3g} s"
    minutes = round(seconds / 60)
    days = seconds / (24 * 3600)
    if days < 2:
        if minutes < 100:
            return f"{minutes} min"
        return f"{minutes // 60} h {minutes % 60:02d} min"
    if days < 1000:
        return f"{days:.3g} days"
    return f"{days / 365.25:,.1f} years"
