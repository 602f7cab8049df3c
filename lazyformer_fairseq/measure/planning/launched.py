"""The batch of a launch, by the memory of the GPUs there are."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple, Optional

from lazyformer_fairseq.arguments import options_by_name
from lazyformer_fairseq.measure.planning.fit import Place, fit
from lazyformer_fairseq.measure.planning.job import Job, job_of_arch, job_of_yaml, vocabulary_of, with_options


class Batch(NamedTuple):
    """What a process takes at once, and in words why."""

    size: int
    why: str


def job_of_launch(
    arch: Optional[str], config: Optional[Path], data: str, given: Sequence[str], per_update: Optional[int] = None
) -> Job:
    """What a launch trains.

    Args:
        arch: a named model, else `config` is a YAML file.
        given: options of fairseq-train, or of hydra, that the user gave.
        per_update: sequences of an update; None for the training's own.

    Raises:
        UserError: as :mod:`.job` does.
    """
    options = {name: value for name, value in options_by_name(given).items() if value}
    groups = {name: options[name] for name in ("recipe",) if name in options}
    job = job_of_arch(arch) if config is None else job_of_yaml(config, groups=groups)
    if per_update is not None:
        options["sequences_per_update"] = str(per_update)
    if vocab_size := vocabulary_of(data, job.is_causal):
        job = replace(job, vocab_size=vocab_size)
    return with_options(job, options)


def batch_that_fits(job: Job, place: Place) -> Batch:
    """The largest one that does; 1, and a warning, where none does.

    Raises:
        UserError: as :func:`.fit.fit` does.
    """
    found = fit(job, place, job.attention_backend)
    gigabytes = f"{found.memory.peak / 1e9:.1f} GB of a GPU's {place.memory / 1e9:.1f} GB, by formula"
    if not found.batch:
        return Batch(1, f"even one at a time may not fit: it takes {gigabytes}; see lazyformer plan")
    return Batch(found.batch, f"{found.batch} at a time take {gigabytes}; --no-fit or --batch-size N for another")
