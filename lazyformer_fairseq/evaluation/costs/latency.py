"""Time and memory measurements. The candidates run in interleaved rounds, so disturbances affect all of them alike."""

import gc
import logging
import math
import os
import random
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, Optional, TypeVar, cast

# By default, the profiler logs its start and stop to standard error. It reads this variable on first use.
os.environ.setdefault("KINETO_LOG_LEVEL", "6")

import numpy as np
import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.modules.attention import reused_memory
from lazyformer_fairseq.modules.attention.back_ends import StoredDistribution
from lazyformer_fairseq.modules.networks.stack import Stack
from lazyformer_fairseq.modules.networks.stream_memory import StreamMemory
from lazyformer_fairseq.modules.products import has_onednn, linear_by_onednn
from lazyformer_fairseq.modules.sublayers.attention import with_memory
from lazyformer_fairseq.modules.sublayers.attention_variants.interface import Attention
from lazyformer_fairseq.patterns.grammar import PlannedSublayer
from lazyformer_fairseq.patterns.kinds import DISTRIBUTION, KEYS_AND_VALUES
from lazyformer_fairseq.progress import Progress
from lazyformer_fairseq.report.numbers import spread

logger = logging.getLogger(__name__)

Callables = Mapping[str, Callable[[], object]]
Condition = TypeVar("Condition")
WARM_UP = 3
GRACE = 15.0  # seconds by which a budget may be exceeded
MATRIX_SIZES = {"cpu": (1024, 2048), "cuda": (4096, 8192)}
SLOW_SIZES = (128, 256)  # a matmul of size 2048 takes minutes on CPUs without fp16 instructions


@dataclass(frozen=True)
class Timing:
    """A callable's measured times in seconds, one sample per round, in order."""

    samples: tuple[float, ...]

    @property
    def median(self) -> float:
        """The median of the samples."""
        return float(np.median(self.samples))

    def as_json(self) -> dict[str, Any]:
        """Return the samples and their spread."""
        return {**spread(self.samples), "samples": list(self.samples)}


def measure(
    callables: Callables,
    rounds: int = 30,
    warm_up: int = WARM_UP,
    device: torch.device | str = "cpu",
    seed: int = 1,
    description: str = "latency",
    seconds: Optional[float] = None,
) -> dict[str, Timing]:
    """Time every callable once per round, in a new random order for each round.

    Args:
        callables: the functions to call, by name. The caller decides whether gradients are enabled.
        rounds: the number of samples per callable.
        warm_up: the number of additional rounds at the start, which are discarded.
        device: the device; a GPU is synchronized before and after each call.
        seed: the seed for the order of the callables.
        description: the label of the progress bar.
        seconds: the time limit, after which no new round begins; at least one round is measured. None for no limit.
    """
    begin = time.perf_counter()
    chance = random.Random(seed)
    samples: dict[str, list[float]] = {name: [] for name in callables}
    try:
        for turn in Progress(range(warm_up + rounds), desc=description, unit=" rounds", leave=False):
            if seconds is not None and turn > warm_up and time.perf_counter() - begin > seconds:
                break
            for name in chance.sample(list(callables), len(callables)):
                wait_for(device)
                start = time.perf_counter()
                callables[name]()
                wait_for(device)
                if turn >= warm_up:
                    samples[name].append(time.perf_counter() - start)
    except TimeIsUp:
        if not (whole := min(map(len, samples.values()))):
            raise
        return {name: Timing(tuple(taken[:whole])) for name, taken in samples.items()}
    return {name: Timing(tuple(taken)) for name, taken in samples.items()}


class TimeIsUp(KeyboardInterrupt):
    """Raised when a budget and its grace period are used up; ends the work in progress like Ctrl-C."""


@contextmanager
def _ending_after(seconds: float) -> Iterator[None]:
    """Raise TimeIsUp in the ``with`` block after this many seconds, at whatever point the code has reached."""

    def ring(*_: object) -> None:
        raise TimeIsUp

    if seconds == math.inf:
        yield
        return
    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, max(seconds, 1e-6))
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def wait_for(device: torch.device | str) -> None:
    """Wait until a GPU has finished its work; return immediately on a CPU."""
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize(device)


