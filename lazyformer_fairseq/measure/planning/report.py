"""A plan as text, and as numbers."""

from collections.abc import Sequence
from typing import Any, NamedTuple, Optional

from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.measure.planning import PAPER_TERAFLOPS
from lazyformer_fairseq.measure.planning.fit import USABLE, Fit, Place, count_on, fit, possible_back_ends
from lazyformer_fairseq.measure.planning.job import Job
from lazyformer_fairseq.modules.attention.choice import AUTO
from lazyformer_fairseq.modules.memory_costs import NUMBER, SINGLE
from lazyformer_fairseq.report.tables import markdown_table

GB, TERA, HOUR = 1e9, 1e12, 3600
BY_TRITON = ("fused", "flex")  # on a GPU; GPUs that have bf16 have what it needs


class Speed(NamedTuple):
    """FLOP/s that training reaches on a GPU, and in words where that comes from."""

    flops: float
    source: str


def given_speed(teraflops: float = PAPER_TERAFLOPS) -> Speed:
    """What --teraflops says."""
    whose = ", as the paper's BERT on a V100" if teraflops == PAPER_TERAFLOPS else ""
    return Speed(teraflops * TERA, f"--teraflops {teraflops:g}{whose}")


class Plan(NamedTuple):
    """A job on a place.

    Attributes:
        fits: of each back end, and of ``auto``.
        chosen: the one of the back end that the training names.
        one: bytes of activations of one sequence by back end.
    """

    job: Job
    place: Place
    fits: list[Fit]
    chosen: Fit
    one: dict[str, int]
    speed: Speed
    data_bytes: Optional[int]

    @property
    def hours(self) -> float:
        return self.job.flops / self.speed.flops / self.place.processes / HOUR

    @property
    def checkpoint_bytes(self) -> int:
        """Of one: weights, Adam's moments, below single precision the optimizer's weights too."""
        number = NUMBER[self.place.precision]
        return self.job.parameters * (number + SINGLE * (2 if number == SINGLE else 3))


def make_plan(job: Job, place: Place, back_end: str, speed: Speed, data_bytes: Optional[int] = None) -> Plan:
    """Raises UserErrors as :func:`.fit.fit` does."""
    names = possible_back_ends(job, place.device) or ["eager"]
    fits = [fit(job, place, name) for name in names]
    chosen = fit(job, place, back_end)
    one = {name: count_on(job, place, name, 1, 2).activations for name in names}
    return Plan(job, place, fits, chosen, one, speed, data_bytes)


def as_text(plan: Plan) -> str:
    """Tables and sentences that a newcomer can read."""
    job, place, held = plan.job, plan.place, plan.chosen.memory
    head = (
        f"{job.name}: {job.pattern}, {job.parameters / 1e6:,.1f} million parameters. "
        f"{place.processes} x {place.memory / GB:.1f} GB, {place.precision}"
    )
    more = [{"memory of each GPU": "memory of streams", "GB": _gb(held.carried)}] if held.carried else []
    constant = [
        {"memory of each GPU": "weights", "GB": _gb(held.weights)},
        {"memory of each GPU": "gradients" + " and what GPUs send" * (place.processes > 1), "GB": _gb(held.gradients)},
        {"memory of each GPU": "optimizer", "GB": _gb(held.optimizer)},
        *more,
    ]
    rows = [
        {
            "back end": found.back_end,
            "activations of a sequence, GB": _gb(plan.one[found.back_end]),
            "largest batch": found.batch or "none",
            "all memory then, GB": _gb(found.memory.peak) if found.batch else "-",
            "--update-freq": found.update_freq if found.batch else "-",
        }
        for found in plan.fits
    ]
    return "\n\n".join([head, markdown_table(constant), markdown_table(rows), *_sentences(plan)])


def as_table(plans: Sequence[Plan]) -> str:
    """A row for each."""
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
    place, speed = plans[0].place, plans[0].speed
    said = f"{place.processes} x {place.memory / GB:.1f} GB, {place.precision}, {speed.source}"
    return f"{markdown_table(rows)}\n\n{said}"


