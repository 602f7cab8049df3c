"""One benchmark of models, from its settings to the files in its folder.

For each precision, length and workload, all models take turns, round after round: an update, the encoder alone in
training, and inference; causal language models beside Transformer-XL, as in PAR Transformer's Table 6. Of the results
come tables on the screen, in Markdown and in CSV, and drawings of speed-up against length.
"""

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from matplotlib.ticker import LogLocator
from torch import Tensor, nn
from torch.nn import functional as F

from lazyformer_fairseq.evaluation.bench import models
from lazyformer_fairseq.evaluation.bench.settings import REMEMBERED, SEGMENT, WORKLOADS, BenchSettings
from lazyformer_fairseq.evaluation.costs import latency
from lazyformer_fairseq.evaluation.costs.flops import makers_of_blocks
from lazyformer_fairseq.evaluation.costs.machine import PRECISIONS, record, trade_name
from lazyformer_fairseq.modules.compiled import compiled
from lazyformer_fairseq.report.figures import handles, picture, styles
from lazyformer_fairseq.report.numbers import spread, with_spread
from lazyformer_fairseq.report.page import Block, Notes, markdown
from lazyformer_fairseq.report.tables import Table, write_csv
from lazyformer_fairseq.storage.atomic import atomic_folder
from lazyformer_fairseq.storage.json_files import write_json

SHARE_TO_TRY, TO_TRY = 0.5, 5.0  # of a cell's budget, and seconds at least; what was not called by then is left out
FREQUENT = 19_997  # ids below are in the adaptive softmax's first band; the FLOPs count only that band


