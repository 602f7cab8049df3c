"""Benchmark of attention sublayers, including their projections, for each pattern on each back end."""

import logging
from collections.abc import Callable
from itertools import product

import torch

from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.evaluation.bench.settings import AttentionSettings
from lazyformer_fairseq.evaluation.costs.latency import Callables, measure_interleaved, run_once
from lazyformer_fairseq.evaluation.costs.machine import PRECISIONS
from lazyformer_fairseq.modules.attention.selection import AUTO
from lazyformer_fairseq.modules.networks.encoder import Encoder
from lazyformer_fairseq.report.numbers import in_milliseconds, noise_warning, with_spread
from lazyformer_fairseq.report.tables import markdown_table

logger = logging.getLogger(__name__)

FULL = "s, torch's full attention"


def measure_attention(settings: AttentionSettings, heads: tuple[int, int]) -> tuple[str, bool]:
    """Measure each pattern's forward and backward pass on each back end, interleaved with the passes of a plain ``s``.

    Args:
        settings: the benchmark's settings.
        heads: N, the number of heads, and D, the size of each head.

    Returns:
        A Markdown table, followed by a warning if the machine was noisy, and a flag that is False if Ctrl-C stopped the
        benchmark before all lengths were measured.

    Raises:
        UserError: a pattern cannot be parsed.
    """
    rows: list[dict[str, object]] = []
    memory: dict[str, int] = {}
    measured: dict[str, dict[str, float]] = {}

    def make_callables(length: int) -> Callables:
        callables = {FULL: _sublayers("s", "recompute", length, heads, settings)}
        for pattern, back_end in product(settings.patterns, settings.back_ends):
            name = pattern if back_end == AUTO else f"{pattern} on {back_end}"
            try:
                callables[name] = _sublayers(pattern, back_end, length, heads, settings)
            except UserError as error:  # this back end cannot compute this pattern
                if back_end == AUTO:
                    raise
                logger.warning("%s is skipped: %s", name, error)
        tried = run_once(callables, settings.device)
        for name, reason in tried.left_out.items():
            logger.warning("%s at %d tokens is skipped: %s", name, length, reason)
        memory.update(tried.memory)
        return tried.callables

    taken = measure_interleaved(settings.lengths, make_callables, settings.device, settings.rounds, settings.budget)
    length = 0
    for length, timings in taken:
        full = timings.get(FULL)  # None if it does not fit into memory
        measured |= {f"{name} ({length} tokens)": in_milliseconds(timing.samples) for name, timing in timings.items()}
        rows += [
            {
                "attention": name,
                "n": length,
                "ms": with_spread(in_milliseconds(timing.samples)),
                "speed-up": f"{full.median / timing.median:.2f}x" if full else "",
                "MiB": f"{memory[name] / 2**20:.1f}",
            }
            for name, timing in timings.items()
        ]
    blocks = [markdown_table(rows), *noise_warning(measured)]
    return "\n\n".join(blocks), length == settings.lengths[-1]


def _sublayers(
    pattern: str,
    back_end: str,
    time: int,
    heads: tuple[int, int],
    settings: AttentionSettings,
) -> Callable[[], object]:
    num_heads, head_dim = heads
    width = num_heads * head_dim
    how = {"max_positions": time, "relative_position_buckets": 0, "attention_backend": back_end}
    encoder = Encoder(pattern, None, width, width, num_heads, **how)
    encoder = encoder.to(settings.device, PRECISIONS[settings.precision])

    batch = max(1, settings.tokens // time)
    weight = next(encoder.parameters())
    x_BTC = torch.randn(batch, time, width).to(weight).requires_grad_()
    gradient_BTC = torch.randn_like(x_BTC)
    leaves = [x_BTC, *encoder.parameters()]
    return lambda: torch.autograd.grad(encoder(x_BTC)[0], leaves, gradient_BTC, allow_unused=True)
