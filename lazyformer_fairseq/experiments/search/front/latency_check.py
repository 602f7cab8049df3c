"""Predicted latency beside measured: of a front's patterns, and of patterns spread over the whole space."""

import random
from collections.abc import Mapping, Sequence
from typing import Any, Optional

from scipy.stats import kendalltau, spearmanr

from lazyformer_fairseq.experiments.search.measure import measure_models
from lazyformer_fairseq.experiments.search.price import Prices, latency_of
from lazyformer_fairseq.experiments.search.report.found_pattern import letters
from lazyformer_fairseq.experiments.search.space import Path, Space
from lazyformer_fairseq.experiments.search.supernet.fairseq_model import FairseqSearch

ROUNDS = 20
DRAWN = 40  # random patterns for each one that is taken


def spread_patterns(space: Space, count: int, seed: int) -> list[Path]:
    """Random patterns, evenly spaced in rank from the cheapest to the most expensive of many; each once."""
    chance = random.Random(seed)
    drawn = sorted({space.draw(chance) for _ in range(DRAWN * count)}, key=lambda path: (space.latency(path), path))
    if len(drawn) <= count or count < 2:
        return drawn[:count]
    return [drawn[round(number * (len(drawn) - 1) / (count - 1))] for number in range(count)]


def measure_latencies(fairseq: FairseqSearch, prices: Prices, patterns: Sequence[str]) -> dict[str, dict[str, Any]]:
    """By pattern `predicted` ms and `measured`: median and quartiles in ms of a forward pass at batch 1, in turn."""
    timings = measure_models(fairseq, {pattern: pattern for pattern in patterns}, ROUNDS)
    found = {}
    for pattern, timing in timings.items():
        spread = {name: 1000 * value for name, value in timing.as_json().items() if name in ("median", "low", "high")}
        found[pattern] = {"predicted": latency_of(prices, pattern), "measured": {"n": ROUNDS, **spread}}
    return found


def rank_correlations(one: Sequence[float], other: Sequence[float]) -> Optional[dict[str, float]]:
    """Spearman's rho and Kendall's tau; None where there is nothing to rank."""
    if len(one) < 3 or len(set(one)) == 1 or len(set(other)) == 1:
        return None
    return {
        "n": len(one),
        "spearman": float(spearmanr(one, other).statistic),
        "kendall": float(kendalltau(one, other).statistic),
    }


def correlation_of(latencies: Mapping[str, Mapping[str, Any]], paths: Sequence[Path]) -> Optional[dict[str, float]]:
    """Of these patterns, predicted with measured."""
    rows = [latencies[letters(path)] for path in paths]
    return rank_correlations([row["predicted"] for row in rows], [row["measured"]["median"] for row in rows])