def _sentences(plan: Plan) -> list[str]:
    job, place, chosen = plan.job, plan.place, plan.chosen
    unit = "segments" if job.is_causal else "sequences"
    words = []
    if chosen.batch:
        how = "on the hungriest back end that auto may take" if chosen.back_end == AUTO else f"on {chosen.back_end}"
        words.append(
            f"An update: {place.processes} {'GPU' if place.processes == 1 else 'GPUs'} x {chosen.batch} {unit} "
            f"(--batch-size) x --update-freq {chosen.update_freq} = {job.per_update} {unit} of {job.time} "
            f"tokens, counted {how}."
        )
    else:
        words.append(
            f"THIS DOES NOT FIT: one of the {unit} takes {chosen.memory.peak / GB:,.1f} GB of the "
            f"{USABLE * place.memory / GB:,.1f} GB that we plan for. Choose {_remedies(plan, unit)}."
        )
    words.append(
        f"In all: {job.max_update:,} updates, {job.tokens / 1e9:,.1f} billion tokens, {job.flops:.2e} FLOPs: "
        f"{plan.hours:,.1f} hours at {plan.speed.flops / TERA:,.3g} TFLOP/s a GPU ({plan.speed.source})."
    )
    a_token = 2 if job.vocab_size <= 65_500 else 4
    data = f"{plan.data_bytes / GB:,.2f} GB of data" if plan.data_bytes is not None else f"{a_token} bytes a token"
    words.append(
        f"Disk: {job.checkpoints} checkpoints of {plan.checkpoint_bytes / GB:,.2f} GB, "
        f"{job.checkpoints * plan.checkpoint_bytes / GB:,.1f} GB; {data}."
    )
    rest = f"By formula; {1 - USABLE:.0%} of a GPU's memory stays free for CUDA and gaps between tensors."
    by_triton = [found.back_end for found in plan.fits if found.back_end in BY_TRITON]
    if by_triton and place.precision != "bf16":
        rest += f" {' and '.join(by_triton)} need compute capability 8.0, which a V100 or T4 lacks."
    if job.estimated:
        rest += f" The memory of {', '.join(job.estimated)} is an estimate, and may be off by more than a tenth."
    return [*words, rest]


def _remedies(plan: Plan, unit: str) -> str:
    fitting = [found.back_end for found in plan.fits if found.batch]
    ways = [f"--attention-backend {' or '.join(fitting)}"] if fitting else []
    ways += [f"shorter {unit}", *(["half precision"] if plan.place.precision == "fp32" else []), "a larger GPU"]
    return f"{', '.join(ways[:-1])} or {ways[-1]}"


def as_json(plan: Plan) -> dict[str, Any]:
    """Bytes, sequences, FLOPs and hours."""
    job, chosen = plan.job, plan.chosen
    return {
        "name": job.name,
        "pattern": job.pattern,
        "parameters": job.parameters,
        "gpus": plan.place.processes,
        "gpu_memory": plan.place.memory,
        "precision": plan.place.precision,
        "batch_size": chosen.batch,
        "update_freq": chosen.update_freq,
        "memory": chosen.memory._asdict(),
        "back_ends": {
            found.back_end: {"batch_size": found.batch, "update_freq": found.update_freq, **found.memory._asdict()}
            for found in plan.fits
        },
        "max_update": job.max_update,
        "tokens": job.tokens,
        "flops": job.flops,
        "flops_per_second": plan.speed.flops,
        "hours": plan.hours,
        "checkpoint_bytes": plan.checkpoint_bytes,
        "checkpoints": job.checkpoints,
        "is_estimate": bool(job.estimated),
    }


def _gb(size: int) -> str:
    return f"{size / GB:,.2f}" if size >= GB / 100 else f"{size / GB:,.4f}"


def read_size(text: str) -> int:
    """Bytes of ``16GB`` or ``16GiB``.

    Raises:
        UserError: it is no size.
    """
    units = {"GiB": 2**30, "MiB": 2**20, "GB": 10**9, "MB": 10**6}
    for unit, size in units.items():
        if text.lower().endswith(unit.lower()):
            try:
                found = float(text[: -len(unit)]) * size
            except ValueError:
                break
            if 0 < found < 2**60:
                return int(found)
            break
    raise UserError(f"--gpu-memory {text}: give a size such as 16GB, 16GiB or 800MB")
