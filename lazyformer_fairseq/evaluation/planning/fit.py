"""Fitting a run to a GPU: the possible back ends, the largest batch, and the plan as text and numbers."""

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from functools import cache, partial
from itertools import chain
from typing import Any, Optional

import torch

from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.evaluation.costs.flops import attention_calls
from lazyformer_fairseq.evaluation.costs.latency import measure, peak_matmul_flops, square_matmuls
from lazyformer_fairseq.evaluation.costs.machine import PRECISIONS
from lazyformer_fairseq.evaluation.costs.memory import SINGLE, UpdateMemory
from lazyformer_fairseq.evaluation.planning import ON_PROCESSOR, PAPER_TERAFLOPS
from lazyformer_fairseq.evaluation.planning.job import Job
from lazyformer_fairseq.modules.attention import BACK_ENDS, AttentionCall
from lazyformer_fairseq.modules.attention.masks import AttentionMask, Band
from lazyformer_fairseq.modules.attention.selection import AUTO, BACKENDS, MEMORY_FRACTION, memory_of
from lazyformer_fairseq.patterns.grammar import PlannedSublayer
from lazyformer_fairseq.patterns.grammar import plan as planned
from lazyformer_fairseq.report.tables import markdown_table

# The fraction of a GPU's memory to plan for. The rest is for CUDA's context, cuBLAS, and gaps between tensors.
USABLE = 0.9
GB = 1e9
TERA = 1e12
HOUR = 3600
BY_TRITON = ("fused", "flex")  # on a GPU; GPUs with bf16 meet Triton's requirements
# The back end that stores every distribution, and the one that stores none: a plan shows both.
KEEPING = "eager"
RECOMPUTING = "recompute"
# FlexAttention has no backward pass on CPU tensors. Like `recompute`, it stores no distribution.
MEASURED_AS = {"flex": RECOMPUTING}


