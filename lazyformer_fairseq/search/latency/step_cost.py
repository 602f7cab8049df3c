"""An update of the supernet against one of the baseline: it costs less than twice (PAR Transformer, section 2.1)."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from fairseq import utils
from tabulate import tabulate

from lazyformer_fairseq.costs.latency import Timing, measure
from lazyformer_fairseq.costs.machine import describe_machine, describe_versions
from lazyformer_fairseq.files.json_files import write_json
from lazyformer_fairseq.patterns.grammar import PlannedSublayer
from lazyformer_fairseq.patterns.kinds import kinds
from lazyformer_fairseq.search.settings import SearchSettings
from lazyformer_fairseq.search.supernet.choices import candidate_name
from lazyformer_fairseq.search.supernet.data_parts import Part
from lazyformer_fairseq.search.supernet.fairseq_model import FairseqSearch
from lazyformer_fairseq.search.supernet.training import SupernetTraining, update_weights, weights_optimizer

ROUNDS = 20
# All kinds, without settings, and those that read nothing from others.
CANDIDATES = tuple(candidate_name(PlannedSublayer(kind)) for kind in kinds())
WITHOUT_READERS = tuple(candidate_name(PlannedSublayer(kind)) for kind in kinds() if not kind.reads)


def time_updates(settings: SearchSettings, path: Path, rounds: int = ROUNDS) -> str:
    """Times updates on the training data: the baseline's, and the supernet's of both kinds, without and with ``l``.

    Writes `path`/update_cost.json with all samples, and returns a table.
    """
    fairseq = FairseqSearch(settings)
    things = {"baseline": _baseline_update(fairseq)}
    for candidates in (WITHOUT_READERS, CANDIDATES):
        name = ", ".join(candidates)
        for kind in ("weights", "architecture"):
            things[f"{name}: {kind}"] = _supernet_update(fairseq, candidates, kind == "architecture")
    timings = measure(things, rounds, device=settings.device, description="updates")
    path.mkdir(parents=True, exist_ok=True)
    write_json(
        path / "update_cost.json",
        {
            "settings": settings.as_json(),
            "machine": describe_machine(settings.device),
            "versions": describe_versions(),
            "seconds": {name: list(timing.samples) for name, timing in timings.items()},
        },
    )
    return _table(timings, settings.architecture_share)


def _batches(fairseq: FairseqSearch, part: Part) -> Callable[[], dict[str, Any]]:
    """Returns the next batch of a part at each call, endlessly, on the search's device."""

    def endless():
        while True:
            for batch in part.batches(1, 0):
                yield utils.apply_to_sample(lambda tensor: tensor.to(fairseq.settings.device), batch)

    return endless().__next__


def _baseline_update(fairseq: FairseqSearch) -> Callable[[], object]:
    model, _ = fairseq.build_model(fairseq.settings.baseline)
    optimizer = weights_optimizer(model.train(), fairseq.settings)
    batch = _batches(fairseq, fairseq.parts()[0])
    return lambda: update_weights(model, optimizer, batch(), fairseq.loss_of, fairseq.settings.clip_norm)


def _supernet_update(fairseq: FairseqSearch, candidates: tuple[str, ...], architecture: bool) -> Callable[[], object]:
    training = SupernetTraining(fairseq.build_supernet(candidates), fairseq.settings, fairseq.loss_of)
    batch = _batches(fairseq, fairseq.parts()[0])
    return lambda: training.update(batch(), architecture)


def _table(timings: dict[str, Timing], architecture_share: float) -> str:
    baseline = timings["baseline"].median
    rows = [
        [name, *(f"{1000 * value:.1f}" for value in (timing.median, *timing.quartiles)), timing.median / baseline]
        for name, timing in timings.items()
    ]
    for name in (", ".join(WITHOUT_READERS), ", ".join(CANDIDATES)):
        weights, architecture = (timings[f"{name}: {kind}"].median for kind in ("weights", "architecture"))
        mean = (1 - architecture_share) * weights + architecture_share * architecture
        rows.append([f"{name}: mean of an epoch with both", f"{1000 * mean:.1f}", "", "", mean / baseline])
    headers = ("update", "median, ms", "lower quartile", "upper quartile", "x baseline")
    return tabulate(rows, headers, tablefmt="github", floatfmt=".2f", disable_numparse=[1, 2, 3])
