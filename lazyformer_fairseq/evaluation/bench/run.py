"""Benchmark of models, from its settings to the result files.

For each precision, length and workload, all models run once per round. Workloads are a training update, the encoder's
forward and backward pass, and inference; causal language models are compared with Transformer-XL, as in PAR
Transformer's Table 6. The results are written as tables and as plots of speed-up against length.
"""

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lazyformer_fairseq.evaluation.bench import models
from lazyformer_fairseq.evaluation.bench.report import draw_all, page
from lazyformer_fairseq.evaluation.bench.settings import SEGMENT, WORKLOADS, BenchSettings
from lazyformer_fairseq.evaluation.costs import latency
from lazyformer_fairseq.evaluation.costs.machine import PRECISIONS, record
from lazyformer_fairseq.modules.compiled import compiled
from lazyformer_fairseq.report.numbers import spread
from lazyformer_fairseq.report.page import Notes, markdown
from lazyformer_fairseq.storage.atomic import atomic_folder
from lazyformer_fairseq.storage.json_files import write_json

SHARE_TO_TRY = 0.5  # fraction of a cell's budget after which models that have not run yet are skipped
LEAST_TO_TRY = 5.0  # seconds
Build = Callable[[BenchSettings, str], list[models.OnBackEnd]]
FREQUENT = 19_997  # lower ids are in the adaptive softmax's first band, the only band that the FLOPs include


def bench_to(folder: Path, settings: BenchSettings, command: Sequence[str]) -> str:
    """Run a benchmark, write `results.json`, `results.md` and plots, and return the tables.

    Args:
        folder: the folder for the results, created atomically after all measurements.
        settings: the benchmark's settings.
        command: the command line, for the record.

    Raises:
        UserError: the folder is not empty or cannot be created.
    """
    torch.manual_seed(1)
    results = {**record(settings, command), **run_bench(settings)}
    tables = page(results)
    with atomic_folder(folder) as unfinished:
        write_json(unfinished / "results.json", results)
        facts = {"command": f"`{results['command']}`", **results["machine"], **results["versions"]}
        described = Notes([f"{name}: {value}" for name, value in facts.items()])
        (unfinished / "results.md").write_text(markdown([described, *tables]), encoding="utf-8")
        draw_all(results, unfinished)
    return markdown(tables).strip()


@dataclass(frozen=True)
class Cell:
    """The conditions of a set of measurements; `workload` and `precision` are keys of WORKLOADS and PRECISIONS."""

    workload: str
    precision: str
    time: int
    batch: int

    def __str__(self) -> str:
        return f"{self.workload}, n = {self.time}, batch {self.batch}, {self.precision}"


def run_bench(settings: BenchSettings, build: Build = models.build_models) -> dict[str, Any]:
    """Run all measurements. After Ctrl-C, SIGTERM or a GPU error, return the completed ones, if any.

    Args:
        settings: the benchmark's settings.
        build: a function that builds the encoders from settings and a precision.

    Returns:
        `cells` and `cells_planned`, which is larger than the number of cells if the benchmark was stopped. Each cell
        has its `matrix_peak` in FLOP/s, its `rows` (see :func:`describe`) and `left_out`, the reasons why models could
        not run, by name.
    """
    bench = _Bench(settings, build)
    results: dict[str, Any] = {"cells_planned": len(bench.cells), "cells": []}
    measured = latency.measure_interleaved(
        bench.cells,
        bench.make_callables,
        device=settings.device,
        rounds=settings.rounds,
        budget=settings.budget,
    )
    for cell, timings in measured:
        peak = latency.peak_matmul_flops(timings)
        tried = bench.tried
        rows = [
            describe(each, cell, timings[each.name], tried.memory[each.name], peak)
            for each in bench.models
            if each.name in tried.callables
        ]
        add_speedups(rows)
        results["cells"].append({**asdict(cell), "matrix_peak": peak, "rows": rows, "left_out": tried.left_out})
    return results