def measure_interleaved(
    conditions: Sequence[Condition],
    make_callables: Callable[[Condition], Callables],
    device: str,
    rounds: int,
    budget: Optional[float] = None,
) -> Iterator[tuple[Condition, dict[str, Timing]]]:
    """Measure the conditions in order, splitting the remaining budget equally among the remaining conditions.

    After Ctrl-C, SIGTERM or a GPU error, the measurements end early. If this happens during the first condition, the
    exception is re-raised.

    Args:
        conditions: the conditions; their ``str`` is the label in the progress bar.
        make_callables: a function that returns the callables to compare under a condition.
        device: the device that they run on.
        rounds: the number of samples per callable.
        budget: the time limit in seconds; None for no limit. One round of each callable runs even if it exceeds the
            limit, but by no more than :data:`GRACE` seconds.

    Raises:
        UserError: there was not enough time for one round of the first condition.
    """
    began = time.perf_counter()
    done = 0
    try:
        for condition in Progress(conditions, desc="bench"):
            here = time.perf_counter()
            left = math.inf if budget is None else began + budget - here
            with _ending_after(left + GRACE):
                callables = make_callables(condition)
                taken = time.perf_counter() - here
                seconds = max(0.0, left / (len(conditions) - done) - taken)
                warm_up = int(seconds != 0)  # one round is enough, because the callables have already been called
                timings = measure(callables, rounds, warm_up, device, description=str(condition), seconds=seconds)
            del callables  # free their GPU memory
            yield condition, timings
            done += 1
    except (KeyboardInterrupt, RuntimeError, UserError) as reason:
        if not done and isinstance(reason, TimeIsUp):
            raise UserError(
                f"--budget: {budget:g} seconds plus {GRACE:g} were not enough for one round; use a longer "
                "budget or smaller models, such as --arch bert_tiny --baseline-arch bert_tiny"
            ) from None
        if not done:
            raise
        if isinstance(reason, TimeIsUp):
            logger.warning("the budget is used up; %d of %d conditions were measured", done, len(conditions))
        if isinstance(reason, Exception):
            logger.error("the benchmark stopped early: %s", error_summary(reason))


class RunnableCallables(NamedTuple):
    """Callables that run, their peak memory in bytes, and the reasons why others were skipped, all keyed by name."""

    callables: dict[str, Callable[[], object]]
    memory: dict[str, int]
    left_out: dict[str, str]


def run_once(callables: Callables, device: str, seconds: Optional[float] = None) -> RunnableCallables:
    """Call each callable once, which also warms it up: torch and Triton compile and tune their kernels.

    Args:
        callables: the functions to call, by name.
        device: the device that they run on.
        seconds: the time limit, after which no further callables are tried once one has run; None for no limit.
    """
    found = RunnableCallables({}, {}, {})
    began = time.perf_counter()
    for name, call in Progress(callables.items(), desc="trying out", leave=False):
        if seconds is not None and found.callables and time.perf_counter() - began > seconds:
            found.left_out[name] = "no time left; use a longer --budget"
            continue
        try:
            call()
            found.memory[name] = peak_memory(call, device)
        except Exception as error:  # kernels may fail in any way on a new GPU; keep the other results
            found.left_out[name] = error_summary(error)
        else:
            found.callables[name] = call
    return found


def error_summary(error: Exception) -> str:
    """Return the first line of an error message, preceded by the error's type unless it is a UserError."""
    if isinstance(error, torch.OutOfMemoryError):
        return "does not fit into memory"
    first = next(iter(str(error).splitlines()), "")
    if isinstance(error, UserError):
        return first
    return f"{type(error).__name__}: {first}"


def peak_memory(call: Callable[[], object], device: torch.device | str) -> int:
    """Return the peak tensor memory during a call, in bytes, minus the tensor memory before the call.

    The result is deterministic. On a GPU, torch's allocator reports it. On a CPU, it is the maximum of the running sum
    of all allocations and releases by torch's allocator, as recorded by the profiler. Neither includes the scratch
    memory of libraries such as MKL, cuBLAS and oneDNN.
    """
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize(device)
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        call()
        torch.cuda.synchronize(device)
        return torch.cuda.max_memory_allocated(device) - before
    reused_memory.give_back()  # otherwise reused memory would not be counted
    was_enabled = gc.isenabled()
    gc.disable()  # freeing earlier garbage during the call would count as negative memory
    try:
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
            call()
    finally:
        if was_enabled:
            gc.enable()
    assert recorded.profiler is not None
    events = [event for event in recorded.profiler.kineto_results.events() if event.name() == "[memory]"]
    held = 0
    highest = 0
    for _, taken in sorted((event.start_ns(), event.nbytes()) for event in events):
        held += taken
        highest = max(highest, held)
    return highest


