"""What fits a GPU: back ends, the largest batch, and how an update is shared."""

from dataclasses import dataclass
from typing import NamedTuple

from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.measure.costs.memory import UpdateMemory
from lazyformer_fairseq.measure.planning.job import Job
from lazyformer_fairseq.modules.attention import BACK_ENDS, fallback_backend
from lazyformer_fairseq.modules.attention.block_back_ends import NOT_IN_TRITON
from lazyformer_fairseq.modules.attention.choice import AUTO, BACKENDS, SHARE_OF_MEMORY
from lazyformer_fairseq.modules.memory_costs import NUMBER
from lazyformer_fairseq.modules.sublayers.attention_variant import variant_classes
from lazyformer_fairseq.patterns.grammar import PlannedSublayer, plan

# Of a GPU's memory, what we plan for. The rest is for CUDA's context, cuBLAS, and gaps between tensors.
USABLE = 0.9


@dataclass(frozen=True)
class Place:
    """Where it trains.

    Attributes:
        processes: one a GPU.
        memory: bytes of a GPU.
        precision: fp32, fp16 or bf16.
        device: cuda or cpu.
    """

    processes: int
    memory: int
    precision: str
    device: str = "cuda"


class Fit(NamedTuple):
    """A batch on a back end.

    Attributes:
        batch: sequences that a process takes at once; 0 where not even one fits.
        update_freq: batches of a process in an update.
        memory: of a process; of one sequence where none fits.
    """

    back_end: str
    batch: int
    update_freq: int
    memory: UpdateMemory


def fit(job: Job, place: Place, back_end: str = AUTO) -> Fit:
    """The largest batch that fits and divides a process's share of an update.

    Raises:
        UserError: an update does not divide among the processes, or the back end cannot compute this.
    """
    if job.per_update % place.processes:
        raise UserError(
            f"an update of {job.per_update} sequences does not divide among {place.processes} GPUs; give another "
            "number of either"
        )
    share = job.per_update // place.processes
    if back_end not in (AUTO, *possible_back_ends(job, place.device)):
        raise UserError(f"--attention-backend {back_end}: cannot compute {job.pattern} on {place.device}")
    for batch in (size for size in range(share, 0, -1) if share % size == 0):
        found = count_on(job, place, back_end, batch, share)
        if found.peak <= USABLE * place.memory:
            return Fit(back_end, batch, share // batch, found)
    return Fit(back_end, 0, share, found)


def count_on(job: Job, place: Place, back_end: str, batch: int, share: int) -> UpdateMemory:
    """Memory of a process; ``auto`` counts as the hungriest back end that it may take there."""
    names = _auto_may_take(job, place, batch) if back_end == AUTO else [back_end]
    how = {"accumulates": batch < share, "processes": place.processes}
    counts = [job.count_memory(batch, place.precision, place.device, name, **how) for name in names]
    return max(counts, key=lambda count: count.peak)


def possible_back_ends(job: Job, device: str) -> list[str]:
    """Those that compute all attention of the job; ``tiles`` where there is a mask. None of them if nothing attends.

    On a GPU ``fused`` is Triton's, and ``flex`` is for GPUs alone; which of them runs on a given GPU is not asked here.
    """
    makers = _makers(job)
    return [name for name in BACKENDS if makers and all(_computes(name, job, maker, device) for maker in makers)]


def _makers(job: Job) -> list[PlannedSublayer]:
    return [planned for planned in plan(job.pattern, job.sizes.direction) if planned.kind.computes_scores]


def _computes(name: str, job: Job, maker: PlannedSublayer, device: str) -> bool:
    features = job.features
    for choice in variant_classes(maker.shaper.values):
        features |= choice.features(maker.shaper.values)
    if name == "tiles" and "mask" not in features:
        return False
    if name == "fused" and device == "cuda" and features & NOT_IN_TRITON:
        return False
    if name == "flex" and device != "cuda":
        return False
    can = fallback_backend(name, job.config.attention_dropout > 0, features) == name
    return can and name in (maker.kind.back_ends or BACKENDS)


def _auto_may_take(job: Job, place: Place, batch: int) -> list[str]:
    possible = possible_back_ends(job, place.device)
    number, keys = NUMBER[place.precision], job.memory_length + job.time
    distributions = batch * job.sizes.num_heads * job.time * keys * number * len(_makers(job))
    small = [
        name
        for name in possible
        if not BACK_ENDS[name].keeps_distribution or distributions <= SHARE_OF_MEMORY * place.memory
    ]
    return small or ["eager"]


class Batch(NamedTuple):
    """What a process takes at once, and in words why."""

    size: int
    why: str


def batch_that_fits(job: Job, place: Place) -> Batch:
    """The largest one that does; 1, and a warning, where none does.

    Raises:
        UserError: as :func:`fit` does.
    """
    found = fit(job, place, job.attention_backend)
    gigabytes = f"{found.memory.peak / 1e9:.1f} GB of a GPU's {place.memory / 1e9:.1f} GB, by formula"
    if not found.batch:
        return Batch(1, f"even one at a time may not fit: it takes {gigabytes}; see lazyformer plan")
    return Batch(found.batch, f"{found.batch} at a time take {gigabytes}; --no-fit or --batch-size N for another")
