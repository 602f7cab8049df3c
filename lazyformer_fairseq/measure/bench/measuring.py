"""The one loop of `lazyformer bench`: under one condition after the other all things take turns, round after round."""

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple, Optional, TypeVar

import torch
from tqdm import tqdm

from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.measure.costs.latency import Timing, measure
from lazyformer_fairseq.measure.costs.peak_memory import peak_memory

logger = logging.getLogger(__name__)

Condition = TypeVar("Condition")
Things = Mapping[str, Callable[[], object]]


class Tried(NamedTuple):
    """Things that run here, the highest bytes that a call of each needs, and why others are left out, by name."""

    things: dict[str, Callable[[], object]]
    memory: dict[str, int]
    left_out: dict[str, str]


def try_out(things: Things, device: str) -> Tried:
    """Calls each thing, which also warms up: here torch and Triton compile and tune kernels."""
    found = Tried({}, {}, {})
    for name, call in tqdm(things.items(), desc="trying out", leave=False):
        try:
            call()
            found.memory[name] = peak_memory(call, device)
        except Exception as error:  # a kernel may fail in any way on a GPU that is new to it: the others' figures stay
            found.left_out[name] = in_a_line(error)
        else:
            found.things[name] = call
    return found


def in_a_line(error: Exception) -> str:
    """The error's first line, and its kind unless it is the user's mistake."""
    if isinstance(error, torch.OutOfMemoryError):
        return "does not fit into memory"
    first = next(iter(str(error).splitlines()), "")
    return first if isinstance(error, UserError) else f"{type(error).__name__}: {first}"


def measured(
    conditions: Sequence[Condition],
    things_of: Callable[[Condition], Things],
    device: str,
    rounds: int,
    budget: Optional[float] = None,
) -> Iterator[tuple[Condition, dict[str, Timing]]]:
    """Measures under all conditions, one after the other; what is left of the budget, they share.

    Ctrl-C, SIGTERM and an error of a GPU end it early, but not before the first condition is measured.

    Args:
        conditions: named in progress by their ``str``.
        things_of: what takes turns under a condition.
        rounds: samples of each thing.
        budget: seconds; one round of each thing always runs. None for no limit.
    """
    began, done = time.perf_counter(), 0
    try:
        for condition in tqdm(conditions, desc="bench"):
            left = None if budget is None else max(0.0, budget - (time.perf_counter() - began))
            seconds = None if left is None else left / (len(conditions) - done)
            things = things_of(condition)
            timings = measure(things, rounds, 1, device, description=str(condition), seconds=seconds)
            del things  # with what they hold of a GPU's memory
            yield condition, timings
            done += 1
    except (KeyboardInterrupt, RuntimeError) as reason:
        if not done:
            raise
        if isinstance(reason, RuntimeError):
            logger.error("the benchmark ends here: %s", in_a_line(reason))
