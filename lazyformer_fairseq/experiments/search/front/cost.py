"""What a search costs, in updates of the baseline: counted by FLOPs, and measured."""

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

from lazyformer_fairseq.experiments.search.price import REST, Prices
from lazyformer_fairseq.experiments.search.space import Path, Space
from lazyformer_fairseq.experiments.search.supernet.fairseq_model import FairseqSearch
from lazyformer_fairseq.measure.costs.flops import count_flops, count_sublayer_flops
from lazyformer_fairseq.measure.costs.latency import wait_for
from lazyformer_fairseq.patterns.grammar import read_sublayer, split_sublayers

FORWARD = 1 / 3  # of an update: its backward pass costs twice the forward pass
ARCHITECTURE = 2 / 3  # no gradient of weights


@dataclass
class Cost:
    """What was spent.

    Attributes:
        weights_updates, architecture_updates, evaluations: how many; an evaluation is of one pattern.
        counted: updates of the baseline, by FLOPs.
        seconds: of updates and evaluations; on a processor, of its cores together.
    """

    weights_updates: int = 0
    architecture_updates: int = 0
    evaluations: int = 0
    counted: float = 0.0
    seconds: float = 0.0

    @contextmanager
    def timed(self, device: str) -> Iterator[None]:
        clock = clock_of(device)
        began = clock()
        yield
        self.seconds += clock() - began

    def __add__(self, other: "Cost") -> "Cost":
        return Cost(**{name: value + getattr(other, name) for name, value in asdict(self).items()})


def clock_of(device: str) -> Callable[[], float]:
    """Seconds: a processor's own, which others on the machine do not lengthen; of a GPU those that pass."""
    if device == "cpu":
        return time.process_time

    def passed() -> float:
        wait_for(device)
        return time.perf_counter()

    return passed


class Counting:
    """FLOPs of a search's forward passes, in forward passes of the baseline."""

    def __init__(self, fairseq: FairseqSearch):
        settings = fairseq.settings
        _, network = fairseq.build_model(settings.baseline)
        sizes, time_and_memory = network.sizes, fairseq.training_lengths
        predicted = fairseq.predicted_share * time_and_memory[0]
        self.baseline = count_flops(settings.baseline, sizes, *time_and_memory, predicted=round(predicted))
        names = {*settings.candidates, *split_sublayers(settings.baseline)}
        each = {name: count_sublayer_flops(read_sublayer(name), sizes, *time_and_memory) for name in names}
        of_baseline = sum(each[name] for name in split_sublayers(settings.baseline))
        flops: Prices = {read_sublayer(name).text: float(count) for name, count in each.items()}
        self.space = Space(settings.candidates, settings.layers, {**flops, REST: float(self.baseline - of_baseline)})
        self.mixture = self._of_mixture(flops)

    def path(self, path: Path) -> float:
        return self.space.latency(path) / self.baseline

    def _of_mixture(self, flops: Mapping[str, float]) -> float:
        """All candidates of all layers."""
        of_layer = sum(flops[read_sublayer(name).text] for name in self.space.candidates)
        return (self.space.prices[REST] + self.space.layers * of_layer) / self.baseline


def as_json(cost: Cost, baseline_seconds: float) -> dict[str, Any]:
    """With `measured`: seconds in updates of the baseline."""
    return {**asdict(cost), "measured": cost.seconds / baseline_seconds}