class _Bench:
    """The models to measure, built one precision after another, with encoders before causal models.

    Attributes:
        cells: all cells, in the order of measurement.
        models: the models of the current precision.
        tried: the models that run in the current cell.
    """

    def __init__(self, settings: BenchSettings, build: Build):
        self.settings = settings
        self.build = build
        self.cells = [cell for precision in settings.precisions for cell in self._cells(precision)]
        self.models: list[models.OnBackEnd] = []
        self.tried = latency.RunnableCallables({}, {}, {})
        self._built: tuple[str, bool] | None = None

    def _cells(self, precision: str) -> Iterator[Cell]:
        workloads = (
            self.settings.workloads if self.settings.encoders else ()
        )  # without encoders, only baselines would run
        for length, workload in itertools.product(self.settings.lengths, workloads):
            batch = max(1, self.settings.tokens // length)
            if workload == "inference" and batch > 1:
                yield Cell(workload, precision, length, 1)
            yield Cell(workload, precision, length, batch)
        if self.settings.causal_archs:
            yield Cell("causal", precision, SEGMENT, 1)

    def make_callables(self, cell: Cell) -> latency.Callables:
        """Return a cell's calls, and matmuls to compare them with; cells of the same precision must be consecutive."""
        self.tried = latency.RunnableCallables({}, {}, {})  # frees the GPU memory of the previous cell
        is_causal = cell.workload == "causal"
        if (cell.precision, is_causal) != self._built:
            self.models = []
            build = models.build_causal_models if is_causal else self.build
            self.models = build(self.settings, cell.precision)
            self._built = (cell.precision, is_causal)

        # A model's back ends share one call, because an update's optimizer state needs a lot of memory.
        make_call = CALLS[cell.workload]
        distinct = dict.fromkeys(each.model for each in self.models)
        calls = {model: make_call(model, cell.batch, cell.time) for model in distinct}
        callables = {each.name: each.prepared(calls[each.model]) for each in self.models}
        seconds = None
        if self.settings.budget:
            seconds = max(LEAST_TO_TRY, SHARE_TO_TRY * self.settings.budget / len(self.cells))
        self.tried = latency.run_once(callables, self.settings.device, seconds)
        for each in self.models:
            if each.name in self.tried.memory:
                call = calls[each.model]
                held = call.held_bytes() if isinstance(call, Update) else bytes_of(each.model.model.parameters())
                self.tried.memory[each.name] += held
        return self.tried.callables | latency.square_matmuls(self.settings.device, PRECISIONS[cell.precision])


class Update:
    """A training update: forward, cross-entropy at 15% of the positions, backward, and a step of torch's fused AdamW.

    In half precision, the optimizer updates fp32 weights and copies them back, as in fairseq. In fp16, the loss scale
    is constant, because overflowing gradients do not affect the time.
    """

    LOSS_SCALE = 128.0

    def __init__(self, model: models.BenchModel, batch: int, time: int):
        self.model = model
        self.weights = [weight for weight in model.model.parameters() if weight.requires_grad]
        device = self.weights[0].device
        dtype = self.weights[0].dtype
        self.masters = self.weights
        if dtype != torch.float32:
            self.masters = [nn.Parameter(weight.detach().float()) for weight in self.weights]
        # A tiny learning rate keeps the time independent of what the model has learned from random tokens.
        self.optimizer = torch.optim.AdamW(self.masters, lr=1e-9, fused=True)
        self.scale = self.LOSS_SCALE if dtype == torch.float16 else 1.0
        self.batch = models.random_batch(batch, time, device)

    def __call__(self) -> None:
        """Run one update."""
        self.model.model.train()
        logits = self.model.masked_logits(self.batch)
        loss_of = compiled(_loss) if self.model.compiles else _loss
        loss = loss_of(logits, self.batch.targets_M)
        (loss * self.scale).backward()
        self._step()

    @torch.no_grad()
    def _step(self) -> None:
        pairs = zip(self.weights, self.masters, strict=True)
        trained = [(weight, master) for weight, master in pairs if weight.grad is not None]
        if self.masters is not self.weights:
            for weight, master in trained:
                master.grad = weight.grad.float().div_(self.scale)
        self.optimizer.step()
        if self.masters is not self.weights:
            torch._foreach_copy_([weight for weight, _ in trained], [master for _, master in trained])
        for weight, master in trained:
            weight.grad = None
            master.grad = None

    def held_bytes(self) -> int:
        """Return the size in bytes of the weights and everything that the optimizer keeps between updates."""
        kept = {id(tensor): tensor for tensor in [*self.weights, *self.masters]}
        held = list(kept.values())
        for state in self.optimizer.state.values():
            held += [value for value in state.values() if isinstance(value, Tensor)]
        return bytes_of(held)


def encoder_training(model: models.BenchModel, batch: int, time: int) -> Callable[[], None]:
    """Return a call that runs the encoder's forward and backward pass with a fixed gradient of the output."""
    weight = next(model.model.parameters())
    tokens_BT = models.random_tokens(batch, time, weight.device)
    gradient_BTC = torch.randn(batch, time, model.sizes.embed_dim, device=weight.device, dtype=weight.dtype)

    def forward_and_backward() -> None:
        model.model.train()
        model.features(tokens_BT).backward(gradient_BTC)
        model.model.zero_grad(set_to_none=True)

    return forward_and_backward


def inference(model: models.BenchModel, batch: int, time: int) -> Callable[[], Tensor]:
    """Return a call that runs only the encoder, without gradients."""
    tokens_BT = models.random_tokens(batch, time, next(model.model.parameters()).device)

    @torch.inference_mode()
    def encode() -> Tensor:
        model.model.eval()
        return model.features(tokens_BT)

    return encode


def causal_inference(model: models.BenchModel, batch: int, time: int) -> Callable[[], object]:
    """Return a call that computes the loss on a segment of frequent words with a full memory."""
    words = model.sizes.vocab_size
    device = next(model.model.parameters()).device
    tokens_BT = torch.randint(5, min(FREQUENT, words), (batch, time), device=device)
    return latency.next_segment(model.model, tokens_BT, tokens_BT, model.memory)


# Functions that build a call from a model, a batch size and a length, by workload.
CALLS = {"training": Update, "encoder": encoder_training, "inference": inference, "causal": causal_inference}


def bytes_of(tensors: Iterable[Tensor]) -> int:
    """Return the total size of tensors in bytes."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def _loss(logits_MV: Tensor, targets_M: Tensor) -> Tensor:
    return F.cross_entropy(logits_MV.float(), targets_M)


def describe(
    each: models.OnBackEnd,
    cell: Cell,
    timing: latency.Timing,
    memory: int,
    peak: float,
) -> dict[str, Any]:
    """Return a model's measurements in a cell, and the quantities derived from them.

    Args:
        each: the model on its back end.
        cell: the cell.
        timing: the times of the model's calls.
        memory: the peak memory in bytes.
        peak: the FLOP/s of the fastest matmul in the same rounds.
    """
    trains = WORKLOADS[cell.workload].trains
    predicted = None if cell.workload == "causal" else 0
    if cell.workload == "training":
        predicted = models.predicted_words(cell.time)
    flops = each.count_flops(cell.batch, cell.time, trains, predicted)
    sizes = each.model.sizes
    return {
        "model": each.called,
        "pattern": each.model.pattern,
        "sizes": [sizes.ffn_embed_dim, sizes.embed_dim, sizes.num_heads],
        "back_end": each.back_end,
        "back_ends_used": each.back_ends_used(cell.batch, cell.time, trains),
        "buckets": each.buckets,
        "baseline": each.baseline,
        "parameters": each.model.parameters,
        "flops": flops,
        "seconds": timing.as_json(),
        "memory_bytes": memory,
        "tokens_per_second": cell.batch * cell.time / timing.median,
        "flops_per_second": flops / timing.median,
        "share_of_peak": flops / timing.median / peak,
    }


def add_speedups(rows: list[dict[str, Any]]) -> None:
    """Add `against` to each row of a cell: the row's comparison with each baseline, by name.

    `speedup` is the ratio of the medians, `low` and `high` are the quartiles of the `n` per-round ratios, `limit` is
    the ratio of the FLOPs, and `memory` is the ratio of the memory (below 1 means that the row needs less). Our own
    BERTs run on their fastest back end, `back_end`, with the same relative bias as the row; the other baselines have no
    bias.
    """
    for row in rows:
        row["against"] = {}
        for name in models.BASELINES:
            candidates = [other for other in rows if other["baseline"] == name]
            if name in models.BIASED:
                candidates = [other for other in candidates if other["buckets"] == row["buckets"]]
            if not candidates:
                continue
            baseline = min(candidates, key=lambda other: other["seconds"]["median"])
            row["against"][name] = {
                **spread(np.divide(baseline["seconds"]["samples"], row["seconds"]["samples"])),
                "speedup": baseline["seconds"]["median"] / row["seconds"]["median"],
                "limit": baseline["flops"] / row["flops"],
                "memory": row["memory_bytes"] / baseline["memory_bytes"],
                "back_end": baseline["back_end"],
            }
