"""PAR Transformer's Table 4 without scores: costs of encoders in SQuAD's inference, the paper's latencies beside."""

import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Optional

import torch

from lazyformer_fairseq.measure.bench.models import VOCAB_SIZE, OurModel, random_tokens
from lazyformer_fairseq.measure.bench.report import milliseconds
from lazyformer_fairseq.measure.bench.settings import PAPER_LATENCY, Table4Settings, check_names
from lazyformer_fairseq.measure.costs.flops import count_flops, count_parameters, sublayer_flops
from lazyformer_fairseq.measure.costs.latency import measure
from lazyformer_fairseq.measure.costs.machine import PRECISIONS, describe_machine, describe_versions
from lazyformer_fairseq.modules.networks.heads import SPAN
from lazyformer_fairseq.patterns.architectures import ARCHITECTURES
from lazyformer_fairseq.patterns.grammar import plan
from lazyformer_fairseq.patterns.kinds import EncoderSizes
from lazyformer_fairseq.report.numbers import spread, with_spread
from lazyformer_fairseq.report.page import Notes, write_page
from lazyformer_fairseq.report.tables import Table
from lazyformer_fairseq.storage.atomic import refuse_filled_folder
from lazyformer_fairseq.storage.json_files import write_json

BASELINE = "bert_base_absolute"
SPANS = "squad"  # the head's name
WARM_UP = 2


class SpanInference:
    """Span logits of one sequence; keeps the seconds that the process computed in each call, on all its threads."""

    def __init__(self, arch: str, length: int, device: str, precision: torch.dtype):
        self.model = OurModel(ARCHITECTURES[arch].options(), max(length, 512)).model
        self.model.register_classification_head(SPANS, 2, kind=SPAN)
        self.model.to(device, precision).eval()
        self.tokens_BT = random_tokens(1, length, device)
        self.seconds: list[float] = []

    @torch.inference_mode()
    def __call__(self) -> torch.Tensor:
        begin = time.process_time()
        logits, _ = self.model(self.tokens_BT, classification_head_name=SPANS, has_padding=False)
        self.seconds.append(time.process_time() - begin)
        return logits


def cost_of(arch: str, length: int) -> dict[str, int]:
    """`parameters`, with the masked-LM head, at 32,768 pieces; `flops` of a sequence through encoder and span head.

    `attention_flops` are those of the products of n x n numbers; the projections are no part of them.
    """
    row = ARCHITECTURES[arch]
    widths = (row.encoder_embed_dim, row.encoder_ffn_embed_dim, row.encoder_attention_heads)
    sizes = EncoderSizes(VOCAB_SIZE, *widths, row.max_positions or 512, row.relative_position_buckets)
    flops = count_flops(row.sublayer_pattern, sizes, length, predicted=0) + 2 * length * row.encoder_embed_dim * 2
    products = (sublayer_flops(planned, sizes, length) for planned in plan(row.sublayer_pattern))
    attention = sum(each.scores + each.values for each in products)
    parameters = count_parameters(row.sublayer_pattern, sizes)
    return {"parameters": parameters, "flops": flops, "attention_flops": attention}


def table_4_to(folder: Path, settings: Table4Settings, device: str, precision: str) -> str:
    """Measures all in turn, writes ``table4.json`` and ``table4.md``, and returns what the latter holds.

    Raises:
        UserError: there is no such arch, or the folder is not empty.
    """
    refuse_filled_folder(folder)
    check_names("--arch", settings.archs, tuple(ARCHITECTURES))
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(settings.threads or before)
        rows = _measure(settings, device, precision)
        machine = {**describe_machine(device), **describe_versions()}
    finally:
        torch.set_num_threads(before)
    rounds = rows[0]["seconds"]["n"]
    facts = {**machine, "precision": precision, "tokens": settings.tokens, "rounds": rounds}
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / "table4.json", {**facts, "rows": rows})
    notes = Notes([f"{name}: {value}" for name, value in facts.items()])
    return write_page([notes, _table(rows)], folder, "table4").strip()


def _measure(settings: Table4Settings, device: str, precision: str) -> list[dict[str, Any]]:
    """A row a model: costs, samples, and times as a share of BERT's, round by round."""
    names = list(dict.fromkeys([*settings.archs, BASELINE]))
    things = {name: SpanInference(name, settings.tokens, device, PRECISIONS[precision]) for name in names}
    how = {"device": device, "description": "table 4", "seconds": settings.budget}
    timings = measure(things, settings.rounds, WARM_UP, **how)
    clocks: dict[str, Mapping[str, tuple[float, ...]]] = {"": {name: timings[name].samples for name in names}}
    if device == "cpu":
        clocks["processor_"] = {name: tuple(things[name].seconds[WARM_UP:]) for name in names}
    flops = cost_of(BASELINE, settings.tokens)["flops"]
    rows = []
    for name in names:
        cost = cost_of(name, settings.tokens)
        row = {"arch": name, "pattern": ARCHITECTURES[name].sublayer_pattern, **cost}
        row |= {
            "buckets": ARCHITECTURES[name].relative_position_buckets,
            "share_of_bert_by_flops": cost["flops"] / flops,
        }
        for clock, samples in clocks.items():
            ratios = [one / other for one, other in zip(samples[name], samples[BASELINE], strict=True)]
            row[f"{clock}seconds"] = {**spread(samples[name]), "samples": list(samples[name])}
            row[f"{clock}share_of_bert"] = spread(ratios)
        rows.append({**row, "paper_ms_on_a100": PAPER_LATENCY.get(name)})
    return rows


COLUMNS: dict[str, Callable[[dict[str, Any]], str]] = {
    "model": lambda row: row["arch"],
    "pattern": lambda row: f"`{row['pattern']}`",
    "parameters": lambda row: f"{row['parameters'] / 1e6:.1f}M",
    "GFLOPs": lambda row: f"{row['flops'] / 1e9:.1f}",
    "of attention": lambda row: f"{row['attention_flops'] / 1e9:.1f}",
    "of BERT's": lambda row: f"{row['share_of_bert_by_flops']:.2f}",
    "ms": lambda row: milliseconds(row["seconds"]),
    "of BERT's ms": lambda row: with_spread(row["share_of_bert"], 2),
    "processor's ms": lambda row: milliseconds(row["processor_seconds"]),
    "of BERT's processor's ms": lambda row: with_spread(row["processor_share_of_bert"], 2),
    "A100, ms (paper)": lambda row: row["paper_ms_on_a100"] or "",
    "of BERT's (paper)": lambda row: _paper_share(row["paper_ms_on_a100"]),
}


def _paper_share(latency: Optional[str]) -> str:
    return f"{float(latency.rstrip('+')) / float(PAPER_LATENCY[BASELINE]):.2f}" if latency else ""


def _table(rows: list[dict[str, Any]]) -> Table:
    """A model a line; without the processor's time for a GPU."""
    shown = [name for name in COLUMNS if "processor" not in name or "processor_seconds" in rows[0]]
    return Table("", [{name: COLUMNS[name](row) for name in shown} for row in rows], left=("pattern",))