def bench_to(folder: Path, settings: BenchSettings, command: Sequence[str]) -> str:
    """Measures, writes `results.json`, `results.csv`, `results.md` and pictures, and returns the tables.

    Args:
        folder: created, complete, after all measurements.
        command: as it was given, for the record.

    Raises:
        UserError: the folder is not empty, or cannot be created.
    """
    torch.manual_seed(1)
    results = {**record(settings, command), **run_bench(settings)}
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
    for cell, timings in latency.measure_in_turn(bench.cells, bench.things_of, *how):
        peak = latency.matrix_peak(timings)
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
    """Builds what a benchmark measures: the models of one precision at a time, encoders and then causal ones.

    Attributes:
        cells: all, in order.
        models: of the present precision.
        tried: of the present cell.
    """

    models: list[models.OnBackEnd]
    tried: latency.Tried

    def __init__(self, settings: BenchSettings):
        self.settings = settings
        self.built = None
        self.cells = [cell for precision in settings.precisions for cell in self._cells(precision)]

    def _cells(self, precision: str) -> Iterator[Cell]:
        workloads = self.settings.workloads if self.settings.encoders else ()  # else baselines would run alone
        for length, workload in itertools.product(self.settings.lengths, workloads):
            batch = max(1, self.settings.tokens // length)
            for size in sorted({1, batch} if workload == "inference" else {batch}):
                yield Cell(workload, precision, length, size)
        if self.settings.causal_archs:
            yield Cell("causal", precision, SEGMENT, 1)

    def things_of(self, cell: Cell) -> latency.Things:
        """Of a cell, matrix products among them; the cells of a precision follow one another."""
        self.tried, device = latency.Tried({}, {}, {}), self.settings.device  # what it held of a GPU's memory goes
        is_causal = cell.workload == "causal"
        if (cell.precision, is_causal) != self.built:
            self.models = []
            self.built = (cell.precision, is_causal)
            self.models = (models.build_causal_models if is_causal else models.build_models)(
                self.settings, cell.precision
            )
        once = {id(each.model): each.model for each in self.models}
        shared = {key: CALLS[cell.workload](model, cell.batch, cell.time) for key, model in once.items()}
        things = {each.name: each.prepared(shared[id(each.model)]) for each in self.models}
        budget = self.settings.budget and self.settings.budget / len(self.cells)
        self.tried = latency.try_out(things, device, budget and max(TO_TRY, SHARE_TO_TRY * budget))
        for each in self.models:
            if each.name in self.tried.memory:
                call = shared[id(each.model)]
                if isinstance(call, Update):
                    held = call.held_bytes()
                else:
                    held = bytes_of(each.model.model.parameters())
                self.tried.memory[each.name] += held
        return self.tried.things | latency.matrix_products(device, PRECISIONS[cell.precision])


class Update:
    """Forward, cross-entropy at 15% of the positions, backward, and a step of torch's fused AdamW.

    In half precision the optimizer updates weights in single precision and copies them back, as fairseq does. fp16
    scales its loss by a constant: overflowing gradients do not change the time.
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
        # A tiny rate: the time must not depend on how far a model has learned random tokens.
        self.optimizer = torch.optim.AdamW(self.masters, lr=1e-9, fused=True)
        if dtype == torch.float16:
            self.scale = self.LOSS_SCALE
        else:
            self.scale = 1.0
        self.batch = models.random_batch(batch, time, device)

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


def encoder_training(model: models.BenchModel, batch: int, time: int) -> Callable[[], None]:
    """Forward and backward of the encoder, from a given gradient."""
    weight = next(model.model.parameters())
    tokens_BT = models.random_tokens(batch, time, weight.device)
    gradient_BTC = torch.randn(batch, time, model.sizes.embed_dim, device=weight.device, dtype=weight.dtype)

    def forward_and_backward() -> None:
        model.model.train()
        model.features(tokens_BT).backward(gradient_BTC)
        model.model.zero_grad(set_to_none=True)

    return forward_and_backward


def inference(model: models.BenchModel, batch: int, time: int) -> Callable[[], Tensor]:
    """Features of a batch."""
    tokens_BT = models.random_tokens(batch, time, next(model.model.parameters()).device)

    @torch.inference_mode()
    def encode() -> Tensor:
        model.model.eval()
        return model.features(tokens_BT)

    return encode


def causal_inference(model: models.BenchModel, batch: int, time: int) -> Callable[[], object]:
    """Scores of a segment of frequent words, behind a full memory."""
    words = model.sizes.vocab_size
    device = next(model.model.parameters()).device
    tokens_BT = torch.randint(5, min(FREQUENT, words), (batch, time), device=device)
    return latency.next_segment(model.model, tokens_BT, tokens_BT, REMEMBERED)


# By workload: what makes a call from a model, a batch and a length.
CALLS = {"training": Update, "encoder": encoder_training, "inference": inference, "causal": causal_inference}


def bytes_of(tensors) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def _loss(logits_MV: Tensor, targets_M: Tensor) -> Tensor:
    return F.cross_entropy(logits_MV.float(), targets_M)


def describe(each: models.OnBackEnd, cell: Cell, timing: latency.Timing, memory: int, peak: float) -> dict[str, Any]:
    """The measurements, and what follows from them; `flops` are those that this back end performs.

    Args:
        memory: peak bytes.
        peak: FLOP/s of the fastest matrix product in the same rounds.
    """
    training = WORKLOADS[cell.workload][1]
    if cell.workload == "training":
        predicted = models.predicted_words(cell.batch, cell.time)
    else:
        predicted = 0
    flops = each.count_flops(cell.batch, cell.time, training, predicted)
    used = each.back_end_used(cell.batch, cell.time, training)
    return {
        "model": each.called,
        "pattern": each.model.pattern,
        "sizes": [getattr(each.model.sizes, name) for name in ("ffn_embed_dim", "embed_dim", "num_heads")],
        "back_end_used": sorted({used(maker) for maker in makers_of_blocks(each.model.pattern)}),
        **{name: getattr(each, name) for name in ("back_end", "buckets", "baseline")},
        "parameters": each.model.parameters,
        **{"flops": flops, "seconds": timing.as_json(), "memory_bytes": memory},
        "tokens_per_second": cell.batch * cell.time / timing.median,
        **{"flops_per_second": flops / timing.median, "share_of_peak": flops / timing.median / peak},
    }


def add_speedups(rows: list[dict[str, Any]]) -> None:
    """Adds `against` to each row of a cell: how the row compares with each baseline, by name.

    `speedup` is the ratio of the medians, `low` and `high` the quartiles of the `n` ratios round by round, `limit` the
    ratio of the FLOPs, `memory` that of the memory (below 1: less). Our own BERTs run on their fastest back end,
    `back_end`, with the row's own relative bias; the others have none.
    """
    for row in rows:
        row["against"] = {}
        for name in models.BASELINES:
            candidates = [other for other in rows if other["baseline"] == name]
            if name in models.BIASED:
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


# A speed-up's column header names its baseline; here it is in full.
EXPLAINED = {
    models.FAIRSEQ: "fairseq's RobertaModel by its arch roberta_base, as shipped: dropout and attention dropout 0.1",
    models.HUGGING_FACE: "Hugging Face's BertModel, attn_implementation=sdpa, dropout 0.1, attention dropout 0; its "
    "masked-LM head is given the masked positions alone",
    models.OURS: "bert_base --attention-dropout 0 with the row's own relative bias, on the back end that was fastest "
    "in this cell, which is named",
    models.REGISTERED: "--baseline-arch among the models: bert_base with attention dropout 0.1, as LazyFormer's BERT",
    models.TRANSFORMER_XL: "transformer_xl_base; beside archs that end in _tiny, transformer_xl_tiny",
}
LEGEND = """\
Medians, quartiles in brackets, or how few rounds the time allowed, n. "x NAME": how many times faster than NAME, by the
medians; in brackets the quartiles of the ratios round by round; "limit" is what the FLOPs alone allow. FLOPs are those
that the back end does, "of peak" is their share of the fastest matrix product in the same rounds. MB (10^6 bytes):
weights, optimizer and the highest moment of a call."""

# By header, what the cell of a row holds.
CELLS = {
    "model": lambda row: row["model"],
    "(W, H, N)": lambda row: str(tuple(row["sizes"])),
    "bias": lambda row: row["buckets"] or "none",
    "back end": lambda row: (
        f"auto: {', '.join(row['back_end_used'])}" if row["back_end"] == "auto" else row["back_end"]
    ),
    "parameters": lambda row: f"{row['parameters']:,}",
    "ms": lambda row: milliseconds(row["seconds"]),
    "tokens/s": lambda row: f"{row['tokens_per_second']:,.0f}",
    "GFLOPs": lambda row: f"{row['flops'] / 1e9:,.4g}",
    "GFLOP/s": lambda row: f"{row['flops_per_second'] / 1e9:,.0f}",
    "of peak": lambda row: f"{row['share_of_peak']:.0%}",
    "MB": lambda row: f"{row['memory_bytes'] / 1e6:,.0f}",
}


def page(results: dict[str, Any]) -> list[Block]:
    """A table for each cell, and an explanation of the baselines."""
    blocks = [block for cell in results["cells"] for block in _cell_page(cell)]
    if len(results["cells"]) < results["cells_planned"]:
        blocks.append("The run was stopped before all was measured.")
    sizes = f"Baselines of encoders have the sizes of {results['settings']['baseline_arch']}:"
    beside = _baselines(results["cells"])
    return [*blocks, LEGEND, sizes, Notes([f"{name}: {EXPLAINED[name]}" for name in beside])]


def _baselines(cells: Sequence[dict[str, Any]]) -> list[str]:
    """Those that something was compared with."""
    return [name for name in models.BASELINES if any(name in row["against"] for cell in cells for row in cell["rows"])]


def _cell_page(cell: dict[str, Any]) -> list[Block]:
    if cell["rows"]:
        rounds = len(cell["rows"][0]["seconds"]["samples"])
    else:
        rounds = 0
    title = (
        f"{WORKLOADS[cell['workload']][0]}: n = {cell['time']}, batch {cell['batch']}, {cell['precision']}; "
        f"{rounds} round{'s' * (rounds != 1)}; fastest matrix product {cell['matrix_peak'] / 1e9:,.0f} GFLOP/s"
    )
    speedups = {f"x {name}": name for name in _baselines([cell])}
    rows = [
        {
            **{header: value_of(row) for header, value_of in CELLS.items()},
            **{header: _speedup(row, name) for header, name in speedups.items()},
        }
        for row in cell["rows"]
    ]
    left_out = "\n".join(f"left out: {name} ({reason})" for name, reason in cell["left_out"].items())
    if rows:
        tables = [Table("", rows, left=("back end", *speedups))]
    else:
        tables = []
    return [title, *tables, *([left_out] if left_out else [])]


def milliseconds(seconds: dict[str, Any]) -> str:
    """Median with quartiles."""
    times = {key: 1000 * seconds[key] for key in ("median", "low", "high") if key in seconds}
    lowest = min(times.values())
    return with_spread({**seconds, **times}, 0 if lowest >= 100 else 1 if lowest >= 10 else 2)


def _speedup(row: dict[str, Any], baseline: str) -> str:
    beside = row["against"].get(baseline)
    if beside is None:
        return "not measured"
    if baseline in models.BIASED:
        kernel = f", {beside['back_end']}"
    else:
        kernel = ""
    return f"{with_spread({**beside, 'median': beside['speedup']}, 2)}, limit {beside['limit']:.2f}{kernel}"


def csv_rows(results: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """One flat row for each row of each cell."""
    for cell in results["cells"]:
        for row in cell["rows"]:
            flat = {key: cell[key] for key in ("workload", "precision", "time", "batch", "matrix_peak")}
            flat |= {key: value for key, value in row.items() if not isinstance(value, (dict, list))}
            flat |= {key: " ".join(map(str, row[key])) for key in ("back_end_used", "sizes")}
            flat |= {f"seconds_{key}": value for key, value in row["seconds"].items() if key != "samples"}
            for name, beside in row["against"].items():
                flat |= {f"{key} against {name}": value for key, value in beside.items()}
            yield flat


def draw_all(results: dict[str, Any], folder: Path) -> None:
    """Draws a picture for each kind of work with encoders and each precision that was measured."""

    def kind_of(cell: dict[str, Any]) -> str:
        if cell["batch"] == 1:
            alone = "latency"
        else:
            alone = "throughput"
        return f"{alone if cell['workload'] == 'inference' else cell['workload']}, {cell['precision']}"

    cells = [cell for cell in results["cells"] if cell["workload"] != "causal"]
    for kind, same in itertools.groupby(sorted(cells, key=kind_of), key=kind_of):
        name = f"speedup_{kind.replace(', ', '_')}.png"
        measured = list(same)
        if _baselines(measured):  # none where nothing fitted
            draw_speedups(measured, f"{kind}, {trade_name(results['machine']['device'])}", folder / name)


def draw_speedups(measured: Sequence[dict[str, Any]], title: str, path: Path) -> None:
    """Speed-up against n (LazyFormer, Figure 3): a panel for each baseline, a line for each model, back end and bias.

    Bars are the quartiles of the ratios round by round; a thin line without marks shows what the FLOPs alone allow.
    """
    names = _baselines(measured)
    lengths = sorted({cell["time"] for cell in measured})
    style_of = styles(dict.fromkeys(label for name in names for label in _lines(measured, name)))
    panels = {"panel": (4.6, 4.4), "sharex": True, "sharey": True, "title": title, "legend": handles(style_of)}
    with picture(path, columns=len(names), **panels) as (axes,):
        for name, axis in zip(names, axes, strict=True):
            for label, points in _lines(measured, name).items():
                style, (times, beside) = style_of[label], zip(*points, strict=True)
                axis.plot(times, [one["limit"] for one in beside], color=style["color"], alpha=0.5, linewidth=0.8)
                for time, one in points:
                    if "low" in one:
                        axis.vlines(time, one["low"], one["high"], color=style["color"], alpha=0.6)
                axis.plot(times, [one["speedup"] for one in beside], markersize=5, label=label, **style)
            axis.axhline(1, color="0.4", linewidth=0.8)
            axis.set_title(f"against {name}", fontsize=10)
            axis.set_xscale("log", base=2)
            axis.set_xticks(lengths, lengths)
            axis.minorticks_off()
            axis.set_xlabel("tokens a sequence, n")
        axes[0].set_yscale("log", base=2)
        axes[0].yaxis.set_major_locator(LogLocator(base=2, subs=(1, 1.25, 1.5, 1.75)))
        axes[0].yaxis.set_major_formatter("{x:g}")
        axes[0].set_ylabel("speed-up (thin: what FLOPs allow)")


def _lines(measured: Sequence[dict[str, Any]], baseline: str) -> dict[str, list[tuple[int, dict[str, Any]]]]:
    """Points of each model that is no baseline, by model, back end and bias: (n, how it compares)."""
    found: dict[str, list] = {}
    for cell in sorted(measured, key=lambda cell: cell["time"]):
        for row in cell["rows"]:
            if row["baseline"] is None and baseline in row["against"]:
                if row["buckets"]:
                    bias = f"{row['buckets']} buckets"
                else:
                    bias = "no bias"
                points = found.setdefault(f"{row['model']}, {row['back_end']}, {bias}", [])
                points.append((cell["time"], row["against"][baseline]))
    return found