def square_matmuls(device: torch.device | str, dtype: torch.dtype) -> dict[str, Callable[[], Tensor]]:
    """Return square matmuls to measure alongside the models: one for each size and each library that models use."""
    device_type = torch.device(device).type
    libraries: dict[str, Callable[..., Tensor]] = {"matrix product": torch.matmul}
    if (device_type, dtype) == ("cpu", torch.float32) and has_onednn():
        libraries["matrix product by oneDNN"] = linear_by_onednn
    matmuls: dict[str, Callable[[], Tensor]] = {}
    sizes = SLOW_SIZES if (device_type, dtype) == ("cpu", torch.float16) else MATRIX_SIZES[device_type]
    for size in sizes:
        pair = [torch.randn(size, size, device=device, dtype=dtype) for _ in range(2)]
        for name, multiply in libraries.items():
            matmuls[f"{name} {size}"] = torch.inference_mode()(partial(multiply, *pair))
    return matmuls


def peak_matmul_flops(timings: Mapping[str, Timing]) -> float:
    """Return the FLOP/s of the fastest matmul among the `timings` with names from :func:`square_matmuls`."""
    sizes = {name: int(name.rpartition(" ")[2]) for name in timings if name.startswith("matrix product")}
    return max(2 * size**3 / timings[name].median for name, size in sizes.items())


def next_segment(model: nn.Module, tokens_BT: Tensor, targets_BT: Tensor, mem_len: int) -> Callable[[], object]:
    """Return a call that computes a causal model's loss on a segment with a full memory, as in the middle of a text.

    Args:
        model: a model with the interface of
            :class:`~lazyformer_fairseq.fairseq_plugin.models.lazyformer.CausalLanguageModel`.
        tokens_BT: the segment's token ids.
        targets_BT: the target token ids, which determine which bands of an adaptive softmax are computed.
        mem_len: the number of tokens that the model remembers.
    """
    memory = StreamMemory()

    @torch.inference_mode()
    def score() -> object:
        return model(tokens_BT, memory=memory, target=targets_BT)

    segments = -(-mem_len // tokens_BT.size(1))  # rounded up
    for _ in range(segments):
        score()
    return score


def measure_sublayers(
    network: Stack,
    sublayers: Mapping[str, PlannedSublayer],
    time: int,
    memory: int = 0,
    **how: Any,
) -> dict[str, Timing]:
    """Measure the inference latency of individual sublayers at batch size 1, with a network's sizes.

    Args:
        network: the network used to build the sublayers and their shared context; its own sublayers do not run.
        sublayers: the planned sublayers by name. Sublayers with consumers also store the state that consumers read.
        time: T, the number of input tokens.
        memory: M, the number of remembered positions; for a CausalDecoder only.
        how: `rounds`, `warm_up` and `seed`; see :func:`measure`.
    """
    weight = next(network.parameters())
    like: dict[str, Any] = {"device": weight.device, "dtype": weight.dtype}
    x = torch.randn(1, time, network.embed_dim, **like)
    x_memory = torch.randn(1, memory, network.embed_dim, **like)
    keys = memory + time
    heads = network.num_heads
    head_dim = network.embed_dim // heads
    uniform = StoredDistribution(torch.full((1, heads, time, keys), 1 / keys, **like))
    q, k, v = (torch.randn(1, heads, length, head_dim, **like) for length in (time, keys, keys))
    with torch.inference_mode():
        measured = {}
        for name, planned in sublayers.items():
            sublayer = network.build_sublayer(planned)
            measured[name] = sublayer.to(**like).eval()
        # The context depends on the sublayers: without attention, the network computes neither bias nor positions.
        own = network.sublayers
        network.sublayers = cast(Sequence[nn.Module], nn.ModuleList(measured.values()))
        try:
            shared = network.context(x, memory)
        finally:
            network.sublayers = own
        attention = Attention(x, with_memory(x_memory, x), q, k, v, shared.scores)
        below = {DISTRIBUTION: uniform, KEYS_AND_VALUES: attention}

        def call_of(sublayer: nn.Module) -> Callable[[], object]:
            return lambda: sublayer(x, below, shared, x_memory if memory else None)

        calls = {name: call_of(each) for name, each in measured.items()}
        return measure(calls, device=weight.device, **how)
