"""One benchmark of models, from its settings to the files in its folder.

For each precision, length and workload, all models take turns, round after round: an update, the encoder alone in
training, and inference; causal language models beside Transformer-XL, as in PAR Transformer's Table 6.
"""

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lazyformer_fairseq.measure.bench.models import (
    BASELINES,
    OURS,
    BenchModel,
    OnBackEnd,
    build_causal_models,
    build_models,
    predicted_words,
    random_batch,
    random_tokens,
)
from lazyformer_fairseq.measure.bench.report import csv_rows, draw_all, page
from lazyformer_fairseq.measure.bench.settings import REMEMBERED, SEGMENT, WORKLOADS, BenchSettings
from lazyformer_fairseq.measure.costs.flops import makers_of_blocks
from lazyformer_fairseq.measure.costs.latency import (
    Things,
    Timing,
    Tried,
    matrix_peak,
    matrix_products,
    measure_in_turn,
    next_segment,
    try_out,
)
from lazyformer_fairseq.measure.costs.machine import PRECISIONS, describe_machine, describe_versions
from lazyformer_fairseq.modules.compiled import compiled
from lazyformer_fairseq.report.numbers import spread
from lazyformer_fairseq.report.page import Notes, markdown
from lazyformer_fairseq.report.tables import write_csv
from lazyformer_fairseq.storage.atomic import atomic_folder, refuse_filled_folder
from lazyformer_fairseq.storage.json_files import write_json

FREQUENT = 19_997  # ids below are in the adaptive softmax's first band; the FLOPs count only that band


def bench_to(folder: Path, settings: BenchSettings, command: Sequence[str]) -> str:
    """Measures, writes `results.json`, `results.csv`, `results.md` and pictures, and returns the tables.

    Args:
        folder: created, complete, after all measurements.
        command: as it was given, for the record.

    Raises:
        UserError: the folder is not empty, or cannot be created.
    """
    refuse_filled_folder(folder)
    torch.manual_seed(1)
    results = {
        "command": " ".join(command),
        "machine": describe_machine(settings.device),
        "versions": describe_versions(),
        "settings": asdict(settings),
        **run_bench(settings),
    }
    with atomic_folder(folder) as unfinished:
        write_json(unfinished / "results.json", results)
        write_csv(list(csv_rows(results)), unfinished / "results.csv")
        facts = {"command": f"`{results['command']}`", **results["machine"], **results["versions"]}
        described = Notes([f"{name}: {value}" for name, value in facts.items()])
        (unfinished / "results.md").write_text(markdown([described, *page(results)]), encoding="utf-8")
        draw_all(results, unfinished)
    return markdown(page(results)).strip()


def run_bench(settings: BenchSettings) -> dict[str, Any]:
    """Measures everything. After Ctrl-C, SIGTERM or a GPU error it returns the measurements so far, if any.

    Returns:
        `cells`, each with its `matrix_peak` in FLOP/s, `rows` (see :func:`describe`) and `left_out`, reasons by name of
        what could not run; `cells_planned`, more than there are if the run was stopped.
    """
    bench = _Bench(settings)
    results: dict[str, Any] = {"cells_planned": len(bench.cells), "cells": []}
    how = (settings.device, settings.rounds, settings.budget)
    for cell, timings in measure_in_turn(bench.cells, bench.things_of, *how):
        peak, tried = matrix_peak(timings), bench.tried
        rows = [
            describe(each, cell, timings[each.name], tried.memory[each.name], peak)
            for each in bench.models
            if each.name in tried.things
        ]
        add_speedups(rows)
        results["cells"].append({**vars(cell), "matrix_peak": peak, "rows": rows, "left_out": tried.left_out})
    return results


@dataclass(frozen=True)
class Cell:
    """The conditions at which all models take turns; workload and precision are keys of the tables."""

    workload: str
    precision: str
    time: int
    batch: int

    def __str__(self) -> str:
        return f"{self.workload}, n = {self.time}, batch {self.batch}, {self.precision}"