@dataclass(frozen=True)
class Hardware:
    """The machine to train on.

    Attributes:
        processes: the number of processes, one per GPU.
        memory: the memory per process in bytes: its GPU's memory, or its part of this machine's memory.
        precision: fp32, fp16 or bf16.
        device: cuda or cpu.
    """

    processes: int
    memory: int
    precision: str
    device: str = "cuda"

    @classmethod
    def of_processor(cls, precision: str, processes: int = 1) -> "Hardware":
        """Describe this machine's CPU as hardware to train on, with the memory divided among the processes."""
        return cls(processes, memory_of("cpu") // processes, precision, "cpu")

    @property
    def unit(self) -> str:
        """The word for a process in messages: GPU or process."""
        if self.device == "cuda":
            return "GPU"
        return "process"

    def __str__(self) -> str:
        sizes = f"{self.processes} x {self.memory / GB:.1f} GB, {self.precision}"
        if self.device == "cuda":
            return sizes
        return f"this machine's CPU: {sizes}"


@dataclass(frozen=True)
class Fit:
    """The largest batch that fits, for one back end.

    Attributes:
        back_end: the attention back end.
        batch: the number of sequences per batch and process; 0 if not even one fits.
        update_freq: the number of batches per process and update.
        memory: a process's memory with this batch, or with one sequence if none fits.
        of_one: the size of one sequence's activations in bytes.
    """

    back_end: str
    batch: int
    update_freq: int
    memory: UpdateMemory
    of_one: int


def fit(job: Job, place: Hardware, back_end: str = AUTO) -> Fit:
    """Find the largest batch that fits in memory and evenly divides the process's part of an update.

    A first estimate comes from one sequence's activations. Starting there, neighboring batch sizes are measured until
    one fits and the next larger one does not. This takes two to four measurements of one or two seconds each.

    Raises:
        UserError: an update cannot be split equally among the processes, or the back end does not support the model.
    """
    if job.per_update % place.processes:
        raise UserError(
            f"an update of {job.per_update} sequences cannot be split equally among {place.processes} GPUs; change one "
            "of the numbers"
        )
    share = job.per_update // place.processes
    most = min(share, ON_PROCESSOR) if place.device == "cpu" else share
    possible = possible_back_ends(job, place.device)
    if possible and back_end not in (AUTO, *possible):
        raise UserError(f"--attention-backend {back_end} cannot compute {job.pattern} on {place.device}")

    limit = USABLE * place.memory
    measured = partial(measure_on, job, place, back_end, share)
    one = measured(1)
    if one.peak > limit:
        return Fit(back_end, 0, share, one, one.activations)
    sizes = [size for size in range(1, most + 1) if share % size == 0]
    chosen = bisect_right(sizes, 1 + (limit - one.peak) / one.activations) - 1
    while chosen + 1 < len(sizes) and measured(sizes[chosen + 1]).peak <= limit:
        chosen += 1
    while measured(sizes[chosen]).peak > limit:
        chosen -= 1
    batch = sizes[chosen]
    return Fit(back_end, batch, share // batch, measured(batch), one.activations)


def measure_on(job: Job, place: Hardware, back_end: str, share: int, batch: int) -> UpdateMemory:
    """Measure a process's memory. For ``auto``, return the maximum over the back ends that ``auto`` may select."""
    name = back_end
    if back_end == AUTO:
        number = PRECISIONS[place.precision].itemsize
        keys = job.memory_length + job.computed
        distributions = batch * job.sizes.num_heads * job.computed * keys * number * len(_makers(job))
        has_room = distributions <= MEMORY_FRACTION * place.memory
        possible = possible_back_ends(job, place.device)
        name = KEEPING
        if RECOMPUTING in possible and not has_room:
            name = RECOMPUTING
    return job.measure_memory(
        batch,
        place.precision,
        place.device,
        MEASURED_AS.get(name, name),
        accumulates=batch < share,
        processes=place.processes,
    )


def possible_back_ends(job: Job, device: str) -> list[str]:
    """Return the back ends that can compute all of a job's attention; empty if the model has no attention.

    If this machine has no GPU, a GPU that meets Triton's requirements is assumed.
    """
    added: dict[str, Any] = {"dropout": job.config.attention_dropout}
    if job.is_causal and job.config.same_length:
        bands = (Band(job.memory_length, 0),)
        added["mask"] = AttentionMask(((job.sizes.num_heads, bands),))
    if job.computed > job.time:  # permuted text has a bias per pair of tokens
        added["has_dense"] = True
    makers = _makers(job)
    found = (attention_calls(maker, job.sizes, job.computed, job.memory_length) for maker in makers)
    calls = [each._replace(**added) for each in chain.from_iterable(found)]
    return [name for name in BACKENDS if makers and computes_all(name, calls, device)]


def _makers(job: Job) -> list[PlannedSublayer]:
    return [each for each in planned(job.pattern, job.sizes.direction) if each.kind.computes_scores]


def computes_all(back_end: str, calls: Iterable[AttentionCall], device: str) -> bool:
    """Return True if a back end can compute all of these attention calls on a device type."""
    return all(BACK_ENDS[back_end].why_not(each, device, torch.float32) is None for each in calls)


def batch_that_fits(job: Job, place: Hardware) -> tuple[int, str]:
    """Return the largest batch that fits and a message about it; if none fits, return 1 and a warning.

    Raises:
        UserError: :func:`fit` fails.
    """
    found = fit(job, place, job.attention_backend)
    gigabytes = f"{found.memory.peak / GB:.1f} GB of a GPU's {place.memory / GB:.1f} GB"
    if not found.batch:
        return 1, f"even a batch of one may not fit, because it takes {gigabytes}; see lazyformer plan"
    return found.batch, f"a batch of {found.batch} takes {gigabytes}; for another size, use --no-fit or --batch-size N"


@dataclass(frozen=True)
class Plan:
    """The plan for a job on a machine.

    Attributes:
        job: the run.
        place: the machine.
        fits: the fits for a back end that stores distributions, for one that does not, and for the chosen back end.
        chosen: the fit for the back end that the run uses.
        teraflops: the training speed per GPU in TFLOP/s.
        speed_source: the source of the speed, in words; empty if the user specified it.
        data_bytes: the size of the data on disk in bytes; None if unknown.
    """

    job: Job
    place: Hardware
    fits: list[Fit]
    chosen: Fit
    teraflops: float
    speed_source: str
    data_bytes: Optional[int]

    @property
    def hours(self) -> float:
        """The run's total duration in hours."""
        return self.job.flops / (self.teraflops * TERA) / self.place.processes / HOUR

    @property
    def speed(self) -> str:
        """The speed in words, with its source."""
        return f"--teraflops {self.teraflops:.3g}{self.speed_source}"

    @property
    def checkpoint_bytes(self) -> int:
        """The size of an fp32 checkpoint: the weights, the moments, and the optimizer's copy of the weights, if any."""
        copies = 3 if self.place.precision == "fp32" else 4
        return SINGLE * (copies * self.job.parameters - self.job.single_moment_parameters)


def make_plan(
    job: Job,
    place: Hardware,
    back_end: str,
    teraflops: Optional[float] = None,
    data_bytes: Optional[int] = None,
) -> Plan:
    """Plan a job.

    Args:
        job: the run.
        place: the machine.
        back_end: the attention back end.
        teraflops: the training speed per GPU in TFLOP/s; None for :func:`default_speed`.
        data_bytes: the size of the data on disk in bytes; None if unknown.

    Raises:
        UserError: :func:`fit` fails.
    """
    possible = possible_back_ends(job, place.device) or [KEEPING]
    fits = {name: fit(job, place, name) for name in (KEEPING, RECOMPUTING) if name in possible}
    chosen = fits.get(back_end) or fit(job, place, back_end)
    if back_end != AUTO:
        fits[back_end] = chosen
    if teraflops:
        speed = teraflops
        speed_source = ""
    else:
        speed, speed_source = default_speed(place.device, place.precision)
    return Plan(job, place, list(fits.values()), chosen, speed, speed_source, data_bytes)


@cache
def default_speed(device: str, precision: str) -> tuple[float, str]:
    """Return a typical training speed in TFLOP/s, and its source in words; on a CPU, measuring it takes a second."""
    if device == "cuda":
        return PAPER_TERAFLOPS, ", like the paper's BERT on a V100"
    matmuls = square_matmuls("cpu", PRECISIONS[precision])
    products = measure(matmuls, rounds=3, warm_up=1, description="speed of this CPU")
    return peak_matmul_flops(products) / TERA, ", the matmul speed of this CPU; training is slower"


def as_text(plan: Plan) -> str:
    """Format a plan as tables and sentences."""
    job = plan.job
    place = plan.place
    held = plan.chosen.memory
    gradients = "gradients"
    if place.processes > 1:
        gradients = "gradients and their communication buffers"
    constant = {"weights": held.weights, gradients: held.gradients, "optimizer": held.optimizer}
    if held.carried:
        constant["stream memory"] = held.carried
    constant_rows = [{f"memory per {place.unit}": name, "GB": _gb(size)} for name, size in constant.items()]
    rows = [
        {
            "back end": found.back_end,
            "activations per sequence, GB": _gb(found.of_one),
            "largest batch": found.batch or "none",
            "total memory, GB": _gb(found.memory.peak) if found.batch else "-",
            "--update-freq": found.update_freq if found.batch else "-",
        }
        for found in plan.fits
    ]
    blocks = [
        f"{job.name}: {job.pattern}, {job.parameters / 1e6:,.1f} million parameters. {place}",
        markdown_table(constant_rows),
        markdown_table(rows),
        *_sentences(plan),
    ]
    return "\n\n".join(blocks)


def as_table(plans: Sequence[Plan]) -> str:
    """Format plans as a table with one row per plan."""
    rows = [
        {
            "arch": made.job.name,
            "parameters, million": f"{made.job.parameters / 1e6:,.1f}",
            "--batch-size": made.chosen.batch or "none",
            "--update-freq": made.chosen.update_freq if made.chosen.batch else "-",
            "memory, GB": _gb(made.chosen.memory.peak),
            "hours": f"{made.hours:,.0f}" if made.hours >= 10 else f"{made.hours:,.1f}",
            "checkpoint, GB": _gb(made.checkpoint_bytes),
        }
        for made in plans
    ]
    return f"{markdown_table(rows)}\n\n{plans[0].place}, {plans[0].speed}"


def _sentences(plan: Plan) -> list[str]:
    job = plan.job
    place = plan.place
    chosen = plan.chosen
    sequences = "segments" if job.is_causal else "sequences"
    if chosen.batch:
        back_end = chosen.back_end
        if back_end == AUTO:
            back_end = "the most memory-intensive back end that auto may select"
        units = f"{place.unit}s" if place.processes > 1 else place.unit
        update = (
            f"One update is {place.processes} {units} x {chosen.batch} {sequences} "
            f"(--batch-size) x --update-freq {chosen.update_freq} = {job.per_update} {sequences} of {job.time} "
            f"tokens, measured with {back_end}."
        )
    else:
        update = (
            f"THIS DOES NOT FIT: even single {sequences} take {chosen.memory.peak / GB:,.1f} GB, but only "
            f"{USABLE * place.memory / GB:,.1f} GB are usable. Choose {_remedies(plan, sequences)}."
        )

    training = (
        f"The run has {job.max_update:,} updates, {job.tokens / 1e9:,.1f} billion tokens and {job.flops:.2e} "
        f"FLOPs. It takes {_time(plan.hours)} at {plan.teraflops:,.3g} TFLOP/s per {place.unit} ({plan.speed})."
    )

    if plan.data_bytes is not None:
        data = f"{plan.data_bytes / GB:,.2f} GB of data"
    elif job.vocab_size <= 65_500:
        data = "2 bytes of data per token"
    else:
        data = "4 bytes of data per token"
    disk = (
        f"Disk space is needed for {job.checkpoints} checkpoints of {plan.checkpoint_bytes / GB:,.2f} GB each, "
        f"{job.checkpoints * plan.checkpoint_bytes / GB:,.1f} GB in total, and {data}."
    )

    gaps = "gaps between tensors"
    if place.device == "cuda":
        gaps = "CUDA and gaps between tensors"
    memory = f"Memory use was measured with fake tensors; {1 - USABLE:.0%} of the available memory is left for {gaps}."
    words = [update, training, disk, memory]
    if chosen.back_end in BY_TRITON and place.device == "cuda" and place.precision != "bf16":
        words.append(f"{chosen.back_end} requires compute capability 8.0, which a V100 or T4 does not have.")
    return words


def _remedies(plan: Plan, sequences: str) -> str:
    ways = []
    fitting = [found.back_end for found in plan.fits if found.batch]
    if fitting:
        ways.append(f"--attention-backend {' or '.join(fitting)}")
    ways.append(f"shorter {sequences}")
    if plan.place.precision == "fp32":
        ways.append("half precision")
    return f"{', '.join(ways)} or a larger GPU"


def as_json(plan: Plan) -> dict[str, Any]:
    """Convert a plan to JSON types: bytes, sequences, FLOPs and hours."""
    job = plan.job
    chosen = plan.chosen
    back_ends = {
        found.back_end: {"batch_size": found.batch, "update_freq": found.update_freq, **asdict(found.memory)}
        for found in plan.fits
    }
    return {
        "name": job.name,
        "pattern": job.pattern,
        "parameters": job.parameters,
        "gpus": plan.place.processes,
        "gpu_memory": plan.place.memory,
        "precision": plan.place.precision,
        "batch_size": chosen.batch,
        "update_freq": chosen.update_freq,
        "memory": asdict(chosen.memory),
        "back_ends": back_ends,
        "max_update": job.max_update,
        "tokens": job.tokens,
        "flops": job.flops,
        "flops_per_second": plan.teraflops * TERA,
        "hours": plan.hours,
        "checkpoint_bytes": plan.checkpoint_bytes,
        "checkpoints": job.checkpoints,
    }


def _time(hours: float) -> str:
    if hours < 8766:
        return f"{hours:,.1f} hours"
    return f"{hours:,.0f} hours, {hours / 8766:,.1f} years,"


def _gb(size: int) -> str:
    if size >= GB / 100:
        return f"{size / GB:,.2f}"
    return f"{size / GB:,.4f}"
