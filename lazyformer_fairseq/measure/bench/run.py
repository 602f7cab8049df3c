"""One benchmark of models, from its settings to the files in its folder.

For each precision, length and workload, all models take turns, round after round: an update, the encoder alone in
training, and inference; causal language models beside Transformer-XL, as in PAR Transformer's Table 6.
"""

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lazyformer_fairseq.fairseq_plugin.models.causal_lm import CausalLanguageModel
from lazyformer_fairseq.measure.bench.measuring import Tried, measured, try_out
from lazyformer_fairseq.measure.bench.models import (
    BASELINES,
    OURS,
    WORDS,
    BenchModel,
    OnBackEnd,
    a_dictionary,
    build_causal,
    build_models,
    predicted_words,
    random_batch,
    random_tokens,
)
from lazyformer_fairseq.measure.bench.report import csv_rows, page
from lazyformer_fairseq.measure.bench.settings import WORKLOADS, BenchSettings
from lazyformer_fairseq.measure.costs.flops import count_flops, makers_of_blocks
from lazyformer_fairseq.measure.costs.latency import Timing
from lazyformer_fairseq.measure.costs.machine import PRECISIONS, describe_machine, describe_versions
from lazyformer_fairseq.measure.costs.matrix_peak import matrix_peak, matrix_products
from lazyformer_fairseq.measure.costs.model_latency import next_segment
from lazyformer_fairseq.modules.compiled import compiled
from lazyformer_fairseq.patterns.architectures import CAUSAL_ARCHITECTURES
from lazyformer_fairseq.report.numbers import spread
from lazyformer_fairseq.report.page import Notes, markdown
from lazyformer_fairseq.report.tables import write_csv
from lazyformer_fairseq.storage.atomic import atomic_folder, refuse_filled_folder
from lazyformer_fairseq.storage.json_files import write_json

CAUSAL = "causal latency"  # a workload
TRANSFORMER_XL = "transformer_xl_base"
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
        _draw(results, unfinished)
    return markdown(page(results)).strip()


def _draw(results: dict[str, Any], folder: Path) -> None:
    """Draws pictures, except on a machine without matplotlib, such as one borrowed for a measurement."""
    try:
        from lazyformer_fairseq.measure.bench.pictures import draw_all
    except ModuleNotFoundError as error:
        print(f"left out: pictures ({error}); where it is installed: lazyformer bench draw FOLDER", file=sys.stderr)
    else:
        draw_all(results, folder)


def run_bench(settings: BenchSettings) -> dict[str, Any]:
    """Measures everything. After Ctrl-C, SIGTERM or a GPU error it returns the measurements so far, if any.

    Returns:
        `cells`, each with its `matrix_peak` in FLOP/s, `rows` (see :func:`describe`) and `left_out`, reasons by name of
        what could not run; `causal`, rows of the causal models; `cells_planned`, more than there are if the run was
        stopped.
    """
    bench = _Bench(settings)
    results: dict[str, Any] = {"cells_planned": len(bench.cells), "cells": [], "causal": []}
    for cell, timings in measured(bench.cells, bench.things_of, settings.device, settings.rounds, settings.budget):
        peak = matrix_peak(timings)
        if cell.workload == CAUSAL:
            results["causal"] += bench.causal_rows(cell, timings, peak)
            continue
        tried = bench.tried
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
    """Builds what a benchmark measures: the models of one precision at a time.

    Attributes:
        cells: all, in order.
        models: of the present precision.
        tried: of the present cell.
    """

    models: list[OnBackEnd]
    causal: dict[str, CausalLanguageModel]
    tried: Tried

    def __init__(self, settings: BenchSettings):
        self.settings = settings
        self.precision = ""
        self.cells = [cell for precision in settings.precisions for cell in self._cells(precision)]

    def _cells(self, precision: str) -> Iterator[Cell]:
        for length in self.settings.lengths:
            for workload in self.settings.workloads:
                batch = self.settings.batch_of(length)
                for size in sorted({1, batch} if workload == "inference" else {batch}):
                    yield Cell(workload, precision, length, size)
        if self.settings.causal_archs:
            yield Cell(CAUSAL, precision, self.settings.tgt_len, 1)

    def things_of(self, cell: Cell) -> Mapping[str, Callable[[], object]]:
        """Of a cell, matrix products among them; the cells of a precision follow one another."""
        self.tried, device = Tried({}, {}, {}), self.settings.device  # what it held of a GPU's memory goes
        products = matrix_products(device, PRECISIONS[cell.precision])
        if cell.workload == CAUSAL:
            self.models = []
            return self._causal_things(cell) | products
        if cell.precision != self.precision:
            self.models, self.causal, self.precision = [], {}, cell.precision
            self.models = build_models(self.settings, cell.precision)
        make = {"training": Update, "encoder": encoder_training, "inference": inference}[cell.workload]
        shared: dict[int, Any] = {}
        for each in self.models:
            if id(each.model) not in shared:
                shared[id(each.model)] = make(each.model, cell.batch, cell.time)
        self.tried = try_out({each.name: each.prepared(shared[id(each.model)]) for each in self.models}, device)
        for each in self.models:
            if each.name in self.tried.memory:
                thing = shared[id(each.model)]
                held = thing.held_bytes() if isinstance(thing, Update) else bytes_of(each.model.model.parameters())
                self.tried.memory[each.name] += held
        return self.tried.things | products

    def _causal_things(self, cell: Cell) -> dict[str, Callable[[], object]]:
        """Of the causal archs at batch 1, and of Transformer-XL, which always takes part."""
        archs, settings = self.settings.causal_archs, self.settings
        is_tiny = all(name.endswith("_tiny") for name in archs)
        baseline = "transformer_xl_tiny" if is_tiny else TRANSFORMER_XL
        dictionary = a_dictionary(1000 if is_tiny else WORDS)
        names = dict.fromkeys([baseline, *archs])
        self.causal = {name: build_causal(name, dictionary, settings, cell.precision) for name in names}
        words = min(FREQUENT, len(dictionary))
        tokens_BT = torch.randint(5, words, (1, settings.tgt_len), device=settings.device)
        return {
            name: next_segment(model, tokens_BT, tokens_BT, settings.mem_len) for name, model in self.causal.items()
        }

    def causal_rows(self, cell: Cell, timings: Mapping[str, Timing], peak: float) -> list[dict[str, Any]]:
        """With `against` Transformer-XL, the first; `settings.mem_len` tokens are remembered."""
        lengths = (self.settings.tgt_len, self.settings.mem_len)
        rows: list[dict[str, Any]] = []
        for name, model in self.causal.items():
            pattern = CAUSAL_ARCHITECTURES[name].sublayer_pattern
            flops, timing = count_flops(pattern, model.decoder.sizes, *lengths), timings[name]
            row = {
                "model": name,
                "pattern": pattern,
                "precision": cell.precision,
                "tgt_len": lengths[0],
                "mem_len": lengths[1],
                "parameters": sum(parameter.numel() for parameter in model.parameters()),
                "flops": flops,
                "seconds": timing.as_json(),
                "share_of_peak": flops / timing.median / peak,
            }
            rows.append(row)
            first = rows[0]
            speedup, limit = first["seconds"]["median"] / timing.median, first["flops"] / flops
            row["against"] = {f"our {first['model']}": {"speedup": speedup, "limit": limit}}
        return rows


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