class _Bench:
    """Builds what a benchmark measures: the models of one precision at a time, encoders and then causal ones.

    Attributes:
        cells: all, in order.
        models: of the present precision.
        tried: of the present cell.
    """

    models: list[OnBackEnd]
    tried: Tried

    def __init__(self, settings: BenchSettings):
        self.settings, self.built = settings, None
        self.cells = [cell for precision in settings.precisions for cell in self._cells(precision)]

    def _cells(self, precision: str) -> Iterator[Cell]:
        for length, workload in itertools.product(self.settings.lengths, self.settings.workloads):
            batch = max(1, self.settings.tokens // length)
            for size in sorted({1, batch} if workload == "inference" else {batch}):
                yield Cell(workload, precision, length, size)
        if self.settings.causal_archs:
            yield Cell("causal", precision, SEGMENT, 1)

    def things_of(self, cell: Cell) -> Things:
        """Of a cell, matrix products among them; the cells of a precision follow one another."""
        self.tried, device = Tried({}, {}, {}), self.settings.device  # what it held of a GPU's memory goes
        is_causal = cell.workload == "causal"
        if (cell.precision, is_causal) != self.built:
            self.models, self.built = [], (cell.precision, is_causal)
            self.models = (build_causal_models if is_causal else build_models)(self.settings, cell.precision)
        models = {id(each.model): each.model for each in self.models}
        shared = {key: CALLS[cell.workload](model, cell.batch, cell.time) for key, model in models.items()}
        self.tried = try_out({each.name: each.prepared(shared[id(each.model)]) for each in self.models}, device)
        for each in self.models:
            if each.name in self.tried.memory:
                call = shared[id(each.model)]
                held = call.held_bytes() if isinstance(call, Update) else bytes_of(each.model.model.parameters())
                self.tried.memory[each.name] += held
        return self.tried.things | matrix_products(device, PRECISIONS[cell.precision])


class Update:
    """Forward, cross-entropy at 15% of the positions, backward, and a step of torch's fused AdamW.

    In half precision the optimizer updates weights in single precision and copies them back, as fairseq does. fp16
    scales its loss by a constant: overflowing gradients do not change the time.
    """

    LOSS_SCALE = 128.0

    def __init__(self, model: BenchModel, batch: int, time: int):
        self.model = model
        self.weights = [weight for weight in model.model.parameters() if weight.requires_grad]
        device, dtype = self.weights[0].device, self.weights[0].dtype
        self.masters = self.weights if dtype == torch.float32 else [_master(weight) for weight in self.weights]
        # A tiny rate: the time must not depend on how far a model has learned random tokens.
        self.optimizer = torch.optim.AdamW(self.masters, lr=1e-9, fused=True)
        self.scale = self.LOSS_SCALE if dtype == torch.float16 else 1.0
        self.batch = random_batch(batch, time, device)

    def __call__(self) -> None:
        self.model.model.train()
        logits = self.model.masked_logits(self.batch)
        loss = (compiled(_loss) if self.model.compiles else _loss)(logits, self.batch.targets_M)
        (loss * self.scale).backward()
        self._step()

    @torch.no_grad()
    def _step(self) -> None:
        trained = [(weight, master) for weight, master in zip(self.weights, self.masters, strict=True)
                   if weight.grad is not None]  # fmt: skip
        if self.masters is not self.weights:
            for weight, master in trained:
                master.grad = weight.grad.float().div_(self.scale)
        self.optimizer.step()
        if self.masters is not self.weights:
            torch._foreach_copy_([weight for weight, _ in trained], [master for _, master in trained])
        for weight, master in trained:
            weight.grad = master.grad = None

    def held_bytes(self) -> int:
        """Bytes of weights and of all that the optimizer keeps between updates."""
        kept = {id(tensor): tensor for tensor in [*self.weights, *self.masters]}
        states = (value for state in self.optimizer.state.values() for value in state.values())
        return bytes_of([*kept.values(), *(value for value in states if isinstance(value, Tensor))])


def encoder_training(model: BenchModel, batch: int, time: int) -> Callable[[], None]:
    """Forward and backward of the encoder, from a given gradient."""
    weight = next(model.model.parameters())
    tokens_BT = random_tokens(batch, time, weight.device)
    gradient_BTC = torch.randn(batch, time, model.sizes.embed_dim, device=weight.device, dtype=weight.dtype)

    def forward_and_backward() -> None:
        model.model.train()
        model.features(tokens_BT).backward(gradient_BTC)
        model.model.zero_grad(set_to_none=True)

    return forward_and_backward


def inference(model: BenchModel, batch: int, time: int) -> Callable[[], Tensor]:
    """Features of a batch."""
    tokens_BT = random_tokens(batch, time, next(model.model.parameters()).device)

    @torch.inference_mode()
    def encode() -> Tensor:
        model.model.eval()
        return model.features(tokens_BT)

    return encode


def causal_inference(model: BenchModel, batch: int, time: int) -> Callable[[], object]:
    """Scores of a segment of frequent words, behind a full memory."""
    words, device = model.sizes.vocab_size, next(model.model.parameters()).device
    tokens_BT = torch.randint(5, min(FREQUENT, words), (batch, time), device=device)
    return next_segment(model.model, tokens_BT, tokens_BT, REMEMBERED)


# By workload: what makes a call from a model, a batch and a length.
CALLS = {"training": Update, "encoder": encoder_training, "inference": inference, "causal": causal_inference}


def bytes_of(tensors) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def _loss(logits_MV: Tensor, targets_M: Tensor) -> Tensor:
    return F.cross_entropy(logits_MV.float(), targets_M)


def _master(weight: Tensor) -> nn.Parameter:
    return nn.Parameter(weight.detach().float())


def describe(each: OnBackEnd, cell: Cell, timing: Timing, memory: int, peak: float) -> dict[str, Any]:
    """The measurements, and what follows from them; `flops` are those that this back end performs.

    Args:
        memory: peak bytes.
        peak: FLOP/s of the fastest matrix product in the same rounds.
    """
    training = WORKLOADS[cell.workload][1]
    predicted = predicted_words(cell.batch, cell.time) if cell.workload == "training" else 0
    flops = each.count_flops(cell.batch, cell.time, training, predicted)
    used = each.back_end_used(cell.batch, cell.time, training)
    return {
        "model": each.called,
        "pattern": each.model.pattern,
        "sizes": [getattr(each.model.sizes, name) for name in ("ffn_embed_dim", "embed_dim", "num_heads")],
        "back_end": each.back_end,
        "back_end_used": sorted({used(maker) for maker in makers_of_blocks(each.model.pattern)}),
        "buckets": each.buckets,
        "baseline": each.baseline,
        "parameters": each.model.parameters,
        "flops": flops,
        "seconds": timing.as_json(),
        "tokens_per_second": cell.batch * cell.time / timing.median,
        "flops_per_second": flops / timing.median,
        "share_of_peak": flops / timing.median / peak,
        "memory_bytes": memory,
    }


def add_speedups(rows: list[dict[str, Any]]) -> None:
    """Adds `against` to each row of a cell: how the row compares with each baseline, by name.

    `speedup` is the ratio of the medians, `low` and `high` the quartiles of the `n` ratios round by round, `limit` the
    ratio of the FLOPs, `memory` that of the memory (below 1: less). Our own BERT runs on its fastest back end,
    `back_end`, with the row's own relative bias; the others have none.
    """
    for row in rows:
        row["against"] = {}
        for name in BASELINES:
            candidates = [other for other in rows if other["baseline"] == name]
            if name == OURS:
                candidates = [other for other in candidates if other["buckets"] == row["buckets"]]
            if candidates:
                row["against"][name] = _beside(row, min(candidates, key=lambda other: other["seconds"]["median"]))


def _beside(row: dict[str, Any], baseline: dict[str, Any]) -> dict[str, Any]:
    ratios = spread(np.divide(baseline["seconds"]["samples"], row["seconds"]["samples"]))
    return {
        **ratios,
        "speedup": baseline["seconds"]["median"] / row["seconds"]["median"],
        "limit": baseline["flops"] / row["flops"],
        "memory": row["memory_bytes"] / baseline["memory_bytes"],
        "back_end": baseline["back_end"],
    }
