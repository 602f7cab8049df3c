"""Latency on this machine: things take turns, round after round, so that whatever slows one slows all."""

import random
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Optional

import numpy as np
import torch
from tqdm import tqdm

from lazyformer_fairseq.report.numbers import spread

WARM_UP = 3


@dataclass(frozen=True)
class Timing:
    """What one thing took."""

    samples: tuple[float, ...]  # seconds, one per round, in order

    @property
    def median(self) -> float:
        return float(np.median(self.samples))

    def as_json(self) -> dict[str, Any]:
        return {**spread(self.samples), "samples": list(self.samples)}


def measure(
    things: Mapping[str, Callable[[], object]],
    rounds: int = 30,
    warm_up: int = WARM_UP,
    device: torch.device | str = "cpu",
    seed: int = 1,
    description: str = "latency",
    seconds: Optional[float] = None,
) -> dict[str, Timing]:
    """Calls every thing once per round, in a new random order each round, and times each call.

    Args:
        things: what to call, by name. The caller decides whether gradients are on.
        rounds: samples per thing.
        warm_up: rounds before these, discarded.
        device: a GPU is waited for before and after each call.
        seed: of the orders.
        description: of the progress bar.
        seconds: begin no round after this; at least one kept round always runs. None for no limit.
    """
    begin = time.perf_counter()
    chance, samples = random.Random(seed), {name: [] for name in things}
    for turn in tqdm(range(warm_up + rounds), desc=description, unit=" rounds", leave=False):
        if seconds is not None and turn > warm_up and time.perf_counter() - begin > seconds:
            break
        for name in chance.sample(list(things), len(things)):
            wait_for(device)
            start = time.perf_counter()
            things[name]()
            wait_for(device)
            if turn >= warm_up:
                samples[name].append(time.perf_counter() - start)
    return {name: Timing(tuple(taken)) for name, taken in samples.items()}


def wait_for(device: torch.device | str) -> None:
    """Waits until a GPU has finished its work; returns at once on a CPU."""
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize(device)
